// A GEMM with the classic epilogue.
#pragma once

#include "coda/functions.hpp"
#include "coda/loads.hpp"
#include "coda/sinks.hpp"

namespace coda {

// D = alpha acc + bias
struct Plain {
  static constexpr int kColumns = 1;
  using Loads = List<Scalar, RowVector<>>;
  using Sinks = List<TileStore>;
  enum In { kAlpha, kBias };

  template <class Storage, class Real>
  CODA_HD static void apply(Real const (&acc)[1], Real const (&in)[2], Real (&out)[1]) {
    out[0] = in[kAlpha] * acc[0] + in[kBias];
  }
};

// D = alpha acc + bias + beta C
struct PlainResidual {
  static constexpr int kColumns = 1;
  using Loads = List<Scalar, RowVector<>, Scalar, TileLoad>;
  using Sinks = List<TileStore>;
  enum In { kAlpha, kBias, kBeta, kSource };

  template <class Storage, class Real>
  CODA_HD static void apply(Real const (&acc)[1], Real const (&in)[4], Real (&out)[1]) {
    out[0] = in[kAlpha] * acc[0] + in[kBias] + in[kBeta] * in[kSource];
  }
};

}  // namespace coda
