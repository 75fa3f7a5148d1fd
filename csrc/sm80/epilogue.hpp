// Drives any epilogue program over the accumulators of a tile.
//
// Accumulators go through shared memory, a band of rows (those of one row of warps) at a time, and come back so that a thread has 8 columns of a row, or
// 8 pairs, all passes long the same ones. So a pairing is nothing but which columns are read; tiles move by 16-byte accesses in whole lines of memory; what
// belongs to columns is loaded once; a row's sum or maximum is one over neighbouring lanes; a column's sum grows in registers and is finished in shared
// memory. All in a fixed order.
//
// Loads must not be waited for: while a block is in its epilogue, only the other blocks of its multiprocessor have products to hide them. Tiles come by
// cp.async through a ring of slots behind the band, one pass a slot; each thread copies what it reads itself. The first ones are asked for in the mainloop,
// when stages become free. So are the values of all rows (vectors, positions). What else a pass needs of its row is asked for one pass ahead.
#pragma once

#include <cmath>
#include <cstddef>
#include <type_traits>
#include <utility>

#include "coda/loads.hpp"
#include "coda/params.h"
#include "coda/sinks.hpp"
#include "programs/loss.hpp"
#include "sm80/device.hpp"
#include "sm80/layouts.hpp"

namespace coda::sm80 {

namespace detail {

constexpr int kVector = 8;  // columns or pairs a thread

// Values of different types, by index.
template <std::size_t kIndex, class T>
struct Held {
  T held;
};
template <class Indices, class... Ts>
struct Bundle;
template <std::size_t... kI, class... Ts>
struct Bundle<std::index_sequence<kI...>, Ts...> : Held<kI, Ts>... {};
template <std::size_t kIndex, class T>
CODA_D T& at(Held<kIndex, T>& held) {
  return held.held;
}

// What a thread sees: kColumns times 8 columns, from n[i] on.
template <int kColumns>
struct Place {
  int n[kColumns];
  bool inside[kColumns];
  int first_pair;  // of a tile of one value a pair
};

// The facts of a row: its number, whether it exists, its position in the tables, the column that RowSelect is to find, or -1.
struct Row {
  int m;
  bool inside;
  int position;
  int selected;
};

// Of an element in a tensor whose rows are less than 2^31 elements apart (cuda.cpp sees to that): one multiplication of 32 bits.
CODA_D std::int64_t element_offset(int m, std::int64_t ld, int n) { return std::int64_t(std::uint64_t(std::uint32_t(m)) * std::uint32_t(ld)) + n; }

// What a vector of columns (int64 [M]) has for a row, if it is one from `first` to `end` - 1; counted from `first`, else -1.
CODA_D int column_between(void const* columns, int m, int first, std::int64_t end) {
  std::int64_t const column = load_one(static_cast<std::int64_t const*>(columns) + m);
  return column >= first && column < end ? int(column - first) : -1;
}

// Neighbouring values, which may begin anywhere. The branch is around all of them: a load inside a branch of its own would be waited for at its end.
template <class Element, int kCount>
CODA_D void load_values(float* to, void const* data, bool fp32, std::int64_t first) {
  if (fp32) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = static_cast<float const*>(data)[first + i];
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = float(static_cast<Element const*>(data)[first + i]);
  }
}

// --- loads ------------------------------------------------------------------------------------------------------------------------------
// OfColumns is loaded once, OfRow for each row: by `row` from memory, or by `arrived` from shared memory, where a copy was asked for long before. `put`
// gives the program pair number `pair` of a row.
template <class Traits, class Load>
struct Reader;

struct Nothing {};

template <class Load>
constexpr bool kIsColVector = false;
template <int kAbsent>
constexpr bool kIsColVector<ColVector<kAbsent>> = true;
template <class Load>
constexpr bool kIsHeadVector = false;
template <int kAbsent>
constexpr bool kIsHeadVector<HeadVector<kAbsent>> = true;
template <class Load>
constexpr bool kIsTile = std::is_same_v<Load, TileLoad>;
template <class Load>
constexpr bool kIsCopied = kIsColVector<Load> || kIsTile<Load>;

template <class Traits>
struct Reader<Traits, Scalar> {
  struct OfColumns {
    float value;
  };
  using OfRow = Nothing;
  CODA_D static OfColumns columns(Resource const& r, GemmArguments const&, typename Traits::Place const&) { return {float(r.value)}; }
  CODA_D static OfRow row(OfColumns const&, Resource const&, typename Traits::Place const&, Row const&) { return {}; }
  CODA_D static void put(OfColumns const& c, OfRow const&, int, float* in) { in[0] = c.value; }
};

template <class Traits, int kAbsent>
struct Reader<Traits, RowVector<kAbsent>> {
  struct OfColumns {
    float value[Traits::kColumns * kVector];
  };
  using OfRow = Nothing;
  CODA_D static OfColumns columns(Resource const& r, GemmArguments const&, typename Traits::Place const& place) {
    OfColumns c;
#pragma unroll
    for (int i = 0; i < Traits::kColumns * kVector; ++i) c.value[i] = float(kAbsent);
#pragma unroll
    for (int i = 0; i < Traits::kColumns; ++i)
      if (r.data != nullptr && place.inside[i]) load_values<typename Traits::Element, kVector>(c.value + kVector * i, r.data, r.fp32, place.n[i]);
    return c;
  }
  CODA_D static OfRow row(OfColumns const&, Resource const&, typename Traits::Place const&, Row const&) { return {}; }
  CODA_D static void put(OfColumns const& c, OfRow const&, int pair, float* in) {
#pragma unroll
    for (int i = 0; i < Traits::kColumns; ++i) in[i] = c.value[Traits::index(pair, i)];
  }
};

// Beside the other vectors and the tables there are no registers for these: each thread keeps its own in shared memory, behind the band.
template <class Traits, int kAbsent>
struct Reader<Traits, HeadVector<kAbsent>> {
  static_assert(Traits::kPairing == Pairing::kHeadHalves, "vectors of heads belong to the halves of heads");
  static constexpr int kKeptBytes = 4 * Traits::kColumns * kVector * Traits::kThreads;
  struct OfColumns {
    float const* kept;
  };
  using OfRow = Nothing;
  CODA_D static OfColumns columns(Resource const& r, GemmArguments const& g, typename Traits::Place const& place, float* kept) {
    void const* const data = place.n[0] < g.rotation.query_columns ? r.data : r.second;
    bool const present = place.inside[0] && place.n[0] < g.rotation.columns;
#pragma unroll
    for (int i = 0; i < Traits::kColumns; ++i) {
      float values[kVector];
#pragma unroll
      for (int j = 0; j < kVector; ++j) values[j] = float(kAbsent);
      if (present) load_values<typename Traits::Element, kVector>(values, data, r.fp32, place.n[i] % int(g.rotation.head_dim));
#pragma unroll
      for (int j = 0; j < kVector; ++j) kept[(kVector * i + j) * Traits::kThreads + thread_index()] = values[j];
    }
    return {kept + thread_index()};
  }
  CODA_D static OfRow row(OfColumns const&, Resource const&, typename Traits::Place const&, Row const&) { return {}; }
  CODA_D static void put(OfColumns const& c, OfRow const&, int pair, float* in) {
#pragma unroll
    for (int i = 0; i < Traits::kColumns; ++i) in[i] = c.kept[Traits::index(pair, i) * Traits::kThreads];
  }
};

template <class Traits, int kAbsent>
struct Reader<Traits, ColVector<kAbsent>> {
  using OfColumns = Nothing;
  struct OfRow {
    float value;
  };
  CODA_D static OfColumns columns(Resource const&, GemmArguments const&, typename Traits::Place const&) { return {}; }
  CODA_D static void ask(Resource const& r, int m, bool inside, float* to) {
    copy_async(to, static_cast<float const*>(r.data) + m, r.data != nullptr && inside);
  }
  CODA_D static OfRow arrived(Resource const& r, void const* copy) {
    return {r.data != nullptr ? *static_cast<float const*>(copy) : float(kAbsent)};
  }
  CODA_D static void put(OfColumns const&, OfRow const& row, int, float* in) { in[0] = row.value; }
};

template <class Traits>
struct Reader<Traits, TileLoad> {
  using OfColumns = Nothing;
  struct OfRow {
    std::uint32_t words[Traits::kColumns][kVector / 2];
  };
  CODA_D static OfColumns columns(Resource const&, GemmArguments const&, typename Traits::Place const&) { return {}; }
  static constexpr int kBytes = 16 * Traits::kColumns * Traits::kThreads;  // of a pass
  // to, copy: this thread's 16 bytes, the first of kColumns.
  CODA_D static void ask(Resource const& r, typename Traits::Place const& place, int m, bool inside, unsigned char* to) {
#pragma unroll
    for (int i = 0; i < Traits::kColumns; ++i)
      copy_async(shared_address(to) + 16 * Traits::kThreads * i, static_cast<typename Traits::Element const*>(r.data) + element_offset(m, r.ld, place.n[i]),
                 r.data != nullptr && inside && place.inside[i]);
  }
  CODA_D static OfRow arrived(Resource const&, void const* copy) {
    OfRow result;
#pragma unroll
    for (int i = 0; i < Traits::kColumns; ++i) load_shared_16_bytes(result.words[i], static_cast<unsigned char const*>(copy) + 16 * Traits::kThreads * i);
    return result;
  }
  CODA_D static void put(OfColumns const&, OfRow const& row, int pair, float* in) {
#pragma unroll
    for (int i = 0; i < Traits::kColumns; ++i) {
      int const j = Traits::index(pair, i);
      in[i] = unpack<typename Traits::Element>(row.words[j / kVector][j % kVector / 2], j % 2);
    }
  }
};

// The values of 8 pairs are neighbours in a table's row. They come by 16-byte loads if the table allows it and all of them turn or none; else one by one.
template <class Traits, int kAbsent>
struct Reader<Traits, TableRow<kAbsent>> {
  static_assert(Traits::kPairing == Pairing::kHeadHalves || Traits::kPairing == Pairing::kAdjacent, "tables belong to pairs within a head");
  static constexpr bool kAdjacent = Traits::kPairing == Pairing::kAdjacent;
  using Element = typename Traits::Element;
  struct OfColumns {
    int head_dim, rotary_dim, columns;
    bool whole, turns, words;  // whole: as said above. words: what a row holds is fp32
    int pair;
  };
  struct OfRow {
    std::uint32_t words[kVector];
  };
  CODA_D static OfColumns columns(Resource const& r, GemmArguments const& g, typename Traits::Place const& place) {
    OfColumns c;
    c.head_dim = int(g.rotation.head_dim), c.rotary_dim = int(g.rotation.rotary_dim), c.columns = int(g.rotation.columns);
    int const column = place.n[0] % c.head_dim;
    c.pair = kAdjacent ? column / 2 : column;
    c.turns = place.inside[0] && place.n[0] < c.columns && column < c.rotary_dim;
    bool const aligned = reinterpret_cast<std::uintptr_t>(r.data) % 16 == 0 && r.ld % (r.fp32 ? 4 : 8) == 0;
    c.whole = aligned && (!kAdjacent || (c.head_dim % 16 == 0 && c.rotary_dim % 16 == 0));
    c.words = r.fp32 || !c.whole || !c.turns;
    return c;
  }
  CODA_D static OfRow row(OfColumns const& c, Resource const& r, typename Traits::Place const& place, Row const& row) {
    OfRow result;
#pragma unroll
    for (int i = 0; i < kVector; ++i) result.words[i] = as_word(float(kAbsent));
    if (!row.inside) return result;
    std::int64_t const begin = row.position * r.ld;
    if (c.whole) {
      char const* const from = static_cast<char const*>(r.data) + (begin + c.pair) * (r.fp32 ? 4 : 2);
      std::uint32_t half[kVector / 2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (!c.turns || (h == 1 && !r.fp32)) continue;
        load_16_bytes(half, from + 16 * h);
#pragma unroll
        for (int i = 0; i < kVector / 2; ++i) result.words[kVector / 2 * h + i] = half[i];
      }
      return result;
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      int const j = Traits::index(i, 0), n = place.n[j / kVector] + j % kVector, column = n % c.head_dim;
      float value = float(kAbsent);
      if (place.inside[j / kVector] && n < c.columns && column < c.rotary_dim)
        load_values<Element, 1>(&value, r.data, r.fp32, begin + (kAdjacent ? column / 2 : column));
      result.words[i] = as_word(value);
    }
    return result;
  }
  CODA_D static void put(OfColumns const& c, OfRow const& row, int pair, float* in) {
    in[0] = c.words ? as_float(row.words[pair]) : unpack<Element>(row.words[pair / 2], pair % 2);
  }
};

template <class Traits>
struct Reader<Traits, ColumnIs> {
  static_assert(Traits::kPairing == Pairing::kNone, "a column of each row, of pairs, has no place");
  using OfColumns = Nothing;
  struct OfRow {
    int which;
  };
  CODA_D static OfColumns columns(Resource const&, GemmArguments const&, typename Traits::Place const&) { return {}; }
  CODA_D static OfRow row(OfColumns const&, Resource const& r, typename Traits::Place const& place, Row const& row) {
    return {row.inside ? column_between(r.data, row.m, place.n[0], place.n[0] + kVector) : -1};
  }
  CODA_D static void put(OfColumns const&, OfRow const& row, int pair, float* in) { in[0] = row.which == pair ? 1.0f : 0.0f; }
};

// --- sinks ------------------------------------------------------------------------------------------------------------------------------
// `store` takes the results of 8 pairs of a row: member i of pair p is out[i][p].
template <class Traits, class Sink>
struct Writer;

template <class Traits>
struct Writer<Traits, TileStore> {
  CODA_D static void store(Resource const& r, typename Traits::Place const& place, Row const& row, float const (*out)[kVector], float*, int) {
    bool const stores = r.data != nullptr && row.inside;
#pragma unroll
    for (int i = 0; i < Traits::kColumns; ++i) {
      std::uint32_t words[kVector / 2];
#pragma unroll
      for (int w = 0; w < kVector / 2; ++w) {
        constexpr bool kAdjacent = Traits::kPairing == Pairing::kAdjacent;
        words[w] = kAdjacent ? pack<typename Traits::Element>(out[0][kVector / 2 * i + w], out[Traits::kColumns - 1][kVector / 2 * i + w])
                             : pack<typename Traits::Element>(out[i][2 * w], out[i][2 * w + 1]);
      }
      store_16_bytes(static_cast<typename Traits::Element*>(r.data) + element_offset(row.m, r.ld, place.n[i]), words,
                     stores && place.inside[i] && (r.columns == 0 || place.n[i] < r.columns));
    }
  }
};

template <class Traits>
struct Writer<Traits, HalfTileStore> {
  static_assert(Traits::kPairing == Pairing::kHalves, "half-width stores belong to programs over two halves");
  CODA_D static void store(Resource const& r, typename Traits::Place const& place, Row const& row, float const (*out)[kVector], float*, int) {
    std::uint32_t words[kVector / 2];
#pragma unroll
    for (int w = 0; w < kVector / 2; ++w) words[w] = pack<typename Traits::Element>(out[0][2 * w], out[0][2 * w + 1]);
    store_16_bytes(static_cast<typename Traits::Element*>(r.data) + element_offset(row.m, r.ld, place.first_pair), words, row.inside && place.inside[0]);
  }
};

template <class Traits>
struct Writer<Traits, RowPartial> {
  static_assert(Traits::kPairing != Pairing::kAdjacent, "a group of adjacent pairs may end outside of the matrix");
  CODA_D static void store(Resource const& r, typename Traits::Place const& place, Row const& row, float const (*out)[kVector], float*, int tile_n) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum += out[0][i];
    if (!place.inside[0]) sum = 0;
#pragma unroll
    for (int lanes = 1; lanes < Traits::kGroups; lanes *= 2) sum += from_lane_xor(sum, lanes);
    store_one(static_cast<float*>(r.data) + element_offset(tile_n, r.ld, row.m), sum, row.inside && thread_index() % Traits::kGroups == 0);
  }
};

