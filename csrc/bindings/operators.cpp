// The torch operators: schemas, argument checks, and the composites. Python (coda/ops) adds the fake kernels and the autograd formulas.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "bindings/calls.h"
#include "bindings/checks.h"

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

std::tuple<Tensor, Tensor> rms_norm_stats_op(Tensor const& x, OptionalTensor const& norm_weight, double eps) {
  check_floating("x", x);
  check_dim("x", x, 2, "tokens, width");
  if (get(norm_weight)) {
    check_norm_weight("norm_weight", *get(norm_weight), "x", x);
    check_shape("norm_weight", *get(norm_weight), {x.size(1)}, "the width of x");
  }
  Call call(x);
  auto [h, rstd] = row_stats(x, norm_weight, eps);
  return {empty_like_missing(h, x), rstd};
}

Tensor gemm_op(Tensor const& a, Tensor const& b, OptionalTensor const& bias, OptionalTensor const& source, double alpha, double beta) {
  check_floating("a", a);
  check_dim("a", a, 2, "M, K");
  check_like("b", b, "a", a);
  check_dim("b", b, 2, "K, N");
  TORCH_CHECK_VALUE(a.size(1) == b.size(0), "b has shape ", shape_string(b), ", expected ", a.size(1), " rows as a has columns");
  if (get(bias)) {
    check_like("bias", *get(bias), "a", a);
    check_shape("bias", *get(bias), {b.size(1)}, "one value for each column of b");
  }
  if (get(source)) {
    check_like("source", *get(source), "a", a);
    check_shape("source", *get(source), {a.size(0), b.size(1)}, "the shape of the product");
  }
  Call call(a);
  return gemm({a, b, bias, source, alpha, beta});
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

void check_rstd(OptionalTensor const& rstd, Tensor const& x, char const* x_name) {
  if (!get(rstd)) return;
  TORCH_CHECK_VALUE(get(rstd)->device() == x.device(), "rstd is on ", get(rstd)->device(), ", expected ", x.device(), " as ", x_name);
  TORCH_CHECK_TYPE(get(rstd)->scalar_type() == statistics_type(x), "rstd has dtype ", get(rstd)->scalar_type(), ", expected ", statistics_type(x));
  check_shape("rstd", *get(rstd), {x.size(0)}, "one value a row");
}

std::tuple<Tensor, Tensor> rstd_swiglu_op(Tensor const& h, OptionalTensor const& rstd, Tensor const& w_gate_up, OptionalTensor const& w_up,
                                          bool store_preactivation) {
  check_floating("h", h);
  check_dim("h", h, 2, "tokens, width");
  check_rstd(rstd, h, "h");
  check_weights(h, w_gate_up, w_up, "h");
  Call call(h);
  auto const [gate, up] = halves(w_gate_up, w_up);
  SwigluResult r = rstd_swiglu(h, rstd, gate, up, store_preactivation);
  return {r.product, r.preactivation};
}

std::tuple<Tensor, Tensor, Tensor> dswiglu_op(Tensor const& dy, Tensor const& w_down, Tensor const& preactivation, OptionalTensor const& rstd) {
  check_floating("dy", dy);
  check_dim("dy", dy, 2, "tokens, width");
  check_like("w_down", w_down, "dy", dy);
  check_dim("w_down", w_down, 2, "D, F");
  TORCH_CHECK_VALUE(w_down.size(0) == dy.size(1), "w_down has shape ", shape_string(w_down), ", expected ", dy.size(1), " rows as dy has columns");
  check_like("preactivation", preactivation, "dy", dy);
  check_shape("preactivation", preactivation, {dy.size(0), 2 * w_down.size(1)}, "tokens, [gate | up]");
  check_rstd(rstd, dy, "dy");
  Call call(dy);
  DSwigluResult r = dswiglu(dy, w_down, preactivation, rstd);
  return {r.dz, r.product, r.row_dot};
}

std::tuple<Tensor, Tensor> norm_backward_op(Tensor const& dn, Tensor const& x, Tensor const& norm_weight, Tensor const& rstd, Tensor const& row_dot) {
  check_floating("dn", dn);
  check_dim("dn", dn, 2, "tokens, width");
  check_like("x", x, "dn", dn);
  check_shape("x", x, dn.sizes(), "the shape of dn");
  check_norm_weight("norm_weight", norm_weight, "x", x);
  check_shape("norm_weight", norm_weight, {x.size(1)}, "the width of x");
  check_rstd(rstd, x, "x");
  check_shape("row_dot", row_dot, {x.size(0)}, "one value a row");
  Call call(dn);
  return norm_backward(dn, x, norm_weight, rstd, row_dot, true, true);
}

// residual + swiglu(RMSNorm(x) w_gate_up^T) w_down^T. Returns the output, then what the backward needs: h (empty without a norm), rstd
// (likewise) and the pre-activation (all three empty unless `save`).
std::tuple<Tensor, Tensor, Tensor, Tensor> fused_mlp_op(Tensor const& x, Tensor const& w_gate_up, OptionalTensor const& w_up, Tensor const& w_down,
                                                        OptionalTensor const& norm_weight, OptionalTensor const& residual, double eps, bool save) {
  check_floating("x", x);
  check_dim("x", x, 2, "tokens, width");
  check_weights(x, w_gate_up, w_up, "x");
  std::int64_t const f = get(w_up) ? w_gate_up.size(0) : w_gate_up.size(0) / 2;
  check_like("w_down", w_down, "x", x);
  check_dim("w_down", w_down, 2, "D, F");
  TORCH_CHECK_VALUE(w_down.size(1) == f, "w_down has shape ", shape_string(w_down), ", expected ", f, " columns, half the rows of w_gate_up");
  if (get(norm_weight)) {
    check_norm_weight("norm_weight", *get(norm_weight), "x", x);
    check_shape("norm_weight", *get(norm_weight), {x.size(1)}, "the width of x");
  }
  if (get(residual)) {
    check_like("residual", *get(residual), "x", x);
    check_shape("residual", *get(residual), {x.size(0), w_down.size(0)}, "the shape of the output");
  }
  Call call(x);
  Tensor h, rstd;
  if (get(norm_weight)) std::tie(h, rstd) = row_stats(x, norm_weight, eps);
  auto const [gate, up] = halves(w_gate_up, w_up);
  SwigluResult const r = rstd_swiglu(h.defined() ? h : x, rstd.defined() ? OptionalTensor(rstd) : std::nullopt, gate, up, save);
  Tensor const out = gemm({r.product, w_down.t(), std::nullopt, residual, 1, 1});
  Tensor const nothing = at::empty({0}, x.options()), no_rstd = at::empty({0}, x.options().dtype(statistics_type(x)));
  bool const keep = save && h.defined();
  return {out, keep ? h : nothing, keep ? rstd : no_rstd, r.preactivation};
}

// Gradients of x, w_gate_up (both halves as [2F, D]), w_down and norm_weight; `wanted` in that order, empty where not wanted. h is x
// itself without a norm.
std::tuple<Tensor, Tensor, Tensor, Tensor> fused_mlp_backward_op(Tensor const& dout, Tensor const& x, Tensor const& h, OptionalTensor const& rstd,
                                                                 Tensor const& preactivation, Tensor const& w_gate_up, OptionalTensor const& w_up,
                                                                 Tensor const& w_down, OptionalTensor const& norm_weight,
                                                                 c10::List<bool> const& wanted) {
  check_like("dout", dout, "x", x);
  check_shape("dout", dout, {x.size(0), w_down.size(0)}, "the shape of the output");
  TORCH_CHECK_VALUE(wanted.size() == 4, "wanted has ", wanted.size(), " entries, expected 4");
  bool const want_x = wanted.get(0), want_gate_up = wanted.get(1), want_down = wanted.get(2), want_norm = wanted.get(3) && get(norm_weight);
  Call call(x);
  DSwigluResult const d = dswiglu(dout, w_down, preactivation, rstd);
  Tensor dx, dw_gate_up, dw_down, dnorm;
  if (want_down) dw_down = gemm({dout.t(), d.product, std::nullopt, std::nullopt, 1, 0});
  if (want_gate_up) dw_gate_up = gemm({d.dz.t(), h, std::nullopt, std::nullopt, 1, 0});
  if (want_x || want_norm) {
    dx = gemm({d.dz, joined(w_gate_up, w_up), std::nullopt, std::nullopt, 1, 0});
    if (get(norm_weight)) std::tie(dx, dnorm) = norm_backward(dx, x, *get(norm_weight), *get(rstd), d.row_dot, want_x, want_norm);
  }
  return {empty_like_missing(want_x ? dx : Tensor(), x), empty_like_missing(dw_gate_up, x), empty_like_missing(dw_down, x),
          empty_like_missing(dnorm, get(norm_weight) ? *get(norm_weight) : x)};
}

Tensor linear_op(Tensor const& x, Tensor const& weight, OptionalTensor const& bias, OptionalTensor const& residual) {
  check_floating("x", x);
  check_dim("x", x, 2, "tokens, width");
  check_like("weight", weight, "x", x);
  check_dim("weight", weight, 2, "out, in");
  TORCH_CHECK_VALUE(weight.size(1) == x.size(1), "weight has shape ", shape_string(weight), ", expected ", x.size(1), " columns as x has");
  if (get(bias)) {
    check_like("bias", *get(bias), "x", x);
    check_shape("bias", *get(bias), {weight.size(0)}, "one value for each row of weight");
  }
  if (get(residual)) {
    check_like("residual", *get(residual), "x", x);
    check_shape("residual", *get(residual), {x.size(0), weight.size(0)}, "the shape of the output");
  }
  Call call(x);
  return gemm({x, weight.t(), bias, residual, 1, 1});
}

template <class Library>
void implement(Library& m) {
  m.impl("rms_norm_stats", &rms_norm_stats_op);
  m.impl("gemm", &gemm_op);
  m.impl("linear", &linear_op);
  m.impl("rstd_swiglu", &rstd_swiglu_op);
  m.impl("dswiglu", &dswiglu_op);
  m.impl("norm_backward", &norm_backward_op);
  m.impl("fused_mlp", &fused_mlp_op);
  m.impl("fused_mlp_backward", &fused_mlp_backward_op);
}

}  // namespace

