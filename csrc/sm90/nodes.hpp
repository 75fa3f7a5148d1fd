// Visitor nodes: one for each kind of load and sink. All of them obey CUTLASS's node protocol (see
// cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp); NodeBase holds the parts of it that do nothing here.
//
// A thread's fragment of a subtile is fixed by the wgmma layout (coda/layouts.hpp), so nodes that move vectors or partial sums work out rows
// and columns themselves instead of carrying coordinate tensors; tiles move by bulk copies through shared memory.
#pragma once

#include "coda/layouts.hpp"
#include "coda/params.h"
#include "coda/sinks.hpp"
#include "programs/loss.hpp"
#include "cutlass/epilogue/fusion/sm90_visitor_load_tma_warpspecialized.hpp"
#include "cutlass/epilogue/fusion/sm90_visitor_store_tma_warpspecialized.hpp"
#include "cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp"
#include "cutlass/gemm/collective/builders/sm90_common.inl"

namespace coda::sm90 {

namespace fusion = cutlass::epilogue::fusion;
using namespace cute;
using cutlass::Array;

struct NodeBase {
  struct SharedStorage {};

  template <class ProblemShape, class Arguments>
  static bool can_implement(ProblemShape const&, Arguments const&) {
    return true;
  }
  template <class ProblemShape, class Arguments>
  static size_t get_workspace_size(ProblemShape const&, Arguments const&) {
    return 0;
  }
  template <class ProblemShape, class Arguments>
  static cutlass::Status initialize_workspace(ProblemShape const&, Arguments const&, void*, cudaStream_t, cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }
  CUTLASS_DEVICE bool is_producer_load_needed() const { return false; }
  CUTLASS_DEVICE bool is_C_load_needed() const { return false; }
  template <class... Args>
  CUTLASS_DEVICE auto get_producer_load_callbacks(fusion::detail::ProducerLoadArgs<Args...> const&) {
    return fusion::detail::EmptyProducerLoadCallbacks{};
  }
};

// A node whose arguments are its parameters.
template <class Arguments_>
struct PlainNode : NodeBase {
  using Arguments = Arguments_;
  using Params = Arguments_;
  template <class ProblemShape>
  static constexpr Params to_underlying_arguments(ProblemShape const&, Arguments const& args, void*) {
    return args;
  }
};

// The facts of one tile that vector nodes need. The scheduler rounds the grid of tiles up, to whole clusters and swizzles: a tile may lie wholly
// outside the matrix. Bulk stores are clipped there; nodes that store by themselves must look.
template <class Config, Pairing kPairing>
struct TileGeometry {
  static constexpr int kThreads = 2 * Config::kEpilogueM;  // consumers of a tile
  static constexpr int kSubtilesM = Config::kTileM / Config::kEpilogueM;
  static constexpr int kSubtilesN = Config::kTileN / Config::kEpilogueN;
  static constexpr int kFragment = Config::kEpilogueN / 2;  // values a thread, a subtile
  int thread, row, column, m, n;  // row, column: where the tile begins (columns of a half for kHalves); m, n: the matrix ends (likewise)

  template <class Args>
  CUTLASS_DEVICE explicit TileGeometry(Args const& args) : thread(args.thread_idx) {
    auto const [M, N, K, L] = args.problem_shape_mnkl;
    auto const [tile_m, tile_n, tile_k, tile_l] = args.tile_coord_mnkl;
    m = int(M), row = int(tile_m) * Config::kTileM;
    if constexpr (kPairing == Pairing::kHalves) {
      // The N coordinate of a nested mode is (0, 0, tile): CUTLASS's scheduler counts tiles in the outermost mode.
      n = int(size(N)) / 2, column = int(get<2>(tile_n)) * (Config::kTileN / 2);
    } else {
      n = int(N), column = int(tile_n) * Config::kTileN;
    }
  }
  CUTLASS_DEVICE int row_of(int epi_m, int v) const { return row + epi_m * Config::kEpilogueM + fragment_row(thread, v); }
  // The column of accumulator position `p` of the tile, and the half it belongs to (0 unless kHalves).
  CUTLASS_DEVICE int column_at(int p) const { return column + (kPairing == Pairing::kHalves ? 8 * (p / 16) + p % 8 : p); }
  CUTLASS_DEVICE static int half_at(int p) { return kPairing == Pairing::kHalves ? (p / 8) % 2 : 0; }
  CUTLASS_DEVICE bool ragged_n() const { return column + Config::kTileN / (kPairing == Pairing::kHalves ? 2 : 1) > n; }
  CUTLASS_DEVICE bool ragged_m() const { return row + Config::kTileM > m; }
};

// What a node that works out rows and columns itself does with one tile: the callbacks of a consumer's thread, which know the tile, the node's arguments, and
// kFloats values in shared memory.
template <class Config, Pairing kPairing, class Arguments_, int kFloats_ = 0>
struct TileCallbacks : fusion::detail::EmptyConsumerStoreCallbacks {
  using Arguments = Arguments_;
  using Geometry = TileGeometry<Config, kPairing>;
  static constexpr int kFloats = kFloats_;
  Geometry geometry;
  Arguments const* params;
  float* smem;
  CUTLASS_DEVICE TileCallbacks(Geometry const& g, Arguments const* p, float* s) : geometry(g), params(p), smem(s) {}
};

// The node itself.
template <class Callbacks>
struct TileNode : PlainNode<typename Callbacks::Arguments> {
  using Arguments = typename Callbacks::Arguments;
  static constexpr int kFloats = Callbacks::kFloats;
  struct Values {
    alignas(16) float values[kFloats == 0 ? 1 : kFloats];
  };
  using SharedStorage = cute::conditional_t<kFloats == 0, NodeBase::SharedStorage, Values>;
  CUTLASS_HOST_DEVICE TileNode() {}
  CUTLASS_HOST_DEVICE TileNode(Arguments const& p, SharedStorage const& storage) : params(&p) {
    if constexpr (kFloats > 0) smem = const_cast<float*>(storage.values);
  }
  Arguments const* params = nullptr;
  float* smem = nullptr;
  template <bool, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(fusion::detail::ConsumerStoreArgs<Args...> const& args) {
    return Callbacks(typename Callbacks::Geometry(args), params, smem);
  }
};

// --- loads -----------------------------------------------------------------------------------------------------------------------

struct ScalarArguments {
  float value = 0;
};

// A number from the kernel's parameters, read once a kernel.
struct ScalarNode : PlainNode<ScalarArguments> {
  CUTLASS_HOST_DEVICE ScalarNode() {}
  CUTLASS_HOST_DEVICE ScalarNode(Params const& params, SharedStorage const&) : value(params.value) {}
  float value = 0;

