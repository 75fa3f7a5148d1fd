// What a program may write. The pointer and the strides arrive in GemmArguments::sinks, in the order of Program::Sinks.
#pragma once

#include "coda/program.hpp"

namespace coda {

// An M x N tensor in the storage type. In a pairwise program it is the pair, laid out [first half | second half].
struct TileStore {
  template <int kColumns>
  static constexpr int slots = kColumns;
};

// An M x N/2 tensor in the storage type: one value a pair.
struct HalfTileStore {
  template <int kColumns>
  static constexpr int slots = 1;
};

// Partial sums along N in the accumulator's type: one value per (row, tile of columns), laid out [tiles][partial_ld] with
// partial_ld >= M rounded up to the kernel's tile height (edge tiles are written whole). Summed in tile order by csrc/reduce.
struct RowPartial {
  template <int kColumns>
  static constexpr int slots = 1;
};

}  // namespace coda
