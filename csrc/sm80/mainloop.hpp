// acc = A B^T of one tile: cp.async through a ring of stages in shared memory, ldmatrix, mma.m16n8k16. Whatever lies outside of the matrices arrives as zeros.
//
// While the last tiles along K are multiplied, the stages of those before have nothing more to receive: the epilogue's own loads begin then, in their place.
#pragma once

#include "coda/params.h"
#include "sm80/config.hpp"
#include "sm80/device.hpp"
#include "sm80/layouts.hpp"

namespace coda::sm80 {

// One operand on its way to shared memory: which chunks of a tile this thread copies. kPaired: the tile's rows are groups of eight of the first half
// of the matrix and of the second one in turn, see coda/layouts.hpp.
template <int kTile, int kTileK, int kThreads, bool kMajorK_, bool kPaired>
struct Operand {
  static constexpr bool kMajorK = kMajorK_;
  static constexpr int kLine = kMajorK ? kTileK : kTile;  // elements
  static constexpr int kLines = kMajorK ? kTile : kTileK;
  static constexpr int kChunks = kLine / 8, kLinesAtOnce = kThreads / kChunks, kCopies = kLines / kLinesAtOnce;
  static constexpr int kBytes = 2 * kTile * kTileK;
  static_assert(kThreads % kChunks == 0 && kLines % kLinesAtOnce == 0, "every thread copies the same number of chunks");
  static_assert(kLinesAtOnce % (kPaired ? 16 : 8) == 0, "a thread's chunks are at the same place of the permutation");
  static_assert(!kPaired || kMajorK, "programs over two halves read K-major weights");

  char const* from;
  std::int64_t step, advance;  // bytes between a thread's chunks of a tile, and from tile to tile
  int left;                    // elements along K from the first chunk to the end
  unsigned inside;             // K-major: a bit for each chunk. Otherwise all or none
  int to;

  // Rows `first` and following, columns `first_k` to `end_k` - 1, of a matrix of `extent` rows.
  CODA_D Operand(Resource const& r, int first, int extent, int first_k, int end_k) {
    int const chunk = thread_index() % kChunks, line = thread_index() / kChunks;
    to = chunk_offset<kLine>(line, chunk);
    if constexpr (kMajorK) {
      int const row = kPaired ? first / 2 + line / 16 * 8 + line % 8 : first + line, rows = kPaired ? extent / 2 : extent;
      constexpr int kStep = kPaired ? kLinesAtOnce / 2 : kLinesAtOnce;
      std::int64_t const half = kPaired && line / 8 % 2 == 1 ? r.pair_stride : 0;
      from = static_cast<char const*>(r.data) + 2 * (half + row * r.ld + first_k + 8 * chunk);
      step = 2 * kStep * r.ld, advance = 2 * kTileK;
      left = end_k - first_k - 8 * chunk;
      inside = 0;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) inside |= unsigned(row + i * kStep < rows) << i;
    } else {
      from = static_cast<char const*>(r.data) + 2 * ((first_k + line) * r.ld + first + 8 * chunk);
      step = 2 * kLinesAtOnce * r.ld, advance = 2 * kTileK * r.ld;
      left = end_k - first_k - line;
      inside = first + 8 * chunk < extent;
    }
  }

  // Asks for the next tile along K.
  CODA_D void copy(SharedAddress stage) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      bool const valid = kMajorK ? (inside >> i & 1) != 0 && left > 0 : inside != 0 && left > i * kLinesAtOnce;
      copy_async(stage + to + 2 * kLine * kLinesAtOnce * i, from + i * step, valid);
    }
    from += advance, left -= kTileK;
  }
};

// Where a lane's addresses for ldmatrix are: blocks of 16 rows of a warp's kWarpTile, and 16 along K. Of the left operand the four matrices are
// (rows 0-7, k 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15); of the right one (0-7, 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15).
template <class Operand, int kWarpTile, bool kLeft>
struct Fragments {
  int offset;
  CODA_D Fragments(int warp, int lane) {
    int const low = lane % 8, second = lane / 8 % 2, fourth = lane / 16;
    int const row = kLeft ? second : fourth, k = kLeft ? fourth : second;  // in eights
    offset = Operand::kMajorK ? chunk_offset<Operand::kLine>(warp * kWarpTile + 8 * row + low, k)
                              : chunk_offset<Operand::kLine>(8 * k + low, warp * (kWarpTile / 8) + row);
  }
  // The permutation is an exclusive or, and so is a step to another chunk, if the chunk's bits were zero.
  CODA_D void load(std::uint32_t (&r)[4], SharedAddress stage, int block, int step) const {
    int const chunks = 32 * (Operand::kMajorK ? step : block), lines = 32 * Operand::kLine * (Operand::kMajorK ? block : step);
    load_matrices<!Operand::kMajorK>(r, stage + (offset ^ chunks) + lines);
  }
};

