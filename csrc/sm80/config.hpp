// The compile-time choices of one SM80 kernel. csrc/kernels.py holds the rows and the reason for each.
#pragma once

namespace coda::sm80 {

// kWarpsM x kWarpsN warps share a tile; kBlocks blocks are to fit a multiprocessor's registers, so that the epilogue of one runs under the products of
// the other. kSplits: there is code for products split along K too.
template <int kTileM_, int kTileN_, int kTileK_, int kWarpsM_, int kWarpsN_, int kStages_, int kBlocks_, bool kSplits_ = false>
struct Config {
  static constexpr bool kSplits = kSplits_;
  static constexpr int kTileM = kTileM_, kTileN = kTileN_, kTileK = kTileK_;
  static constexpr int kWarpsM = kWarpsM_, kWarpsN = kWarpsN_;
  static constexpr int kStages = kStages_, kBlocks = kBlocks_;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kStageBytes = 2 * (kTileM + kTileN) * kTileK;
  static constexpr int kWarpM = kTileM / kWarpsM, kWarpN = kTileN / kWarpsN;  // the tile of a warp
  static_assert(kWarpM == 32 || kWarpM == 64, "a warp's rows are blocks of 16, two or four of them");
  static_assert(kWarpN == 32 || kWarpN == 64, "a warp's columns are blocks of 16, two or four of them");
  static_assert(kTileK == 32 || kTileK == 64, "a line of a tile is 64 or 128 bytes");
  static_assert(kStages >= 3, "the epilogue's copies begin two tiles before the last one");
};

// How the operands are stored. acc = A B^T with A [M, K] and B [N, K].
enum class Layout { kTN /* both K-major */, kNN /* B N-major */, kNT /* A M-major, B N-major */ };

}  // namespace coda::sm80
