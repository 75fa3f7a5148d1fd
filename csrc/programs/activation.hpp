// A linear layer with an activation and no gate, behind a deferred norm or none, forward and backward.
#pragma once

#include "coda/functions.hpp"
#include "coda/loads.hpp"
#include "coda/sinks.hpp"

namespace coda {

// z = rstd acc + shift u + bias,  y = act(z).  The rank-one term shift[m] u[n] is what LayerNorm adds to RMSNorm (shift = -rstd mean,
// u = W gamma). Stored: y, and z if the backward will want it.
struct RstdAct {
  static constexpr int kColumns = 1;
  using Loads = List<ColVector<>, RowVector<>, Scalar, ColVector<0>, RowVector<>>;
  using Sinks = List<TileStore, TileStore>;
  enum In { kRstd, kBias, kKind, kShift, kDirection };
  enum Out { kValue, kPreactivation };

  template <class Storage, class Real>
  CODA_HD static void apply(Real const (&acc)[1], Real const (&in)[5], Real (&out)[2]) {
    Real const z = in[kRstd] * acc[0] + in[kShift] * in[kDirection] + in[kBias];
    out[kPreactivation] = z;
    out[kValue] = AnyActivation::at(z, in[kKind]).value;
  }
};

// Backward. acc = dproduct = dy W_down; reads z as the forward stored it.
//   dz = acc act'(z)
// Stored: rstd dz (the gradient of the forward's accumulator), the recomputed act(z) for the weight gradient of the next layer, per row the
// sum of dz (z - bias), which the gradient of rstd needs, and per column the sum of dz, the bias's gradient.
struct DAct {
  static constexpr int kColumns = 1;
  using Loads = List<TileLoad, ColVector<>, RowVector<>, Scalar>;
  using Sinks = List<TileStore, TileStore, RowPartial, ColPartial>;
  enum In { kPreactivation, kRstd, kBias, kKind };
  enum Out { kDz, kProduct, kRowDot, kDbias };

  template <class Storage, class Real>
  CODA_HD static void apply(Real const (&acc)[1], Real const (&in)[4], Real (&out)[4]) {
    auto const act = AnyActivation::at(in[kPreactivation], in[kKind]);
    Real const dz = acc[0] * act.slope;
    out[kDz] = in[kRstd] * dz;
    out[kProduct] = act.value;
    out[kRowDot] = dz * (in[kPreactivation] - in[kBias]);
    out[kDbias] = dz;
  }
};

}  // namespace coda
