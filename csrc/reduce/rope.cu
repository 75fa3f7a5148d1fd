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
// kCount neighbouring ones, as they lie in memory, so that nothing waits for them before a value is wanted: in two reads, of which narrow ones need the
// first. A branch or a predicate would make other reads wait.
template <class T, int kCount>
class Unread {
  alignas(float) alignas(Pack<T, kCount>) Pack<T, kCount> parts_[2];

 public:
  __device__ void read(void const* p, bool wide, std::int64_t i) {
    T const* const first = static_cast<T const*>(p) + (wide ? 2 * i : i);
    parts_[0] = read_only<kCount>(first), parts_[1] = read_only<kCount>(wide ? first + kCount : first);
  }
  __device__ float value(bool wide, int i) const { return wide ? reinterpret_cast<float const*>(parts_)[i] : float(parts_[0].values[i]); }
};

// What a row takes some divisions to find out.
struct RowFacts {
  std::int64_t cos, sin;         // where its rows of the tables begin
  std::int64_t gradients[3];     // where it begins in each gradient
  float scale;                   // its rstd
};

template <bool kBackward>
__device__ RowFacts facts_of(Rope const& p, std::int64_t m) {
  Rotation const& turn = p.rotation;
  unsigned const row = unsigned(m);  // dispatch allows 2^31 rows
  std::int64_t const position = turn.positions == nullptr ? (m < turn.period ? m : std::int64_t(row % unsigned(turn.period)))
                                : turn.positions64        ? static_cast<std::int64_t const*>(turn.positions)[m]
                                                          : static_cast<int const*>(turn.positions)[m];
  RowFacts facts{position * p.cos_ld, position * p.sin_ld, {}, 1.0f};
  if constexpr (kBackward) {
    unsigned const batch = row / unsigned(p.sequence), token = row % unsigned(p.sequence);
    for (int i = 0; i < 3; ++i) facts.gradients[i] = batch * p.gradients[i].batch_stride + token * p.gradients[i].sequence_stride;
    if (p.rstd != nullptr) facts.scale = p.rstd[m];
  }
  return facts;
}

// Where the gradient of a head is: at data + facts.gradients[which] in each row.
template <class T>
struct HeadGradient {
  T const* data;
  int which;
  HeadGradient() = default;
  __device__ HeadGradient(Rope const& p, int head) {
    int const q = int(p.gradients[0].heads), k = int(p.gradients[1].heads);
    which = head < q ? 0 : head < q + k ? 1 : 2;
    int const first = which == 0 ? 0 : which == 1 ? q : q + k;
    data = static_cast<T const*>(p.gradients[which].data) + (head - first) * p.gradients[which].head_stride;
  }
  __device__ T const* of(RowFacts const& facts) const { return data + facts.gradients[which]; }
};

constexpr int kThreads = 128, kFewRows = 4;

