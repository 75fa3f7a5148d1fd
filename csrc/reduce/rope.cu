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

template <class T>
__device__ float element(void const* p, bool wide, std::int64_t i) {
  return wide ? static_cast<float const*>(p)[i] : float(static_cast<T const*>(p)[i]);
}
// kCount neighbouring ones; 16 bytes at a time if kCount is a vector's worth.
template <class T, int kCount>
__device__ void elements(void const* p, bool wide, std::int64_t i, float (&out)[kCount]) {
  if constexpr (kCount * sizeof(T) != 16) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) out[j] = element<T>(p, wide, i + j);
  } else if (wide) {
    float four[4];
#pragma unroll
    for (int j = 0; j < kCount; j += 4) {
      load_vector(static_cast<float const*>(p) + i + j, four);
#pragma unroll
      for (int k = 0; k < 4; ++k) out[j + k] = four[k];
    }
  } else {
    load_vector(static_cast<T const*>(p) + i, out);
  }
}

__device__ float warp_sum(float sum) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
  return sum;
}

// One row: its position, and where its columns come from.
template <class T>
struct RopeRow {
  Rope const& p;
  std::int64_t m, position, batch, token;
  __device__ RopeRow(Rope const& p_, std::int64_t m_) : p(p_), m(m_) {
    Rotation const& turn = p.rotation;
    position = turn.positions == nullptr ? m % turn.period
               : turn.positions64        ? static_cast<std::int64_t const*>(turn.positions)[m]
                                         : static_cast<int const*>(turn.positions)[m];
    batch = m / p.sequence, token = m % p.sequence;
  }
  __device__ T const* gradient(Rope::Gradient const& g, int head, int column) const {
    return static_cast<T const*>(g.data) + batch * g.batch_stride + token * g.sequence_stride + head * g.head_stride + column;
  }
  __device__ std::int64_t cos_at(int pair) const { return position * p.cos_ld + pair; }
  __device__ std::int64_t sin_at(int pair) const { return position * p.sin_ld + pair; }
  // rsqrt(mean(z^2) + eps) of the head at z, in every lane of a warp.
  template <int kVector>
  __device__ float head_rstd(T const* z, int lane, int head_dim) const {
    float sum = 0;
    for (int c = lane * kVector; c < head_dim; c += 32 * kVector) {
      float v[kVector];
      load_vector(z + c, v);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum += v[i] * v[i];
    }
    return inverse_sqrt(warp_sum(sum) / float(head_dim) + p.eps);
  }
};

constexpr int kThreads = 128, kFewRows = 4;