template <class Config, class Element, Layout kLayout, bool kPaired>
struct Mainloop {
  using A = Operand<Config::kTileM, Config::kTileK, Config::kThreads, kLayout != Layout::kNT, false>;
  using B = Operand<Config::kTileN, Config::kTileK, Config::kThreads, kLayout == Layout::kTN, kPaired>;
  static constexpr int kBlocksM = Config::kWarpM / 16, kBlocksN = Config::kWarpN / 16;
  static constexpr int kSteps = Config::kTileK / 16, kStages = Config::kStages;
  static constexpr int kStageBytes = Config::kStageBytes, kSharedBytes = kStages * kStageBytes;
  static_assert(kSteps % 2 == 0, "two sets of fragments take turns");

  using Accumulators = float[kBlocksM][2 * kBlocksN][4];

  // Products of columns k.first to k.end - 1, at least one. The last tile along K lies in stage `last`. ask(part), for parts 0 to kStages - 2, asks for what
  // the epilogue reads first, and may use the stages from last + 1 to last + 1 + part for it. All of it has arrived at the end, and all stages are free for
  // others.
  struct Range {
    int first, end;
  };
  template <class Ask>
  CODA_D static void run(Accumulators& acc, GemmArguments const& g, Range k, int first_m, int first_n, int warp_m, int warp_n, unsigned char* shared,
                         int last, Ask ask) {
    int const lane = thread_index() % 32, tiles = (k.end - k.first + Config::kTileK - 1) / Config::kTileK;
    A a(g.a, first_m, int(g.m), k.first, k.end);
    B b(g.b, first_n, int(g.n), k.first, k.end);
    Fragments<A, Config::kWarpM, true> const from_a(warp_m, lane);
    Fragments<B, Config::kWarpN, false> const from_b(warp_n, lane);
    SharedAddress const ring = shared_address(shared);

#pragma unroll
    for (int i = 0; i < kBlocksM; ++i)
#pragma unroll
      for (int j = 0; j < 2 * kBlocksN; ++j)
#pragma unroll
        for (int v = 0; v < 4; ++v) acc[i][j][v] = 0;

    int const first = (last + kStages - (tiles - 1) % kStages) % kStages;
    int write = first;
    auto const next = [](int stage) { return stage + 1 == kStages ? 0 : stage + 1; };
    auto const copy = [&](int tile) {  // one group of copies
      if (tile < tiles) {
        a.copy(ring + write * kStageBytes), b.copy(ring + write * kStageBytes + A::kBytes);
      } else {
        ask(tile - tiles);
      }
      commit_copies();
      write = next(write);
    };
#pragma unroll 1
    for (int s = 0; s < kStages - 1; ++s) copy(s);
    wait_copies<kStages - 2>();
    barrier();

    std::uint32_t left[2][kBlocksM][4], right[2][kBlocksN][4];
    auto const load = [&](int set, int stage, int step) {
      SharedAddress const at = ring + stage * kStageBytes;
#pragma unroll
      for (int i = 0; i < kBlocksM; ++i) from_a.load(left[set][i], at, i, step);
#pragma unroll
      for (int j = 0; j < kBlocksN; ++j) from_b.load(right[set][j], at + A::kBytes, j, step);
    };
    load(0, first, 0);
    int read = first;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (step == kSteps - 1) {
          // The next tile has arrived, and this one has been read by all: its stage is the one written to next. Behind the last tile its own fragments are
          // read once more, which no one uses: what the epilogue has asked for arrives in the other stages.
          wait_copies<kStages - 2>();
          barrier();
          if (tile + 1 < tiles) read = next(read);
        }
        load((step + 1) % 2, read, (step + 1) % kSteps);
        if (step == 0) copy(tile + kStages - 1);
#pragma unroll
        for (int i = 0; i < kBlocksM; ++i)
#pragma unroll
          for (int j = 0; j < 2 * kBlocksN; ++j) multiply<Element>(acc[i][j], left[step % 2][i], right[step % 2][j / 2][j % 2 * 2], right[step % 2][j / 2][j % 2 * 2 + 1]);
      }
    }
    wait_copies<0>();
    barrier();
  }
};

}  // namespace coda::sm80