template <class Traits>
struct Writer<Traits, ColPartial> {
  static_assert(Traits::kPairing == Pairing::kNone, "column partials of pairs have no place");
  CODA_D static void store(Resource const&, typename Traits::Place const&, Row const& row, float const (*out)[kVector], float* sums, int) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) sums[i] += row.inside ? out[0][i] : 0.0f;
  }
};

// All columns of a tile's row are at hand, so there is no online maximum: 4 lanes have a group, and a scan over groups gives each its reference and all of
// them the tile's maximum. Sums are of the exponentials of their own group, brought to the tile's maximum at the end: what a second pass reads costs no
// exponentials more. Those are left in the place of z.
template <class Traits>
struct Writer<Traits, RowSoftmax> {
  static_assert(Traits::kPairing == Pairing::kNone, "a softmax over pairs has no place");
  static constexpr int kLanes = kSoftmaxGroup / kVector;  // of a group
  CODA_D static void store(Resource const& r, typename Traits::Place const& place, Row const& row, float (*out)[kVector], float*, int tile_n) {
    float(&z)[kVector] = out[0];
    float(&q)[kVector] = out[1];
    int const planes = int(r.value), count = int(r.columns) - place.n[0];  // of columns that count, from this thread's first on
    bool const first_lane = thread_index() % Traits::kGroups == 0;
    float totals[2] = {};
    if (planes > 3) {
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        if (i < count) totals[0] += z[i], totals[1] += q[i];
    }
    float top = -INFINITY;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (i >= count) z[i] = -INFINITY, q[i] = 0;
      top = fmaxf(top, z[i]);
    }
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) top = fmaxf(top, from_lane_xor(top, lanes));
    // Of the groups up to this one, and of all.
    float own = top;
