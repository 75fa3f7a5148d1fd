// Rotary position embedding behind a deferred RMSNorm. (Su et al., RoFormer, arXiv:2104.09864.)
//
//   (a, b) -> (a cos - b sin, a sin + b cos)
//
// The pair is (c, c + rotary_dim / 2) of a head for kHeadHalves (rotate-half), (2c, 2c + 1) for kAdjacent (interleaved); angles come from
// tables, a row for each position. Columns that do not turn (values, the rest of a head) have cos = 1 and sin = 0.
//
// QK-norm: the heads of queries and keys each have an RMSNorm of their own before they turn. (Henry et al., arXiv:2010.04245.)
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

// The gradient of z, for n = head_rstd z:  head_rstd (dn - n mean_head(dn n)).
template <class Real>
CODA_HD Real head_norm_dz(Real dn, Real n, Real mean_dn_n, Real head_rstd) {
  return head_rstd * (dn - n * mean_dn_n);
}

// z = rstd acc + bias as it is stored; head_rstd = rsqrt(mean_head(z^2) + eps);  [a, b] = rotate(head_rstd z gamma). Stored: the turned heads, and,
// if the backward will want it, z. The heads of values leave as z.
struct RstdQkNormRope {
  static constexpr int kColumns = 2;
  static constexpr Pairing kPairing = Pairing::kHeadHalves;
  using Loads = List<ColVector<>, RowVector<>, HeadVector<1>, Scalar, TableRow<1>, TableRow<0>>;
  using Sinks = List<TileStore, TileStore>;
  enum In { kRstd, kBiasA, kBiasB, kGammaA, kGammaB, kEps, kCos, kSin };
  static constexpr int kHeadMeanLoads = 2;

  template <class Storage, class Real>
  CODA_HD static Real term(Real (&acc)[2], Real const (&in)[8]) {
    acc[0] = Real(Storage(in[kRstd] * acc[0] + in[kBiasA]));
    acc[1] = Real(Storage(in[kRstd] * acc[1] + in[kBiasB]));
    return acc[0] * acc[0] + acc[1] * acc[1];
  }
  template <class Real>
  CODA_HD static Real head(Real mean, bool inside, Real const (&in)[8]) {
    return inside ? inverse_sqrt(mean + in[kEps]) : Real(1);
  }
  template <class Storage, class Real>
  CODA_HD static void apply(Real const (&z)[2], Real const (&in)[8], Real scale, Real (&out)[4]) {
    auto const turned = rotate(scale * z[0] * in[kGammaA], scale * z[1] * in[kGammaB], in[kCos], in[kSin]);
    out[0] = turned.a, out[1] = turned.b;
    out[2] = z[0], out[3] = z[1];
  }
};

}  // namespace coda
