#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <type_traits>

#include "coda/dispatch.hpp"
#include "programs/norm.hpp"
#include "reduce/reduce.h"
#include "reduce/vector.cuh"

namespace coda::reduce {
namespace {

// A thread owns kVector neighbouring columns at a time, whatever the alignment, so that sums have one order and the same values give the
// same bits in any memory. Aligned rows are read and written 16 bytes at once, others element by element.
constexpr int kVector = 8;

// `count`: how many of the kVector columns exist; the others read as zero.
template <bool kAligned, class T>
__device__ void load(T const* p, std::int64_t count, float (&out)[kVector]) {
  if constexpr (kAligned) {
    constexpr int kCount = 16 / sizeof(T);  // fp32 weights beside 16-bit activations take two loads
#pragma unroll
    for (int j = 0; j < kVector; j += kCount) {
      auto const pack = *reinterpret_cast<Pack<T, kCount> const*>(p + j);
#pragma unroll
      for (int i = 0; i < kCount; ++i) out[j + i] = float(pack.values[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) out[i] = i < count ? float(p[i]) : 0.0f;
  }
}

template <bool kAligned, class T>
__device__ void store(T* p, std::int64_t count, float const (&in)[kVector]) {
  if constexpr (kAligned) {
    static_assert(sizeof(T) * kVector == 16, "one 16-byte store");
    Pack<T, kVector> pack;
#pragma unroll
    for (int i = 0; i < kVector; ++i) pack.values[i] = T(in[i]);
    *reinterpret_cast<Pack<T, kVector>*>(p) = pack;
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      if (i < count) p[i] = T(in[i]);
  }
}

constexpr int kRowThreads = 128;

// One block a row. The order of the sum: each thread its vectors, then a butterfly over the warp, then the warps in turn.
template <class T, class W, bool kAligned>
__global__ void __launch_bounds__(kRowThreads) row_stats_kernel(RowStats p) {
  std::int64_t const row = blockIdx.x;
  T const* x = static_cast<T const*>(p.x) + row * p.x_ld;
  W const* gamma = static_cast<W const*>(p.gamma);
  T* h = static_cast<T*>(p.h) + row * p.d;
  float sum = 0;
  for (std::int64_t d = std::int64_t(threadIdx.x) * kVector; d < p.d; d += kRowThreads * kVector) {
    float v[kVector];
    load<kAligned>(x + d, p.d - d, v);
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum += v[i] * v[i];
    if (gamma != nullptr) {
      float g[kVector];
      load<kAligned>(gamma + d, p.d - d, g);
#pragma unroll
      for (int i = 0; i < kVector; ++i) v[i] *= g[i];
      store<kAligned>(h + d, p.d - d, v);
    }
  }
  sum = block_sum<kRowThreads>(sum);
  if (threadIdx.x == 0) p.rstd[row] = rstd_from_sum(sum, float(p.d), p.eps);
}

// The row twice, or three times if it is to be normalised: the mean first, then the squares about it, which no mean is too large for.
template <class T, class W, bool kAligned>
__global__ void __launch_bounds__(kRowThreads) layer_stats_kernel(LayerStats p) {
  std::int64_t const row = blockIdx.x;
  T const* x = static_cast<T const*>(p.x) + row * p.x_ld;
  W const* gamma = static_cast<W const*>(p.gamma);
  W const* beta = static_cast<W const*>(p.beta);
  T* h = static_cast<T*>(p.h) + row * p.d;
  __shared__ float shared[2];
  float sum = 0;
  for (std::int64_t d = std::int64_t(threadIdx.x) * kVector; d < p.d; d += kRowThreads * kVector) {
    float v[kVector];
    load<kAligned>(x + d, p.d - d, v);
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum += v[i];
  }
  sum = block_sum<kRowThreads>(sum);
  if (threadIdx.x == 0) p.mean[row] = shared[0] = sum / float(p.d);
  __syncthreads();
  float const mean = shared[0];
  float squares = 0;
  for (std::int64_t d = std::int64_t(threadIdx.x) * kVector; d < p.d; d += kRowThreads * kVector) {
    float v[kVector];
    load<kAligned>(x + d, p.d - d, v);
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      if (kAligned || d + i < p.d) squares += (v[i] - mean) * (v[i] - mean);
    if (gamma != nullptr && !p.normalised) {
      float g[kVector];
      load<kAligned>(gamma + d, p.d - d, g);
#pragma unroll
      for (int i = 0; i < kVector; ++i) v[i] *= g[i];
      store<kAligned>(h + d, p.d - d, v);
    }
  }
  squares = block_sum<kRowThreads>(squares);
  if (threadIdx.x == 0) p.rstd[row] = shared[1] = rstd_from_sum(squares, float(p.d), p.eps);
  if (!p.normalised) return;
  __syncthreads();
  float const rstd = shared[1];
  for (std::int64_t d = std::int64_t(threadIdx.x) * kVector; d < p.d; d += kRowThreads * kVector) {
    float v[kVector], w[kVector];
    load<kAligned>(x + d, p.d - d, v);
#pragma unroll
    for (int i = 0; i < kVector; ++i) v[i] = (v[i] - mean) * rstd;
    if (gamma != nullptr) {
      load<kAligned>(gamma + d, p.d - d, w);
#pragma unroll
      for (int i = 0; i < kVector; ++i) v[i] *= w[i];
    }
    if (beta != nullptr) {
      load<kAligned>(beta + d, p.d - d, w);
#pragma unroll
      for (int i = 0; i < kVector; ++i) v[i] += w[i];
    }
    store<kAligned>(h + d, p.d - d, v);
  }
}

// One block a row of w; the order of both sums is that of row_stats_kernel.
template <class T, class W, bool kAligned>
__global__ void __launch_bounds__(kRowThreads) layer_vectors_kernel(LayerVectors p) {
  std::int64_t const row = blockIdx.x;
  T const* w = static_cast<T const*>(p.w) + row * p.w_ld;
  W const* gamma = static_cast<W const*>(p.gamma);
  W const* beta = static_cast<W const*>(p.beta);
  float u = 0, v = 0;
  for (std::int64_t d = std::int64_t(threadIdx.x) * kVector; d < p.d; d += kRowThreads * kVector) {
    float values[kVector], weights[kVector];
    load<kAligned>(w + d, p.d - d, values);
    if (gamma == nullptr) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) u += values[i];
    } else {
      load<kAligned>(gamma + d, p.d - d, weights);
#pragma unroll
      for (int i = 0; i < kVector; ++i) u += values[i] * weights[i];
    }
    if (beta != nullptr) {
      load<kAligned>(beta + d, p.d - d, weights);
#pragma unroll
      for (int i = 0; i < kVector; ++i) v += values[i] * weights[i];
    }
  }
  u = block_sum<kRowThreads>(u);
  v = block_sum<kRowThreads>(v);
  if (threadIdx.x != 0) return;
  p.u[row] = u;
  p.v[row] = p.bias == nullptr ? v : v + float(static_cast<T const*>(p.bias)[row]);
}

__global__ void finish_rows_kernel(RowFinish p) {
  std::int64_t const row = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= p.m) return;
  float sum = 0;
#pragma unroll 8
  for (std::int64_t t = 0; t < p.tiles; ++t) sum += p.partials[t * p.ld + row];
  p.out[row] = p.function == RowFinish::kRstd ? rstd_from_sum(sum, p.width, p.eps)
                                              : norm_correction(p.rstd == nullptr ? 1.0f : p.rstd[row], sum, p.width);
}

__global__ void finish_layer_kernel(LayerFinish p) {
  std::int64_t const row = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= p.m) return;
  float sum = 0, second = 0;
#pragma unroll 8
  for (std::int64_t t = 0; t < p.tiles; ++t) sum += p.partials[t * p.ld + row], second += p.second[t * p.ld + row];
  if (p.function == LayerFinish::kMoments) {
    auto const moments = moments_from_sums(second, sum, p.width, p.eps);
    p.out[row] = moments.rstd;
    p.second_out[row] = moments.mean;
  } else {
    p.out[row] = norm_correction(p.rstd[row], sum, p.width);
    p.second_out[row] = norm_offset(p.rstd[row], second, p.width);
  }
}

