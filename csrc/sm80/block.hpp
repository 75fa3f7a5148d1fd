// What one block of an SM80 kernel does, and which tile it does it for.
#pragma once

#include "coda/params.h"
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

template <class Program, class Config_, class Element, Layout kLayout>
struct Block {
  using Config = Config_;
  static constexpr bool kPaired = kPairingOf<Program> == Pairing::kHalves;
  using Mainloop = sm80::Mainloop<Config, Element, kLayout, kPaired>;
  using Epilogue = sm80::Epilogue<Program, Config, Element>;
  static constexpr int kReused = Mainloop::kSharedBytes > Epilogue::kSharedBytes ? Mainloop::kSharedBytes : Epilogue::kSharedBytes;
  static constexpr int kSharedMemory = kReused + Epilogue::kRowBytes;

  CODA_D static void run(GemmArguments const& g, TileIndex tile, unsigned char* shared) {
    int const warp = thread_index() / 32, warp_m = warp % Config::kWarpsM, warp_n = warp / Config::kWarpsM;
    int const first_m = tile.m * Config::kTileM, first_n = tile.n * Config::kTileN;
    float* const rows = reinterpret_cast<float*>(shared + kReused);
    typename Mainloop::Accumulators acc;
    Mainloop::run(acc, g, first_m, first_n, warp_m, warp_n, shared, Epilogue::kLastStage,
                  [&](int part) { Epilogue::ask(g, first_m, first_n, shared, rows, part); });
    Epilogue::run(acc, g, first_m, first_n, warp_m, warp_n, shared, rows);
  }
};

}  // namespace coda::sm80
