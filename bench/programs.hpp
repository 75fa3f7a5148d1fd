// What the benchmark knows about each program: one row of programs(). A new program needs a row here and nothing else in bench/, unless it
// reads or writes something of a new shape.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "programs/activation.hpp"
#include "programs/glu.hpp"
#include "programs/loss.hpp"
#include "programs/norm.hpp"
#include "programs/plain.hpp"
#include "programs/rope.hpp"

namespace coda::bench {

// What stands behind one entry of GemmArguments::loads or sinks. n is the number of columns of the program's result.
enum class Shape {
  kScalar,         // one number, Slot::mean
  kPerColumn,      // a vector over the GEMM's columns, in the storage type
  kPerColumnFp32,  // the same in fp32
  kPerRow,         // a vector over the rows, fp32
  kTile,           // as wide as the GEMM; [m, 2n] for a program over two halves, else [m, n]
  kHalfTile,       // [m, n] of a program over two halves: one value a pair
  kFirstHalf,      // columns 0 to n of an [m, 2n] tensor, of a program that has n columns itself
  kSecondHalf,     // columns n to 2n of the tensor of the slot before
  kCosine,         // the tables of the rotation, fp32
  kSine,
  kPerHeadColumn,  // two vectors over the columns of a head, fp32, for the heads of queries and of keys; 1 in other heads
  kTarget,        // a column for each row: 1 there, 0 elsewhere
  kSelected,      // the two values that the program gives for that column
  kSoftmax,       // of the two values z and q that it gives: lse(z), the mean of q with the weights exp(z), and the sums of both
  kExponentials,  // of the slot before, fp16; compared as exp(z - lse)
  kRowPartial,  // partial sums along a row; what counts is their total, one fp32 number a row
  kColPartial,  // partial sums along a column; likewise, one a column
};

struct Slot {
  char const* name;
  Shape shape;
  double mean = 0, deviation = 1;  // of a load's random values
};

using Rounding = double (*)(double);

// The nearest number of kDigits binary digits, halves to even, that is a multiple of 2^kLeast.
template <int kDigits, int kLeast>
double rounded(double x) {
  int exponent;
  std::frexp(x, &exponent);
  double const step = std::ldexp(1.0, std::max(exponent - kDigits, kLeast));
  return std::nearbyint(x / step) * step;
}
inline constexpr Rounding kRoundBf16 = rounded<8, -133>, kRoundFp16 = rounded<11, -24>;

// One call of the program in fp64: one column of the GEMM, or a pair, in the order of the slots. What is given for a kRowPartial or a
// kColPartial is summed over the calls. Written from the formula in csrc/programs, not by calling the program: an error there must not
// hide here. `stored` rounds to the storage type, for a program that goes on with a value as it stores it.
using Reference = void (*)(double const* acc, double const* in, double* out, Rounding stored);

struct Program {
  char const* name;
  char const* layout;  // the default
  Pairing pairing;
  int columns;  // of the accumulator, for each call
  std::vector<Slot> loads, sinks;
  Reference reference;
  Reference term = nullptr;  // of a program with a mean over heads: what a call adds to it, in out[0]. The reference finds it behind its loads, -1 in other heads
  int planes = 0;            // of partials of a RowSoftmax