// A block takes kRows rows: few, so that blocks are many, unless a bias wants few partial sums. An item is kVector neighbouring columns or, where rotate-half turns them, those and their partners in the
// second half; a thread has the same items in every row, so it adds up a bias's gradient by itself. The scalar version has kVector 1, or 2 for
// interleaved pairs.
template <class T, int kVector, bool kInterleaved, bool kBackward, int kRows>
__global__ void __launch_bounds__(kThreads) rope_kernel(Rope p) {
  constexpr bool kBias = kRows != kFewRows;
  Rotation const& turn = p.rotation;
  int const head_dim = int(turn.head_dim), rotary = int(turn.rotary_dim), columns = int(turn.columns);
  int const pairs = kInterleaved ? 0 : rotary / 2 / kVector;              // items of a turning head that are two vectors
  int const turning = head_dim / kVector - pairs, still = head_dim / kVector;  // items of a head
  int const turning_items = columns / head_dim * turning, items = turning_items + (int(p.n) - columns) / head_dim * still;
  std::int64_t const begin = std::int64_t(blockIdx.x) * kRows;
  int const count = int(p.m - begin < kRows ? p.m - begin : kRows);
  float dots[kRows] = {};
  for (int item = threadIdx.x; item < items; item += kThreads) {
    bool const turns = item < turning_items;
    int const within = turns ? item % turning : (item - turning_items) % still;
    int const head = turns ? item / turning : columns / head_dim + (item - turning_items) / still;
    bool const pair = turns && within < pairs;
    int const c = (within + (turns && !pair ? pairs : 0)) * kVector, column = head * head_dim + c;
    bool const rotates = kInterleaved ? turns && c < rotary : pair;
    if (!kBackward && !rotates) continue;
    int which = 0, first_head = 0;  // of the gradient
    if constexpr (kBackward)
      while ((head - first_head) * head_dim >= int(p.gradients[which].columns)) first_head += int(p.gradients[which++].columns) / head_dim;
    float sum_a[kVector] = {}, sum_b[kVector] = {};
    // `before` is the gradient as it came, `after` the one turned back.
    auto const finish = [&](RopeRow<T> const& row, int at, float scale, float& dot, float (&sum)[kVector], float const (&before)[kVector],
                            float (&after)[kVector]) {
      if constexpr (kBackward) {
        float saved[kVector];
        load_vector(static_cast<T const*>(p.y) + row.m * p.y_ld + at, saved);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          dot += before[i] * saved[i];
          if (kBias) {
            dot -= after[i] * element<T>(p.bias, p.wide_bias, at + i);
            sum[i] += after[i];
          }
          after[i] *= scale;
        }
      }
      store_vector(static_cast<T*>(p.out) + row.m * p.out_ld + at, after);
    };
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= count) break;
      RopeRow<T> const row(p, begin + r);
      float const scale = kBackward && p.rstd != nullptr ? p.rstd[row.m] : 1.0f;
      auto const read = [&](int offset, float (&v)[kVector]) {
        load_vector(kBackward ? row.gradient(p.gradients[which], head - first_head, c + offset) : static_cast<T const*>(p.y) + row.m * p.y_ld + column + offset, v);
      };
      constexpr float kDirection = kBackward ? -1.0f : 1.0f;
      float a[kVector], new_a[kVector];
      read(0, a);
      if (!rotates) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) new_a[i] = a[i];
        finish(row, column, scale, dots[r], sum_a, a, new_a);
      } else if constexpr (kInterleaved) {
        constexpr int kPairs = kVector / 2;
        float cos[kPairs], sin[kPairs];
        elements<T>(p.cos, p.wide_tables, row.cos_at(c / 2), cos);
        elements<T>(p.sin, p.wide_tables, row.sin_at(c / 2), sin);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          auto const turned = rotate(a[2 * i], a[2 * i + 1], cos[i], sin[i] * kDirection);
          new_a[2 * i] = turned.a, new_a[2 * i + 1] = turned.b;
        }
        finish(row, column, scale, dots[r], sum_a, a, new_a);
      } else {
        float b[kVector], new_b[kVector], cos[kVector], sin[kVector];
        read(rotary / 2, b);
        elements<T>(p.cos, p.wide_tables, row.cos_at(c), cos);
        elements<T>(p.sin, p.wide_tables, row.sin_at(c), sin);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          auto const turned = rotate(a[i], b[i], cos[i], sin[i] * kDirection);
          new_a[i] = turned.a, new_b[i] = turned.b;
        }
        finish(row, column, scale, dots[r], sum_a, a, new_a);
        finish(row, column + rotary / 2, scale, dots[r], sum_b, b, new_b);
      }
    }
    if constexpr (kBias) {
      float* const sums = p.bias_partials + std::int64_t(blockIdx.x) * p.n + column;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        sums[i] = sum_a[i];
        if (pair) sums[rotary / 2 + i] = sum_b[i];
      }
    }
  }
  if constexpr (kBackward) {
    __shared__ float warps[kRows][kThreads / 32];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= count) break;
      float const sum = warp_sum(dots[r]);
      if (threadIdx.x % 32 == 0) warps[r][threadIdx.x / 32] = sum;
    }
    __syncthreads();
    if (int(threadIdx.x) < count) {
      float dot = 0;
      for (int w = 0; w < kThreads / 32; ++w) dot += warps[threadIdx.x][w];
      std::int64_t const m = begin + threadIdx.x;
      p.correction[m] = norm_correction(p.rstd == nullptr ? 1.0f : p.rstd[m], dot, p.width);
    }
  }
}

// --- QK-norm -----------------------------------------------------------------------------------------------------------------------
// A warp takes a head of a row, a lane kVector neighbouring columns at a time. What a lane needs of other columns it reads again, from the
// first-level cache.

