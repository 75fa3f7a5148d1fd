#include "reduce/reduce.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <type_traits>

#include "coda/dispatch.hpp"
#include "programs/norm.hpp"

namespace coda::reduce {
namespace {

// A thread owns kVector neighbouring columns at a time, whatever the alignment, so that sums have one order and the same values give the
// same bits in any memory. Aligned rows are read and written 16 bytes at once, others element by element.
constexpr int kVector = 8;

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T values[kCount];
};

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
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
  __shared__ float warps[kRowThreads / 32];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kRowThreads / 32; ++w) sum += warps[w];
    p.rstd[row] = rstd_from_sum(sum, float(p.d), p.eps);
  }
}

constexpr int kColumnLanes = 32, kRowLanes = 8;

// A block covers kColumnLanes vectors of columns and one chunk of rows; each thread walks every kRowLanes-th row of the chunk.
template <class T, class W, bool kAligned>
__global__ void __launch_bounds__(kColumnLanes* kRowLanes) norm_backward_kernel(NormBackward p, std::int64_t rows_per_chunk) {
  std::int64_t const column = (std::int64_t(blockIdx.x) * kColumnLanes + threadIdx.x) * kVector;
  bool const inside = column < p.d;
  float g[kVector] = {}, sum[kVector] = {};
  if (inside && p.dx != nullptr) load<kAligned>(static_cast<W const*>(p.gamma) + column, p.d - column, g);
  std::int64_t const begin = blockIdx.y * rows_per_chunk, end = begin + rows_per_chunk < p.m ? begin + rows_per_chunk : p.m;
  if (inside) {
    for (std::int64_t row = begin + threadIdx.y; row < end; row += kRowLanes) {
      float dn[kVector], x[kVector];
      load<kAligned>(static_cast<T const*>(p.dn) + row * p.d + column, p.d - column, dn);
      load<kAligned>(static_cast<T const*>(p.x) + row * p.x_ld + column, p.d - column, x);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum[i] += dn[i] * x[i];
      if (p.dx != nullptr) {
        float const correction = norm_correction(p.rstd[row], p.row_dot[row], float(p.d));
#pragma unroll
        for (int i = 0; i < kVector; ++i) dn[i] = norm_dx(dn[i], x[i], g[i], correction);
        store<kAligned>(static_cast<T*>(p.dx) + row * p.d + column, p.d - column, dn);
      }
    }
  }
  if (p.dgamma == nullptr) return;
  __shared__ float lanes[kRowLanes][kColumnLanes * kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) lanes[threadIdx.y][threadIdx.x * kVector + i] = sum[i];
  __syncthreads();
  int const tid = threadIdx.y * kColumnLanes + threadIdx.x;
  if (tid < kColumnLanes * kVector) {
    float total = 0;
#pragma unroll
    for (int r = 0; r < kRowLanes; ++r) total += lanes[r][tid];
    std::int64_t const d = std::int64_t(blockIdx.x) * kColumnLanes * kVector + tid;
    if (d < p.d) p.partials[blockIdx.y * p.d + d] = total;
  }
}

template <class W>
__global__ void sum_column_partials_kernel(float const* partials, std::int64_t chunks, std::int64_t d, W* out) {
  std::int64_t const column = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (column >= d) return;
  float sum = 0;
  for (std::int64_t c = 0; c < chunks; ++c) sum += partials[c * d + column];
  out[column] = W(sum);
}

__global__ void sum_row_partials_kernel(float const* partials, std::int64_t ld, std::int64_t tiles, std::int64_t m, float* out) {
  std::int64_t const row = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= m) return;
  float sum = 0;
  for (std::int64_t t = 0; t < tiles; ++t) sum += partials[t * ld + row];
  out[row] = sum;
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

LaunchStatus launched(char const* kernel) {
  cudaError_t const e = cudaGetLastError();
  return e == cudaSuccess ? LaunchStatus{} : LaunchStatus{kernel, cudaGetErrorString(e)};
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

std::int64_t norm_backward_chunks(std::int64_t m, std::int64_t d) {
  // About a thousand blocks fill any current GPU a few times; fewer rows than kRowLanes in a chunk would leave threads idle.
  std::int64_t const strips = ceil_div(d, kColumnLanes * kVector), most = ceil_div(m, kRowLanes), wanted = ceil_div(1024, strips);
  return most < wanted ? most : wanted;
}

LaunchStatus norm_backward(NormBackward const& args, void* stream) {
  bool const vector = args.d % 8 == 0 && args.x_ld % 8 == 0 && is_aligned(args.x) && is_aligned(args.gamma) && is_aligned(args.dn) && is_aligned(args.dx);
  std::int64_t const chunks = norm_backward_chunks(args.m, args.d);
  cudaStream_t const s = static_cast<cudaStream_t>(stream);
  return with_types(args.dtype, args.weight_dtype, vector, [&](auto t, auto w, auto aligned) -> LaunchStatus {
    using W = decltype(w);
    dim3 const grid(unsigned(ceil_div(args.d, kColumnLanes * kVector)), unsigned(chunks));
    norm_backward_kernel<decltype(t), W, decltype(aligned)::value><<<grid, dim3(kColumnLanes, kRowLanes), 0, s>>>(args, ceil_div(args.m, chunks));
    if (auto status = launched("norm_backward"); !status.ok() || args.dgamma == nullptr) return status;
    sum_column_partials_kernel<<<unsigned(ceil_div(args.d, 128)), 128, 0, s>>>(args.partials, chunks, args.d, static_cast<W*>(args.dgamma));
    return launched("sum_column_partials");
  });
}

LaunchStatus sum_row_partials(float const* partials, std::int64_t ld, std::int64_t tiles, std::int64_t m, float* out, void* stream) {
  sum_row_partials_kernel<<<unsigned(ceil_div(m, 128)), 128, 0, static_cast<cudaStream_t>(stream)>>>(partials, ld, tiles, m, out);
  return launched("sum_row_partials");
}

}  // namespace coda::reduce
