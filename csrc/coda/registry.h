// The compiled kernels. csrc/kernels.py generates one source per kernel and the table that kernel_table() returns.
#pragma once

#include "coda/params.h"
#include "coda/program.hpp"

namespace coda {

struct KernelInfo {
  char const* key;      // e.g. rstd_swiglu_tn_bf16_128x192x64_2x1_pingpong, unique
  char const* program;  // e.g. rstd_swiglu
  char const* arch;     // sm90, sm80
  char const* layout;   // tn: A and B stored K-major.  nn: B N-major.  nt: A M-major, B N-major
  char const* dtype;    // bf16, fp16
  int tile_m, tile_n, tile_k;
  int cluster_m, cluster_n;
  int stages;         // of the mainloop
  int shared_memory;  // bytes a block
  int threads;        // a block
  int halves;         // 2 for a program over the two halves of N, else 1
  int head_halves;    // the rotary_dim it was built for, if it pairs the halves of heads, else 0
  int heads_within;   // or any rotary_dim that divides this and is a multiple of 16; if it pairs no halves of heads, 0
  bool whole_heads;   // it takes the mean over a head, so heads must be rotary_dim wide
  int partial_rows;   // rows in a group of the ColPartial sink
  int alignment;      // leading strides must be multiples of this many elements, base pointers of 16 bytes
  double rate;        // relative speed of a full wave, for dispatch: see csrc/kernels.py
  int min_k;          // from this K on
  LaunchStatus (*launch)(GemmArguments const&);
  bool splits = false;    // it takes GemmArguments::splits
  bool few_rows = false;  // it competes with SM90's kernels, see csrc/kernels.py
};

// Split-K: the length of all parts of K but the last one, in whole tiles; and how many there are then, which may be fewer than asked for.
CODA_HD std::int64_t part_length(std::int64_t k, std::int64_t splits, std::int64_t tile_k) {
  return ((k + splits - 1) / splits + tile_k - 1) / tile_k * tile_k;
}
CODA_HD std::int64_t count_parts(std::int64_t k, std::int64_t splits, std::int64_t tile_k) {
  std::int64_t const length = part_length(k, splits, tile_k);
  return (k + length - 1) / length;
}

// What the kernels of an architecture were compiled to: machine code for `capability` (10 major + minor) or PTX for it and all newer ones.
struct CodeInfo {
  char const* arch;
  int capability;
  bool ptx;
  bool few_rows = false;  // none but those kernels
};

struct KernelTable {
  KernelInfo const* const* kernels;
  int count;
  CodeInfo const* code;
  int code_count;
};

KernelTable kernel_table();

}  // namespace coda
