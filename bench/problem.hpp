// One GEMM with a program: its operands on the device, what its outputs should be, and the measurement of a kernel on it.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "coda/dispatch.hpp"
#include "coda/registry.h"
#include "device.hpp"
#include "library.hpp"
#include "programs.hpp"
#include "reduce/reduce.h"

namespace coda::bench {

struct Case {
  Program const* program = nullptr;
  std::string layout, dtype = "bf16";
  std::int64_t m = 0, n = 0, k = 0;
  std::int64_t head_dim = 0;  // of a program that rotates, whose heads turn as a whole
  std::string kernel;  // forced, if not empty
  bool all_kernels = false;
  int swizzle = 0, raster = 0;  // as in GemmArguments
  int rounds = 15;              // 0: check, do not time
  std::uint64_t seed = 0;
  std::int64_t workspace_mib = 64;

  std::int64_t gemm_n() const { return n * program->halves(); }
  double flops() const { return 2.0 * double(m) * double(gemm_n()) * double(k); }
  Type type() const { return dtype == "bf16" ? Type::kBf16 : Type::kFp16; }
  Rounding rounding() const { return type() == Type::kBf16 ? kRoundBf16 : kRoundFp16; }
};

struct Errors {
  double norm = 0;     // Frobenius norm of the error over that of the result
  double element = 0;  // largest error of an element, over its own size plus the root mean square of all: a single wrong one shows
};

struct Result {
  struct Output {
    char const* name;
    Errors error;
    double bound;
    bool right() const { return error.norm <= bound && error.element <= 2 * bound; }  // NaN is not
  };
  KernelInfo const* kernel = nullptr;
  std::vector<Output> outputs;
  unsigned long long not_finite = 0;  // elements of any output, NaN where nothing was written
  std::size_t overrun = 0;            // numbers written behind the end of the partial sums
  bool reproducible = false;          // a second launch gave the same bits
  // Only with rounds > 0:
  std::vector<double> coda_rounds, library_rounds;  // milliseconds
  double coda_ms = 0, library_ms = 0, ratio = 0;    // ratio: of the speeds, above 1 if coda is faster

