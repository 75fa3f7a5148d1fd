// CPU twins of csrc/reduce, with the same formulas (programs/norm.hpp). Ranges make them easy to run on several threads.
#pragma once

#include <cstdint>

#include "programs/norm.hpp"

namespace coda::host {

template <class Storage, class Weight, class Real>
void row_stats(Storage const* x, std::int64_t x_ld, Weight const* gamma, Storage* h, Real* rstd, std::int64_t d, Real eps, std::int64_t begin,
               std::int64_t end) {
  for (std::int64_t m = begin; m < end; ++m) {
    Storage const* row = x + m * x_ld;
    double sum = 0;  // one running fp32 sum over a row would lose what the GPU's tree keeps
    for (std::int64_t i = 0; i < d; ++i) sum += double(row[i]) * double(row[i]);
    rstd[m] = rstd_from_sum(Real(sum), Real(d), eps);
    if (gamma != nullptr)
      for (std::int64_t i = 0; i < d; ++i) h[m * d + i] = static_cast<Storage>(Real(row[i]) * Real(gamma[i]));
  }
}

template <class Storage, class Weight, class Real>
void norm_dx_rows(Storage const* dn, Storage const* x, std::int64_t x_ld, Weight const* gamma, Real const* rstd, Real const* row_dot, Storage* dx,
                  std::int64_t d, std::int64_t begin, std::int64_t end) {
  for (std::int64_t m = begin; m < end; ++m) {
    Real const correction = norm_correction(rstd[m], row_dot[m], Real(d));
    for (std::int64_t i = 0; i < d; ++i)
      dx[m * d + i] = static_cast<Storage>(norm_dx(Real(dn[m * d + i]), Real(x[m * x_ld + i]), Real(gamma[i]), correction));
  }
}

// Adds the products of rows [0, m) to the sums of columns [begin, end), which start at zero.
template <class Storage>
void norm_dgamma_columns(Storage const* dn, Storage const* x, std::int64_t x_ld, double* sums, std::int64_t m, std::int64_t d, std::int64_t begin,
                         std::int64_t end) {
  for (std::int64_t row = 0; row < m; ++row)
    for (std::int64_t i = begin; i < end; ++i) sums[i] += double(dn[row * d + i]) * double(x[row * x_ld + i]);
}

}  // namespace coda::host