// A block takes kRows rows: few, so that blocks are many, unless a bias wants few partial sums. A thread has a place within heads: kVector neighbouring
// columns or, where rotate-half turns them, those and their partners in the second half. It takes that place of kHeads heads at a time, which share what
// it reads of the tables, and asks for all that it reads of a row before it looks at any of it, so that a row costs one wait for memory. Its heads are
// the same in every row, so it adds up a bias's gradient by itself. The scalar version has kVector 1, or 2 for interleaved pairs. kHeadDim is the width
// of heads that turn as a whole, in halves: known here, it leaves no addresses to compute and no cases to tell apart. 0: any heads.
template <class T, int kVector, bool kInterleaved, bool kBackward, int kRows, int kHeadDim>
__global__ void __launch_bounds__(kThreads, 4) rope_kernel(Rope p) {  // more blocks would spill
  constexpr bool kBias = kRows != kFewRows;
  constexpr int kHeads = !kBias && (kInterleaved || kHeadDim != 0) ? 2 : 1;
  constexpr int kParts = kInterleaved ? 1 : 2, kColumns = kParts * kVector, kAngles = kColumns / 2;  // of a place
  Rotation const& turn = p.rotation;
  int const head_dim = kHeadDim != 0 ? kHeadDim : int(turn.head_dim), rotary = kHeadDim != 0 ? kHeadDim : int(turn.rotary_dim);
  int const turning_heads = int(turn.columns) / head_dim, heads = kBackward ? int(p.n) / head_dim : turning_heads;
  int const half = rotary / 2, turning = rotary / kColumns;  // places of a head that turn
  int const places = kBackward ? head_dim / kVector - turning * (kParts - 1) : turning;
  int const across = places < kThreads ? places : kThreads, step = kThreads / across;  // threads of a head; heads of a block
  std::int64_t const begin = std::int64_t(blockIdx.x) * kRows;
  int const count = int(p.m - begin < kRows ? p.m - begin : kRows);
  __shared__ RowFacts facts[kRows];
  if (int(threadIdx.x) < count) facts[threadIdx.x] = facts_of<kBackward>(p, begin + threadIdx.x);
  // Of each row, by thread: in shared memory, so that the rows' loop need not be unrolled.
  __shared__ float dots[kBackward ? kRows : 1][kThreads];
  if constexpr (kBackward)
    for (int r = 0; r < kRows; ++r) dots[r][threadIdx.x] = 0;
  __syncthreads();
  int const first_head = int(threadIdx.x) / across < step ? int(threadIdx.x) / across : heads;  // the threads left over have none
  for (int place = int(threadIdx.x) % across; place < places; place += across) {
    bool const rotates = place < turning;
    int const parts = rotates ? kParts : 1, c = (rotates ? place : place + turning * (kParts - 1)) * kVector;
    for (int first = first_head; first < heads; first += step * kHeads) {
      float bias[kColumns] = {}, sums[kColumns] = {};
      int const column = first * head_dim + c;
      if constexpr (kBias)
#pragma unroll
        for (int i = 0; i < kColumns; ++i)
          if (i / kVector < parts) bias[i] = element<T>(p.bias, p.wide_bias, column + i / kVector * half + i % kVector);
      HeadGradient<T> gradients[kHeads];
      if constexpr (kBackward)
#pragma unroll
        for (int h = 0; h < kHeads; ++h) gradients[h] = HeadGradient<T>(p, first + h * step);
      for (int r = 0; r < count; ++r) {
        RowFacts const& row = facts[r];
        T const* const y = static_cast<T const*>(p.y) + (begin + r) * p.y_ld + column;
        T* const out = static_cast<T*>(p.out) + (begin + r) * p.out_ld + column;
        Unread<T, kAngles> cos, sin;
        if (kHeadDim != 0 || (rotates && first < turning_heads)) {  // known heads: read in vain rather than after a branch
          cos.read(p.cos, p.wide_tables, row.cos + c * kAngles / kVector);
          sin.read(p.sin, p.wide_tables, row.sin + c * kAngles / kVector);
        }
        Pack<T, kVector> came[kHeads][kParts], saved[kHeads][kParts];
#pragma unroll
        for (int i = 0; i < kHeads * kParts; ++i) {
          int const h = i / kParts, part = i % kParts, offset = h * step * head_dim + part * half;
          if ((h > 0 && first + h * step >= heads) || part >= parts) continue;
          if constexpr (kBackward) {
            came[h][part] = read_only<kVector>(gradients[h].of(row) + c + part * half);
            saved[h][part] = read_only<kVector>(y + offset);
          } else {
            came[h][part] = read<kVector>(y + offset);  // out may be y
          }
        }
        float dot = 0;
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          int const head = first + h * step;
          if (h > 0 && head >= heads) break;
          float values[kColumns];  // the gradient turned back
#pragma unroll
          for (int i = 0; i < kColumns; ++i)
            if (i / kVector < parts) values[i] = float(came[h][i / kVector].values[i % kVector]);
          if constexpr (kBackward)
#pragma unroll
            for (int i = 0; i < kColumns; ++i)
              if (i / kVector < parts) dot += values[i] * float(saved[h][i / kVector].values[i % kVector]);
          if (rotates && head < turning_heads)
#pragma unroll
            for (int i = 0; i < kAngles; ++i) {
              float& a = values[kInterleaved ? 2 * i : i];
              float& b = values[kInterleaved ? 2 * i + 1 : i + kAngles];
              float const sine = sin.value(p.wide_tables, i);
              auto const turned = rotate(a, b, cos.value(p.wide_tables, i), kBackward ? -sine : sine);
              a = turned.a, b = turned.b;
            }
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            if (part >= parts) break;
            float scaled[kVector];
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
              float const value = values[part * kVector + i];
              if constexpr (kBias) dot -= value * bias[part * kVector + i], sums[part * kVector + i] += value;
              scaled[i] = kBackward ? value * row.scale : value;
            }
            store_vector(out + h * step * head_dim + part * half, scaled);
          }
        }
        if constexpr (kBackward) dots[r][threadIdx.x] += dot;
      }
      if constexpr (kBias)