// Columns c .. c + kVector of a head turned (kDirection 1) or turned back (-1), where read(column, values) gives kVector columns as they are before.
template <class T, int kVector, bool kInterleaved, int kDirection, class Read>
__device__ void turn_columns(RopeRow<T> const& row, int c, Read read, float (&out)[kVector]) {
  Rope const& p = row.p;
  int const rotary = int(p.rotation.rotary_dim), half = rotary / 2;
  float own[kVector], other[kVector];
  read(c, own);
  if (c >= rotary) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) out[i] = own[i];
    return;
  }
  if constexpr (!kInterleaved) {
    read(c < half ? c + half : c - half, other);
  } else if constexpr (kVector == 1) {
    read(c ^ 1, other);
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) other[i] = own[i ^ 1];
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    int const at = kInterleaved ? (c + i) / 2 : (c + i) % half;
    bool const first = kInterleaved ? (c + i) % 2 == 0 : c < half;
    float const cos = element<T>(p.cos, p.wide_tables, row.cos_at(at)), sin = element<T>(p.sin, p.wide_tables, row.sin_at(at)) * kDirection;
    out[i] = first ? rotate(own[i], other[i], cos, sin).a : rotate(other[i], own[i], cos, sin).b;
  }
}

constexpr int kHeadWarps = 8;

template <class T, int kVector, bool kInterleaved>
__global__ void __launch_bounds__(32 * kHeadWarps) qk_norm_kernel(Rope p) {
  int const head_dim = int(p.rotation.head_dim), heads = int(p.n) / head_dim, lane = threadIdx.x % 32;
  std::int64_t const item = std::int64_t(blockIdx.x) * kHeadWarps + threadIdx.x / 32;
  if (item >= p.m * heads) return;
  RopeRow<T> const row(p, item / heads);
  int const begin = int(item % heads) * head_dim;
  T const* z = static_cast<T const*>(p.product) + row.m * p.product_ld + begin;
  T* out = static_cast<T*>(p.out) + row.m * p.out_ld + begin;
  bool const normed = begin < p.rotation.columns;
  float const scale = normed ? row.template head_rstd<kVector>(z, lane, head_dim) : 1.0f;
  void const* gamma = p.gammas[begin < p.rotation.query_columns ? 0 : 1];
  for (int c = lane * kVector; c < head_dim; c += 32 * kVector) {
    float values[kVector];
    if (normed) {
      auto const read = [&](int column, float (&v)[kVector]) {
        load_vector(z + column, v);
#pragma unroll
        for (int i = 0; i < kVector; ++i) v[i] *= scale * element<T>(gamma, p.wide_gammas, column + i);
      };
      turn_columns<T, kVector, kInterleaved, 1>(row, c, read, values);
    } else {
      load_vector(z + c, values);
    }
    store_vector(out + c, values);
  }
}

