// The CPU back end: torch's matrix product with fp32 (fp64) accumulators, then the program over them.
#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include "bindings/calls.h"
#include "host/program.hpp"
#include "host/reduce.hpp"
#include "programs/plain.hpp"
#include "programs/swiglu.hpp"

#define CODA_DISPATCH(TYPE, ...) AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, TYPE, "coda", __VA_ARGS__)

namespace coda::bindings::cpu {
namespace {

at::Tensor accumulate(at::Tensor const& a, at::Tensor const& b) {
  auto const type = statistics_type(a);
  return at::mm(a.to(type), b.to(type));
}

// Rows are independent; a few thousand elements amortise the cost of a task.
template <class Program>
void run(GemmArguments const& g, at::Tensor const& acc, at::ScalarType storage) {
  std::int64_t const grain = std::max<std::int64_t>(1, 4096 / std::max<std::int64_t>(1, g.n));
  CODA_DISPATCH(storage, [&] {
    using Real = at::opmath_type<scalar_t>;
    Real const* values = acc.const_data_ptr<Real>();
    at::parallel_for(0, g.m, grain,
                     [&](std::int64_t begin, std::int64_t end) { host::run<Program, scalar_t, Real>(g, values, begin, end); });
  });
}

Resource matrix(at::Tensor const& t) { return {t.data_ptr(), t.stride(0), 0, 0}; }
Resource vector(OptionalTensor const& t) { return {get(t) ? get(t)->data_ptr() : nullptr, 0, 0, 0}; }
Resource scalar(double value) { return {nullptr, 0, 0, value}; }

}  // namespace

at::Tensor gemm(GemmCall const& call) {
  bool const has_bias = get(call.bias), has_source = get(call.source);
  note("cpu", "");
  if (!has_bias && !has_source && call.alpha == 1) return accumulate(call.a, call.b).to(call.a.scalar_type());
  at::Tensor const acc = accumulate(call.a, call.b);
  at::Tensor out = at::empty({acc.size(0), acc.size(1)}, call.a.options());
  OptionalTensor const bias = has_bias ? OptionalTensor(get(call.bias)->contiguous()) : std::nullopt;
  GemmArguments g;
  g.m = acc.size(0), g.n = acc.size(1);
  g.loads[Plain::kAlpha] = scalar(call.alpha);
  g.loads[Plain::kBias] = vector(bias);
  g.sinks[0] = matrix(out);
  if (has_source) {
    at::Tensor const source = get(call.source)->contiguous();
    g.loads[PlainResidual::kBeta] = scalar(call.beta);
    g.loads[PlainResidual::kSource] = matrix(source);
    run<PlainResidual>(g, acc, out.scalar_type());
  } else {
    run<Plain>(g, acc, out.scalar_type());
  }
  return out;
}

SwigluResult rstd_swiglu(at::Tensor const& h, OptionalTensor const& rstd, at::Tensor const& w_gate, at::Tensor const& w_up, bool store) {
  std::int64_t const m = h.size(0), f = w_gate.size(0);
  auto const type = statistics_type(h);
  at::Tensor const acc = at::empty({m, 2 * f}, h.options().dtype(type));
  at::Tensor gate = acc.narrow(1, 0, f), up = acc.narrow(1, f, f), h_wide = h.to(type);
  at::mm_out(gate, h_wide, w_gate.to(type).t());
  at::mm_out(up, h_wide, w_up.to(type).t());
  SwigluResult result{at::empty({m, f}, h.options()), at::empty(store ? at::IntArrayRef({m, 2 * f}) : at::IntArrayRef({0}), h.options())};
  OptionalTensor const scale = get(rstd) ? OptionalTensor(get(rstd)->contiguous()) : std::nullopt;
  GemmArguments g;
  g.m = m, g.n = 2 * f;
  g.loads[0] = vector(scale);
  if (store) {
    g.sinks[0] = matrix(result.preactivation);
    g.sinks[1] = matrix(result.product);
    run<RstdSwigluPreactivation>(g, acc, h.scalar_type());
  } else {
    g.sinks[0] = matrix(result.product);
    run<RstdSwiglu>(g, acc, h.scalar_type());
  }
  note("cpu", "");
  return result;
}

DSwigluResult dswiglu(at::Tensor const& dy, at::Tensor const& w_down, at::Tensor const& preactivation, OptionalTensor const& rstd) {
  std::int64_t const m = dy.size(0), f = w_down.size(1);
  at::Tensor const acc = accumulate(dy, w_down), z = preactivation.contiguous();
  DSwigluResult result{at::empty({m, 2 * f}, dy.options()), at::empty({m, f}, dy.options()), at::zeros({m}, dy.options().dtype(statistics_type(dy)))};
  OptionalTensor const scale = get(rstd) ? OptionalTensor(get(rstd)->contiguous()) : std::nullopt;
  auto const half = [&](at::Tensor const& t, int which) { return matrix(t.narrow(1, which * f, f)); };
  GemmArguments g;
  g.m = m, g.n = f;
  g.loads[DSwiglu::kGate] = half(z, 0);
  g.loads[DSwiglu::kUp] = half(z, 1);
  g.loads[DSwiglu::kRstd] = vector(scale);
  g.sinks[DSwiglu::kDgate] = half(result.dz, 0);
  g.sinks[DSwiglu::kDup] = half(result.dz, 1);
  g.sinks[DSwiglu::kProduct] = matrix(result.product);
  g.sinks[DSwiglu::kRowDot] = vector(result.row_dot);
  run<DSwiglu>(g, acc, dy.scalar_type());
  note("cpu", "");
  return result;
}

std::tuple<at::Tensor, at::Tensor> row_stats(at::Tensor const& x_, OptionalTensor const& weight, double eps) {
  at::Tensor const x = x_.stride(1) == 1 ? x_ : x_.contiguous();
  std::int64_t const m = x.size(0), d = x.size(1);
  at::Tensor rstd = at::empty({m}, x.options().dtype(statistics_type(x))), h, gamma;
  if (get(weight)) {
    gamma = get(weight)->to(rstd.scalar_type()).contiguous();
    h = at::empty({m, d}, x.options());
  }
  CODA_DISPATCH(x.scalar_type(), [&] {
    using Real = at::opmath_type<scalar_t>;
    at::parallel_for(0, m, 16, [&](std::int64_t begin, std::int64_t end) {
      host::row_stats<scalar_t, Real, Real>(x.const_data_ptr<scalar_t>(), x.stride(0), gamma.defined() ? gamma.const_data_ptr<Real>() : nullptr,
                                            h.defined() ? h.data_ptr<scalar_t>() : nullptr, rstd.data_ptr<Real>(), d, Real(eps), begin, end);
    });
  });
  note("cpu", "");
  return {h, rstd};
}

std::tuple<at::Tensor, at::Tensor> norm_backward(at::Tensor const& dn_, at::Tensor const& x_, at::Tensor const& weight, at::Tensor const& rstd,
                                                 at::Tensor const& row_dot, bool want_dx, bool want_dweight) {
  at::Tensor const dn = dn_.contiguous(), x = x_.stride(1) == 1 ? x_ : x_.contiguous();
  at::Tensor const gamma = weight.to(rstd.scalar_type()).contiguous();
  std::int64_t const m = x.size(0), d = x.size(1);
  at::Tensor dx, dweight;
  CODA_DISPATCH(x.scalar_type(), [&] {
    using Real = at::opmath_type<scalar_t>;
    scalar_t const *dn_data = dn.const_data_ptr<scalar_t>(), *x_data = x.const_data_ptr<scalar_t>();
    if (want_dx) {
      dx = at::empty({m, d}, x.options());
      at::parallel_for(0, m, 16, [&](std::int64_t begin, std::int64_t end) {
        host::norm_dx_rows<scalar_t, Real, Real>(dn_data, x_data, x.stride(0), gamma.const_data_ptr<Real>(), rstd.const_data_ptr<Real>(),
                                                 row_dot.const_data_ptr<Real>(), dx.data_ptr<scalar_t>(), d, begin, end);
      });
    }
    if (want_dweight) {
      at::Tensor sums = at::zeros({d}, rstd.options().dtype(at::kDouble));
      at::parallel_for(0, d, 64, [&](std::int64_t begin, std::int64_t end) {
        host::norm_dgamma_columns<scalar_t>(dn_data, x_data, x.stride(0), sums.data_ptr<double>(), m, d, begin, end);
      });
      dweight = sums.to(weight.scalar_type());
    }
  });
  note("cpu", "");
  return {dx, dweight};
}

}  // namespace coda::bindings::cpu