constexpr int kColumnLanes = 32, kGroupLanes = 32;

// A block sums kColumnLanes columns; lane g of a column takes the groups g, g + kGroupLanes, ... in turn, then the lanes are added in order.
template <class T>
__global__ void __launch_bounds__(kColumnLanes* kGroupLanes)
    sum_groups_kernel(float const* partials, std::int64_t ld, std::int64_t groups, std::int64_t n, T* out) {
  std::int64_t const column = std::int64_t(blockIdx.x) * kColumnLanes + threadIdx.x;
  float sum = 0;
  if (column < n) {
#pragma unroll 4
    for (std::int64_t g = threadIdx.y; g < groups; g += kGroupLanes) sum += partials[g * ld + column];
  }
  __shared__ float lanes[kGroupLanes][kColumnLanes];
  lanes[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= n) return;
  for (int g = 1; g < kGroupLanes; ++g) sum += lanes[g][threadIdx.x];
  out[column] = T(sum);
}

// Calls f(T{}, W{}, bool constant kAligned) for the run-time types.
template <class T, class F>
LaunchStatus with_weight(DType weight, bool vector, F f) {
  auto const width = [&](auto w) { return vector ? f(T(), w, std::true_type{}) : f(T(), w, std::false_type{}); };
  return weight == DType::kFp32 ? width(float()) : width(T());
}

