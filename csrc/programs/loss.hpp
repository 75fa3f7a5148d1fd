// The language-model head and its loss.
//
//   logit = rstd acc + bias,  z = logit, or cap tanh(logit / cap),  lse = log(sum_n exp(z)),  p = exp(z - lse)
//   g = (by_softmax p - by_all - [n is the target] by_target) dz/dlogit
//
// g is the gradient of the logits: by_softmax is what the loss and lse weigh of a row, by_target and by_all what label smoothing leaves to the target and
// to every column. The gradient of rstd needs S = sum_n(g y) with y = rstd acc. With q = y dz/dlogit, S is linear in sum(p q), q[target] and sum(q), so
// statistics that know no gradient yet can carry it.
//
// What a first pass hands on to a second one, instead of logits, are exponentials (sinks.hpp): p has the relative error of one rounding to fp16, where
// from a logit in 16 bits it would have the logit's absolute error. Error of the gradient of x against float64, in units of 1e-4, for bf16 operands:
//                                          eager, fp32 logits   eager, bf16 logits   exponentials   bf16 logits and an lse of fp32 ones
//   32000 classes, logits of deviation 3         19.7                 31.4               19.6              38.5
//    1000 classes, logits of deviation 10        22.8                235.0               22.8             947.9
// (Milakov and Gimelshein, arXiv:1805.02867, for the running maximum; Gemma Team, arXiv:2408.00118, for the cap.)
#pragma once

#include <type_traits>

#include "coda/functions.hpp"
#include "coda/loads.hpp"
#include "coda/sinks.hpp"

namespace coda {

template <class Real>
struct Capped {
  Real value, slope;
};

// cap <= 0: no cap. The absolute error is that of a number of the size of cap. Without a branch: one for each value would keep values from overlapping.
template <class Real>
CODA_HD Capped<Real> capped(Real logit, Real cap) {
  bool const caps = cap > Real(0);
  Real const t = tanh_(logit * reciprocal(caps ? cap : Real(1)));
  return {caps ? cap * t : logit, caps ? Real(1) - t * t : Real(1)};
}

// The gradient of a logit.
template <class Real>
CODA_HD Real logit_gradient(Real p, Real slope, Real by_softmax, Real by_all, Real by_target) {
  return (by_softmax * p - by_all - by_target) * slope;
}

template <class Real>
constexpr Real kLog2E = Real(1.4426950408889634074);
template <class Real>
constexpr Real kLn2 = Real(0.69314718055994530942);

// What exponents are taken relative to, for a maximum that may be infinite.
template <class Real>
CODA_HD Real finite_or_zero(Real top) {
  return top - top == Real(0) ? top : Real(0);
}

// Sums relative to `top`, and their combination with those of further columns.
template <class Real>
struct SoftmaxSums {
  Real top, sum = 0, dot = 0;
  CODA_HD void rescale(Real higher) {
    Real const scale = exp2_(top - finite_or_zero(higher));
    sum *= scale, dot *= scale, top = higher;
  }
  CODA_HD void add(SoftmaxSums other) {
    Real const higher = other.top > top ? other.top : top;
    rescale(higher);
    other.rescale(higher);
    sum += other.sum, dot += other.dot;
  }
  CODA_HD Real lse() const { return (finite_or_zero(top) - Real(kExponentialShift) + log2_(sum)) * kLn2<Real>; }
};

// Of every row lse, and z and q of the target. kGeneral: with a bias, a cap and the totals, all of which may be absent. The kernels of the programs without
// have registers for wider tiles.
template <bool kGeneral, class... Stores>
struct LseSelectInto {
  static constexpr int kColumns = 1;
  static constexpr int kMaxPlanes = kGeneral ? 5 : 3;  // of RowSoftmax
  using Loads = std::conditional_t<kGeneral, List<ColVector<>, RowVector<>, Scalar>, List<ColVector<>>>;
  using Sinks = List<RowSelect, RowSoftmax, Stores...>;
  enum In { kRstd, kBias, kCap };
  enum Out { kPickedZ, kPickedQ, kZ, kQ, kLogit };

  template <class Storage, class Real>
  CODA_HD static void apply(Real const (&acc)[1], Real const (&in)[Loads::size], Real (&out)[OutputSlots<LseSelectInto>::count]) {
    Real const y = in[kRstd] * acc[0];
    Real logit = y;
    Capped<Real> z{y, Real(1)};
    if constexpr (kGeneral) {
      logit = y + in[kBias];
      z = capped(logit, in[kCap]);
    }
    out[kZ] = out[kPickedZ] = z.value;
    out[kQ] = out[kPickedQ] = y * z.slope;
    if constexpr (OutputSlots<LseSelectInto>::count > kLogit) out[kLogit] = logit;
  }
};
using LseSelect = LseSelectInto<false>;
using LseSelectLogits = LseSelectInto<false, TileStore>;  // and the logits
using LseSelectExponentials = LseSelectInto<false, Exponentials>;
using LseSelectGeneral = LseSelectInto<true>;
using LseSelectGeneralLogits = LseSelectInto<true, TileStore>;
using LseSelectGeneralExponentials = LseSelectInto<true, Exponentials>;

// Backward, with the product formed again. Stored: rstd g, per row S, and with kGeneral, which also has a bias and a cap, per column the sum of g, the bias's
// gradient.
template <bool kGeneral>
struct DLogitsOf {
  static constexpr int kColumns = 1;
  template <class... More>
  using RowsAnd = List<ColVector<>, ColVector<0>, ColVector<0>, ColVector<0>, ColVector<0>, ColumnIs, More...>;
  using Loads = std::conditional_t<kGeneral, RowsAnd<RowVector<>, Scalar>, RowsAnd<>>;
  using Sinks = std::conditional_t<kGeneral, List<TileStore, RowPartial, ColPartial>, List<TileStore, RowPartial>>;
  enum In { kRstd, kLse, kBySoftmax, kByAll, kByTarget, kIsTarget, kBias, kCap };
  enum Out { kDz, kRowDot, kDbias };

  template <class Storage, class Real>
  CODA_HD static void apply(Real const (&acc)[1], Real const (&in)[Loads::size], Real (&out)[Sinks::size]) {
    Real const y = in[kRstd] * acc[0];
    Capped<Real> z{y, Real(1)};
    if constexpr (kGeneral) z = capped(y + in[kBias], in[kCap]);
    Real const g = logit_gradient(exp_(z.value - in[kLse]), z.slope, in[kBySoftmax], in[kByAll], in[kIsTarget] * in[kByTarget]);
    out[kDz] = in[kRstd] * g;
    out[kRowDot] = g * y;
    if constexpr (kGeneral) out[kDbias] = g;
  }
};
using DLogits = DLogitsOf<false>;
using DLogitsGeneral = DLogitsOf<true>;

}  // namespace coda
