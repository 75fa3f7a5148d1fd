// Drives any epilogue program inside CUTLASS's SM90 TMA epilogue (with the loops of collective.hpp), as one flat visitor node.
//
// The loop calls visit(acc, ...) with a thread's values of one subtile. The node visits the loads, applies the program to every value (or
// pair), and hands the results to the sinks. The first TileStore is the collective's own D; everything else has a node of its own (nodes.hpp),
// tile loads too, since the collective's C could not be absent.
#pragma once

#include "coda/layouts.hpp"
#include "coda/loads.hpp"
#include "coda/params.h"
#include "coda/sinks.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "sm90/collective.hpp"
#include "sm90/config.hpp"
#include "sm90/nodes.hpp"

namespace coda::sm90 {

using StrideRow = Stride<int64_t, _1, int64_t>;                                   // [rows, columns], columns contiguous
using StridePaired = Stride<int64_t, Stride<_1, int64_t, _8>, int64_t>;           // the same with N mode (8, 2, F/8)

// Tile shapes of a kernel. A kHalves program has the nested N mode of layouts.hpp.
template <class Config, Pairing kPairing>
struct Tiles {
  static constexpr bool kPaired = kPairing == Pairing::kHalves;
  template <int kN>
  using ModeN = cute::conditional_t<kPaired, Shape<_8, _2, Int<kN / 16>>, Int<kN>>;
  using Cta = Shape<Int<Config::kTileM>, ModeN<Config::kTileN>, Int<Config::kTileK>>;
  using Epilogue = Shape<Int<Config::kEpilogueM>, ModeN<Config::kEpilogueN>>;
  using StrideD = cute::conditional_t<kPaired, StridePaired, StrideRow>;
};

namespace detail {

namespace collective = cutlass::epilogue::collective::detail;

// The shared memory of a full-width tile of a pairwise program: the first halves of all columns, then the second halves, so that a row of
// either is contiguous. In the accumulator's own order a bulk store would write the two halves in pieces of 16 bytes.
template <class Config, class Element>
struct PairedTile {
  static constexpr int kRowBytes = Config::kEpilogueN / 2 * int(sizeof(Element));
  static_assert(kRowBytes == 32 || kRowBytes == 64 || kRowBytes == 128, "a row of half a subtile must be one swizzle period");
  using RowSwizzle = Swizzle<kRowBytes == 32 ? 1 : kRowBytes == 64 ? 2 : 3, 4, 3>;
  using Atom = ComposedLayout<RowSwizzle, smem_ptr_flag_bits<cutlass::sizeof_bits_v<Element>>,
                              cute::Layout<Shape<Int<Config::kEpilogueM>, Shape<_8, _2, Int<Config::kEpilogueN / 16>>>,
                                           Stride<Int<Config::kEpilogueN / 2>, Stride<_1, Int<Config::kEpilogueM * Config::kEpilogueN / 2>, _8>>>>;
};
template <class Config, class Element, class FlatAtom, bool kPaired>
struct TileAtom {
  using type = FlatAtom;
};
template <class Config, class Element, class FlatAtom>
struct TileAtom<Config, Element, FlatAtom, true> {
  using type = typename PairedTile<Config, Element>::Atom;
};

template <class Config_, class Program_, class Element_>
struct Context {
  using Config = Config_;
  using Program = Program_;
  static constexpr int kColumns = Program::kColumns;
  static constexpr Pairing kPairing = kPairingOf<Program>;
  using Tile = Tiles<Config, kPairing>;
  using Element = Element_;
  using EpilogueTile = typename Tile::Epilogue;  // the names that CUTLASS's Aux*Descriptor expect
  static constexpr int StagesC = Config::kStagesLoad;
  static constexpr int StagesD = Config::kStagesStore;
};

// --- loads -----------------------------------------------------------------------------------------------------------------------
template <class Context, class Load>
struct LoadNode;

template <class Context>
struct LoadNode<Context, Scalar> {
  using Node = ScalarNode;
  static typename Node::Arguments arguments(Resource const& r, GemmArguments const&) { return {float(r.value)}; }
};

template <class Context, int kAbsent>
struct LoadNode<Context, RowVector<kAbsent>> {
  using Node = TileNode<RowVectorCallbacks<typename Context::Config, Context::kPairing, typename Context::Element, kAbsent>>;
  static typename Node::Arguments arguments(Resource const& r, GemmArguments const&) { return {r.data, r.fp32, r.pair_stride}; }
};

template <class Context, int kAbsent>
struct LoadNode<Context, ColVector<kAbsent>> {
  using Node = TileNode<ColVectorCallbacks<typename Context::Config, Context::kPairing, kAbsent>>;
  static typename Node::Arguments arguments(Resource const& r, GemmArguments const&) { return {r.data, true, 0}; }
};

template <class Context, int kAbsent>
struct LoadNode<Context, TableRow<kAbsent>> {
  using Node = TileNode<TableCallbacks<typename Context::Config, Context::kPairing, typename Context::Element, kAbsent>>;
  static typename Node::Arguments arguments(Resource const& r, GemmArguments const& g) { return {r.data, r.ld, r.fp32, g.rotation}; }
};

template <class Context, int kAbsent>
struct LoadNode<Context, HeadVector<kAbsent>> {
  using Node = TileNode<HeadVectorCallbacks<typename Context::Config, Context::kPairing, typename Context::Element, kAbsent>>;
  static typename Node::Arguments arguments(Resource const& r, GemmArguments const& g) { return {r.data, r.second, r.fp32, g.rotation}; }
};

template <class Context>
struct LoadNode<Context, TileLoad> {
  static_assert(Context::kPairing != Pairing::kHalves, "tile loads of a program over two halves have no node");
  using Node = TileLoadNode<typename Context::Config, typename Context::Element>;
  static typename Node::Arguments arguments(Resource const& r, GemmArguments const&) { return {r.data, r.ld, 0}; }
};

template <class Context>
struct LoadNode<Context, ColumnIs> {
  static_assert(Context::kPairing == Pairing::kNone, "a column of each row, of pairs, has no node");
  using Node = TileNode<ColumnIsCallbacks<typename Context::Config>>;
  static typename Node::Arguments arguments(Resource const& r, GemmArguments const&) { return {static_cast<int64_t const*>(r.data)}; }
};

// --- sinks -----------------------------------------------------------------------------------------------------------------------
template <class Context, class Sink>
struct SinkNode;

template <class Context>
struct SinkNode<Context, TileStore> {
  static_assert(Context::kPairing != Pairing::kHalves, "a program over two halves stores one full-width tile at most");
  using Node = TileStoreNode<typename Context::Config, typename Context::Element, false>;
  static typename Node::Arguments arguments(Resource const& r) { return {r.data, r.ld, r.columns}; }
};

template <class Context>
struct SinkNode<Context, HalfTileStore> {
  static_assert(Context::kPairing == Pairing::kHalves, "half-width stores belong to programs over two halves");
  using Node = TileStoreNode<typename Context::Config, typename Context::Element, true>;
  static typename Node::Arguments arguments(Resource const& r) { return {r.data, r.ld, 0}; }
};

template <class Context>
struct SinkNode<Context, RowPartial> {
  using Node = TileNode<RowPartialCallbacks<typename Context::Config, Context::kPairing>>;
  static typename Node::Arguments arguments(Resource const& r) { return {static_cast<float*>(r.data), r.ld}; }
};

template <class Context>
struct SinkNode<Context, ColPartial> {
  static_assert(Context::kPairing == Pairing::kNone, "column partials of pairs have no node");
  using Node = TileNode<ColPartialCallbacks<typename Context::Config>>;
  static typename Node::Arguments arguments(Resource const& r) { return {static_cast<float*>(r.data), r.ld}; }
};

template <class Context>
struct SinkNode<Context, RowSoftmax> {
  static_assert(Context::kPairing == Pairing::kNone, "a softmax over pairs has no node");
  using Node = TileNode<RowSoftmaxCallbacks<typename Context::Config, Context::Program::kMaxPlanes>>;
  static typename Node::Arguments arguments(Resource const& r) {
    return {static_cast<float*>(r.data), r.ld, r.pair_stride, int(r.value), r.columns, static_cast<float*>(const_cast<void*>(r.second))};
  }
};

template <class Context>
struct SinkNode<Context, RowSelect> {
  static_assert(Context::kPairing == Pairing::kNone, "selecting from pairs has no node");
  using Node = TileNode<RowSelectCallbacks<typename Context::Config>>;
  static typename Node::Arguments arguments(Resource const& r) {
    return {static_cast<float*>(r.data), r.pair_stride, static_cast<int64_t const*>(r.second), r.columns};
  }
};

template <class Load>
inline constexpr bool kIsTable = false;
template <int kAbsent>
inline constexpr bool kIsTable<TableRow<kAbsent>> = true;

// --- positions -------------------------------------------------------------------------------------------------------------------
template <class Wanted, class... Ts>
constexpr int find_first(List<Ts...>) {
  constexpr bool matches[sizeof...(Ts) + 1] = {cute::is_same_v<Wanted, Ts>..., false};
  for (int i = 0; i < int(sizeof...(Ts)); ++i)
    if (matches[i]) return i;
  return -1;
}

template <int kIndex, class L>
struct At;
template <int kIndex, class... Ts>
struct At<kIndex, List<Ts...>> {
  using type = cute::tuple_element_t<kIndex, cute::tuple<Ts...>>;
};

// The indices of the sinks that have a node: all but the one that is the collective's D.
template <int kSkip, int kCount, int kNext = 0, int... kKept>
constexpr auto kept_indices() {
  if constexpr (kNext == kCount) {
    return cute::seq<kKept...>{};
  } else if constexpr (kNext == kSkip) {
    return kept_indices<kSkip, kCount, kNext + 1, kKept...>();
  } else {
    return kept_indices<kSkip, kCount, kNext + 1, kKept..., kNext>();
  }
}

}  // namespace detail

template <class Program, class Config, class Element>
struct Epilogue {
  using Loads = typename Program::Loads;
  using Sinks = typename Program::Sinks;
  using Context = detail::Context<Config, Program, Element>;
  using Tile = typename Context::Tile;
  static constexpr int kColumns = Program::kColumns;
  static constexpr Pairing kPairing = kPairingOf<Program>;
  static constexpr int kExponentials = detail::find_first<Exponentials>(Sinks{});
  // The sink that is the collective's D, or -1.
  static constexpr int kMain = kExponentials >= 0 ? kExponentials : detail::find_first<TileStore>(Sinks{});
  using ElementD = cute::conditional_t<(kExponentials >= 0), cutlass::half_t, Element>;
  static constexpr int kHeads = detail::find_first<HeadVector<1>>(Loads{});  // what knows which heads count, for a program with a mean over heads
  static constexpr int kInputs = InputSlots<Program>::count;
  static constexpr int kOutputs = OutputSlots<Program>::count;
  static_assert(Loads::size <= kMaxResources && Sinks::size <= kMaxResources);