  // Over the outputs, relative to their bounds; NaN is worst.
  Output const& worst() const {
    return *std::max_element(outputs.begin(), outputs.end(), [](Output const& a, Output const& b) {
      return !std::isnan(a.error.norm) && !(b.error.norm / b.bound <= a.error.norm / a.bound);
    });
  }
  bool passed() const {
    bool const right = std::all_of(outputs.begin(), outputs.end(), [](Output const& o) { return o.right(); });
    return right && not_finite == 0 && overrun == 0 && reproducible;
  }
};

inline double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  std::size_t const n = v.size();
  return n == 0 ? 0 : n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

// Shapes and strides, without memory: enough to choose a kernel.
inline GemmArguments shape_of(Case const& c) {
  GemmArguments g;
  g.m = c.m, g.n = c.gemm_n(), g.k = c.k;
  g.a.ld = c.layout == "nt" ? c.m : c.k;
  g.b.ld = c.layout == "tn" ? c.k : g.n;
  g.b.pair_stride = c.program->halves() == 2 ? c.n * g.b.ld : 0;
  if (c.program->rotates()) {
    // Four sequences behind each other, in heads of queries, keys and values: the values, a sixth as in grouped attention, stay.
    std::int64_t const heads = c.n / c.head_dim;
    g.rotation.head_dim = g.rotation.rotary_dim = c.head_dim;
    g.rotation.columns = (heads - heads / 6) * c.head_dim;
    g.rotation.query_columns = ceil_div(heads, 2) * c.head_dim;
    g.rotation.period = ceil_div(c.m, 4);
  }
  g.swizzle = c.swizzle, g.raster = c.raster;
  return g;
}

// The columns of the GEMM that call number `i` of the program sees; both are the same if it sees only one.
struct Columns {
  std::int64_t first, second;
};
inline Columns columns_of(Case const& c, std::int64_t i) {
  switch (c.program->pairing) {
    case Pairing::kHalves: return {i, i + c.n};
    case Pairing::kAdjacent: return {2 * i, 2 * i + 1};
    case Pairing::kHeadHalves: {
      std::int64_t const half = c.head_dim / 2, first = i / half * c.head_dim + i % half;
      return {first, first + half};
    }
    case Pairing::kNone: break;
  }
  return {i, i};
}

constexpr int kSamples = 16;  // rows of the result that are checked, and columns of the sums over all rows

// acc[r][n] = sum_k a[r][k] B[n, k] in fp64, for B[n, k] = b[n stride_n + k stride_k].
inline std::vector<double> accumulate(std::vector<std::vector<double>> const& a, std::vector<std::uint16_t> const& b, Type type,
                                      std::int64_t n, std::int64_t stride_n, std::int64_t stride_k) {
  constexpr int kRows = kSamples, kColumns = 32;  // 32 columns are a cache line of an N-major B; rows are innermost, so that they vectorise
  std::size_t const rows = a.size(), k = a[0].size();
  if (rows > kRows) throw Error(Error::kFailed, "accumulate() takes too many rows");
  std::vector<double> by_k(k * kRows), acc(rows * std::size_t(n));
  for (std::size_t r = 0; r < rows; ++r)
    for (std::size_t i = 0; i < k; ++i) by_k[i * kRows + r] = a[r][i];
  std::vector<float> const& values = values_of(type);
  std::atomic<std::int64_t> next{0};
  auto const work = [&] {
    for (std::int64_t begin; (begin = next.fetch_add(kColumns)) < n;) {
      int const columns = int(std::min<std::int64_t>(kColumns, n - begin));
      double sums[kColumns][kRows] = {};
      for (std::size_t i = 0; i < k; ++i) {
        std::uint16_t const* p = b.data() + begin * stride_n + std::int64_t(i) * stride_k;
        for (int c = 0; c < columns; ++c) {
          double const value = values[p[c * stride_n]];
          for (int r = 0; r < kRows; ++r) sums[c][r] += by_k[i * kRows + r] * value;
        }
      }
      for (std::size_t r = 0; r < rows; ++r)
        for (int c = 0; c < columns; ++c) acc[r * std::size_t(n) + std::size_t(begin + c)] = sums[c][r];
    }
  };
  std::vector<std::thread> threads;
  for (unsigned i = 1; i < std::thread::hardware_concurrency(); ++i) threads.emplace_back(work);
  work();
  for (std::thread& t : threads) t.join();
  return acc;
}

class Problem {
 public:
  Problem(Case const& c, int sm_count, std::size_t l2_bytes) : case_(c), program_(*c.program), type_(c.type()) {
    sets_.push_back(std::make_unique<Set>(*this, 0, sm_count));
    // Inputs that stay in L2 would flatter both sides: take turns over sets that together do not fit.
    if (std::size_t const bytes = sets_[0]->bytes(); bytes <= l2_bytes && c.rounds > 0)
      for (std::size_t i = 1; i < std::min<std::size_t>(std::max<std::size_t>(2 * l2_bytes / bytes + 1, 2), 64); ++i)
        sets_.push_back(std::make_unique<Set>(*this, i, sm_count));
    rows_ = choose(case_.m);
    compute_expected();
    if (program_.sums_columns()) compute_expected_columns();
    if (c.rounds > 0) prepare_library();
  }

  Result measure(KernelInfo const& kernel) {
    Result result;
    result.kernel = &kernel;
    for (auto& set : sets_) set->use(kernel);
    verify(kernel, result);
    if (case_.rounds > 0) time(kernel, result);
    return result;
  }

  std::size_t input_sets() const { return sets_.size(); }
  int library_algorithms() const { return library_ ? library_->algorithms() : 0; }
  double library_error() const { return library_error_; }

 private:
  struct Tensor {
    Buffer buffer;
    Type type;
  };

  // The partial sums of one sink, [lines][ld].
  struct Partials {
    std::size_t sink;
    bool of_rows;
    std::int64_t lines, ld, planes;
    Buffer buffer;
    std::int64_t plane() const { return std::int64_t(buffer.bytes() / sizeof(float)) / planes; }  // from one plane to the next
  };

  // The operands of one call, and the memory behind them.
  struct Set {
    Case const& c;
    Program const& program;
    Type type;
    GemmArguments g;
    Tensor a, b, library_d;
    std::vector<Tensor> loads, sinks;  // no more than slots: some have no memory, or share it
    std::vector<Partials> partials;    // as large as the kernel in use needs
    Buffer targets, references;        // int64 [m]; of kExponentials, fp32 [m, groups]

