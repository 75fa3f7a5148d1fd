// Where a thread's accumulators lie, and the layouts that bring both columns of a pair into one thread, without permuted weights.
//
// A thread of a 64 x N wgmma (and of an m16n8 mma) holds, at fragment index v = 4k + 2i + j, the element (row r + 8i, column 8k + 2(t%4) + j): the
// accumulator is a row of atoms 8 columns wide. Give the GEMM's N mode, of extent 2F, the shape (8, 2, F/8) and B the strides
// ((ld, pair_stride, 8 ld), 1): atom 2p is then rows 8p..8p+7 of the first half of B (gate), and atom 2p + 1 the same rows of the second
// half (up). Both sit in the same thread, gate at v = 8p + q and up at v = 8p + 4 + q, q in 0..3. One value a pair, kept at 4p + q, is again
// in standard fragment order for a tile half as wide, so it leaves through stmatrix and TMA without a shuffle. The pre-activation leaves
// through a tensor of the same N mode with strides (ld, (1, F, 8)) and so lands in [gate | up] order.
#pragma once

#include "coda/program.hpp"
#include "cute/atom/mma_traits_sm90_gmma.hpp"
#include "cute/tensor.hpp"

namespace coda {

using PairedShapeN = cute::tuple<cute::_8, cute::_2, int>;  // (column in the atom, half, atom of the half)

// Fragment index of value number `group` of half `half` of a paired accumulator.
CUTE_HOST_DEVICE constexpr int paired_index(int group, int half) { return 8 * (group / 4) + 4 * half + group % 4; }

// Fragment index of member `member` of pair number `group`, for fragments of kFragment values that cover whole subtiles. kHeadHalves asks for
// a subtile as wide as the group of columns: its second half is then the second half of the fragment.
template <Pairing kPairing, int kFragment>
CUTE_HOST_DEVICE constexpr int fragment_index(int group, int member) {
  return kPairing == Pairing::kNone         ? group
         : kPairing == Pairing::kHalves     ? paired_index(group, member)
         : kPairing == Pairing::kHeadHalves ? group + member * (kFragment / 2)
                                            : 2 * group + member;
}

// Row and column, within the subtile, of fragment index v in thread `thread` of the consumers of a tile.
CUTE_HOST_DEVICE constexpr int fragment_row(int thread, int v) { return 16 * (thread / 32) + (thread % 32) / 4 + 8 * ((v / 2) % 2); }
CUTE_HOST_DEVICE constexpr int fragment_column(int thread, int v) { return 8 * (v / 4) + 2 * (thread % 4) + v % 2; }

// Pins the order described above: CLayout maps (thread, v = (j, i, k)) to row + 64 column of the 64 x N tile.
static_assert(cute::is_same_v<cute::SM90::GMMA::CLayout_64x128,
                              cute::Layout<cute::Shape<cute::Shape<cute::_4, cute::_8, cute::_4>, cute::Shape<cute::_2, cute::_2, cute::_16>>,
                                           cute::Stride<cute::Stride<cute::_128, cute::_1, cute::_16>, cute::Stride<cute::_64, cute::_8, cute::Int<512>>>>>,
              "the wgmma accumulator layout is not the one that paired_index assumes");

}  // namespace coda
