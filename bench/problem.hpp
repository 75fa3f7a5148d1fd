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
  std::string kernel;  // forced, if not empty
  bool all_kernels = false;
  int swizzle = 0, raster = 0;  // as in GemmArguments
  int rounds = 15;              // 0: check, do not time
  std::uint64_t seed = 0;
  std::int64_t workspace_mib = 64;

  std::int64_t gemm_n() const { return n * program->columns; }
  double flops() const { return 2.0 * double(m) * double(gemm_n()) * double(k); }
  Type type() const { return dtype == "bf16" ? Type::kBf16 : Type::kFp16; }
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
    return right && not_finite == 0 && reproducible;
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
  g.b.pair_stride = c.program->columns == 2 ? c.n * g.b.ld : 0;
  g.swizzle = c.swizzle, g.raster = c.raster;
  return g;
}

// acc[r][n] = sum_k a[r][k] B[n, k] in fp64, for B[n, k] = b[n stride_n + k stride_k].
inline std::vector<double> accumulate(std::vector<std::vector<double>> const& a, std::vector<std::uint16_t> const& b, Type type,
                                      std::int64_t n, std::int64_t stride_n, std::int64_t stride_k) {
  constexpr int kRows = 16, kColumns = 32;  // 32 columns are a cache line of an N-major B; rows are innermost, so that they vectorise
  std::size_t const rows = a.size(), k = a[0].size();
  if (rows > kRows) throw Error(Error::kFailed, "accumulate() takes at most 16 rows");
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
    choose_rows();
    compute_expected();
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

  // The operands of one call, and the memory behind them.
  struct Set {
    Case const& c;
    Program const& program;
    Type type;
    GemmArguments g;
    Tensor a, b, library_d;
    std::vector<Tensor> loads, sinks;  // no more than slots: some have no memory, or share it
    std::vector<Buffer> partials;      // of kRowPartial slots, in order; as large as the kernel in use needs

    Set(Problem const& p, std::size_t number, int sm_count) : c(p.case_), program(p.program_), type(p.type_), g(shape_of(c)) {
      g.sm_count = sm_count;
      std::uint64_t seed = mix(mix(c.seed) + number);
      a = random(c.m * c.k, type, seed++, 0, 1);
      b = random(g.n * c.k, type, seed++, 0, 1 / std::sqrt(double(c.k)));
      g.a.data = a.buffer.data();
      g.b.data = b.buffer.data();
      for (std::size_t i = 0; i < program.loads.size(); ++i) {
        Slot const& slot = program.loads[i];
        g.loads[i] = i > 0 && slot.shape == Shape::kSecondHalf ? second_half(g.loads[i - 1]) : bind(slot, loads);
        if (slot.shape == Shape::kScalar || slot.shape == Shape::kSecondHalf) continue;
        fill(loads.back().buffer, loads.back().type, seed++, slot.mean, slot.deviation);
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

    // Allocates what a slot needs. A kRowPartial gets the memory of its sums here, that of the partials in use().
    Resource bind(Slot const& slot, std::vector<Tensor>& owner) const {
      auto const make = [&](std::int64_t elements, Type t) {
        owner.push_back(tensor(elements, t));
        return owner.back().buffer.data();
      };
      switch (slot.shape) {
        case Shape::kScalar: return {nullptr, 0, 0, slot.mean};
        case Shape::kPerColumn: return {make(g.n, type), 0, 0, 0};
        case Shape::kPerRow: return {make(c.m, Type::kFp32), 0, 0, 0};
        case Shape::kTile: return {make(c.m * c.n, type), c.n, 0, 0};
        case Shape::kPair: return {make(c.m * 2 * c.n, type), 2 * c.n, c.n, 0};
        case Shape::kFirstHalf: return {make(c.m * 2 * c.n, type), 2 * c.n, 0, 0};
        case Shape::kRowPartial: return {make(c.m, Type::kFp32), 0, 0, 0};
        case Shape::kSecondHalf: break;
      }
      throw Error(Error::kFailed, std::string("the slot ") + slot.name + " of " + program.name + " follows no first half");
    }
    Resource second_half(Resource first) const {
      first.data = static_cast<char*>(first.data) + c.n * std::int64_t(size_of(type));
      return first;
    }

    std::size_t bytes() const {
      std::size_t sum = a.buffer.bytes() + b.buffer.bytes();
      for (auto const* tensors : {&loads, &sinks})
        for (Tensor const& t : *tensors) sum += t.buffer.bytes();
      return sum;
    }

    // The number of partials depends on the kernel's tile.
    void use(KernelInfo const& kernel) {
      partials.clear();
      std::int64_t const tiles = ceil_div(g.n, kernel.tile_n), ld = round_up(c.m, kernel.tile_m);
      for (std::size_t i = 0; i < program.sinks.size(); ++i) {
        if (program.sinks[i].shape != Shape::kRowPartial) continue;
        partials.push_back(tensor(tiles * ld, Type::kFp32).buffer);
        g.sinks[i] = {partials.back().data(), ld, 0, 0};
      }
    }

    // The kernel, and the finalisers of its partial sums: what a caller waits for.
    void run(KernelInfo const& kernel) const {
      check(kernel.launch(g), kernel.key);
      for (std::size_t i = 0; i < program.sinks.size(); ++i) {
        if (program.sinks[i].shape != Shape::kRowPartial) continue;
        auto const* values = static_cast<float const*>(g.sinks[i].data);
        check(reduce::sum_row_partials(values, g.sinks[i].ld, ceil_div(g.n, kernel.tile_n), c.m, sums(i), g.stream), "sum_row_partials");
      }
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
      for (Buffer const& p : partials) p.poison();
    }

    // What a slot holds for one row: a single number, or one for each column (a pair: first all first ones, then all second ones).
    std::vector<double> values(Slot const& slot, Resource const& r, std::int64_t row, float const* row_sums = nullptr) const {
      auto const stored = [&](std::int64_t offset, std::int64_t count) {
        return read(static_cast<char const*>(r.data) + offset * std::int64_t(size_of(type)), count, type);
      };
      switch (slot.shape) {
        case Shape::kScalar: return {r.value};
        case Shape::kPerColumn: return stored(0, g.n);
        case Shape::kPerRow: return read(static_cast<float const*>(r.data) + row, 1, Type::kFp32);
        case Shape::kRowPartial: return read(row_sums + row, 1, Type::kFp32);
        case Shape::kPair: {
          std::vector<double> both = stored(row * r.ld, c.n), second = stored(row * r.ld + r.pair_stride, c.n);
          both.insert(both.end(), second.begin(), second.end());
          return both;
        }
        default: return stored(row * r.ld, c.n);
      }
    }
  };

  // The first row, the last one, and some between, in another place of the tile each.
  void choose_rows() {
    constexpr std::int64_t kSamples = 16;
    std::int64_t const count = std::min(case_.m, kSamples);
    for (std::int64_t i = 0; i < count; ++i) {
      std::int64_t const begin = i * case_.m / count, end = (i + 1) * case_.m / count;
      std::uint64_t const jitter = mix(mix(case_.seed) ^ std::uint64_t(i)) % std::uint64_t(end - begin);
      rows_.push_back(i == 0 ? 0 : i == count - 1 ? case_.m - 1 : begin + std::int64_t(jitter));
    }
  }

  // From the stored operands of the first set.
  void compute_expected() {
    Set const& set = *sets_[0];
    GemmArguments const& g = set.g;
    std::vector<std::vector<double>> a;
    for (std::int64_t row : rows_) {
      bool const m_major = case_.layout == "nt";
      auto const* first = static_cast<char const*>(g.a.data) + row * (m_major ? 1 : g.a.ld) * std::int64_t(size_of(type_));
      a.push_back(read(first, g.k, type_, m_major ? g.a.ld : 1));
    }
    std::vector<std::uint16_t> b(std::size_t(g.n * g.k));
    check(cudaMemcpy(b.data(), g.b.data, b.size() * sizeof b[0], cudaMemcpyDeviceToHost), "copying B to the host");
    bool const k_major = case_.layout == "tn";
    acc_ = accumulate(a, b, type_, g.n, k_major ? g.b.ld : 1, k_major ? 1 : g.b.ld);

    expected_.resize(program_.sinks.size());
    for (std::size_t r = 0; r < rows_.size(); ++r) {
      std::vector<std::vector<double>> inputs, outputs;
      for (std::size_t i = 0; i < program_.loads.size(); ++i) inputs.push_back(set.values(program_.loads[i], g.loads[i], rows_[r]));
      for (Slot const& slot : program_.sinks)
        outputs.emplace_back(slot.shape == Shape::kRowPartial ? std::size_t(1) : std::size_t(width(slot, program_) * case_.n));
      for (std::int64_t n = 0; n < case_.n; ++n) {
        double acc[2], in[2 * kMaxResources], out[2 * kMaxResources];
        for (int half = 0; half < program_.columns; ++half) acc[half] = acc_[std::size_t(std::int64_t(r) * g.n + half * case_.n + n)];
        double* next = in;
        for (std::size_t i = 0; i < inputs.size(); ++i)
          for (int half = 0; half < width(program_.loads[i], program_); ++half)
            *next++ = inputs[i][inputs[i].size() == 1 ? 0 : std::size_t(half * case_.n + n)];
        program_.reference(acc, in, out);
        double const* value = out;
        for (std::size_t i = 0; i < outputs.size(); ++i) {
          if (program_.sinks[i].shape == Shape::kRowPartial) {
            outputs[i][0] += *value++;
          } else {
            for (int half = 0; half < width(program_.sinks[i], program_); ++half) outputs[i][std::size_t(half * case_.n + n)] = *value++;
          }
        }
      }
      for (std::size_t i = 0; i < outputs.size(); ++i) expected_[i].insert(expected_[i].end(), outputs[i].begin(), outputs[i].end());
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
      for (Tensor const& t : set.sinks) {
        Inspection const seen = inspect(t.buffer, t.type);
        result.not_finite += seen.not_finite;
        sums.push_back(seen.checksum);
      }
    }
    result.reproducible = checksums[0] == checksums[1];
    for (std::size_t i = 0; i < program_.sinks.size(); ++i) {
      Slot const& slot = program_.sinks[i];
      std::vector<double> got;
      for (std::int64_t row : rows_) {
        std::vector<double> const values = set.values(slot, set.g.sinks[i], row, set.sums(i));
        got.insert(got.end(), values.begin(), values.end());
      }
      result.outputs.push_back({slot.name, compare(got, expected_[i]), error_bound(set.sink(i).type)});
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
  std::vector<std::int64_t> rows_;
  std::vector<double> acc_;                    // [rows_][GEMM columns]
  std::vector<std::vector<double>> expected_;  // for each sink, its values in the order of rows_
  std::unique_ptr<Library> library_;
  double library_error_ = 0;
};

}  // namespace coda::bench
