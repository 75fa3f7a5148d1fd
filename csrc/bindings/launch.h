// One GEMM with a program, as calls.cpp describes it and a back end runs it: tensors of any strides, in the order of the program's loads and
// sinks. The kinds of the resources come from the program's own lists, so a new program needs no code here.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "bindings/calls.h"
#include "host/program.hpp"

template <>
struct coda::host::ExponentialOf<c10::BFloat16> {
  using type = c10::Half;
};

namespace coda::bindings {

// A load: a tensor (undefined: absent), two tensors (a HeadVector), or the value of a Scalar.
struct Input {
  at::Tensor tensor, second;
  double value = 0;
  Input(at::Tensor first, at::Tensor other) : tensor(std::move(first)), second(std::move(other)) {}
  Input(at::Tensor t) : tensor(std::move(t)) {}
  Input(OptionalTensor const& t) : tensor(get(t) ? *t : at::Tensor()) {}
  Input(double v) : value(v) {}
};

struct Launch {
  char const* program;
  at::Tensor a;         // [M, K]
  at::Tensor b;         // [N, K]. Undefined: there is no product, the accumulator is a
  at::Tensor b_second;  // [N, K] too, for a program over two halves, whose first half is b
  std::vector<Input> loads;
  // Undefined: not wanted. Partials: any tensor that is defined; the back end puts the partials in its place, [tiles or groups, >= M or N].
  std::vector<at::Tensor> sinks;
  Rotation rotation = {};
  at::Tensor positions = {};  // int32 or int64 [M], if rotation goes by positions
  // For RowSoftmax, whose sink becomes its planes of partials, [planes, tiles, >= M]; and int64 [M] for RowSelect, whose sink is [2, M].
  int planes = 0;
  at::Tensor references = {}, target = {};
  at::Tensor workspace = {};  // contiguous memory for those planes, used if it is enough
};

enum class Kind {
  kScalar, kRowVector, kHeadVector, kColVector, kTable, kColumnIs,             // loads
  kTile, kHalfTile, kExponentials, kRowPartial, kColPartial, kSoftmax, kSelect  // sinks; kTile is both
};

struct Kinds {
  Pairing pairing;
  std::vector<Kind> loads, sinks;
};

namespace detail {

constexpr Kind kind(Scalar) { return Kind::kScalar; }
template <int kAbsent>
constexpr Kind kind(RowVector<kAbsent>) {
  return Kind::kRowVector;
}
template <int kAbsent>
constexpr Kind kind(HeadVector<kAbsent>) {
  return Kind::kHeadVector;
}
template <int kAbsent>
constexpr Kind kind(ColVector<kAbsent>) {
  return Kind::kColVector;
}
template <int kAbsent>
constexpr Kind kind(TableRow<kAbsent>) {
  return Kind::kTable;
}
constexpr Kind kind(TileLoad) { return Kind::kTile; }
constexpr Kind kind(TileStore) { return Kind::kTile; }
constexpr Kind kind(HalfTileStore) { return Kind::kHalfTile; }
constexpr Kind kind(RowPartial) { return Kind::kRowPartial; }
constexpr Kind kind(ColPartial) { return Kind::kColPartial; }
constexpr Kind kind(ColumnIs) { return Kind::kColumnIs; }
constexpr Kind kind(RowSoftmax) { return Kind::kSoftmax; }
constexpr Kind kind(Exponentials) { return Kind::kExponentials; }
constexpr Kind kind(RowSelect) { return Kind::kSelect; }

template <class... Ts>
std::vector<Kind> kinds(List<Ts...>) {
  return {kind(Ts{})...};
}

}  // namespace detail

template <class Program>
Kinds const& kinds_of() {
  static Kinds const kinds{kPairingOf<Program>, detail::kinds(typename Program::Loads{}), detail::kinds(typename Program::Sinks{})};
  return kinds;
}

namespace cuda {
// Runs `call` with a kernel, or without a product by csrc/reduce's row kernel.
void run(Kinds const& kinds, Launch& call);
}  // namespace cuda

// Points the resource of a RowSoftmax or a RowSelect at its tensors.
void bind_softmax(Kind kind, Launch const& call, at::Tensor const& sink, std::int64_t columns, Resource& r, std::vector<at::Tensor>& alive);
// Points `g` at the tensors of `call`, after making copies (kept in `alive`) of those that are not laid out as host::run reads them.
void bind_resources(Kinds const& kinds, Launch& call, at::Tensor const& acc, at::TensorOptions const& statistics, GemmArguments& g, std::vector<at::Tensor>& alive);

namespace cpu {

at::Tensor accumulators(Launch const& call);
template <class Program>
void run(Launch& call) {
  at::Tensor const acc = accumulators(call);
  GemmArguments g;
  std::vector<at::Tensor> alive;
  bind_resources(kinds_of<Program>(), call, acc, acc.options(), g, alive);
  if (g.m == 0 || g.n == 0) return;
  // Groups of rows are independent; a few thousand elements amortise the cost of a task.
  std::int64_t const grain = std::max<std::int64_t>(1, 4096 / (g.n * host::kGroupRows));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, call.a.scalar_type(), "coda", [&] {
    using Real = at::opmath_type<scalar_t>;
    Real const* values = acc.const_data_ptr<Real>();
    at::parallel_for(0, (g.m + host::kGroupRows - 1) / host::kGroupRows, grain,
                     [&](std::int64_t begin, std::int64_t end) { host::run<Program, scalar_t, Real>(g, values, begin, end); });
  });
  note("cpu", "");
}

}  // namespace cpu

template <class Program>
void run(Launch& call) {
  call.a.is_cpu() ? cpu::run<Program>(call) : cuda::run(kinds_of<Program>(), call);
}

}  // namespace coda::bindings