// A block takes kBiasRows rows, a warp the heads warp, warp + kHeadWarps, ... of each, so that what is summed over rows has one owner.
template <class T, int kVector, bool kInterleaved>
__global__ void __launch_bounds__(32 * kHeadWarps) qk_norm_backward_kernel(Rope p) {
  extern __shared__ float gamma_sums[];  // [kHeadWarps][2][head_dim]: a lane owns its columns, so nobody waits
  __shared__ float dots[kHeadWarps][kBiasRows];
  int const head_dim = int(p.rotation.head_dim), heads = int(p.n) / head_dim, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  std::int64_t const first_row = std::int64_t(blockIdx.x) * kBiasRows;
  int const count = int(p.m - first_row < kBiasRows ? p.m - first_row : kBiasRows);
  float* const own_sums = gamma_sums + warp * 2 * head_dim;
  for (int c = lane; c < 2 * head_dim; c += 32) own_sums[c] = 0;
  if (lane < kBiasRows) dots[warp][lane] = 0;
  __syncwarp();
  for (int head = warp; head < heads; head += kHeadWarps) {
    int which = 0, first_head = 0;
    while ((head - first_head) * head_dim >= int(p.gradients[which].columns)) first_head += int(p.gradients[which++].columns) / head_dim;
    int const begin = head * head_dim, kind = begin < p.rotation.query_columns ? 0 : 1;
    bool const normed = begin < p.rotation.columns;
    auto const gamma = [&](int c) { return element<T>(p.gammas[kind], p.wide_gammas, c); };
    for (int r = 0; r < count; ++r) {
      RopeRow<T> const row(p, first_row + r);
      float const scale = p.rstd == nullptr ? 1.0f : p.rstd[row.m];
      T* const out = static_cast<T*>(p.out) + row.m * p.out_ld + begin;
      T const* const z = normed ? static_cast<T const*>(p.product) + row.m * p.product_ld + begin : static_cast<T const*>(p.y) + row.m * p.y_ld + begin;
      auto const read = [&](int column, float (&v)[kVector]) { load_vector(row.gradient(p.gradients[which], head - first_head, column), v); };
      float head_rstd = 1, mean = 0, dot = 0;
      if (normed) {
        head_rstd = row.template head_rstd<kVector>(z, lane, head_dim);
        float sum = 0;
        for (int c = lane * kVector; c < head_dim; c += 32 * kVector) {
          float dw[kVector], v[kVector];
          turn_columns<T, kVector, kInterleaved, -1>(row, c, read, dw);
          load_vector(z + c, v);
#pragma unroll
          for (int i = 0; i < kVector; ++i) sum += gamma(c + i) * dw[i] * (head_rstd * v[i]);
        }
        mean = warp_sum(sum) / float(head_dim);
      }
      for (int c = lane * kVector; c < head_dim; c += 32 * kVector) {
        float dw[kVector], v[kVector], scaled[kVector];
        normed ? turn_columns<T, kVector, kInterleaved, -1>(row, c, read, dw) : read(c, dw);
        load_vector(z + c, v);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          float dz = dw[i];
          if (normed) {
            float const n = head_rstd * v[i];
            own_sums[kind * head_dim + c + i] += dw[i] * n;
            dz = head_norm_dz(gamma(c + i) * dw[i], n, mean, head_rstd);
          }
          dot += dz * (v[i] - (p.bias == nullptr ? 0.0f : element<T>(p.bias, p.wide_bias, begin + c + i)));
          if (p.bias != nullptr) {
            float& sum = p.bias_partials[std::int64_t(blockIdx.x) * p.n + begin + c + i];
            sum = r == 0 ? dz : sum + dz;
          }
          scaled[i] = dz * scale;
        }
        store_vector(out + c, scaled);
      }
      dot = warp_sum(dot);
      if (lane == 0) dots[warp][r] += dot;
    }
  }
  __syncthreads();
  for (int c = threadIdx.x; c < 2 * head_dim; c += 32 * kHeadWarps) {
    float sum = 0;
    for (int w = 0; w < kHeadWarps; ++w) sum += gamma_sums[w * 2 * head_dim + c];
    p.gamma_partials[std::int64_t(blockIdx.x) * 2 * head_dim + c] = sum;
  }
  if (int(threadIdx.x) < count) {
    std::int64_t const m = first_row + threadIdx.x;
    float dot = 0;
    for (int w = 0; w < kHeadWarps; ++w) dot += dots[w][threadIdx.x];
    p.correction[m] = norm_correction(p.rstd == nullptr ? 1.0f : p.rstd[m], dot, p.width);
  }
}

