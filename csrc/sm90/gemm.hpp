// One SM90 kernel: mainloop, program, tile configuration, operand layout, element type; and its launch.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "coda/dispatch.hpp"
#include "coda/params.h"
#include "coda/registry.h"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "sm90/config.hpp"
#include "sm90/epilogue.hpp"

namespace coda::sm90 {

template <class Program, class Config, class Element, Layout kLayout, int kRaster>
struct Gemm {
  static constexpr bool kPaired = kPairingOf<Program> == Pairing::kHalves;
  static_assert(!kPaired || kLayout == Layout::kTN, "programs over two halves read K-major weights");

  using StrideColumn = Stride<_1, int64_t, int64_t>;
  using StridePairedB = Stride<Stride<int64_t, int64_t, int64_t>, _1, int64_t>;
  using StrideA = cute::conditional_t<kLayout == Layout::kNT, StrideColumn, StrideRow>;
  using StrideB = cute::conditional_t<kPaired, StridePairedB, cute::conditional_t<kLayout == Layout::kTN, StrideRow, StrideColumn>>;
  using ShapeN = cute::conditional_t<kPaired, PairedShapeN, int>;

  using Epilogue = sm90::Epilogue<Program, Config, Element>;
  using EpilogueCollective = typename Epilogue::Collective;
  using Cluster = Shape<Int<Config::kClusterM>, Int<Config::kClusterN>, _1>;
  using MainloopSchedule =
      cute::conditional_t<Config::kCooperative, cutlass::gemm::KernelTmaWarpSpecializedCooperative, cutlass::gemm::KernelTmaWarpSpecializedPingpong>;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, StrideA, 8, Element, StrideB, 8, float, typename Epilogue::Tile::Cta, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename EpilogueCollective::SharedStorage))>,
      MainloopSchedule>::CollectiveOp;
  using Kernel =
      cutlass::gemm::kernel::GemmUniversal<Shape<int, ShapeN, int, int>, Mainloop, EpilogueCollective, cutlass::gemm::PersistentScheduler>;
  using Device = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static constexpr int kStages = Mainloop::DispatchPolicy::Stages;
  static constexpr int kSharedMemory = static_cast<int>(Kernel::SharedStorageSize);
  static constexpr int kThreads = static_cast<int>(Kernel::MaxThreadsPerBlock);

  // An encoded descriptor has bits set.
  template <class Tma>
  static bool is_encoded(Tma const& tma) {
    auto const* descriptor = tma.get_tma_descriptor();
    auto const* bytes = reinterpret_cast<unsigned char const*>(descriptor);
    return std::any_of(bytes, bytes + sizeof *descriptor, [](unsigned char b) { return b != 0; });
  }

  static LaunchStatus launch(GemmArguments const& g) {
    cudaStream_t const stream = static_cast<cudaStream_t>(g.stream);

    typename Device::Arguments args{};
    args.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    if constexpr (kPaired) {
      args.problem_shape = {int(g.m), PairedShapeN{_8{}, _2{}, int(g.n / 16)}, int(g.k), 1};
    } else {
      args.problem_shape = {int(g.m), int(g.n), int(g.k), 1};
    }
    args.mainloop.ptr_A = static_cast<Element const*>(g.a.data);
    if constexpr (kLayout == Layout::kNT) {
      args.mainloop.dA = {_1{}, g.a.ld, 0};
    } else {
      args.mainloop.dA = {g.a.ld, _1{}, 0};
    }
    args.mainloop.ptr_B = static_cast<Element const*>(g.b.data);
    if constexpr (kPaired) {
      args.mainloop.dB = {{g.b.ld, g.b.pair_stride, 8 * g.b.ld}, _1{}, 0};
    } else if constexpr (kLayout == Layout::kTN) {
      args.mainloop.dB = {g.b.ld, _1{}, 0};
    } else {
      args.mainloop.dB = {_1{}, g.b.ld, 0};
    }
    args.epilogue = Epilogue::arguments(g);

    if (cudaError_t e = cudaGetDevice(&args.hw_info.device_id); e != cudaSuccess) return {"cudaGetDevice", cudaGetErrorString(e)};
    // A thread that has not used the device yet (autograd's, for one) has no current context, and the driver's function that encodes TMA descriptors
    // does not make one, as the runtime's do.
    if (cudaError_t e = cudaSetDevice(args.hw_info.device_id); e != cudaSuccess) return {"cudaSetDevice", cudaGetErrorString(e)};
    args.hw_info.sm_count = g.sm_count;
    if (args.hw_info.sm_count == 0) {
      cudaError_t e = cudaDeviceGetAttribute(&args.hw_info.sm_count, cudaDevAttrMultiProcessorCount, args.hw_info.device_id);
      if (e != cudaSuccess) return {"cudaDeviceGetAttribute", cudaGetErrorString(e)};
    }
    using Raster = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90Params::RasterOrderOptions;
    auto const fitting = [&] {
      return bands(coda::ceil_div(g.m, Config::kTileM), coda::ceil_div(g.n, Config::kTileN), Config::kClusterM, Config::kClusterN, args.hw_info.sm_count).width;
    };
    args.scheduler.max_swizzle_size = g.swizzle > 0 ? g.swizzle : fitting();
    args.scheduler.raster_order = (g.raster > 0 ? g.raster : kRaster) == 1 ? Raster::AlongM : Raster::AlongN;

    if (auto s = Device::can_implement(args); s != cutlass::Status::kSuccess) return {"can_implement", cutlassGetStatusString(s)};
    if (Device::get_workspace_size(args) != 0) return {"get_workspace_size", "this kernel was built to need none"};
    Device gemm;
    if (auto s = gemm.initialize(args, nullptr, stream); s != cutlass::Status::kSuccess) return {"initialize", cutlassGetStatusString(s)};
    // CUTLASS does not say that a descriptor could not be encoded; a kernel that met it would die of an illegal instruction.
    auto const& params = gemm.params();
    bool encoded = is_encoded(params.mainloop.tma_load_a) && is_encoded(params.mainloop.tma_load_b);
    if constexpr (Epilogue::kMain >= 0) encoded = encoded && is_encoded(params.epilogue.tma_store_d);
    if (!encoded) return {"initialize", "the driver refused to encode a TMA descriptor"};
    if (auto s = gemm.run(stream); s != cutlass::Status::kSuccess) return {"run", cutlassGetStatusString(s)};
    if (cudaError_t e = cudaGetLastError(); e != cudaSuccess) return {"launch", cudaGetErrorString(e)};
    return {};
  }
};

// What a generated source calls to describe its kernel.
template <class Program, class Config, class Element, Layout kLayout, int kRaster>
constexpr KernelInfo describe(char const* key, char const* program, char const* layout, char const* dtype, double rate, int min_k) {
  using G = Gemm<Program, Config, Element, kLayout, kRaster>;
  return {key, program, "sm90", layout, dtype, Config::kTileM, Config::kTileN, Config::kTileK, Config::kClusterM, Config::kClusterN,
          G::kStages, G::kSharedMemory, G::kThreads, G::kPaired ? 2 : 1,
          kPairingOf<Program> == Pairing::kHeadHalves ? Config::kEpilogueN : 0, 0, kHasHeadMean<Program>, Config::kTileM / (Config::kEpilogueM / 16), 8, rate, min_k, &G::launch};
}

}  // namespace coda::sm90