  int halves() const { return pairing == Pairing::kHalves ? 2 : 1; }  // GEMM columns for each column of the result
  bool rotates() const { return pairing == Pairing::kHeadHalves || pairing == Pairing::kAdjacent; }
  bool sums_columns() const {
    return std::any_of(sinks.begin(), sinks.end(), [](Slot const& s) { return s.shape == Shape::kColPartial; });
  }
};

// The values that `slot` takes or gives in one call.
inline int width(Slot const& slot, Program const& program) {
  bool const own = slot.shape == Shape::kTile || slot.shape == Shape::kPerColumn || slot.shape == Shape::kPerColumnFp32 || slot.shape == Shape::kPerHeadColumn;
  if (slot.shape == Shape::kExponentials) return 0;
  return own ? program.columns : slot.shape == Shape::kSelected || slot.shape == Shape::kSoftmax ? 2 : 1;
}

template <class P>
constexpr int planes_of(decltype(P::kMaxPlanes)) { return P::kMaxPlanes; }
template <class P>
constexpr int planes_of(long) { return 0; }

template <class P, std::size_t kLoads, std::size_t kSinks>
Program row(char const* name, char const* layout, Slot const (&loads)[kLoads], Slot const (&sinks)[kSinks], Reference reference, Reference term = nullptr) {
  static_assert(kLoads == P::Loads::size && kSinks == P::Sinks::size, "a row must name every load and sink of its program, in order");
  return {name, layout, kPairingOf<P>, P::kColumns, {loads, loads + kLoads}, {sinks, sinks + kSinks}, reference, term, planes_of<P>(0)};
}

template <class P, std::size_t kSinks>
Program row(char const* name, char const* layout, Slot const (&sinks)[kSinks], Reference reference) {
  static_assert(P::Loads::size == 0 && kSinks == P::Sinks::size, "a row must name every load and sink of its program, in order");
  return {name, layout, kPairingOf<P>, P::kColumns, {}, {sinks, sinks + kSinks}, reference};
}

// An activation and its derivative.
struct Curve {
  double value, slope;
};
inline Curve silu(double x) {
  double const s = 1 / (1 + std::exp(-x));
  return {x * s, s * (1 + x * (1 - s))};
}
inline Curve gelu(double x) {
  double const phi = (1 + std::erf(x * std::sqrt(0.5))) / 2;
  return {x * phi, phi + x * std::exp(-x * x / 2) / std::sqrt(8 * std::atan(1))};
}
inline Curve gelu_tanh(double x) {
  double const c = std::sqrt(2 / (4 * std::atan(1))), t = std::tanh(c * (x + 0.044715 * x * x * x));
  return {x * (1 + t) / 2, (1 + t) / 2 + x / 2 * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x)};
}

template <Curve (*kCurve)(double)>
void glu(double const* acc, double const* in, double* out, Rounding) {
  out[0] = kCurve(in[0] * acc[0]).value * (in[0] * acc[1]);
}
template <Curve (*kCurve)(double)>
void glu_preactivation(double const* acc, double const* in, double* out, Rounding) {
  double const gate = in[0] * acc[0], up = in[0] * acc[1];
  out[0] = gate;
  out[1] = up;
  out[2] = kCurve(gate).value * up;
}
template <Curve (*kCurve)(double)>
void dglu(double const* acc, double const* in, double* out, Rounding) {
  double const gate = in[0], up = in[1], rstd = in[2];
  Curve const act = kCurve(gate);
  double const dgate = acc[0] * up * act.slope, dup = acc[0] * act.value;
  out[0] = rstd * dgate;
  out[1] = rstd * dup;
  out[2] = act.value * up;
  out[3] = dgate * gate + dup * up;
}
inline void rope(double const* acc, double const* in, double* out, Rounding) {
  double const a = in[0] * acc[0] + in[1], b = in[0] * acc[1] + in[2], cos = in[3], sin = in[4];
  out[0] = a * cos - b * sin;
  out[1] = a * sin + b * cos;
}