#pragma unroll
    for (int lanes = kLanes; lanes < Traits::kGroups; lanes *= 2) {
      float const other = from_lane_xor(top, lanes);
      if ((thread_index() & lanes) != 0) own = fmaxf(own, other);
      top = fmaxf(top, other);
    }
    SoftmaxSums<float> sums{own * kLog2E<float>};
    float const base = float(kExponentialShift) - finite_or_zero(sums.top);
    if (r.second != nullptr && thread_index() % kLanes == 0 && row.inside && count > 0) {
      std::int64_t const groups = (r.columns + kSoftmaxGroup - 1) / kSoftmaxGroup;
      static_cast<float*>(const_cast<void*>(r.second))[row.m * groups + place.n[0] / kSoftmaxGroup] = sums.top;
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      z[i] = exp2_(fmaf(z[i], kLog2E<float>, base));
      sums.sum += z[i];
      sums.dot = fmaf(z[i], q[i], sums.dot);
    }
    sums.rescale(top * kLog2E<float>);
    float* const to = static_cast<float*>(r.data) + tile_n * r.ld + row.m;
    bool const stores = first_lane && row.inside && count > 0;
    if (stores) to[0] = sums.top;
    float* const values[] = {&sums.sum, &sums.dot, &totals[0], &totals[1]};
