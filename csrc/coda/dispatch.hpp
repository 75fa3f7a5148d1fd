// Which compiled kernel runs a call: the architecture, by what the device can run; then a filter (can it?) and a ranking (how long would it take?). Free of
// torch and of the driver, so that it can be tested without a GPU.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "coda/params.h"
#include "coda/registry.h"

namespace coda {

inline constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
inline constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// What TMA asks of a matrix: 16-byte base, rows a multiple of 16 bytes apart. In elements of 16 bits, that is kAlignment.
constexpr std::int64_t kAlignment = 8;
constexpr std::int64_t kBaseAlignment = 16;                  // bytes
constexpr std::int64_t kMaxPairStride = (std::int64_t(1) << 40) / 2;  // elements: a TMA stride is below 2^40 bytes
constexpr std::int64_t kMaxExtent = (std::int64_t(1) << 31) - 1;

// --- architectures ------------------------------------------------------------------------------------------------------------------------
// Machine code runs on its own major version, from its minor version on; PTX is compiled by the driver of any newer device.
inline bool has_code(KernelTable table, char const* arch, int capability, bool few_rows_alone = false) {
  for (int i = 0; i < table.code_count; ++i) {
    CodeInfo const& code = table.code[i];
    if (std::strcmp(code.arch, arch) || code.capability > capability || (code.few_rows && !few_rows_alone)) continue;
    if (code.ptx || code.capability / 10 == capability / 10) return true;
  }
  return false;
}

// The architectures whose kernels a device of this compute capability (10 major + minor) runs, the best first. `forced` (null or empty: none) leaves
// one of them. few_rows: the one whose kernels for few rows compete with the best one's.
struct Archs {
  char const* names[2] = {};
  int count = 0;
  char const* few_rows = nullptr;
};
inline Archs archs_for(KernelTable table, int capability, char const* forced) {
  Archs archs;
  for (char const* arch : {"sm90", "sm80"}) {
    if (forced != nullptr && *forced != 0 && std::strcmp(forced, arch)) continue;
    if (!std::strcmp(arch, "sm90") && capability != 90) continue;
    if (has_code(table, arch, capability)) archs.names[archs.count++] = arch;
  }
  bool const sm90 = archs.count > 0 && !std::strcmp(archs.names[0], "sm90");
  if (sm90 && (forced == nullptr || *forced == 0) && has_code(table, "sm80", capability, true)) archs.few_rows = "sm80";
  return archs;
}

inline std::string capability_name(int capability) { return std::to_string(capability / 10) + "." + std::to_string(capability % 10); }

// Such as "9.0, 8.0, 8.6 and PTX for 8.0 and newer".
inline std::string built_for(KernelTable table) {
  std::string cubins, ptx;
  for (int i = 0; i < table.code_count; ++i) {
    if (table.code[i].few_rows) continue;
    if (table.code[i].ptx) {
      ptx = "PTX for " + capability_name(table.code[i].capability) + " and newer";
    } else {
      cubins += (cubins.empty() ? "" : ", ") + capability_name(table.code[i].capability);
    }
  }
  return cubins + (cubins.empty() || ptx.empty() ? "" : " and ") + ptx;
}

// Why a device runs no kernels; empty if it runs some.
inline std::string why_no_archs(KernelTable table, int capability, char const* forced) {
  if (archs_for(table, capability, forced).count > 0) return {};
  std::string const device = capability_name(capability);
  bool const any = archs_for(table, capability, nullptr).count > 0;
  if (any) return std::string("CODA_FORCE_ARCH=") + forced + " leaves no kernels for compute capability " + device;
  std::string const built = built_for(table);
  return "no kernels were built for compute capability " + device + (built.empty() ? "" : ", there are some for " + built);
}

// --- kernels ------------------------------------------------------------------------------------------------------------------------------
// Whether a program over the halves of heads can turn so many columns.
inline bool turns(KernelInfo const& kernel, std::int64_t rotary_dim) {
  if (kernel.heads_within != 0) return rotary_dim > 0 && rotary_dim % 16 == 0 && kernel.heads_within % rotary_dim == 0;
  return kernel.head_halves == rotary_dim;
}

// Null if `kernel` can run `g`, else the reason.
inline char const* why_not(KernelInfo const& kernel, GemmArguments const& g) {
  auto const aligned = [](Resource const& r) {
    return reinterpret_cast<std::uintptr_t>(r.data) % kBaseAlignment == 0 && r.ld % kAlignment == 0 && r.ld > 0;
  };
  if (g.m <= 0 || g.n <= 0 || g.k <= 0) return "M, N and K must be positive";
  if (g.m > kMaxExtent || g.n > kMaxExtent || g.k > kMaxExtent) return "M, N and K must be below 2^31";
  if (!aligned(g.a)) return "A must have a 16-byte aligned base and rows that are a multiple of 16 bytes apart";
  if (!aligned(g.b)) return "B must have a 16-byte aligned base and rows that are a multiple of 16 bytes apart";
  bool const nt = std::strcmp(kernel.layout, "nt") == 0, tn = std::strcmp(kernel.layout, "tn") == 0;
  if ((nt ? g.m : g.k) % kAlignment != 0) return nt ? "M must be a multiple of 8" : "K must be a multiple of 8";
  if (!tn && g.n % kAlignment != 0) return "N must be a multiple of 8";
  if (g.n % (kernel.halves * kAlignment) != 0) return kernel.halves == 2 ? "N/2 must be a multiple of 8" : "N must be a multiple of 8";
  if ((kernel.head_halves != 0 || kernel.heads_within != 0) && !turns(kernel, g.rotation.rotary_dim)) return "it was built for another rotary dimension";
  if (kernel.whole_heads && g.rotation.rotary_dim != g.rotation.head_dim) return "it was built for another width of heads";
  if (kernel.halves == 2 && (g.b.pair_stride <= 0 || g.b.pair_stride % kAlignment != 0 || g.b.pair_stride >= kMaxPairStride))
    return "the second half of B must lie behind the first one by a multiple of 16 bytes, less than 2^40";
  return nullptr;
}

// How many clusters wide the bands are in which CUTLASS's scheduler walks over tiles, and how many waves that takes.
struct Bands {
  int width;
  std::int64_t waves;
};

// Wide bands share operands in the second-level cache; what narrow ones cost is a rough figure of bench/results/tuning.json, run 4. But either side is rounded
// up to whole bands, and the tiles that lie outside take as long as any: 1024 rows in eight clusters of two tiles of 128 would be computed twice over. The
// scheduler itself takes narrower bands than asked for where a side has few tiles.
inline Bands bands(std::int64_t tiles_m, std::int64_t tiles_n, int cluster_m, int cluster_n, int sm_count) {
  tiles_m = round_up(tiles_m, cluster_m), tiles_n = round_up(tiles_n, cluster_n);
  std::int64_t const fewest = tiles_m < tiles_n ? tiles_m : tiles_n;
  int const widest = fewest >= 6 ? 8 : fewest >= 3 ? 4 : fewest >= 2 ? 2 : 1;
  Bands best{};
  double best_time = 0;
  for (auto const& [width, time] : {std::pair(8, 1.0), std::pair(4, 1.02), std::pair(2, 1.06), std::pair(1, 1.2)}) {
    if (width > widest) continue;
    std::int64_t const waves = ceil_div(round_up(tiles_m, width * cluster_m) * round_up(tiles_n, width * cluster_n), sm_count);
    if (best.width == 0 || double(waves) * time < best_time) best = {width, waves}, best_time = double(waves) * time;
  }
  return best;
}

inline std::int64_t count_tiles(KernelInfo const& kernel, std::int64_t m, std::int64_t n) { return ceil_div(m, kernel.tile_m) * ceil_div(n, kernel.tile_n); }

// Relative time of `kernel` on an m x n output: full waves times the time of a tile, its area. With K split a tile takes as long as a part of it, and then its
// parts are added, which takes time for each part, and once for the launch. Of the kernels for few rows two blocks of a multiprocessor take as long as one,
// which waits for memory. The figures are rough, from bench/results/few_rows.json.
inline double cost(KernelInfo const& kernel, std::int64_t m, std::int64_t n, std::int64_t k, int sm_count, int splits = 1) {
  constexpr double kAddPart = 2.5e6, kLaunch = 5e6;  // area times columns of K
  std::int64_t const tiles_m = ceil_div(m, kernel.tile_m), tiles_n = ceil_div(n, kernel.tile_n), tiles = tiles_m * tiles_n;
  std::int64_t const length = splits > 1 ? part_length(k, splits, kernel.tile_k) : k;
  bool const cutlass = !std::strcmp(kernel.arch, "sm90");
  std::int64_t waves = cutlass ? bands(tiles_m, tiles_n, kernel.cluster_m, kernel.cluster_n, sm_count).waves : ceil_div(tiles * splits, sm_count);
  if (kernel.few_rows && waves < 2) waves = 2;
  double const area = double(kernel.tile_m) * kernel.tile_n / kernel.rate * (length < kernel.min_k ? 1.1 : 1);
  double const products = double(waves) * double(length) / double(k);
  return area * products + (splits > 1 ? double(ceil_div(tiles, sm_count)) * (kAddPart * splits + kLaunch) / double(k) : 0);
}

// The number of parts of K that takes the least time; of equal ones the smaller. No more than twice as many blocks as multiprocessors: a longer last wave is
// worth less than the memory that parts take.
constexpr int kMaxSplits = 16;
inline int best_splits(KernelInfo const& kernel, std::int64_t m, std::int64_t n, std::int64_t k, int sm_count) {
  std::int64_t const tiles = count_tiles(kernel, m, n);
  int best = 1;
  for (int splits = 2; kernel.splits && splits <= kMaxSplits && tiles * splits <= 2 * sm_count; ++splits)
    if (count_parts(k, splits, kernel.tile_k) == splits && cost(kernel, m, n, k, sm_count, splits) < cost(kernel, m, n, k, sm_count, best)) best = splits;
  return best;
}

// The cheapest kernel of (program, layout, dtype) that can run `g`, of the first architecture that has one; null, and the reason of the last refusal, if
// there is none. kSm80: the time of the kernels for few rows in units of SM90's, from bench/results/few_rows.json.
inline KernelInfo const* select_kernel(KernelTable table, Archs const& archs, char const* program, char const* layout, char const* dtype,
                                       GemmArguments const& g, int sm_count, char const** reason) {
  constexpr double kSm80 = 1.2;
  *reason = "no such kernel was built";
  KernelInfo const* best = nullptr;
  double best_cost = 0;
  auto const consider = [&](char const* arch, bool few_rows) {
    for (int i = 0; i < table.count; ++i) {
      KernelInfo const& kernel = *table.kernels[i];
      if (std::strcmp(kernel.arch, arch) || std::strcmp(kernel.program, program) || (few_rows && !kernel.few_rows)) continue;
      if (std::strcmp(kernel.layout, layout) || std::strcmp(kernel.dtype, dtype)) continue;
      if (char const* why = why_not(kernel, g)) {
        *reason = why;
        continue;
      }
      double const c = cost(kernel, g.m, g.n, g.k, sm_count, best_splits(kernel, g.m, g.n, g.k, sm_count)) * (few_rows ? kSm80 : 1);
      if (best == nullptr || c < best_cost) best = &kernel, best_cost = c;
    }
  };
  for (int a = 0; a < archs.count && best == nullptr; ++a) consider(archs.names[a], false);
  if (best != nullptr && !std::strcmp(best->arch, "sm90") && archs.few_rows != nullptr) consider(archs.few_rows, true);
  return best;
}

}  // namespace coda