// rstd
inline void lse_select(double const* acc, double const* in, double* out, Rounding) { out[0] = out[1] = out[2] = out[3] = out[4] = in[0] * acc[0]; }
// rstd, bias, cap
inline void lse_select_general(double const* acc, double const* in, double* out, Rounding) {
  double const y = in[0] * acc[0], logit = y + in[1], t = std::tanh(logit / in[2]);
  out[0] = out[2] = in[2] * t;
  out[1] = out[3] = y * (1 - t * t);
  out[4] = logit;
}
// rstd, lse, by_softmax, by_all, by_target, and whether this is the target
inline void dlogits(double const* acc, double const* in, double* out, Rounding) {
  double const y = in[0] * acc[0], g = in[2] * std::exp(y - in[1]) - in[3] - in[4] * in[5];
  out[0] = in[0] * g;
  out[1] = g * y;
}
// also bias, cap
inline void dlogits_general(double const* acc, double const* in, double* out, Rounding) {
  double const y = in[0] * acc[0], t = std::tanh((y + in[6]) / in[7]);
  double const g = (in[2] * std::exp(in[7] * t - in[1]) - in[3] - in[4] * in[5]) * (1 - t * t);
  out[0] = in[0] * g;
  out[1] = g * y;
  out[2] = g;
}

inline void qknorm_term(double const* acc, double const* in, double* out, Rounding stored) {
  double const a = stored(in[0] * acc[0] + in[1]), b = stored(in[0] * acc[1] + in[2]);
  out[0] = a * a + b * b;
}
inline void qknorm_rope(double const* acc, double const* in, double* out, Rounding stored) {
  double const a = in[0] * acc[0] + in[1], b = in[0] * acc[1] + in[2], cos = in[6], sin = in[7], mean = in[8];
  double const scale = mean < 0 ? 1 : 1 / std::sqrt(mean + in[5]), c = scale * in[3] * stored(a), d = scale * in[4] * stored(b);
  out[0] = c * cos - d * sin;
  out[1] = c * sin + d * cos;
  out[2] = a;
  out[3] = b;
}