#pragma unroll
    for (int p = 1; p < 5; ++p) {
      if (p >= planes) continue;
      float sum = *values[p - 1];
#pragma unroll
      for (int lanes = 1; lanes < Traits::kGroups; lanes *= 2) sum += from_lane_xor(sum, lanes);
      if (stores) to[p * r.pair_stride] = sum;
    }
  }
};

// `out` is what RowSoftmax has left.
template <class Traits>
struct Writer<Traits, Exponentials> {
  CODA_D static void store(Resource const& r, typename Traits::Place const& place, Row const& row, float const (*out)[kVector], float*, int) {
    std::uint32_t words[kVector / 2];
#pragma unroll
    for (int w = 0; w < kVector / 2; ++w) words[w] = pack<fp16>(out[0][2 * w], out[0][2 * w + 1]);
    store_16_bytes(static_cast<fp16*>(r.data) + element_offset(row.m, r.ld, place.n[0]), words, row.inside && place.inside[0]);
  }
};

template <class Traits>
struct Writer<Traits, RowSelect> {
  static_assert(Traits::kPairing == Pairing::kNone, "selecting from pairs has no place");
  CODA_D static void store(Resource const& r, typename Traits::Place const& place, Row const& row, float const (*out)[kVector], float*, int) {
    int const which = row.selected - place.n[0];
    if (row.selected < 0 || which < 0 || which >= kVector) return;
    float first = 0, second = 0;
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      if (i == which) first = out[0][i], second = out[1][i];
    float* const to = static_cast<float*>(r.data) + row.m;
    to[0] = first, to[r.pair_stride] = second;
  }
};

}  // namespace detail