    Set(Problem const& p, std::size_t number, int sm_count) : c(p.case_), program(p.program_), type(p.type_), g(shape_of(c)) {
      g.sm_count = sm_count;
      std::uint64_t seed = mix(mix(c.seed) + number);
      a = random(c.m * c.k, type, seed++, 0, 1);
      b = random(g.n * c.k, type, seed++, 0, 1 / std::sqrt(double(c.k)));
      targets = Buffer(std::size_t(c.m) * sizeof(std::int64_t));
      std::vector<std::int64_t> columns(static_cast<std::size_t>(c.m));
      for (std::int64_t m = 0; m < c.m; ++m) columns[std::size_t(m)] = target_of(m);
      check(cudaMemcpy(targets.data(), columns.data(), targets.bytes(), cudaMemcpyHostToDevice), "copying targets to the device");
      g.a.data = a.buffer.data();
      g.b.data = b.buffer.data();
      for (std::size_t i = 0; i < program.loads.size(); ++i) {
        Slot const& slot = program.loads[i];
        g.loads[i] = i > 0 && slot.shape == Shape::kSecondHalf ? second_half(g.loads[i - 1]) : bind(slot, loads);
        switch (slot.shape) {
          case Shape::kScalar:
          case Shape::kTarget:
          case Shape::kSecondHalf: break;
          case Shape::kCosine:
          case Shape::kSine: fill_table(loads.back().buffer, mix(mix(c.seed) + number), slot.shape == Shape::kSine); break;
          default: fill(loads.back().buffer, loads.back().type, seed++, slot.mean, slot.deviation);
        }
      }
      for (std::size_t i = 0; i < program.sinks.size(); ++i) {
        Slot const& slot = program.sinks[i];
        g.sinks[i] = i > 0 && slot.shape == Shape::kSecondHalf ? second_half(g.sinks[i - 1]) : bind(slot, sinks);
      }
    }

    static Tensor tensor(std::int64_t elements, Type type) { return {Buffer(std::size_t(elements) * size_of(type)), type}; }
    static Tensor random(std::int64_t elements, Type type, std::uint64_t seed, double mean, double deviation) {
      Tensor t = tensor(elements, type);
      fill(t.buffer, type, seed, mean, deviation);
      return t;
    }

    // Both tables are made from the same angles.
    static void fill_table(Buffer const& buffer, std::uint64_t seed, bool sine) {
      std::vector<float> values(buffer.bytes() / sizeof(float));
      for (std::size_t i = 0; i < values.size(); ++i) {
        double const angle = 8 * std::atan(1) * double(mix(seed ^ mix(i)) >> 11) * 0x1p-53;
        values[i] = float(sine ? std::sin(angle) : std::cos(angle));
      }
      check(cudaMemcpy(buffer.data(), values.data(), buffer.bytes(), cudaMemcpyHostToDevice), "copying a table to the device");
    }

    // Allocates what a slot needs. Partial sums get the memory of their totals here, their own in use().
    Resource bind(Slot const& slot, std::vector<Tensor>& owner) const {
      auto const make = [&](std::int64_t rows, std::int64_t columns, Type t) {
        owner.push_back(tensor(rows * columns, t));
        Resource r;
        r.data = owner.back().buffer.data(), r.ld = columns, r.fp32 = t == Type::kFp32;
        r.pair_stride = program.halves() == 2 ? c.n : 0;
        return r;
      };
      switch (slot.shape) {
        case Shape::kScalar: {
          Resource r;
          r.value = slot.mean;
          return r;
        }
        case Shape::kPerColumn: return make(1, g.n, type);
        case Shape::kColPartial:
        case Shape::kPerColumnFp32: return make(1, g.n, Type::kFp32);
        case Shape::kRowPartial:
        case Shape::kPerRow: return make(c.m, 1, Type::kFp32);
        case Shape::kHalfTile: return make(c.m, c.n, type);
        case Shape::kTile: return make(c.m, g.n, type);
        case Shape::kFirstHalf: return make(c.m, 2 * c.n, type);
        case Shape::kCosine:
        case Shape::kSine: return make(g.rotation.period, g.rotation.rotary_dim / 2, Type::kFp32);
        case Shape::kPerHeadColumn: {
          Resource r = make(2, g.rotation.head_dim, Type::kFp32);
          r.second = static_cast<float const*>(r.data) + g.rotation.head_dim;
          return r;
        }
        case Shape::kTarget: {
          Resource r;
          r.data = targets.data();
          return r;
        }
        case Shape::kSelected: {
          Resource r = make(2, c.m, Type::kFp32);
          r.pair_stride = c.m, r.second = targets.data(), r.columns = g.n;
          return r;
        }
        case Shape::kSoftmax: return make(program.planes - 1, c.m, Type::kFp32);
        case Shape::kExponentials: return make(c.m, g.n, Type::kFp16);
        case Shape::kSecondHalf: break;
      }
      throw Error(Error::kFailed, std::string("the slot ") + slot.name + " of " + program.name + " follows no first half");
    }
    Resource second_half(Resource first) const {
      first.data = static_cast<char*>(first.data) + c.n * std::int64_t(size_of(type));
      return first;
    }

