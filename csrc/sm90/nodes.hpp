// Visitor nodes for resources that CUTLASS has no node for. All of them obey CUTLASS's node protocol (see
// cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp); NodeBase holds the parts of it that do nothing here.
#pragma once

#include "cutlass/epilogue/fusion/sm90_visitor_load_tma_warpspecialized.hpp"
#include "cutlass/epilogue/fusion/sm90_visitor_store_tma_warpspecialized.hpp"
#include "cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp"
#include "cutlass/gemm/collective/builders/sm90_common.inl"

namespace coda::sm90 {

namespace fusion = cutlass::epilogue::fusion;
using namespace cute;
using cutlass::Array;

struct NodeBase {
  struct SharedStorage {};

  template <class ProblemShape, class Arguments>
  static bool can_implement(ProblemShape const&, Arguments const&) {
    return true;
  }
  template <class ProblemShape, class Arguments>
  static size_t get_workspace_size(ProblemShape const&, Arguments const&) {
    return 0;
  }
  template <class ProblemShape, class Arguments>
  static cutlass::Status initialize_workspace(ProblemShape const&, Arguments const&, void*, cudaStream_t, cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }
  CUTLASS_DEVICE bool is_producer_load_needed() const { return false; }
  CUTLASS_DEVICE bool is_C_load_needed() const { return false; }
  template <class... Args>
  CUTLASS_DEVICE auto get_producer_load_callbacks(fusion::detail::ProducerLoadArgs<Args...> const&) {
    return fusion::detail::EmptyProducerLoadCallbacks{};
  }
};

// A number from the kernel's parameters.
struct ScalarNode : NodeBase {
  struct Arguments {
    float value = 0;
  };
  using Params = Arguments;
  template <class ProblemShape>
  static constexpr Params to_underlying_arguments(ProblemShape const&, Arguments const& args, void*) {
    return args;
  }
  CUTLASS_HOST_DEVICE ScalarNode() {}
  CUTLASS_HOST_DEVICE ScalarNode(Params const& params, SharedStorage const&) : value(params.value) {}
  float value = 0;

  struct Callbacks : fusion::detail::EmptyConsumerStoreCallbacks {
    float value;
    CUTLASS_DEVICE explicit Callbacks(float v) : value(v) {}
    template <class Acc, int kFragment>
    CUTLASS_DEVICE auto visit(Array<Acc, kFragment> const&, int, int, int) {
      Array<float, kFragment> result;
      result.fill(value);
      return result;
    }
  };
  template <bool, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(fusion::detail::ConsumerStoreArgs<Args...> const&) {
    return Callbacks(value);
  }
};

// The half-width output of a pairwise program. The epilogue runs over subtiles of kEpilogueM x (8, 2, kEpilogueN / 16); the value of a
// pair belongs to the half-width tensor's subtile of kEpilogueM x kEpilogueN / 2 with the same subtile number, in standard fragment
// order (layouts.hpp). So this is a plain auxiliary store, only with its own tile shapes.
template <class Config, class Element>
struct HalfTileNode : NodeBase {
  static constexpr int kStages = Config::kStagesStore;
  using EpilogueTile = Shape<Int<Config::kEpilogueM>, Int<Config::kEpilogueN / 2>>;
  using CtaTile = Shape<Int<Config::kTileM>, Int<Config::kTileN / 2>>;
  static_assert(Config::kEpilogueN % 32 == 0, "half a subtile is stored by stmatrix x4, which takes 16 columns");

  using SmemAtom = decltype(cutlass::gemm::collective::detail::ss_smem_selector<GMMA::Major::K, Element, Int<Config::kEpilogueM>,
                                                                                Int<Config::kEpilogueN / 2>>());
  using SmemLayoutTma = decltype(tile_to_shape(SmemAtom{}, EpilogueTile{}, Step<_1, _2>{}));
  using SmemLayout = decltype(tile_to_shape(SmemLayoutTma{}, append<3>(EpilogueTile{}, Int<kStages>{}), Step<_1, _2, _3>{}));
  using StrideMNL = Stride<int64_t, _1, int64_t>;

  struct SharedStorage {
    alignas(cutlass::detail::alignment_for_swizzle(SmemLayout{})) cutlass::array_aligned<Element, size(SmemLayout{})> smem;
  };
  struct Arguments {
    Element* data = nullptr;
    StrideMNL stride{};
  };
  using Tma = decltype(make_tma_copy(SM90_TMA_STORE{},
                                     make_tensor(static_cast<Element*>(nullptr), repeat_like(StrideMNL{}, int32_t(0)), StrideMNL{}),
                                     SmemLayoutTma{}));
  struct Params {
    Tma tma;
    int half_n;
  };

