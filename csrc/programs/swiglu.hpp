// SwiGLU behind a deferred RMSNorm, forward and backward.
//
// With h = x * gamma and rstd = rsqrt(mean(x^2) + eps) per row, RMSNorm(x; gamma) W^T = rstd * (h W^T): the norm's scale commutes with
// the product, so it is applied to the accumulator. [gate | up] = rstd * acc and product = silu(gate) * up.
#pragma once

#include "coda/functions.hpp"
#include "coda/loads.hpp"
#include "coda/sinks.hpp"

namespace coda {

// product[m, f] = silu(rstd[m] acc[m, f]) * rstd[m] acc[m, f + F]
struct RstdSwiglu {
  static constexpr int kColumns = 2;
  using Loads = List<ColVector<>>;
  using Sinks = List<HalfTileStore>;

  template <class Storage, class Real>
  CODA_HD static void apply(Real const (&acc)[2], Real const (&in)[1], Real (&out)[1]) {
    Real const gate = in[0] * acc[0], up = in[0] * acc[1];
    out[0] = gate * sigmoid(gate) * up;
  }
};

// The same, and the pre-activation [gate | up] that the backward reads.
struct RstdSwigluPreactivation {
  static constexpr int kColumns = 2;
  using Loads = List<ColVector<>>;
  using Sinks = List<TileStore, HalfTileStore>;
  enum Out { kGate, kUp, kProduct };

  template <class Storage, class Real>
  CODA_HD static void apply(Real const (&acc)[2], Real const (&in)[1], Real (&out)[3]) {
    out[kGate] = in[0] * acc[0];
    out[kUp] = in[0] * acc[1];
    out[kProduct] = out[kGate] * sigmoid(out[kGate]) * out[kUp];
  }
};

// Backward. acc = dproduct = dy W_down; reads gate and up as the forward stored them.
//   dgate = acc up s (1 + gate (1 - s)),  dup = acc gate s,  s = sigmoid(gate)
// Stored: rstd dgate and rstd dup (the gradient of the accumulator of the forward), the recomputed product for the weight gradient of
// the down projection, and per row the sum of dgate gate + dup up, which the gradient of rstd needs.
struct DSwiglu {
  static constexpr int kColumns = 1;
  using Loads = List<TileLoad, TileLoad, ColVector<>>;
  using Sinks = List<TileStore, TileStore, TileStore, RowPartial>;
  enum In { kGate, kUp, kRstd };
  enum Out { kDgate, kDup, kProduct, kRowDot };

  template <class Storage, class Real>
  CODA_HD static void apply(Real const (&acc)[1], Real const (&in)[3], Real (&out)[4]) {
    Real const gate = in[kGate], up = in[kUp], s = sigmoid(gate), silu = gate * s;
    Real const dgate = acc[0] * up * silu_grad(gate, s), dup = acc[0] * silu;
    out[kDgate] = in[kRstd] * dgate;
    out[kDup] = in[kRstd] * dup;
    out[kProduct] = silu * up;
    out[kRowDot] = dgate * gate + dup * up;
  }
};

}  // namespace coda