    std::int64_t target_of(std::int64_t row) const { return std::int64_t(mix(mix(c.seed + 1) ^ std::uint64_t(row)) % std::uint64_t(g.n)); }

    std::size_t bytes() const {
      std::size_t sum = a.buffer.bytes() + b.buffer.bytes();
      for (auto const* tensors : {&loads, &sinks})
        for (Tensor const& t : *tensors) sum += t.buffer.bytes();
      return sum;
    }

    // The number of partials depends on the kernel's tile. Behind them is room for as many tiles as a raster band can hang over the edge
    // (8 clusters of 2, less one), so that a kernel that writes there is found out and does no other harm.
    void use(KernelInfo const& kernel) {
      constexpr std::int64_t kBeyond = 16;
      partials.clear();
      for (std::size_t i = 0; i < program.sinks.size(); ++i) {
        Shape const shape = program.sinks[i].shape;
        if (shape != Shape::kRowPartial && shape != Shape::kColPartial && shape != Shape::kSoftmax) continue;
        bool const of_rows = shape != Shape::kColPartial;
        std::int64_t const planes = shape == Shape::kSoftmax ? program.planes : 1;
        std::int64_t const each = of_rows ? 1 : kernel.tile_m / kernel.partial_rows;  // lines a tile
        std::int64_t const lines = each * (of_rows ? ceil_div(g.n, kernel.tile_n) : ceil_div(c.m, kernel.tile_m)), ld = of_rows ? c.m : g.n;
        partials.push_back({i, of_rows, lines, ld, planes, tensor(planes * (lines + kBeyond * each) * ld, Type::kFp32).buffer});
        g.sinks[i].data = partials.back().buffer.data();
        g.sinks[i].ld = ld;
        if (shape != Shape::kSoftmax) continue;
        g.sinks[i].pair_stride = partials.back().plane();
        g.sinks[i].value = double(planes), g.sinks[i].columns = g.n;
        if (i + 1 == program.sinks.size() || program.sinks[i + 1].shape != Shape::kExponentials) continue;
        references = Buffer(std::size_t(c.m * ceil_div(g.n, kSoftmaxGroup)) * sizeof(float));
        g.sinks[i].second = references.data();
      }
    }

    // The kernel, and the finalisers of its partial sums: what a caller waits for.
    void run(KernelInfo const& kernel) const {
      check(kernel.launch(g), kernel.key);
      for (Partials const& p : partials) {
        auto const* values = static_cast<float const*>(p.buffer.data());
        if (p.planes > 1) {
          float* const out = sums(p.sink);
          float* const totals = p.planes > 3 ? out + 2 * c.m : nullptr;
          check(reduce::finish_softmax({values, p.plane(), p.ld, p.planes, p.lines, c.m, out, out + c.m, totals, totals + (p.planes > 3 ? c.m : 0)}, g.stream),
                "finish_softmax");
        } else if (p.of_rows) {
          // Without rstd and with a width of 1, the norm's factor is the sum itself.
          check(reduce::finish_rows({reduce::RowFinish::kCorrection, values, p.ld, p.lines, c.m, nullptr, 1, 0, sums(p.sink)}, g.stream),
                "finish_rows");
        } else {
          check(reduce::sum_groups(values, p.ld, p.lines, g.n, reduce::DType::kFp32, sums(p.sink), g.stream), "sum_groups");
        }
      }
    }

    // Numbers in the memory behind the partial sums, where poison() left none.
    std::size_t overrun() const {
      std::size_t count = 0;
      for (Partials const& p : partials) {
        std::int64_t const used = p.lines * p.ld;
        for (std::int64_t i = 0; i < p.planes; ++i) {
          std::vector<double> const beyond = read(static_cast<float const*>(p.buffer.data()) + i * p.plane() + used, p.plane() - used, Type::kFp32);
          count += std::size_t(std::count_if(beyond.begin(), beyond.end(), [](double value) { return !std::isnan(value); }));
        }
      }
      return count;
    }