inline std::vector<Program> const& programs() {
  // Operands are normal with B scaled by 1 / sqrt(k), so accumulators have deviation 1. Scalars are no powers of two, and what scales is
  // not 1, so that leaving one out shows. Norm weights are fp32, as autocast keeps them.
  auto const kind = [](ActivationKind k) { return Slot{"kind", Shape::kScalar, double(int(k))}; };
  Slot const rstd{"rstd", Shape::kPerRow, 1, 0.1}, bias{"bias", Shape::kPerColumn}, gamma{"gamma", Shape::kPerColumnFp32, 1, 0.1};
  Slot const silu_kind = kind(ActivationKind::kSilu), gelu_kind = kind(ActivationKind::kGelu), tanh_kind = kind(ActivationKind::kGeluTanh);
  Slot const gate{"gate", Shape::kFirstHalf}, up{"up", Shape::kSecondHalf}, cosine{"cos", Shape::kCosine}, sine{"sin", Shape::kSine};
  Slot const preactivation{"preactivation", Shape::kTile}, product{"product", Shape::kHalfTile};
  Slot const dgate{"dgate", Shape::kFirstHalf}, dup{"dup", Shape::kSecondHalf}, row_dot{"row_dot", Shape::kRowPartial};
  Slot const cap{"cap", Shape::kScalar, 2.5}, picked{"picked", Shape::kSelected}, softmax{"softmax", Shape::kSoftmax};
  Slot const logits{"logits", Shape::kTile}, exponentials{"exponentials", Shape::kExponentials}, dz{"dz", Shape::kTile};
  Slot const lse{"lse", Shape::kPerRow, 6, 0.1}, by_softmax{"by_softmax", Shape::kPerRow, 1, 0.1}, by_all{"by_all", Shape::kPerRow, 0.1, 0.01};
  Slot const by_target{"by_target", Shape::kPerRow, 1, 0.1}, target{"target", Shape::kTarget};
  static std::vector<Program> const table = {
      row<Plain>("plain", "tn", {{"alpha", Shape::kScalar, 0.75}, bias}, {{"d", Shape::kTile}},
                 [](double const* acc, double const* in, double* out, Rounding) { out[0] = in[0] * acc[0] + in[1]; }),

      row<PlainResidual>("plain_residual", "tn",
                         {{"alpha", Shape::kScalar, 0.75}, bias, {"beta", Shape::kScalar, -1.25}, {"c", Shape::kTile}}, {{"d", Shape::kTile}},
                         [](double const* acc, double const* in, double* out, Rounding) { out[0] = in[0] * acc[0] + in[1] + in[2] * in[3]; }),

      row<RstdGlu<Silu>>("rstd_swiglu", "tn", {rstd, silu_kind}, {product}, glu<silu>),
      row<RstdGluPreactivation<Silu>>("rstd_swiglu_preactivation", "tn", {rstd, silu_kind}, {preactivation, product}, glu_preactivation<silu>),
      row<DGlu<Silu>>("dswiglu", "nn", {gate, up, rstd, silu_kind}, {dgate, dup, {"product", Shape::kTile}, row_dot}, dglu<silu>),

      row<RstdGlu<Gelu>>("rstd_geglu", "tn", {rstd, tanh_kind}, {product}, glu<gelu_tanh>),
      row<RstdGluPreactivation<Gelu>>("rstd_geglu_preactivation", "tn", {rstd, tanh_kind}, {preactivation, product},
                                      glu_preactivation<gelu_tanh>),
      row<DGlu<Gelu>>("dgeglu", "nn", {gate, up, rstd, tanh_kind}, {dgate, dup, {"product", Shape::kTile}, row_dot}, dglu<gelu_tanh>),

      row<RstdAct>("rstd_act", "tn", {rstd, bias, gelu_kind, {"mean", Shape::kPerRow, 0.3, 0.1}, {"direction", Shape::kPerColumnFp32}},
                   {{"value", Shape::kTile}, preactivation},
                   [](double const* acc, double const* in, double* out, Rounding) {
                     double const z = in[0] * (acc[0] - in[3] * in[4]) + in[1];
                     out[0] = gelu(z).value;
                     out[1] = z;
                   }),

      row<DAct>("dact", "nn", {preactivation, rstd, bias, gelu_kind},
                {{"dz", Shape::kTile}, {"product", Shape::kTile}, row_dot, {"dbias", Shape::kColPartial}},
                [](double const* acc, double const* in, double* out, Rounding) {
                  Curve const act = gelu(in[0]);
                  double const dz = acc[0] * act.slope;
                  out[0] = in[1] * dz;
                  out[1] = act.value;
                  out[2] = dz * (in[0] - in[2]);
                  out[3] = dz;
                }),

      row<DActLayer>("dact_layer", "nn",
                     {preactivation, rstd, {"constant", Shape::kPerColumnFp32}, gelu_kind, {"direction", Shape::kPerColumnFp32}},
                     {{"dz", Shape::kTile}, {"product", Shape::kTile}, row_dot, {"dconstant", Shape::kColPartial}, {"direction_dot", Shape::kRowPartial}},
                     [](double const* acc, double const* in, double* out, Rounding) {
                       Curve const act = gelu(in[0]);
                       double const dz = acc[0] * act.slope;
                       out[0] = in[1] * dz;
                       out[1] = act.value;
                       out[2] = dz * (in[0] - in[2]);
                       out[3] = dz;
                       out[4] = dz * in[4];
                     }),

      row<RstdLinear>("rstd", "tn", {rstd, bias}, {{"y", Shape::kTile}},
                      [](double const* acc, double const* in, double* out, Rounding) { out[0] = in[0] * acc[0] + in[1]; }),

      row<ResidualSqsum>("residual_sqsum", "tn", {{"residual", Shape::kTile}, bias, gamma},
                         {{"sum", Shape::kTile}, {"scaled", Shape::kTile}, {"squares", Shape::kRowPartial}},
                         [](double const* acc, double const* in, double* out, Rounding stored) {
                           double const sum = in[0] + acc[0] + in[1], x = stored(sum);
                           out[0] = sum;
                           out[1] = x * in[2];
                           out[2] = x * x;
                         }),

      row<NormBackward>("norm_backward", "nn",
                        {{"incoming", Shape::kTile}, {"x", Shape::kTile}, gamma, {"correction", Shape::kPerRow, 0.3, 0.1}},
                        {{"dx", Shape::kTile}, {"scaled", Shape::kTile}, {"dgamma", Shape::kColPartial}},
                        [](double const* acc, double const* in, double* out, Rounding) {
                          out[0] = in[0] + in[2] * acc[0] - in[3] * in[1];
                          out[1] = in[1] * in[2];
                          out[2] = acc[0] * in[1];
                        }),

      row<ResidualMoments>("residual_moments", "tn", {{"residual", Shape::kTile}, bias, gamma},
                           {{"sum", Shape::kTile}, {"scaled", Shape::kTile}, {"squares", Shape::kRowPartial}, {"values", Shape::kRowPartial}},
                           [](double const* acc, double const* in, double* out, Rounding stored) {
                             double const sum = in[0] + acc[0] + in[1], x = stored(sum);
                             out[0] = sum;
                             out[1] = x * in[2];
                             out[2] = x * x;
                             out[3] = x;
                           }),

      row<LayerNormBackward>("layer_norm_backward", "nn",
                             {{"incoming", Shape::kTile},
                              {"x", Shape::kTile},
                              gamma,
                              {"correction", Shape::kPerRow, 0.3, 0.1},
                              {"offset", Shape::kPerRow, 0.3, 0.1},
                              {"mean", Shape::kPerRow, 0.3, 0.1},
                              {"beta", Shape::kPerColumnFp32},
                              rstd},
                             {{"dx", Shape::kTile}, {"scaled", Shape::kTile}, {"dgamma", Shape::kColPartial}},
                             [](double const* acc, double const* in, double* out, Rounding) {
                               double const centred = in[1] - in[5];
                               out[0] = in[0] + in[2] * acc[0] - in[3] * centred + in[4];
                               out[1] = centred * in[2] + in[6] / in[7];
                               out[2] = acc[0] * centred;
                             }),

      row<RstdRope<Pairing::kHeadHalves>>("rstd_rope", "tn", {rstd, bias, cosine, sine}, {{"y", Shape::kTile}}, rope),
      row<RstdRope<Pairing::kAdjacent>>("rstd_rope_adjacent", "tn", {rstd, bias, cosine, sine}, {{"y", Shape::kTile}}, rope),
      row<RstdQkNormRope>("rstd_qknorm_rope", "tn",
                          {rstd, bias, {"gammas", Shape::kPerHeadColumn, 1, 0.1}, {"eps", Shape::kScalar, 0.01}, cosine, sine},
                          {{"y", Shape::kTile}, {"product", Shape::kTile}}, qknorm_rope, qknorm_term),

      row<LseSelect>("lse_select", "tn", {rstd}, {picked, softmax}, lse_select),
      row<LseSelectLogits>("lse_select_logits", "tn", {rstd}, {picked, softmax, logits}, lse_select),
      row<LseSelectExponentials>("lse_select_exponentials", "tn", {rstd}, {picked, softmax, exponentials}, lse_select),
      row<LseSelectGeneral>("lse_select_general", "tn", {rstd, bias, cap}, {picked, softmax}, lse_select_general),
      row<LseSelectGeneralLogits>("lse_select_general_logits", "tn", {rstd, bias, cap}, {picked, softmax, logits}, lse_select_general),
      row<LseSelectGeneralExponentials>("lse_select_general_exponentials", "tn", {rstd, bias, cap}, {picked, softmax, exponentials}, lse_select_general),
      row<DLogits>("dlogits", "tn", {rstd, lse, by_softmax, by_all, by_target, target}, {dz, row_dot}, dlogits),
      row<DLogitsGeneral>("dlogits_general", "tn", {rstd, lse, by_softmax, by_all, by_target, target, bias, cap}, {dz, row_dot, {"dbias", Shape::kColPartial}},
                          dlogits_general),
  };
  return table;
}

}  // namespace coda::bench
