// RMSNorm and LayerNorm around matrix products: the statistics where x is made, the scale where it is used, and the gradient where dn = dz W
// is made. (Zhang and Sennrich, arXiv:1910.07467; Ba, Kiros and Hinton, arXiv:1607.06450.)
//
//   rstd = rsqrt(mean(x^2) + eps),  h = x gamma,  y = rstd (h W^T)
//   with dz = rstd dy, dn = dz W and S = sum_n(dy y):  dx = gamma dn - (rstd^2 S / D) x,  dgamma = sum_rows(dn x)
//
// LayerNorm, with rstd = rsqrt(variance(x) + eps), h as above, u = W gamma, v = W beta and c = x - mean(x):
//   y = rstd (h W^T - mean u) + v
//   with S = sum_n(dy (y - v)) and T = sum_n(dy u):  dx = gamma dn - (rstd^2 S / D) c - rstd T / D,  dgamma = sum_rows(dn c),
//   dbeta = W^T sum_rows(dy),  dW = dz^T (c gamma + beta / rstd)
//
// The scalar formulas are shared with the row kernels of csrc/reduce.
#pragma once

#include "coda/functions.hpp"
#include "coda/loads.hpp"
#include "coda/sinks.hpp"

namespace coda {

template <class Real>
CODA_HD Real rstd_from_sum(Real sum_of_squares, Real width, Real eps) {
  return inverse_sqrt(sum_of_squares / width + eps);
}

// The factor of x in dx, one per row.
template <class Real>
CODA_HD Real norm_correction(Real rstd, Real row_dot, Real width) {
  return rstd * rstd * (row_dot / width);
}

// Of LayerNorm, from the sums of x and of x^2. The difference loses what the mean is larger than the deviation; it may round below zero.
template <class Real>
struct Moments {
  Real rstd, mean;
};

template <class Real>
CODA_HD Moments<Real> moments_from_sums(Real sum, Real sum_of_squares, Real width, Real eps) {
  Real const mean = sum / width, variance = sum_of_squares / width - mean * mean;
  return {inverse_sqrt((variance < Real(0) ? Real(0) : variance) + eps), mean};
}

// What the gradient of the mean adds to dx in every column of a row.
template <class Real>
CODA_HD Real norm_offset(Real rstd, Real direction_dot, Real width) {
  return -rstd * (direction_dot / width);
}

template <class Real>
CODA_HD Real norm_dx(Real dn, Real x, Real gamma, Real correction) {
  return gamma * dn - correction * x;
}

// y = rstd acc + bias
struct RstdLinear {
  static constexpr int kColumns = 1;
  using Loads = List<ColVector<>, RowVector<>>;
  using Sinks = List<TileStore>;
  enum In { kRstd, kBias };

  template <class Storage, class Real>
  CODA_HD static void apply(Real const (&acc)[1], Real const (&in)[2], Real (&out)[1]) {
    out[0] = in[kRstd] * acc[0] + in[kBias];
  }
};

// x' = residual + acc + bias,  h = x' gamma, and per row the sum of x'^2. Both use x' as it is stored, so that the statistics are a function
// of the stored tensor alone.
struct ResidualSqsum {
  static constexpr int kColumns = 1;
  using Loads = List<TileLoad, RowVector<>, RowVector<1>>;
  using Sinks = List<TileStore, TileStore, RowPartial>;
  enum In { kResidual, kBias, kGamma };
  enum Out { kSum, kScaled, kSquares };

  template <class Storage, class Real>
  CODA_HD static void apply(Real const (&acc)[1], Real const (&in)[3], Real (&out)[3]) {
    Real const x = Real(Storage(acc[0] + in[kBias] + in[kResidual]));
    out[kSum] = x;
    out[kScaled] = x * in[kGamma];
    out[kSquares] = x * x;
  }
};

// The same for a LayerNorm, which needs the sum of x' too.
struct ResidualMoments {
  static constexpr int kColumns = 1;
  using Loads = ResidualSqsum::Loads;
  using Sinks = List<TileStore, TileStore, RowPartial, RowPartial>;
  enum In { kResidual, kBias, kGamma };
  enum Out { kSum, kScaled, kSquares, kValues };

  template <class Storage, class Real>
  CODA_HD static void apply(Real const (&acc)[1], Real const (&in)[3], Real (&out)[4]) {
    Real same[3];
    ResidualSqsum::apply<Storage>(acc, in, same);
    out[kSum] = out[kValues] = same[ResidualSqsum::kSum];
    out[kScaled] = same[ResidualSqsum::kScaled];
    out[kSquares] = same[ResidualSqsum::kSquares];
  }
};

// acc = dn. dx = incoming + gamma acc - correction x; also h = x gamma, which the weight gradient reads and the forward did not keep, and per
// column the sum of acc x. Incoming is the gradient that arrives on the residual stream; it may be absent.
struct NormBackward {
  static constexpr int kColumns = 1;
  using Loads = List<TileLoad, TileLoad, RowVector<1>, ColVector<0>>;
  using Sinks = List<TileStore, TileStore, ColPartial>;
  enum In { kIncoming, kX, kGamma, kCorrection };
  enum Out { kDx, kScaled, kDgamma };

  template <class Storage, class Real>
  CODA_HD static void apply(Real const (&acc)[1], Real const (&in)[4], Real (&out)[3]) {
    out[kDx] = in[kIncoming] + norm_dx(acc[0], in[kX], in[kGamma], in[kCorrection]);
    out[kScaled] = in[kX] * in[kGamma];
    out[kDgamma] = acc[0] * in[kX];
  }
};

// The same for a LayerNorm, on c = x - mean: dx has an offset for each row, and what the weight gradient reads is c gamma + beta / rstd.
struct LayerNormBackward {
  static constexpr int kColumns = 1;
  using Loads = List<TileLoad, TileLoad, RowVector<1>, ColVector<0>, ColVector<0>, ColVector<0>, RowVector<>, ColVector<>>;
  using Sinks = NormBackward::Sinks;
  enum In { kIncoming, kX, kGamma, kCorrection, kOffset, kMean, kBeta, kRstd };
  enum Out { kDx, kScaled, kDgamma };

  template <class Storage, class Real>
  CODA_HD static void apply(Real const (&acc)[1], Real const (&in)[8], Real (&out)[3]) {
    Real const centred[4] = {in[kIncoming] + in[kOffset], in[kX] - in[kMean], in[kGamma], in[kCorrection]};
    NormBackward::apply<Storage>(acc, centred, out);
    out[kScaled] += in[kBeta] * reciprocal(in[kRstd]);
  }
};

}  // namespace coda
