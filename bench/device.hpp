// What the benchmark needs of CUDA: checked calls, device memory, random inputs, a look for values that were never written, a timer.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "coda/params.h"

namespace coda::bench {

// Ends the program with one sentence.
struct Error : std::runtime_error {
  enum Code { kFailed = 1, kUsage = 2 };
  Code code;
  Error(Code c, std::string const& what) : std::runtime_error(what), code(c) {}
};

inline void check(cudaError_t e, std::string const& what) {
  if (e != cudaSuccess) throw Error(Error::kFailed, what + ": " + cudaGetErrorString(e));
}
inline void check(LaunchStatus const& s, std::string const& what) {
  if (!s.ok()) throw Error(Error::kFailed, what + " failed at " + s.stage + ": " + s.reason);
}

// --- types --------------------------------------------------------------------------------------------------------------------------
enum class Type { kBf16, kFp16, kFp32 };

inline std::size_t size_of(Type t) { return t == Type::kFp32 ? 4 : 2; }

// The largest relative error that passes, see Errors in problem.hpp. For the 16-bit types it is the largest rounding error of one element;
// over many of them, rounding comes to 0.4 of it. An fp32 output is a sum of values with the rounding of the fp32 accumulators.
inline double error_bound(Type t) { return t == Type::kBf16 ? 1.0 / 256 : t == Type::kFp16 ? 1.0 / 2048 : 5e-4; }

// All values of a 16-bit type, by bit pattern.
inline std::vector<float> const& values_of(Type t) {
  auto const build = [](auto decode) {
    std::vector<float> values(1 << 16);
    for (std::uint32_t i = 0; i < values.size(); ++i) values[i] = decode(i);
    return values;
  };
  static std::vector<float> const bf16 = build([](std::uint32_t bits) {
    bits <<= 16;
    float f;
    std::memcpy(&f, &bits, sizeof f);
    return f;
  });
  static std::vector<float> const fp16 = build([](std::uint32_t bits) {
    __half_raw raw;
    raw.x = static_cast<unsigned short>(bits);
    return __half2float(__half(raw));
  });
  return t == Type::kBf16 ? bf16 : fp16;
}

// --- memory -------------------------------------------------------------------------------------------------------------------------
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t bytes) : bytes_(bytes) {
    check(cudaMalloc(&data_, bytes), "cudaMalloc of " + std::to_string(bytes >> 20) + " MiB");
  }
  Buffer(Buffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Buffer() { cudaFree(data_); }

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  // All bits set: NaN in every type, so that what a kernel does not write shows.
  void poison() const { check(cudaMemset(data_, 0xff, bytes_), "cudaMemset"); }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// `count` elements, `stride` elements apart, from the device.
inline std::vector<double> read(void const* device, std::int64_t count, Type type, std::int64_t stride = 1) {
  std::size_t const size = size_of(type), n = static_cast<std::size_t>(count);
  std::vector<char> raw(n * size);
  if (stride == 1) {
    check(cudaMemcpy(raw.data(), device, raw.size(), cudaMemcpyDeviceToHost), "cudaMemcpy from the device");
  } else {
    check(cudaMemcpy2D(raw.data(), size, device, static_cast<std::size_t>(stride) * size, size, n, cudaMemcpyDeviceToHost),
          "cudaMemcpy2D from the device");
  }
  std::vector<double> values(n);
  for (std::size_t i = 0; i < n; ++i) {
    if (type == Type::kFp32) {
      float f;
      std::memcpy(&f, raw.data() + i * size, size);
      values[i] = f;
    } else {
      std::uint16_t bits;
      std::memcpy(&bits, raw.data() + i * size, size);
      values[i] = values_of(type)[bits];
    }
  }
  return values;
}

// --- device kernels -----------------------------------------------------------------------------------------------------------------
__host__ __device__ inline std::uint64_t mix(std::uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// Normal deviates: element i is a function of (seed, i) alone.
template <class T>
__global__ void fill_kernel(T* data, std::int64_t count, std::uint64_t seed, float mean, float deviation) {
  std::int64_t const step = std::int64_t(gridDim.x) * blockDim.x;
  for (std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    std::uint64_t const bits = mix(seed ^ mix(static_cast<std::uint64_t>(i)));
    float const u = (float(bits >> 32) + 0.5f) * 0x1p-32f, v = float(bits & 0xffffffffu) * 0x1p-32f;  // Box-Muller; u > 0
    data[i] = T(mean + deviation * sqrtf(-2.0f * logf(u)) * cospif(2.0f * v));
  }
}

struct Inspection {
  unsigned long long not_finite, checksum;
};

// The checksum is a sum of hashes modulo 2^64, so the order of the atomics does not matter.
template <class T>
__global__ void inspect_kernel(T const* data, std::int64_t count, Inspection* result) {
  std::int64_t const step = std::int64_t(gridDim.x) * blockDim.x;
  Inspection own{};
  for (std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    T const value = data[i];
    std::uint32_t bits = 0;
    if constexpr (sizeof(T) == 2) {
      bits = *reinterpret_cast<std::uint16_t const*>(&value);
    } else {
      bits = *reinterpret_cast<std::uint32_t const*>(&value);
    }
    own.not_finite += !isfinite(float(value));
    own.checksum += mix(mix(static_cast<std::uint64_t>(i)) ^ bits);
  }
  atomicAdd(&result->not_finite, own.not_finite);
  atomicAdd(&result->checksum, own.checksum);
}

// Calls f with a null pointer to the element type.
template <class F>
void with_type(Type t, F f) {
  switch (t) {
    case Type::kBf16: return f(static_cast<__nv_bfloat16*>(nullptr));
    case Type::kFp16: return f(static_cast<__half*>(nullptr));
    case Type::kFp32: return f(static_cast<float*>(nullptr));
  }
}

constexpr int kBlocks = 1024, kThreads = 256;

inline void fill(Buffer const& buffer, Type type, std::uint64_t seed, double mean, double deviation) {
  with_type(type, [&](auto* null) {
    auto* data = static_cast<decltype(null)>(buffer.data());
    fill_kernel<<<kBlocks, kThreads>>>(data, std::int64_t(buffer.bytes() / sizeof *data), seed, float(mean), float(deviation));
  });
  check(cudaGetLastError(), "launch of the kernel that fills the inputs");
}

inline Inspection inspect(Buffer const& buffer, Type type) {
  Buffer const result(sizeof(Inspection));
  check(cudaMemset(result.data(), 0, result.bytes()), "cudaMemset");
  with_type(type, [&](auto* null) {
    auto const* data = static_cast<decltype(null)>(buffer.data());
    inspect_kernel<<<kBlocks, kThreads>>>(data, std::int64_t(buffer.bytes() / sizeof *data), static_cast<Inspection*>(result.data()));
  });
  check(cudaGetLastError(), "launch of the kernel that inspects the outputs");
  Inspection host;
  check(cudaMemcpy(&host, result.data(), sizeof host, cudaMemcpyDeviceToHost), "reading back the outputs' inspection");
  return host;
}

// --- time ---------------------------------------------------------------------------------------------------------------------------
class Timer {
 public:
  Timer() {
    check(cudaEventCreate(&begin_), "cudaEventCreate");
    check(cudaEventCreate(&end_), "cudaEventCreate");
  }
  Timer(Timer const&) = delete;
  Timer& operator=(Timer const&) = delete;
  ~Timer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }

  // Milliseconds of one of `count` calls in a row.
  template <class F>
  double burst(int count, F&& call) {
    check(cudaEventRecord(begin_), "cudaEventRecord");
    for (int i = 0; i < count; ++i) call();
    check(cudaEventRecord(end_), "cudaEventRecord");
    check(cudaEventSynchronize(end_), "running a burst of kernels");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime");
    return double(ms) / count;
  }

 private:
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

// How many calls of `ms` each make a burst of `target` milliseconds.
inline int calls_in(double target, double ms) { return static_cast<int>(std::fmin(std::fmax(std::ceil(target / ms), 1.0), 1e5)); }

}  // namespace coda::bench
