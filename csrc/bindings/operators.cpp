// The torch operators: schemas, argument checks, and the composites. Python (coda/ops) adds the fake kernels and the autograd formulas.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <string>

#include "bindings/calls.h"
#include "bindings/checks.h"
#include "coda/dispatch.hpp"
#include "coda/sinks.hpp"

namespace coda::bindings {
namespace {

using at::Tensor;

// Every operator holds one of these while it computes: the right device, no autograd and no autocast inside (the operators that we call
// would otherwise cast the accumulators), and a clean record of what runs.
struct Call {
  c10::DeviceGuard guard;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  explicit Call(Tensor const& t) : guard(t.device()) { begin_call(); }
};

Tensor empty_like_missing(Tensor const& t, Tensor const& options) { return t.defined() ? t : at::empty({0}, options.options()); }

void check_matrix(char const* name, Tensor const& w, char const* x_name, Tensor const& x, std::int64_t columns) {
  check_like(name, w, x_name, x);
  check_dim(name, w, 2, "out, in");
  TORCH_CHECK_VALUE(w.size(1) == columns, name, " has shape ", shape_string(w), ", expected ", columns, " columns as ", x_name, " has");
}

void check_vector(char const* name, OptionalTensor const& t, char const* x_name, Tensor const& x, std::int64_t size, char const* meaning) {
  if (!get(t)) return;
  check_like(name, *get(t), x_name, x);
  check_shape(name, *get(t), {size}, meaning);
}

void check_norm(OptionalTensor const& norm_weight, char const* name, Tensor const& x, char const* x_name, std::int64_t width,
                char const* meaning = "the width of the norm") {
  if (!get(norm_weight)) return;
  check_norm_weight(name, *get(norm_weight), x_name, x);
  check_shape(name, *get(norm_weight), {width}, meaning);
}

std::tuple<Tensor, Tensor> rms_norm_stats_op(Tensor const& x, OptionalTensor const& norm_weight, double eps) {
  check_floating("x", x);
  check_dim("x", x, 2, "tokens, width");
  check_norm(norm_weight, "norm_weight", x, "x", x.size(1), "the width of x");
  Call call(x);
  auto [h, rstd] = row_stats(x, norm_weight, eps);
  return {empty_like_missing(h, x), rstd};
}

// The weight and the bias of a LayerNorm, beside its statistics if there are any yet.
LayerNorm layer_norm(OptionalTensor const& norm_weight, OptionalTensor const& norm_bias, Tensor const& x, char const* x_name, std::int64_t width,
                     OptionalTensor const& rstd = std::nullopt, OptionalTensor const& mean = std::nullopt) {
  check_norm(norm_weight, "norm_weight", x, x_name, width);
  check_norm(norm_bias, "norm_bias", x, x_name, width);
  return {norm_weight, norm_bias, get(rstd) ? *get(rstd) : Tensor(), get(mean) ? *get(mean) : Tensor()};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_stats_op(Tensor const& x, OptionalTensor const& norm_weight, OptionalTensor const& norm_bias, double eps,
                                                       bool normalised) {
  check_floating("x", x);
  check_dim("x", x, 2, "tokens, width");
  LayerNorm const norm = layer_norm(norm_weight, norm_bias, x, "x", x.size(1));
  Call call(x);
  auto [h, rstd, mean] = layer_stats(x, norm, eps, normalised);
  return {empty_like_missing(h, x), rstd, mean};
}

Tensor gemm_op(Tensor const& a, Tensor const& b, OptionalTensor const& bias, OptionalTensor const& source, double alpha, double beta) {
  check_floating("a", a);
  check_dim("a", a, 2, "M, K");
  check_like("b", b, "a", a);
  check_dim("b", b, 2, "K, N");
  TORCH_CHECK_VALUE(a.size(1) == b.size(0), "b has shape ", shape_string(b), ", expected ", a.size(1), " rows as a has columns");
  check_vector("bias", bias, "a", a, b.size(1), "one value for each column of b");
  if (get(source)) {
    check_like("source", *get(source), "a", a);
    check_shape("source", *get(source), {a.size(0), b.size(1)}, "the shape of the product");
  }
  Call call(a);
  return gemm({a, b, bias, source, alpha, beta});
}

// out += a b, in fp32; without `add` out = a b.
void gemm_accumulate_op(Tensor out, Tensor const& a, Tensor const& b, bool add) {
  check_floating("a", a);
  check_dim("a", a, 2, "M, K");
  check_like("b", b, "a", a);
  check_dim("b", b, 2, "K, N");
  TORCH_CHECK_VALUE(a.size(1) == b.size(0), "b has shape ", shape_string(b), ", expected ", a.size(1), " rows as a has columns");
  TORCH_CHECK_VALUE(out.device() == a.device(), "out is on ", out.device(), ", expected ", a.device(), " as a");
  TORCH_CHECK_TYPE(out.scalar_type() == at::kFloat, "out has dtype ", out.scalar_type(), ", expected float32");
  check_shape("out", out, {a.size(0), b.size(1)}, "the shape of the product");
  Call call(a);
  gemm_accumulate(out, a, b, add);
}

void check_weights(Tensor const& x, Tensor const& w_gate_up, OptionalTensor const& w_up, char const* x_name) {
  bool const pair = get(w_up);
  char const* name = pair ? "w_gate_up[0]" : "w_gate_up";
  check_like(name, w_gate_up, x_name, x);
  check_dim(name, w_gate_up, 2, pair ? "F, D" : "2F, D");
  TORCH_CHECK_VALUE(w_gate_up.size(1) == x.size(1), name, " has shape ", shape_string(w_gate_up), ", expected ", x.size(1), " columns as ", x_name,
                    " has");
  if (pair) {
    check_like("w_gate_up[1]", *get(w_up), x_name, x);
    check_shape("w_gate_up[1]", *get(w_up), w_gate_up.sizes(), "the shape of w_gate_up[0]");
  } else {
    TORCH_CHECK_VALUE(w_gate_up.size(0) % 2 == 0, "w_gate_up has shape ", shape_string(w_gate_up),
                      ", expected an even number of rows, [gate; up]");
  }
}

std::pair<Tensor, Tensor> halves(Tensor const& w_gate_up, OptionalTensor const& w_up) {
  if (get(w_up)) return {w_gate_up, *get(w_up)};
  std::int64_t const f = w_gate_up.size(0) / 2;
  return {w_gate_up.narrow(0, 0, f), w_gate_up.narrow(0, f, f)};
}

// [gate; up] as one matrix, without a copy where the pair already lies so.
Tensor joined(Tensor const& w_gate_up, OptionalTensor const& w_up) {
  if (!get(w_up)) return w_gate_up;
  Tensor const& up = *get(w_up);
  bool const adjacent = w_gate_up.strides() == up.strides() && w_gate_up.storage().is_alias_of(up.storage()) &&
                        up.storage_offset() == w_gate_up.storage_offset() + w_gate_up.size(0) * w_gate_up.stride(0);
  return adjacent ? w_gate_up.as_strided({2 * w_gate_up.size(0), w_gate_up.size(1)}, w_gate_up.strides()) : at::cat({w_gate_up, up}, 0);
}

void check_rstd(OptionalTensor const& rstd, Tensor const& x, char const* x_name, char const* name = "rstd") {
  if (!get(rstd)) return;
  TORCH_CHECK_VALUE(get(rstd)->device() == x.device(), name, " is on ", get(rstd)->device(), ", expected ", x.device(), " as ", x_name);
  TORCH_CHECK_TYPE(get(rstd)->scalar_type() == statistics_type(x), name, " has dtype ", get(rstd)->scalar_type(), ", expected ", statistics_type(x));
  check_shape(name, *get(rstd), {x.size(0)}, "one value a row");
}

ActivationKind activation_kind(std::string const& name) {
  static std::map<std::string, ActivationKind> const kinds = {
      {"identity", ActivationKind::kIdentity}, {"relu", ActivationKind::kRelu}, {"relu2", ActivationKind::kReluSquared},
      {"silu", ActivationKind::kSilu},         {"gelu", ActivationKind::kGelu}, {"gelu_tanh", ActivationKind::kGeluTanh}};
  auto const it = kinds.find(name);
  TORCH_CHECK_VALUE(it != kinds.end(), "activation is '", name, "', expected identity, relu, relu2, silu, gelu or gelu_tanh");
  return it->second;
}

ActivationKind gate_kind(std::string const& name) {
  ActivationKind const kind = activation_kind(name);
  TORCH_CHECK_VALUE(kind == ActivationKind::kSilu || kind == ActivationKind::kGelu || kind == ActivationKind::kGeluTanh, "activation is '", name,
                    "', expected silu, gelu or gelu_tanh for a gated unit");
  return kind;
}

OptionalTensor optional(Tensor const& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

void check_linear_residual(Tensor const& a, Tensor const& weight, OptionalTensor const& bias, Tensor const& residual,
                           OptionalTensor const& next_norm_weight) {
  check_floating("a", a);
  check_dim("a", a, 2, "tokens, width");
  check_matrix("weight", weight, "a", a, a.size(1));
  check_vector("bias", bias, "a", a, weight.size(0), "one value for each row of weight");
  check_like("residual", residual, "a", a);
  check_shape("residual", residual, {a.size(0), weight.size(0)}, "the shape of the output");
  check_norm(next_norm_weight, "next_norm_weight", a, "a", weight.size(0));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> linear_residual_moments_op(Tensor const& a, Tensor const& weight, OptionalTensor const& bias,
                                                                      Tensor const& residual, OptionalTensor const& next_norm_weight, double eps) {
  check_linear_residual(a, weight, bias, residual, next_norm_weight);
  Call call(a);
  LinearResidualResult r = linear_residual_moments(a, weight, bias, residual, next_norm_weight, eps);
  return {r.out, empty_like_missing(r.h, a), r.rstd, r.mean};
}

std::tuple<Tensor, Tensor, Tensor> linear_residual_op(Tensor const& a, Tensor const& weight, OptionalTensor const& bias, Tensor const& residual,
                                                      OptionalTensor const& next_norm_weight, double eps) {
  check_linear_residual(a, weight, bias, residual, next_norm_weight);
  Call call(a);
  LinearResidualResult r = linear_residual(a, weight, bias, residual, next_norm_weight, eps);
  return {r.out, empty_like_missing(r.h, a), r.rstd};
}

std::tuple<Tensor, Tensor> rstd_act_op(Tensor const& h, OptionalTensor const& rstd, Tensor const& weight, OptionalTensor const& bias,
                                       std::string const& activation, bool store_preactivation) {
  check_floating("h", h);
  check_dim("h", h, 2, "tokens, width");
  check_rstd(rstd, h, "h");
  check_matrix("weight", weight, "h", h, h.size(1));
  check_vector("bias", bias, "h", h, weight.size(0), "one value for each row of weight");
  ActivationKind const kind = activation_kind(activation);
  Call call(h);
  ActivationResult r = rstd_act(h, rstd, weight, bias, kind, store_preactivation);
  return {r.value, empty_like_missing(r.preactivation, h)};
}

// act(LayerNorm(x) weight^T + bias) of h = x norm_weight and x's statistics; also u and v (calls.h), for the backward.
std::tuple<Tensor, Tensor, Tensor, Tensor> layer_act_op(Tensor const& h, Tensor const& rstd, Tensor const& mean, Tensor const& weight,
                                                        OptionalTensor const& bias, OptionalTensor const& norm_weight, OptionalTensor const& norm_bias,
                                                        std::string const& activation, bool store_preactivation) {
  check_floating("h", h);
  check_dim("h", h, 2, "tokens, width");
  check_rstd(rstd, h, "h");
  check_rstd(mean, h, "h", "mean");
  check_matrix("weight", weight, "h", h, h.size(1));
  check_vector("bias", bias, "h", h, weight.size(0), "one value for each row of weight");
  LayerNorm const norm = layer_norm(norm_weight, norm_bias, h, "h", h.size(1), rstd, mean);
  ActivationKind const kind = activation_kind(activation);
  Call call(h);
  LayerVectors const vectors = layer_vectors(weight, norm, bias);
  ActivationResult r = layer_act(h, norm, weight, vectors, kind, store_preactivation);
  return {r.value, empty_like_missing(r.preactivation, h), vectors.u, vectors.v};
}

std::tuple<Tensor, Tensor> rstd_glu_op(Tensor const& h, OptionalTensor const& rstd, Tensor const& w_gate_up, OptionalTensor const& w_up,
                                       std::string const& activation, bool store_preactivation) {
  check_floating("h", h);
  check_dim("h", h, 2, "tokens, width");
  check_rstd(rstd, h, "h");
  check_weights(h, w_gate_up, w_up, "h");
  ActivationKind const kind = gate_kind(activation);
  Call call(h);
  auto const [gate, up] = halves(w_gate_up, w_up);
  ActivationResult r = rstd_glu(h, rstd, gate, up, kind, store_preactivation);
  return {r.value, empty_like_missing(r.preactivation, h)};
}

void check_down(Tensor const& dy, OptionalTensor const& w_down, std::int64_t width) {
  if (!get(w_down)) {
    TORCH_CHECK_VALUE(dy.size(1) == width, "dy has shape ", shape_string(dy), ", expected ", width, " columns");
    return;
  }
  check_like("w_down", *get(w_down), "dy", dy);
  check_shape("w_down", *get(w_down), {dy.size(1), width}, "the width of dy, the width of the activation");
}

std::tuple<Tensor, Tensor, Tensor> dglu_op(Tensor const& dy, OptionalTensor const& w_down, Tensor const& preactivation, OptionalTensor const& rstd,
                                           std::string const& activation, std::int64_t width, bool want_value) {
  check_floating("dy", dy);
  check_dim("dy", dy, 2, "tokens, width");
  check_like("preactivation", preactivation, "dy", dy);
  check_dim("preactivation", preactivation, 2, "tokens, [gate | up]");
  TORCH_CHECK_VALUE(preactivation.size(0) == dy.size(0) && preactivation.size(1) % 2 == 0, "preactivation has shape ", shape_string(preactivation),
                    ", expected as many rows as dy and an even number of columns, [gate | up]");
  check_down(dy, w_down, preactivation.size(1) / 2);
  check_rstd(rstd, dy, "dy");
  ActivationKind const kind = gate_kind(activation);
  Call call(dy);
  ActivationGradient r = dglu(dy, w_down, preactivation, rstd, kind, width, want_value);
  return {r.dz, empty_like_missing(r.value, dy), r.correction};
}

void check_act_gradient(Tensor const& dy, OptionalTensor const& w_down, Tensor const& preactivation) {
  check_floating("dy", dy);
  check_dim("dy", dy, 2, "tokens, width");
  check_like("preactivation", preactivation, "dy", dy);
  check_dim("preactivation", preactivation, 2, "tokens, width");
  TORCH_CHECK_VALUE(preactivation.size(0) == dy.size(0), "preactivation has shape ", shape_string(preactivation), ", expected as many rows as dy");
  check_down(dy, w_down, preactivation.size(1));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> dact_op(Tensor const& dy, OptionalTensor const& w_down, Tensor const& preactivation,
                                                   OptionalTensor const& rstd, OptionalTensor const& bias, std::string const& activation,
                                                   std::int64_t width, bool want_value) {
  check_act_gradient(dy, w_down, preactivation);
  check_rstd(rstd, dy, "dy");
  check_vector("bias", bias, "dy", dy, preactivation.size(1), "one value a column");
  ActivationKind const kind = activation_kind(activation);
  Call call(dy);
  ActivationGradient r = dact(dy, w_down, preactivation, rstd, bias, kind, width, want_value);
  return {r.dz, empty_like_missing(r.value, dy), r.correction, empty_like_missing(r.dbias, get(bias) ? *get(bias) : dy)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> dact_layer_op(Tensor const& dy, OptionalTensor const& w_down, Tensor const& preactivation,
                                                                 Tensor const& rstd, Tensor const& u, Tensor const& v, std::string const& activation,
                                                                 std::int64_t width, bool want_value, bool want_dbias) {
  check_act_gradient(dy, w_down, preactivation);
  check_rstd(rstd, dy, "dy");
  for (auto const& [name, t] : {std::pair<char const*, Tensor const&>{"u", u}, {"v", v}}) {
    TORCH_CHECK_VALUE(t.device() == dy.device(), name, " is on ", t.device(), ", expected ", dy.device(), " as dy");
    TORCH_CHECK_TYPE(t.scalar_type() == statistics_type(dy), name, " has dtype ", t.scalar_type(), ", expected ", statistics_type(dy));
    check_shape(name, t, {preactivation.size(1)}, "one value a column");
  }
  ActivationKind const kind = activation_kind(activation);
  Call call(dy);
  ActivationGradient r = dact_layer(dy, w_down, preactivation, {{}, {}, rstd}, {u, v}, kind, width, want_value, want_dbias);
  return {r.dz, empty_like_missing(r.value, dy), r.correction, r.offset, empty_like_missing(r.dbias, rstd)};
}

// Every field of a rotation, checked. `columns` is the number of leading columns of the product that belong to rotated heads.
RopeArguments rope_arguments(Tensor const& x, std::int64_t n, Tensor const& cos, Tensor const& sin, OptionalTensor const& positions, std::int64_t period,
                             std::int64_t head_dim, std::int64_t columns, bool interleaved) {
  check_norm_weight("cos", cos, "x", x);
  check_dim("cos", cos, 2, "positions, rotary_dim / 2");
  check_norm_weight("sin", sin, "x", x);
  check_shape("sin", sin, cos.sizes(), "the shape of cos");
  TORCH_CHECK_TYPE(cos.scalar_type() == sin.scalar_type(), "sin has dtype ", sin.scalar_type(), ", expected ", cos.scalar_type(), " as cos");
  TORCH_CHECK_VALUE(head_dim > 0 && n % head_dim == 0, "head_dim is ", head_dim, ", expected a divisor of the ", n, " columns of the product");
  TORCH_CHECK_VALUE(2 * cos.size(1) <= head_dim, "cos has shape ", shape_string(cos), ", expected at most head_dim / 2 = ", head_dim / 2, " columns");
  TORCH_CHECK_VALUE(columns >= 0 && columns <= n && columns % head_dim == 0, "columns is ", columns, ", expected whole heads of the ", n, " columns");
  if (get(positions)) {
    Tensor const& p = *get(positions);
    TORCH_CHECK_VALUE(p.device() == x.device(), "positions is on ", p.device(), ", expected ", x.device(), " as x");
    TORCH_CHECK_TYPE(p.scalar_type() == at::kLong || p.scalar_type() == at::kInt, "positions has dtype ", p.scalar_type(), ", expected int64 or int32");
    check_shape("positions", p, {x.size(0)}, "one value a row");
  } else {
    TORCH_CHECK_VALUE(period > 0 && (x.size(0) == 0 || std::min(period, x.size(0)) <= cos.size(0)), "cos has ", cos.size(0),
                      " rows, expected one for each of the ", period, " positions of a sequence");
  }
  return {cos, sin, positions, period, head_dim, columns, interleaved};
}

Tensor rstd_rope_op(Tensor const& h, OptionalTensor const& rstd, Tensor const& weight, OptionalTensor const& bias, Tensor const& cos, Tensor const& sin,
                    OptionalTensor const& positions, std::int64_t period, std::int64_t head_dim, std::int64_t columns, bool interleaved) {
  check_floating("h", h);
  check_dim("h", h, 2, "tokens, width");
  check_rstd(rstd, h, "h");
  check_matrix("weight", weight, "h", h, h.size(1));
  check_vector("bias", bias, "h", h, weight.size(0), "one value for each row of weight");
  RopeArguments const rope = rope_arguments(h, weight.size(0), cos, sin, positions, period, head_dim, columns, interleaved);
  Call call(h);
  return rstd_rope(h, rstd, weight, bias, rope);
}

// y, and the gradients of its heads.
void check_heads(Tensor const& dq, Tensor const& dk, Tensor const& dv, Tensor const& y, std::int64_t head_dim) {
  check_floating("y", y);
  check_dim("y", y, 2, "tokens, heads of q, k and v");
  std::int64_t total = 0;
  for (auto const& [name, t] : {std::pair<char const*, Tensor const&>{"dq", dq}, {"dk", dk}, {"dv", dv}}) {
    check_like(name, t, "y", y);
    check_dim(name, t, 4, "batch, sequence, heads, head_dim");
    TORCH_CHECK_VALUE(t.size(0) * t.size(1) == y.size(0) && t.size(1) == dq.size(1) && t.size(3) == head_dim, name, " has shape ", shape_string(t),
                      ", expected [batch, sequence, heads, ", head_dim, "] with the ", y.size(0), " rows of y");
    total += t.size(2) * head_dim;
  }
  TORCH_CHECK_VALUE(total == y.size(1), "dq, dk and dv have ", total, " columns together, expected the ", y.size(1), " of y");
}

std::tuple<Tensor, Tensor, Tensor> rope_backward_op(Tensor const& dq, Tensor const& dk, Tensor const& dv, Tensor const& y, OptionalTensor const& rstd,
                                                    OptionalTensor const& bias, Tensor const& cos, Tensor const& sin, OptionalTensor const& positions,
                                                    std::int64_t period, std::int64_t head_dim, std::int64_t columns, bool interleaved,
                                                    std::int64_t width) {
  check_heads(dq, dk, dv, y, head_dim);
  check_rstd(rstd, y, "y");
  check_vector("bias", bias, "y", y, y.size(1), "one value a column");
  RopeArguments const rope = rope_arguments(y, y.size(1), cos, sin, positions, period, head_dim, columns, interleaved);
  Call call(y);
  ActivationGradient r = rope_backward(dq, dk, dv, y, rstd, bias, rope, width);
  return {r.dz, r.correction, empty_like_missing(r.dbias, get(bias) ? *get(bias) : y)};
}

QkNorm qk_norm(Tensor const& x, Tensor const& q_norm, Tensor const& k_norm, double eps, std::int64_t query_columns, std::int64_t head_dim,
               std::int64_t columns) {
  check_norm(q_norm, "q_norm_weight", x, "x", head_dim, "the width of a head");
  check_norm(k_norm, "k_norm_weight", x, "x", head_dim, "the width of a head");
  TORCH_CHECK_TYPE(q_norm.scalar_type() == k_norm.scalar_type(), "k_norm_weight has dtype ", k_norm.scalar_type(), ", expected ", q_norm.scalar_type(),
                   " as q_norm_weight");
  TORCH_CHECK_VALUE(query_columns >= 0 && query_columns <= columns && query_columns % head_dim == 0, "query_columns is ", query_columns,
                    ", expected whole heads of the ", columns, " columns");
  return {q_norm, k_norm, eps, query_columns};
}

std::tuple<Tensor, Tensor> rstd_qknorm_rope_op(Tensor const& h, OptionalTensor const& rstd, Tensor const& weight, OptionalTensor const& bias,
                                               Tensor const& q_norm_weight, Tensor const& k_norm_weight, double norm_eps, std::int64_t query_columns,
                                               Tensor const& cos, Tensor const& sin, OptionalTensor const& positions, std::int64_t period,
                                               std::int64_t head_dim, std::int64_t columns, bool interleaved, bool store_product) {
  check_floating("h", h);
  check_dim("h", h, 2, "tokens, width");
  check_rstd(rstd, h, "h");
  check_matrix("weight", weight, "h", h, h.size(1));
  check_vector("bias", bias, "h", h, weight.size(0), "one value for each row of weight");
  RopeArguments const rope = rope_arguments(h, weight.size(0), cos, sin, positions, period, head_dim, columns, interleaved);
  QkNorm const norm = qk_norm(h, q_norm_weight, k_norm_weight, norm_eps, query_columns, head_dim, columns);
  Call call(h);
  RopeResult r = rstd_qknorm_rope(h, rstd, weight, bias, rope, norm, store_product);
  return {r.value, empty_like_missing(r.product, h)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> qknorm_rope_backward_op(
    Tensor const& dq, Tensor const& dk, Tensor const& dv, Tensor const& product, Tensor const& y, OptionalTensor const& rstd, OptionalTensor const& bias,
    Tensor const& q_norm_weight, Tensor const& k_norm_weight, double norm_eps, std::int64_t query_columns, Tensor const& cos, Tensor const& sin,
    OptionalTensor const& positions, std::int64_t period, std::int64_t head_dim, std::int64_t columns, bool interleaved, std::int64_t width) {
  check_heads(dq, dk, dv, y, head_dim);
  check_like("product", product, "y", y);
  check_shape("product", product, {y.size(0), columns}, "the columns of queries and keys");
  check_rstd(rstd, y, "y");
  check_vector("bias", bias, "y", y, y.size(1), "one value a column");
  RopeArguments const rope = rope_arguments(y, y.size(1), cos, sin, positions, period, head_dim, columns, interleaved);
  QkNorm const norm = qk_norm(y, q_norm_weight, k_norm_weight, norm_eps, query_columns, head_dim, columns);
  Call call(y);
  QkNormGradient r = qknorm_rope_backward(dq, dk, dv, product, y, rstd, bias, rope, norm, width);
  return {r.product.dz, r.product.correction, empty_like_missing(r.product.dbias, get(bias) ? *get(bias) : y), r.dq_norm, r.dk_norm};
}

void check_norm_backward(Tensor const& dz, Tensor const& weight, OptionalTensor const& w_up, Tensor const& x, OptionalTensor const& norm_weight,
                         Tensor const& correction, OptionalTensor const& incoming) {
  check_floating("dz", dz);
  check_dim("dz", dz, 2, "tokens, width");
  check_like("x", x, "dz", dz);
  check_dim("x", x, 2, "tokens, width");
  TORCH_CHECK_VALUE(x.size(0) == dz.size(0), "x has shape ", shape_string(x), ", expected as many rows as dz");
  check_matrix("weight", weight, "x", x, x.size(1));
  if (get(w_up)) check_shape("w_up", *get(w_up), weight.sizes(), "the shape of weight");
  TORCH_CHECK_VALUE(weight.size(0) * (get(w_up) ? 2 : 1) == dz.size(1), "weight has shape ", shape_string(weight), ", expected the ", dz.size(1),
                    " columns of dz as rows");
  check_norm(norm_weight, "norm_weight", x, "x", x.size(1));
  check_rstd(OptionalTensor(correction), x, "x", "correction");
  if (get(incoming)) {
    check_like("incoming", *get(incoming), "x", x);
    check_shape("incoming", *get(incoming), x.sizes(), "the shape of x");
  }
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward_op(Tensor const& dz, Tensor const& weight, Tensor const& x, OptionalTensor const& norm_weight,
                                                          OptionalTensor const& norm_bias, Tensor const& rstd, Tensor const& mean,
                                                          Tensor const& correction, Tensor const& offset, OptionalTensor const& incoming, bool want_h,
                                                          bool want_dnorm) {
  check_norm_backward(dz, weight, std::nullopt, x, norm_weight, correction, incoming);
  check_rstd(rstd, x, "x");
  check_rstd(mean, x, "x", "mean");
  check_rstd(offset, x, "x", "offset");
  LayerNorm const norm = layer_norm(norm_weight, norm_bias, x, "x", x.size(1), rstd, mean);
  TORCH_CHECK_VALUE(get(norm_weight) || !want_dnorm, "norm_weight is missing, and without it there is no gradient of it");
  Call call(dz);
  NormGradient r = layer_norm_backward(dz, weight, x, norm, correction, offset, incoming, want_h, want_dnorm);
  return {r.dx, empty_like_missing(r.h, x), empty_like_missing(r.dgamma, get(norm_weight) ? *get(norm_weight) : x)};
}

std::tuple<Tensor, Tensor, Tensor> norm_backward_op(Tensor const& dz, Tensor const& weight, OptionalTensor const& w_up, Tensor const& x,
                                                    OptionalTensor const& norm_weight, Tensor const& correction, OptionalTensor const& incoming,
                                                    bool want_h, bool want_dnorm) {
  check_norm_backward(dz, weight, w_up, x, norm_weight, correction, incoming);
  TORCH_CHECK_VALUE(get(norm_weight) || (!want_h && !want_dnorm), "norm_weight is missing, and without it there is no h and no gradient of it");
  Call call(dz);
  NormGradient r = norm_backward(dz, joined(weight, w_up), x, norm_weight, correction, incoming, want_h, want_dnorm);
  return {r.dx, empty_like_missing(r.h, x), empty_like_missing(r.dgamma, get(norm_weight) ? *get(norm_weight) : x)};
}

// residual + (act(gate) up) w_down^T with [gate | up] = RMSNorm(x) w_gate_up^T. stats_h and stats_rstd are x's own statistics if the caller has
// them; without norm_weight and stats_rstd there is no norm. residual_is_x adds x. Returns the output; rstd and the pre-activation for the
// backward, unless not `save`; h and rstd of the output for the next norm, if next_norm_weight or next_stats ask for them.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> fused_mlp_op(Tensor const& x, OptionalTensor const& stats_h, OptionalTensor const& stats_rstd,
                                                                Tensor const& w_gate_up, OptionalTensor const& w_up, Tensor const& w_down,
                                                                OptionalTensor const& norm_weight, OptionalTensor const& residual, bool residual_is_x,
                                                                OptionalTensor const& next_norm_weight, std::string const& activation, double eps,
                                                                double next_eps, bool next_stats, bool save) {
  check_floating("x", x);
  check_dim("x", x, 2, "tokens, width");
  check_weights(x, w_gate_up, w_up, "x");
  std::int64_t const f = get(w_up) ? w_gate_up.size(0) : w_gate_up.size(0) / 2;
  check_like("w_down", w_down, "x", x);
  check_dim("w_down", w_down, 2, "D, F");
  TORCH_CHECK_VALUE(w_down.size(1) == f, "w_down has shape ", shape_string(w_down), ", expected ", f, " columns, half the rows of w_gate_up");
  check_norm(norm_weight, "norm_weight", x, "x", x.size(1), "the width of x");
  if (get(stats_h)) {
    check_like("stats_h", *get(stats_h), "x", x);
    check_shape("stats_h", *get(stats_h), x.sizes(), "the shape of x");
  }
  check_rstd(stats_rstd, x, "x");
  if (get(residual)) {
    check_like("residual", *get(residual), "x", x);
    check_shape("residual", *get(residual), {x.size(0), w_down.size(0)}, "the shape of the output");
  }
  TORCH_CHECK_VALUE(!residual_is_x || w_down.size(0) == x.size(1), "residual has shape ", shape_string(x), ", expected [", x.size(0), ", ", w_down.size(0),
                    "] (the shape of the output)");
  TORCH_CHECK_VALUE(!next_stats || residual_is_x || get(residual), "residual is missing, and statistics of the output come with one only");
  check_norm(next_norm_weight, "next_norm_weight", x, "x", w_down.size(0));
  ActivationKind const kind = gate_kind(activation);
  Call call(x);
  Tensor h = get(stats_h) ? *get(stats_h) : Tensor(), rstd = get(stats_rstd) ? *get(stats_rstd) : Tensor();
  if (!rstd.defined() && get(norm_weight)) std::tie(h, rstd) = row_stats(x, norm_weight, eps);
  auto const [gate, up] = halves(w_gate_up, w_up);
  ActivationResult const r = rstd_glu(h.defined() ? h : x, optional(rstd), gate, up, kind, save);
  OptionalTensor const added = residual_is_x ? OptionalTensor(x) : residual;
  LinearResidualResult next;
  if (next_stats) {
    next = linear_residual(r.value, w_down, std::nullopt, *get(added), next_norm_weight, next_eps);
  } else {
    next.out = gemm({r.value, w_down.t(), std::nullopt, added, 1, 1});
  }
  // No output may be an input or another output.
  auto const statistics = [&](Tensor const& t) { return t.defined() ? t : at::empty({0}, x.options().dtype(statistics_type(x))); };
  return {next.out, statistics(save && !get(stats_rstd) ? rstd : Tensor()), empty_like_missing(r.preactivation, x), empty_like_missing(next.h, x),
          statistics(next.rstd)};
}

Tensor linear_op(Tensor const& x, Tensor const& weight, OptionalTensor const& bias, OptionalTensor const& residual) {
  check_floating("x", x);
  check_dim("x", x, 2, "tokens, width");
  check_matrix("weight", weight, "x", x, x.size(1));
  check_vector("bias", bias, "x", x, weight.size(0), "one value for each row of weight");
  if (get(residual)) {
    check_like("residual", *get(residual), "x", x);
    check_shape("residual", *get(residual), {x.size(0), weight.size(0)}, "the shape of the output");
  }
  Call call(x);
  return gemm({x, weight.t(), bias, residual, 1, 1});
}

void check_statistics(char const* name, Tensor const& t, Tensor const& x, at::IntArrayRef shape, char const* meaning) {
  TORCH_CHECK_VALUE(t.device() == x.device(), name, " is on ", t.device(), ", expected ", x.device(), " as the operands");
  TORCH_CHECK_TYPE(t.scalar_type() == statistics_type(x), name, " has dtype ", t.scalar_type(), ", expected ", statistics_type(x));
  check_shape(name, t, shape, meaning);
}

void check_target(Tensor const& target, Tensor const& x) {
  TORCH_CHECK_VALUE(target.device() == x.device(), "target is on ", target.device(), ", expected ", x.device(), " as the operands");
  TORCH_CHECK_TYPE(target.scalar_type() == at::kLong, "target has dtype ", target.scalar_type(), ", expected int64");
  check_shape("target", target, {x.size(0)}, "one column a row");
}

void check_head(Tensor const& h, OptionalTensor const& rstd, Tensor const& weight, OptionalTensor const& bias, Tensor const& target) {
  check_floating("h", h);
  check_dim("h", h, 2, "tokens, width");
  check_matrix("weight", weight, "h", h, h.size(1));
  TORCH_CHECK_VALUE(weight.size(0) > 0, "weight has shape ", shape_string(weight), ", expected at least one row");
  check_rstd(rstd, h, "h");
  check_vector("bias", bias, "h", h, weight.size(0), "one value for each row of weight");
  check_target(target, h);
}

std::tuple<Tensor, Tensor> lse_select_op(Tensor const& h, OptionalTensor const& rstd, Tensor const& weight, OptionalTensor const& bias, Tensor const& target,
                                         double softcap, bool want_totals, bool want_logits, std::int64_t rows) {
  check_head(h, rstd, weight, bias, target);
  TORCH_CHECK_VALUE(rows > 0, "rows is ", rows, ", expected a positive number");
  Call call(h);
  LogitStore const store = want_logits ? LogitStore::kLogits : LogitStore::kNone;
  LseSelection r = lse_select({h, rstd, weight, bias, target, softcap, want_totals ? 5 : 2, store, rows});
  return {r.statistics, empty_like_missing(r.stored, h)};
}

void check_exponentials(Tensor const& stored, Tensor const& references, std::int64_t classes) {
  check_floating("stored", stored);
  check_dim("stored", stored, 2, "tokens, classes");
  TORCH_CHECK_VALUE(classes > 0 && stored.size(1) == stored_columns(classes) && stored.is_contiguous(), "stored has shape ", shape_string(stored),
                    ", expected that of exponentials of ", classes, " classes, contiguous");
  TORCH_CHECK_VALUE(reinterpret_cast<std::uintptr_t>(stored.const_data_ptr()) % kBaseAlignment == 0, "stored is at an address that is no multiple of ",
                    kBaseAlignment);
  check_statistics("references", references, stored, {stored.size(0), softmax_groups(classes)}, "one for each group of columns");
  TORCH_CHECK_VALUE(references.is_contiguous(), "references has strides ", references.strides(), ", expected it contiguous");
}

Tensor exponentials_into_op(Tensor stored, Tensor references, std::optional<Tensor> workspace, Tensor const& h, OptionalTensor const& rstd, Tensor const& weight, OptionalTensor const& bias,
                            Tensor const& target, double softcap, bool want_dots, bool want_totals, std::int64_t rows) {
  check_head(h, rstd, weight, bias, target);
  check_exponentials(stored, references, weight.size(0));
  check_like("stored", stored, "h", h);
  TORCH_CHECK_VALUE(stored.size(0) == h.size(0), "stored has shape ", shape_string(stored), ", expected ", h.size(0), " rows as h has");
  TORCH_CHECK_VALUE(rows > 0, "rows is ", rows, ", expected a positive number");
  if (workspace) {
    check_statistics("workspace", *workspace, h, {workspace->numel()}, "one dimension");
    TORCH_CHECK_VALUE(workspace->is_contiguous(), "workspace has strides ", workspace->strides(), ", expected it contiguous");
  }
  Call call(h);
  int const planes = want_totals ? 5 : want_dots ? 3 : 2;
  LseCall const select{h, rstd, weight, bias, target, softcap, planes, LogitStore::kExponentials, rows, workspace.value_or(Tensor())};
  return lse_select(select, stored, references).statistics;
}

Tensor exponential_gradient_op(Tensor stored, Tensor const& references, Tensor const& statistics, Tensor const& factors, Tensor const& target,
                               OptionalTensor const& rstd, std::int64_t classes, double softcap, bool want_dbias) {
  check_exponentials(stored, references, classes);
  std::int64_t const m = stored.size(0);
  check_statistics("statistics", statistics, stored, {LseSelection::kRows, m}, "those that came with stored");
  check_statistics("factors", factors, stored, {3, m}, "by_softmax, by_all and by_target of each row");
  check_target(target, stored);
  check_rstd(rstd, stored, "stored");
  Call call(stored);
  return empty_like_missing(exponential_gradient(stored, references, statistics, factors, target, rstd, classes, softcap, want_dbias), statistics);
}

std::tuple<Tensor, Tensor, Tensor> logit_gradient_op(Tensor const& logits, OptionalTensor const& incoming, Tensor const& target, Tensor const& lse,
                                                     Tensor const& factors, OptionalTensor const& rstd, OptionalTensor const& bias, double softcap,
                                                     bool want_dbias, bool want_dot) {
  check_floating("logits", logits);
  check_dim("logits", logits, 2, "tokens, classes");
  if (get(incoming)) {
    check_like("incoming", *get(incoming), "logits", logits);
    check_shape("incoming", *get(incoming), logits.sizes(), "the shape of logits");
  }
  check_target(target, logits);
  check_statistics("lse", lse, logits, {logits.size(0)}, "one value a row");
  check_statistics("factors", factors, logits, {3, logits.size(0)}, "by_softmax, by_all and by_target of each row");
  check_rstd(rstd, logits, "logits");
  check_vector("bias", bias, "logits", logits, logits.size(1), "one value a column");
  Call call(logits);
  LogitGradient r = logit_gradient({logits, incoming, target, rstd, bias, softcap, want_dbias, want_dot}, lse, factors);
  return {r.dz, empty_like_missing(r.row_dot, lse), empty_like_missing(r.dbias, lse)};
}

void check_factor(Tensor const& t, Tensor const& factor) {
  auto const type = statistics_type(t);
  check_floating("t", t);
  TORCH_CHECK_VALUE(factor.device() == t.device() && factor.scalar_type() == type && factor.numel() == 1, "factor has dtype ", factor.scalar_type(),
                    ", shape ", shape_string(factor), " and device ", factor.device(), ", expected one number in ", type, " on ", t.device());
}

void scale_op(Tensor t, Tensor const& factor) {
  check_factor(t, factor);
  Call call(t);
  scale(t, t, factor);
}

Tensor scaled_op(Tensor const& t, Tensor const& factor, at::ScalarType dtype) {
  check_factor(t, factor);
  Call call(t);
  Tensor const out = at::empty(t.sizes(), t.options().dtype(dtype));
  scale(out, t, factor);
  return out;
}

std::tuple<Tensor, Tensor, Tensor> dlogits_op(Tensor const& h, OptionalTensor const& rstd, Tensor const& weight, OptionalTensor const& bias,
                                              Tensor const& target, Tensor const& lse, Tensor const& factors, double softcap, bool want_dbias) {
  check_head(h, rstd, weight, bias, target);
  check_statistics("lse", lse, h, {h.size(0)}, "one value a row");
  check_statistics("factors", factors, h, {3, h.size(0)}, "by_softmax, by_all and by_target of each row");
  Call call(h);
  LogitGradient r = dlogits({h, rstd, weight, bias, target, softcap, 0, LogitStore::kNone, 0}, lse, factors, want_dbias);
  return {r.dz, r.row_dot, empty_like_missing(r.dbias, r.row_dot)};
}

template <class Library>
void implement(Library& m) {
  m.impl("rms_norm_stats", &rms_norm_stats_op);
  m.impl("gemm", &gemm_op);
  m.impl("gemm_accumulate_", &gemm_accumulate_op);
  m.impl("linear", &linear_op);
  m.impl("linear_residual", &linear_residual_op);
  m.impl("rstd_act", &rstd_act_op);
  m.impl("rstd_glu", &rstd_glu_op);
  m.impl("rstd_rope", &rstd_rope_op);
  m.impl("dglu", &dglu_op);
  m.impl("dact", &dact_op);
  m.impl("rope_backward", &rope_backward_op);
  m.impl("rstd_qknorm_rope", &rstd_qknorm_rope_op);
  m.impl("qknorm_rope_backward", &qknorm_rope_backward_op);
  m.impl("norm_backward", &norm_backward_op);
  m.impl("layer_norm_stats", &layer_norm_stats_op);
  m.impl("linear_residual_moments", &linear_residual_moments_op);
  m.impl("layer_act", &layer_act_op);
  m.impl("dact_layer", &dact_layer_op);
  m.impl("layer_norm_backward", &layer_norm_backward_op);
  m.impl("fused_mlp", &fused_mlp_op);
  m.impl("lse_select", &lse_select_op);
  m.impl("exponentials_into_", &exponentials_into_op);
  m.impl("exponential_gradient_", &exponential_gradient_op);
  m.impl("dlogits", &dlogits_op);
  m.impl("logit_gradient", &logit_gradient_op);
  m.impl("scale_", &scale_op);
  m.impl("scaled", &scaled_op);
}

}  // namespace

TORCH_LIBRARY(coda, m) {
  m.def("rms_norm_stats(Tensor x, Tensor? norm_weight, float eps) -> (Tensor, Tensor)");
  m.def("gemm(Tensor a, Tensor b, Tensor? bias=None, Tensor? source=None, float alpha=1, float beta=1) -> Tensor");
  m.def("gemm_accumulate_(Tensor(a!) out, Tensor a, Tensor b, bool add=True) -> ()");
  m.def("linear(Tensor x, Tensor weight, Tensor? bias, Tensor? residual) -> Tensor");
  m.def("linear_residual(Tensor a, Tensor weight, Tensor? bias, Tensor residual, Tensor? next_norm_weight, float eps) -> (Tensor, Tensor, Tensor)");
  m.def("rstd_act(Tensor h, Tensor? rstd, Tensor weight, Tensor? bias, str activation, bool store_preactivation) -> (Tensor, Tensor)");
  m.def("rstd_glu(Tensor h, Tensor? rstd, Tensor w_gate_up, Tensor? w_up, str activation, bool store_preactivation) -> (Tensor, Tensor)");
  m.def(
      "rstd_rope(Tensor h, Tensor? rstd, Tensor weight, Tensor? bias, Tensor cos, Tensor sin, Tensor? positions, SymInt period, int head_dim, "
      "int columns, bool interleaved) -> Tensor");
  m.def(
      "dglu(Tensor dy, Tensor? w_down, Tensor preactivation, Tensor? rstd, str activation, int width, bool want_value) -> (Tensor, Tensor, Tensor)");
  m.def(
      "dact(Tensor dy, Tensor? w_down, Tensor preactivation, Tensor? rstd, Tensor? bias, str activation, int width, bool want_value) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "rope_backward(Tensor dq, Tensor dk, Tensor dv, Tensor y, Tensor? rstd, Tensor? bias, Tensor cos, Tensor sin, Tensor? positions, SymInt period, "
      "int head_dim, int columns, bool interleaved, int width) -> (Tensor, Tensor, Tensor)");
  m.def(
      "rstd_qknorm_rope(Tensor h, Tensor? rstd, Tensor weight, Tensor? bias, Tensor q_norm_weight, Tensor k_norm_weight, float norm_eps, "
      "int query_columns, Tensor cos, Tensor sin, Tensor? positions, SymInt period, int head_dim, int columns, bool interleaved, bool store_product) -> "
      "(Tensor, Tensor)");
  m.def(
      "qknorm_rope_backward(Tensor dq, Tensor dk, Tensor dv, Tensor product, Tensor y, Tensor? rstd, Tensor? bias, Tensor q_norm_weight, "
      "Tensor k_norm_weight, float norm_eps, int query_columns, Tensor cos, Tensor sin, Tensor? positions, SymInt period, int head_dim, int columns, "
      "bool interleaved, int width) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "norm_backward(Tensor dz, Tensor weight, Tensor? w_up, Tensor x, Tensor? norm_weight, Tensor correction, Tensor? incoming, bool want_h, "
      "bool want_dnorm) -> (Tensor, Tensor, Tensor)");
  m.def("layer_norm_stats(Tensor x, Tensor? norm_weight, Tensor? norm_bias, float eps, bool normalised) -> (Tensor, Tensor, Tensor)");
  m.def(
      "linear_residual_moments(Tensor a, Tensor weight, Tensor? bias, Tensor residual, Tensor? next_norm_weight, float eps) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "layer_act(Tensor h, Tensor rstd, Tensor mean, Tensor weight, Tensor? bias, Tensor? norm_weight, Tensor? norm_bias, str activation, "
      "bool store_preactivation) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "dact_layer(Tensor dy, Tensor? w_down, Tensor preactivation, Tensor rstd, Tensor u, Tensor v, str activation, int width, bool want_value, "
      "bool want_dbias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "layer_norm_backward(Tensor dz, Tensor weight, Tensor x, Tensor? norm_weight, Tensor? norm_bias, Tensor rstd, Tensor mean, Tensor correction, "
      "Tensor offset, Tensor? incoming, bool want_h, bool want_dnorm) -> (Tensor, Tensor, Tensor)");
  m.def(
      "fused_mlp(Tensor x, Tensor? stats_h, Tensor? stats_rstd, Tensor w_gate_up, Tensor? w_up, Tensor w_down, Tensor? norm_weight, Tensor? residual, "
      "bool residual_is_x, Tensor? next_norm_weight, str activation, float eps, float next_eps, bool next_stats, bool save) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "lse_select(Tensor h, Tensor? rstd, Tensor weight, Tensor? bias, Tensor target, float softcap, bool want_totals, bool want_logits, SymInt rows) -> "
      "(Tensor, Tensor)");
  m.def(
      "exponentials_into_(Tensor(a!) stored, Tensor(b!) references, Tensor(c!)? workspace, Tensor h, Tensor? rstd, Tensor weight, Tensor? bias, Tensor target, float softcap, "
      "bool want_dots, bool want_totals, SymInt rows) -> Tensor");
  m.def(
      "exponential_gradient_(Tensor(a!) stored, Tensor references, Tensor statistics, Tensor factors, Tensor target, Tensor? rstd, SymInt classes, "
      "float softcap, bool want_dbias) -> Tensor");
  m.def(
      "dlogits(Tensor h, Tensor? rstd, Tensor weight, Tensor? bias, Tensor target, Tensor lse, Tensor factors, float softcap, bool want_dbias) -> "
      "(Tensor, Tensor, Tensor)");
  m.def(
      "logit_gradient(Tensor logits, Tensor? incoming, Tensor target, Tensor lse, Tensor factors, Tensor? rstd, Tensor? bias, float softcap, "
      "bool want_dbias, bool want_dot) -> (Tensor, Tensor, Tensor)");
  m.def("scale_(Tensor(a!) t, Tensor factor) -> ()");
  m.def("scaled(Tensor t, Tensor factor, ScalarType dtype) -> Tensor");
}

TORCH_LIBRARY_IMPL(coda, CPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(coda, CUDA, m) { implement(m); }

}  // namespace coda::bindings
