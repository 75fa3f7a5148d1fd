// One SM80 kernel: a program, a tile configuration, an operand layout, an element type; and its launch. It runs on compute capability 8.0 and everything
// newer; on Hopper for tests (CODA_FORCE_ARCH=sm80) and for what no SM90 kernel can take.
//
// A product with few tiles and a long K would leave multiprocessors idle. Where the manifest says so there is code to split it along K: two launches, with
// the accumulators of the parts in memory between them.
#pragma once

#include <cuda_runtime.h>

#include "coda/registry.h"
#include "sm80/block.hpp"

namespace coda::sm80 {

template <class Block>
__global__ void __launch_bounds__(Block::Config::kThreads, Block::Config::kBlocks) kernel(GemmArguments const g, Grid const grid) {
  extern __shared__ __align__(128) unsigned char shared[];
  Block(g, tile_of(grid, int(blockIdx.x)), shared).run();
}

// All programs of a layout share it: Block is one of NoProgram.
template <class Block>
__global__ void __launch_bounds__(Block::Config::kThreads, Block::Config::kBlocks) part_kernel(GemmArguments const g, Grid const grid) {
  extern __shared__ __align__(128) unsigned char shared[];
  int const tiles = grid.tiles_m * grid.tiles_n, part = int(blockIdx.x) / tiles, number = int(blockIdx.x) - part * tiles;
  Block(g, tile_of(grid, number), shared).run_part(part, number, tiles);
}

template <class Block>
__global__ void __launch_bounds__(Block::Config::kThreads, Block::Config::kBlocks) add_kernel(GemmArguments const g, Grid const grid) {
  extern __shared__ __align__(128) unsigned char shared[];
  Block(g, tile_of(grid, int(blockIdx.x)), shared).add_parts(int(blockIdx.x), grid.tiles_m * grid.tiles_n);
}

template <class Program, class Config, class Element, Layout kLayout, int kBand, int kRaster>
struct Gemm {
  using Block = sm80::Block<Program, Config, Element, kLayout>;
  using PartBlock = sm80::Block<NoProgram<Block::kPaired>, Config, Element, kLayout>;

  static LaunchStatus launch(GemmArguments const& g) {
    if (!whole_vectors(g, typename Program::Sinks{})) return {"launch", "a tensor with fewer columns must have a multiple of 8 of them"};
    Grid grid;
    std::int64_t const tiles_m = (g.m + Config::kTileM - 1) / Config::kTileM, tiles_n = (g.n + Config::kTileN - 1) / Config::kTileN;
    if (tiles_m * tiles_n * g.splits > std::int64_t(1) << 30) return {"launch", "the product has more tiles than a grid"};
    grid.tiles_m = int(tiles_m), grid.tiles_n = int(tiles_n);
    grid.along_m = (g.raster > 0 ? g.raster : kRaster) == 1;
    int const across = grid.along_m ? grid.tiles_n : grid.tiles_m, band = g.swizzle > 0 ? g.swizzle : kBand;
    grid.band = band < across ? band : across;
    if (g.splits == 1) return launch<Block>(kernel<Block>, tiles_m * tiles_n, g, grid);
    if constexpr (Config::kSplits) {
      if (count_parts(g.k, g.splits, Config::kTileK) != g.splits) return {"launch", "K has fewer tiles than it is to have parts"};
      if (LaunchStatus const status = launch<PartBlock>(part_kernel<PartBlock>, tiles_m * tiles_n * g.splits, g, grid); !status.ok()) return status;
      return launch<Block>(add_kernel<Block>, tiles_m * tiles_n, g, grid);
    }
    return {"launch", "this kernel does not split K"};
  }

 private:
  template <class Launched>
  static LaunchStatus launch(void (*function)(GemmArguments, Grid), std::int64_t blocks, GemmArguments const& g, Grid const& grid) {
    if (cudaError_t e = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, Launched::kSharedMemory); e != cudaSuccess)
      return {"cudaFuncSetAttribute", cudaGetErrorString(e)};
    function<<<unsigned(blocks), Config::kThreads, Launched::kSharedMemory, static_cast<cudaStream_t>(g.stream)>>>(g, grid);
    if (cudaError_t e = cudaGetLastError(); e != cudaSuccess) return {"launch", cudaGetErrorString(e)};
    return {};
  }
  template <class... Ss>
  static bool whole_vectors(GemmArguments const& g, List<Ss...>) {
    int i = 0;
    return ((!std::is_same_v<Ss, TileStore> | (g.sinks[i++].columns % 8 == 0)) && ...);
  }
};

// What a generated source calls to describe its kernel.
template <class Program, class Config, class Element, Layout kLayout, int kBand, int kRaster>
constexpr KernelInfo describe(char const* key, char const* program, char const* layout, char const* dtype, double rate, int min_k, bool few_rows = false) {
  using G = Gemm<Program, Config, Element, kLayout, kBand, kRaster>;
  constexpr bool kHeads = kPairingOf<Program> == Pairing::kHeadHalves;
  return {key, program, "sm80", layout, dtype, Config::kTileM, Config::kTileN, Config::kTileK, 1, 1, Config::kStages, G::Block::kSharedMemory, Config::kThreads,
          kPairingOf<Program> == Pairing::kHalves ? 2 : 1, 0, kHeads ? Config::kTileN : 0, kHasHeadMean<Program>, Config::kTileM, 8, rate, min_k, &G::launch,
          Config::kSplits, few_rows};
}

}  // namespace coda::sm80
