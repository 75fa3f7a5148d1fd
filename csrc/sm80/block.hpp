// What one block of an SM80 kernel does, and which tile it does it for.
#pragma once

#include "coda/params.h"
#include "coda/registry.h"
#include "sm80/config.hpp"
#include "sm80/epilogue.hpp"
#include "sm80/mainloop.hpp"

namespace coda::sm80 {

// Tiles in bands: `band` of them across, all along the other direction, so that the blocks that run at a time share operands in the second-level cache.
struct Grid {
  int tiles_m, tiles_n, band;
  bool along_m;  // a band is as high as the matrix
};

struct TileIndex {
  int m, n;
};

CODA_HD TileIndex tile_of(Grid const& grid, int block) {
  int const along = grid.along_m ? grid.tiles_m : grid.tiles_n, across = grid.along_m ? grid.tiles_n : grid.tiles_m;
  int const number = block / (grid.band * along), rest = block - number * (grid.band * along);
  int const left = across - number * grid.band, width = left < grid.band ? left : grid.band;
  int const i = rest / width, j = number * grid.band + rest % width;
  return grid.along_m ? TileIndex{i, j} : TileIndex{j, i};
}

// Where only products are wanted.
template <bool kPaired>
struct NoProgram {
  static constexpr int kColumns = kPaired ? 2 : 1;
  static constexpr Pairing kPairing = kPaired ? Pairing::kHalves : Pairing::kNone;
  using Loads = List<>;
  using Sinks = List<>;
};

template <class Program, class Config_, class Element, Layout kLayout>
struct Block {
  using Config = Config_;
  static constexpr bool kPaired = kPairingOf<Program> == Pairing::kHalves;
  using Mainloop = sm80::Mainloop<Config, Element, kLayout, kPaired>;
  using Epilogue = sm80::Epilogue<Program, Config, Element>;
  static constexpr int kReused = Mainloop::kSharedBytes > Epilogue::kSharedBytes ? Mainloop::kSharedBytes : Epilogue::kSharedBytes;
  static constexpr int kSharedMemory = kReused + Epilogue::kRowBytes;

  int const warp = thread_index() / 32, warp_m = warp % Config::kWarpsM, warp_n = warp / Config::kWarpsM;
  GemmArguments const& g;
  int const first_m, first_n;
  unsigned char* const shared;
  float* const rows;
  typename Mainloop::Accumulators acc;

  CODA_D Block(GemmArguments const& g, TileIndex tile, unsigned char* shared)
      : g(g), first_m(tile.m * Config::kTileM), first_n(tile.n * Config::kTileN), shared(shared), rows(reinterpret_cast<float*>(shared + kReused)) {}

  CODA_D void run() {
    Mainloop::run(acc, g, {0, int(g.k)}, first_m, first_n, warp_m, warp_n, shared, Epilogue::kLastStage, [&](int part) { ask(part); });
    finish();
  }

  // Split-K, in two launches: first a block for each tile and part of K, which leaves its accumulators behind, then one for each tile, which adds them in
  // the order of the parts. number: of the tile, among all `tiles`.
  CODA_D void run_part(int part, int number, int tiles) {
    int const length = int(part_length(g.k, g.splits, Config::kTileK)), begin = part * length, end = begin + length;
    Mainloop::run(acc, g, {begin, end < g.k ? end : int(g.k)}, first_m, first_n, warp_m, warp_n, shared, 0, [](int) {});
    for_all_fours(part, number, tiles, [](float* four, float* memory) { store_four(memory, four); });
  }
  CODA_D void add_parts(int number, int tiles) {
#pragma unroll 1
    for (int i = 0; i < Config::kStages - 1; ++i) ask(i);
    commit_copies();
    for_all_fours(0, number, tiles, [](float* four, float* memory) { load_four(four, memory); });
#pragma unroll 1
    for (int part = 1; part < g.splits; ++part) {
      for_all_fours(part, number, tiles, [](float* four, float* memory) {
        float more[4];
        load_four(more, memory);
#pragma unroll
        for (int v = 0; v < 4; ++v) four[v] += more[v];
      });
    }
    wait_copies<0>();
    barrier();
    finish();
  }

 private:
  CODA_D void ask(int part) { Epilogue::ask(g, first_m, first_n, shared, rows, part); }
  CODA_D void finish() { Epilogue::run(acc, g, first_m, first_n, warp_m, warp_n, shared, rows); }

  // Every four accumulators, and where they are among the parts.
  template <class F>
  CODA_D void for_all_fours(int part, int number, int tiles, F f) {
    constexpr int kFours = Mainloop::kBlocksM * 2 * Mainloop::kBlocksN;
    float* const memory = g.parts + 4 * ((std::int64_t(part) * tiles + number) * kFours * Config::kThreads + thread_index());
#pragma unroll
    for (int i = 0; i < kFours; ++i) f(acc[i / (2 * Mainloop::kBlocksN)][i % (2 * Mainloop::kBlocksN)], memory + 4 * Config::kThreads * i);
  }
};

}  // namespace coda::sm80
