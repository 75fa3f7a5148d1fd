// What the benchmark knows about each program: one row of programs(). A new program needs a row here and nothing else in bench/.
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

#include "programs/plain.hpp"
#include "programs/swiglu.hpp"

namespace coda::bench {

// What stands behind one entry of GemmArguments::loads or sinks. n is the number of columns of the program's result.
enum class Shape {
  kScalar,      // one number, Slot::mean
  kPerColumn,   // a vector over the GEMM's columns, in the storage type
  kPerRow,      // a vector over the rows, fp32
  kTile,        // [m, n]
  kPair,        // [m, 2n] as one resource: a tile of a pairwise program
  kFirstHalf,   // columns 0 to n of an [m, 2n] tensor
  kSecondHalf,  // columns n to 2n of the tensor of the slot before
  kRowPartial,  // partial sums; what counts is their total, one fp32 number a row
};

struct Slot {
  char const* name;
  Shape shape;
  double mean = 0, deviation = 1;  // of a load's random values
};

// One column of the result in fp64, in the order of the slots; what is given for a kRowPartial is summed over the columns. Written
// from the formula in csrc/programs, not by calling the program: an error there must not hide here.
using Reference = void (*)(double const* acc, double const* in, double* out);

struct Program {
  char const* name;
  char const* layout;  // the default
  int columns;         // accumulator columns for each column of the result
  std::vector<Slot> loads, sinks;
  Reference reference;
};

// The values that `slot` takes or gives for one column of the result.
inline int width(Slot const& slot, Program const& program) {
  return slot.shape == Shape::kPair || slot.shape == Shape::kPerColumn ? program.columns : 1;
}

template <class P, std::size_t kLoads, std::size_t kSinks>
Program row(char const* name, char const* layout, Slot const (&loads)[kLoads], Slot const (&sinks)[kSinks], Reference reference) {
  static_assert(kLoads == P::Loads::size && kSinks == P::Sinks::size, "a row must name every load and sink of its program, in order");
  return {name, layout, P::kColumns, {loads, loads + kLoads}, {sinks, sinks + kSinks}, reference};
}

inline double logistic(double x) { return 1 / (1 + std::exp(-x)); }

inline std::vector<Program> const& programs() {
  // Operands are normal with B scaled by 1 / sqrt(k), so accumulators have deviation 1. Scalars are no powers of two, and what scales is
  // not 1, so that leaving one out shows.
  static Slot const rstd{"rstd", Shape::kPerRow, 1, 0.1};
  static std::vector<Program> const table = {
      row<Plain>("plain", "tn", {{"alpha", Shape::kScalar, 0.75}, {"bias", Shape::kPerColumn}}, {{"d", Shape::kTile}},
                 [](double const* acc, double const* in, double* out) { out[0] = in[0] * acc[0] + in[1]; }),

      row<PlainResidual>("plain_residual", "tn",
                         {{"alpha", Shape::kScalar, 0.75},
                          {"bias", Shape::kPerColumn},
                          {"beta", Shape::kScalar, -1.25},
                          {"c", Shape::kTile}},
                         {{"d", Shape::kTile}},
                         [](double const* acc, double const* in, double* out) { out[0] = in[0] * acc[0] + in[1] + in[2] * in[3]; }),

      row<RstdSwiglu>("rstd_swiglu", "tn", {rstd}, {{"product", Shape::kTile}},
                      [](double const* acc, double const* in, double* out) {
                        double const gate = in[0] * acc[0], up = in[0] * acc[1];
                        out[0] = gate * logistic(gate) * up;
                      }),

      row<RstdSwigluPreactivation>("rstd_swiglu_preactivation", "tn", {rstd}, {{"preactivation", Shape::kPair}, {"product", Shape::kTile}},
                                   [](double const* acc, double const* in, double* out) {
                                     double const gate = in[0] * acc[0], up = in[0] * acc[1];
                                     out[0] = gate;
                                     out[1] = up;
                                     out[2] = gate * logistic(gate) * up;
                                   }),

      row<DSwiglu>("dswiglu", "nn", {{"gate", Shape::kFirstHalf}, {"up", Shape::kSecondHalf}, rstd},
                   {{"dgate", Shape::kFirstHalf}, {"dup", Shape::kSecondHalf}, {"product", Shape::kTile}, {"row_dot", Shape::kRowPartial}},
                   [](double const* acc, double const* in, double* out) {
                     double const gate = in[0], up = in[1], scale = in[2], s = logistic(gate);
                     double const dgate = acc[0] * up * s * (1 + gate * (1 - s)), dup = acc[0] * gate * s;
                     out[0] = scale * dgate;
                     out[1] = scale * dup;
                     out[2] = gate * s * up;
                     out[3] = dgate * gate + dup * up;
                   }),
  };
  return table;
}

}  // namespace coda::bench
