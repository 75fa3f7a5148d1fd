// Plain torch operators, for dtypes and devices that have no kernel. Reductions and the activation run in the statistics type.
#include <ATen/ATen.h>

#include "bindings/calls.h"

namespace coda::bindings::eager {
namespace {

at::Tensor scaled(at::Tensor const& t, OptionalTensor const& rstd) { return get(rstd) ? t * get(rstd)->unsqueeze(1) : t; }

}  // namespace

at::Tensor gemm(GemmCall const& call) {
  at::Tensor out = at::mm(call.a, call.b);
  if (call.alpha != 1) out = out * call.alpha;
  if (get(call.bias)) out = out + *get(call.bias);
  if (get(call.source)) out = out + *get(call.source) * call.beta;
  return out;
}

SwigluResult rstd_swiglu(at::Tensor const& h, OptionalTensor const& rstd, at::Tensor const& w_gate, at::Tensor const& w_up, bool store) {
  auto const dtype = h.scalar_type(), wide = statistics_type(h);
  at::Tensor const gate = scaled(at::mm(h, w_gate.t()).to(wide), rstd), up = scaled(at::mm(h, w_up.t()).to(wide), rstd);
  return {(at::silu(gate) * up).to(dtype), store ? at::cat({gate, up}, 1).to(dtype) : at::empty({0}, h.options())};
}

DSwigluResult dswiglu(at::Tensor const& dy, at::Tensor const& w_down, at::Tensor const& preactivation, OptionalTensor const& rstd) {
  auto const dtype = dy.scalar_type(), wide = statistics_type(dy);
  std::int64_t const f = w_down.size(1);
  at::Tensor const acc = at::mm(dy, w_down).to(wide), gate = preactivation.narrow(1, 0, f).to(wide), up = preactivation.narrow(1, f, f).to(wide);
  at::Tensor const s = at::sigmoid(gate), silu = gate * s, dgate = acc * up * (s + silu * (1 - s)), dup = acc * silu;
  return {scaled(at::cat({dgate, dup}, 1), rstd).to(dtype), (silu * up).to(dtype), (dgate * gate + dup * up).sum(1)};
}

std::tuple<at::Tensor, at::Tensor> row_stats(at::Tensor const& x, OptionalTensor const& weight, double eps) {
  at::Tensor const wide = x.to(statistics_type(x)), rstd = at::rsqrt(wide.square().mean(1) + eps);
  return {get(weight) ? (wide * *get(weight)).to(x.scalar_type()) : at::Tensor(), rstd};
}

std::tuple<at::Tensor, at::Tensor> norm_backward(at::Tensor const& dn, at::Tensor const& x, at::Tensor const& weight, at::Tensor const& rstd,
                                                 at::Tensor const& row_dot, bool want_dx, bool want_dweight) {
  auto const type = statistics_type(x);
  at::Tensor const n = dn.to(type), wide = x.to(type), correction = rstd.square() * (row_dot / double(x.size(1)));
  return {want_dx ? (n * weight - wide * correction.unsqueeze(1)).to(x.scalar_type()) : at::Tensor(),
          want_dweight ? (n * wide).sum(0).to(weight.scalar_type()) : at::Tensor()};
}

}  // namespace coda::bindings::eager