    // The memory behind sink number `index`.
    Tensor const& sink(std::size_t index) const {
      std::size_t own = 0;
      for (std::size_t i = 1; i <= index; ++i) own += program.sinks[i].shape != Shape::kSecondHalf;
      return sinks[own];
    }
    float* sums(std::size_t index) const { return static_cast<float*>(sink(index).buffer.data()); }

    void poison() const {
      for (Tensor const& t : sinks) t.buffer.poison();
      for (Partials const& p : partials) p.buffer.poison();
    }

    std::vector<double> stored(Resource const& r, std::int64_t offset, std::int64_t count, std::int64_t stride = 1) const {
      Type const t = r.fp32 ? Type::kFp32 : type;
      return read(static_cast<char const*>(r.data) + offset * std::int64_t(size_of(t)), count, t, stride);
    }

    // What a load or a tile holds for one row: a single number, or one for each column. A table: one for each pair.
    std::vector<double> along_row(Slot const& slot, Resource const& r, std::int64_t row) const {
      switch (slot.shape) {
        case Shape::kScalar: return {r.value};
        case Shape::kPerColumn:
        case Shape::kPerColumnFp32: return stored(r, 0, g.n);
        case Shape::kPerRow: return stored(r, row, 1);
        case Shape::kTarget: {
          std::vector<double> all(static_cast<std::size_t>(g.n));
          all[std::size_t(target_of(row))] = 1;
          return all;
        }
        case Shape::kTile: return stored(r, row * r.ld, g.n);
        case Shape::kPerHeadColumn: {
          std::vector<double> const both = stored(r, 0, 2 * r.ld);
          std::vector<double> all;
          for (std::int64_t n = 0; n < g.n; ++n)
            all.push_back(n < g.rotation.columns ? both[std::size_t(n % r.ld + (n < g.rotation.query_columns ? 0 : r.ld))] : 1);
          return all;
        }
        case Shape::kCosine:
        case Shape::kSine: {
          std::vector<double> const turn = stored(r, row % g.rotation.period * r.ld, r.ld);
          std::vector<double> all;
          for (std::int64_t pair = 0; pair < g.n / 2; ++pair)
            all.push_back(2 * pair < g.rotation.columns ? turn[std::size_t(pair % r.ld)] : slot.shape == Shape::kCosine ? 1 : 0);
          return all;
        }
        default: return stored(r, row * r.ld, c.n);
      }
    }

    // The same for one column: a single number, or one for each row. For programs that see single columns.
    std::vector<double> along_column(Slot const& slot, Resource const& r, std::int64_t column) const {
      switch (slot.shape) {
        case Shape::kScalar: return {r.value};
        case Shape::kPerColumn:
        case Shape::kPerColumnFp32: return stored(r, column, 1);
        case Shape::kPerRow: return stored(r, 0, c.m);
        case Shape::kTarget: {
          std::vector<double> all;
          for (std::int64_t m = 0; m < c.m; ++m) all.push_back(target_of(m) == column);
          return all;
        }
        default: return stored(r, column, c.m, r.ld);
      }
    }

    // What sink number `index` holds for the chosen rows, or for the chosen columns if it sums over all rows.
    std::vector<double> results(std::size_t index, std::vector<std::int64_t> const& rows, std::vector<std::int64_t> const& columns) const {
      Slot const& slot = program.sinks[index];
      bool const partial = slot.shape == Shape::kRowPartial || slot.shape == Shape::kColPartial;
      if (slot.shape == Shape::kSelected || slot.shape == Shape::kSoftmax || slot.shape == Shape::kExponentials) return softmax_results(index, rows);
      std::vector<double> all;
      for (std::int64_t i : slot.shape == Shape::kColPartial ? columns : rows) {
        std::vector<double> const some = partial ? read(sums(index) + i, 1, Type::kFp32) : along_row(slot, g.sinks[index], i);
        all.insert(all.end(), some.begin(), some.end());
      }
      return all;
    }

