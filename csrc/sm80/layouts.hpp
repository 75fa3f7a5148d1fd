// Where things lie in shared memory. Plain index arithmetic, so that a test can check it without a GPU.
//
// Operands: lines of 16-byte chunks; a line is a row of the tile (K-major) or all rows at one k. ldmatrix reads eight lines at the same chunk, and copies
// write whole lines, so chunks are permuted within a line by the line's number: eight lines of a chunk then cover all 32 banks.
//
// Accumulators: a band of rows in fp32, kPad words apart from a multiple of 32, so that the 8-byte stores of half a warp (four rows of 8 columns) cover all
// banks. Chunks of four columns are permuted by the Gray code of the 32 columns that they lie in: then the 16-byte loads of eight threads cover all banks,
// be it of every second chunk (8 columns a thread), of every fourth (pairs of atoms, adjacent pairs) or of the halves of heads 64 or 128 columns wide.
#pragma once

#include "coda/program.hpp"

namespace coda::sm80 {

// Byte offset of a chunk of a tile whose lines are kLine 16-bit elements long.
template <int kLine>
CODA_HD constexpr int chunk_offset(int line, int chunk) {
  static_assert(kLine == 32 || kLine % 64 == 0);
  return 2 * kLine * line + 16 * (chunk ^ (kLine == 32 ? (line >> 1) & 3 : line & 7));
}

constexpr int kPad = 8;

CODA_HD constexpr int gray(int column) { return ((column >> 5) & 3) ^ ((column >> 6) & 1); }

// Word offset of a column in its row of the band.
CODA_HD constexpr int band_offset(int column) { return 4 * ((column >> 2) ^ gray(column)) + (column & 3); }

// Of a thread's fragment of an m16n8 product, elements 2i and 2i + 1 are at row `fragment_row + 8i` and two columns from `fragment_column` on.
CODA_HD constexpr int fragment_row(int lane) { return lane / 4; }
CODA_HD constexpr int fragment_column(int lane) { return 2 * (lane % 4); }

// Pairs of a group: where member `member` of pair `pair` lies among the 16 columns that its thread reads, the first 8 and the second 8.
template <Pairing kPairing>
CODA_HD constexpr int group_index(int pair, int member) {
  return kPairing == Pairing::kAdjacent ? 2 * pair + member : 8 * member + pair;
}

}  // namespace coda::sm80
