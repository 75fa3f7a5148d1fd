// What the operators are made of. Each function checks nothing: operators.cpp has checked. Each takes 2-D tensors of any strides and
// runs on the device of its first tensor, by the CPU back end, a kernel, or, where no kernel was built for the dtype or the device,
// by plain torch operators (eager.cpp). Formulas are with the programs (csrc/programs).
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <tuple>

#include "bindings/checks.h"
#include "coda/functions.hpp"
#include "coda/sinks.hpp"

namespace coda::bindings {

// Row statistics are fp32, and fp64 beside fp64 tensors.
inline at::ScalarType statistics_type(at::Tensor const& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

// alpha a b + beta source + bias, for a [M, K] and b [K, N].
struct GemmCall {
  at::Tensor a, b;
  OptionalTensor bias, source;
  double alpha = 1, beta = 1;
};

struct LinearResidualResult {
  at::Tensor out;   // [M, N]
  at::Tensor h;     // out * gamma; undefined without gamma, where it is out itself
  at::Tensor rstd;  // [M]
  at::Tensor mean;  // [M]; undefined for an RMSNorm
};

// The parameters of a LayerNorm, and its statistics of the rows at hand.
struct LayerNorm {
  OptionalTensor gamma, beta;
  at::Tensor rstd = {}, mean = {};
};

// What they come to behind a product with w, in the statistics type: u = w gamma, v = w beta + bias, and y = rstd (h w^T - mean u) + v.
struct LayerVectors {
  at::Tensor u, v;  // [N]
};

struct ActivationResult {
  at::Tensor value;          // act(preactivation), or the gated product
  at::Tensor preactivation;  // undefined if not stored; [gate | up] of a gated unit
};

// The gradient of an activation behind a norm: dz is the gradient of the unscaled product, rstd times that of the pre-activation.
struct ActivationGradient {
  at::Tensor dz;
  at::Tensor value;       // the activation, recomputed; undefined if not wanted
  at::Tensor correction;  // [M], rstd^2 S / D of programs/norm.hpp
  at::Tensor dbias;       // [N] in the dtype of the bias; undefined without one
  at::Tensor offset;      // [M], -rstd T / D; of a LayerNorm
};

struct NormGradient {
  at::Tensor dx;      // [M, D]
  at::Tensor h;       // x * gamma; undefined if not wanted
  at::Tensor dgamma;  // [D] in gamma's dtype; undefined if not wanted
};

// Rotary embedding of the columns of a [M, N] product.
struct RopeArguments {
  at::Tensor cos, sin;       // [positions, rotary_dim / 2]
  OptionalTensor positions;  // [M]; absent: row m has position m % period
  std::int64_t period = 1, head_dim = 0, columns = 0;
  bool interleaved = false;
  std::int64_t rotary_dim() const { return 2 * cos.size(1); }
};

// The norms of the heads of queries (columns before query_columns) and keys, before they turn.
struct QkNorm {
  at::Tensor q, k;  // weights, [head_dim]
  double eps = 0;
  std::int64_t query_columns = 0;
};

struct RopeResult {
  at::Tensor value;    // [M, N]
  at::Tensor product;  // its columns of queries and keys before norm and rotation; undefined if not stored
};

struct QkNormGradient {
  ActivationGradient product;
  at::Tensor dq_norm, dk_norm;  // of the weights, in their dtypes
};

// Of the rows of logits rstd (h w^T) + bias (programs/loss.hpp), in the statistics type.
enum class LogitStore { kNone, kLogits, kExponentials };
struct LseSelection {
  enum Row { kLse, kPickedZ, kPickedQ, kMeanQ, kTotalZ, kTotalQ, kRows };
  // [kRows, M]: lse; z and q of the target, NaN if it is no column; sum(p q); sum(z) and sum(q). What is not wanted is 0.
  at::Tensor statistics;
  at::Tensor stored;      // [M, round_up(V, 8)] in h's dtype, of which the last columns mean nothing: the logits, or exponentials, whatever type those are of
  at::Tensor references;  // [M, ceil(V / kSoftmaxGroup)] of exponentials. Undefined if not wanted, as `stored`
};
struct LseCall {
  at::Tensor h;
  OptionalTensor rstd;
  at::Tensor w;
  OptionalTensor bias;
  at::Tensor target;  // int64 [M]
  double cap;         // 0: none
  int planes;         // of RowSoftmax: 2, 3 with sum(p q), 5 also with the totals
  LogitStore store;
  std::int64_t rows;  // of logits that may be held at a time, beyond those that are stored
  at::Tensor workspace = {};  // fp32, flat, for what launches leave behind; undefined: memory of our own
};

// Logits that were kept, some columns of them, and the gradient that arrives at them.
struct KeptLogits {
  at::Tensor logits;      // [M, V], rows of any distance
  OptionalTensor incoming;
  at::Tensor target;      // int64 [M]; other columns' numbers do not count
  OptionalTensor rstd, bias;
  double cap;
  bool want_dbias, want_dot;
};

// From factors [3, M]: by_softmax, by_all and by_target of programs/loss.hpp.
struct LogitGradient {
  at::Tensor dz;       // [M, round_up(V, 8)] in the dtype of the operands, of which the last columns mean nothing
  at::Tensor row_dot;  // [M]
  at::Tensor dbias;    // [V], undefined if not wanted. Both in the statistics type
};

#define CODA_CALLS                                                                                                                         \
  at::Tensor gemm(GemmCall const& call);                                                                                                   \
  LinearResidualResult linear_residual(at::Tensor const& a, at::Tensor const& w, OptionalTensor const& bias, at::Tensor const& residual,   \
                                       OptionalTensor const& gamma, double eps);                                                           \
  /* act(rstd (h w^T) + bias) */                                                                                                           \
  ActivationResult rstd_act(at::Tensor const& h, OptionalTensor const& rstd, at::Tensor const& w, OptionalTensor const& bias,              \
                            ActivationKind kind, bool store_preactivation);                                                                \
  /* act(gate) up with [gate | up] = rstd (h [w_gate; w_up]^T) */                                                                          \
  ActivationResult rstd_glu(at::Tensor const& h, OptionalTensor const& rstd, at::Tensor const& w_gate, at::Tensor const& w_up,             \
                            ActivationKind kind, bool store_preactivation);                                                                \
  /* Gradients of the two. The gradient of the value is dy w_down, or dy itself without w_down; `width` is D of the norm. */               \
  ActivationGradient dglu(at::Tensor const& dy, OptionalTensor const& w_down, at::Tensor const& preactivation, OptionalTensor const& rstd, \
                          ActivationKind kind, std::int64_t width, bool want_value);                                                       \
  ActivationGradient dact(at::Tensor const& dy, OptionalTensor const& w_down, at::Tensor const& preactivation, OptionalTensor const& rstd, \
                          OptionalTensor const& bias, ActivationKind kind, std::int64_t width, bool want_value);                           \
  /* rotate(rstd (h w^T) + bias) */                                                                                                        \
  at::Tensor rstd_rope(at::Tensor const& h, OptionalTensor const& rstd, at::Tensor const& w, OptionalTensor const& bias,                   \
                       RopeArguments const& rope);                                                                                         \
  /* Gradient of it, from those of the heads of q, k and v ([B, T, heads, head_dim] of any strides) and its result y. Rotates back. */     \
  ActivationGradient rope_backward(at::Tensor const& dq, at::Tensor const& dk, at::Tensor const& dv, at::Tensor const& y,                  \
                                   OptionalTensor const& rstd, OptionalTensor const& bias, RopeArguments const& rope, std::int64_t width); \
  /* The two with QK-norm before the rotation. y: the result, of which the values are read. */                                            \
  RopeResult rstd_qknorm_rope(at::Tensor const& h, OptionalTensor const& rstd, at::Tensor const& w, OptionalTensor const& bias,            \
                              RopeArguments const& rope, QkNorm const& norm, bool store_product);                                          \
  QkNormGradient qknorm_rope_backward(at::Tensor const& dq, at::Tensor const& dk, at::Tensor const& dv, at::Tensor const& product,         \
                                      at::Tensor const& y, OptionalTensor const& rstd, OptionalTensor const& bias,                         \
                                      RopeArguments const& rope, QkNorm const& norm, std::int64_t width);                                  \
  /* Of dn = dz w: dx = incoming + gamma dn - correction x */                                                                              \
  NormGradient norm_backward(at::Tensor const& dz, at::Tensor const& w, at::Tensor const& x, OptionalTensor const& gamma,                  \
                             at::Tensor const& correction, OptionalTensor const& incoming, bool want_h, bool want_dgamma);                 \
  /* linear_residual for a LayerNorm */                                                                                                    \
  LinearResidualResult linear_residual_moments(at::Tensor const& a, at::Tensor const& w, OptionalTensor const& bias,                       \
                                               at::Tensor const& residual, OptionalTensor const& gamma, double eps);                       \
  LayerVectors layer_vectors(at::Tensor const& w, LayerNorm const& norm, OptionalTensor const& bias);                                      \
  /* act(rstd (h w^T - mean u) + v) */                                                                                                     \
  ActivationResult layer_act(at::Tensor const& h, LayerNorm const& norm, at::Tensor const& w, LayerVectors const& vectors,                 \
                             ActivationKind kind, bool store_preactivation);                                                               \
  /* Gradient of it; dbias is that of v */                                                                                                 \
  ActivationGradient dact_layer(at::Tensor const& dy, OptionalTensor const& w_down, at::Tensor const& preactivation,                       \
                                LayerNorm const& norm, LayerVectors const& vectors, ActivationKind kind, std::int64_t width,               \
                                bool want_value, bool want_dbias);                                                                         \
  /* Of dn = dz w: dx = incoming + gamma dn - correction (x - mean) + offset; h is (x - mean) gamma + beta / rstd */                       \
  NormGradient layer_norm_backward(at::Tensor const& dz, at::Tensor const& w, at::Tensor const& x, LayerNorm const& norm,                  \
                                   at::Tensor const& correction, at::Tensor const& offset, OptionalTensor const& incoming, bool want_h,    \
                                   bool want_dgamma);                                                                                      \
  /* h, rstd and mean: h = x gamma (undefined without gamma), or normalised (x - mean) rstd gamma + beta */                                \
  std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_stats(at::Tensor const& x, LayerNorm const& norm, double eps, bool normalised);     \
  void lse_select(LseCall const& call, LseSelection& into);                                                                                 \
  /* The gradient of logits from their exponentials, whose place it takes; returns dbias */                                                \
  at::Tensor exponential_gradient(at::Tensor const& stored, at::Tensor const& references, at::Tensor const& statistics,                    \
                                  at::Tensor const& factors, at::Tensor const& target, OptionalTensor const& rstd, std::int64_t classes,   \
                                  double cap, bool want_dbias);                                                                            \
  /* The same with the logits formed again */                                                                                              \
  LogitGradient dlogits(LseCall const& call, at::Tensor const& lse, at::Tensor const& factors, bool want_dbias);                           \
  /* The same from logits that were kept; row_dot is undefined if not wanted */                                                            \
  LogitGradient logit_gradient(KeptLogits const& kept, at::Tensor const& lse, at::Tensor const& factors);                                  \
  /* h (undefined without a weight) and rstd */                                                                                            \
  std::tuple<at::Tensor, at::Tensor> row_stats(at::Tensor const& x, OptionalTensor const& weight, double eps);

CODA_CALLS

// Columns of `stored` of an LseSelection.
inline std::int64_t stored_columns(std::int64_t classes) { return (classes + 7) / 8 * 8; }
inline std::int64_t softmax_groups(std::int64_t classes) { return (classes + kSoftmaxGroup - 1) / kSoftmaxGroup; }
// stored, references: where to put them, undefined: new tensors.
LseSelection lse_select(LseCall const& call, at::Tensor const& stored = {}, at::Tensor const& references = {});
// out += a b, or without `add` out = a b, with out in fp32, without rounding the product first.
void gemm_accumulate(at::Tensor out, at::Tensor const& a, at::Tensor const& b, bool add);

// out = t * factor, a tensor of one number, rounded once. out may be t, which a GPU then leaves alone if the factor is 1.
void scale(at::Tensor out, at::Tensor const& t, at::Tensor const& factor);

// Plain torch operators, for dtypes and devices without kernels.
namespace eager {
CODA_CALLS
// rstd^2 row_dot / width, see programs/norm.hpp
at::Tensor correction(at::Tensor const& row_dot, OptionalTensor const& rstd, std::int64_t width);
}  // namespace eager
#undef CODA_CALLS

// --- what differs by device ------------------------------------------------------------------------------------------------------------
namespace cpu {
std::tuple<at::Tensor, at::Tensor> row_stats(at::Tensor const& x, OptionalTensor const& weight, double eps);
}

namespace cuda {

// Why tensors like `t` have no kernels here; empty if they have.
std::string unsupported(at::Tensor const& t);
// The architecture whose kernels the current device runs, "sm90" or "sm80".
char const* arch();
// The kernels that are not GEMMs (csrc/reduce). Partials are [tiles, >= m] or [groups, >= n].
std::tuple<at::Tensor, at::Tensor> row_stats(at::Tensor const& x, OptionalTensor const& weight, double eps);
at::Tensor rstd_from_partials(at::Tensor const& partials, std::int64_t m, std::int64_t width, double eps);
at::Tensor correction_from_partials(at::Tensor const& partials, std::int64_t m, OptionalTensor const& rstd, std::int64_t width);
at::Tensor sum_groups(at::Tensor const& partials, std::int64_t n, at::ScalarType dtype);
void scale(at::Tensor const& out, at::Tensor const& t, at::Tensor const& factor);
// Of partials [planes, tiles, >= M] of a RowSoftmax, into statistics [LseSelection::kRows, M].
void softmax_statistics(at::Tensor const& partials, at::Tensor const& statistics);
at::Tensor exponential_gradient(at::Tensor const& stored, at::Tensor const& references, at::Tensor const& statistics, at::Tensor const& factors,
                                at::Tensor const& target, OptionalTensor const& rstd, std::int64_t classes, double cap, bool want_dbias);
LogitGradient logit_gradient(KeptLogits const& kept, at::Tensor const& lse, at::Tensor const& factors);
std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_stats(at::Tensor const& x, LayerNorm const& norm, double eps, bool normalised);
LayerVectors layer_vectors(at::Tensor const& w, LayerNorm const& norm, OptionalTensor const& bias);
// (rstd, mean) of the partial sums of x^2 and x, and (correction, offset) of those of dy (y - v) and dy u.
std::tuple<at::Tensor, at::Tensor> moments_from_partials(at::Tensor const& squares, at::Tensor const& values, std::int64_t m, std::int64_t width, double eps);
std::tuple<at::Tensor, at::Tensor> layer_correction_from_partials(at::Tensor const& dots, at::Tensor const& direction_dots, std::int64_t m,
                                                                  at::Tensor const& rstd, std::int64_t width);
ActivationGradient rope_backward(at::Tensor const& dq, at::Tensor const& dk, at::Tensor const& dv, at::Tensor const& y, OptionalTensor const& rstd,
                                 OptionalTensor const& bias, RopeArguments const& rope, std::int64_t width);
void rope_in_place(at::Tensor const& y, RopeArguments const& rope);
at::Tensor qknorm_rope(at::Tensor const& product, RopeArguments const& rope, QkNorm const& norm);
QkNormGradient qknorm_rope_backward(at::Tensor const& dq, at::Tensor const& dk, at::Tensor const& dv, at::Tensor const& product, at::Tensor const& y,
                                    OptionalTensor const& rstd, OptionalTensor const& bias, RopeArguments const& rope, QkNorm const& norm,
                                    std::int64_t width);
// Whether the backward of QK-norm has a kernel for heads of this size.
bool can_norm_heads(RopeArguments const& rope);
// Whether `program` has a kernel that rotates so in its epilogue.
bool has_rope_kernel(char const* program, RopeArguments const& rope, at::ScalarType dtype);

}  // namespace cuda

// --- what ran -----------------------------------------------------------------------------------------------------------------------
// The back end and the kernels of the last public call in this process, "sm90:key+key" (or sm80), "cpu" or "eager:<reason>".
void begin_call();                            // at the start of every operator
void note(char const* backend, std::string const& what);
void note_eager(std::string const& reason);  // raises under CODA_STRICT=1
std::string last_call();
// Launches so far in this process, of kernels and library GEMMs; on the CPU back end what would have been one.
std::int64_t launch_count();

// Forces the kernel of a program until undone with an empty key; for tests and tuning. Raises for an unknown key, naming near misses.
void force_kernel(std::string const& program, std::string const& key);
std::string forced_kernel(std::string const& program);
// CODA_FORCE_ARCH: the one architecture whose kernels may run, for tests; null or empty if any may.
char const* forced_arch();
// Overrides the scheduler's swizzle and raster, and the parts of K where a kernel can split it (0: the kernel's own, or what dispatch chooses).
void force_schedule(int swizzle, int raster, int splits);

}  // namespace coda::bindings
