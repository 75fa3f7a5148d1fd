// What a program may read. Each type names the shape of a resource; the pointer and the strides arrive in GemmArguments::loads, in the
// order of Program::Loads. M is the number of rows, N the number of columns of the accumulator.
#pragma once

#include "coda/program.hpp"

namespace coda {

// One number for the whole GEMM, given by value.
struct Scalar {
  template <int kColumns>
  static constexpr int slots = 1;
};

// N values, broadcast over rows (bias, gamma). Absent (null): kAbsent everywhere.
template <class Element_ = Stored, int kAbsent_ = 0>
struct RowVector {
  using Element = Element_;
  static constexpr int kAbsent = kAbsent_;
  template <int kColumns>
  static constexpr int slots = kColumns;
};

// M values, broadcast over columns (rstd). Absent (null): kAbsent everywhere.
template <class Element_ = Accumulated, int kAbsent_ = 1>
struct ColVector {
  using Element = Element_;
  static constexpr int kAbsent = kAbsent_;
  template <int kColumns>
  static constexpr int slots = 1;
};

// An M x N tile in the storage type (residual, saved pre-activation). It must be present.
struct TileLoad {
  template <int kColumns>
  static constexpr int slots = kColumns;
};

}  // namespace coda