  struct Callbacks : fusion::detail::EmptyConsumerStoreCallbacks {
    float value;
    CUTLASS_DEVICE explicit Callbacks(float v) : value(v) {}
    template <class Acc, int kFragment>
    CUTLASS_DEVICE auto visit(Array<Acc, kFragment> const&, int, int, int) {
      Array<float, kFragment> result;
      result.fill(value);
      return result;
    }
  };
  template <bool, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(fusion::detail::ConsumerStoreArgs<Args...> const&) {
    return Callbacks(value);
  }
};

struct VectorArguments {
  void const* data = nullptr;
  bool wide = false;        // fp32, else the storage type
  int64_t pair_stride = 0;  // kHalves: from the first half's first value to the second's
};

// A thread's values of a subtile from those of its columns in shared memory: both rows of an atom see the same two columns.
template <int kFragment>
CUTLASS_DEVICE Array<float, kFragment> read_columns(float const* values, int thread) {
  Array<float, kFragment> result;
  CUTLASS_PRAGMA_UNROLL
  for (int v = 0; v < kFragment; v += 4) {
    float2 const two = *reinterpret_cast<float2 const*>(values + fragment_column(thread, v));
    result[v] = result[v + 2] = two.x, result[v + 1] = result[v + 3] = two.y;
  }
  return result;
}

// N values broadcast over rows: once a tile from global to shared memory, as fp32, and from there where they are used.
template <class Config, Pairing kPairing, class Element, int kAbsent>
struct RowVectorCallbacks : TileCallbacks<Config, kPairing, VectorArguments, Config::kTileN> {
  using Base = typename RowVectorCallbacks::TileCallbacks;
  using Base::Base, Base::geometry, Base::params, Base::smem;
  using typename Base::Geometry;
  CUTLASS_DEVICE void begin() {
    if (params->data == nullptr) return;
    for (int p = geometry.thread; p < Config::kTileN; p += Geometry::kThreads) {
      int const column = geometry.column_at(p);
      int64_t const at = column + geometry.half_at(p) * params->pair_stride;
      float value = 0;
      if (column < geometry.n) value = params->wide ? static_cast<float const*>(params->data)[at] : float(static_cast<Element const*>(params->data)[at]);
      smem[p] = value;
    }
  }
  CUTLASS_DEVICE bool begin_sync_needed() const { return params->data != nullptr; }
  template <class Acc, int kFragment>
  CUTLASS_DEVICE auto visit(Array<Acc, kFragment> const&, int, int, int epi_n) {
    if (params->data != nullptr) return read_columns<kFragment>(smem + epi_n * Config::kEpilogueN, geometry.thread);
    Array<float, kFragment> result;
    result.fill(float(kAbsent));
    return result;
  }
};

struct HeadVectorArguments {
  void const* first = nullptr;
  void const* second = nullptr;
  bool wide = false;  // fp32, else the storage type
  Rotation rotation;
};

// Two vectors of one value for each column of a head; the subtile is a head. Both go to shared memory, as fp32, once a tile.
template <class Config, Pairing kPairing, class Element, int kAbsent>
struct HeadVectorCallbacks : TileCallbacks<Config, kPairing, HeadVectorArguments, 2 * Config::kEpilogueN> {
  using Base = typename HeadVectorCallbacks::TileCallbacks;
  using Base::Base, Base::geometry, Base::params, Base::smem;
  using typename Base::Geometry;
  static_assert(kPairing == Pairing::kHeadHalves, "a subtile must be a head");
  static constexpr int kHead = Config::kEpilogueN;
  CUTLASS_DEVICE void begin() {
    for (int p = geometry.thread; p < 2 * kHead; p += Geometry::kThreads) {
      void const* data = p < kHead ? params->first : params->second;
      smem[p] = params->wide ? static_cast<float const*>(data)[p % kHead] : float(static_cast<Element const*>(data)[p % kHead]);
    }
  }
  CUTLASS_DEVICE bool begin_sync_needed() const { return true; }
  CUTLASS_DEVICE int begin_of(int epi_n) const { return geometry.column + epi_n * Config::kEpilogueN; }
  CUTLASS_DEVICE bool inside(int epi_n) const { return begin_of(epi_n) < params->rotation.columns; }
  template <class Acc, int kFragment>
  CUTLASS_DEVICE auto visit(Array<Acc, kFragment> const&, int, int, int epi_n) {
    if (inside(epi_n)) return read_columns<kFragment>(smem + (begin_of(epi_n) < params->rotation.query_columns ? 0 : kHead), geometry.thread);
    Array<float, kFragment> result;
    result.fill(float(kAbsent));
    return result;
  }
};

// M values (fp32) broadcast over columns: a thread has two rows of each subtile.
template <class Config, Pairing kPairing, int kAbsent>
struct ColVectorCallbacks : TileCallbacks<Config, kPairing, VectorArguments> {
  using Base = typename ColVectorCallbacks::TileCallbacks;
  using Base::Base, Base::geometry, Base::params;
  using typename Base::Geometry;
  float values[Geometry::kSubtilesM][2];
  CUTLASS_DEVICE void begin() {
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2 * Geometry::kSubtilesM; ++j) values[j / 2][j % 2] = float(kAbsent);
    if (params->data == nullptr) return;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2 * Geometry::kSubtilesM; ++j) {
      // Rows beyond the last one are never stored, so they may read any value.
      int const row = cute::min(geometry.row_of(j / 2, 2 * (j % 2)), geometry.m - 1);
      values[j / 2][j % 2] = __ldg(static_cast<float const*>(params->data) + row);
    }
  }
  template <class Acc, int kFragment>
  CUTLASS_DEVICE auto visit(Array<Acc, kFragment> const&, int, int epi_m, int) {
    Array<float, kFragment> result;
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < kFragment; ++v) result[v] = values[epi_m][(v / 2) % 2];
    return result;
  }
};

