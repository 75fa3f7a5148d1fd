// Around the head's GEMM: the statistics of a row from those of its tiles, and the gradient of logits from their exponentials or from themselves.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "coda/dispatch.hpp"
#include "programs/loss.hpp"
#include "reduce/reduce.h"
#include "reduce/vector.cuh"

namespace coda::reduce {
namespace {

constexpr int kRowLanes = 8, kTileLanes = 64;

// A block has kRowLanes rows; lane y of a row takes the tiles y, y + kTileLanes, ... in turn, then lanes y and y + stride are combined, stride by stride.
__global__ void __launch_bounds__(kRowLanes* kTileLanes) finish_softmax_kernel(SoftmaxFinish p) {
  std::int64_t const row = std::int64_t(blockIdx.x) * kRowLanes + threadIdx.x;
  SoftmaxSums<float> sums{-INFINITY};
  float totals[2] = {};
  if (row < p.m) {
#pragma unroll 4
    for (std::int64_t t = threadIdx.y; t < p.tiles; t += kTileLanes) {
      float const* at = p.partials + t * p.ld + row;
      sums.add({at[0], at[p.plane], p.planes > 2 ? at[2 * p.plane] : 0.0f});
      if (p.planes > 3) totals[0] += at[3 * p.plane], totals[1] += at[4 * p.plane];
    }
  }
  __shared__ float lanes[5][kTileLanes][kRowLanes];
  for (int stride = kTileLanes; stride > 1; stride /= 2) {
    if (threadIdx.y < stride) {
      float const own[] = {sums.top, sums.sum, sums.dot, totals[0], totals[1]};
      for (int i = 0; i < 5; ++i) lanes[i][threadIdx.y][threadIdx.x] = own[i];
    }
    __syncthreads();
    if (threadIdx.y < stride / 2) {
      auto const other = [&](int i) { return lanes[i][threadIdx.y + stride / 2][threadIdx.x]; };
      sums.add({other(0), other(1), other(2)});
      totals[0] += other(3), totals[1] += other(4);
    }
    __syncthreads();
  }
  if (threadIdx.y != 0 || row >= p.m) return;
  p.lse[row] = sums.lse();
  if (p.planes > 2) p.mean_q[row] = sums.dot / sums.sum;
  if (p.planes > 3) p.total_z[row] = totals[0], p.total_q[row] = totals[1];
}

constexpr int kThreads = 256, kVector = 8;
static_assert(kThreads * kVector == kGradientColumns);

// A block has kGradientRows rows of kThreads * kVector columns, a thread kVector of them. All rows of the last columns come first: those have just been
// written, column by column, and are in the second-level cache in part; and the product that follows begins with the first ones.
struct Place {
  std::int64_t row_group, column_group;
  __device__ Place() : row_group(blockIdx.x), column_group(gridDim.y - 1 - blockIdx.y) {}
  __device__ std::int64_t row() const { return row_group * kGradientRows; }
  __device__ std::int64_t column() const { return (column_group * kThreads + threadIdx.x) * kVector; }
};

__device__ void write_dbias(float* dbias, std::int64_t n, Place const& at, float const (&sums)[kVector]) {
  if (dbias == nullptr) return;
#pragma unroll
  for (int j = 0; j < kVector; ++j)
    if (at.column() + j < n) dbias[at.row_group * n + at.column() + j] = sums[j];
}

// The rows are asked for kAhead at a time: each is written where it was read, and a load behind a store would wait for it.
template <class T, bool kCap>
__global__ void __launch_bounds__(kThreads) exponential_gradient_kernel(ExponentialGradient p) {
  constexpr int kAhead = 4;
  Place const at;
  std::int64_t const column = at.column(), begin = at.row();
  if (column >= p.n) return;
  float dbias[kVector] = {};
  for (std::int64_t first = begin; first < begin + kGradientRows && first < p.m; first += kAhead) {
    uint4 raw[kAhead];
    float reference[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i >= p.m) break;
      raw[i] = __ldcs(reinterpret_cast<uint4 const*>(static_cast<T const*>(p.values) + (first + i) * p.ld + column));
      reference[i] = __ldg(p.references + (first + i) * p.references_ld + column / kSoftmaxGroup);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      std::int64_t const m = first + i;
      if (m >= p.m) break;
      float e[kVector];
      load_vector(reinterpret_cast<__half const*>(&raw[i]), e);
      float const by_softmax = __ldg(p.factors + m), by_all = __ldg(p.factors + p.factors_ld + m), by_target = __ldg(p.factors + 2 * p.factors_ld + m);
      float const scale = exp2_(reference[i] - float(kExponentialShift) - __ldg(p.lse + m) * kLog2E<float>);
      float const rstd = p.rstd == nullptr ? 1.0f : __ldg(p.rstd + m);
      std::int64_t const target = __ldg(p.target + m) - column;
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        bool const is_target = target == j;
        float slope = 1;
        if constexpr (kCap) {
          // Where an exponential is 0, so is the gradient, but that of the target, whose z is known.
          float const z = is_target ? p.picked_z[m] : (log2_(e[j]) + reference[i] - float(kExponentialShift)) * kLn2<float>, t = z / p.cap;
          slope = fmaxf(1 - t * t, 0.0f);
        }
        e[j] = logit_gradient(e[j] * scale, slope, by_softmax, by_all, is_target ? by_target : 0.0f);
        dbias[j] += e[j];
        e[j] *= rstd;
      }
      store_vector(static_cast<T*>(p.values) + m * p.ld + column, e);
    }
  }
  write_dbias(p.dbias, p.n, at, dbias);
}

