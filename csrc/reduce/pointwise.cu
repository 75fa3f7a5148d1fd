// Programs without a product: the gradient of an activation whose incoming gradient is a tensor already. The same functions as in the GEMMs'
// epilogues, driven by the code of the CPU back end.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstring>

#include "coda/dispatch.hpp"
#include "host/program.hpp"
#include "programs/activation.hpp"
#include "programs/glu.hpp"
#include "reduce/reduce.h"
#include "reduce/vector.cuh"

namespace coda::reduce {
namespace {

constexpr int kThreads = 256;

// One block a group of rows, so that a thread can add up the columns it owns.
template <class Program, class T>
__global__ void __launch_bounds__(kThreads) pointwise_kernel(GemmArguments g) {
  std::int64_t const begin = std::int64_t(blockIdx.x) * host::kGroupRows;
  for (std::int64_t m = begin; m < begin + host::kGroupRows && m < g.m; ++m) {
    float sums[Program::Sinks::size] = {};
    host::detail::run_row<Program, T, float>(g, static_cast<T const*>(g.a.data) + m * g.a.ld, m, std::int64_t(threadIdx.x), std::int64_t(kThreads), sums);
    host::detail::for_row_partials<Program>([&](std::size_t s) {
      float const sum = block_sum<kThreads>(sums[s]);
      if (threadIdx.x == 0) static_cast<float*>(g.sinks[s].data)[m] = sum;
    });
  }
}

template <class Program>
LaunchStatus launch(DType dtype, GemmArguments const& g) {
  auto const run = [&](auto t) {
    pointwise_kernel<Program, decltype(t)><<<unsigned(ceil_div(g.m, host::kGroupRows)), kThreads, 0, static_cast<cudaStream_t>(g.stream)>>>(g);
    return launched("pointwise");
  };
  switch (dtype) {
    case DType::kBf16: return run(__nv_bfloat16());
    case DType::kFp16: return run(__half());
    default: return {"pointwise", "the tensors must be bf16 or fp16"};
  }
}

}  // namespace

LaunchStatus pointwise(char const* program, DType dtype, GemmArguments const& g) {
  auto const is = [&](char const* name) { return !std::strcmp(program, name); };
  if (is("dswiglu")) return launch<DGlu<Silu>>(dtype, g);
  if (is("dgeglu")) return launch<DGlu<Gelu>>(dtype, g);
  if (is("dact")) return launch<DAct>(dtype, g);
  if (is("dact_layer")) return launch<DActLayer>(dtype, g);
  return {"pointwise", "the program was not built for use without a product"};
}

}  // namespace coda::reduce
