// The CPU back end: a library GEMM leaves the accumulators in memory, and the program's own function runs over them, row by row. It is
// no second implementation of the mathematics; it is what tests run on machines without a GPU. csrc/reduce/pointwise.cu runs the same code
// on a GPU, for programs whose accumulator is a tensor already.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "coda/loads.hpp"
#include "coda/params.h"
#include "coda/sinks.hpp"
#include "programs/loss.hpp"

namespace coda::host {

// Rows that share one row of column partials. A task owns whole groups, so the sums do not depend on the number of threads.
constexpr std::int64_t kGroupRows = 16;

// The type of the Exponentials of tensors of `Storage`: fp16 beside 16-bit types, which a user of this header specialises it for.
template <class Storage>
struct ExponentialOf {
  using type = Storage;
};

namespace detail {

// One call of a program: row m, pair (or column) number `pair`, whose columns are n and n + distance.
struct Place {
  std::int64_t m, pair, n, distance;
};

template <Pairing kPairing>
CODA_HD Place place(GemmArguments const& g, std::int64_t m, std::int64_t pair) {
  if constexpr (kPairing == Pairing::kHalves) return {m, pair, pair, g.n / 2};
  if constexpr (kPairing == Pairing::kAdjacent) return {m, pair, 2 * pair, 1};
  if constexpr (kPairing == Pairing::kHeadHalves) {
    std::int64_t const half = g.rotation.rotary_dim / 2;
    return {m, pair, pair / half * 2 * half + pair % half, half};
  }
  return {m, pair, pair, 0};
}

template <class Storage, class Real>
CODA_HD Real value(Resource const& r, std::int64_t at) {
  return r.fp32 ? Real(static_cast<float const*>(r.data)[at]) : Real(static_cast<Storage const*>(r.data)[at]);
}

template <class Storage, class Real, int kColumns>
struct Reader {
  CODA_HD static void read(Scalar, GemmArguments const&, Resource const& r, Place const&, Real* in) { in[0] = Real(r.value); }

