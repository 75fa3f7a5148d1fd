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

// N values in the storage type or fp32, broadcast over rows (bias, gamma). Absent (null): kAbsent everywhere.
template <int kAbsent_ = 0>
struct RowVector {
  static constexpr int kAbsent = kAbsent_;
  template <int kColumns>
  static constexpr int slots = kColumns;
};

// M values in the accumulator's type, broadcast over columns (rstd). Absent (null): kAbsent everywhere.
template <int kAbsent_ = 1>
struct ColVector {
  static constexpr int kAbsent = kAbsent_;
  template <int kColumns>
  static constexpr int slots = 1;
};

// An M x N tile in the storage type (residual, saved pre-activation). The first one of a program may be absent (null): zeros.
struct TileLoad {
  template <int kColumns>
  static constexpr int slots = kColumns;
};

// One value of a table for each row and pair of columns (the cosines or sines of a rotary embedding), in the storage type or fp32:
// table[position(m), pair] where GemmArguments::rotation says that the pair rotates, kAbsent for all other pairs. It must be present.
template <int kAbsent_>
struct TableRow {
  static constexpr int kAbsent = kAbsent_;
  template <int kColumns>
  static constexpr int slots = 1;
};

// Two vectors of one value for each column of a head, in the storage type or fp32: the first for the heads of queries, the second for those of
// keys (QK-norm weights); kAbsent in all other heads. It must be present.
template <int kAbsent_>
struct HeadVector {
  static constexpr int kAbsent = kAbsent_;
  template <int kColumns>
  static constexpr int slots = kColumns;
};

// 1 in the column that the vector (int64 [M]) names for a row, 0 elsewhere. It must be present.
struct ColumnIs {
  template <int kColumns>
  static constexpr int slots = kColumns;
};

}  // namespace coda