template <class Program, class Config, class Element_>
struct Epilogue {
  using Loads = typename Program::Loads;
  using Sinks = typename Program::Sinks;
  static constexpr Pairing kPairing = kPairingOf<Program>;
  static constexpr int kColumns = Program::kColumns;
  static constexpr int kVector = detail::kVector;

  struct Traits {
    using Element = Element_;
    using Place = detail::Place<Program::kColumns>;
    static constexpr int kColumns = Program::kColumns, kThreads = Config::kThreads;
    static constexpr Pairing kPairing = kPairingOf<Program>;
    static constexpr int kGroups = Config::kTileN / (detail::kVector * Program::kColumns);  // threads that have a row between them
    // Where a member of a pair lies among the columns of its thread.
    CODA_D static constexpr int index(int pair, int member) { return group_index<kPairing>(pair, member); }
  };
  using Place = typename Traits::Place;
  static constexpr int kGroups = Traits::kGroups;
  static constexpr int kRowsAtOnce = Config::kThreads / kGroups, kPasses = Config::kWarpM / kRowsAtOnce;
  static constexpr int kStride = Config::kTileN + kPad;  // words between the rows of a band
  static_assert(kGroups <= 32 && 32 % kGroups == 0, "a row belongs to one warp");
  static_assert(Config::kWarpM % kRowsAtOnce == 0, "a band takes whole passes");
  static_assert(Loads::size <= kMaxResources && Sinks::size <= kMaxResources);

  template <class... Ts>
  static constexpr bool has_table(List<Ts...>) {
    return (false || ... || (std::is_same_v<Ts, TableRow<0>> || std::is_same_v<Ts, TableRow<1>>));
  }
  template <class... Ts>
  static constexpr int count_tiles(List<Ts...>) {
    return (0 + ... + int(detail::kIsTile<Ts>));
  }
  template <class... Ts>
  static constexpr int count_vectors(List<Ts...>) {
    return (0 + ... + int(detail::kIsColVector<Ts>));
  }
  template <class... Ts>
  static constexpr int count_columns(List<Ts...>) {
    return (0 + ... + int(std::is_same_v<Ts, ColPartial>));
  }
  // The first sink of a kind, or how many sinks there are.
  template <class Wanted, class... Ts>
  static constexpr int find_sink(List<Ts...>) {
    constexpr bool matches[] = {std::is_same_v<Ts, Wanted>..., true};
    int i = 0;
    while (!matches[i]) ++i;
    return i;
  }
  static constexpr bool kTables = has_table(Loads{});
  static constexpr int kColPartials = count_columns(Sinks{});
  static constexpr int kSelect = find_sink<RowSelect>(Sinks{}), kSoftmax = find_sink<RowSoftmax>(Sinks{}), kExponentials = find_sink<Exponentials>(Sinks{});
  static_assert(kExponentials == Sinks::size || kSoftmax < kExponentials, "exponentials are of a softmax before them");
  static constexpr int kBandBytes = 4 * Config::kWarpM * kStride;
  static constexpr int kSumBytes = kColPartials > 0 ? 4 * kRowsAtOnce * Config::kTileN : 0;
  static constexpr int kSharedBytes = kBandBytes > kSumBytes ? kBandBytes : kSumBytes;
  static constexpr int kRowBytes = 4 * Config::kTileM * (kTables + count_vectors(Loads{}));  // positions and vectors, not shared with the mainloop

  // The slots of tile loads lie behind the band, in the two stages of the mainloop that become free first. In the second of them, two tiles along K before the
  // end: memory answers within that time.
  static constexpr int kTiles = count_tiles(Loads{}), kAllPasses = Config::kTileM / kRowsAtOnce;
  static constexpr int kFirstFree = kBandBytes / Config::kStageBytes, kLastStage = (kFirstFree + Config::kStages - 1) % Config::kStages;
  static constexpr int kSlotBytes = 16 * kColumns * Config::kThreads * kTiles;
  static constexpr int slots_within(int stages) {
    int const stop = kFirstFree + stages < Config::kStages ? kFirstFree + stages : Config::kStages, bytes = stop * Config::kStageBytes - kBandBytes;
    int const slots = kTiles > 0 && bytes > 0 ? bytes / kSlotBytes : 0;
    return slots < kAllPasses ? slots : kAllPasses;
  }
  static constexpr int kSlots = slots_within(2);
  static_assert(kTiles == 0 || kSlots > 1, "the mainloop's memory has room for the band and some passes of tile loads");