  template <class ProblemShape>
  static constexpr Params to_underlying_arguments(ProblemShape const& problem_shape, Arguments const& args, void*) {
    auto const [M, N, K, L] = problem_shape;
    int const half_n = int(size(N)) / 2;
    return {make_tma_copy(SM90_TMA_STORE{}, make_tensor(args.data, make_layout(make_shape(M, half_n, L), args.stride)), SmemLayoutTma{}), half_n};
  }

  CUTLASS_HOST_DEVICE HalfTileNode() {}
  CUTLASS_HOST_DEVICE HalfTileNode(Params const& p, SharedStorage const& storage)
      : params(&p), smem(const_cast<Element*>(storage.smem.data())) {}
  Params const* params = nullptr;
  Element* smem = nullptr;

  template <class RTensor, class TiledR2S, class STensorR2S, class STensorS2G, class GTensorS2G>
  struct Callbacks : fusion::detail::EmptyConsumerStoreCallbacks {
    RTensor tC_rHalf;     // (CPY,CPY_M,CPY_N)
    TiledR2S tiled_r2s;
    STensorR2S tRS_sHalf;  // (R2S,R2S_M,R2S_N,PIPE)
    STensorS2G bSG_sHalf;  // (S2G,S2G_M,S2G_N,PIPE)
    GTensorS2G bSG_gHalf;  // (S2G,S2G_M,S2G_N,EPI_M,EPI_N)
    Params const* params;

    CUTLASS_DEVICE Callbacks(RTensor const& r, TiledR2S t, STensorR2S const& rs, STensorS2G const& sg, GTensorS2G const& gg, Params const* p)
        : tC_rHalf(r), tiled_r2s(t), tRS_sHalf(rs), bSG_sHalf(sg), bSG_gHalf(gg), params(p) {}

    // The values of the pairs of fragment number epi_v.
    template <int kPairs>
    CUTLASS_DEVICE void put(Array<float, kPairs> const& values, int epi_v) {
      auto fragments = recast<Array<Element, kPairs>>(coalesce(tC_rHalf));
      fragments(epi_v) = cutlass::NumericArrayConverter<Element, float, kPairs>{}(values);
    }
    CUTLASS_DEVICE void postreduce(int, int, int store_iteration, bool issue_smem_store) {
      if (issue_smem_store) {
        auto tRS_rHalf = make_tensor(tC_rHalf.data(), layout(tiled_r2s.get_slice(0).retile_S(RTensor{})));
        copy(tiled_r2s, tRS_rHalf, tRS_sHalf(_, _, _, store_iteration % kStages));
      }
    }
    CUTLASS_DEVICE void tma_store(int epi_m, int epi_n, int store_iteration, bool issue_tma_store) {
      if (issue_tma_store) copy(params->tma, bSG_sHalf(_, _, _, store_iteration % kStages), bSG_gHalf(_, _, _, epi_m, epi_n));
    }
  };

  template <bool kReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(fusion::detail::ConsumerStoreArgs<Args...> const& args) {
    static_assert(kReferenceSrc, "the SM90 TMA epilogue partitions by the source of its register-to-shared copy");
    auto const [M, N, K, L] = args.problem_shape_mnkl;
    auto const [m, n, k, l] = args.tile_coord_mnkl;
    auto mHalf = params->tma.get_tma_tensor(make_shape(M, params->half_n, L));   // (M,N/2,L)
    // The N coordinate of a nested mode is (0, 0, tile): CUTLASS's scheduler counts tiles in the outermost mode.
    auto gHalf = local_tile(mHalf, CtaTile{}, make_coord(m, get<2>(n), l));       // (CTA_M,CTA_N/2)
    auto gHalf_epi = flat_divide(gHalf, EpilogueTile{});                          // (EPI_M,EPI_N/2,#EPI_M,#EPI_N)
    auto tiled_r2s = make_tiled_copy_S(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, args.tiled_copy);
    auto thread_r2s = tiled_r2s.get_slice(args.thread_idx);
    auto sHalf = as_position_independent_swizzle_tensor(make_tensor(make_smem_ptr(smem), SmemLayout{}));  // (EPI_M,EPI_N/2,PIPE)
    auto tRS_sHalf = thread_r2s.partition_D(sHalf);
    auto tC_rHalf = make_tensor<Element>(take<0, 3>(shape(thread_r2s.partition_S(gHalf_epi))));
    auto block_s2g = params->tma.get_slice(_0{});
    auto bSG_sHalf = block_s2g.partition_S(sHalf);
    auto bSG_gHalf = block_s2g.partition_D(gHalf_epi);
    return Callbacks<decltype(tC_rHalf), decltype(tiled_r2s), decltype(tRS_sHalf), decltype(bSG_sHalf), decltype(bSG_gHalf)>(
        tC_rHalf, tiled_r2s, tRS_sHalf, bSG_sHalf, bSG_gHalf, params);
  }
};

}  // namespace coda::sm90
