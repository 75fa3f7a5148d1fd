// The CPU back end: torch's matrix product with fp32 (fp64) accumulators, then the program over them (launch.h); and the row kernels.
#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include "bindings/launch.h"
#include "host/reduce.hpp"

namespace coda::bindings {

void bind_softmax(Kind kind, Launch const& call, at::Tensor const& sink, std::int64_t columns, Resource& r, std::vector<at::Tensor>& alive) {
  r.data = sink.data_ptr(), r.pair_stride = sink.stride(0), r.columns = columns;
  if (kind == Kind::kSoftmax) {
    r.ld = sink.stride(1), r.value = call.planes;
    r.second = call.references.defined() ? call.references.data_ptr() : nullptr;
  } else {
    alive.push_back(call.target.contiguous());
    r.second = alive.back().data_ptr();
  }
}

void bind_resources(Kinds const& kinds, Launch& call, at::Tensor const& acc, at::TensorOptions const& statistics, GemmArguments& g, std::vector<at::Tensor>& alive) {
  g.m = acc.size(0), g.n = acc.size(1), g.k = call.a.size(1);
  g.rotation = call.rotation;
  auto const keep = [&](at::Tensor const& t) { return alive.push_back(t), t; };
  if (call.positions.defined()) {
    g.rotation.positions = keep(call.positions.contiguous()).data_ptr();
    g.rotation.positions64 = call.positions.scalar_type() == at::kLong;
  }
  for (std::size_t i = 0; i < kinds.loads.size(); ++i) {
    Input const& in = call.loads[i];
    Resource& r = g.loads[i];
    r.value = in.value;
    if (!in.tensor.defined()) continue;
    // Tiles may keep the distance of their rows; all else is made contiguous.
    bool const rows = in.tensor.dim() == 2;
    at::Tensor const t = keep(rows && in.tensor.stride(1) == 1 ? in.tensor : in.tensor.contiguous());
    r.data = t.data_ptr();
    r.ld = rows ? t.stride(0) : 0;
    r.fp32 = t.scalar_type() == at::kFloat && call.a.scalar_type() != at::kFloat;
    if (in.second.defined()) r.second = keep(in.second.contiguous()).data_ptr();
  }
  for (std::size_t i = 0; i < kinds.sinks.size(); ++i) {
    at::Tensor& t = call.sinks[i];
    if (!t.defined()) continue;
    if (kinds.sinks[i] == Kind::kRowPartial) t = at::zeros({1, g.m}, statistics);
    if (kinds.sinks[i] == Kind::kSoftmax) t = at::zeros({call.planes, 1, g.m}, statistics);
    if (kinds.sinks[i] == Kind::kColPartial) t = at::zeros({(g.m + host::kGroupRows - 1) / host::kGroupRows, g.n}, statistics);
    g.sinks[i].data = t.data_ptr();
    g.sinks[i].ld = t.stride(0);
    if (kinds.sinks[i] == Kind::kTile && t.size(1) < g.n) g.sinks[i].columns = t.size(1);
    if (kinds.sinks[i] == Kind::kSoftmax || kinds.sinks[i] == Kind::kSelect) bind_softmax(kinds.sinks[i], call, t, g.n, g.sinks[i], alive);
  }
}

}  // namespace coda::bindings

namespace coda::bindings::cpu {

at::Tensor accumulators(Launch const& call) {
  auto const type = statistics_type(call.a);
  at::Tensor const a = call.a.to(type);
  if (!call.b.defined()) return a.contiguous();
  if (!call.b_second.defined()) return at::mm(a, call.b.to(type).t());
  std::int64_t const f = call.b.size(0);
  at::Tensor const acc = at::empty({a.size(0), 2 * f}, a.options());
  at::Tensor first = acc.narrow(1, 0, f), second = acc.narrow(1, f, f);
  at::mm_out(first, a, call.b.to(type).t());
  at::mm_out(second, a, call.b_second.to(type).t());
  return acc;
}

std::tuple<at::Tensor, at::Tensor> row_stats(at::Tensor const& x_, OptionalTensor const& weight, double eps) {
  at::Tensor const x = x_.stride(1) == 1 ? x_ : x_.contiguous();
  std::int64_t const m = x.size(0), d = x.size(1);
  at::Tensor rstd = at::empty({m}, x.options().dtype(statistics_type(x))), h, gamma;
  if (get(weight)) {
    gamma = get(weight)->to(rstd.scalar_type()).contiguous();
    h = at::empty({m, d}, x.options());
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "coda", [&] {
    using Real = at::opmath_type<scalar_t>;
    at::parallel_for(0, m, 16, [&](std::int64_t begin, std::int64_t end) {
      host::row_stats<scalar_t, Real, Real>(x.const_data_ptr<scalar_t>(), x.stride(0), gamma.defined() ? gamma.const_data_ptr<Real>() : nullptr,
                                            h.defined() ? h.data_ptr<scalar_t>() : nullptr, rstd.data_ptr<Real>(), d, Real(eps), begin, end);
    });
  });
  note("cpu", "");
  return {h, rstd};
}

}  // namespace coda::bindings::cpu