  template <int kAbsent>
  CODA_HD static void read(RowVector<kAbsent>, GemmArguments const&, Resource const& r, Place const& p, Real* in) {
    for (int c = 0; c < kColumns; ++c) in[c] = r.data ? value<Storage, Real>(r, p.n + c * p.distance) : Real(kAbsent);
  }
  template <int kAbsent>
  CODA_HD static void read(HeadVector<kAbsent>, GemmArguments const& g, Resource r, Place const& p, Real* in) {
    if (p.n >= g.rotation.query_columns) r.data = const_cast<void*>(r.second);
    for (int c = 0; c < kColumns; ++c)
      in[c] = p.n < g.rotation.columns ? value<Storage, Real>(r, (p.n + c * p.distance) % g.rotation.head_dim) : Real(kAbsent);
  }
  template <int kAbsent>
  CODA_HD static void read(ColVector<kAbsent>, GemmArguments const&, Resource const& r, Place const& p, Real* in) {
    in[0] = r.data ? static_cast<Real const*>(r.data)[p.m] : Real(kAbsent);
  }
  CODA_HD static void read(TileLoad, GemmArguments const&, Resource const& r, Place const& p, Real* in) {
    for (int c = 0; c < kColumns; ++c)
      in[c] = r.data ? Real(static_cast<Storage const*>(r.data)[p.m * r.ld + p.n + c * p.distance]) : Real(0);
  }
  CODA_HD static void read(ColumnIs, GemmArguments const&, Resource const& r, Place const& p, Real* in) {
    for (int c = 0; c < kColumns; ++c) in[c] = static_cast<std::int64_t const*>(r.data)[p.m] == p.n + c * p.distance ? Real(1) : Real(0);
  }
  template <int kAbsent>
  CODA_HD static void read(TableRow<kAbsent>, GemmArguments const& g, Resource const& r, Place const& p, Real* in) {
    Rotation const& turn = g.rotation;
    std::int64_t const column = p.n % turn.head_dim;
    in[0] = Real(kAbsent);
    if (p.n >= turn.columns || column >= turn.rotary_dim) return;
    std::int64_t const position = turn.positions == nullptr  ? p.m % turn.period
                                  : turn.positions64 ? static_cast<std::int64_t const*>(turn.positions)[p.m]
                                                     : static_cast<std::int32_t const*>(turn.positions)[p.m];
    in[0] = value<Storage, Real>(r, position * r.ld + (p.distance == 1 ? column / 2 : column));
  }
};

template <class Storage, class Real, class Sum, int kColumns>
struct Writer {
  CODA_HD static void write(TileStore, GemmArguments const&, Resource const& r, Place const& p, Real const* out, Sum&) {
    if (r.data == nullptr) return;
    for (int c = 0; c < kColumns; ++c) {
      std::int64_t const n = p.n + c * p.distance;
      if (r.columns == 0 || n < r.columns) static_cast<Storage*>(r.data)[p.m * r.ld + n] = static_cast<Storage>(out[c]);
    }
  }
  CODA_HD static void write(HalfTileStore, GemmArguments const&, Resource const& r, Place const& p, Real const* out, Sum&) {
    static_cast<Storage*>(r.data)[p.m * r.ld + p.pair] = static_cast<Storage>(out[0]);
  }
  CODA_HD static void write(RowPartial, GemmArguments const&, Resource const&, Place const&, Real const* out, Sum& sum) { sum += out[0]; }
  CODA_HD static void write(ColPartial, GemmArguments const&, Resource const& r, Place const& p, Real const* out, Sum&) {
    if (r.data == nullptr) return;
    Real& sum = static_cast<Real*>(r.data)[p.m / kGroupRows * r.ld + p.n];
    sum = p.m % kGroupRows == 0 ? out[0] : sum + out[0];
  }
  // In full at the end of the row.
  CODA_HD static void write(RowSoftmax, GemmArguments const&, Resource const&, Place const&, Real const* out, Sum& sum) { sum.take(out[0], out[1]); }
  CODA_HD static void write(Exponentials, GemmArguments const&, Resource const&, Place const&, Real const*, Sum&) {}
  CODA_HD static void write(RowSelect, GemmArguments const&, Resource const& r, Place const& p, Real const* out, Sum&) {
    if (static_cast<std::int64_t const*>(r.second)[p.m] != p.n) return;
    Real* const selected = static_cast<Real*>(r.data);
    selected[p.m] = out[0], selected[r.pair_stride + p.m] = out[1];
  }
};

template <class Program>
struct Values {
  static constexpr int kIn = InputSlots<Program>::count, kOut = OutputSlots<Program>::count;
};

// Pairs begin, begin + step, ... of row m, whose accumulators are at acc; adds to `sums` what belongs to the row's partials.
template <class Program, class Storage, class Real, class Acc, class Sum, class... Loads, class... Sinks, std::size_t... kL, std::size_t... kS>
CODA_HD void run_row(GemmArguments const& g, Acc const* acc, std::int64_t m, std::int64_t begin, std::int64_t step, Sum* sums,
                     List<Loads...>, List<Sinks...>, std::index_sequence<kL...>, std::index_sequence<kS...>) {
  constexpr int kColumns = Program::kColumns;
  using R = Reader<Storage, Real, kColumns>;
  using W = Writer<Storage, Real, Sum, kColumns>;
  Real a[kColumns], in[Values<Program>::kIn == 0 ? 1 : Values<Program>::kIn], out[Values<Program>::kOut];
  auto const read = [&](std::int64_t pair) {
    Place const p = place<kPairingOf<Program>>(g, m, pair);
    for (int c = 0; c < kColumns; ++c) a[c] = Real(acc[p.n + c * p.distance]);
    (R::read(Loads{}, g, g.loads[kL], p, in + InputSlots<Program>::offset(int(kL))), ...);
    return p;
  };
  [[maybe_unused]] Real head = 0;
  for (std::int64_t pair = begin; pair < g.n / kColumns; pair += step) {
    if constexpr (kHasHeadMean<Program>) {  // whole heads follow each other, all of whose columns are in pairs, and step is 1
      std::int64_t const pairs = g.rotation.head_dim / kColumns;
      if (pair % pairs == 0) {
        double sum = 0;
        bool inside = false;
        for (std::int64_t i = pair; i < pair + pairs; ++i) {
          inside = read(i).n < g.rotation.columns;
          sum += double(Program::template term<Storage>(a, in));
        }
        head = Program::head(Real(sum / double(g.rotation.head_dim)), inside, in);
      }
    }
    Place const p = read(pair);
    if constexpr (kHasHeadMean<Program>) {
      Program::template term<Storage>(a, in);  // for what it makes of the accumulators
      Program::template apply<Storage>(a, in, head, out);
    } else {
      Program::template apply<Storage>(a, in, out);
    }
    (W::write(Sinks{}, g, g.sinks[kS], p, out + OutputSlots<Program>::offset(int(kS)), sums[kS]), ...);
  }
}

template <class Program, class Storage, class Real, class Acc, class Sum>
CODA_HD void run_row(GemmArguments const& g, Acc const* acc, std::int64_t m, std::int64_t begin, std::int64_t step, Sum* sums) {
  run_row<Program, Storage, Real>(g, acc, m, begin, step, sums, typename Program::Loads{}, typename Program::Sinks{},
                                  std::make_index_sequence<Program::Loads::size>{}, std::make_index_sequence<Program::Sinks::size>{});
}

// Calls f(sink number) for each RowPartial of the program; the whole row is one tile here.
template <class F, class... Sinks, std::size_t... kS>
CODA_HD void for_row_partials(List<Sinks...>, std::index_sequence<kS...>, F f) {
  ((std::is_same_v<Sinks, RowPartial> ? f(kS) : void()), ...);
}
template <class Program, class F>
CODA_HD void for_row_partials(F f) {
  for_row_partials(typename Program::Sinks{}, std::make_index_sequence<Program::Sinks::size>{}, f);
}

// What the sinks of a row gather.
template <class Real>
struct RowState {
  double sum = 0;
  std::vector<Real> z, q;
  void operator+=(Real value) { sum += double(value); }
  void take(Real first, Real second) { z.push_back(first), q.push_back(second); }
};

// The partials of a RowSoftmax of row m, which is one tile; `tile`: its Exponentials, or null.
template <class Storage, class Real>
void finish_softmax(Resource const& r, Resource const* tile, std::int64_t m, RowState<Real> const& row) {
  using Exponential = typename ExponentialOf<Storage>::type;
  std::int64_t const n = std::int64_t(row.z.size()), groups = (n + kSoftmaxGroup - 1) / kSoftmaxGroup;
  SoftmaxSums<double> sums{-std::numeric_limits<double>::infinity()};
  double total = 0, total_q = 0;
  for (std::int64_t group = 0; group < groups; ++group) {
    std::int64_t const begin = group * kSoftmaxGroup, end = std::min(n, begin + kSoftmaxGroup);
    Real top = Real(sums.top);
    for (std::int64_t i = begin; i < end; ++i) top = std::max(top, row.z[i] * kLog2E<Real>);
    sums.rescale(double(top));
    Real const base = Real(kExponentialShift) - finite_or_zero(top);
    for (std::int64_t i = begin; i < end; ++i) {
      Real const e = exp2_(row.z[i] * kLog2E<Real> + base);
      sums.sum += double(e), sums.dot += double(e) * double(row.q[i]);
      total += double(row.z[i]), total_q += double(row.q[i]);
      if (tile != nullptr) static_cast<Exponential*>(tile->data)[m * tile->ld + i] = static_cast<Exponential>(e);
    }
    if (r.second != nullptr) static_cast<Real*>(const_cast<void*>(r.second))[m * groups + group] = top;
  }
  double const values[] = {sums.top, sums.sum, sums.dot, total, total_q};
  for (int p = 0; p < int(r.value); ++p) static_cast<Real*>(r.data)[p * r.pair_stride + m] = Real(values[p]);
}

template <class Program, class Storage, class Real, class... Sinks, std::size_t... kS>
void finish_row(GemmArguments const& g, std::int64_t m, RowState<Real> const* states, List<Sinks...>, std::index_sequence<kS...>) {
  Resource const* tile = nullptr;
  ((std::is_same_v<Sinks, Exponentials> ? void(tile = &g.sinks[kS]) : void()), ...);
  auto const finish = [&](auto sink, std::size_t s) {
    if constexpr (std::is_same_v<decltype(sink), RowPartial>) static_cast<Real*>(g.sinks[s].data)[m] = static_cast<Real>(states[s].sum);
    if constexpr (std::is_same_v<decltype(sink), RowSoftmax>) finish_softmax<Storage>(g.sinks[s], tile, m, states[s]);
  };
  (finish(Sinks{}, kS), ...);
}

}  // namespace detail

// Applies Program to the rows of groups [begin, end) of kGroupRows each of the accumulators, which are [g.m, g.n] and contiguous. Storage is
// the tensors' element type.
template <class Program, class Storage, class Real>
void run(GemmArguments const& g, Real const* acc, std::int64_t begin, std::int64_t end) {
  for (std::int64_t m = begin * kGroupRows; m < end * kGroupRows && m < g.m; ++m) {
    detail::RowState<Real> states[Program::Sinks::size];
    detail::run_row<Program, Storage, Real>(g, acc + m * g.n, m, 0, 1, states);
    detail::finish_row<Program, Storage>(g, m, states, typename Program::Sinks{}, std::make_index_sequence<Program::Sinks::size>{});
  }
}

}  // namespace coda::host