  // Of which column of the tile, and of the matrix, this thread's groups begin.
  struct Columns {
    int local[kColumns];
    Place place;
    CODA_D Columns(GemmArguments const& g, int first_n) {
      int const group = thread_index() % kGroups, n = int(g.n);
      place.first_pair = 0;
      if constexpr (kPairing == Pairing::kHalves) {
        place.first_pair = first_n / 2 + kVector * group;
        for (int i = 0; i < 2; ++i) {
          local[i] = 2 * kVector * group + kVector * i;
          place.n[i] = place.first_pair + i * (n / 2);
          place.inside[i] = place.first_pair < n / 2;
        }
      } else {
        int begin = kColumns * kVector * group, distance = kVector;
        if constexpr (kPairing == Pairing::kHeadHalves) {
          int const half = int(g.rotation.rotary_dim) / 2, pair = kVector * group;
          begin = pair / half * 2 * half + pair % half, distance = half;
        }
        for (int i = 0; i < kColumns; ++i) {
          local[i] = begin + distance * i;
          place.n[i] = first_n + local[i];
          place.inside[i] = place.n[i] < n;
        }
      }
    }
  };

  // What the mainloop asks for on its way, see there. rows: kRowBytes for the values of all rows.
  CODA_D static void ask(GemmArguments const& g, int first_m, int first_n, unsigned char* shared, float* rows, int part) {
    if (part == 0) ask_rows(g, first_m, rows, Loads{}, std::make_index_sequence<Loads::size>{});
    if constexpr (kTiles > 0) {
      int const begin = part == 0 ? 0 : slots_within(1), end = part == 0 ? slots_within(1) : part == 1 ? kSlots : 0;
      Columns const columns(g, first_n);
#pragma unroll 1
      for (int pass = begin; pass < end; ++pass) ask_pass(g, columns.place, first_m, shared, pass, pass, Loads{}, std::make_index_sequence<Loads::size>{});
    }
  }

  // Called between two barriers. first_m and first_n: where the tile begins.
  template <int kBlocksM, int kBlocksN>
  CODA_D static void run(float const (&acc)[kBlocksM][kBlocksN][4], GemmArguments const& g, int first_m, int first_n, int warp_m, int warp_n,
                         unsigned char* shared, float const* rows) {
    run(acc, g, first_m, first_n, warp_m, warp_n, shared, rows, Loads{}, Sinks{}, std::make_index_sequence<Loads::size>{},
        std::make_index_sequence<Sinks::size>{});
  }

 private:
  template <class L>
  using Reader = detail::Reader<Traits, L>;
  template <class S>
  using Writer = detail::Writer<Traits, S>;

  // The number of loads of a kind before load `index`.
  template <class... Ls>
  static constexpr int tiles_before(int index, List<Ls...>) {
    int count = 0, i = 0;
    return ((count += i++ < index && detail::kIsTile<Ls>), ..., count);
  }
  template <class... Ls>
  static constexpr int vectors_before(int index, List<Ls...>) {
    int count = 0, i = 0;
    return ((count += i++ < index && detail::kIsColVector<Ls>), ..., count);
  }

  // Where a thread's part of a pass of a tile load is; where the vector of a load begins.
  CODA_D static unsigned char* chunk(unsigned char* shared, int slot, int load) {
    return shared + kBandBytes + kSlotBytes * slot + 16 * (kColumns * Config::kThreads * tiles_before(load, Loads{}) + thread_index());
  }
  static constexpr int vector_begin(int load) { return Config::kTileM * (kTables + vectors_before(load, Loads{})); }

  template <class... Ls, std::size_t... kL>
  CODA_D static void ask_pass(GemmArguments const& g, Place const& place, int first_m, unsigned char* shared, int pass, int slot, List<Ls...>,
                              std::index_sequence<kL...>) {
    int const m = first_m + thread_index() / kGroups + pass * kRowsAtOnce;
    bool const inside = pass < kAllPasses && m < int(g.m);
    auto const one = [&](auto load, int index) {
      using Load = decltype(load);
      if constexpr (detail::kIsTile<Load>) Reader<Load>::ask(g.loads[index], place, m, inside, chunk(shared, slot, index));
    };
    (one(Ls{}, int(kL)), ...);
  }

  template <class... Ls, std::size_t... kL>
  CODA_D static void ask_rows(GemmArguments const& g, int first_m, float* rows, List<Ls...>, std::index_sequence<kL...>) {
#pragma unroll
    for (int begin = 0; begin < Config::kTileM && kRowBytes > 0; begin += Config::kThreads) {
      int const i = begin + thread_index(), m = first_m + i;
      if (i >= Config::kTileM) break;
      bool const inside = m < int(g.m);
      if constexpr (kTables) {
        Rotation const& turn = g.rotation;
        if (turn.positions == nullptr) {
          rows[i] = as_float(std::uint32_t(m % int(turn.period)));
        } else {  // of a 64-bit number the lower half
          copy_async(rows + i, static_cast<std::int32_t const*>(turn.positions) + (turn.positions64 ? 2 * std::int64_t(m) : m), inside);
        }
      }
      auto const one = [&](auto load, int index) {
        using Load = decltype(load);
        if constexpr (detail::kIsColVector<Load>) Reader<Load>::ask(g.loads[index], m, inside, rows + vector_begin(index) + i);
      };
      (one(Ls{}, int(kL)), ...);
    }
  }

