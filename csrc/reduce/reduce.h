// The kernels that are not GEMMs: row statistics, the elementwise end of the norm's backward, and the finalisers of partial sums. Every
// sum has a fixed order that depends on the shape alone. Free of torch; csrc/host/reduce.hpp has the CPU twins.
#pragma once

#include <cstdint>

#include "coda/params.h"

namespace coda::reduce {

enum class DType { kBf16, kFp16, kFp32 };

// h[m, d] = x[m, d] gamma[d] (rounded to dtype),  rstd[m] = rsqrt(mean_d(x[m, d]^2) + eps). One pass over x. gamma null: no h.
struct RowStats {
  DType dtype;         // of x and h: bf16 or fp16
  DType weight_dtype;  // dtype or fp32
  std::int64_t m, d;
  void const* x;
  std::int64_t x_ld;
  void const* gamma;
  void* h;  // [m, d], contiguous
  float* rstd;
  float eps;
};
LaunchStatus row_stats(RowStats const& args, void* stream);

// dx = gamma dn - (rstd^2 S / d) x and dgamma = sum_rows(dn x); see programs/norm.hpp. dn and dx are contiguous.
struct NormBackward {
  DType dtype, weight_dtype;
  std::int64_t m, d;
  void const* dn;
  void const* x;
  std::int64_t x_ld;
  void const* gamma;
  float const* rstd;
  float const* row_dot;  // S
  void* dx;              // null: not wanted
  void* dgamma;          // null: not wanted
  float* partials;       // [norm_backward_chunks(m, d), d] if dgamma is wanted
};
std::int64_t norm_backward_chunks(std::int64_t m, std::int64_t d);
LaunchStatus norm_backward(NormBackward const& args, void* stream);

// out[m] = sum_t partials[t, m], t ascending. The finaliser of the RowPartial sink.
LaunchStatus sum_row_partials(float const* partials, std::int64_t ld, std::int64_t tiles, std::int64_t m, float* out, void* stream);

}  // namespace coda::reduce
