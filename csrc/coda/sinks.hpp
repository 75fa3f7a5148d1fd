// What a program may write. The pointer and the strides arrive in GemmArguments::sinks, in the order of Program::Sinks.
#pragma once

#include "coda/program.hpp"

namespace coda {

// An M x N tensor in the storage type; a pairwise program gives both columns of its pair. All but the first may be absent (null).
struct TileStore {
  template <int kColumns>
  static constexpr int slots = kColumns;
};

// An M x N/2 tensor in the storage type: one value a pair.
struct HalfTileStore {
  template <int kColumns>
  static constexpr int slots = 1;
};

// Partial sums along N in the accumulator's type: one value per (row, tile of columns), laid out [tiles][ld]. Summed in tile order by
// csrc/reduce.
struct RowPartial {
  template <int kColumns>
  static constexpr int slots = 1;
};

// Partial sums along M in the accumulator's type: one value per (column, group of rows), laid out [groups][ld]; KernelInfo says how many
// rows a group has. Summed in the order of the groups by csrc/reduce. May be absent (null).
struct ColPartial {
  template <int kColumns>
  static constexpr int slots = 1;
};

// Softmax along N of z, of which a program gives two values a column, z and q: partials in the accumulator's type, planes of [tiles][ld] that are
// pair_stride apart, of which Resource::value says how many there are:
//   top        max(z) log2(e)
//   sum        of e' = 2^(z log2(e) - top + kExponentialShift)
//   dot        of e' q
//   total, q   the sums of z and of q
// Columns from Resource::columns on do not count. second: references [M, ceil(columns / kSoftmaxGroup)], for each group of columns the maximum up to its
// end, in units of top; null: not wanted. The finaliser combines tiles in a fixed order (csrc/reduce/loss.cu).
struct RowSoftmax {
  template <int kColumns>
  static constexpr int slots = 2 * kColumns;
};
constexpr int kSoftmaxGroup = 64;
constexpr int kExponentialShift = 15;  // 2^15 is about the largest number of fp16: it makes room for small exponentials

// The exponentials e' of a RowSoftmax as an M x N tensor, each with its own group's reference in the place of top: in fp16 beside 16-bit tensors, else in
// the storage type. No other number of 16 bits would do: e' has a relative error of 2^-12 down to 2^-29 of the maximum, where a logit of size 10 would be
// off by 2^-9 ... 2^-6. Takes no value of its own.
struct Exponentials {
  template <int kColumns>
  static constexpr int slots = 0;
};

// Of the two values that a program gives for a column, those of the column that Resource::second (int64 [M]) names: data[m] and data[pair_stride + m], in
// the accumulator's type. Nothing is stored for a row whose column is no column.
struct RowSelect {
  template <int kColumns>
  static constexpr int slots = 2 * kColumns;
};

}  // namespace coda
