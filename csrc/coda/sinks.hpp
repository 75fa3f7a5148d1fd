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

}  // namespace coda