  template <int kBlocksM, int kBlocksN, class... Ls, class... Ss, std::size_t... kL, std::size_t... kS>
  CODA_D static void run(float const (&acc)[kBlocksM][kBlocksN][4], GemmArguments const& g, int first_m, int first_n, int warp_m, int warp_n,
                         unsigned char* shared, float const* rows, List<Ls...>, List<Ss...>, std::index_sequence<kL...>, std::index_sequence<kS...>) {
    using detail::at;
    using OfColumns = detail::Bundle<std::index_sequence<kL...>, typename Reader<Ls>::OfColumns...>;
    using OfRow = detail::Bundle<std::index_sequence<kL...>, typename Reader<Ls>::OfRow...>;
    constexpr int kInputs = InputSlots<Program>::count, kOutputs = OutputSlots<Program>::count;
    constexpr int kSumOf[] = {count_before<int(kS)>(Sinks{})...};  // the number of column sums before each sink

    Columns const columns(g, first_n);
    Place const& place = columns.place;
    OfColumns of_columns;
    float* const band = reinterpret_cast<float*>(shared);
    auto const load_columns = [&](auto load, auto index) {
      using Load = decltype(load);
      constexpr std::size_t kIndex = decltype(index)::value;
      if constexpr (detail::kIsHeadVector<Load>) {
        static_assert(kTiles == 0 && kBandBytes + Reader<Load>::kKeptBytes <= Config::kStages * Config::kStageBytes, "there is room behind the band");
        at<kIndex>(of_columns) = Reader<Load>::columns(g.loads[kIndex], g, place, band + kBandBytes / 4);
      } else {
        at<kIndex>(of_columns) = Reader<Load>::columns(g.loads[kIndex], g, place);
      }
    };
    (load_columns(Ls{}, std::integral_constant<std::size_t, kL>{}), ...);
    int const own_row = thread_index() / kGroups, tile_n = first_n / Config::kTileN;
    int from[kColumns];  // words
    for (int i = 0; i < kColumns; ++i) from[i] = own_row * kStride + band_offset(columns.local[i]);
    float sums[kColPartials > 0 ? kColPartials : 1][kVector] = {};

    auto const row_at = [&](int local) {
      int const m = first_m + local;
      detail::Row row{m, m < int(g.m), 0, -1};
      if constexpr (kTables) row.position = int(as_word(rows[local]));
      if constexpr (kSelect < Sinks::size) {
        if (row.inside) row.selected = detail::column_between(g.sinks[kSelect].second, m, 0, g.sinks[kSelect].columns);
      }
      return row;
    };
    auto const fetch = [&](detail::Row const& row) {
      OfRow result = {};
      auto const one = [&](auto load, auto index) {
        constexpr std::size_t kIndex = decltype(index)::value;
        if constexpr (!detail::kIsCopied<decltype(load)>) at<kIndex>(result) = Reader<decltype(load)>::row(at<kIndex>(of_columns), g.loads[kIndex], place, row);
      };
      (one(Ls{}, std::integral_constant<std::size_t, kL>{}), ...);
      return result;
    };
    auto const take = [&](OfRow& result, int slot, int local) {
      auto const one = [&](auto load, auto index) {
        using Load = decltype(load);
        constexpr std::size_t kIndex = decltype(index)::value;
        if constexpr (detail::kIsTile<Load>) at<kIndex>(result) = Reader<Load>::arrived(g.loads[kIndex], chunk(shared, slot, int(kIndex)));
        if constexpr (detail::kIsColVector<Load>) at<kIndex>(result) = Reader<Load>::arrived(g.loads[kIndex], rows + vector_begin(int(kIndex)) + local);
      };
      (one(Ls{}, std::integral_constant<std::size_t, kL>{}), ...);
    };

    int slot = 0;
#pragma unroll 1
    for (int b = 0; b < Config::kWarpsM; ++b) {
      detail::Row row = row_at(b * Config::kWarpM + own_row);
      OfRow of_row = fetch(row);
      if (warp_m == b) put_band(acc, band, warp_n);
      barrier();
#pragma unroll 1
      for (int pass = 0; pass < kPasses; ++pass) {
        detail::Row const next_row = row_at(pass + 1 < kPasses ? b * Config::kWarpM + own_row + (pass + 1) * kRowsAtOnce : own_row);
        OfRow next = {};
        if (pass + 1 < kPasses) next = fetch(next_row);
        // Of those asked for in the epilogue all but the last kSlots - 1 have arrived.
        if constexpr (kTiles > 0) wait_copies<kSlots - 1>();
        take(of_row, slot, b * Config::kWarpM + own_row + pass * kRowsAtOnce);

        float values[kColumns * kVector], out[kOutputs][kVector];
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {  // the permutation keeps the two chunks of 8 columns neighbours, in one order or the other
          load_four(values + kVector * i, band + from[i] + pass * (kRowsAtOnce * kStride));
          load_four(values + kVector * i + 4, band + (from[i] ^ 4) + pass * (kRowsAtOnce * kStride));
        }
        float a[kColumns], in[kInputs > 0 ? kInputs : 1], o[kOutputs];
        auto const gather = [&](int pair, auto count) {
#pragma unroll
          for (int i = 0; i < kColumns; ++i) a[i] = values[Traits::index(pair, i)];
          ((int(kL) < decltype(count)::value
                ? Reader<Ls>::put(at<kL>(of_columns), at<kL>(of_row), pair, in + InputSlots<Program>::offset(int(kL)))
                : void()),
           ...);
        };
        using All = std::integral_constant<int, Loads::size>;
        if constexpr (kHasHeadMean<Program>) {
          // Neighbouring lanes have a head between them.
          float mean = 0;
#pragma unroll
          for (int pair = 0; pair < kVector; ++pair) {
            gather(pair, std::integral_constant<int, Program::kHeadMeanLoads>{});
            mean += Program::template term<Element_>(a, in);
#pragma unroll
            for (int i = 0; i < kColumns; ++i) values[Traits::index(pair, i)] = a[i];
          }
          int const width = int(g.rotation.head_dim);
          for (int lanes = 1; lanes < width / (kColumns * kVector); lanes *= 2) mean += from_lane_xor(mean, lanes);
          gather(0, All{});
          float const head = Program::head(mean / float(width), place.n[0] < g.rotation.columns, in);
#pragma unroll
          for (int pair = 0; pair < kVector; ++pair) {
            gather(pair, All{});
            Program::template apply<Element_>(a, in, head, o);
#pragma unroll
            for (int s = 0; s < kOutputs; ++s) out[s][pair] = o[s];
          }
        } else {
          auto const apply = [&](auto kind) {
#pragma unroll
            for (int pair = 0; pair < kVector; ++pair) {
              gather(pair, All{});
              if constexpr (kHasKinds<Program>) in[Program::kKind] = kind();
              Program::template apply<Element_>(a, in, o);
#pragma unroll
              for (int s = 0; s < kOutputs; ++s) out[s][pair] = o[s];
            }
          };
          if constexpr (kHasKinds<Program>) {
            gather(0, All{});
            for_kind<Program>(in[Program::kKind], apply);
          } else {
            apply(0);
          }
        }
        // Sums of rows first: under the exchange between lanes others are packed and stored.
        ((std::is_same_v<Ss, RowPartial> ? Writer<Ss>::store(g.sinks[kS], place, row, out + slot_of(int(kS)), sums[kSumOf[kS]], tile_n) : void()), ...);
        ((std::is_same_v<Ss, RowPartial> ? void() : Writer<Ss>::store(g.sinks[kS], place, row, out + slot_of(int(kS)), sums[kSumOf[kS]], tile_n)), ...);
        if constexpr (kTiles > 0) {
          ask_pass(g, place, first_m, shared, b * kPasses + pass + kSlots, slot, List<Ls...>{}, std::index_sequence<kL...>{});
          commit_copies();
          slot = slot + 1 == kSlots ? 0 : slot + 1;
        }
        row = next_row, of_row = next;
      }
      barrier();
    }
    if constexpr (kTiles > 0) wait_copies<0>();  // of nothing: passes that do not exist were asked for too
    ((std::is_same_v<Ss, ColPartial> ? finish_columns(g.sinks[kS], g, first_m, first_n, sums[kSumOf[kS]], band) : void()), ...);
  }