template <class T, bool kBackward>
LaunchStatus launch_qk_norm(Rope const& p, cudaStream_t stream) {
  std::int64_t const head_dim = p.rotation.head_dim, unit = p.interleaved ? p.rotation.rotary_dim : p.rotation.rotary_dim / 2;
  // Whether every access can be `width` columns at once.
  auto const fits = [&](int width) {
    auto const aligned = [&](void const* data, std::int64_t stride) {
      return reinterpret_cast<std::uintptr_t>(data) % (sizeof(T) * width) == 0 && stride % width == 0;
    };
    bool ok = head_dim % width == 0 && unit % width == 0 && aligned(p.product, p.product_ld) && aligned(p.out, p.out_ld);
    if (kBackward) {
      ok = ok && aligned(p.y, p.y_ld);
      for (auto const& g : p.gradients) ok = ok && aligned(g.data, g.batch_stride) && g.sequence_stride % width == 0 && g.head_stride % width == 0;
    }
    return ok;
  };
  auto const run = [&](auto width, auto interleaved) {
    constexpr int kVector = decltype(width)::value;
    constexpr bool kInterleaved = decltype(interleaved)::value;
    if constexpr (kBackward) {
      std::size_t const shared = kHeadWarps * 2 * head_dim * sizeof(float);
      qk_norm_backward_kernel<T, kVector, kInterleaved><<<unsigned(ceil_div(p.m, kBiasRows)), 32 * kHeadWarps, shared, stream>>>(p);
    } else {
      qk_norm_kernel<T, kVector, kInterleaved><<<unsigned(ceil_div(p.m * (p.n / head_dim), kHeadWarps)), 32 * kHeadWarps, 0, stream>>>(p);
    }
    cudaError_t const e = cudaGetLastError();
    return e == cudaSuccess ? LaunchStatus{} : LaunchStatus{"qk_norm_rope", cudaGetErrorString(e)};
  };
  auto const with = [&](auto width) { return p.interleaved ? run(width, std::true_type()) : run(width, std::false_type()); };
  return fits(4) ? with(std::integral_constant<int, 4>()) : with(std::integral_constant<int, 1>());
}

template <bool kBackward>
LaunchStatus dispatch_qk_norm(Rope const& p, void* stream) {
  if (p.m > kMaxExtent || p.n > kMaxExtent || p.m * (p.n / p.rotation.head_dim) > kMaxExtent) return {"qk_norm_rope", "more than 2^31 - 1 heads"};
  if (kBackward && p.rotation.head_dim > kMaxNormedHead) return {"qk_norm_rope", "a head has more than 512 columns"};
  switch (p.dtype) {
    case DType::kBf16: return launch_qk_norm<__nv_bfloat16, kBackward>(p, static_cast<cudaStream_t>(stream));
    case DType::kFp16: return launch_qk_norm<__half, kBackward>(p, static_cast<cudaStream_t>(stream));
    default: return {"qk_norm_rope", "y must be bf16 or fp16"};
  }
}

template <class T, bool kBackward>
LaunchStatus launch(Rope const& p, void* stream) {
  auto const aligned = [](void const* data, std::int64_t stride, std::int64_t size) {
    return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride * size % 16 == 0;
  };
  std::int64_t const unit = p.interleaved ? p.rotation.rotary_dim : p.rotation.rotary_dim / 2, table = p.wide_tables ? 4 : 2;
  bool vector = p.n % 8 == 0 && p.rotation.head_dim % 8 == 0 && unit % 8 == 0 && aligned(p.y, p.y_ld, 2) && aligned(p.out, p.out_ld, 2) &&
                aligned(p.cos, p.cos_ld, table) && aligned(p.sin, p.sin_ld, table);
  if (kBackward)
    for (auto const& g : p.gradients) vector = vector && aligned(g.data, g.batch_stride, 2) && g.sequence_stride % 8 == 0 && g.head_stride % 8 == 0;
  auto const run_rows = [&](auto width, auto interleaved, auto rows) {
    constexpr int kRows = decltype(rows)::value;
    rope_kernel<T, decltype(width)::value, decltype(interleaved)::value, kBackward, kRows>
        <<<unsigned(ceil_div(p.m, kRows)), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
    cudaError_t const e = cudaGetLastError();
    return e == cudaSuccess ? LaunchStatus{} : LaunchStatus{"rope", cudaGetErrorString(e)};
  };
  auto const run = [&](auto width, auto interleaved) {
    if constexpr (kBackward)
      if (p.bias != nullptr) return run_rows(width, interleaved, std::integral_constant<int, int(kBiasRows)>());
    return run_rows(width, interleaved, std::integral_constant<int, kFewRows>());
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

LaunchStatus qk_norm_rope(Rope const& args, void* stream) { return dispatch_qk_norm<false>(args, stream); }
LaunchStatus qk_norm_rope_backward(Rope const& args, void* stream) { return dispatch_qk_norm<true>(args, stream); }
LaunchStatus rope_backward(Rope const& args, void* stream) { return dispatch<true>(args, stream); }
LaunchStatus rope_in_place(Rope const& args, void* stream) { return dispatch<false>(args, stream); }

}  // namespace coda::reduce