struct TableArguments {
  void const* data = nullptr;
  int64_t ld = 0;
  bool wide = false;  // fp32, else the storage type
  Rotation rotation;
};

// A value of the table row that belongs to the row's position, for each pair of columns; straight from global memory.
template <class Config, Pairing kPairing, class Element, int kAbsent>
struct TableCallbacks : TileCallbacks<Config, kPairing, TableArguments> {
  using Base = typename TableCallbacks::TileCallbacks;
  using Base::Base, Base::geometry, Base::params;
  using typename Base::Geometry;
  static_assert(kPairing == Pairing::kHeadHalves || kPairing == Pairing::kAdjacent, "tables belong to pairs within a head");
  // A subtile is what turns of a head, so all subtiles of the same rows want the same values. If there are several, the values are held for all of them, and
  // asked for long before they are used. Else there are no registers for that, and they are asked for a part at a time.
  static constexpr bool kHold = kPairing == Pairing::kHeadHalves, kEarly = kHold && Geometry::kSubtilesN > 1;
  int64_t offsets[Geometry::kSubtilesM][2];             // of the table rows of this thread's rows
  uint32_t held[kHold ? Geometry::kFragment / 2 : 1];  // bits of the values

  CUTLASS_DEVICE void begin() {
    Rotation const& turn = params->rotation;
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < Geometry::kSubtilesM; ++e) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        int const row = geometry.row_of(e, 2 * i);
        int64_t position = 0;
        if (row < geometry.m)
          position = turn.positions == nullptr ? row % int(turn.period)
                     : turn.positions64        ? static_cast<int64_t const*>(turn.positions)[row]
                                               : static_cast<int const*>(turn.positions)[row];
        offsets[e][i] = position * params->ld;
      }
    }
    if constexpr (kEarly) hold<Geometry::kFragment / 2>(0, 0);
  }
  // The next rows' values are on their way while the last subtile of these is stored.
  CUTLASS_DEVICE void postreduce(int epi_m, int epi_n, int, bool) {
    if constexpr (kEarly) {
      if (epi_n == Geometry::kSubtilesN - 1 && epi_m + 1 < Geometry::kSubtilesM) hold<Geometry::kFragment / 2>(0, epi_m + 1);
    }
  }
  template <int kCount>
  CUTLASS_DEVICE void ask(int first, int epi_m) {
    if constexpr (kHold && !kEarly) hold<kCount>(first, epi_m);
  }
  template <int kCount>
  CUTLASS_DEVICE void hold(int first, int epi_m) {
    if (geometry.column >= params->rotation.columns) {
      // Not used, but an earlier subtile's would take registers until here.
      CUTLASS_PRAGMA_UNROLL
      for (int v = first; v < first + kCount; ++v) held[v] = 0;
    } else {
      params->wide ? hold<float, kCount>(first, epi_m) : hold<Element, kCount>(first, epi_m);
    }
  }
  template <class Value, int kCount>
  CUTLASS_DEVICE void hold(int first, int epi_m) {
    auto const* table = static_cast<Value const*>(params->data);
    CUTLASS_PRAGMA_UNROLL
    for (int v = first; v < first + kCount; v += 2) {
      Value const* p = table + offsets[epi_m][(v / 2) % 2] + fragment_column(geometry.thread, v);
      if constexpr (sizeof(Value) == 4) {
        uint2 const two = __ldg(reinterpret_cast<uint2 const*>(p));
        held[v] = two.x, held[v + 1] = two.y;
      } else {
        held[v] = __ldg(reinterpret_cast<uint16_t const*>(p)), held[v + 1] = __ldg(reinterpret_cast<uint16_t const*>(p + 1));
      }
    }
  }
  // Without a branch, which would keep bits and values at a time.
  CUTLASS_DEVICE float held_value(int v) const {
    if constexpr (cute::is_same_v<Element, cutlass::bfloat16_t>) {
      return __uint_as_float(held[v] << (params->wide ? 0 : 16));
    } else {
      return params->wide ? __uint_as_float(held[v]) : float(Element::bitcast(uint16_t(held[v])));
    }
  }
  // The branches on dtype and on turning are taken once a subtile, around straight runs of loads: a load inside a branch of its own would be
  // waited for at its end.
  template <class Value, int kFragment>
  CUTLASS_DEVICE void load(Array<float, kFragment>& result, int epi_m, int epi_n) const {
    auto const* table = static_cast<Value const*>(params->data);
    Rotation const& turn = params->rotation;
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < kFragment / 4; ++k) {  // eight columns, which do not straddle two heads
      int const first = geometry.column + epi_n * Config::kEpilogueN + 8 * k, column = first % int(turn.head_dim) + 2 * (geometry.thread % 4);
      bool const turns = first < turn.columns && column < turn.rotary_dim;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        float const value = float(table[offsets[epi_m][i] + (turns ? column / 2 : 0)]);
        result[4 * k + 2 * i] = turns ? value : float(kAbsent);
      }
    }
  }
  template <class Acc, int kFragment>
  CUTLASS_DEVICE auto visit(Array<Acc, kFragment> const&, int, int epi_m, int epi_n) {
    Array<float, kFragment> result;
    if constexpr (kHold) {
      // The subtile is one group of rotary_dim columns, and all of it turns or none.
      Rotation const& turn = params->rotation;
      int const begin = geometry.column + epi_n * Config::kEpilogueN;
      if (begin >= turn.columns || begin % int(turn.head_dim) >= turn.rotary_dim) {
        result.fill(float(kAbsent));
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < kFragment / 2; ++v) result[v] = held_value(v);
      }
    } else {
      params->wide ? load<float>(result, epi_m, epi_n) : load<Element>(result, epi_m, epi_n);
    }
    return result;
  }
};

