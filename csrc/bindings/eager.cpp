// Plain torch operators, for dtypes and devices that have no kernel. Products are the library's; all else runs in the statistics type.
#include <ATen/ATen.h>

#include "bindings/calls.h"
#include "programs/loss.hpp"

namespace coda::bindings::eager {
namespace {

at::Tensor scaled(at::Tensor const& t, OptionalTensor const& rstd) { return get(rstd) ? t * get(rstd)->unsqueeze(1) : t; }
at::Tensor biased(at::Tensor const& t, OptionalTensor const& bias) { return get(bias) ? t + *get(bias) : t; }
at::Tensor product(at::Tensor const& a, at::Tensor const& b) { return at::mm(a, b).to(statistics_type(a)); }

struct Activated {
  at::Tensor value, slope;
};

Activated activated(at::Tensor const& x, ActivationKind kind) {
  switch (kind) {
    case ActivationKind::kIdentity: return {x, at::ones_like(x)};
    case ActivationKind::kRelu: return {at::relu(x), x.gt(0).to(x.scalar_type())};
    case ActivationKind::kReluSquared: return {at::relu(x).square(), 2 * at::relu(x)};
    case ActivationKind::kSilu: {
      at::Tensor const s = at::sigmoid(x);
      return {x * s, s + x * s * (1 - s)};
    }
    default: {
      char const* how = kind == ActivationKind::kGeluTanh ? "tanh" : "none";
      return {at::gelu(x, how), at::gelu_backward(at::ones_like(x), x, how)};
    }
  }
}

// The columns of y [M, N] turned by the angles of their rows (direction 1) or back (-1).
at::Tensor turned(at::Tensor const& y, RopeArguments const& rope, double direction) {
  std::int64_t const m = y.size(0), turn = rope.rotary_dim(), heads = rope.head_dim > 0 ? rope.columns / rope.head_dim : 0;
  if (turn == 0 || heads == 0) return y;
  at::Tensor const rows = get(rope.positions) ? get(rope.positions)->to(at::kLong) : at::arange(m, y.options().dtype(at::kLong)).remainder(rope.period);
  at::Tensor const cos = rope.cos.index_select(0, rows).to(y.scalar_type()).unsqueeze(1);
  at::Tensor const sin = rope.sin.index_select(0, rows).to(y.scalar_type()).unsqueeze(1) * direction;
  at::Tensor out = y.clone();
  at::Tensor const part = out.narrow(1, 0, heads * rope.head_dim).view({m, heads, rope.head_dim}).narrow(2, 0, turn);
  at::Tensor const a = rope.interleaved ? part.slice(2, 0, turn, 2) : part.narrow(2, 0, turn / 2);
  at::Tensor const b = rope.interleaved ? part.slice(2, 1, turn, 2) : part.narrow(2, turn / 2, turn / 2);
  at::Tensor const new_a = a * cos - b * sin, new_b = a * sin + b * cos;
  a.copy_(new_a);
  b.copy_(new_b);
  return out;
}

// [B, T, heads, head_dim] of q, k and v as [M, columns].
at::Tensor rows_of_heads(at::Tensor const& q, at::Tensor const& k, at::Tensor const& v, at::ScalarType dtype) {
  auto const rows = [&](at::Tensor const& t) { return t.to(dtype).reshape({t.size(0) * t.size(1), t.size(2) * t.size(3)}); };
  return at::cat({rows(q), rows(k), rows(v)}, 1);
}

// dz: of the product with its bias, not yet scaled. row_dot: the sum of dz times the product without its bias.
ActivationGradient gradient_of_product(at::Tensor const& dz, at::Tensor const& row_dot, at::Tensor const& y, OptionalTensor const& rstd,
                                       OptionalTensor const& bias, std::int64_t width) {
  return {scaled(dz, rstd).to(y.scalar_type()), {}, correction(row_dot, rstd, width),
          get(bias) ? dz.sum(at::IntArrayRef{0}).to(get(bias)->scalar_type()) : at::Tensor()};
}

}  // namespace

at::Tensor correction(at::Tensor const& row_dot, OptionalTensor const& rstd, std::int64_t width) {
  at::Tensor const mean = row_dot / double(width);
  return get(rstd) ? mean * get(rstd)->square() : mean;
}

at::Tensor gemm(GemmCall const& call) {
  at::Tensor out = at::mm(call.a, call.b);
  if (call.alpha != 1) out = out * call.alpha;
  if (get(call.bias)) out = out + *get(call.bias);
  if (get(call.source)) out = out + *get(call.source) * call.beta;
  return out;
}

LinearResidualResult linear_residual(at::Tensor const& a, at::Tensor const& w, OptionalTensor const& bias, at::Tensor const& residual,
                                     OptionalTensor const& gamma, double eps) {
  at::Tensor const out = (biased(product(a, w.t()), bias) + residual).to(a.scalar_type());
  auto [h, rstd] = row_stats(out, gamma, eps);
  return {out, h, rstd};
}

ActivationResult rstd_act(at::Tensor const& h, OptionalTensor const& rstd, at::Tensor const& w, OptionalTensor const& bias, ActivationKind kind,
                          bool store) {
  at::Tensor const z = biased(scaled(product(h, w.t()), rstd), bias);
  return {activated(z, kind).value.to(h.scalar_type()), store && kind != ActivationKind::kIdentity ? z.to(h.scalar_type()) : at::Tensor()};
}

ActivationResult rstd_glu(at::Tensor const& h, OptionalTensor const& rstd, at::Tensor const& w_gate, at::Tensor const& w_up, ActivationKind kind,
                          bool store) {
  at::Tensor const gate = scaled(product(h, w_gate.t()), rstd), up = scaled(product(h, w_up.t()), rstd);
  return {(activated(gate, kind).value * up).to(h.scalar_type()), store ? at::cat({gate, up}, 1).to(h.scalar_type()) : at::Tensor()};
}

ActivationGradient dglu(at::Tensor const& dy, OptionalTensor const& w_down, at::Tensor const& preactivation, OptionalTensor const& rstd,
                        ActivationKind kind, std::int64_t width, bool want_value) {
  auto const dtype = dy.scalar_type(), wide = statistics_type(dy);
  std::int64_t const f = preactivation.size(1) / 2;
  at::Tensor const acc = get(w_down) ? product(dy, *get(w_down)) : dy.to(wide);
  at::Tensor const gate = preactivation.narrow(1, 0, f).to(wide), up = preactivation.narrow(1, f, f).to(wide);
  auto const act = activated(gate, kind);
  at::Tensor const dgate = acc * up * act.slope, dup = acc * act.value;
  return {scaled(at::cat({dgate, dup}, 1), rstd).to(dtype), want_value ? (act.value * up).to(dtype) : at::Tensor(),
          correction((dgate * gate + dup * up).sum(at::IntArrayRef{1}), rstd, width), {}};
}

ActivationGradient dact(at::Tensor const& dy, OptionalTensor const& w_down, at::Tensor const& preactivation, OptionalTensor const& rstd,
                        OptionalTensor const& bias, ActivationKind kind, std::int64_t width, bool want_value) {
  auto const dtype = dy.scalar_type(), wide = statistics_type(dy);
  at::Tensor const acc = get(w_down) ? product(dy, *get(w_down)) : dy.to(wide), z = preactivation.to(wide);
  auto const act = activated(z, kind);
  at::Tensor const dz = acc * act.slope, unbiased = get(bias) ? z - *get(bias) : z;
  return {scaled(dz, rstd).to(dtype), want_value ? act.value.to(dtype) : at::Tensor(), correction((dz * unbiased).sum(at::IntArrayRef{1}), rstd, width),
          get(bias) ? dz.sum(at::IntArrayRef{0}).to(get(bias)->scalar_type()) : at::Tensor()};
}

// Without w: rotates h itself.
at::Tensor rstd_rope(at::Tensor const& h, OptionalTensor const& rstd, at::Tensor const& w, OptionalTensor const& bias, RopeArguments const& rope) {
  at::Tensor const y = biased(scaled(w.defined() ? product(h, w.t()) : h.to(statistics_type(h)), rstd), bias);
  return turned(y, rope, 1).to(h.scalar_type());
}

ActivationGradient rope_backward(at::Tensor const& dq, at::Tensor const& dk, at::Tensor const& dv, at::Tensor const& y, OptionalTensor const& rstd,
                                 OptionalTensor const& bias, RopeArguments const& rope, std::int64_t width) {
  auto const wide = statistics_type(y);
  at::Tensor const dy = rows_of_heads(dq, dk, dv, wide), dz = turned(dy, rope, -1);
  at::Tensor row_dot = (dy * y.to(wide)).sum(at::IntArrayRef{1});
  if (get(bias)) row_dot = row_dot - at::mv(dz, get(bias)->to(wide));
  return gradient_of_product(dz, row_dot, y, rstd, bias, width);
}

namespace {

// The heads of queries and keys of z [M, >= columns], in the statistics dtype: n = head_rstd z, head_rstd, and the norm weight of each head.
struct NormedHeads {
  at::Tensor n, rstd, gamma;  // [M, heads, head_dim], [M, heads, 1], [heads, head_dim]
};

NormedHeads normed_heads(at::Tensor const& z, RopeArguments const& rope, QkNorm const& norm) {
  std::int64_t const heads = rope.columns / rope.head_dim, queries = norm.query_columns / rope.head_dim;
  at::Tensor const wide = z.narrow(1, 0, rope.columns).to(statistics_type(z)).reshape({z.size(0), heads, rope.head_dim});
  at::Tensor const rstd = at::rsqrt(wide.square().mean(2, true) + norm.eps);
  auto const expanded = [&](at::Tensor const& gamma, std::int64_t count) { return gamma.to(wide.scalar_type()).expand({count, rope.head_dim}); };
  return {wide * rstd, rstd, at::cat({expanded(norm.q, queries), expanded(norm.k, heads - queries)}, 0)};
}

}  // namespace

// Without w: norms and rotates h itself.
RopeResult rstd_qknorm_rope(at::Tensor const& h, OptionalTensor const& rstd, at::Tensor const& w, OptionalTensor const& bias, RopeArguments const& rope,
                            QkNorm const& norm, bool store_product) {
  at::Tensor const z = w.defined() ? biased(scaled(product(h, w.t()), rstd), bias).to(h.scalar_type()) : h;
  NormedHeads const heads = normed_heads(z, rope, norm);
  at::Tensor const rest = z.narrow(1, rope.columns, z.size(1) - rope.columns).to(heads.n.scalar_type());
  at::Tensor const y = at::cat({(heads.n * heads.gamma).reshape({z.size(0), rope.columns}), rest}, 1);
  return {turned(y, rope, 1).to(z.scalar_type()), store_product ? z.narrow(1, 0, rope.columns).contiguous() : at::Tensor()};
}

QkNormGradient qknorm_rope_backward(at::Tensor const& dq, at::Tensor const& dk, at::Tensor const& dv, at::Tensor const& z, at::Tensor const& y,
                                    OptionalTensor const& rstd, OptionalTensor const& bias, RopeArguments const& rope, QkNorm const& norm,
                                    std::int64_t width) {
  auto const wide = statistics_type(y);
  std::int64_t const m = y.size(0), queries = norm.query_columns / rope.head_dim, rest = y.size(1) - rope.columns;
  NormedHeads const heads = normed_heads(z, rope, norm);
  at::Tensor const dw = turned(rows_of_heads(dq, dk, dv, wide), rope, -1);
  at::Tensor const dw_heads = dw.narrow(1, 0, rope.columns).reshape(heads.n.sizes()), dn = dw_heads * heads.gamma;
  at::Tensor const dheads = heads.rstd * (dn - heads.n * (dn * heads.n).mean(2, true));
  at::Tensor const dz = at::cat({dheads.reshape({m, rope.columns}), dw.narrow(1, rope.columns, rest)}, 1);
  at::Tensor const stored = at::cat({z.narrow(1, 0, rope.columns), y.narrow(1, rope.columns, rest)}, 1).to(wide);
  at::Tensor const dgamma = (dw_heads * heads.n).sum(at::IntArrayRef{0});
  auto const total = [&](std::int64_t begin, std::int64_t end, at::Tensor const& gamma) {
    return dgamma.narrow(0, begin, end - begin).sum(at::IntArrayRef{0}).to(gamma.scalar_type());
  };
  return {gradient_of_product(dz, (dz * (get(bias) ? stored - *get(bias) : stored)).sum(at::IntArrayRef{1}), y, rstd, bias, width),
          total(0, queries, norm.q), total(queries, rope.columns / rope.head_dim, norm.k)};
}

NormGradient norm_backward(at::Tensor const& dz, at::Tensor const& w, at::Tensor const& x, OptionalTensor const& gamma, at::Tensor const& correction,
                           OptionalTensor const& incoming, bool want_h, bool want_dgamma) {
  auto const dtype = x.scalar_type(), wide_type = statistics_type(x);
  at::Tensor const dn = product(dz, w), wide = x.to(wide_type);
  at::Tensor dx = (get(gamma) ? dn * *get(gamma) : dn) - wide * correction.unsqueeze(1);
  if (get(incoming)) dx = dx + *get(incoming);
  return {dx.to(dtype), !want_h ? at::Tensor() : get(gamma) ? (wide * *get(gamma)).to(dtype) : x,
          want_dgamma ? (dn * wide).sum(at::IntArrayRef{0}).to(get(gamma)->scalar_type()) : at::Tensor()};
}

LinearResidualResult linear_residual_moments(at::Tensor const& a, at::Tensor const& w, OptionalTensor const& bias, at::Tensor const& residual,
                                             OptionalTensor const& gamma, double eps) {
  at::Tensor const out = (biased(product(a, w.t()), bias) + residual).to(a.scalar_type());
  auto [h, rstd, mean] = layer_stats(out, {gamma, {}}, eps, false);
  return {out, h, rstd, mean};
}

LayerVectors layer_vectors(at::Tensor const& w, LayerNorm const& norm, OptionalTensor const& bias) {
  at::Tensor const wide = w.to(statistics_type(w));
  auto const dot = [&](at::Tensor const& t) { return at::mv(wide, t.to(wide.scalar_type())); };
  at::Tensor const v = get(norm.beta) ? dot(*norm.beta) : at::zeros({w.size(0)}, wide.options());
  return {get(norm.gamma) ? dot(*norm.gamma) : wide.sum(1), biased(v, bias)};
}

ActivationResult layer_act(at::Tensor const& h, LayerNorm const& norm, at::Tensor const& w, LayerVectors const& vectors, ActivationKind kind, bool store) {
  at::Tensor const z = scaled(product(h, w.t()) - norm.mean.unsqueeze(1) * vectors.u, norm.rstd) + vectors.v;
  return {activated(z, kind).value.to(h.scalar_type()), store && kind != ActivationKind::kIdentity ? z.to(h.scalar_type()) : at::Tensor()};
}

ActivationGradient dact_layer(at::Tensor const& dy, OptionalTensor const& w_down, at::Tensor const& preactivation, LayerNorm const& norm,
                              LayerVectors const& vectors, ActivationKind kind, std::int64_t width, bool want_value, bool want_dbias) {
  auto const dtype = dy.scalar_type(), wide = statistics_type(dy);
  at::Tensor const acc = get(w_down) ? product(dy, *get(w_down)) : dy.to(wide), z = preactivation.to(wide);
  auto const act = activated(z, kind);
  at::Tensor const dz = acc * act.slope;
  return {scaled(dz, norm.rstd).to(dtype), want_value ? act.value.to(dtype) : at::Tensor(),
          correction((dz * (z - vectors.v)).sum(at::IntArrayRef{1}), norm.rstd, width), want_dbias ? dz.sum(at::IntArrayRef{0}) : at::Tensor(),
          at::mv(dz, vectors.u) * norm.rstd / double(-width)};
}

NormGradient layer_norm_backward(at::Tensor const& dz, at::Tensor const& w, at::Tensor const& x, LayerNorm const& norm, at::Tensor const& correction,
                                 at::Tensor const& offset, OptionalTensor const& incoming, bool want_h, bool want_dgamma) {
  auto const dtype = x.scalar_type();
  at::Tensor const dn = product(dz, w), centred = x.to(statistics_type(x)) - norm.mean.unsqueeze(1);
  auto const weighted = [&](at::Tensor const& t) { return get(norm.gamma) ? t * *get(norm.gamma) : t; };
  at::Tensor dx = weighted(dn) - centred * correction.unsqueeze(1) + offset.unsqueeze(1), h = weighted(centred);
  if (get(incoming)) dx = dx + *get(incoming);
  if (get(norm.beta)) h = h + *get(norm.beta) / norm.rstd.unsqueeze(1);
  return {dx.to(dtype), want_h ? h.to(dtype) : at::Tensor(),
          want_dgamma ? (dn * centred).sum(at::IntArrayRef{0}).to(get(norm.gamma)->scalar_type()) : at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_stats(at::Tensor const& x, LayerNorm const& norm, double eps, bool normalised) {
  at::Tensor const wide = x.to(statistics_type(x)), mean = wide.mean(1), centred = wide - mean.unsqueeze(1);
  at::Tensor const rstd = at::rsqrt(centred.square().mean(1) + eps);
  at::Tensor h = normalised ? scaled(centred, rstd) : get(norm.gamma) ? wide : at::Tensor();
  if (get(norm.gamma)) h = h * *get(norm.gamma);
  if (normalised) h = biased(h, norm.beta);
  return {h.defined() ? h.to(x.scalar_type()) : h, rstd, mean};
}

namespace {

struct Logits {
  at::Tensor y, z, slope;  // rstd acc; y + bias, or that capped; dz / dlogit, undefined without a cap
};

// z and dz / dlogit.
std::tuple<at::Tensor, at::Tensor> capped(at::Tensor const& logits, double cap) {
  if (!(cap > 0)) return {logits, at::Tensor()};
  at::Tensor const t = at::tanh(logits / cap);
  return {t * cap, 1 - t.square()};
}

Logits logits_of(LseCall const& call) {
  at::Tensor const wide = call.h.to(statistics_type(call.h)), w = call.w.to(wide.scalar_type());
  at::Tensor const y = scaled(at::mm(wide, w.t()), call.rstd);
  auto const [z, slope] = capped(biased(y, call.bias), call.cap);
  return {y, z, slope};
}

at::Tensor column(at::Tensor const& t) { return t.unsqueeze(1); }
at::Tensor sloped(at::Tensor const& t, at::Tensor const& slope) { return slope.defined() ? t * slope : t; }

// What `stored` holds, in the type that exponentials are of.
at::Tensor as_exponentials(at::Tensor const& stored) { return stored.scalar_type() == at::kBFloat16 ? stored.view(at::kHalf) : stored; }

// Which targets are one of n columns, and the columns, [M, 1]: 0 for the others.
struct Chosen {
  at::Tensor inside, index;
  Chosen(at::Tensor const& target, std::int64_t n)
      : inside(target.ge(0).logical_and(target.lt(n))), index(column(at::where(inside, target, 0))) {}
};

// (by_softmax p - by_all - [target] by_target), before the slope.
at::Tensor gradient_of_z(at::Tensor const& p, at::Tensor const& factors, at::Tensor const& target) {
  at::Tensor g = p * column(factors[0]) - column(factors[1]);
  Chosen const chosen(target, p.size(1));
  return g.scatter_add_(1, chosen.index, column(at::where(chosen.inside, -factors[2], 0)));
}

}  // namespace

void lse_select(LseCall const& call, LseSelection& into) {
  Logits const l = logits_of(call);
  std::int64_t const n = l.z.size(1);
  at::Tensor const q = sloped(l.y, l.slope), lse = at::logsumexp(l.z, at::IntArrayRef{1});
  Chosen const chosen(call.target, n);
  auto const put = [&](int row, at::Tensor const& t) { into.statistics[row].copy_(t); };
  auto const picked = [&](at::Tensor const& t) { return at::where(chosen.inside, t.gather(1, chosen.index).squeeze(1), std::numeric_limits<double>::quiet_NaN()); };
  put(LseSelection::kLse, lse);
  put(LseSelection::kPickedZ, picked(l.z));
  put(LseSelection::kPickedQ, picked(q));
  if (call.planes > 2) put(LseSelection::kMeanQ, (at::exp(l.z - column(lse)) * q).sum(at::IntArrayRef{1}));
  if (call.planes > 3) put(LseSelection::kTotalZ, l.z.sum(at::IntArrayRef{1})), put(LseSelection::kTotalQ, q.sum(at::IntArrayRef{1}));
  if (call.store == LogitStore::kLogits) into.stored.narrow(1, 0, n).copy_(biased(l.y, call.bias));
  if (call.store != LogitStore::kExponentials) return;
  // All groups relative to the row's maximum.
  at::Tensor const top = l.z.amax(1, true) * kLog2E<double>;
  into.references.copy_(top.expand_as(into.references));
  at::Tensor const base = double(kExponentialShift) - at::where(at::isfinite(top), top, 0);
  as_exponentials(into.stored).narrow(1, 0, n).copy_(at::exp2(l.z * kLog2E<double> + base));
}

at::Tensor exponential_gradient(at::Tensor const& stored, at::Tensor const& references, at::Tensor const& statistics, at::Tensor const& factors,
                                at::Tensor const& target, OptionalTensor const& rstd, std::int64_t classes, double cap, bool want_dbias) {
  auto const wide = statistics.scalar_type();
  at::Tensor const e = as_exponentials(stored).narrow(1, 0, classes).to(wide);
  at::Tensor const lse = statistics[LseSelection::kLse];
  auto const of_columns = [&](at::Tensor const& t) { return t.repeat_interleave(kSoftmaxGroup, 1).narrow(1, 0, classes); };
  at::Tensor const exponent = references - double(kExponentialShift) - column(lse) * kLog2E<double>;
  at::Tensor g = gradient_of_z(e * of_columns(at::exp2(exponent)), factors, target);
  if (cap > 0) {
    // Where an exponential is 0, so is the gradient, but that of the target, whose z is known.
    Chosen const chosen(target, classes);
    at::Tensor z = (e.log2() + of_columns(references) - double(kExponentialShift)) * kLn2<double>;
    z = z.scatter(1, chosen.index, at::where(column(chosen.inside), column(statistics[LseSelection::kPickedZ]), z.gather(1, chosen.index)));
    g = g * (1 - (z / cap).square().clamp_max(1));
  }
  at::Tensor const dbias = want_dbias ? g.sum(at::IntArrayRef{0}) : at::Tensor();
  stored.narrow(1, 0, classes).copy_(scaled(g, rstd));
  return dbias;
}

LogitGradient dlogits(LseCall const& call, at::Tensor const& lse, at::Tensor const& factors, bool want_dbias) {
  Logits const l = logits_of(call);
  at::Tensor const g = sloped(gradient_of_z(at::exp(l.z - column(lse)), factors, call.target), l.slope);
  std::int64_t const n = g.size(1);
  LogitGradient result{at::empty({g.size(0), stored_columns(n)}, call.h.options()), (g * l.y).sum(at::IntArrayRef{1}), {}};
  result.dz.narrow(1, 0, n).copy_(scaled(g, call.rstd));
  if (want_dbias) result.dbias = g.sum(at::IntArrayRef{0});
  return result;
}

LogitGradient logit_gradient(KeptLogits const& kept, at::Tensor const& lse, at::Tensor const& factors) {
  at::Tensor const logits = kept.logits.to(lse.scalar_type());
  auto const [z, slope] = capped(logits, kept.cap);
  at::Tensor g = sloped(gradient_of_z(at::exp(z - column(lse)), factors, kept.target), slope);
  if (get(kept.incoming)) g = g + *get(kept.incoming);
  LogitGradient result{at::empty({g.size(0), stored_columns(g.size(1))}, kept.logits.options()), {}, {}};
  if (kept.want_dot) {
    // A column that the bias takes away has no gradient.
    at::Tensor const y = get(kept.bias) ? (logits - *get(kept.bias)).masked_fill_(get(kept.bias)->isinf(), 0) : logits;
    result.row_dot = (g * y).sum(at::IntArrayRef{1});
  }
  if (kept.want_dbias) result.dbias = g.sum(at::IntArrayRef{0});
  result.dz.narrow(1, 0, g.size(1)).copy_(scaled(g, kept.rstd));
  return result;
}

std::tuple<at::Tensor, at::Tensor> row_stats(at::Tensor const& x, OptionalTensor const& weight, double eps) {
  at::Tensor const wide = x.to(statistics_type(x)), rstd = at::rsqrt(wide.square().mean(1) + eps);
  return {get(weight) ? (wide * *get(weight)).to(x.scalar_type()) : at::Tensor(), rstd};
}

}  // namespace coda::bindings::eager
