#include "bindings/calls.h"

#include "bindings/launch.h"
#include "programs/activation.hpp"
#include "programs/glu.hpp"
#include "programs/loss.hpp"
#include "programs/norm.hpp"
#include "programs/plain.hpp"
#include "programs/rope.hpp"

namespace coda::bindings {
namespace {

// True, and noted, if `t` has to take the plain torch operators.
bool use_eager(at::Tensor const& t) {
  if (t.is_cpu()) return false;
  std::string const why = cuda::unsupported(t);
  if (!why.empty()) note_eager(why);
  return !why.empty();
}

at::Tensor empty_rows(at::Tensor const& like, std::int64_t columns) { return at::empty({like.size(0), columns}, like.options()); }
at::Tensor wanted_partials(at::Tensor const& like) { return at::empty({0}, like.options().dtype(statistics_type(like))); }

at::Tensor rstd_from_partials(at::Tensor const& partials, std::int64_t m, std::int64_t width, double eps) {
  if (!partials.is_cpu()) return cuda::rstd_from_partials(partials, m, width, eps);
  note("cpu", "");
  return at::rsqrt(partials.sum(at::IntArrayRef{0}).narrow(0, 0, m) / double(width) + eps);
}

at::Tensor correction_from_partials(at::Tensor const& partials, std::int64_t m, OptionalTensor const& rstd, std::int64_t width) {
  if (!partials.is_cpu()) return cuda::correction_from_partials(partials, m, rstd, width);
  note("cpu", "");
  return eager::correction(partials.sum(at::IntArrayRef{0}).narrow(0, 0, m), rstd, width);
}

at::Tensor sum_groups(at::Tensor const& partials, std::int64_t n, at::ScalarType dtype) {
  if (!partials.is_cpu()) return cuda::sum_groups(partials, n, dtype);
  note("cpu", "");
  return partials.to(at::kDouble).sum(at::IntArrayRef{0}).narrow(0, 0, n).to(dtype);
}

void set_rotation(Launch& launch, RopeArguments const& rope) {
  launch.rotation.head_dim = rope.head_dim;
  launch.rotation.rotary_dim = rope.rotary_dim();
  launch.rotation.columns = rope.columns;
  launch.rotation.period = rope.period;
  if (get(rope.positions)) launch.positions = *get(rope.positions);
}

std::tuple<at::Tensor, at::Tensor> moments_from_partials(at::Tensor const& squares, at::Tensor const& values, std::int64_t m, std::int64_t width,
                                                         double eps) {
  if (!values.is_cpu()) return cuda::moments_from_partials(squares, values, m, width, eps);
  note("cpu", "");
  auto const mean_of = [&](at::Tensor const& t) { return t.sum(at::IntArrayRef{0}).narrow(0, 0, m) / double(width); };
  at::Tensor const mean = mean_of(values);
  return {at::rsqrt((mean_of(squares) - mean.square()).clamp_min(0) + eps), mean};
}

std::tuple<at::Tensor, at::Tensor> layer_correction_from_partials(at::Tensor const& dots, at::Tensor const& direction_dots, std::int64_t m,
                                                                  at::Tensor const& rstd, std::int64_t width) {
  if (!dots.is_cpu()) return cuda::layer_correction_from_partials(dots, direction_dots, m, rstd, width);
  note("cpu", "");
  auto const mean_of = [&](at::Tensor const& t) { return t.sum(at::IntArrayRef{0}).narrow(0, 0, m) / double(width); };
  return {mean_of(dots) * rstd.square(), -mean_of(direction_dots) * rstd};
}

void softmax_statistics(at::Tensor const& partials, at::Tensor const& statistics) {
  if (!partials.is_cpu()) return cuda::softmax_statistics(partials, statistics);
  note("cpu", "");
  // One tile, the whole row.
  at::Tensor const p = partials.select(1, 0).narrow(1, 0, statistics.size(1)), top = p[0], sum = p[1];
  at::Tensor const base = at::where(at::isfinite(top), top, 0) - double(kExponentialShift);
  statistics[LseSelection::kLse].copy_((base + sum.log2()) * kLn2<double>);
  if (p.size(0) > 2) statistics[LseSelection::kMeanQ].copy_(p[2] / sum);
  if (p.size(0) > 3) statistics.narrow(0, LseSelection::kTotalZ, 2).copy_(p.narrow(0, 3, 2));
}

double number(ActivationKind kind) { return double(int(kind)); }

}  // namespace

at::Tensor gemm(GemmCall const& call) {
  if (use_eager(call.a)) return eager::gemm(call);
  bool const has_source = get(call.source), has_bias = get(call.bias);
  // Nothing in the epilogue: the library, which measured about as fast in every layout (bench/results/plain.json) and takes any operand.
  // A residual it would copy into the output first, a pass that our epilogue does not need.
  if (!call.a.is_cpu() && forced_kernel("plain").empty() && !has_bias && !has_source && call.alpha == 1) {
    note(cuda::arch(), "library");
    return at::mm(call.a, call.b);
  }
  at::Tensor const out = empty_rows(call.a, call.b.size(1));
  if (has_source) {
    Launch launch{"plain_residual", call.a, call.b.t(), {}, {call.alpha, call.bias, call.beta, call.source}, {out}};
    run<PlainResidual>(launch);
  } else {
    Launch launch{"plain", call.a, call.b.t(), {}, {call.alpha, call.bias}, {out}};
    run<Plain>(launch);
  }
  return out;
}

// The library: for a product with K = 2048 and a sum of 128256 x 4096 it takes 1.19 of torch.mm, a program that read and wrote the sum in its epilogue
// took 1.25 (bench/results/head.json).
void gemm_accumulate(at::Tensor out, at::Tensor const& a, at::Tensor const& b, bool add) {
  if (!use_eager(a)) note(a.is_cpu() ? "cpu" : cuda::arch(), a.is_cpu() ? "" : "library");
  bool const empty = a.numel() == 0 || b.numel() == 0, sixteen = a.scalar_type() == at::kHalf || a.scalar_type() == at::kBFloat16;
  if (!add && (empty || a.is_cpu() || !sixteen)) out.zero_();
  if (empty) return;
  if (a.is_cpu() || !sixteen) {
    out.add_(at::mm(a.to(statistics_type(a)), b.to(statistics_type(a))));
  } else if (add) {
    at::addmm_out(out, out, a, b, at::kFloat);
  } else {
    at::mm_out(out, a, b, at::kFloat);
  }
}

LinearResidualResult linear_residual(at::Tensor const& a, at::Tensor const& w, OptionalTensor const& bias, at::Tensor const& residual,
                                     OptionalTensor const& gamma, double eps) {
  if (use_eager(a)) return eager::linear_residual(a, w, bias, residual, gamma, eps);
  std::int64_t const m = a.size(0), n = w.size(0);
  LinearResidualResult result{empty_rows(a, n), get(gamma) ? empty_rows(a, n) : at::Tensor(), {}};
  Launch launch{"residual_sqsum", a, w, {}, {residual, bias, gamma}, {result.out, result.h, wanted_partials(a)}};
  run<ResidualSqsum>(launch);
  result.rstd = rstd_from_partials(launch.sinks[ResidualSqsum::kSquares], m, n, eps);
  return result;
}

ActivationResult rstd_act(at::Tensor const& h, OptionalTensor const& rstd, at::Tensor const& w, OptionalTensor const& bias, ActivationKind kind,
                          bool store) {
  if (use_eager(h)) return eager::rstd_act(h, rstd, w, bias, kind, store);
  ActivationResult result{empty_rows(h, w.size(0)), {}};
  if (kind == ActivationKind::kIdentity) {
    Launch launch{"rstd", h, w, {}, {rstd, bias}, {result.value}};
    run<RstdLinear>(launch);
    return result;
  }
  if (store) result.preactivation = at::empty_like(result.value);
  at::Tensor const none;
  Launch launch{"rstd_act", h, w, {}, {rstd, bias, number(kind), none, none}, {result.value, result.preactivation}};
  run<RstdAct>(launch);
  return result;
}

ActivationResult rstd_glu(at::Tensor const& h, OptionalTensor const& rstd, at::Tensor const& w_gate, at::Tensor const& w_up, ActivationKind kind,
                          bool store) {
  if (use_eager(h)) return eager::rstd_glu(h, rstd, w_gate, w_up, kind, store);
  std::int64_t const f = w_gate.size(0);
  bool const silu = kind == ActivationKind::kSilu;
  ActivationResult result{empty_rows(h, f), store ? empty_rows(h, 2 * f) : at::Tensor()};
  if (store) {
    Launch launch{silu ? "rstd_swiglu_preactivation" : "rstd_geglu_preactivation", h, w_gate, w_up, {rstd, number(kind)}, {result.preactivation, result.value}};
    silu ? run<RstdGluPreactivation<Silu>>(launch) : run<RstdGluPreactivation<Gelu>>(launch);
  } else {
    Launch launch{silu ? "rstd_swiglu" : "rstd_geglu", h, w_gate, w_up, {rstd, number(kind)}, {result.value}};
    silu ? run<RstdGlu<Silu>>(launch) : run<RstdGlu<Gelu>>(launch);
  }
  return result;
}

ActivationGradient dglu(at::Tensor const& dy, OptionalTensor const& w_down, at::Tensor const& preactivation, OptionalTensor const& rstd,
                        ActivationKind kind, std::int64_t width, bool want_value) {
  if (use_eager(dy)) return eager::dglu(dy, w_down, preactivation, rstd, kind, width, want_value);
  std::int64_t const m = dy.size(0), f = preactivation.size(1) / 2;
  bool const silu = kind == ActivationKind::kSilu;
  ActivationGradient result{empty_rows(dy, 2 * f), want_value ? empty_rows(dy, f) : at::Tensor(), {}, {}};
  auto const half = [f](at::Tensor const& t, int which) { return t.narrow(1, which * f, f); };
  Launch launch{silu ? "dswiglu" : "dgeglu", dy, get(w_down) ? get(w_down)->t() : at::Tensor(), {},
                {half(preactivation, 0), half(preactivation, 1), rstd, number(kind)},
                {half(result.dz, 0), half(result.dz, 1), result.value, wanted_partials(dy)}};
  silu ? run<DGlu<Silu>>(launch) : run<DGlu<Gelu>>(launch);
  result.correction = correction_from_partials(launch.sinks[DGlu<Silu>::kRowDot], m, rstd, width);
  return result;
}

ActivationGradient dact(at::Tensor const& dy, OptionalTensor const& w_down, at::Tensor const& preactivation, OptionalTensor const& rstd,
                        OptionalTensor const& bias, ActivationKind kind, std::int64_t width, bool want_value) {
  if (use_eager(dy)) return eager::dact(dy, w_down, preactivation, rstd, bias, kind, width, want_value);
  std::int64_t const m = dy.size(0), n = preactivation.size(1);
  ActivationGradient result{empty_rows(dy, n), want_value ? empty_rows(dy, n) : at::Tensor(), {}, {}};
  Launch launch{"dact", dy, get(w_down) ? get(w_down)->t() : at::Tensor(), {}, {preactivation, rstd, bias, number(kind)},
                {result.dz, result.value, wanted_partials(dy), get(bias) ? wanted_partials(dy) : at::Tensor()}};
  run<DAct>(launch);
  result.correction = correction_from_partials(launch.sinks[DAct::kRowDot], m, rstd, width);
  if (get(bias)) result.dbias = sum_groups(launch.sinks[DAct::kDbias], n, get(bias)->scalar_type());
  return result;
}

at::Tensor rstd_rope(at::Tensor const& h, OptionalTensor const& rstd, at::Tensor const& w, OptionalTensor const& bias, RopeArguments const& rope) {
  if (use_eager(h)) return eager::rstd_rope(h, rstd, w, bias, rope);
  std::int64_t const turn = rope.rotary_dim();
  // The pairs of rotate-half are reached by a stride inside groups of `turn` columns, which must therefore tile a head.
  bool const in_epilogue = turn > 0 && (rope.interleaved ? rope.head_dim % 8 == 0 : rope.head_dim % turn == 0) &&
                           (h.is_cpu() || rope.interleaved || cuda::has_rope_kernel("rstd_rope", rope, h.scalar_type()));
  if (!in_epilogue) {
    at::Tensor const y = rstd_act(h, rstd, w, bias, ActivationKind::kIdentity, false).value;
    if (!h.is_cpu()) return cuda::rope_in_place(y, rope), y;
    return eager::rstd_rope(y, std::nullopt, {}, std::nullopt, rope);
  }
  at::Tensor const out = empty_rows(h, w.size(0));
  Launch launch{rope.interleaved ? "rstd_rope_adjacent" : "rstd_rope", h, w, {}, {rstd, bias, rope.cos, rope.sin}, {out}};
  set_rotation(launch, rope);
  rope.interleaved ? run<RstdRope<Pairing::kAdjacent>>(launch) : run<RstdRope<Pairing::kHeadHalves>>(launch);
  return out;
}

ActivationGradient rope_backward(at::Tensor const& dq, at::Tensor const& dk, at::Tensor const& dv, at::Tensor const& y, OptionalTensor const& rstd,
                                 OptionalTensor const& bias, RopeArguments const& rope, std::int64_t width) {
  if (y.is_cpu() || use_eager(y)) {
    if (y.is_cpu()) note("cpu", "");
    return eager::rope_backward(dq, dk, dv, y, rstd, bias, rope, width);
  }
  return cuda::rope_backward(dq, dk, dv, y, rstd, bias, rope, width);
}

RopeResult rstd_qknorm_rope(at::Tensor const& h, OptionalTensor const& rstd, at::Tensor const& w, OptionalTensor const& bias, RopeArguments const& rope,
                            QkNorm const& norm, bool store_product) {
  if (use_eager(h)) return eager::rstd_qknorm_rope(h, rstd, w, bias, rope, norm, store_product);
  // In the epilogue a head is a subtile, all of whose columns are in pairs.
  bool const in_epilogue = !rope.interleaved && rope.head_dim == rope.rotary_dim() &&
                           (h.is_cpu() || cuda::has_rope_kernel("rstd_qknorm_rope", rope, h.scalar_type()));
  if (!in_epilogue) {
    at::Tensor const z = rstd_act(h, rstd, w, bias, ActivationKind::kIdentity, false).value;
    at::Tensor const y = h.is_cpu() ? eager::rstd_qknorm_rope(z, std::nullopt, {}, std::nullopt, rope, norm, false).value : cuda::qknorm_rope(z, rope, norm);
    return {y, store_product ? z.narrow(1, 0, rope.columns).contiguous() : at::Tensor()};
  }
  RopeResult result{empty_rows(h, w.size(0)), store_product ? empty_rows(h, rope.columns) : at::Tensor()};
  Launch launch{"rstd_qknorm_rope", h, w, {}, {rstd, bias, {norm.q, norm.k}, norm.eps, rope.cos, rope.sin}, {result.value, result.product}};
  set_rotation(launch, rope);
  launch.rotation.query_columns = norm.query_columns;
  run<RstdQkNormRope>(launch);
  return result;
}

QkNormGradient qknorm_rope_backward(at::Tensor const& dq, at::Tensor const& dk, at::Tensor const& dv, at::Tensor const& product, at::Tensor const& y,
                                    OptionalTensor const& rstd, OptionalTensor const& bias, RopeArguments const& rope, QkNorm const& norm,
                                    std::int64_t width) {
  if (y.is_cpu() || use_eager(y) || !cuda::can_norm_heads(rope)) {
    if (y.is_cpu()) note("cpu", "");
    return eager::qknorm_rope_backward(dq, dk, dv, product, y, rstd, bias, rope, norm, width);
  }
  return cuda::qknorm_rope_backward(dq, dk, dv, product, y, rstd, bias, rope, norm, width);
}

NormGradient norm_backward(at::Tensor const& dz, at::Tensor const& w, at::Tensor const& x, OptionalTensor const& gamma, at::Tensor const& correction,
                           OptionalTensor const& incoming, bool want_h, bool want_dgamma) {
  if (use_eager(dz)) return eager::norm_backward(dz, w, x, gamma, correction, incoming, want_h, want_dgamma);
  std::int64_t const d = w.size(1);
  NormGradient result{empty_rows(dz, d), want_h ? empty_rows(dz, d) : at::Tensor(), {}};
  Launch launch{"norm_backward", dz, w.t(), {}, {incoming, x, gamma, correction}, {result.dx, result.h, want_dgamma ? wanted_partials(dz) : at::Tensor()}};
  run<NormBackward>(launch);
  if (want_dgamma) result.dgamma = sum_groups(launch.sinks[NormBackward::kDgamma], d, get(gamma)->scalar_type());
  return result;
}

LinearResidualResult linear_residual_moments(at::Tensor const& a, at::Tensor const& w, OptionalTensor const& bias, at::Tensor const& residual,
                                             OptionalTensor const& gamma, double eps) {
  if (use_eager(a)) return eager::linear_residual_moments(a, w, bias, residual, gamma, eps);
  std::int64_t const m = a.size(0), n = w.size(0);
  LinearResidualResult result{empty_rows(a, n), get(gamma) ? empty_rows(a, n) : at::Tensor(), {}, {}};
  Launch launch{"residual_moments", a, w, {}, {residual, bias, gamma}, {result.out, result.h, wanted_partials(a), wanted_partials(a)}};
  run<ResidualMoments>(launch);
  std::tie(result.rstd, result.mean) =
      moments_from_partials(launch.sinks[ResidualMoments::kSquares], launch.sinks[ResidualMoments::kValues], m, n, eps);
  return result;
}

LayerVectors layer_vectors(at::Tensor const& w, LayerNorm const& norm, OptionalTensor const& bias) {
  if (!w.is_cpu() && !use_eager(w)) return cuda::layer_vectors(w, norm, bias);
  if (w.is_cpu()) note("cpu", "");
  return eager::layer_vectors(w, norm, bias);
}

ActivationResult layer_act(at::Tensor const& h, LayerNorm const& norm, at::Tensor const& w, LayerVectors const& vectors, ActivationKind kind, bool store) {
  if (use_eager(h)) return eager::layer_act(h, norm, w, vectors, kind, store);
  ActivationResult result{empty_rows(h, w.size(0)), {}};
  if (store && kind != ActivationKind::kIdentity) result.preactivation = at::empty_like(result.value);
  Launch launch{"rstd_act", h, w, {}, {norm.rstd, vectors.v, number(kind), norm.mean, vectors.u}, {result.value, result.preactivation}};
  run<RstdAct>(launch);
  return result;
}

ActivationGradient dact_layer(at::Tensor const& dy, OptionalTensor const& w_down, at::Tensor const& preactivation, LayerNorm const& norm,
                              LayerVectors const& vectors, ActivationKind kind, std::int64_t width, bool want_value, bool want_dbias) {
  if (use_eager(dy)) return eager::dact_layer(dy, w_down, preactivation, norm, vectors, kind, width, want_value, want_dbias);
  std::int64_t const m = dy.size(0), n = preactivation.size(1);
  ActivationGradient result{empty_rows(dy, n), want_value ? empty_rows(dy, n) : at::Tensor(), {}, {}, {}};
  Launch launch{"dact_layer", dy, get(w_down) ? get(w_down)->t() : at::Tensor(), {},
                {preactivation, norm.rstd, vectors.v, number(kind), vectors.u},
                {result.dz, result.value, wanted_partials(dy), want_dbias ? wanted_partials(dy) : at::Tensor(), wanted_partials(dy)}};
  run<DActLayer>(launch);
  std::tie(result.correction, result.offset) =
      layer_correction_from_partials(launch.sinks[DActLayer::kRowDot], launch.sinks[DActLayer::kDirectionDot], m, norm.rstd, width);
  if (want_dbias) result.dbias = sum_groups(launch.sinks[DActLayer::kDconstant], n, statistics_type(dy));
  return result;
}

NormGradient layer_norm_backward(at::Tensor const& dz, at::Tensor const& w, at::Tensor const& x, LayerNorm const& norm, at::Tensor const& correction,
                                 at::Tensor const& offset, OptionalTensor const& incoming, bool want_h, bool want_dgamma) {
  if (use_eager(dz)) return eager::layer_norm_backward(dz, w, x, norm, correction, offset, incoming, want_h, want_dgamma);
  std::int64_t const d = w.size(1);
  NormGradient result{empty_rows(dz, d), want_h ? empty_rows(dz, d) : at::Tensor(), {}};
  at::Tensor const rstd = get(norm.beta) ? norm.rstd : at::Tensor();
  Launch launch{"layer_norm_backward", dz, w.t(), {}, {incoming, x, norm.gamma, correction, offset, norm.mean, norm.beta, rstd},
                {result.dx, result.h, want_dgamma ? wanted_partials(dz) : at::Tensor()}};
  run<LayerNormBackward>(launch);
  if (want_dgamma) result.dgamma = sum_groups(launch.sinks[LayerNormBackward::kDgamma], d, get(norm.gamma)->scalar_type());
  return result;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_stats(at::Tensor const& x, LayerNorm const& norm, double eps, bool normalised) {
  if (!x.is_cpu() && !use_eager(x)) return cuda::layer_stats(x, norm, eps, normalised);
  if (x.is_cpu()) note("cpu", "");
  return eager::layer_stats(x, norm, eps, normalised);
}

void lse_select(LseCall const& call, LseSelection& into) {
  if (use_eager(call.h)) return eager::lse_select(call, into);
  at::Tensor const selected = into.statistics.narrow(0, LseSelection::kPickedZ, 2), stored = into.stored;
  bool const general = get(call.bias) || call.cap > 0 || call.planes > LseSelect::kMaxPlanes;
  Launch launch{"", call.h, call.w, {}, {call.rstd}, {selected, wanted_partials(call.h)}};
  if (general) launch.loads.insert(launch.loads.end(), {call.bias, call.cap});
  launch.planes = call.planes, launch.target = call.target, launch.references = into.references, launch.workspace = call.workspace;
  if (call.store != LogitStore::kNone) launch.sinks.push_back(stored);
  auto const run_one = [&](auto without, char const* name_without, auto with, char const* name_with) {
    launch.program = general ? name_with : name_without;
    general ? run<decltype(with)>(launch) : run<decltype(without)>(launch);
  };
  switch (call.store) {
    case LogitStore::kNone: run_one(LseSelect{}, "lse_select", LseSelectGeneral{}, "lse_select_general"); break;
    case LogitStore::kLogits: run_one(LseSelectLogits{}, "lse_select_logits", LseSelectGeneralLogits{}, "lse_select_general_logits"); break;
    case LogitStore::kExponentials:
      run_one(LseSelectExponentials{}, "lse_select_exponentials", LseSelectGeneralExponentials{}, "lse_select_general_exponentials");
      break;
  }
  softmax_statistics(launch.sinks[1], into.statistics);
}

LseSelection lse_select(LseCall const& call, at::Tensor const& stored, at::Tensor const& references) {
  std::int64_t const m = call.h.size(0), n = call.w.size(0);
  auto const statistics = call.h.options().dtype(statistics_type(call.h));
  LseSelection result{at::zeros({LseSelection::kRows, m}, statistics), stored, references};
  result.statistics.narrow(0, LseSelection::kPickedZ, 2).fill_(std::numeric_limits<double>::quiet_NaN());
  if (call.store != LogitStore::kNone && !stored.defined()) result.stored = empty_rows(call.h, stored_columns(n));
  if (call.store == LogitStore::kExponentials && !references.defined()) result.references = at::empty({m, softmax_groups(n)}, statistics);
  // The kernels hold partials, a small part of what the logits would take: of 2^28 logits 11 MiB, or 16 with the narrowest tiles. Launches of few rows read
  // the weight again and again, so a small workspace is left alone.
  constexpr std::int64_t kLaunch = std::int64_t(1) << 28, kTile = 128, kFewRows = 1024;
  std::int64_t rows = call.rows;
  at::Tensor workspace = call.workspace;
  if (!call.h.is_cpu() && cuda::unsupported(call.h).empty()) {
    std::int64_t const row = call.planes * ((n + kTile - 1) / kTile);
    if (workspace.defined() && workspace.numel() / row < std::min(m, kFewRows)) workspace = at::Tensor();
    std::int64_t const fit = workspace.defined() ? workspace.numel() / row : std::min(16 * call.rows, kLaunch / n);
    rows = std::max(kTile, fit / kTile * kTile);
  }
  for (std::int64_t begin = 0; begin < m; begin += rows) {
    std::int64_t const count = std::min(rows, m - begin);
    auto const part = [&](at::Tensor const& t, std::int64_t dim = 0) { return t.defined() ? t.narrow(dim, begin, count) : t; };
    LseCall some = call;
    some.h = part(call.h), some.target = part(call.target), some.workspace = workspace;
    if (get(call.rstd)) some.rstd = part(*get(call.rstd));
    LseSelection into{part(result.statistics, 1), part(result.stored), part(result.references)};
    lse_select(some, into);
  }
  return result;
}

at::Tensor exponential_gradient(at::Tensor const& stored, at::Tensor const& references, at::Tensor const& statistics, at::Tensor const& factors,
                                at::Tensor const& target, OptionalTensor const& rstd, std::int64_t classes, double cap, bool want_dbias) {
  if (stored.is_cpu()) note("cpu", "");
  auto* const function = stored.is_cpu() || use_eager(stored) ? eager::exponential_gradient : cuda::exponential_gradient;
  return function(stored, references, statistics, factors, target, rstd, classes, cap, want_dbias);
}

LogitGradient logit_gradient(KeptLogits const& kept, at::Tensor const& lse, at::Tensor const& factors) {
  if (kept.logits.is_cpu()) note("cpu", "");
  auto* const function = kept.logits.is_cpu() || use_eager(kept.logits) ? eager::logit_gradient : cuda::logit_gradient;
  return function(kept, lse, factors);
}

void scale(at::Tensor out, at::Tensor const& t, at::Tensor const& factor) {
  if (t.is_cpu()) note("cpu", "");
  if (t.is_cpu() || use_eager(out) || !t.is_contiguous()) {
    out.copy_(t.to(factor.scalar_type()) * factor);
  } else {
    cuda::scale(out, t, factor);
  }
}

LogitGradient dlogits(LseCall const& call, at::Tensor const& lse, at::Tensor const& factors, bool want_dbias) {
  if (use_eager(call.h)) return eager::dlogits(call, lse, factors, want_dbias);
  std::int64_t const m = call.h.size(0), n = call.w.size(0);
  LogitGradient result{empty_rows(call.h, stored_columns(n)), {}, {}};
  bool const general = get(call.bias) || call.cap > 0 || want_dbias;
  Launch launch{general ? "dlogits_general" : "dlogits", call.h, call.w, {}, {call.rstd, lse, factors[0], factors[1], factors[2], call.target},
                {result.dz, wanted_partials(call.h)}};
  if (general) {
    launch.loads.insert(launch.loads.end(), {call.bias, call.cap});
    launch.sinks.push_back(want_dbias ? wanted_partials(call.h) : at::Tensor());
  }
  general ? run<DLogitsGeneral>(launch) : run<DLogits>(launch);
  result.row_dot = correction_from_partials(launch.sinks[DLogits::kRowDot], m, std::nullopt, 1);
  if (want_dbias) result.dbias = sum_groups(launch.sinks[DLogits::kDbias], n, statistics_type(call.h));
  return result;
}

std::tuple<at::Tensor, at::Tensor> row_stats(at::Tensor const& x, OptionalTensor const& weight, double eps) {
  if (use_eager(x)) return eager::row_stats(x, weight, eps);
  return x.is_cpu() ? cpu::row_stats(x, weight, eps) : cuda::row_stats(x, weight, eps);
}

}  // namespace coda::bindings