struct ColumnIsArguments {
  int64_t const* columns = nullptr;
};

// 1 in one column of each row. Most tiles hold none of their rows' columns, which a thread finds out once.
template <class Config>
struct ColumnIsCallbacks : TileCallbacks<Config, Pairing::kNone, ColumnIsArguments> {
  using Base = typename ColumnIsCallbacks::TileCallbacks;
  using Base::Base, Base::geometry, Base::params;
  using typename Base::Geometry;
  bool here = false;  // one of this thread's rows has its column in this tile
  CUTLASS_DEVICE void begin() { here = any_in_tile(geometry, params->columns); }
  CUTLASS_DEVICE static bool any_in_tile(Geometry const& geometry, int64_t const* columns) {
    bool any = false;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2 * Geometry::kSubtilesM; ++j) {
      int const row = geometry.row_of(j / 2, 2 * (j % 2));
      int64_t const column = row < geometry.m ? __ldg(columns + row) - geometry.column : -1;
      any = any || (column >= 0 && column < Config::kTileN);
    }
    return any;
  }
  template <class Acc, int kFragment>
  CUTLASS_DEVICE auto visit(Array<Acc, kFragment> const&, int, int epi_m, int epi_n) {
    Array<float, kFragment> result;
    result.clear();
    if (here) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        int const row = cute::min(geometry.row_of(epi_m, 2 * i), geometry.m - 1);
        int64_t const column = __ldg(params->columns + row) - geometry.column - epi_n * Config::kEpilogueN;
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < kFragment; ++v)
          if ((v / 2) % 2 == i) result[v] = column == fragment_column(geometry.thread, v) ? 1.0f : 0.0f;
      }
    }
    return result;
  }
};

struct TileArguments {
  void* data = nullptr;
  int64_t ld = 0;
  int64_t columns = 0;  // of the tensor, if fewer than N
};

// What tile loads and stores share: the shapes of a tile of the full width of the accumulator, or of half of it. The epilogue of a kHalves
// program runs over subtiles of kEpilogueM x (8, 2, kEpilogueN / 16); the value of a pair belongs to the half-width tensor's subtile of
// kEpilogueM x kEpilogueN / 2 with the same subtile number, in standard fragment order (layouts.hpp).
template <class Config, class Element, int kStages, bool kHalf>
struct TileShapes {
  static constexpr int kColumns = Config::kEpilogueN / (kHalf ? 2 : 1);
  static_assert(kColumns % 16 == 0, "a subtile is moved by ldmatrix / stmatrix x4, which take 16 columns");
  using EpilogueTile = Shape<Int<Config::kEpilogueM>, Int<kColumns>>;
  using CtaTile = Shape<Int<Config::kTileM>, Int<Config::kTileN / (kHalf ? 2 : 1)>>;
  using SmemAtom =
      decltype(cutlass::gemm::collective::detail::ss_smem_selector<GMMA::Major::K, Element, Int<Config::kEpilogueM>, Int<kColumns>>());
  using SmemLayoutTma = decltype(tile_to_shape(SmemAtom{}, EpilogueTile{}, Step<_1, _2>{}));
  using SmemLayout = decltype(tile_to_shape(SmemLayoutTma{}, append<3>(EpilogueTile{}, Int<kStages>{}), Step<_1, _2, _3>{}));
  using StrideMNL = Stride<int64_t, _1, int64_t>;

  struct SharedStorage {
    alignas(cutlass::detail::alignment_for_swizzle(SmemLayout{})) cutlass::array_aligned<Element, cute::size(SmemLayout{})> smem;
  };

