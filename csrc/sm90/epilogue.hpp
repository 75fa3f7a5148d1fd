// Drives any epilogue program inside CUTLASS's SM90 TMA epilogue, as one flat visitor node.
//
// CUTLASS calls visit(acc, ...) with a thread's values of one subtile. The node visits the loads, applies the program to every value (or
// pair), and hands the results to the sinks. What maps to what:
//   first TileLoad     the collective's own C operand (so that kReuseSource can apply)
//   other TileLoads    Sm90AuxLoad                RowVector, ColVector   Sm90RowBroadcast, Sm90ColBroadcast
//   first TileStore    the collective's D         other TileStores       Sm90AuxStore
//   HalfTileStore      HalfTileNode               RowPartial             Sm90ColReduction (it reduces along N), no final reduction
#pragma once

#include "coda/layouts.hpp"
#include "coda/loads.hpp"
#include "coda/params.h"
#include "coda/sinks.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "sm90/config.hpp"
#include "sm90/nodes.hpp"

namespace coda::sm90 {

using StrideRow = Stride<int64_t, _1, int64_t>;                                   // [rows, columns], columns contiguous
using StridePaired = Stride<int64_t, Stride<_1, int64_t, _8>, int64_t>;           // the same with N mode (8, 2, F/8)

// Tile shapes of a kernel. `Flat` ones describe the same tile without the nested N mode, for nodes that only count columns.
template <class Config, int kColumns>
struct Tiles {
  static constexpr bool kPaired = kColumns == 2;
  static_assert(kColumns == 1 || kColumns == 2, "a program sees one accumulator value or one pair");
  template <int kN>
  using ModeN = cute::conditional_t<kPaired, Shape<_8, _2, Int<kN / 16>>, Int<kN>>;
  using Cta = Shape<Int<Config::kTileM>, ModeN<Config::kTileN>, Int<Config::kTileK>>;
  using FlatCta = Shape<Int<Config::kTileM>, Int<Config::kTileN>, Int<Config::kTileK>>;
  using Epilogue = Shape<Int<Config::kEpilogueM>, ModeN<Config::kEpilogueN>>;
  using StrideD = cute::conditional_t<kPaired, StridePaired, StrideRow>;
};

namespace detail {

namespace collective = cutlass::epilogue::collective::detail;

template <class Element, class Stored_>
using Resolve = cute::conditional_t<cute::is_same_v<Element, Stored>, Stored_, float>;

template <class Config, class Program, class Element_>
struct Context {
  using Tile = Tiles<Config, Program::kColumns>;
  using Element = Element_;
  using EpilogueTile = typename Tile::Epilogue;  // the names that CUTLASS's Aux*Descriptor expect
  static constexpr int StagesC = Config::kStagesLoad;
  static constexpr int StagesD = Config::kStagesStore;
  static constexpr int kColumns = Program::kColumns;
};

// --- loads -----------------------------------------------------------------------------------------------------------------------
template <class Context, class Load, bool kFirstTile>
struct LoadNode;

template <class Context, bool kFirstTile>
struct LoadNode<Context, Scalar, kFirstTile> {
  using Node = ScalarNode;
  static typename Node::Arguments arguments(Resource const& r) { return {float(r.value)}; }
};

template <class Context, class Element, int kAbsent, bool kFirstTile>
struct LoadNode<Context, RowVector<Element, kAbsent>, kFirstTile> {
  static_assert(Context::kColumns == 1, "a row vector for a pairwise program needs a node that knows the nested N mode");
  using Input = Resolve<Element, typename Context::Element>;
  using Node = fusion::Sm90RowBroadcast<0, typename Context::Tile::FlatCta, Input, float, Stride<_0, _1, int64_t>>;
  static typename Node::Arguments arguments(Resource const& r) { return {static_cast<Input const*>(r.data), Input(float(kAbsent)), {}}; }
};

template <class Context, class Element, int kAbsent, bool kFirstTile>
struct LoadNode<Context, ColVector<Element, kAbsent>, kFirstTile> {
  using Input = Resolve<Element, typename Context::Element>;
  using Node = fusion::Sm90ColBroadcast<0, typename Context::Tile::FlatCta, Input, float, Stride<_1, _0, int64_t>>;
  static typename Node::Arguments arguments(Resource const& r) { return {static_cast<Input const*>(r.data), Input(float(kAbsent)), {}}; }
};

template <class Context>
struct LoadNode<Context, TileLoad, true> {
  using Node = fusion::Sm90SrcFetch<typename Context::Element>;
  static typename Node::Arguments arguments(Resource const&) { return {}; }
};

template <class Context>
struct LoadNode<Context, TileLoad, false> {
  static_assert(Context::kColumns == 1, "only the first tile of a pairwise program can be loaded");
  using Element = typename Context::Element;
  using Descriptor = collective::AuxLoadDescriptor<Context, StrideRow, Element>;
  using Node = fusion::Sm90AuxLoad<Descriptor::Stages, typename Context::EpilogueTile, Element, StrideRow, typename Descriptor::SmemLayoutAtom,
                                   typename Descriptor::CopyOpS2R, 8, /*EnableNullptr=*/false>;
  static typename Node::Arguments arguments(Resource const& r) {
    return {static_cast<Element const*>(r.data), Element(0), {r.ld, _1{}, 0}};
  }
};

// --- sinks -----------------------------------------------------------------------------------------------------------------------
template <class Config, class Context, class Sink>
struct SinkNode;

template <class Config, class Context>
struct SinkNode<Config, Context, TileStore> {
  static_assert(Context::kColumns == 1, "a pairwise program stores one full-width tile at most");
  using Element = typename Context::Element;
  using Descriptor = collective::AuxStoreDescriptor<Context, StrideRow, Element>;
  using Node = fusion::Sm90AuxStore<Descriptor::Stages, typename Context::EpilogueTile, Element, cutlass::FloatRoundStyle::round_to_nearest,
                                    StrideRow, typename Descriptor::SmemLayoutAtom, typename Descriptor::CopyOpR2S, 8, /*EnableNullptr=*/false>;
  static typename Node::Arguments arguments(Resource const& r) { return {static_cast<Element*>(r.data), {r.ld, _1{}, 0}}; }
};

template <class Config, class Context>
struct SinkNode<Config, Context, HalfTileStore> {
  static_assert(Context::kColumns == 2, "half-width stores belong to pairwise programs");
  using Node = HalfTileNode<Config, typename Context::Element>;
  static typename Node::Arguments arguments(Resource const& r) {
    return {static_cast<typename Context::Element*>(r.data), {r.ld, _1{}, 0}};
  }
};

template <class Config, class Context>
struct SinkNode<Config, Context, RowPartial> {
  static_assert(Context::kColumns == 1, "Sm90ColReduction does not know the nested N mode");
  using Node = fusion::Sm90ColReduction<cutlass::plus, cutlass::plus, cutlass::plus, 0, typename Context::Tile::FlatCta, float, float,
                                        cutlass::FloatRoundStyle::round_to_nearest, Stride<_1, _0, _0>, 4, /*EnableNullptr=*/false,
                                        /*FinalReduction=*/false, /*VisitCheckOOB=*/true>;
  static typename Node::Arguments arguments(Resource const& r) { return {r.data, 0.0f, {}}; }
};

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
  static constexpr int kSource = detail::find_first<TileLoad>(Loads{});   // the load that is the collective's C, or -1
  static constexpr int kMain = detail::find_first<TileStore>(Sinks{});    // the sink that is the collective's D, or -1
  static constexpr int kInputs = InputSlots<Program>::count;
  static constexpr int kOutputs = OutputSlots<Program>::count;
  static_assert(Loads::size <= kMaxResources && Sinks::size <= kMaxResources);

