// Scalar functions for programs, one definition for device and host.
//
// Accuracy in fp32 on the GPU: ex2.approx (2 ulp) of an argument rounded once (|x| 6e-8), and rcp.approx (1 ulp). So the relative error
// of sigmoid is below 1e-5 for |x| < 80, and 2e-7 near 0; results are stored in 16 bits, with relative steps of 4e-3 or 5e-4. On the
// host the C library is used. Every function here stays finite for finite arguments.
#pragma once

#include <cmath>

#include "coda/program.hpp"

namespace coda {

CODA_HD float exp_(float x) {
#if defined(__CUDA_ARCH__)
  float y;  // exp2f() adds a rescaling of subnormal results, two instructions that no caller here needs
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
  return y;
#else
  return std::exp(x);
#endif
}
CODA_HD double exp_(double x) { return ::exp(x); }

// 1 / x for x in [1, inf].
CODA_HD float reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  return __fdividef(1.0f, x);
#else
  return 1.0f / x;
#endif
}
CODA_HD double reciprocal(double x) { return 1.0 / x; }

CODA_HD float inverse_sqrt(float x) {
#if defined(__CUDA_ARCH__)
  return rsqrtf(x);
#else
  return 1.0f / std::sqrt(x);
#endif
}
CODA_HD double inverse_sqrt(double x) { return 1.0 / ::sqrt(x); }

// 1 / (1 + exp(-x)); exp overflows to inf for x < -88 and the result is then 0, which is right to 1e-38.
template <class Real>
CODA_HD Real sigmoid(Real x) {
  return reciprocal(Real(1) + exp_(-x));
}

// d silu / dx = s (1 + x (1 - s)). For x -> -inf, s decays faster than x grows, so x * s is taken first to stay finite.
template <class Real>
CODA_HD Real silu_grad(Real x, Real s) {
  return s + x * s * (Real(1) - s);
}

}  // namespace coda