  template <class CopyOp>
  using Tma = decltype(make_tma_copy(
      CopyOp{}, make_tensor(make_gmem_ptr(static_cast<Element*>(nullptr)), repeat_like(StrideMNL{}, int32_t(0)), StrideMNL{}), SmemLayoutTma{}));
  template <class CopyOp, class ProblemShape>
  static Tma<CopyOp> make_tma(ProblemShape const& problem_shape, TileArguments const& args) {
    auto const [M, N, K, L] = problem_shape;
    int const columns = args.columns > 0 ? int(args.columns) : int(cute::size(N)) / (kHalf ? 2 : 1);
    // A tensor that is not there still needs a valid descriptor: nothing reads or writes through it.
    if (args.data == nullptr) return Tma<CopyOp>{};
    auto gmem = make_tensor(make_gmem_ptr(static_cast<Element*>(args.data)), make_layout(make_shape(M, columns, L), StrideMNL{args.ld, _1{}, 0}));
    return make_tma_copy(CopyOp{}, gmem, SmemLayoutTma{});
  }
  // The subtiles of the current tile in global memory: (EPI_M, EPI_N, #EPI_M, #EPI_N)
  template <class Tma, class Args>
  CUTLASS_DEVICE static auto subtiles(Tma const& tma, Args const& args) {
    auto const [M, N, K, L] = args.problem_shape_mnkl;
    auto const [m, n, k, l] = args.tile_coord_mnkl;
    auto tensor = tma.get_tma_tensor(make_shape(M, int(cute::size(N)) / (kHalf ? 2 : 1), L));
    if constexpr (kHalf) {
      return flat_divide(local_tile(tensor, CtaTile{}, make_coord(m, get<2>(n), l)), EpilogueTile{});
    } else {
      return flat_divide(local_tile(tensor, CtaTile{}, make_coord(m, n, l)), EpilogueTile{});
    }
  }
};

// An M x N tile, in the collective's load pipeline. Null: zeros, and no load.
template <class Config, class Element>
struct TileLoadNode : NodeBase {
  static constexpr int kStages = Config::kStagesLoad;
  using Shapes = TileShapes<Config, Element, kStages, false>;
  using SharedStorage = typename Shapes::SharedStorage;
  using Arguments = TileArguments;
  using Tma = typename Shapes::template Tma<SM90_TMA_LOAD>;
  struct Params {
    Tma tma;
    bool present;
  };
  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const& problem_shape, Arguments const& args, void*) {
    return {Shapes::template make_tma<SM90_TMA_LOAD>(problem_shape, args), args.data != nullptr};
  }
  CUTLASS_HOST_DEVICE TileLoadNode() {}
  CUTLASS_HOST_DEVICE TileLoadNode(Params const& p, SharedStorage const& storage) : params(&p), smem(const_cast<Element*>(storage.smem.data())) {}
  Params const* params = nullptr;
  Element* smem = nullptr;
  CUTLASS_DEVICE bool is_producer_load_needed() const { return params->present; }

  template <class GTensor, class STensor>
  struct ProducerCallbacks : fusion::detail::EmptyProducerLoadCallbacks {
    GTensor bGS_gTile;  // (G2S,G2S_M,G2S_N,EPI_M,EPI_N)
    STensor bGS_sTile;  // (G2S,G2S_M,G2S_N,PIPE)
    Params const* params;
    CUTLASS_DEVICE ProducerCallbacks(GTensor const& g, STensor const& s, Params const* p) : bGS_gTile(g), bGS_sTile(s), params(p) {}
    CUTLASS_DEVICE void step(uint64_t* full_barrier, int epi_m, int epi_n, int load_iteration, bool issue_tma_load) {
      if (!issue_tma_load || !params->present) return;
      constexpr uint32_t kBytes = uint32_t(cute::size(typename Shapes::SmemLayoutTma{}) * sizeof(Element));
      cutlass::arch::ClusterTransactionBarrier::expect_transaction(full_barrier, kBytes);
      copy(params->tma.with(*full_barrier), bGS_gTile(_, _, _, epi_m, epi_n), bGS_sTile(_, _, _, load_iteration % kStages));
    }
  };
  template <class... Args>
  CUTLASS_DEVICE auto get_producer_load_callbacks(fusion::detail::ProducerLoadArgs<Args...> const& args) {
    auto gTile_epi = Shapes::subtiles(params->tma, args);
    auto sTile_epi = make_tensor(make_smem_ptr(smem), typename Shapes::SmemLayout{});  // (EPI_M,EPI_N,PIPE)
    auto block_g2s = params->tma.get_slice(_0{});
    auto bGS_gTile = block_g2s.partition_S(gTile_epi);
    auto bGS_sTile = block_g2s.partition_D(sTile_epi);
    return ProducerCallbacks<decltype(bGS_gTile), decltype(bGS_sTile)>(bGS_gTile, bGS_sTile, params);
  }

  template <class RTensor, class TiledS2R, class STensorS2R>
  struct Callbacks : fusion::detail::EmptyConsumerStoreCallbacks {
    RTensor tC_rTile;  // (CPY,CPY_M,CPY_N)
    TiledS2R tiled_s2r;
    STensorS2R tSR_sTile;  // (S2R,S2R_M,S2R_N,PIPE)
    bool present;
    CUTLASS_DEVICE Callbacks(RTensor const& r, TiledS2R const& t, STensorS2R const& s, bool p) : tC_rTile(r), tiled_s2r(t), tSR_sTile(s), present(p) {}
    CUTLASS_DEVICE void previsit(int, int, int load_iteration, bool) {
      if (!present) return clear(tC_rTile);
      auto tSR_rTile = make_tensor(tC_rTile.data(), layout(tiled_s2r.get_slice(0).retile_S(RTensor{})));
      copy(tiled_s2r, tSR_sTile(_, _, _, load_iteration % kStages), tSR_rTile);
    }
    template <class Acc, int kFragment>
    CUTLASS_DEVICE auto visit(Array<Acc, kFragment> const&, int epi_v, int, int) {
      return recast<Array<Element, kFragment>>(coalesce(tC_rTile))(epi_v);
    }
  };
  template <bool kReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(fusion::detail::ConsumerStoreArgs<Args...> const& args) {
    static_assert(kReferenceSrc, "the SM90 TMA epilogue partitions by the source of its register-to-shared copy");
    auto tiled_s2r = make_tiled_copy_S(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, args.tiled_copy);
    auto thread_s2r = tiled_s2r.get_slice(args.thread_idx);
    auto sTile = as_position_independent_swizzle_tensor(make_tensor(make_smem_ptr(smem), typename Shapes::SmemLayout{}));
    auto tSR_sTile = thread_s2r.partition_S(sTile);
    auto tC_rTile = make_tensor<Element>(take<0, 3>(shape(args.tiled_copy.get_slice(args.thread_idx).partition_S(sTile))));
    return Callbacks<decltype(tC_rTile), decltype(tiled_s2r), decltype(tSR_sTile)>(tC_rTile, tiled_s2r, tSR_sTile, params->present);
  }
};

