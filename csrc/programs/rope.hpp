// Rotary position embedding behind a deferred RMSNorm. (Su et al., RoFormer, arXiv:2104.09864.)
//
//   (a, b) -> (a cos - b sin, a sin + b cos)
//
// The pair is (c, c + rotary_dim / 2) of a head for kHeadHalves (rotate-half), (2c, 2c + 1) for kAdjacent (interleaved); angles come from
// tables, a row for each position. Columns that do not turn (values, the rest of a head) have cos = 1 and sin = 0.
#pragma once

#include "coda/functions.hpp"
#include "coda/loads.hpp"
#include "coda/sinks.hpp"

namespace coda {

template <class Real>
struct Rotated {
  Real a, b;
};

template <class Real>
CODA_HD Rotated<Real> rotate(Real a, Real b, Real cos, Real sin) {
  return {a * cos - b * sin, a * sin + b * cos};
}

// [a, b] = rotate(rstd acc + bias)
template <Pairing kPairing_>
struct RstdRope {
  static constexpr int kColumns = 2;
  static constexpr Pairing kPairing = kPairing_;
  using Loads = List<ColVector<>, RowVector<>, TableRow<1>, TableRow<0>>;
  using Sinks = List<TileStore>;
  enum In { kRstd, kBiasA, kBiasB, kCos, kSin };

  template <class Storage, class Real>
  CODA_HD static void apply(Real const (&acc)[2], Real const (&in)[5], Real (&out)[2]) {
    auto const turned = rotate(in[kRstd] * acc[0] + in[kBiasA], in[kRstd] * acc[1] + in[kBiasB], in[kCos], in[kSin]);
    out[0] = turned.a;
    out[1] = turned.b;
  }
};

}  // namespace coda