TORCH_LIBRARY(coda, m) {
  m.def("rms_norm_stats(Tensor x, Tensor? norm_weight, float eps) -> (Tensor, Tensor)");
  m.def("gemm(Tensor a, Tensor b, Tensor? bias=None, Tensor? source=None, float alpha=1, float beta=1) -> Tensor");
  m.def("linear(Tensor x, Tensor weight, Tensor? bias, Tensor? residual) -> Tensor");
  m.def("rstd_swiglu(Tensor h, Tensor? rstd, Tensor w_gate_up, Tensor? w_up, bool store_preactivation) -> (Tensor, Tensor)");
  m.def("dswiglu(Tensor dy, Tensor w_down, Tensor preactivation, Tensor? rstd) -> (Tensor, Tensor, Tensor)");
  m.def("norm_backward(Tensor dn, Tensor x, Tensor norm_weight, Tensor rstd, Tensor row_dot) -> (Tensor, Tensor)");
  m.def(
      "fused_mlp(Tensor x, Tensor w_gate_up, Tensor? w_up, Tensor w_down, Tensor? norm_weight, Tensor? residual, float eps, bool save) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "fused_mlp_backward(Tensor dout, Tensor x, Tensor h, Tensor? rstd, Tensor preactivation, Tensor w_gate_up, Tensor? w_up, Tensor w_down, "
      "Tensor? norm_weight, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(coda, CPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(coda, CUDA, m) { implement(m); }

}  // namespace coda::bindings