#pragma unroll
        for (int i = 0; i < kColumns; ++i)
          if (i / kVector < parts) p.bias_partials[std::int64_t(blockIdx.x) * p.n + column + i / kVector * half + i % kVector] = sums[i];
    }
  }
  if constexpr (kBackward) {
    __syncthreads();
    for (int r = threadIdx.x / 32; r < count; r += kThreads / 32) {
      float dot = 0;
      for (int i = threadIdx.x % 32; i < kThreads; i += 32) dot += dots[r][i];
      dot = warp_sum(dot);
      if (threadIdx.x % 32 == 0) p.correction[begin + r] = norm_correction(facts[r].scale, dot, p.width);
    }
  }
}

// --- QK-norm -----------------------------------------------------------------------------------------------------------------------
// For any heads: a warp takes a head of a row, a lane kVector neighbouring columns at a time. What a lane needs of other columns it reads again, from
// the first-level cache. For heads of 16 kLanes columns that turn as a whole, in halves: kLanes lanes hold a head, eight columns of either half each.

// rsqrt(mean(z^2) + eps) of the head at z, in every lane of a warp.
template <int kVector, class T>
__device__ float head_rstd(T const* z, int head_dim, float eps) {
  float sum = 0;
  for (int c = threadIdx.x % 32 * kVector; c < head_dim; c += 32 * kVector) {
    float v[kVector];
    load_vector(z + c, v);
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum += v[i] * v[i];
  }
  return inverse_sqrt(warp_sum(sum) / float(head_dim) + eps);
}

// Columns c .. c + kVector of a head turned (kDirection 1) or turned back (-1), where read(column, values) gives kVector columns as they are before.
template <class T, int kVector, bool kInterleaved, int kDirection, class Read>
__device__ void turn_columns(Rope const& p, RowFacts const& row, int c, Read read, float (&out)[kVector]) {
  int const rotary = int(p.rotation.rotary_dim), half = rotary / 2;
  float own[kVector], other[kVector];
  read(c, own);
  if (c >= rotary) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) out[i] = own[i];
    return;
  }
  bool const upper = !kInterleaved && c >= half;  // vectors do not straddle
  if constexpr (!kInterleaved) {
    read(upper ? c - half : c + half, other);
  } else if constexpr (kVector == 1) {
    read(c ^ 1, other);
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) other[i] = own[i ^ 1];
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    int const at = kInterleaved ? (c + i) / 2 : (upper ? c - half : c) + i;
    bool const first = kInterleaved ? (c + i) % 2 == 0 : !upper;
    float const cos = element<T>(p.cos, p.wide_tables, row.cos + at), sin = element<T>(p.sin, p.wide_tables, row.sin + at) * kDirection;
    out[i] = first ? rotate(own[i], other[i], cos, sin).a : rotate(other[i], own[i], cos, sin).b;
  }
}

constexpr int kHeadWarps = 8, kHeadThreads = 32 * kHeadWarps, kHeadRows = int(kBiasRows);

template <class T, int kVector, bool kInterleaved>
__global__ void __launch_bounds__(kHeadThreads) qk_norm_kernel(Rope p) {
  int const head_dim = int(p.rotation.head_dim), heads = int(p.n) / head_dim, lane = threadIdx.x % 32;
  std::int64_t const item = std::int64_t(blockIdx.x) * kHeadWarps + threadIdx.x / 32;
  if (item >= p.m * heads) return;
  std::int64_t const m = unsigned(item) / unsigned(heads);
  RowFacts const row = facts_of<false>(p, m);
  int const begin = int(item - m * heads) * head_dim;
  T const* z = static_cast<T const*>(p.product) + m * p.product_ld + begin;
  T* out = static_cast<T*>(p.out) + m * p.out_ld + begin;
  bool const normed = begin < p.rotation.columns;
  float const scale = normed ? head_rstd<kVector>(z, head_dim, p.eps) : 1.0f;
  void const* gamma = p.gammas[begin < p.rotation.query_columns ? 0 : 1];
  for (int c = lane * kVector; c < head_dim; c += 32 * kVector) {
    float values[kVector];
    if (normed) {
      auto const read = [&](int column, float (&v)[kVector]) {
        load_vector(z + column, v);
#pragma unroll
        for (int i = 0; i < kVector; ++i) v[i] *= scale * element<T>(gamma, p.wide_gammas, column + i);
      };
      turn_columns<T, kVector, kInterleaved, 1>(p, row, c, read, values);
    } else {
      load_vector(z + c, values);
    }
    store_vector(out + c, values);
  }
}

