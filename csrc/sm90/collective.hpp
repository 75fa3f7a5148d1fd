// The SM90 epilogue of one tile: CUTLASS's collective with loops of our own.
//
// What moves a tile through shared memory has to be ordered between the threads, which read and write it, and TMA, which does so through the async proxy.
// CUTLASS fences twice and synchronises twice a subtile, with all threads of a tile. A fence takes about 350 cycles, in all of which a warp does nothing else,
// and with a subtile's arithmetic at about 1300 that made epilogues longer than the products under which pingpong hides them. Here:
//
//   - who reuses a buffer of a load fences: the producer's thread, once it knows that all threads have read. They only arrive.
//   - one fence and one barrier serve kSubtilesPerStore subtiles. Before it arrives there, the warp that issues stores waits until the buffers of the
//     next subtiles are free, so that the barrier says two things: these subtiles are written, and the next ones may be.
//
// A tile has as many subtiles as go round the stages a whole number of times, so the stage of each is known at compile time.
#pragma once

#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp"
#include "sm90/config.hpp"

namespace coda::sm90 {

using namespace cute;

// Base is CUTLASS's collective, which holds the parameters and the shared memory. kLoads: the program loads tiles. kColumnsFirst: subtiles of the same rows
// follow each other; else, and always with loads, those of the same columns.
template <class Base, class Config, bool kLoads, bool kColumnsFirst>
struct Collective : Base {
  using typename Base::CtaTileMNK, typename Base::EpilogueTile, typename Base::ElementD;
  using typename Base::LoadPipeline, typename Base::LoadPipelineState, typename Base::StorePipeline, typename Base::StorePipelineState;
  using typename Base::Params, typename Base::TensorStorage;
  using Visitor = typename Base::FusionCallbacks;
  static constexpr bool kMain = !cute::is_void_v<ElementD>;  // a tile is the collective's own D
  static constexpr int kM = Config::kTileM / Config::kEpilogueM, kN = Config::kTileN / Config::kEpilogueN, kSubtiles = kM * kN;
  static constexpr int kFragment = Base::DispatchPolicy::FragmentSize;
  static constexpr int kStagesLoad = Config::kStagesLoad, kStagesStore = Config::kStagesStore;
  static constexpr int kGroup = Config::kSubtilesPerStore, kGroups = kStagesStore / kGroup;
  static_assert(kSubtiles % kStagesStore == 0 && kStagesStore % kGroup == 0 && kGroups >= 2);
  static_assert(!kLoads || (kSubtiles % kStagesLoad == 0 && !kColumnsFirst));

  CUTLASS_HOST_DEVICE Collective(Params const& p, TensorStorage& storage) : Base(p, storage), params(p), visitor(p.thread, storage.thread) {}

  static constexpr CUTLASS_HOST_DEVICE int row_of(int subtile) { return kColumnsFirst ? subtile / kN : subtile % kM; }
  static constexpr CUTLASS_HOST_DEVICE int column_of(int subtile) { return kColumnsFirst ? subtile % kN : subtile / kM; }

  // The producer's warp.
  template <class Problem, class TileShape, class TileCoord, class TiledMma>
  CUTLASS_DEVICE auto load(LoadPipeline pipeline, LoadPipelineState state, Problem problem, TileShape, TileCoord coord, TiledMma mma, int thread, TensorStorage&,
                           int = -1) {
    auto callbacks = visitor.get_producer_load_callbacks(
        cutlass::epilogue::fusion::detail::ProducerLoadArgs(problem, CtaTileMNK{}, coord, mma, EpilogueTile{}, thread));
    bool const issues = cute::elect_one_sync();
    CUTLASS_PRAGMA_UNROLL
    for (int s = 0; s < kSubtiles; ++s, ++state) {
      uint64_t* const barrier = pipeline.producer_get_barrier(state);
      pipeline.producer_acquire(state);
      if (issues) cutlass::arch::fence_view_async_shared();  // the reads that the barrier tells of come before the write
      callbacks.step(barrier, row_of(s), column_of(s), state.count(), issues);
      pipeline.producer_commit(state);
    }
    return state;
  }

