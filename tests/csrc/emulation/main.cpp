// The code of the SM80 kernels on the CPU, every program at shapes that end inside of tiles, beside the CPU back end's loop over the same accumulators. The
// operands are small integers, so that products are exact and tiles equal to the bit. Prints what differs, and what races (accesses.hpp).
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "host/program.hpp"
#include "programs/activation.hpp"
#include "programs/glu.hpp"
#include "programs/loss.hpp"
#include "programs/norm.hpp"
#include "programs/plain.hpp"
#include "programs/rope.hpp"
#include "sm80/block.hpp"

using namespace coda;
using Config = CODA_CONFIG;  // from the manifest
using sm80::bf16;
using sm80::fp16;
using sm80::Layout;

template <>
struct coda::host::ExponentialOf<bf16> {
  using type = fp16;
};

namespace {

std::mt19937 random_bits(1);
int failures = 0;
float small() { return float(int(random_bits() % 9) - 4); }
float fraction() { return float(random_bits() % 1024) / 512 - 1; }

template <class T>
struct Aligned {
  std::size_t bytes;
  std::vector<T> storage;
  T* data;
  explicit Aligned(std::size_t count, T value = T(0.0f)) : bytes(count * sizeof(T)), storage(count + 64 / sizeof(T), value) {
    data = reinterpret_cast<T*>((reinterpret_cast<std::uintptr_t>(storage.data()) + 31) / 32 * 32);
  }
};

// Everything that a call's resources point to.
struct Memory {
  std::vector<std::unique_ptr<std::vector<std::int64_t>>> targets;
  std::vector<std::unique_ptr<Aligned<bf16>>> halves;
  std::vector<std::unique_ptr<Aligned<float>>> floats;
  template <class F>
  bf16* add_half(std::size_t count, F f) {
    halves.push_back(std::make_unique<Aligned<bf16>>(count));
    for (std::size_t i = 0; i < count; ++i) halves.back()->data[i] = bf16(f());
    return halves.back()->data;
  }
  template <class F>
  float* add_float(std::size_t count, F f) {
    floats.push_back(std::make_unique<Aligned<float>>(count));
    for (std::size_t i = 0; i < count; ++i) floats.back()->data[i] = f();
    return floats.back()->data;
  }
};

struct Shape {
  int m, n, k;
  int head_dim = 0, rotary_dim = 0;
  int lacking = 0;  // of the loss: how many of the columns are there for alignment alone
  int splits = 1;
  int variant = 0;  // which resources are absent, fp32, not aligned
  int columns() const { return n - lacking; }
};

template <class Program>
constexpr bool kIsLoss = false;
template <bool kGeneral, class... Stores>
constexpr bool kIsLoss<LseSelectInto<kGeneral, Stores...>> = true;
template <bool kGeneral>
constexpr bool kIsLoss<DLogitsOf<kGeneral>> = true;

constexpr int kPositions = 50;

template <int... kKinds>
void append(std::vector<int>& kinds, std::integer_sequence<int, kKinds...>) {
  kinds.insert(kinds.end(), {kKinds...});
}
template <class... Groups>
std::vector<int> kinds_of(List<Groups...>) {
  std::vector<int> kinds;
  (append(kinds, Groups()), ...);
  return kinds;
}

// Variants of the loss: no cap, bias with -inf; cap, no bias; no cap, all sums; cap, no rstd, bias with -inf, all sums.
struct Maker {
  Memory& memory;
  GemmArguments& g;
  Shape const& s;
  bool loss;
  std::vector<int> kinds;
  bool odd() const { return s.variant % 2 == 1; }
  // An activation's kind, a factor, or a cap.
  void load(Scalar, Resource& r, int) { r.value = kinds.empty() ? loss && !odd() ? 0 : s.variant : kinds[(std::size_t(s.variant) + 2) % kinds.size()]; }
  template <int kAbsent>
  void load(RowVector<kAbsent>, Resource& r, int i) {
    if (loss ? s.variant == 1 : odd() && i % 2 == 0) return;
    r.fp32 = s.variant >= 2;
    int n = 0;
    auto const value = [&] { return loss && s.variant != 2 && (++n < 44 || n == 150) ? -std::numeric_limits<float>::infinity() : fraction(); };
    r.data = r.fp32 ? static_cast<void*>(memory.add_float(std::size_t(s.n) + 1, value) + 1) : memory.add_half(std::size_t(s.n) + 1, value) + 1;
  }
  template <int kAbsent>
  void load(ColVector<kAbsent>, Resource& r, int i) {
    if (loss && i == 0 ? s.variant == 3 : odd() && i % 2 == 1) return;
    r.data = memory.add_float(std::size_t(s.m), [] { return fraction() + 1.5f; });
  }
  void load(TileLoad, Resource& r, int i) {
    if (odd() && i == 0) return;
    r.ld = s.n + 8;
    r.data = memory.add_half(std::size_t(s.m * r.ld), fraction);
  }
  template <int kAbsent>
  void load(TableRow<kAbsent>, Resource& r, int) {
    r.fp32 = s.variant < 2;
    r.ld = s.rotary_dim / 2 + (odd() ? 2 : 0);
    std::size_t const count = std::size_t(kPositions * r.ld);
    r.data = r.fp32 ? static_cast<void*>(memory.add_float(count, fraction)) : memory.add_half(count, fraction);
  }
  template <int kAbsent>
  void load(HeadVector<kAbsent>, Resource& r, int) {
    r.fp32 = s.variant >= 2;
    std::size_t const count = std::size_t(s.head_dim);
    r.data = r.fp32 ? static_cast<void*>(memory.add_float(count, fraction)) : memory.add_half(count, fraction);
    r.second = r.fp32 ? static_cast<void*>(memory.add_float(count, fraction)) : memory.add_half(count, fraction);
  }
  void load(ColumnIs, Resource& r, int) { r.data = targets(); }
  // A quarter of them no column, and some where tiles and the columns end.
  std::int64_t* targets() {
    memory.targets.push_back(std::make_unique<std::vector<std::int64_t>>(std::size_t(s.m)));
    int const edges[] = {-1, s.columns(), -(1 << 20), s.n, 0, s.columns() - 1, 127, 128};
    for (auto& target : *memory.targets.back()) target = random_bits() % 2 == 0 ? edges[random_bits() % 8] : int(random_bits() % unsigned(s.columns()));
    return memory.targets.back()->data();
  }
  // Sinks are filled with what no result is.
  static float poison() { return std::numeric_limits<float>::infinity(); }
  void sink(TileStore, Resource& r, int i) {
    if (odd() && i > 0) return;
    if (i > 0 && s.head_dim > 0) r.columns = g.rotation.columns;
    r.ld = (s.n + 15) / 8 * 8;
    r.data = memory.add_half(std::size_t(s.m * r.ld), poison);
  }
  void sink(HalfTileStore, Resource& r, int) {
    r.ld = s.n / 2 + 8;
    r.data = memory.add_half(std::size_t(s.m * r.ld), poison);
  }
  void sink(RowPartial, Resource& r, int) {
    r.ld = s.m;
    r.data = memory.add_float(std::size_t(s.m) * 64, poison);
  }
  void sink(ColPartial, Resource& r, int) {
    if (odd()) return;
    r.ld = s.n;
    r.data = memory.add_float(std::size_t(s.n) * 64, poison);
  }
  void sink(RowSoftmax, Resource& r, int) {
    int const planes[] = {2, 3, 5, 5};
    r.value = planes[s.variant], r.columns = s.columns();
    r.ld = s.m + 1, r.pair_stride = r.ld * 16;
    r.data = memory.add_float(std::size_t(5 * r.pair_stride), poison);
    if (exponentials || s.variant != 1) r.second = memory.add_float(std::size_t(s.m * groups() + 1), poison);
  }
  void sink(Exponentials, Resource& r, int) {
    r.ld = (s.n + 15) / 8 * 8;
    r.data = memory.add_half(std::size_t(s.m * r.ld), poison);
  }
  void sink(RowSelect, Resource& r, int) {
    r.columns = s.columns(), r.pair_stride = s.m + 1;
    r.data = memory.add_float(std::size_t(2 * r.pair_stride), poison);
    r.second = selected;
  }
  bool exponentials = false;
  std::int64_t const* selected = nullptr;
  int groups() const { return (s.columns() + kSoftmaxGroup - 1) / kSoftmaxGroup; }
};

void report(std::string const& what, char const* kind, int i, double at, double found, double wanted) {
  if (++failures < 20) std::printf("%s: %s %d at %g is %g, expected %g\n", what.c_str(), kind, i, at, found, wanted);
}

template <class Program>
struct Comparer {
  std::string const& what;
  Shape const& s;
  // The CPU back end takes the mean over a head in fp64.
  static bool near(float found, float wanted) { return kHasHeadMean<Program> && std::abs(found - wanted) <= 1e-2f * std::abs(wanted) + 1e-3f; }
  void tile(Resource const& r, Resource const& expected, int i) {
    if (r.data == nullptr) return;
    for (std::int64_t at = 0; at < s.m * r.ld; ++at) {
      if (s.lacking > 0 && at % r.ld >= s.columns() && at % r.ld < s.n) continue;
      auto const found = static_cast<bf16 const*>(r.data)[at], wanted = static_cast<bf16 const*>(expected.data)[at];
      if (found.bits != wanted.bits && !near(found, wanted)) return report(what, "tile", i, double(at), float(found), float(wanted));
    }
  }
  void compare(TileStore, Resource const& r, Resource const& expected, int i) { tile(r, expected, i); }
  void compare(HalfTileStore, Resource const& r, Resource const& expected, int i) { tile(r, expected, i); }
  void sums(Resource const& r, Resource const& expected, int lines, int expected_lines, int count, char const* kind, int i) {
    if (r.data == nullptr) return;
    auto const line_sum = [](Resource const& from, int n, int at) {
      double sum = 0;
      for (int line = 0; line < n; ++line) sum += static_cast<float const*>(from.data)[line * from.ld + at];
      return sum;
    };
    for (int at = 0; at < count; ++at) {
      double const found = line_sum(r, lines, at), wanted = line_sum(expected, expected_lines, at);
      if (!(std::abs(found - wanted) <= 1e-4 * (100 + std::abs(wanted)))) return report(what, kind, i, at, found, wanted);
    }
    if (std::isfinite(static_cast<float const*>(r.data)[lines * r.ld])) report(what, kind, i, lines, 0, 0);
  }
  void compare(RowPartial, Resource const& r, Resource const& expected, int i) {
    sums(r, expected, (s.n + Config::kTileN - 1) / Config::kTileN, 1, s.m, "sum of row", i);
  }
  void compare(ColPartial, Resource const& r, Resource const& expected, int i) {
    sums(r, expected, (s.m + Config::kTileM - 1) / Config::kTileM, (s.m + 15) / 16, s.columns(), "sum of column", i);
  }
  void compare(RowSelect, Resource const& r, Resource const& expected, int i) {
    for (std::int64_t at = 0; at < 2 * r.pair_stride; ++at) {
      float const found = static_cast<float const*>(r.data)[at], wanted = static_cast<float const*>(expected.data)[at];
      if (!(found == wanted)) return report(what, "selected", i, double(at), found, wanted);
    }
  }
  // The CPU back end has one tile; here each has a maximum of its own, so that references are compared with those of the columns before them.
  void compare(RowSoftmax, Resource const& r, Resource const& expected, int i) {
    softmax = &r, expected_softmax = &expected;
    int const tiles = (s.columns() + Config::kTileN - 1) / Config::kTileN, groups = (s.columns() + kSoftmaxGroup - 1) / kSoftmaxGroup, planes = int(r.value);
    auto const value = [](Resource const& from, int plane, int tile, int m) {
      return plane < int(from.value) ? static_cast<float const*>(from.data)[plane * from.pair_stride + tile * from.ld + m] : 0.0f;
    };
    auto const near = [](double a, double b) { return a == b || std::abs(a - b) <= 1e-5 * (10 + std::abs(b)); };
    auto const reference = [&](Resource const& from, int m, int group) { return static_cast<float const*>(from.second)[m * groups + group]; };
    for (int m = 0; m < s.m; ++m) {
      double const nothing = -std::numeric_limits<double>::infinity();
      SoftmaxSums<double> found{nothing}, wanted{nothing};
      double totals[2] = {};
      wanted.add({value(expected, 0, 0, m), value(expected, 1, 0, m), value(expected, 2, 0, m)});
      for (int t = 0; t < tiles; ++t) {
        if (r.second != nullptr) {
          int const first = t * Config::kTileN / kSoftmaxGroup, last = std::min(first + Config::kTileN / kSoftmaxGroup, groups) - 1;
          for (int group = first; group <= last; ++group) {
            double const of_all = std::max(found.top, double(reference(r, m, group)));
            if (of_all != reference(expected, m, group)) return report(what, "reference", i, m * groups + group, of_all, reference(expected, m, group));
          }
          if (reference(r, m, last) != value(r, 0, t, m)) return report(what, "last reference", i, m, reference(r, m, last), value(r, 0, t, m));
        }
        found.add({value(r, 0, t, m), value(r, 1, t, m), value(r, 2, t, m)});
        for (int p = 0; p < 2; ++p) totals[p] += value(r, 3 + p, t, m);
      }
      if (found.top != wanted.top) return report(what, "maximum", i, m, found.top, wanted.top);
      if (!near(found.lse(), wanted.lse())) return report(what, "lse", i, m, found.lse(), wanted.lse());
      if (found.sum > 0 && !near(found.dot / found.sum, wanted.dot / wanted.sum)) return report(what, "dot", i, m, found.dot, wanted.dot);
      if (!(found.dot == found.dot)) return report(what, "dot", i, m, found.dot, wanted.dot);
      for (int p = 0; p < 2; ++p)
        if (!near(totals[p], value(expected, 3 + p, 0, m))) return report(what, "total", i, m, totals[p], value(expected, 3 + p, 0, m));
    }
    for (int p = 0; p < 5; ++p)
      for (int t = 0; t < 16; ++t)
        for (int m = 0; m < r.ld; ++m)
          if (std::isinf(static_cast<float const*>(r.data)[p * r.pair_stride + t * r.ld + m]) < (p >= planes || t >= tiles || m >= s.m))
            return report(what, "plane", p, t, m, 0);
    if (r.second != nullptr && std::isfinite(static_cast<float const*>(r.second)[s.m * groups])) report(what, "references", i, 0, 0, 0);
  }
  void compare(Exponentials, Resource const& r, Resource const& expected, int i) {
    int const groups = (s.columns() + kSoftmaxGroup - 1) / kSoftmaxGroup;
    for (int m = 0; m < s.m; ++m)
      for (int n = 0; n < r.ld; ++n) {
        float const found = static_cast<fp16 const*>(r.data)[m * r.ld + n], wanted = static_cast<fp16 const*>(expected.data)[m * r.ld + n];
        if (n >= s.columns()) {  // nothing, and behind it what was there
          float const there = n < s.n ? 0.0f : fp16_poison();
          if (!(found == there || (found != found && there != there))) return report(what, "exponential outside", i, n, found, there);
          continue;
        }
        auto const reference = [&](Resource const* of) { return static_cast<float const*>(of->second)[m * groups + n / kSoftmaxGroup]; };
        double const scale = std::exp2(double(finite_or_zero(reference(softmax))) - finite_or_zero(reference(expected_softmax)));
        if (!(std::abs(found * scale - wanted) <= wanted * 0x1p-10 + 0x1p-24)) return report(what, "exponential", i, n, found * scale, wanted);
      }
  }
  static float fp16_poison() {
    fp16 h;
    h.bits = bf16(Maker::poison()).bits;
    return h;
  }
  Resource const *softmax = nullptr, *expected_softmax = nullptr;
};

template <class Program, Layout kLayout, class... Ls, class... Ss, std::size_t... kL, std::size_t... kS>
void check(std::string const& name, Shape const& s, List<Ls...>, List<Ss...>, std::index_sequence<kL...>, std::index_sequence<kS...>) {
  using Block = sm80::Block<Program, Config, bf16, kLayout>;
  std::string const what = name + " " + std::to_string(s.m) + " " + std::to_string(s.n) + " " + std::to_string(s.k) + " rotary " +
                           std::to_string(s.rotary_dim) + " of " + std::to_string(s.head_dim) + " splits " + std::to_string(s.splits) + " variant " +
                           std::to_string(s.variant);
  namespace emulation = sm80::emulation;
  Memory memory;
  GemmArguments g;
  g.m = s.m, g.n = s.n, g.k = s.k;
  constexpr bool kHalves = kPairingOf<Program> == Pairing::kHalves;
  std::vector<std::int32_t> positions(std::size_t(s.m));
  for (auto& p : positions) p = int(random_bits() % kPositions);
  g.rotation.head_dim = s.head_dim, g.rotation.rotary_dim = s.rotary_dim, g.rotation.period = 17;
  if (s.variant % 2 == 0) g.rotation.positions = positions.data();
  if (s.head_dim > 0) {
    g.rotation.columns = s.n / s.head_dim * 2 / 3 * s.head_dim, g.rotation.query_columns = s.n / s.head_dim / 3 * s.head_dim;
  }
  bool const a_major_k = kLayout != Layout::kNT, b_major_k = kLayout == Layout::kTN;
  g.a.ld = (a_major_k ? s.k : s.m) + 8, g.b.ld = (b_major_k ? s.k : s.n) + 16;
  g.b.pair_stride = kHalves ? (s.n / 2 + 1) * g.b.ld : 0;
  auto const* a = memory.add_half(std::size_t(g.a.ld * (a_major_k ? s.m : s.k)), [] { return kIsLoss<Program> ? small() / 16 : small(); });
  auto* b = memory.add_half(std::size_t(g.b.ld * ((b_major_k ? s.n : s.k) + 1)), small);
  if (s.lacking > 0) std::fill(b + s.columns() * g.b.ld, b + s.n * g.b.ld, bf16(0.0f));
  g.a.data = const_cast<bf16*>(a), g.b.data = b;

  Maker maker{memory, g, s, kIsLoss<Program>, kinds_of(typename coda::detail::KindsOf<Program>::type()), (std::is_same_v<Ss, Exponentials> || ...), nullptr};
  maker.selected = maker.targets();
  (maker.load(Ls{}, g.loads[kL], int(kL)), ...);
  GemmArguments expected = g;
  (maker.sink(Ss{}, g.sinks[kS], int(kS)), ...);
  (maker.sink(Ss{}, expected.sinks[kS], int(kS)), ...);

  expected.n = s.columns();
  std::vector<float> acc(std::size_t(s.m * expected.n));
  for (int m = 0; m < s.m; ++m)
    for (int n = 0; n < expected.n; ++n) {
      std::int64_t const row = kHalves && n >= s.n / 2 ? n - s.n / 2 : n, half = kHalves && n >= s.n / 2 ? g.b.pair_stride : 0;
      float sum = 0;
      for (int k = 0; k < s.k; ++k)
        sum += float(a_major_k ? a[m * g.a.ld + k] : a[k * g.a.ld + m]) * float(b_major_k ? b[half + row * g.b.ld + k] : b[k * g.b.ld + row]);
      acc[std::size_t(m * expected.n + n)] = sum;
    }
  host::run<Program, bf16, float>(expected, acc.data(), 0, (s.m + 15) / 16);

  sm80::Grid grid{(s.m + Config::kTileM - 1) / Config::kTileM, (s.n + Config::kTileN - 1) / Config::kTileN, 2, s.variant % 2 == 0};
  grid.band = std::min(grid.band, grid.along_m ? grid.tiles_n : grid.tiles_m);
  int const tiles = grid.tiles_m * grid.tiles_n;
  std::vector<int> seen(static_cast<std::size_t>(tiles));
  g.splits = int(count_parts(s.k, s.splits, Config::kTileK));
  if (g.splits > 1) g.parts = memory.add_float(std::size_t(g.splits * tiles * Config::kTileM * Config::kTileN), Maker::poison);
  Aligned<float> shared(Block::kSharedMemory / 4);
  auto* const bytes = reinterpret_cast<unsigned char*>(shared.data);
  emulation::watch(bytes, Block::kSharedMemory, true);
  for (auto const& half : memory.halves) emulation::watch(half->data, half->bytes, false);
  for (auto const& floats : memory.floats) emulation::watch(floats->data, floats->bytes, false);
  auto const launch = [&](int number, int blocks, auto f) {
    for (int i = 0; i < blocks; ++i) {
      std::fill(shared.storage.begin(), shared.storage.end(), std::numeric_limits<float>::quiet_NaN());
      emulation::run_block(number, i, Config::kThreads, [&] { f(i); });
    }
  };
  auto const block = [&](int i) { return Block(g, sm80::tile_of(grid, i % tiles), bytes); };
  if (g.splits == 1) {
    launch(0, tiles, [&](int i) { block(i).run(); });
  } else {
    launch(0, tiles * g.splits, [&](int i) { block(i).run_part(i / tiles, i % tiles, tiles); });
    launch(1, tiles, [&](int i) { block(i).add_parts(i, tiles); });
  }
  emulation::forget();
  if (std::string const races = emulation::races(); !races.empty()) ++failures, std::printf("%s: %s", what.c_str(), races.c_str());
  for (int i = 0; i < tiles; ++i) {
    auto const tile = sm80::tile_of(grid, i);
    ++seen[std::size_t(tile.m * grid.tiles_n + tile.n)];
  }
  for (int count : seen)
    if (count != 1) report(what, "tile seen", 0, 0, count, 1);
  Comparer<Program> comparer{what, s};
  (comparer.compare(Ss{}, g.sinks[kS], expected.sinks[kS], int(kS)), ...);
}

template <class Program, Layout kLayout>
void check(std::string const& name, std::vector<Shape> const& shapes) {
  for (Shape s : shapes)
    for (int variant = 0; variant < 4; ++variant) {
      s.variant = variant;
      sm80::emulation::late_copies = variant % 3 != 0;
      check<Program, kLayout>(name, s, typename Program::Loads{}, typename Program::Sinks{}, std::make_index_sequence<Program::Loads::size>{},
                              std::make_index_sequence<Program::Sinks::size>{});
    }
  std::printf("%s\n", name.c_str()), std::fflush(stdout);
}

void check_programs() {
  std::vector<Shape> const few = {{136, 264, 72}, {130, 136, 8}, {70, 8, 264}};
  std::vector<Shape> const heads = {{130, 192, 40, 64, 64}, {130, 384, 8, 128, 32}, {30, 384, 40, 128, 128}, {64, 160, 8, 32, 16}};
  std::vector<Shape> const classes = {{136, 264, 72, 0, 0, 3}, {1, 8, 8}, {30, 552, 40, 0, 0, 7}, {16, 320, 72}};
  check<Plain, Layout::kTN>("plain tn", {{136, 264, 72}, {1, 8, 8}, {129, 136, 200}});
  check<Plain, Layout::kNN>("plain nn", {{136, 264, 72}, {1, 8, 8}});
  check<Plain, Layout::kNT>("plain nt", {{136, 264, 72}, {8, 8, 8}});
  check<Plain, Layout::kTN>("plain tn, split K", {{136, 264, 200, 0, 0, 0, 3}, {8, 136, 64, 0, 0, 0, 5}});
  check<Plain, Layout::kNN>("plain nn, split K", {{136, 264, 200, 0, 0, 0, 2}});
  check<Plain, Layout::kNT>("plain nt, split K", {{136, 264, 200, 0, 0, 0, 7}});
  check<PlainResidual, Layout::kTN>("plain_residual", few);
  check<RstdGlu<Gelu>, Layout::kTN>("rstd_geglu", {{136, 272, 72}});
  check<RstdGluPreactivation<Silu>, Layout::kTN>("rstd_swiglu_preactivation", {{136, 272, 72}});
  check<DGlu<Silu>, Layout::kNN>("dswiglu", few);
  check<RstdAct, Layout::kTN>("rstd_act", few);
  check<DAct, Layout::kNN>("dact", few);
  check<DActLayer, Layout::kNN>("dact_layer", few);
  check<RstdLinear, Layout::kTN>("rstd", few);
  check<ResidualSqsum, Layout::kTN>("residual_sqsum", few);
  check<NormBackward, Layout::kNN>("norm_backward", few);
  std::vector<Shape> const split = {{70, 264, 200, 0, 0, 0, 3}};
  check<RstdGluPreactivation<Silu>, Layout::kTN>("rstd_swiglu_preactivation, split K", {{70, 272, 200, 0, 0, 0, 3}});
  check<DGlu<Silu>, Layout::kNN>("dswiglu, split K", split);
  check<DActLayer, Layout::kNN>("dact_layer, split K", split);
  check<ResidualSqsum, Layout::kTN>("residual_sqsum, split K", split);
  check<NormBackward, Layout::kNN>("norm_backward, split K", {{136, 264, 200, 0, 0, 0, 3}});
  check<RstdRope<Pairing::kHeadHalves>, Layout::kTN>("rstd_rope, split K", {{70, 384, 200, 128, 32, 0, 3}});
  check<RstdQkNormRope, Layout::kTN>("rstd_qknorm_rope, split K", {{70, 192, 200, 64, 64, 0, 3}});
  check<ResidualMoments, Layout::kTN>("residual_moments", few);
  check<LayerNormBackward, Layout::kNN>("layer_norm_backward", few);
  check<RstdRope<Pairing::kHeadHalves>, Layout::kTN>("rstd_rope", heads);
  check<RstdQkNormRope, Layout::kTN>("rstd_qknorm_rope", {heads[0], heads[2], {30, 160, 8, 16, 16}});
  check<RstdRope<Pairing::kAdjacent>, Layout::kTN>("rstd_rope_adjacent", {heads[0], heads[1], {30, 120, 8, 24, 24}, {30, 264, 8, 24, 20}});
  check<LseSelect, Layout::kTN>("lse_select", classes);
  check<LseSelectLogits, Layout::kTN>("lse_select_logits", classes);
  check<LseSelectExponentials, Layout::kTN>("lse_select_exponentials", classes);
  check<LseSelectGeneral, Layout::kTN>("lse_select_general", classes);
  check<LseSelectGeneralLogits, Layout::kTN>("lse_select_general_logits", classes);
  check<LseSelectGeneralExponentials, Layout::kTN>("lse_select_general_exponentials", classes);
  check<DLogits, Layout::kTN>("dlogits", classes);
  check<DLogitsGeneral, Layout::kTN>("dlogits_general", classes);
}

// Lanes that move bytes at a time must not meet in a bank: 16 bytes a lane in turns of eight lanes, 8 bytes in turns of sixteen.
void check_banks() {
  auto const distinct = [](std::vector<int> const& words, int width, std::string const& what) {
    std::vector<int> seen(32);
    for (int word : words)
      for (int i = 0; i < width; ++i)
        if (++seen[std::size_t((word + i) % 32)] > 1) return report(what, "bank", word % 32, word, 2, 1);
  };
  for (int chunk = 0; chunk < 8; ++chunk)
    for (int first = 0; first < 32; first += 8) {
      std::vector<int> narrow, wide, wider;
      for (int line = first; line < first + 8; ++line) {
        narrow.push_back(sm80::chunk_offset<32>(line, chunk % 4) / 4);
        wide.push_back(sm80::chunk_offset<64>(line, chunk) / 4);
        wider.push_back(sm80::chunk_offset<128>(line, chunk) / 4);
      }
      distinct(narrow, 4, "lines of 64 bytes"), distinct(wide, 4, "lines of 128 bytes"), distinct(wider, 4, "lines of 256 bytes");
    }
  constexpr int kStride = 128 + sm80::kPad;
  for (int column = 0; column < 128; column += 8)
    for (int lane = 0; lane < 32; lane += 16) {
      std::vector<int> words;
      for (int i = lane; i < lane + 16; ++i) words.push_back(sm80::fragment_row(i) * kStride + sm80::band_offset(column + sm80::fragment_column(i)));
      distinct(words, 2, "fragments");
    }
  for (int half : {0, 4})
    for (int first = 0; first < 16; first += 8) {
      std::vector<int> columns, pairs, heads64, heads128;
      for (int i = first; i < first + 8; ++i) {
        columns.push_back(sm80::band_offset(8 * i) ^ half);
        pairs.push_back(sm80::band_offset(16 * (i % 8)) ^ half);
        heads64.push_back(sm80::band_offset(i % 8 / 4 * 64 + i % 4 * 8) ^ half);
        heads128.push_back(sm80::band_offset(i % 8 * 8) ^ half);
      }
      distinct(columns, 4, "columns"), distinct(pairs, 4, "pairs"), distinct(heads64, 4, "heads of 64"), distinct(heads128, 4, "heads of 128");
    }
}

}  // namespace

int main() {
  check_banks();
  check_programs();
  if (failures > 0) std::printf("%d failures\n", failures);
  return failures > 0;
}
