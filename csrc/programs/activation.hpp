// A linear layer with an activation and no gate, behind a deferred norm or none, forward and backward.
#pragma once

#include "coda/functions.hpp"
#include "coda/loads.hpp"
#include "coda/sinks.hpp"

namespace coda {

// z = rstd (acc - mean u) + bias,  y = act(z).  The rank-one term mean[m] u[n] is what LayerNorm adds to RMSNorm (u = W gamma, norm.hpp).
// Stored: y, and z if the backward will want it.
struct RstdAct {
  static constexpr int kColumns = 1;
  using Loads = List<ColVector<>, RowVector<>, Scalar, ColVector<0>, RowVector<>>;
  using Sinks = List<TileStore, TileStore>;
  using Kinds = AnyActivation::Kinds;
  enum In { kRstd, kBias, kKind, kMean, kDirection };
  enum Out { kValue, kPreactivation };

  template <class Storage, class Real>
  CODA_HD static void apply(Real const (&acc)[1], Real const (&in)[5], Real (&out)[2]) {
    Real const z = in[kRstd] * (acc[0] - in[kMean] * in[kDirection]) + in[kBias];
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
  using Kinds = AnyActivation::Kinds;
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

// The same behind a LayerNorm, whose constant v = W beta + bias takes the place of the bias; also per row the sum of dz u, which the gradient of
// the mean needs.
struct DActLayer {
  static constexpr int kColumns = 1;
  using Loads = List<TileLoad, ColVector<>, RowVector<>, Scalar, RowVector<>>;
  using Sinks = List<TileStore, TileStore, RowPartial, ColPartial, RowPartial>;
  using Kinds = AnyActivation::Kinds;
  enum In { kPreactivation, kRstd, kConstant, kKind, kDirection };
  enum Out { kDz, kProduct, kRowDot, kDconstant, kDirectionDot };

  template <class Storage, class Real>
  CODA_HD static void apply(Real const (&acc)[1], Real const (&in)[5], Real (&out)[5]) {
    Real const same[4] = {in[kPreactivation], in[kRstd], in[kConstant], in[kKind]};
    Real act[4];
    DAct::apply<Storage>(acc, same, act);
    out[kDz] = act[DAct::kDz];
    out[kProduct] = act[DAct::kProduct];
    out[kRowDot] = act[DAct::kRowDot];
    out[kDconstant] = act[DAct::kDbias];
    out[kDirectionDot] = act[DAct::kDbias] * in[kDirection];
  }
};

}  // namespace coda
