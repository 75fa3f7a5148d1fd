// What travels from the caller to a kernel: plain structs, free of torch and of CUTLASS.
#pragma once

#include <cstdint>

namespace coda {

// One operand, load or sink. Which fields count depends on its kind:
//   matrix, tile      data, ld (elements between rows, or between columns for a transposed operand)
//   paired matrix     also pair_stride: elements from the first row (column) of the first half to that of the second half
//   table             data, ld (elements between rows), fp32
//   row vector        data, fp32; pair_stride as above for a program over two halves
//   column vector     data
//   stored tile       also columns: how many the tensor has, if fewer than N; what lies beyond is not stored
//   partials          data, ld (elements between the tiles' rows of partials)
//   scalar            value
//   head vectors      data, second; fp32
struct Resource {
  void* data = nullptr;
  std::int64_t ld = 0;
  std::int64_t pair_stride = 0;
  double value = 0;
  bool fp32 = false;  // row vectors, head vectors and tables: fp32 beside 16-bit tensors, instead of the storage type
  void const* second = nullptr;
  std::int64_t columns = 0;
};

constexpr int kMaxResources = 8;

// Which columns of a product turn by which angle, for TableRow. A column n belongs to head n / head_dim; the first rotary_dim columns of a
// head rotate, in heads that begin before column `columns` (so that queries and keys do, values do not). Those before `query_columns` are
// queries, for HeadVector.
struct Rotation {
  std::int64_t head_dim = 0;
  std::int64_t rotary_dim = 0;
  std::int64_t columns = 0;
  std::int64_t query_columns = 0;
  void const* positions = nullptr;  // of each row, int32 or int64; null: row m has position m % period
  bool positions64 = false;
  std::int64_t period = 1;
};

// acc[m, n] = sum_k A[m, k] B[n, k]. n counts both halves of a pairwise program.
struct GemmArguments {
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  Resource a;
  Resource b;
  Resource loads[kMaxResources];
  Resource sinks[kMaxResources];
  Rotation rotation;
  int swizzle = 0;       // tiles of a raster band; 0: the kernel's own choice
  int raster = 0;        // 1: along M, 2: along N; 0: the kernel's own choice
  int sm_count = 0;      // of the current device; 0: ask the driver
  int splits = 1;        // parts of K whose products are added in their order (split-K), for kernels that can, see registry.h
  float* parts = nullptr;  // with more than one: memory for their accumulators, of all tiles
  void* stream = nullptr;
};

// Static strings, so that a failure costs nothing on the way out. ok() when reason is null.
struct LaunchStatus {
  char const* stage = nullptr;
  char const* reason = nullptr;
  bool ok() const { return reason == nullptr; }
};

}  // namespace coda