  // The consumers' warps.
  template <class Problem, class TileShape, class TileCoord, class Engine, class Layout, class TiledMma>
  CUTLASS_DEVICE auto store(LoadPipeline load_pipeline, LoadPipelineState load_state, StorePipeline, StorePipelineState store_state, Problem problem, TileShape,
                            TileCoord coord, cute::Tensor<Engine, Layout> accumulators, TiledMma mma, int thread, TensorStorage& storage, int = -1) {
    auto const [M, N, K, L] = problem;
    auto const [m, n, k, l] = coord;
    auto const r2s = make_tiled_copy_S(Copy_Atom<typename Base::CopyOpR2S, Element>{}, make_tiled_copy_C_atom(typename Base::CopyAtomC{}, mma));
    auto const thread_r2s = r2s.get_slice(thread);
    auto const fragments = recast<cutlass::Array<float, kFragment>>(thread_r2s.retile_S(accumulators));
    CUTE_STATIC_ASSERT_V(size<0>(fragments) == Int<kN>{} && size<1>(fragments) == Int<kM>{} && size<2>(fragments) == _1{});

    auto const smem = as_position_independent_swizzle_tensor(make_tensor(make_smem_ptr(storage.collective.smem_D.begin()), SmemLayout{}));
    auto const gmem = flat_divide(
        local_tile(coalesce(params.tma_store_d.get_tma_tensor(make_shape(M, N, L)), take<0, 2>(CtaTileMNK{})), take<0, 2>(CtaTileMNK{}), make_coord(m, n, l)),
        EpilogueTile{});
    auto const to_smem = thread_r2s.partition_D(smem);  // (R2S,R2S_M,R2S_N,PIPE)
    auto const s2g = params.tma_store_d.get_slice(_0{});
    auto const from_smem = s2g.partition_S(smem);  // (S2G,S2G_M,S2G_N,PIPE)
    auto const to_gmem = s2g.partition_D(gmem);    // (S2G,S2G_M,S2G_N,EPI_M,EPI_N)
    auto values = make_tensor<Element>(take<0, 3>(shape(thread_r2s.partition_S(smem))));

    // Of the arguments our nodes read the problem, the tile, the copy and the thread.
    auto callbacks = visitor.template get_consumer_store_callbacks</*kReferenceSrc=*/true>(cutlass::epilogue::fusion::detail::ConsumerStoreArgs(
        problem, CtaTileMNK{}, coord, mma, EpilogueTile{}, r2s, _0{}, _0{}, _0{}, _0{}, values, thread));
    bool const loads = kLoads && visitor.is_producer_load_needed();
    bool const issues = thread / cutlass::NumThreadsPerWarp == 0;
    auto const synchronize = [&] { cutlass::arch::NamedBarrier::sync(size(TiledMma{}), cutlass::arch::ReservedNamedBarriers::EpilogueBarrier); };

    callbacks.begin();
    if (callbacks.begin_sync_needed()) synchronize();
    CUTLASS_PRAGMA_UNROLL
    for (int s = 0; s < kSubtiles; ++s) {
      int const row = row_of(s), column = column_of(s), stage = s % kStagesStore;
      LoadPipelineState const loaded(s % kStagesLoad, load_state.phase() ^ (s / kStagesLoad % 2), s);
      if (loads) load_pipeline.consumer_wait(loaded);
      callbacks.previsit(row, column, s % kStagesLoad, loads);
      if (loads) load_pipeline.consumer_release(loaded);
      recast<cutlass::Array<Element, kFragment>>(values)(0) = callbacks.visit(fragments(column, row, 0), 0, row, column);
      if constexpr (kMain) copy(r2s, values, to_smem(_, _, _, stage));
      callbacks.postreduce(row, column, stage, true);
      if ((s + 1) % kGroup != 0) continue;

      cutlass::arch::fence_view_async_shared();
      if (issues) tma_store_wait<kGroups - 2>();
      synchronize();
      if (issues) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = s + 1 - kGroup; i <= s; ++i) {
          if constexpr (kMain) copy(params.tma_store_d, from_smem(_, _, _, i % kStagesStore), to_gmem(_, _, _, row_of(i), column_of(i)));
          callbacks.tma_store(row_of(i), column_of(i), i % kStagesStore, true);
        }
        tma_store_arrive();
      }
    }
    callbacks.end();
    load_state.advance(kSubtiles);
    store_state.advance(kSubtiles);
    return cute::make_tuple(load_state, store_state);
  }

 private:
  using Element = cute::conditional_t<kMain, ElementD, typename Visitor::ElementAux>;
  using SmemLayout = decltype(tile_to_shape(typename Base::SmemLayoutAtomD{}, make_shape(size<0>(EpilogueTile{}), size<1>(EpilogueTile{}), Int<kStagesStore>{}),
                                            Step<_1, _2, _3>{}));
  Params const& params;
  Visitor visitor;
};

}  // namespace coda::sm90
