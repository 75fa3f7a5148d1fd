// Value by value: programs without a product, which are the gradient of an activation whose incoming gradient is a tensor already, with the same
// functions as in the GEMMs' epilogues, driven by the code of the CPU back end; and a factor for a tensor.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
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

// A thread takes vectors, those of the first block also what is left over. So many blocks fill any device, and take no time to find a factor of 1.
constexpr std::int64_t kScaleBlocks = 4096;
template <class T, class Out>
__global__ void __launch_bounds__(kThreads) scale_kernel(T const* values, Out* out, std::int64_t count, float const* factor) {
  constexpr int kVector = 16 / sizeof(T);
  float const f = *factor;
  if (f == 1.0f && static_cast<void const*>(values) == out) return;
  std::int64_t const vectors = count / kVector;
#pragma unroll 4
  for (std::int64_t i = std::int64_t(blockIdx.x) * kThreads + threadIdx.x; i < vectors; i += std::int64_t(gridDim.x) * kThreads) {
    float v[kVector];
    load_vector(values + i * kVector, v);
#pragma unroll
    for (int j = 0; j < kVector; ++j) v[j] *= f;
    store_vector(out + i * kVector, v);
  }
  std::int64_t const left = vectors * kVector + threadIdx.x;
  if (blockIdx.x == 0 && left < count) out[left] = Out(float(values[left]) * f);
}

}  // namespace

LaunchStatus scale(DType dtype, void const* values, DType out_dtype, void* out, std::int64_t count, float const* factor, void* stream) {
  if (reinterpret_cast<std::uintptr_t>(values) % 16 != 0 || reinterpret_cast<std::uintptr_t>(out) % 16 != 0)
    return {"scale", "the values must be aligned to 16 bytes"};
  std::int64_t const blocks = std::clamp<std::int64_t>(ceil_div(count, kThreads * 8), 1, kScaleBlocks);
  auto const run = [&](auto from, auto to) {
    using T = decltype(from);
    using Out = decltype(to);
    scale_kernel<<<unsigned(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<T const*>(values), static_cast<Out*>(out), count, factor);
    return launched("scale");
  };
  if (out_dtype == DType::kBf16 && dtype == DType::kBf16) return run(__nv_bfloat16(), __nv_bfloat16());
  if (out_dtype == DType::kBf16 && dtype == DType::kFp32) return run(float(), __nv_bfloat16());
  if (out_dtype == DType::kFp16 && dtype == DType::kFp16) return run(__half(), __half());
  if (out_dtype == DType::kFp16 && dtype == DType::kFp32) return run(float(), __half());
  return {"scale", "the result must be bf16 or fp16, the values the same or fp32"};
}

LaunchStatus pointwise(char const* program, DType dtype, GemmArguments const& g) {
  auto const is = [&](char const* name) { return !std::strcmp(program, name); };
  if (is("dswiglu")) return launch<DGlu<Silu>>(dtype, g);
  if (is("dgeglu")) return launch<DGlu<Gelu>>(dtype, g);
  if (is("dact")) return launch<DAct>(dtype, g);
  if (is("dact_layer")) return launch<DActLayer>(dtype, g);
  return {"pointwise", "the program was not built for use without a product"};
}

}  // namespace coda::reduce