// --- sinks -----------------------------------------------------------------------------------------------------------------------

// A tile stored beside the collective's D, or the half-width output of a kHalves program. Null: nothing is stored.
template <class Config, class Element, bool kHalf>
struct TileStoreNode : NodeBase {
  static constexpr int kStages = Config::kStagesStore;
  using Shapes = TileShapes<Config, Element, kStages, kHalf>;
  using SharedStorage = typename Shapes::SharedStorage;
  using Arguments = TileArguments;
  using Tma = typename Shapes::template Tma<SM90_TMA_STORE>;
  struct Params {
    Tma tma;
    bool present;
  };
  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const& problem_shape, Arguments const& args, void*) {
    return {Shapes::template make_tma<SM90_TMA_STORE>(problem_shape, args), args.data != nullptr};
  }
  CUTLASS_HOST_DEVICE TileStoreNode() {}
  CUTLASS_HOST_DEVICE TileStoreNode(Params const& p, SharedStorage const& storage) : params(&p), smem(const_cast<Element*>(storage.smem.data())) {}
  Params const* params = nullptr;
  Element* smem = nullptr;

  template <class RTensor, class TiledR2S, class STensorR2S, class STensorS2G, class GTensorS2G>
  struct Callbacks : fusion::detail::EmptyConsumerStoreCallbacks {
    RTensor tC_rTile;  // (CPY,CPY_M,CPY_N)
    TiledR2S tiled_r2s;
    STensorR2S tRS_sTile;  // (R2S,R2S_M,R2S_N,PIPE)
    STensorS2G bSG_sTile;  // (S2G,S2G_M,S2G_N,PIPE)
    GTensorS2G bSG_gTile;  // (S2G,S2G_M,S2G_N,EPI_M,EPI_N)
    Params const* params;

    CUTLASS_DEVICE Callbacks(RTensor const& r, TiledR2S t, STensorR2S const& rs, STensorS2G const& sg, GTensorS2G const& gg, Params const* p)
        : tC_rTile(r), tiled_r2s(t), tRS_sTile(rs), bSG_sTile(sg), bSG_gTile(gg), params(p) {}

    template <int kValues>
    CUTLASS_DEVICE void put(Array<float, kValues> const& values, int epi_v, int, int) {
      auto fragments = recast<Array<Element, kValues>>(coalesce(tC_rTile));
      fragments(epi_v) = cutlass::NumericArrayConverter<Element, float, kValues>{}(values);
    }
    CUTLASS_DEVICE void postreduce(int, int, int store_iteration, bool issue_smem_store) {
      if (issue_smem_store && params->present) {
        auto tRS_rTile = make_tensor(tC_rTile.data(), layout(tiled_r2s.get_slice(0).retile_S(RTensor{})));
        copy(tiled_r2s, tRS_rTile, tRS_sTile(_, _, _, store_iteration % kStages));
      }
    }
    CUTLASS_DEVICE void tma_store(int epi_m, int epi_n, int store_iteration, bool issue_tma_store) {
      if (issue_tma_store && params->present)
        copy(params->tma, bSG_sTile(_, _, _, store_iteration % kStages), bSG_gTile(_, _, _, epi_m, epi_n));
    }
  };

  template <bool kReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(fusion::detail::ConsumerStoreArgs<Args...> const& args) {
    static_assert(kReferenceSrc, "the SM90 TMA epilogue partitions by the source of its register-to-shared copy");
    auto gTile_epi = Shapes::subtiles(params->tma, args);
    auto tiled_r2s = make_tiled_copy_S(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, args.tiled_copy);
    auto thread_r2s = tiled_r2s.get_slice(args.thread_idx);
    auto sTile = as_position_independent_swizzle_tensor(make_tensor(make_smem_ptr(smem), typename Shapes::SmemLayout{}));  // (EPI_M,EPI_N,PIPE)
    auto tRS_sTile = thread_r2s.partition_D(sTile);
    auto tC_rTile = make_tensor<Element>(take<0, 3>(shape(thread_r2s.partition_S(gTile_epi))));
    auto block_s2g = params->tma.get_slice(_0{});
    auto bSG_sTile = block_s2g.partition_S(sTile);
    auto bSG_gTile = block_s2g.partition_D(gTile_epi);
    return Callbacks<decltype(tC_rTile), decltype(tiled_r2s), decltype(tRS_sTile), decltype(bSG_sTile), decltype(bSG_gTile)>(
        tC_rTile, tiled_r2s, tRS_sTile, bSG_sTile, bSG_gTile, params);
  }
};