    std::vector<double> softmax_results(std::size_t index, std::vector<std::int64_t> const& rows) const {
      Shape const shape = program.sinks[index].shape;
      std::vector<double> all;
      for (std::int64_t row : rows) {
        if (shape != Shape::kExponentials) {
          for (int i = 0; i < (shape == Shape::kSoftmax ? program.planes - 1 : 2); ++i) all.push_back(read(sums(index) + i * c.m + row, 1, Type::kFp32)[0]);
          continue;
        }
        std::int64_t const groups = ceil_div(g.n, kSoftmaxGroup);
        std::vector<double> const e = read(static_cast<std::uint16_t const*>(g.sinks[index].data) + row * g.n, g.n, Type::kFp16);
        std::vector<double> const reference = read(static_cast<float const*>(references.data()) + row * groups, groups, Type::kFp32);
        double const lse = read(sums(index - 1) + row, 1, Type::kFp32)[0];
        for (std::size_t n = 0; n < e.size(); ++n)
          all.push_back(e[n] * std::exp2(reference[n / kSoftmaxGroup] - kExponentialShift) * std::exp(-lse));
      }
      return all;
    }
  };

  // Of `extent` rows or columns the first, the last, and some between, in another place of the tile each.
  std::vector<std::int64_t> choose(std::int64_t extent) const {
    std::vector<std::int64_t> chosen;
    std::int64_t const count = std::min<std::int64_t>(extent, kSamples);
    for (std::int64_t i = 0; i < count; ++i) {
      std::int64_t const begin = i * extent / count, end = (i + 1) * extent / count;
      std::uint64_t const jitter = mix(mix(case_.seed) ^ std::uint64_t(i)) % std::uint64_t(end - begin);
      chosen.push_back(i == 0 ? 0 : i == count - 1 ? extent - 1 : begin + std::int64_t(jitter));
    }
    return chosen;
  }

  std::vector<std::uint16_t> host_copy(Resource const& r, std::int64_t elements) const {
    std::vector<std::uint16_t> copy(static_cast<std::size_t>(elements));
    check(cudaMemcpy(copy.data(), r.data, copy.size() * sizeof copy[0], cudaMemcpyDeviceToHost), "copying an operand to the host");
    return copy;
  }

  // From the stored operands of the first set.
  void compute_expected() {
    Set const& set = *sets_[0];
    GemmArguments const& g = set.g;
    bool const m_major = case_.layout == "nt", b_k_major = case_.layout == "tn";
    std::vector<std::vector<double>> a;
    for (std::int64_t row : rows_) a.push_back(set.stored(g.a, row * (m_major ? 1 : g.a.ld), g.k, m_major ? g.a.ld : 1));
    acc_ = accumulate(a, host_copy(g.b, g.n * g.k), type_, g.n, b_k_major ? g.b.ld : 1, b_k_major ? 1 : g.b.ld);

    std::int64_t const calls = g.n / program_.columns;
    expected_.resize(program_.sinks.size());
    for (std::size_t r = 0; r < rows_.size(); ++r) {
      std::vector<std::vector<double>> inputs, outputs;
      for (std::size_t i = 0; i < program_.loads.size(); ++i) inputs.push_back(set.along_row(program_.loads[i], g.loads[i], rows_[r]));
      for (Slot const& slot : program_.sinks)
        outputs.emplace_back(slot.shape == Shape::kRowPartial   ? std::size_t(1)
                             : slot.shape == Shape::kSelected   ? std::size_t(2)
                             : slot.shape == Shape::kSoftmax    ? std::size_t(program_.planes - 1)
                             : slot.shape == Shape::kExponentials ? std::size_t(calls)
                             : slot.shape == Shape::kColPartial ? std::size_t(0)
                                                                : std::size_t(width(slot, program_) * calls));
      double acc[2], in[2 * kMaxResources + 1], out[2 * kMaxResources];
      // Fills acc and in for one call; returns its columns, and where `in` ends.
      auto const load = [&](std::int64_t call) {
        Columns const at = columns_of(case_, call);
        double const* row_acc = acc_.data() + std::int64_t(r) * g.n;
        acc[0] = row_acc[at.first], acc[1] = row_acc[at.second];
        double* next = in;
        for (std::size_t i = 0; i < inputs.size(); ++i) {
          if (width(program_.loads[i], program_) == 2) {
            *next++ = inputs[i][std::size_t(at.first)];
            *next++ = inputs[i][std::size_t(at.second)];
          } else {
            *next++ = inputs[i][inputs[i].size() == 1 ? 0 : std::size_t(call)];
          }
        }
        return std::make_pair(at, next);
      };
      double head_mean = 0;
      std::vector<double> zs, qs;  // of a kSoftmax
      for (std::int64_t call = 0; call < calls; ++call) {
        std::int64_t const pairs = g.rotation.head_dim / 2;
        if (program_.term != nullptr && call % pairs == 0) {
          double sum = 0;
          for (std::int64_t i = call; i < call + pairs; ++i) {
            load(i);
            program_.term(acc, in, out, case_.rounding());
            sum += out[0];
          }
          head_mean = 2 * call < g.rotation.columns ? sum / double(g.rotation.head_dim) : -1;
        }
        auto const [at, end] = load(call);
        *end = head_mean;
        program_.reference(acc, in, out, case_.rounding());
        double const* value = out;
        for (std::size_t i = 0; i < outputs.size(); ++i) {
          Slot const& slot = program_.sinks[i];
          if (slot.shape == Shape::kRowPartial) {
            outputs[i][0] += *value++;
          } else if (slot.shape == Shape::kSelected) {
            if (call == set.target_of(rows_[r])) outputs[i] = {value[0], value[1]};
            value += 2;
          } else if (slot.shape == Shape::kSoftmax) {
            zs.push_back(*value++);
            qs.push_back(*value++);
          } else if (slot.shape == Shape::kExponentials) {
          } else if (slot.shape == Shape::kColPartial) {
            ++value;
          } else if (width(slot, program_) == 2) {
            outputs[i][std::size_t(at.first)] = *value++;
            outputs[i][std::size_t(at.second)] = *value++;
          } else {
            outputs[i][std::size_t(call)] = *value++;
          }
        }
      }
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        if (program_.sinks[i].shape == Shape::kSoftmax) {
          outputs[i] = softmax_of(zs, qs);
          outputs[i].resize(std::size_t(program_.planes - 1));
        }
        if (program_.sinks[i].shape == Shape::kExponentials)
          for (std::size_t n = 0; n < zs.size(); ++n) outputs[i][n] = std::exp(zs[n] - outputs[i - 1][0]);
      }
      for (std::size_t i = 0; i < outputs.size(); ++i) expected_[i].insert(expected_[i].end(), outputs[i].begin(), outputs[i].end());
    }
  }