  using LoadIndices = cute::make_seq<Loads::size>;
  using SinkIndices = decltype(detail::kept_indices<kMain, Sinks::size>());
  template <int kIndex>
  using LoadAt = detail::LoadNode<Context, typename detail::At<kIndex, Loads>::type>;
  template <int kIndex>
  using SinkAt = detail::SinkNode<Context, typename detail::At<kIndex, Sinks>::type>;

  template <class L, class S>
  struct ImplOf;
  template <int... kL, int... kS>
  struct ImplOf<cute::seq<kL...>, cute::seq<kS...>> {
    using type = fusion::Sm90VisitorImpl<typename LoadAt<kL>::Node..., typename SinkAt<kS>::Node...>;
    static typename type::Arguments arguments(GemmArguments const& g) {
      return {LoadAt<kL>::arguments(g.loads[kL], g)..., SinkAt<kS>::arguments(g.sinks[kS])...};
    }
  };
  using ImplTraits = ImplOf<LoadIndices, SinkIndices>;
  using Impl = typename ImplTraits::type;

  struct Visitor : Impl {
    using Params = typename Impl::Params;
    using SharedStorage = typename Impl::SharedStorage;
    using ElementAux = Element;  // what a void D asks for
    CUTLASS_HOST_DEVICE Visitor() {}
    CUTLASS_HOST_DEVICE Visitor(Params const& params, SharedStorage const& storage) : Impl(params, storage) {}