// What the two backward kernels begin and end with. A block takes kHeadRows rows.
struct BackwardBlock {
  RowFacts facts[kHeadRows];
  std::int64_t first;
  int count;
  __device__ void begin(Rope const& p) {
    if (threadIdx.x == 0) first = std::int64_t(blockIdx.x) * kHeadRows, count = int(p.m - first < kHeadRows ? p.m - first : kHeadRows);
    __syncthreads();
    if (int(threadIdx.x) < count) facts[threadIdx.x] = facts_of<true>(p, first + threadIdx.x);
    __syncthreads();
  }
  // dots: [parts][kHeadRows], what the parts of a block found for each row.
  __device__ void finish_row(Rope const& p, float const* dots, int parts) const {
    if (int(threadIdx.x) >= count) return;
    float dot = 0;
    for (int i = 0; i < parts; ++i) dot += dots[i * kHeadRows + threadIdx.x];
    p.correction[first + threadIdx.x] = norm_correction(facts[threadIdx.x].scale, dot, p.width);
  }
  __device__ void finish_gammas(Rope const& p, float const* sums, int parts) const {  // sums: [parts][2 head_dim]
    int const width = 2 * int(p.rotation.head_dim);
    for (int c = threadIdx.x; c < width; c += kHeadThreads) {
      float sum = 0;
      for (int i = 0; i < parts; ++i) sum += sums[i * width + c];
      p.gamma_partials[std::int64_t(blockIdx.x) * width + c] = sum;
    }
  }
};

// A warp takes the heads warp, warp + kHeadWarps, ... of each row, so that what is summed over rows has one owner.
template <class T, int kVector, bool kInterleaved>
__global__ void __launch_bounds__(kHeadThreads) qk_norm_backward_kernel(Rope p) {
  extern __shared__ float gamma_sums[];  // [kHeadWarps][2][head_dim]: a lane owns its columns, so nobody waits
  __shared__ BackwardBlock block;
  __shared__ float dots[kHeadWarps][kHeadRows];
  int const head_dim = int(p.rotation.head_dim), heads = int(p.n) / head_dim, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* const own_sums = gamma_sums + warp * 2 * head_dim;
  for (int c = lane; c < 2 * head_dim; c += 32) own_sums[c] = 0;
  if (lane < kHeadRows) dots[warp][lane] = 0;
  block.begin(p);
  for (int head = warp; head < heads; head += kHeadWarps) {
    int const begin = head * head_dim, kind = begin < p.rotation.query_columns ? 0 : 1;
    bool const normed = begin < p.rotation.columns;
    auto const gamma = [&](int c) { return element<T>(p.gammas[kind], p.wide_gammas, c); };
    for (int r = 0; r < block.count; ++r) {
      RowFacts const& row = block.facts[r];
      std::int64_t const m = block.first + r;
      T* const out = static_cast<T*>(p.out) + m * p.out_ld + begin;
      T const* const z = normed ? static_cast<T const*>(p.product) + m * p.product_ld + begin : static_cast<T const*>(p.y) + m * p.y_ld + begin;
      T const* const gradient = HeadGradient<T>(p, head).of(row);
      auto const read = [&](int column, float (&v)[kVector]) { load_vector(gradient + column, v); };
      float rstd = 1, mean = 0, dot = 0;
      if (normed) {
        rstd = head_rstd<kVector>(z, head_dim, p.eps);
        float sum = 0;
        for (int c = lane * kVector; c < head_dim; c += 32 * kVector) {
          float dw[kVector], v[kVector];
          turn_columns<T, kVector, kInterleaved, -1>(p, row, c, read, dw);
          load_vector(z + c, v);
#pragma unroll
          for (int i = 0; i < kVector; ++i) sum += gamma(c + i) * dw[i] * (rstd * v[i]);
        }
        mean = warp_sum(sum) / float(head_dim);
      }
      for (int c = lane * kVector; c < head_dim; c += 32 * kVector) {
        float dw[kVector], v[kVector], scaled[kVector];
        normed ? turn_columns<T, kVector, kInterleaved, -1>(p, row, c, read, dw) : read(c, dw);
        load_vector(z + c, v);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          float dz = dw[i];
          if (normed) {
            float const n = rstd * v[i];
            own_sums[kind * head_dim + c + i] += dw[i] * n;
            dz = head_norm_dz(gamma(c + i) * dw[i], n, mean, rstd);
          }
          dot += dz * (v[i] - (p.bias == nullptr ? 0.0f : element<T>(p.bias, p.wide_bias, begin + c + i)));
          if (p.bias != nullptr) {
            float& sum = p.bias_partials[std::int64_t(blockIdx.x) * p.n + begin + c + i];
            sum = r == 0 ? dz : sum + dz;
          }
          scaled[i] = dz * row.scale;
        }
        store_vector(out + c, scaled);
      }
      dot = warp_sum(dot);
      if (lane == 0) dots[warp][r] += dot;
    }
  }
  __syncthreads();
  block.finish_gammas(p, gamma_sums, kHeadWarps);
  block.finish_row(p, dots[0], kHeadWarps);
}

