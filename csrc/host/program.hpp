// The CPU back end: a library GEMM leaves the accumulators in memory, and the program's own function runs over them, row by row. It is
// no second implementation of the mathematics; it is what tests run on machines without a GPU.
#pragma once

#include <array>
#include <cstdint>
#include <tuple>
#include <utility>

#include "coda/loads.hpp"
#include "coda/params.h"
#include "coda/sinks.hpp"

namespace coda::host {

namespace detail {

template <class Storage, class Real, class Element>
using Resolve = std::conditional_t<std::is_same_v<Element, Stored>, Storage, Real>;

// Reads the values of load `r` for row m and columns n (, n + half).
template <class Storage, class Real, int kColumns>
struct Reader {
  static void read(Scalar, Resource const& r, std::int64_t, std::int64_t, std::int64_t, Real* in) { in[0] = Real(r.value); }

  template <class Element, int kAbsent>
  static void read(RowVector<Element, kAbsent>, Resource const& r, std::int64_t, std::int64_t n, std::int64_t half, Real* in) {
    auto const* p = static_cast<Resolve<Storage, Real, Element> const*>(r.data);
    for (int c = 0; c < kColumns; ++c) in[c] = p ? Real(p[n + c * half]) : Real(kAbsent);
  }
  template <class Element, int kAbsent>
  static void read(ColVector<Element, kAbsent>, Resource const& r, std::int64_t m, std::int64_t, std::int64_t, Real* in) {
    auto const* p = static_cast<Resolve<Storage, Real, Element> const*>(r.data);
    in[0] = p ? Real(p[m]) : Real(kAbsent);
  }
  static void read(TileLoad, Resource const& r, std::int64_t m, std::int64_t n, std::int64_t half, Real* in) {
    auto const* p = static_cast<Storage const*>(r.data) + m * r.ld + n;
    for (int c = 0; c < kColumns; ++c) in[c] = Real(p[c * half]);
  }
};

template <class Storage, class Real, int kColumns>
struct Writer {
  static void write(TileStore, Resource const& r, std::int64_t m, std::int64_t n, std::int64_t half, Real const* out, double&) {
    auto* p = static_cast<Storage*>(r.data) + m * r.ld + n;
    for (int c = 0; c < kColumns; ++c) p[c * half] = static_cast<Storage>(out[c]);
  }
  static void write(HalfTileStore, Resource const& r, std::int64_t m, std::int64_t n, std::int64_t, Real const* out, double&) {
    static_cast<Storage*>(r.data)[m * r.ld + n] = static_cast<Storage>(out[0]);
  }
  static void write(RowPartial, Resource const&, std::int64_t, std::int64_t, std::int64_t, Real const* out, double& sum) { sum += out[0]; }
};

template <class Program, class Storage, class Real, class... Loads, class... Sinks, std::size_t... kL, std::size_t... kS>
void run_row(GemmArguments const& g, Real const* acc, std::int64_t m, List<Loads...>, List<Sinks...>, std::index_sequence<kL...>,
             std::index_sequence<kS...>) {
  constexpr int kColumns = Program::kColumns;
  using R = Reader<Storage, Real, kColumns>;
  using W = Writer<Storage, Real, kColumns>;
  std::int64_t const half = g.n / kColumns;
  std::array<double, sizeof...(Sinks)> sums{};
  for (std::int64_t n = 0; n < half; ++n) {
    Real a[kColumns], in[InputSlots<Program>::count], out[OutputSlots<Program>::count];
    for (int c = 0; c < kColumns; ++c) a[c] = acc[n + c * half];
    (R::read(Loads{}, g.loads[kL], m, n, half, in + InputSlots<Program>::offset(int(kL))), ...);
    Program::template apply<Storage>(a, in, out);
    (W::write(Sinks{}, g.sinks[kS], m, n, half, out + OutputSlots<Program>::offset(int(kS)), sums[kS]), ...);
  }
  // The whole row is one tile here.
  ((std::is_same_v<Sinks, RowPartial> ? void(static_cast<Real*>(g.sinks[kS].data)[m] = static_cast<Real>(sums[kS])) : void()), ...);
}

}  // namespace detail

// Applies Program to rows [begin, end) of the accumulators, which are [g.m, g.n] and contiguous. Storage is the tensors' element type.
template <class Program, class Storage, class Real>
void run(GemmArguments const& g, Real const* acc, std::int64_t begin, std::int64_t end) {
  using Loads = typename Program::Loads;
  using Sinks = typename Program::Sinks;
  for (std::int64_t m = begin; m < end; ++m)
    detail::run_row<Program, Storage, Real>(g, acc + m * g.n, m, Loads{}, Sinks{}, std::make_index_sequence<Loads::size>{},
                                            std::make_index_sequence<Sinks::size>{});
}

}  // namespace coda::host
