// The contract of an epilogue program.
//
// A GEMM computes acc = A B^T (fp32; fp64 on the CPU back end when the operands are fp64). A program says what happens to one
// accumulator value, or to one pair of them, before anything leaves the chip. It is a plain struct:
//
//   struct Program {
//     static constexpr int kColumns = 1;                 // 1: elementwise.  2: pairwise, and then also
//     static constexpr Pairing kPairing = ...;           //    which two columns, see below
//     using Loads = List<...>;                           // what it reads, see loads.hpp
//     using Sinks = List<...>;                           // what it writes, see sinks.hpp
//     template <class Storage, class Real>
//     CODA_HD static void apply(Real const (&acc)[kColumns], Real const (&in)[...], Real (&out)[...]);
//   };
//
// `in` holds the loaded values in the order of Loads, `out` the results in the order of Sinks. A resource that has a column of its
// own for each accumulator column takes kColumns consecutive slots, every other one takes one slot (see `kSlots`). All arithmetic is
// in Real (float on a GPU); Storage is the 16-bit type of the tensors, for programs that must see a value as it will be stored.
//
// Rules. apply is a pure function: no state, no memory, no branch on where it runs. The back ends (sm90/, host/) are the only callers,
// and each drives every program with the same generic code, so a program is written once. Anything wider than a tile is a partial
// sink, one value per row and tile, reduced afterwards in a fixed order (csrc/reduce). There are no atomics, hence every result is
// bitwise reproducible.
//
// Pairwise programs (kColumns = 2): one call sees two columns of the accumulator. Which two is the Pairing:
//   kHalves      f and f + N/2: with weights stored as [gate; up] these are gate and up of the same feature
//   kHeadHalves  c and c + W/2 of each group of W columns: the two halves that rotate-half rotary embedding turns against each other
//   kAdjacent    2c and 2c + 1: interleaved rotary embedding
// layouts.hpp has the reason why none of them costs anything on a GPU.
//
// A program that needs the mean of something over the head of its pair (QK-norm) says how many of its first loads that takes,
//     static constexpr int kHeadMeanLoads = ...;
// has a function
//     template <class Storage, class Real> CODA_HD static Real term(Real (&acc)[kColumns], in);    what a pair adds to the sum over its head
// which may put into acc what apply is to find there, and a function
//     template <class Real> CODA_HD static Real head(Real mean, bool inside, in);    of the mean over the head's columns, once a row and head
// whose result apply takes before `out`. inside: the head is one of those that Rotation counts (queries' and keys'). `head` may read scalars only.
// Heads are Rotation::head_dim columns wide.
//
// A program with one of several functions, which a scalar tells apart, lists groups of them,
//     using Kinds = List<std::integer_sequence<int, ...>, ...>;
// and names the scalar's slot, kKind. A back end then branches around a run of values to the group, and gives apply one of its kinds. A branch of each value's
// own keeps values from overlapping, which costs several times as much as the rest of an epilogue.
#pragma once

#include <utility>

#if defined(__CUDACC__)
#define CODA_HD __host__ __device__ __forceinline__
#else
#define CODA_HD inline
#endif

namespace coda {

enum class Pairing { kNone, kHalves, kHeadHalves, kAdjacent };

template <class... Ts>
struct List {
  static constexpr int size = static_cast<int>(sizeof...(Ts));
};

namespace detail {

template <class Program, int kColumns>
struct PairingOf {
  static constexpr Pairing value = Pairing::kNone;
};
template <class Program>
struct PairingOf<Program, 2> {
  static constexpr Pairing value = Program::kPairing;
};

template <class Program, class = void>
struct HasHeadMean {
  static constexpr bool value = false;
};
template <class Program>
struct HasHeadMean<Program, decltype(void(Program::kHeadMeanLoads))> {
  static constexpr bool value = true;
};

template <class Program, class = void>
struct KindsOf {
  using type = List<>;
};
template <class Program>
struct KindsOf<Program, decltype(void(typename Program::Kinds()))> {
  using type = typename Program::Kinds;
};

// Of some kinds the one that is `kind`, as one of these constants: so the compiler sees that it is none of the others.
template <class Real, int kFirst, int... kRest>
CODA_HD Real one_of(std::integer_sequence<int, kFirst, kRest...>, Real kind) {
  if constexpr (sizeof...(kRest) == 0) {
    return Real(kFirst);
  } else {
    return kind == Real(kFirst) ? Real(kFirst) : one_of(std::integer_sequence<int, kRest...>(), kind);
  }
}
template <int... kKinds, class Real>
CODA_HD bool is_any(std::integer_sequence<int, kKinds...>, Real kind) {
  return ((kind == Real(kKinds)) || ...);
}
template <class... Groups, class Real, class F>
CODA_HD void for_kind(List<Groups...>, Real kind, F const& f) {
  ((is_any(Groups(), kind) ? f([kind] { return one_of(Groups(), kind); }) : void()), ...);
}

template <class Program, class Resources>
struct Slots;

template <class Program, class... Ts>
struct Slots<Program, List<Ts...>> {
  static constexpr int count = (0 + ... + Ts::template slots<Program::kColumns>);
  // The slot of resource number `index`.
  static constexpr int offset(int index) {
    constexpr int widths[sizeof...(Ts) + 1] = {Ts::template slots<Program::kColumns>..., 0};
    int sum = 0;
    for (int i = 0; i < index; ++i) sum += widths[i];
    return sum;
  }
};

}  // namespace detail

template <class Program>
inline constexpr Pairing kPairingOf = detail::PairingOf<Program, Program::kColumns>::value;

template <class Program>
inline constexpr bool kHasHeadMean = detail::HasHeadMean<Program>::value;

template <class Program>
inline constexpr bool kHasKinds = detail::KindsOf<Program>::type::size > 0;

// f(g), where g() is the kind, one of those of its group.
template <class Program, class Real, class F>
CODA_HD void for_kind(Real kind, F const& f) {
  detail::for_kind(typename detail::KindsOf<Program>::type(), kind, f);
}

template <class Program>
using InputSlots = detail::Slots<Program, typename Program::Loads>;
template <class Program>
using OutputSlots = detail::Slots<Program, typename Program::Sinks>;

}  // namespace coda
