// The scalar formulas of RMSNorm, shared by the row kernels of csrc/reduce and their CPU twins in csrc/host.
//
//   rstd = rsqrt(mean(x^2) + eps),  h = x gamma,  y = rstd (h W^T)
//   with dz = rstd dy, dn = dz W and S = sum_n(dy y):  dx = gamma dn - (rstd^2 S / D) x,  dgamma = sum_rows(dn x)
#pragma once

#include "coda/functions.hpp"

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

template <class Real>
CODA_HD Real norm_dx(Real dn, Real x, Real gamma, Real correction) {
  return gamma * dn - correction * x;
}

}  // namespace coda