template <class F>
LaunchStatus with_types(DType dtype, DType weight, bool vector, F f) {
  if (weight != DType::kFp32 && weight != dtype) return {"types", "the norm's weight must have x's dtype or fp32"};
  switch (dtype) {
    case DType::kBf16: return with_weight<__nv_bfloat16>(weight, vector, f);
    case DType::kFp16: return with_weight<__half>(weight, vector, f);
    default: return {"types", "x must be bf16 or fp16"};
  }
}

bool is_aligned(void const* p) { return reinterpret_cast<std::uintptr_t>(p) % kBaseAlignment == 0; }

}  // namespace

LaunchStatus row_stats(RowStats const& args, void* stream) {
  if (args.m > kMaxExtent) return {"row_stats", "more than 2^31 - 1 rows"};
  bool const vector = args.d % 8 == 0 && args.x_ld % 8 == 0 && is_aligned(args.x) && is_aligned(args.gamma) && is_aligned(args.h);
  return with_types(args.dtype, args.weight_dtype, vector, [&](auto t, auto w, auto aligned) {
    row_stats_kernel<decltype(t), decltype(w), decltype(aligned)::value>
        <<<unsigned(args.m), kRowThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
    return launched("row_stats");
  });
}

LaunchStatus layer_stats(LayerStats const& args, void* stream) {
  if (args.m > kMaxExtent) return {"layer_stats", "more than 2^31 - 1 rows"};
  bool const vector = args.d % 8 == 0 && args.x_ld % 8 == 0 && is_aligned(args.x) && is_aligned(args.gamma) && is_aligned(args.beta) && is_aligned(args.h);
  return with_types(args.dtype, args.weight_dtype, vector, [&](auto t, auto w, auto aligned) {
    layer_stats_kernel<decltype(t), decltype(w), decltype(aligned)::value>
        <<<unsigned(args.m), kRowThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
    return launched("layer_stats");
  });
}

LaunchStatus layer_vectors(LayerVectors const& args, void* stream) {
  if (args.n > kMaxExtent) return {"layer_vectors", "more than 2^31 - 1 rows"};
  bool const vector = args.d % 8 == 0 && args.w_ld % 8 == 0 && is_aligned(args.w) && is_aligned(args.gamma) && is_aligned(args.beta);
  return with_types(args.dtype, args.weight_dtype, vector, [&](auto t, auto w, auto aligned) {
    layer_vectors_kernel<decltype(t), decltype(w), decltype(aligned)::value>
        <<<unsigned(args.n), kRowThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
    return launched("layer_vectors");
  });
}

LaunchStatus finish_layer(LayerFinish const& args, void* stream) {
  finish_layer_kernel<<<unsigned(ceil_div(args.m, 64)), 64, 0, static_cast<cudaStream_t>(stream)>>>(args);
  return launched("finish_layer");
}

LaunchStatus finish_rows(RowFinish const& args, void* stream) {
  finish_rows_kernel<<<unsigned(ceil_div(args.m, 64)), 64, 0, static_cast<cudaStream_t>(stream)>>>(args);
  return launched("finish_rows");
}

LaunchStatus sum_groups(float const* partials, std::int64_t ld, std::int64_t groups, std::int64_t n, DType dtype, void* out, void* stream) {
  auto const run = [&](auto t) {
    using T = decltype(t);
    sum_groups_kernel<T><<<unsigned(ceil_div(n, kColumnLanes)), dim3(kColumnLanes, kGroupLanes), 0, static_cast<cudaStream_t>(stream)>>>(
        partials, ld, groups, n, static_cast<T*>(out));
    return launched("sum_groups");
  };
  return dtype == DType::kFp32 ? run(float()) : dtype == DType::kBf16 ? run(__nv_bfloat16()) : run(__half());
}

}  // namespace coda::reduce
