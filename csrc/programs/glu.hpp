// Gated linear units (SwiGLU, GEGLU) behind a deferred RMSNorm, forward and backward. (Shazeer, arXiv:2002.05202.)
//
// With h = x * gamma and rstd = rsqrt(mean(x^2) + eps) per row, RMSNorm(x; gamma) W^T = rstd * (h W^T): the norm's scale commutes with
// the product, so it is applied to the accumulator. [gate | up] = rstd * acc and product = act(gate) * up.
#pragma once

#include "coda/functions.hpp"
#include "coda/loads.hpp"
#include "coda/sinks.hpp"

namespace coda {

// product[m, f] = act(rstd[m] acc[m, f]) * rstd[m] acc[m, f + F]
template <class Activation>
struct RstdGlu {
  static constexpr int kColumns = 2;
  static constexpr Pairing kPairing = Pairing::kHalves;
  using Loads = List<ColVector<>, Scalar>;
  using Sinks = List<HalfTileStore>;
  using Kinds = typename Activation::Kinds;
  enum In { kRstd, kKind };

  template <class Storage, class Real>
  CODA_HD static void apply(Real const (&acc)[2], Real const (&in)[2], Real (&out)[1]) {
    Real const gate = in[kRstd] * acc[0], up = in[kRstd] * acc[1];
    out[0] = Activation::at(gate, in[kKind]).value * up;
  }
};

// The same, and the pre-activation [gate | up] that the backward reads.
template <class Activation>
struct RstdGluPreactivation {
  static constexpr int kColumns = 2;
  static constexpr Pairing kPairing = Pairing::kHalves;
  using Loads = List<ColVector<>, Scalar>;
  using Sinks = List<TileStore, HalfTileStore>;
  using Kinds = typename Activation::Kinds;
  enum In { kRstd, kKind };
  enum Out { kGate, kUp, kProduct };

  template <class Storage, class Real>
  CODA_HD static void apply(Real const (&acc)[2], Real const (&in)[2], Real (&out)[3]) {
    out[kGate] = in[kRstd] * acc[0];
    out[kUp] = in[kRstd] * acc[1];
    out[kProduct] = Activation::at(out[kGate], in[kKind]).value * out[kUp];
  }
};

// Backward. acc = dproduct = dy W_down; reads gate and up as the forward stored them.
//   dgate = acc up act'(gate),  dup = acc act(gate)
// Stored: rstd dgate and rstd dup (the gradient of the accumulator of the forward), the recomputed product for the weight gradient of
// the down projection, and per row the sum of dgate gate + dup up, which the gradient of rstd needs.
template <class Activation>
struct DGlu {
  static constexpr int kColumns = 1;
  using Loads = List<TileLoad, TileLoad, ColVector<>, Scalar>;
  using Sinks = List<TileStore, TileStore, TileStore, RowPartial>;
  using Kinds = typename Activation::Kinds;
  enum In { kGate, kUp, kRstd, kKind };
  enum Out { kDgate, kDup, kProduct, kRowDot };

  template <class Storage, class Real>
  CODA_HD static void apply(Real const (&acc)[1], Real const (&in)[4], Real (&out)[4]) {
    auto const act = Activation::at(in[kGate], in[kKind]);
    Real const dgate = acc[0] * in[kUp] * act.slope, dup = acc[0] * act.value;
    out[kDgate] = in[kRstd] * dgate;
    out[kDup] = in[kRstd] * dup;
    out[kProduct] = act.value * in[kUp];
    out[kRowDot] = dgate * in[kGate] + dup * in[kUp];
  }
};

}  // namespace coda