// The values of a row from `column` on, those from column n on 0; `whole`: rows lie so that they can be read by vectors.
template <class T>
__device__ void load_columns(T const* row, std::int64_t column, std::int64_t n, bool whole, float (&out)[kVector]) {
  if (whole && column + kVector <= n) {
    load_read_only(row + column, out);
  } else {
#pragma unroll
    for (int j = 0; j < kVector; ++j) out[j] = column + j < n ? float(row[column + j]) : 0.0f;
  }
}

template <class T, bool kCap>
__global__ void __launch_bounds__(kThreads) kept_logit_gradient_kernel(KeptLogitGradient p, bool whole, bool whole_incoming) {
  Place const at;
  std::int64_t const column = at.column(), begin = at.row();
  float bias[kVector] = {}, dbias[kVector] = {};
  if (p.bias != nullptr) load_columns(static_cast<T const*>(p.bias), column, p.n, false, bias);
  __shared__ float dots[kGradientRows][kThreads / 32];
#pragma unroll 2
  for (std::int64_t m = begin; m < begin + kGradientRows && m < p.m; ++m) {
    float logit[kVector], g[kVector] = {}, dot = 0;
    load_columns(static_cast<T const*>(p.logits) + m * p.ld, column, p.n, whole, logit);
    if (p.incoming != nullptr) load_columns(static_cast<T const*>(p.incoming) + m * p.incoming_ld, column, p.n, whole_incoming, g);
    float const by_softmax = __ldg(p.factors + m), by_all = __ldg(p.factors + p.factors_ld + m), by_target = __ldg(p.factors + 2 * p.factors_ld + m);
    float const lse = __ldg(p.lse + m), rstd = p.rstd == nullptr ? 1.0f : __ldg(p.rstd + m);
    std::int64_t const target = __ldg(p.target + m) - column;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if (column + j >= p.n) continue;
      auto const z = capped(logit[j], kCap ? p.cap : 0.0f);
      g[j] += logit_gradient(exp_(z.value - lse), z.slope, by_softmax, by_all, target == j ? by_target : 0.0f);
      dot += isinf(bias[j]) ? 0.0f : g[j] * (logit[j] - bias[j]);  // a column that the bias takes away has no gradient
      dbias[j] += g[j];
      g[j] *= rstd;
    }
    if (column < p.n) store_vector(static_cast<T*>(p.dz) + m * p.dz_ld + column, g);
    if (p.dots != nullptr) {
      dot = warp_sum(dot);
      if (threadIdx.x % 32 == 0) dots[m - begin][threadIdx.x / 32] = dot;
    }
  }
  if (p.dots != nullptr) {
    __syncthreads();
    if (threadIdx.x < kGradientRows && begin + threadIdx.x < p.m) {
      float sum = 0;
      for (int w = 0; w < kThreads / 32; ++w) sum += dots[threadIdx.x][w];
      p.dots[at.column_group * p.m + begin + threadIdx.x] = sum;
    }
  }
  write_dbias(p.dbias, p.n, at, dbias);
}

dim3 grid_of(std::int64_t m, std::int64_t n) { return {unsigned(ceil_div(m, kGradientRows)), unsigned(ceil_div(n, kGradientColumns))}; }

template <class T>
LaunchStatus launch(KeptLogitGradient const& p, void* stream) {
  auto const whole = [](void const* data, std::int64_t ld) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && ld % kVector == 0; };
  auto* const kernel = p.cap > 0 ? kept_logit_gradient_kernel<T, true> : kept_logit_gradient_kernel<T, false>;
  kernel<<<grid_of(p.m, p.n), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p, whole(p.logits, p.ld), whole(p.incoming, p.incoming_ld));
  return launched("kept_logit_gradient");
}

template <class T>
LaunchStatus launch(ExponentialGradient const& p, void* stream) {
  auto* const kernel = p.cap > 0 ? exponential_gradient_kernel<T, true> : exponential_gradient_kernel<T, false>;
  kernel<<<grid_of(p.m, p.n), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
  return launched("exponential_gradient");
}

// rows, ld: where the gradient is written, beyond n up to a whole vector.
template <class Gradient>
LaunchStatus launch_gradient(char const* name, Gradient const& args, void const* rows, std::int64_t ld, void* stream) {
  if (ld % kVector != 0 || ld < (args.n + kVector - 1) / kVector * kVector || reinterpret_cast<std::uintptr_t>(rows) % 16 != 0)
    return {name, "rows must be aligned to 16 bytes and have room for whole vectors"};
  if (args.n > 65535 * kGradientColumns) return {name, "more than 2^27 columns"};
  switch (args.dtype) {
    case DType::kBf16: return launch<__nv_bfloat16>(args, stream);
    case DType::kFp16: return launch<__half>(args, stream);
    default: return {name, "the gradient must be bf16 or fp16"};
  }
}

}  // namespace

LaunchStatus finish_softmax(SoftmaxFinish const& args, void* stream) {
  finish_softmax_kernel<<<unsigned(ceil_div(args.m, kRowLanes)), dim3(kRowLanes, kTileLanes), 0, static_cast<cudaStream_t>(stream)>>>(args);
  return launched("finish_softmax");
}

LaunchStatus exponential_gradient(ExponentialGradient const& args, void* stream) {
  return launch_gradient("exponential_gradient", args, args.values, args.ld, stream);
}

LaunchStatus kept_logit_gradient(KeptLogitGradient const& args, void* stream) {
  return launch_gradient("kept_logit_gradient", args, args.dz, args.dz_ld, stream);
}

}  // namespace coda::reduce