  using LoadIndices = cute::make_seq<Loads::size>;
  using SinkIndices = decltype(detail::kept_indices<kMain, Sinks::size>());
  template <int kIndex>
  using LoadAt = detail::LoadNode<Context, typename detail::At<kIndex, Loads>::type, kIndex == kSource>;
  template <int kIndex>
  using SinkAt = detail::SinkNode<Config, Context, typename detail::At<kIndex, Sinks>::type>;

  template <class L, class S>
  struct ImplOf;
  template <int... kL, int... kS>
  struct ImplOf<cute::seq<kL...>, cute::seq<kS...>> {
    using type = fusion::Sm90VisitorImpl<typename LoadAt<kL>::Node..., typename SinkAt<kS>::Node...>;
    static typename type::Arguments arguments(GemmArguments const& g) {
      return {LoadAt<kL>::arguments(g.loads[kL])..., SinkAt<kS>::arguments(g.sinks[kS])...};
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
      CUTLASS_DEVICE Array<Element, kFragment> visit(Array<Acc, kFragment> const& acc, int epi_v, int epi_m, int epi_n) {
        static_assert(kColumns == 1 || kFragment % 8 == 0, "a fragment must hold whole pairs of atoms");
        constexpr int kGroups = kFragment / kColumns;
        Array<float, kFragment> loaded[Loads::size];
        cute::for_each(LoadIndices{}, [&](auto i) CUTLASS_LAMBDA_FUNC_INLINE {
          auto values = get<i>(callbacks_tuple).visit(acc, epi_v, epi_m, epi_n);
          loaded[i] = cutlass::NumericArrayConverter<float, typename decltype(values)::Element, kFragment>{}(values);
        });

        Array<float, kGroups> results[kOutputs];
        CUTLASS_PRAGMA_UNROLL
        for (int group = 0; group < kGroups; ++group) {
          int const index[2] = {kColumns == 1 ? group : paired_index(group, 0), kColumns == 1 ? group : paired_index(group, 1)};
          float a[kColumns], in[kInputs == 0 ? 1 : kInputs], out[kOutputs];
          CUTLASS_PRAGMA_UNROLL
          for (int c = 0; c < kColumns; ++c) a[c] = acc[index[c]];
          cute::for_each(LoadIndices{}, [&](auto i) CUTLASS_LAMBDA_FUNC_INLINE {
            constexpr int kWidth = detail::At<i, Loads>::type::template slots<kColumns>;
            for (int c = 0; c < kWidth; ++c) in[InputSlots<Program>::offset(i) + c] = loaded[i][index[c]];
          });
          Program::template apply<Element>(a, in, out);
          CUTLASS_PRAGMA_UNROLL
          for (int s = 0; s < kOutputs; ++s) results[s][group] = out[s];
        }

        cute::for_each(cute::make_seq<SinkIndices::size()>{}, [&](auto position) CUTLASS_LAMBDA_FUNC_INLINE {
          constexpr int kSink = decltype(detail_sink(position))::value;
          using Sink = typename detail::At<kSink, Sinks>::type;
          auto& node = get<Loads::size + position>(callbacks_tuple);
          auto const& values = results[OutputSlots<Program>::offset(kSink)];
          if constexpr (cute::is_same_v<Sink, HalfTileStore>) {
            node.put(values, epi_v);
          } else {
            node.visit(acc, epi_v, epi_m, epi_n, values);
          }
        });

        Array<float, kFragment> main;
        if constexpr (kMain >= 0) {
          constexpr int kSlot = OutputSlots<Program>::offset(kMain);
          CUTLASS_PRAGMA_UNROLL
          for (int group = 0; group < kGroups; ++group) {
            CUTLASS_PRAGMA_UNROLL
            for (int c = 0; c < kColumns; ++c) main[kColumns == 1 ? group : paired_index(group, c)] = results[kSlot + c][group];
          }
        } else {
          main.clear();
        }
        return cutlass::NumericArrayConverter<Element, float, kFragment>{}(main);
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
  static constexpr bool kReuse = Config::kReuseSource && kSource >= 0 && kMain >= 0;
  // Delaying a store by one subtile overlaps it with the next one's arithmetic; with loads it only holds buffers longer.
  static constexpr bool kDelayStore = kSource < 0;
  using Policy = cutlass::epilogue::Sm90TmaWarpSpecialized<Config::kStagesLoad, Config::kStagesStore, kFragment, kReuse, kDelayStore>;
  using StrideD = typename Tile::StrideD;
  using Load = detail::collective::AuxLoadDescriptor<Context, StrideRow, Element>;
  using Store = detail::collective::AuxStoreDescriptor<Context, StrideD, Element>;
  using Collective = cutlass::epilogue::collective::CollectiveEpilogue<
      Policy, typename Tile::Cta, typename Tile::Epilogue, cute::conditional_t<(kSource >= 0), Element, void>, StrideD,
      cute::conditional_t<(kMain >= 0), Element, void>, StrideD, Visitor, SM90_TMA_LOAD, typename Store::SmemLayoutAtom,
      cute::conditional_t<kColumns == 1, typename Load::CopyOpS2R, SM75_U32x4_LDSM_N>, SM90_TMA_STORE, typename Store::SmemLayoutAtom,
      typename Store::CopyOpR2S, Copy_Atom<SM90_U32x4_STSM_N, cutlass::half_t>, void>;

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
    if constexpr (kSource >= 0) {
      args.ptr_C = static_cast<Element const*>(g.loads[kSource].data);
      args.dC = stride(g.loads[kSource]);
    }
    if constexpr (kMain >= 0) {
      args.ptr_D = static_cast<Element*>(g.sinks[kMain].data);
      args.dD = stride(g.sinks[kMain]);
    }
    return args;
  }
};

}  // namespace coda::sm90