// No bias, 16-byte vectors. An item is a head of a row; all lanes of a warp take part to the end, for the sums over groups.
template <class T, int kLanes>
__global__ void __launch_bounds__(kHeadThreads) qk_norm_backward_whole_heads_kernel(Rope p) {
  constexpr int kGroups = kHeadThreads / kLanes, kHeadDim = 16 * kLanes, kHalf = kHeadDim / 2;
  extern __shared__ float item_dots[];  // [heads][kHeadRows]
  __shared__ BackwardBlock block;
  __shared__ alignas(16) float gammas[2][kHeadDim];
  __shared__ float gamma_sums[kHeadWarps][2][kHeadDim];
  int const heads = int(p.n) / kHeadDim, group = threadIdx.x / kLanes, c = threadIdx.x % kLanes * 8;
  for (int i = threadIdx.x; i < 2 * kHeadDim; i += kHeadThreads) gammas[i / kHeadDim][i % kHeadDim] = element<T>(p.gammas[i / kHeadDim], p.wide_gammas, i % kHeadDim);
  block.begin(p);
  float sums[2][2][8] = {};  // of either weight, of this lane's columns in both halves
  int const items = block.count * heads;
  for (int first = 0; first < items; first += kGroups) {
    int const item = first + group;
    bool const real = item < items;
    int const r = real ? item / heads : 0, head = real ? item % heads : 0, begin = head * kHeadDim;
    bool const normed = begin < p.rotation.columns;
    int const kind = begin < p.rotation.query_columns ? 0 : 1;
    RowFacts const& row = block.facts[r];
    std::int64_t const m = block.first + r;
    T const* const z = normed ? static_cast<T const*>(p.product) + m * p.product_ld + begin : static_cast<T const*>(p.y) + m * p.y_ld + begin;
    T const* const gradient = HeadGradient<T>(p, head).of(row);
    float d[2][8], v[2][8], dot = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) load_read_only(gradient + c + h * kHalf, d[h]), load_read_only(z + c + h * kHalf, v[h]);
    Unread<T, 8> cos, sin;
    cos.read(p.cos, p.wide_tables, row.cos + c);
    sin.read(p.sin, p.wide_tables, row.sin + c);
    float g[2][8];
    float squares = 0, product = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      auto const back = rotate(d[0][i], d[1][i], cos.value(p.wide_tables, i), -sin.value(p.wide_tables, i));
      if (normed) d[0][i] = back.a, d[1][i] = back.b;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        g[h][i] = gammas[kind][c + h * kHalf + i];
        squares += v[h][i] * v[h][i];
        product += g[h][i] * d[h][i] * v[h][i];
      }
    }
    float const rstd = inverse_sqrt(group_sum<kLanes>(squares) / float(kHeadDim) + p.eps);
    float const mean = rstd * group_sum<kLanes>(product) / float(kHeadDim);
    float const q = normed && real && kind == 0 ? 1.0f : 0.0f, k = normed && real && kind == 1 ? 1.0f : 0.0f;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float out[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float const n = rstd * v[h][i], dz = normed ? head_norm_dz(g[h][i] * d[h][i], n, mean, rstd) : d[h][i];
        sums[0][h][i] += q * d[h][i] * n;
        sums[1][h][i] += k * d[h][i] * n;
        dot += dz * v[h][i];
        out[i] = dz * row.scale;
      }
      if (real) store_vector(static_cast<T*>(p.out) + m * p.out_ld + begin + c + h * kHalf, out);
    }
    dot = group_sum<kLanes>(dot);
    if (real && c == 0) item_dots[head * kHeadRows + r] = dot;
  }
  // Over the groups of a warp, then over the warps.
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    float& sum = sums[i / 16][i / 8 % 2][i % 8];
#pragma unroll
    for (int lane = kLanes; lane < 32; lane *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
    if (threadIdx.x % 32 < kLanes) gamma_sums[threadIdx.x / 32][i / 16][c + i / 8 % 2 * kHalf + i % 8] = sum;
  }
  __syncthreads();
  block.finish_gammas(p, gamma_sums[0][0], kHeadWarps);
  block.finish_row(p, item_dots, heads);
}