struct PartialArguments {
  float* data = nullptr;
  int64_t ld = 0;
};

// Sums along the columns of a tile: each thread its columns in order, then the four threads of a row by a butterfly.
template <class Config, Pairing kPairing>
struct RowPartialCallbacks : TileCallbacks<Config, kPairing, PartialArguments> {
  using Base = typename RowPartialCallbacks::TileCallbacks;
  using Base::Base, Base::geometry, Base::params;
  using typename Base::Geometry;
  bool ragged = geometry.ragged_n();
  float sums[Geometry::kSubtilesM][2] = {};

  template <int kValues>
  CUTLASS_DEVICE void put(Array<float, kValues> const& values, int, int epi_m, int epi_n) {
    if (!ragged) {
      CUTLASS_PRAGMA_UNROLL
      for (int g = 0; g < kValues; ++g) sums[epi_m][row_bit(g)] += values[g];
    } else {
      // Beyond the last column the operands read as zero, but what the program makes of zeros is its own affair.
      CUTLASS_PRAGMA_UNROLL
      for (int g = 0; g < kValues; ++g) {
        int const p = epi_n * Config::kEpilogueN + fragment_column(geometry.thread, fragment_index<kPairing, Geometry::kFragment>(g, 0));
        if (geometry.column_at(p) < geometry.n) sums[epi_m][row_bit(g)] += values[g];
      }
    }
  }
  CUTLASS_DEVICE static constexpr int row_bit(int group) { return (fragment_index<kPairing, Geometry::kFragment>(group, 0) / 2) % 2; }
  CUTLASS_DEVICE void end() {
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < Geometry::kSubtilesM; ++e) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        float sum = sums[e][i];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        int const row = geometry.row_of(e, 2 * i);
        if (geometry.thread % 4 == 0 && row < geometry.m && geometry.column < geometry.n) params->data[tile() * params->ld + row] = sum;
      }
    }
  }
  CUTLASS_DEVICE int64_t tile() const { return geometry.column / (Config::kTileN / (kPairing == Pairing::kHalves ? 2 : 1)); }
};

// Sums along the rows of a tile, one row of partials a warp: 16 rows of every subtile. Each thread adds its rows in order, then the eight
// threads of a column by a butterfly. Null: nothing is stored.
template <class Config>
struct ColPartialCallbacks : TileCallbacks<Config, Pairing::kNone, PartialArguments> {
  using Base = typename ColPartialCallbacks::TileCallbacks;
  using Base::Base, Base::geometry, Base::params;
  using typename Base::Geometry;
  static constexpr int kWarps = Geometry::kThreads / 32;
  bool ragged = geometry.ragged_m();
  float sums[Geometry::kFragment / 2];  // of the columns of a subtile

  template <int kValues>
  CUTLASS_DEVICE void put(Array<float, kValues> const& values, int, int epi_m, int epi_n) {
    if (params->data == nullptr) return;
    if (epi_m == 0) {
      CUTLASS_PRAGMA_UNROLL
      for (float& s : sums) s = 0;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < kValues; ++v)
      if (!ragged || geometry.row_of(epi_m, v) < geometry.m) sums[2 * (v / 4) + v % 2] += values[v];
    if (epi_m != Geometry::kSubtilesM - 1) return;
    int64_t const line = int64_t(geometry.row / Config::kTileM) * kWarps + geometry.thread / 32;
    CUTLASS_PRAGMA_UNROLL
    for (int s = 0; s < Geometry::kFragment / 2; ++s) {
      float sum = sums[s];
      CUTLASS_PRAGMA_UNROLL
      for (int lane = 4; lane < 32; lane *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
      int const column = geometry.column_at(epi_n * Config::kEpilogueN + fragment_column(geometry.thread, 4 * (s / 2) + s % 2));
      if (geometry.thread % 32 < 4 && column < geometry.n && geometry.row < geometry.m) params->data[line * params->ld + column] = sum;
    }
  }
};

struct SoftmaxArguments {
  float* data = nullptr;
  int64_t ld = 0;
  int64_t plane = 0;  // from one plane to the next
  int planes = 0;
  int64_t columns = 0;
  float* references = nullptr;
};

// Online along the subtiles of a tile, of which each is a group. The maximum of a subtile is shared by the four threads of a row at once, since the
// exponentials of all of them are relative to it; sums meet at the end of the tile.
template <class Config, int kMaxPlanes>
struct RowSoftmaxCallbacks : TileCallbacks<Config, Pairing::kNone, SoftmaxArguments> {
  using Base = typename RowSoftmaxCallbacks::TileCallbacks;
  using Base::Base, Base::geometry, Base::params;
  using typename Base::Geometry;
  static_assert(Config::kEpilogueN == kSoftmaxGroup, "a subtile must be a group of columns");
  static constexpr int kRows = 2 * Geometry::kSubtilesM;
  bool ragged = geometry.column + Config::kTileN > int(params->columns);
  float values[kRows][kMaxPlanes];  // of each row of this thread's
  CUTLASS_DEVICE void begin() {
    CUTLASS_PRAGMA_UNROLL
    for (int row = 0; row < kRows; ++row) {
      CUTLASS_PRAGMA_UNROLL
      for (int p = 0; p < kMaxPlanes; ++p) values[row][p] = p == 0 ? -INFINITY : 0.0f;
    }
  }