  static std::vector<double> softmax_of(std::vector<double> const& z, std::vector<double> const& q) {
    double const top = *std::max_element(z.begin(), z.end());
    double sum = 0, dot = 0, total = 0, total_q = 0;
    for (std::size_t n = 0; n < z.size(); ++n) {
      double const e = std::exp(z[n] - top);
      sum += e, dot += e * q[n], total += z[n], total_q += q[n];
    }
    return {top + std::log(sum), dot / sum, total, total_q};
  }

  // The sums over all rows, for some columns. Such a program sees single columns.
  void compute_expected_columns() {
    Set const& set = *sets_[0];
    GemmArguments const& g = set.g;
    columns_ = choose(g.n);
    bool const m_major = case_.layout == "nt", b_k_major = case_.layout == "tn";
    std::vector<std::vector<double>> b;
    for (std::int64_t column : columns_) b.push_back(set.stored(g.b, column * (b_k_major ? g.b.ld : 1), g.k, b_k_major ? 1 : g.b.ld));
    std::vector<double> const acc = accumulate(b, host_copy(g.a, g.m * g.k), type_, g.m, m_major ? 1 : g.a.ld, m_major ? g.a.ld : 1);
    for (std::size_t n = 0; n < columns_.size(); ++n) {
      std::vector<std::vector<double>> inputs;
      for (std::size_t i = 0; i < program_.loads.size(); ++i) inputs.push_back(set.along_column(program_.loads[i], g.loads[i], columns_[n]));
      std::vector<double> sums(program_.sinks.size());
      for (std::int64_t m = 0; m < g.m; ++m) {
        double in[kMaxResources], out[kMaxResources];
        for (std::size_t i = 0; i < inputs.size(); ++i) in[i] = inputs[i][inputs[i].size() == 1 ? 0 : std::size_t(m)];
        program_.reference(&acc[n * std::size_t(g.m) + std::size_t(m)], in, out, case_.rounding());
        for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += out[i];
      }
      for (std::size_t i = 0; i < sums.size(); ++i)
        if (program_.sinks[i].shape == Shape::kColPartial) expected_[i].push_back(sums[i]);
    }
  }

