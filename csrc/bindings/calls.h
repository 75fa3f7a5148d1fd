// What the operators are made of. Each function checks nothing: operators.cpp has checked. Each takes 2-D tensors of any strides and
// runs on the device of its first tensor, by the CPU back end (cpu.cpp), an SM90 kernel (cuda.cpp), or, where no kernel was built for
// the dtype or the device, by plain torch operators (eager.cpp).
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <tuple>

#include "bindings/checks.h"

namespace coda::bindings {

// Row statistics are fp32, and fp64 beside fp64 tensors.
inline at::ScalarType statistics_type(at::Tensor const& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

// alpha a b + beta source + bias, for a [M, K] and b [K, N].
struct GemmCall {
  at::Tensor a, b;
  OptionalTensor bias, source;
  double alpha = 1, beta = 1;
};

struct SwigluResult {
  at::Tensor product;        // [M, F]
  at::Tensor preactivation;  // [M, 2F] as [gate | up]; empty if not stored
};

struct DSwigluResult {
  at::Tensor dz;       // [M, 2F] as [dgate | dup], scaled by rstd
  at::Tensor product;  // [M, F]
  at::Tensor row_dot;  // [M], statistics type
};

#define CODA_CALLS                                                                                                                      \
  at::Tensor gemm(GemmCall const& call);                                                                                                \
  SwigluResult rstd_swiglu(at::Tensor const& h, OptionalTensor const& rstd, at::Tensor const& w_gate, at::Tensor const& w_up,           \
                           bool store_preactivation);                                                                                   \
  DSwigluResult dswiglu(at::Tensor const& dy, at::Tensor const& w_down, at::Tensor const& preactivation, OptionalTensor const& rstd);   \
  /* h (undefined without a weight) and rstd */                                                                                         \
  std::tuple<at::Tensor, at::Tensor> row_stats(at::Tensor const& x, OptionalTensor const& weight, double eps);                          \
  /* dx and dweight, each undefined where not wanted */                                                                                 \
  std::tuple<at::Tensor, at::Tensor> norm_backward(at::Tensor const& dn, at::Tensor const& x, at::Tensor const& weight,                 \
                                                   at::Tensor const& rstd, at::Tensor const& row_dot, bool want_dx, bool want_dweight);

CODA_CALLS  // by device

namespace cpu {
CODA_CALLS
}
namespace cuda {
CODA_CALLS
}
namespace eager {
CODA_CALLS
}
#undef CODA_CALLS

// --- what ran -----------------------------------------------------------------------------------------------------------------------
// The back end and the kernels of the last public call in this process, "sm90:key+key", "cpu" or "eager:<reason>".
void begin_call();                            // at the start of every operator
void note(char const* backend, std::string const& what);
void note_eager(std::string const& reason);  // raises under CODA_STRICT=1
std::string last_call();

// Forces the kernel of a program until undone with an empty key; for tests and tuning. Raises for an unknown key, naming near misses.
void force_kernel(std::string const& program, std::string const& key);
std::string forced_kernel(std::string const& program);
// Overrides the scheduler's swizzle and raster (0: the kernel's own).
void force_schedule(int swizzle, int raster);

}  // namespace coda::bindings