    template <class Base>
    struct Callbacks : Base {
      using Base::callbacks_tuple;
      CUTLASS_DEVICE explicit Callbacks(Base&& base) : Base(cute::forward<Base>(base)) {}

      template <class Acc, int kFragment>
      CUTLASS_DEVICE Array<ElementD, kFragment> visit(Array<Acc, kFragment> const& acc, int epi_v, int epi_m, int epi_n) {
        static_assert(kColumns == 1 || kFragment % 8 == 0, "a fragment must hold whole pairs of atoms");
        static_assert(kPairing != Pairing::kHeadHalves || kFragment == Config::kEpilogueN / 2, "a fragment must cover its subtile");
        constexpr int kGroups = kFragment / kColumns;
        Array<float, kFragment> loaded[Loads::size == 0 ? 1 : Loads::size], values;
        // A wide head goes in parts: what is loaded for all of it would not fit into registers.
        constexpr int kPart = kPairing == Pairing::kHeadHalves && kGroups > 16 ? 16 : kGroups;
        using Parts = cute::make_seq<kGroups / kPart>;
        using All = Int<Loads::size>;
        // Loads kFirst ... kLast - 1 for a part, of which what takes time is asked for first; and one pair's accumulators and what was loaded for it.
        auto const load = [&](auto first, auto last, auto part) CUTLASS_LAMBDA_FUNC_INLINE {
          cute::for_each(LoadIndices{}, [&](auto i) CUTLASS_LAMBDA_FUNC_INLINE {
            if constexpr (i >= first && i < last && detail::kIsTable<typename detail::At<i, Loads>::type>)
              get<i>(callbacks_tuple).template ask<kPart>(part * kPart, epi_m);
          });
          cute::for_each(LoadIndices{}, [&](auto i) CUTLASS_LAMBDA_FUNC_INLINE {
            if constexpr (i >= first && i < last) {
              auto const fragment = get<i>(callbacks_tuple).visit(acc, epi_v, epi_m, epi_n);
              loaded[i] = cutlass::NumericArrayConverter<float, typename decltype(fragment)::Element, kFragment>{}(fragment);
            }
          });
        };
        auto const for_part = [&](auto part, auto f) CUTLASS_LAMBDA_FUNC_INLINE {
          CUTLASS_PRAGMA_UNROLL
          for (int group = part * kPart; group < (part + 1) * kPart; ++group) f(group);
        };
        float a[kColumns], in[kInputs == 0 ? 1 : kInputs], out[kOutputs];
        auto const gather = [&](int group, auto const& from, auto last) CUTLASS_LAMBDA_FUNC_INLINE {
          CUTLASS_PRAGMA_UNROLL
          for (int c = 0; c < kColumns; ++c) a[c] = from[fragment_index<kPairing, kFragment>(group, c)];
          cute::for_each(LoadIndices{}, [&](auto i) CUTLASS_LAMBDA_FUNC_INLINE {
            if constexpr (i < last) {
              constexpr int kWidth = detail::At<i, Loads>::type::template slots<kColumns>;
              for (int c = 0; c < kWidth; ++c) in[InputSlots<Program>::offset(i) + c] = loaded[i][fragment_index<kPairing, kFragment>(group, c)];
            }
          });
        };
        Array<float, kGroups> results[kOutputs];
        auto const keep = [&](int group) CUTLASS_LAMBDA_FUNC_INLINE {
          CUTLASS_PRAGMA_UNROLL
          for (int s = 0; s < kOutputs; ++s) results[s][group] = out[s];
        };
        if constexpr (kHasHeadMean<Program>) {
          // The subtile is a head, and the four threads of a quad hold its rows, two each.
          static_assert(kPairing == Pairing::kHeadHalves, "a subtile must be a head");
          constexpr Int<Program::kHeadMeanLoads> kFirst{};
          constexpr Int<Parts::size() == 1 ? All::value : kFirst> kEarly{};
          float head[2] = {};
          cute::for_each(Parts{}, [&](auto part) CUTLASS_LAMBDA_FUNC_INLINE {
            load(_0{}, kEarly, part);
            for_part(part, [&](int group) CUTLASS_LAMBDA_FUNC_INLINE {
              gather(group, acc, kFirst);
              head[row_bit<kFragment>(group)] += Program::template term<Element>(a, in);
              CUTLASS_PRAGMA_UNROLL
              for (int c = 0; c < kColumns; ++c) values[fragment_index<kPairing, kFragment>(group, c)] = a[c];
            });
          });
          CUTLASS_PRAGMA_UNROLL
          for (float& h : head) {
            h += __shfl_xor_sync(0xffffffffu, h, 1);
            h += __shfl_xor_sync(0xffffffffu, h, 2);
          }
          cute::for_each(Parts{}, [&](auto part) CUTLASS_LAMBDA_FUNC_INLINE {
            load(kEarly, All{}, part);
            if constexpr (part == 0) {
              gather(0, values, All{});
              CUTLASS_PRAGMA_UNROLL
              for (float& h : head) h = Program::head(h * (1.0f / Config::kEpilogueN), get<kHeads>(callbacks_tuple).inside(epi_n), in);
            }
            for_part(part, [&](int group) CUTLASS_LAMBDA_FUNC_INLINE {
              gather(group, values, All{});
              Program::template apply<Element>(a, in, head[row_bit<kFragment>(group)], out);
              keep(group);
            });
          });
        } else {
          cute::for_each(Parts{}, [&](auto part) CUTLASS_LAMBDA_FUNC_INLINE {
            load(_0{}, All{}, part);
            auto const apply = [&](auto kind) CUTLASS_LAMBDA_FUNC_INLINE {
              for_part(part, [&](int group) CUTLASS_LAMBDA_FUNC_INLINE {
                gather(group, acc, All{});
                if constexpr (kHasKinds<Program>) in[Program::kKind] = kind();
                Program::template apply<Element>(a, in, out);
                keep(group);
              });
            };
            if constexpr (kHasKinds<Program>) {
              gather(0, acc, All{});
              for_kind<Program>(in[Program::kKind], apply);
            } else {
              apply(0);
            }
          });
        }

        Array<float, kFragment> main;
        cute::for_each(cute::make_seq<SinkIndices::size()>{}, [&](auto position) CUTLASS_LAMBDA_FUNC_INLINE {
          constexpr int kSink = decltype(detail_sink(position))::value, kSlot = OutputSlots<Program>::offset(kSink);
          using Sink = typename detail::At<kSink, Sinks>::type;
          auto& node = get<Loads::size + position>(callbacks_tuple);
          if constexpr (cute::is_same_v<Sink, RowSoftmax>) {
            auto const exponentials = node.put(results[kSlot], results[kSlot + 1], epi_v, epi_m, epi_n);
            if constexpr (kExponentials >= 0) main = exponentials;
          } else if constexpr (cute::is_same_v<Sink, RowSelect>) {
            node.put(results[kSlot], results[kSlot + 1], epi_v, epi_m, epi_n);
          } else if constexpr (kColumns == 2 && cute::is_same_v<Sink, TileStore>) {
            node.put(interleaved<kSlot, kFragment>(results), epi_v, epi_m, epi_n);
          } else {
            node.put(results[kSlot], epi_v, epi_m, epi_n);
          }
        });

        if constexpr (kMain < 0) {
          main.clear();
        } else if constexpr (kExponentials < 0) {
          main = interleaved<OutputSlots<Program>::offset(kMain), kFragment>(results);
        }
        return cutlass::NumericArrayConverter<ElementD, float, kFragment>{}(main);
      }