template <class T, bool kBackward>
LaunchStatus launch_qk_norm(Rope const& p, cudaStream_t stream) {
  std::int64_t const head_dim = p.rotation.head_dim, unit = p.interleaved ? p.rotation.rotary_dim : p.rotation.rotary_dim / 2;
  // Whether every access can be `width` columns at once.
  std::int64_t const table = p.wide_tables ? 4 : 2;
  auto const fits = [&](int width) {
    auto const table_aligned = [&](void const* data, std::int64_t ld) {
      return width < 8 || (reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && ld * table % 16 == 0);
    };
    auto const aligned = [&](void const* data, std::int64_t stride) {
      return reinterpret_cast<std::uintptr_t>(data) % (sizeof(T) * width) == 0 && stride % width == 0;
    };
    bool ok = head_dim % width == 0 && unit % width == 0 && aligned(p.product, p.product_ld) && aligned(p.out, p.out_ld) &&
              table_aligned(p.cos, p.cos_ld) && table_aligned(p.sin, p.sin_ld);
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
      auto const whole_heads = [&](auto lanes) {
        qk_norm_backward_whole_heads_kernel<T, decltype(lanes)::value>
            <<<unsigned(ceil_div(p.m, kHeadRows)), kHeadThreads, p.n / head_dim * kHeadRows * sizeof(float), stream>>>(p);
      };
      bool const halves = !p.interleaved && head_dim == p.rotation.rotary_dim && p.bias == nullptr && fits(8) && p.n / head_dim <= 256;
      if (halves && head_dim == 64) return whole_heads(std::integral_constant<int, 4>()), launched("qk_norm_rope");
      if (halves && head_dim == 128) return whole_heads(std::integral_constant<int, 8>()), launched("qk_norm_rope");
      if (halves && head_dim == 256) return whole_heads(std::integral_constant<int, 16>()), launched("qk_norm_rope");
      qk_norm_backward_kernel<T, kVector, kInterleaved><<<unsigned(ceil_div(p.m, kHeadRows)), kHeadThreads, shared, stream>>>(p);
    } else {
      qk_norm_kernel<T, kVector, kInterleaved><<<unsigned(ceil_div(p.m * (p.n / head_dim), kHeadWarps)), kHeadThreads, 0, stream>>>(p);
    }
    return launched("qk_norm_rope");
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
  auto const run_heads = [&](auto width, auto interleaved, auto rows, auto head_dim) {
    constexpr int kRows = decltype(rows)::value;
    rope_kernel<T, decltype(width)::value, decltype(interleaved)::value, kBackward, kRows, decltype(head_dim)::value>
        <<<unsigned(ceil_div(p.m, kRows)), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
    return launched("rope");
  };
  auto const run_rows = [&](auto width, auto interleaved, auto rows) {
    if constexpr (kBackward && decltype(width)::value == 8 && !decltype(interleaved)::value) {
      bool const whole = p.rotation.rotary_dim == p.rotation.head_dim;
      if (whole && p.rotation.head_dim == 64) return run_heads(width, interleaved, rows, std::integral_constant<int, 64>());
      if (whole && p.rotation.head_dim == 128) return run_heads(width, interleaved, rows, std::integral_constant<int, 128>());
    }
    return run_heads(width, interleaved, rows, std::integral_constant<int, 0>());
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
