// The instructions that the SM80 kernels are made of. tests/csrc/emulation has the same functions for the CPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#define CODA_D __device__ __forceinline__

namespace coda::sm80 {

using bf16 = __nv_bfloat16;
using fp16 = __half;
using SharedAddress = std::uint32_t;

CODA_D int thread_index() { return int(threadIdx.x); }
CODA_D void barrier() { __syncthreads(); }
CODA_D SharedAddress shared_address(void const* p) { return SharedAddress(__cvta_generic_to_shared(p)); }

// 16 bytes, or zeros in their place; then nothing is read.
CODA_D void copy_async(SharedAddress to, void const* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
CODA_D void copy_async(float* to, void const* from, bool valid) {  // 4 bytes
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(shared_address(to)), "l"(from), "r"(valid ? 4 : 0) : "memory");
}
CODA_D void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Waits until all but the last kPending groups have arrived.
template <int kPending>
CODA_D void wait_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// Four 8 x 8 matrices, of which each group of eight lanes gives the addresses of one's rows; transposed or not.
template <bool kTransposed>
CODA_D void load_matrices(std::uint32_t (&r)[4], SharedAddress from) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
  }
}

// d += a b for 16 x 16 and 16 x 8 fragments.
template <class Element>
CODA_D void multiply(float (&d)[4], std::uint32_t const (&a)[4], std::uint32_t b0, std::uint32_t b1);
template <>
CODA_D void multiply<bf16>(float (&d)[4], std::uint32_t const (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
CODA_D void multiply<fp16>(float (&d)[4], std::uint32_t const (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

CODA_D float from_lane_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }

// 4, 8 and 16 bytes that no one writes during the kernel.
CODA_D float load_one(float const* from) { return __ldg(from); }
CODA_D std::int64_t load_one(std::int64_t const* from) { return __ldg(from); }
CODA_D void load_16_bytes(std::uint32_t (&r)[4], void const* from) {
  uint4 const v = __ldg(static_cast<uint4 const*>(from));
  r[0] = v.x, r[1] = v.y, r[2] = v.z, r[3] = v.w;
}
// To global memory, if `valid`. A predicate instead of a branch: what comes before and behind is scheduled as one.
CODA_D void store_16_bytes(void* to, std::uint32_t const (&r)[4], bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %5, 0;\n"
      "@p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n"
      "}\n" ::"l"(to),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(int(valid))
      : "memory");
}
CODA_D void store_one(float* to, float value, bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "@p st.global.f32 [%0], %1;\n"
      "}\n" ::"l"(to),
      "f"(value), "r"(int(valid))
      : "memory");
}
CODA_D void load_shared_16_bytes(std::uint32_t (&r)[4], void const* from) {
  uint4 const v = *static_cast<uint4 const*>(from);
  r[0] = v.x, r[1] = v.y, r[2] = v.z, r[3] = v.w;
}
CODA_D void load_four(float* to, float const* from) {
  float4 const v = *reinterpret_cast<float4 const*>(from);
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}
CODA_D void store_four(float* to, float const* from) { *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]); }
CODA_D void store_two(float* to, float a, float b) { *reinterpret_cast<float2*>(to) = make_float2(a, b); }

CODA_D float as_float(std::uint32_t word) { return __uint_as_float(word); }
CODA_D std::uint32_t as_word(float value) { return __float_as_uint(value); }

// Two 16-bit values in a word, the first one in the low half.
template <class Element>
CODA_D std::uint32_t pack(float a, float b);
template <>
CODA_D std::uint32_t pack<bf16>(float a, float b) {
  __nv_bfloat162 const two = __floats2bfloat162_rn(a, b);
  return reinterpret_cast<std::uint32_t const&>(two);
}
template <>
CODA_D std::uint32_t pack<fp16>(float a, float b) {
  __half2 const two = __floats2half2_rn(a, b);
  return reinterpret_cast<std::uint32_t const&>(two);
}

template <class Element>
CODA_D float unpack(std::uint32_t word, int which);
template <>
CODA_D float unpack<bf16>(std::uint32_t word, int which) {
  return as_float(which == 0 ? word << 16 : word & 0xffff0000u);
}
template <>
CODA_D float unpack<fp16>(std::uint32_t word, int which) {
  __half2 const two = reinterpret_cast<__half2 const&>(word);
  return which == 0 ? __low2float(two) : __high2float(two);
}

}  // namespace coda::sm80