  static Errors compare(std::vector<double> const& got, std::vector<double> const& expected) {
    double difference = 0, norm = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      difference += (got[i] - expected[i]) * (got[i] - expected[i]);
      norm += expected[i] * expected[i];
    }
    Errors errors{std::sqrt(difference / norm)};
    double const rms = std::sqrt(norm / double(expected.size()));
    for (std::size_t i = 0; i < expected.size(); ++i)
      errors.element = std::fmax(errors.element, std::fabs(got[i] - expected[i]) / (std::fabs(expected[i]) + rms));
    return errors;
  }

  void prepare_library() {
    std::vector<Library::Operands> operands;
    for (auto& set : sets_) {
      set->library_d = Set::tensor(case_.m * case_.gemm_n(), type_);
      set->library_d.buffer.poison();
      operands.push_back(library_operands(*set));
    }
    library_ = std::make_unique<Library>(type_, case_.layout, case_.m, case_.gemm_n(), case_.k, std::size_t(case_.workspace_mib) << 20);
    library_->tune(timer_, operands);
    // A comparison with a library that computed something else would be worth nothing.
    sets_[0]->library_d.buffer.poison();
    library_->run(operands[0]);
    std::vector<double> got;
    for (std::int64_t row : rows_) {
      auto const* first = static_cast<char const*>(operands[0].d) + row * case_.gemm_n() * std::int64_t(size_of(type_));
      std::vector<double> const values = read(first, case_.gemm_n(), type_);
      got.insert(got.end(), values.begin(), values.end());
    }
    library_error_ = compare(got, acc_).norm;
    if (!(library_error_ <= error_bound(type_)))
      throw Error(Error::kFailed, "cuBLASLt computed something else: its relative error is " + std::to_string(library_error_));
  }
  static Library::Operands library_operands(Set const& set) { return {set.g.a.data, set.g.b.data, set.library_d.buffer.data()}; }

  // Runs the kernel twice on the first set, each time over poisoned outputs.
  void verify(KernelInfo const& kernel, Result& result) const {
    Set const& set = *sets_[0];
    std::vector<unsigned long long> checksums[2];
    for (auto& sums : checksums) {
      set.poison();
      set.run(kernel);
      check(cudaDeviceSynchronize(), std::string("running ") + kernel.key);
      result.not_finite = 0;
      result.overrun = set.overrun();
      for (Tensor const& t : set.sinks) {
        Inspection const seen = inspect(t.buffer, t.type);
        result.not_finite += seen.not_finite;
        sums.push_back(seen.checksum);
      }
    }
    result.reproducible = checksums[0] == checksums[1];
    for (std::size_t i = 0; i < program_.sinks.size(); ++i) {
      std::vector<double> const got = set.results(i, rows_, columns_);
      result.outputs.push_back({program_.sinks[i].name, compare(got, expected_[i]), error_bound(set.sink(i).type)});
    }
  }

  void time(KernelInfo const& kernel, Result& result) {
    constexpr double kBurst = 20, kWarmUp = 500;  // milliseconds
    std::size_t coda_next = 0, library_next = 0;
    auto const coda = [&] { sets_[coda_next++ % sets_.size()]->run(kernel); };
    auto const library = [&] { library_->run(library_operands(*sets_[library_next++ % sets_.size()])); };
    int coda_calls = 1, library_calls = 1;
    auto const begin = std::chrono::steady_clock::now();
    do {
      coda_calls = calls_in(kBurst, timer_.burst(coda_calls, coda));
      library_calls = calls_in(kBurst, timer_.burst(library_calls, library));
    } while (std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count() < kWarmUp);

    std::vector<double> ratios;
    for (int round = 0; round < case_.rounds; ++round) {
      // Turns about who goes first, too: the second one inherits the heat of the first.
      double coda_ms = round % 2 ? 0 : timer_.burst(coda_calls, coda);
      double const library_ms = timer_.burst(library_calls, library);
      if (round % 2) coda_ms = timer_.burst(coda_calls, coda);
      result.coda_rounds.push_back(coda_ms);
      result.library_rounds.push_back(library_ms);
      ratios.push_back(library_ms / coda_ms);
    }
    result.coda_ms = median(result.coda_rounds);
    result.library_ms = median(result.library_rounds);
    result.ratio = median(ratios);
  }

  Case const case_;
  Program const& program_;
  Type const type_;
  Timer timer_;
  std::vector<std::unique_ptr<Set>> sets_;
  std::vector<std::int64_t> rows_, columns_;   // that are checked; columns only for sums over all rows
  std::vector<double> acc_;                    // [rows_][GEMM columns]
  std::vector<std::vector<double>> expected_;  // for each sink, its values in the order of rows_ (columns_)
  std::unique_ptr<Library> library_;
  double library_error_ = 0;
};

}  // namespace coda::bench