  // The exponentials of z. Tiles at the right edge have a path of their own. Registers are scarce: z is not changed, since q may be the same.
  template <int kValues>
  CUTLASS_DEVICE Array<float, kValues> put(Array<float, kValues> const& z, Array<float, kValues> const& q, int, int epi_m, int epi_n) {
    static_assert(kValues == Geometry::kFragment, "a fragment must cover its subtile");
    return ragged ? exponentials<true>(z, q, epi_m, epi_n) : exponentials<false>(z, q, epi_m, epi_n);
  }
  template <bool kRagged, int kValues>
  CUTLASS_DEVICE Array<float, kValues> exponentials(Array<float, kValues> const& z, Array<float, kValues> const& q, int epi_m, int epi_n) {
    Array<float, kValues> result;
    auto const counts = [&](int v) CUTLASS_LAMBDA_FUNC_INLINE { return !kRagged || column_of(epi_n, v) < params->columns; };
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      int const row = 2 * epi_m + i;
      auto const for_row = [&](auto f) CUTLASS_LAMBDA_FUNC_INLINE {
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < kValues; ++v)
          if ((v / 2) % 2 == i) f(v);
      };
      if constexpr (kMaxPlanes > 3) {
        if (params->planes > 3) {
          float totals[2] = {};
          for_row([&](int v) CUTLASS_LAMBDA_FUNC_INLINE {
            if (counts(v)) totals[0] += z[v], totals[1] += q[v];
          });
          values[row][3] += totals[0], values[row][4] += totals[1];
        }
      }
      SoftmaxSums<float> sums{values[row][0], values[row][1], values[row][2]};
      float top = -INFINITY;
      for_row([&](int v) CUTLASS_LAMBDA_FUNC_INLINE { top = counts(v) ? fmaxf(top, z[v]) : top; });
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      sums.rescale(fmaxf(sums.top, top * kLog2E<float>));
      float const base = float(kExponentialShift) - finite_or_zero(sums.top);
      int const m = geometry.row_of(epi_m, 2 * i), first = geometry.column + epi_n * Config::kEpilogueN;
      if (params->references != nullptr && geometry.thread % 4 == 0 && m < geometry.m && first < params->columns) {
        int64_t const groups = (params->columns + kSoftmaxGroup - 1) / kSoftmaxGroup;
        params->references[m * groups + first / kSoftmaxGroup] = sums.top;
      }
      auto const add = [&](auto with_dot) CUTLASS_LAMBDA_FUNC_INLINE {
        for_row([&](int v) CUTLASS_LAMBDA_FUNC_INLINE {
          float const e = exp2_(fmaf(z[v], kLog2E<float>, base));
          result[v] = counts(v) ? e : 0.0f;
          sums.sum += result[v];
          if constexpr (with_dot) sums.dot = fmaf(result[v], counts(v) ? q[v] : 0.0f, sums.dot);
        });
      };
      // Branched over as a whole: where no dot is wanted, q need not be held.
      if (params->planes > 2) {
        add(true_type{});
      } else {
        add(false_type{});
      }
      values[row][0] = sums.top, values[row][1] = sums.sum, values[row][2] = sums.dot;
    }
    return result;
  }
  CUTLASS_DEVICE int column_of(int epi_n, int v) const { return geometry.column_at(epi_n * Config::kEpilogueN + fragment_column(geometry.thread, v)); }
  CUTLASS_DEVICE void end() {
    CUTLASS_PRAGMA_UNROLL
    for (int row = 0; row < kRows; ++row) {
      int const m = geometry.row_of(row / 2, 2 * (row % 2));
      CUTLASS_PRAGMA_UNROLL
      for (int p = 0; p < kMaxPlanes; ++p) {
        if (p >= params->planes) break;
        float sum = values[row][p];
        if (p > 0) {
          sum += __shfl_xor_sync(0xffffffffu, sum, 1);
          sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        }
        if (geometry.thread % 4 == 0 && m < geometry.m && geometry.column < params->columns)
          params->data[p * params->plane + int64_t(geometry.column / Config::kTileN) * params->ld + m] = sum;
      }
    }
  }
};

struct SelectArguments {
  float* data = nullptr;
  int64_t plane = 0;  // from the first value to the second
  int64_t const* columns = nullptr;
  int64_t count = 0;  // of columns
};

template <class Config>
struct RowSelectCallbacks : TileCallbacks<Config, Pairing::kNone, SelectArguments> {
  using Base = typename RowSelectCallbacks::TileCallbacks;
  using Base::Base, Base::geometry, Base::params;
  using typename Base::Geometry;
  bool here = false;
  CUTLASS_DEVICE void begin() { here = ColumnIsCallbacks<Config>::any_in_tile(geometry, params->columns); }

  template <int kValues>
  CUTLASS_DEVICE void put(Array<float, kValues> const& first, Array<float, kValues> const& second, int, int epi_m, int epi_n) {
    if (!here) return;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      int const row = geometry.row_of(epi_m, 2 * i);
      int64_t const wanted = row < geometry.m ? __ldg(params->columns + row) : -1;
      int64_t const column = wanted - geometry.column - epi_n * Config::kEpilogueN;
      if (column < 0 || column >= Config::kEpilogueN || wanted >= params->count) continue;
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < kValues; ++v)
        if ((v / 2) % 2 == i && column == fragment_column(geometry.thread, v)) {
          params->data[row] = first[v];
          params->data[params->plane + row] = second[v];
        }
    }
  }
};

}  // namespace coda::sm90