  static constexpr int slot_of(int sink) { return OutputSlots<Program>::offset(sink == kExponentials ? kSoftmax : sink); }

  template <int kEnd, class... Ss>
  static constexpr int count_before(List<Ss...>) {
    constexpr bool sums[] = {std::is_same_v<Ss, ColPartial>...};
    int count = 0;
    for (int i = 0; i < kEnd; ++i) count += sums[i];
    return count < kColPartials ? count : 0;
  }

  template <int kBlocksM, int kBlocksN>
  CODA_D static void put_band(float const (&acc)[kBlocksM][kBlocksN][4], float* band, int warp_n) {
    int const lane = thread_index() % 32;
#pragma unroll
    for (int j = 0; j < kBlocksN; ++j) {
      float* const to = band + fragment_row(lane) * kStride + band_offset(warp_n * Config::kWarpN + 8 * j + fragment_column(lane));
#pragma unroll
      for (int i = 0; i < 2 * kBlocksM; ++i) store_two(to + 8 * i * kStride, acc[i / 2][j][i % 2 * 2], acc[i / 2][j][i % 2 * 2 + 1]);
    }
  }

  // The sums of a tile's columns, from the threads' own in the order of their rows.
  CODA_D static void finish_columns(Resource const& r, GemmArguments const& g, int first_m, int first_n, float const* sums, float* shared) {
    if (r.data == nullptr) return;
    int const row = thread_index() / kGroups, group = thread_index() % kGroups;
    for (int h = 0; h < 2; ++h) store_four(shared + row * Config::kTileN + kVector * group + 4 * h, sums + 4 * h);
    barrier();
    for (int n = thread_index(); n < Config::kTileN; n += Config::kThreads) {
      float sum = shared[n];
#pragma unroll
      for (int i = 1; i < kRowsAtOnce; ++i) sum += shared[i * Config::kTileN + n];
      if (first_n + n < g.n) static_cast<float*>(r.data)[first_m / Config::kTileM * r.ld + first_n + n] = sum;
    }
    barrier();
  }
};

}  // namespace coda::sm80
