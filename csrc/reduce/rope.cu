// Rotary embedding of whole rows. The backward reads what attention's backward left, turns it back, scales it and forms the row sum that the
// norm's gradient needs, in one pass.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <type_traits>

#include "coda/dispatch.hpp"
#include "programs/norm.hpp"
#include "programs/rope.hpp"
#include "reduce/reduce.h"
#include "reduce/vector.cuh"

namespace coda::reduce {
namespace {

constexpr int kThreads = 256;

template <class T>
__device__ float element(void const* p, bool wide, std::int64_t i) {
  return wide ? static_cast<float const*>(p)[i] : float(static_cast<T const*>(p)[i]);
}

// One block a row. A thread takes blocks of kVector neighbouring columns; for rotate-half the block of the first half of a head brings its
// partner in the second half along. The scalar version has kVector 1, or 2 for interleaved pairs.
template <class T, int kVector, bool kInterleaved, bool kBackward>
__global__ void __launch_bounds__(kThreads) rope_kernel(Rope p) {
  std::int64_t const m = blockIdx.x;
  Rotation const& turn = p.rotation;
  int const head_dim = int(turn.head_dim), rotary = int(turn.rotary_dim), n = int(p.n), columns = int(turn.columns);
  std::int64_t const position = turn.positions == nullptr ? m % turn.period
                                : turn.positions64        ? static_cast<std::int64_t const*>(turn.positions)[m]
                                                          : static_cast<int const*>(turn.positions)[m];
  T const* y = static_cast<T const*>(p.y) + m * p.y_ld;
  T* out = static_cast<T*>(p.out) + m * p.out_ld;
  float const scale = kBackward && p.rstd != nullptr ? p.rstd[m] : 1.0f;
  // Where column `column` of this row comes from.
  auto const source = [&](int column) -> T const* {
    if constexpr (!kBackward) return y + column;
    int begin = 0, which = 0;
    while (column >= begin + int(p.gradients[which].columns)) begin += int(p.gradients[which++].columns);
    Rope::Gradient const& g = p.gradients[which];
    int const head = (column - begin) / head_dim;
    return static_cast<T const*>(g.data) + m / p.sequence * g.batch_stride + m % p.sequence * g.sequence_stride + head * g.head_stride +
           (column - begin - head * head_dim);
  };
  float dot = 0;
  // `before` is the gradient as it came, `after` the one turned back.
  auto const finish = [&](int column, float const (&before)[kVector], float (&after)[kVector]) {
    if constexpr (kBackward) {
      float saved[kVector];
      load_vector(y + column, saved);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        dot += before[i] * saved[i];
        if (p.bias != nullptr) dot -= after[i] * element<T>(p.bias, p.wide_bias, column + i);
        after[i] *= scale;
      }
    }
    store_vector(out + column, after);
  };
  constexpr float kDirection = kBackward ? -1.0f : 1.0f;
  for (int column = threadIdx.x * kVector; column < n; column += kThreads * kVector) {
    int const c = column % head_dim;
    float a[kVector], new_a[kVector];
    if (column >= columns || c >= rotary) {
      if constexpr (kBackward) {
        load_vector(source(column), a);
#pragma unroll
        for (int i = 0; i < kVector; ++i) new_a[i] = a[i];
        finish(column, a, new_a);
      }
      continue;
    }
    if constexpr (kInterleaved) {
      load_vector(source(column), a);
#pragma unroll
      for (int i = 0; i < kVector; i += 2) {
        float const cos = element<T>(p.cos, p.wide_tables, position * p.cos_ld + (c + i) / 2);
        float const sin = element<T>(p.sin, p.wide_tables, position * p.sin_ld + (c + i) / 2) * kDirection;
        auto const turned = rotate(a[i], a[i + 1], cos, sin);
        new_a[i] = turned.a, new_a[i + 1] = turned.b;
      }
      finish(column, a, new_a);
    } else {
      if (c >= rotary / 2) continue;
      float b[kVector], new_b[kVector];
      load_vector(source(column), a);
      load_vector(source(column + rotary / 2), b);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        float const cos = element<T>(p.cos, p.wide_tables, position * p.cos_ld + c + i);
        float const sin = element<T>(p.sin, p.wide_tables, position * p.sin_ld + c + i) * kDirection;
        auto const turned = rotate(a[i], b[i], cos, sin);
        new_a[i] = turned.a, new_b[i] = turned.b;
      }
      finish(column, a, new_a);
      finish(column + rotary / 2, b, new_b);
    }
  }
  if constexpr (kBackward) {
    dot = block_sum<kThreads>(dot);
    if (threadIdx.x == 0) p.correction[m] = norm_correction(scale, dot, p.width);
  }
}

template <class T, bool kBackward>
LaunchStatus launch(Rope const& p, void* stream) {
  auto const aligned = [](void const* data, std::int64_t stride) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride % 8 == 0; };
  std::int64_t const unit = p.interleaved ? p.rotation.rotary_dim : p.rotation.rotary_dim / 2;
  bool vector = p.n % 8 == 0 && p.rotation.head_dim % 8 == 0 && unit % 8 == 0 && aligned(p.y, p.y_ld) && aligned(p.out, p.out_ld);
  if (kBackward)
    for (auto const& g : p.gradients)
      vector = vector && aligned(g.data, g.batch_stride) && g.sequence_stride % 8 == 0 && g.head_stride % 8 == 0;
  auto const run = [&](auto width, auto interleaved) {
    rope_kernel<T, decltype(width)::value, decltype(interleaved)::value, kBackward>
        <<<unsigned(p.m), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
    cudaError_t const e = cudaGetLastError();
    return e == cudaSuccess ? LaunchStatus{} : LaunchStatus{"rope", cudaGetErrorString(e)};
  };
  using Eight = std::integral_constant<int, 8>;
  if (p.interleaved) return vector ? run(Eight(), std::true_type()) : run(std::integral_constant<int, 2>(), std::true_type());
  return vector ? run(Eight(), std::false_type()) : run(std::integral_constant<int, 1>(), std::false_type());
}

template <bool kBackward>
LaunchStatus dispatch(Rope const& p, void* stream) {
  if (p.m > kMaxExtent || p.n > kMaxExtent) return {"rope", "more than 2^31 - 1 rows or columns"};
  switch (p.dtype) {
    case DType::kBf16: return launch<__nv_bfloat16, kBackward>(p, stream);
    case DType::kFp16: return launch<__half, kBackward>(p, stream);
    default: return {"rope", "y must be bf16 or fp16"};
  }
}

}  // namespace

LaunchStatus rope_backward(Rope const& args, void* stream) { return dispatch<true>(args, stream); }
LaunchStatus rope_in_place(Rope const& args, void* stream) { return dispatch<false>(args, stream); }

}  // namespace coda::reduce
