// Small pieces that the row kernels share.
#pragma once

#include <cuda_runtime_api.h>

#include "coda/params.h"

namespace coda::reduce {

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T values[kCount];
};

// kCount neighbouring values as they lie in memory, in one access of 8 or 16 bytes or element by element.
template <int kCount, class T>
__device__ Pack<T, kCount> read(T const* p) {
  Pack<T, kCount> pack;
  if constexpr (sizeof(pack) != 16 && sizeof(pack) != 8) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) pack.values[i] = p[i];
  } else {
    pack = *reinterpret_cast<Pack<T, kCount> const*>(p);
  }
  return pack;
}

// The same from memory that nobody writes during the kernel: the compiler may then ask for it before an earlier store.
template <int kCount, class T>
__device__ Pack<T, kCount> read_only(T const* p) {
  if constexpr (kCount * sizeof(T) != 16) {
    return read<kCount>(p);
  } else {
    uint4 const raw = __ldg(reinterpret_cast<uint4 const*>(p));
    return reinterpret_cast<Pack<T, kCount> const&>(raw);
  }
}

template <class T, int kCount>
__device__ void widen(Pack<T, kCount> const& pack, float (&out)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) out[i] = float(pack.values[i]);
}
template <class T, int kCount>
__device__ void load_vector(T const* p, float (&out)[kCount]) {
  widen(read<kCount>(p), out);
}
template <class T, int kCount>
__device__ void load_read_only(T const* p, float (&out)[kCount]) {
  widen(read_only<kCount>(p), out);
}

template <class T, int kCount>
__device__ void store_vector(T* p, float const (&in)[kCount]) {
  if constexpr (kCount * sizeof(T) != 16 && kCount * sizeof(T) != 8) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) p[i] = T(in[i]);
  } else {
    Pack<T, kCount> pack;
#pragma unroll
    for (int i = 0; i < kCount; ++i) pack.values[i] = T(in[i]);
    *reinterpret_cast<Pack<T, kCount>*>(p) = pack;
  }
}

// The sum over groups of kLanes neighbouring lanes, in each of them.
template <int kLanes>
__device__ float group_sum(float sum) {
#pragma unroll
  for (int lane = kLanes / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
  return sum;
}
__device__ inline float warp_sum(float sum) { return group_sum<32>(sum); }

// The sum over a block, in thread 0: a butterfly over each warp, then the warps in turn.
template <int kThreads>
__device__ float block_sum(float sum) {
  sum = warp_sum(sum);
  __shared__ float warps[kThreads / 32];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0)
    for (int w = 1; w < kThreads / 32; ++w) sum += warps[w];
  __syncthreads();  // before the next call writes `warps`
  return sum;
}

// What became of the launch just made.
inline LaunchStatus launched(char const* kernel) {
  cudaError_t const e = cudaGetLastError();
  return e == cudaSuccess ? LaunchStatus{} : LaunchStatus{kernel, cudaGetErrorString(e)};
}

}  // namespace coda::reduce