      // The values of all columns, in fragment order, from those of first and of second members of pairs.
      template <int kSlot, int kFragment, int kGroups>
      CUTLASS_DEVICE static Array<float, kFragment> interleaved(Array<float, kGroups> const (&results)[kOutputs]) {
        Array<float, kFragment> all;
        CUTLASS_PRAGMA_UNROLL
        for (int group = 0; group < kGroups; ++group) {
          CUTLASS_PRAGMA_UNROLL
          for (int c = 0; c < kColumns; ++c) all[fragment_index<kPairing, kFragment>(group, c)] = results[kSlot + c][group];
        }
        return all;
      }
      template <int kFragment>
      CUTLASS_DEVICE static constexpr int row_bit(int group) {
        return (fragment_index<kPairing, kFragment>(group, 0) / 2) % 2;
      }

      template <class Position>
      static constexpr auto detail_sink(Position) {
        return sink_number<Position::value>(SinkIndices{});
      }
      template <int kPosition, int... kS>
      static constexpr auto sink_number(cute::seq<kS...>) {
        constexpr int numbers[] = {kS...};
        return Int<numbers[kPosition]>{};
      }
    };

    template <bool kReferenceSrc, class... Args>
    CUTLASS_DEVICE auto get_consumer_store_callbacks(fusion::detail::ConsumerStoreArgs<Args...> const& args) {
      auto base = Impl::template get_consumer_store_callbacks<kReferenceSrc>(args);
      return Callbacks<decltype(base)>(cute::move(base));
    }
  };

