// The code of the SM80 kernels on the CPU, every program at shapes that end inside of tiles, beside the CPU back end's loop over the same accumulators. The
// operands are small integers, so that products are exact and tiles equal to the bit. Prints what differs.
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
#include "programs/norm.hpp"
#include "programs/plain.hpp"
#include "programs/rope.hpp"
#include "sm80/block.hpp"

using namespace coda;
using sm80::bf16;
using sm80::Layout;

namespace {

std::mt19937 random_bits(1);
int failures = 0;
float small() { return float(int(random_bits() % 9) - 4); }
float fraction() { return float(random_bits() % 1024) / 512 - 1; }

template <class T>
struct Aligned {
  std::vector<T> storage;
  T* data;
  explicit Aligned(std::size_t count, T value = T(0.0f)) : storage(count + 64 / sizeof(T), value) {
    data = reinterpret_cast<T*>((reinterpret_cast<std::uintptr_t>(storage.data()) + 31) / 32 * 32);
  }
};

// Everything that a call's resources point to.
struct Memory {
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
  int variant = 0;  // which resources are absent, fp32, not aligned
};

constexpr int kPositions = 50;

struct Maker {
  Memory& memory;
  GemmArguments& g;
  Shape const& s;
  bool odd() const { return s.variant % 2 == 1; }
  void load(Scalar, Resource& r, int) { r.value = s.variant % 6; }  // an activation's kind, or a factor
  template <int kAbsent>
  void load(RowVector<kAbsent>, Resource& r, int i) {
    if (odd() && i % 2 == 0) return;
    r.fp32 = s.variant >= 2;
    r.data = r.fp32 ? static_cast<void*>(memory.add_float(std::size_t(s.n) + 1, fraction) + 1) : memory.add_half(std::size_t(s.n) + 1, fraction) + 1;
  }
  template <int kAbsent>
  void load(ColVector<kAbsent>, Resource& r, int i) {
    if (odd() && i % 2 == 1) return;
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
};

void report(std::string const& what, char const* kind, int i, double at, double found, double wanted) {
  if (++failures < 20) std::printf("%s: %s %d at %g is %g, expected %g\n", what.c_str(), kind, i, at, found, wanted);
}

template <class Program, class Config>
struct Comparer {
  std::string const& what;
  Shape const& s;
  // The CPU back end takes the mean over a head in fp64.
  static bool near(float found, float wanted) { return kHasHeadMean<Program> && std::abs(found - wanted) <= 1e-2f * std::abs(wanted) + 1e-3f; }
  void tile(Resource const& r, Resource const& expected, int i) {
    if (r.data == nullptr) return;
    for (std::int64_t at = 0; at < s.m * r.ld; ++at) {
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
    sums(r, expected, (s.m + Config::kTileM - 1) / Config::kTileM, (s.m + 15) / 16, s.n, "sum of column", i);
  }
};

template <class Program, class Config, Layout kLayout, class... Ls, class... Ss, std::size_t... kL, std::size_t... kS>
void check(std::string const& name, Shape const& s, List<Ls...>, List<Ss...>, std::index_sequence<kL...>, std::index_sequence<kS...>) {
  using Block = sm80::Block<Program, Config, bf16, kLayout>;
  std::string const what = name + " " + std::to_string(s.m) + " " + std::to_string(s.n) + " " + std::to_string(s.k) + " rotary " +
                           std::to_string(s.rotary_dim) + " of " + std::to_string(s.head_dim) + " variant " + std::to_string(s.variant);
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
  auto const* a = memory.add_half(std::size_t(g.a.ld * (a_major_k ? s.m : s.k)), small);
  auto const* b = memory.add_half(std::size_t(g.b.ld * ((b_major_k ? s.n : s.k) + 1)), small);
  g.a.data = const_cast<bf16*>(a), g.b.data = const_cast<bf16*>(b);

  Maker maker{memory, g, s};
  (maker.load(Ls{}, g.loads[kL], int(kL)), ...);
  GemmArguments expected = g;
  (maker.sink(Ss{}, g.sinks[kS], int(kS)), ...);
  (maker.sink(Ss{}, expected.sinks[kS], int(kS)), ...);

  std::vector<float> acc(std::size_t(s.m * s.n));
  for (int m = 0; m < s.m; ++m)
    for (int n = 0; n < s.n; ++n) {
      std::int64_t const row = kHalves && n >= s.n / 2 ? n - s.n / 2 : n, half = kHalves && n >= s.n / 2 ? g.b.pair_stride : 0;
      float sum = 0;
      for (int k = 0; k < s.k; ++k)
        sum += float(a_major_k ? a[m * g.a.ld + k] : a[k * g.a.ld + m]) * float(b_major_k ? b[half + row * g.b.ld + k] : b[k * g.b.ld + row]);
      acc[std::size_t(m * s.n + n)] = sum;
    }
  host::run<Program, bf16, float>(expected, acc.data(), 0, (s.m + 15) / 16);

  sm80::Grid grid{(s.m + Config::kTileM - 1) / Config::kTileM, (s.n + Config::kTileN - 1) / Config::kTileN, 2, s.variant % 2 == 0};
  grid.band = std::min(grid.band, grid.along_m ? grid.tiles_n : grid.tiles_m);
  std::vector<int> seen(std::size_t(grid.tiles_m * grid.tiles_n));
  for (int i = 0; i < grid.tiles_m * grid.tiles_n; ++i) {
    auto const tile = sm80::tile_of(grid, i);
    ++seen[std::size_t(tile.m * grid.tiles_n + tile.n)];
    Aligned<float> shared(Block::kSharedMemory / 4, std::numeric_limits<float>::quiet_NaN());
    auto* bytes = reinterpret_cast<unsigned char*>(shared.data);
    sm80::emulation::run_block(Config::kThreads, [&] { Block::run(g, tile, bytes); });
  }
  for (int count : seen)
    if (count != 1) report(what, "tile seen", 0, 0, count, 1);
  Comparer<Program, Config> comparer{what, s};
  (comparer.compare(Ss{}, g.sinks[kS], expected.sinks[kS], int(kS)), ...);
}

template <class Program, class Config, Layout kLayout>
void check(std::string const& name, std::vector<Shape> const& shapes) {
  for (Shape s : shapes)
    for (int variant = 0; variant < 4; ++variant) {
      s.variant = variant;
      sm80::emulation::late_copies = variant % 3 != 0;
      check<Program, Config, kLayout>(name, s, typename Program::Loads{}, typename Program::Sinks{}, std::make_index_sequence<Program::Loads::size>{},
                                      std::make_index_sequence<Program::Sinks::size>{});
    }
  std::printf("%s\n", name.c_str()), std::fflush(stdout);
}

using Square = sm80::Config<128, 128, 32, 2, 2, 4, 2>;
using Wide = sm80::Config<128, 256, 32, 2, 4, 4, 1>;
using Tall = sm80::Config<256, 128, 32, 4, 2, 4, 1>;
using Deep = sm80::Config<128, 128, 64, 2, 2, 3, 2>;
using Small = sm80::Config<64, 128, 32, 2, 2, 4, 3>;

// Every program, or one of each pairing and major.
template <class Config>
void all(std::string const& config, bool everything) {
  auto const name = [&](char const* program) { return config + " " + program; };
  std::vector<Shape> const few = {{136, 264, 72}}, heads = {{130, 192, 40, 64, 64}, {130, 384, 8, 128, 32}, {30, 384, 40, 128, 128}, {64, 160, 8, 32, 16}};
  check<Plain, Config, Layout::kTN>(name("plain tn"), {{136, 264, 72}, {1, 8, 8}, {129, 136, 200}});
  check<RstdGluPreactivation<Silu>, Config, Layout::kTN>(name("rstd_swiglu_preactivation"), {{136, 272, 72}});
  check<DActLayer, Config, Layout::kNN>(name("dact_layer"), few);
  check<RstdRope<Pairing::kHeadHalves>, Config, Layout::kTN>(name("rstd_rope"), {heads[0], heads[1]});
  check<RstdQkNormRope, Config, Layout::kTN>(name("rstd_qknorm_rope"), {heads[0]});
  if (!everything) return;
  check<Plain, Config, Layout::kNN>(name("plain nn"), {{136, 264, 72}, {1, 8, 8}});
  check<Plain, Config, Layout::kNT>(name("plain nt"), {{136, 264, 72}, {8, 8, 8}});
  check<PlainResidual, Config, Layout::kTN>(name("plain_residual"), few);
  check<RstdGlu<Gelu>, Config, Layout::kTN>(name("rstd_geglu"), {{136, 272, 72}});
  check<DGlu<Silu>, Config, Layout::kNN>(name("dswiglu"), few);
  check<RstdAct, Config, Layout::kTN>(name("rstd_act"), few);
  check<DAct, Config, Layout::kNN>(name("dact"), few);
  check<RstdLinear, Config, Layout::kTN>(name("rstd"), few);
  check<ResidualSqsum, Config, Layout::kTN>(name("residual_sqsum"), few);
  check<ResidualMoments, Config, Layout::kTN>(name("residual_moments"), few);
  check<NormBackward, Config, Layout::kNN>(name("norm_backward"), few);
  check<LayerNormBackward, Config, Layout::kNN>(name("layer_norm_backward"), few);
  check<RstdRope<Pairing::kHeadHalves>, Config, Layout::kTN>(name("rstd_rope of other heads"), {heads[2], heads[3]});
  check<RstdRope<Pairing::kAdjacent>, Config, Layout::kTN>(name("rstd_rope_adjacent"), {heads[0], heads[1], {30, 120, 8, 24, 24}, {30, 264, 8, 24, 20}});
  check<RstdQkNormRope, Config, Layout::kTN>(name("rstd_qknorm_rope of other heads"), {heads[2], {30, 160, 8, 16, 16}});
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
  all<Square>("128x128x32", true);
  all<Wide>("128x256x32", false);
  all<Tall>("256x128x32", false);
  all<Deep>("128x128x64", false);
  all<Small>("64x128x32", false);
  if (failures > 0) std::printf("%d failures\n", failures);
  return failures > 0;
}
