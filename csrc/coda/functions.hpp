// Scalar functions for programs, one definition for device and host.
//
// Accuracy in fp32 on the GPU: ex2.approx (2 ulp) of an argument rounded once (|x| 6e-8), and rcp.approx (1 ulp). So the relative error
// of sigmoid is below 1e-5 for |x| < 80, and 2e-7 near 0; results are stored in 16 bits, with relative steps of 4e-3 or 5e-4. On the
// host the C library is used. Every function here stays finite for finite arguments.
#pragma once

#include <cmath>
#include <utility>

#include "coda/program.hpp"

namespace coda {

// 2^x; no faster than exp_ but without the rounding of its factor.
CODA_HD float exp2_(float x) {
#if defined(__CUDA_ARCH__)
  float y;  // exp2f() adds a rescaling of subnormal results, two instructions that no caller here needs
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::exp2(x);
#endif
}
CODA_HD double exp2_(double x) { return ::exp2(x); }

CODA_HD float exp_(float x) {
#if defined(__CUDA_ARCH__)
  return exp2_(x * 1.4426950408889634f);
#else
  return std::exp(x);
#endif
}
CODA_HD double exp_(double x) { return ::exp(x); }

CODA_HD float log2_(float x) {
#if defined(__CUDA_ARCH__)
  return log2f(x);
#else
  return std::log2(x);
#endif
}
CODA_HD double log2_(double x) { return ::log2(x); }

// 1 / x for normal x below 2^126, and for inf.
CODA_HD float reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float y;  // __fdividef() scales its operands first, for denominators that do not come here
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
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

// Its absolute error on the GPU is 3e-7, which is less than that of the sums in fp32 that come here; towards 0 it is not relative.
CODA_HD float tanh_(float x) {
#if defined(__CUDA_ARCH__)
  return 1.0f - 2.0f * reciprocal(1.0f + exp_(2.0f * x));
#else
  return std::tanh(x);
#endif
}
CODA_HD double tanh_(double x) { return ::tanh(x); }

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

CODA_HD float erf_(float x) {
#if defined(__CUDA_ARCH__)
  return erff(x);
#else
  return std::erf(x);
#endif
}
CODA_HD double erf_(double x) { return ::erf(x); }

// An activation, its value and its derivative. `kind` tells the members of a family apart at run time, so that a kernel serves them all. Kinds lists those
// that share their code in at(), which has no branch between them (program.hpp): code has to fit into the instruction cache, several times over, since an
// epilogue is one long run of it.
template <class Real>
struct Activated {
  Real value, slope;
};

enum class ActivationKind { kIdentity, kRelu, kReluSquared, kSilu, kGelu, kGeluTanh };
template <ActivationKind... kKinds>
using Alike = std::integer_sequence<int, int(kKinds)...>;

struct Silu {
  using Kinds = List<>;
  template <class Real>
  CODA_HD static Activated<Real> at(Real x, Real /*kind*/) {
    Real const s = sigmoid(x);
    return {x * s, silu_grad(x, s)};
  }
};

// gelu(x) = x Phi(x); with kind kGeluTanh the approximation x sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3), which is silu(x) with 2 u = x. (Hendrycks and
// Gimpel, arXiv:1606.08415.) Beyond |x| = 1e4 the cube is cut off, where the result is x or 0 already and the slope 1 or 0.
struct AnyActivation {
  using Kinds = List<Alike<ActivationKind::kIdentity, ActivationKind::kRelu, ActivationKind::kReluSquared>,
                     Alike<ActivationKind::kSilu, ActivationKind::kGeluTanh>, Alike<ActivationKind::kGelu>>;
  template <class Real>
  CODA_HD static Activated<Real> at(Real x, Real kind) {
    auto const is = [&](ActivationKind k) { return kind == Real(int(k)); };
    if (is(ActivationKind::kGelu)) {
      Real const phi = Real(0.5) * (Real(1) + erf_(x * Real(0.7071067811865476)));
      return {x * phi, phi + x * Real(0.3989422804014327) * exp_(Real(-0.5) * x * x)};
    }
    if (is(ActivationKind::kSilu) || is(ActivationKind::kGeluTanh)) {
      bool const cubic = is(ActivationKind::kGeluTanh);
      Real const scale = cubic ? Real(1.5957691216057308) : Real(1), cube = cubic ? Real(0.044715) : Real(0);
      Real const c = x > Real(1e4) ? Real(1e4) : x < Real(-1e4) ? Real(-1e4) : x, square = cube * c * c;
      Real const s = sigmoid(scale * c * (Real(1) + square));
      return {x * s, s + c * s * (Real(1) - s) * scale * (Real(1) + Real(3) * square)};
    }
    bool const identity = is(ActivationKind::kIdentity), squares = is(ActivationKind::kReluSquared), positive = x > Real(0);
    Real const r = positive ? x : Real(0), step = positive ? Real(1) : Real(0);
    return {identity ? x : squares ? r * r : r, identity ? Real(1) : squares ? Real(2) * r : step};
  }
};

struct Gelu : AnyActivation {
  using Kinds = List<Alike<ActivationKind::kGelu>, Alike<ActivationKind::kGeluTanh>>;
};

}  // namespace coda