  // The collective, with this kernel's stage counts instead of the builder's.
  static constexpr int kFragment = Config::kEpilogueM * Config::kEpilogueN / (Config::kCooperative ? 256 : 128);
  using Policy = cutlass::epilogue::Sm90TmaWarpSpecialized<Config::kStagesLoad, Config::kStagesStore, kFragment, /*ReuseSmemC=*/false, /*DelayTmaStore=*/false>;
  using StrideD = typename Tile::StrideD;
  using Store = detail::collective::AuxStoreDescriptor<Context, StrideD, ElementD>;
  using SmemAtom = typename detail::TileAtom<Config, ElementD, typename Store::SmemLayoutAtom, Tile::kPaired>::type;
  static constexpr bool kLoads = detail::find_first<TileLoad>(Loads{}) >= 0;
  static constexpr bool kColumnsFirst = !kLoads && detail::find_first<ColPartial>(Sinks{}) < 0;  // a partial sum needs all rows of its columns first
  using CutlassCollective = cutlass::epilogue::collective::CollectiveEpilogue<
      Policy, typename Tile::Cta, typename Tile::Epilogue, /*ElementC=*/void, StrideD, cute::conditional_t<(kMain >= 0), ElementD, void>, StrideD,
      Visitor, SM90_TMA_LOAD, SmemAtom, SM75_U32x4_LDSM_N, SM90_TMA_STORE, SmemAtom, typename Store::CopyOpR2S,
      Copy_Atom<SM90_U32x4_STSM_N, cutlass::half_t>, void>;
  using Collective = sm90::Collective<CutlassCollective, Config, kLoads, kColumnsFirst>;

  static StrideD stride(Resource const& r) {
    if constexpr (Tile::kPaired) {
      return {r.ld, {_1{}, r.pair_stride, _8{}}, 0};
    } else {
      return {r.ld, _1{}, 0};
    }
  }

  static typename Collective::Arguments arguments(GemmArguments const& g) {
    typename Collective::Arguments args{};
    args.thread = ImplTraits::arguments(g);
    if constexpr (kMain >= 0) {
      args.ptr_D = static_cast<ElementD*>(g.sinks[kMain].data);
      args.dD = stride(g.sinks[kMain]);
    }
    return args;
  }
};

}  // namespace coda::sm90
