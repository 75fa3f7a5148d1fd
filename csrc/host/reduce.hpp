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

}  // namespace coda::host
