// The compile-time choices of one SM90 kernel. csrc/kernels.py holds the rows and the reason for each.
#pragma once

namespace coda::sm90 {

// Pingpong: two consumer warpgroups work on different output tiles, so that the epilogue of one runs under the MMAs of the other.
// Cooperative: both share one tile, which may then be twice as big, but its epilogue is exposed.
enum class Schedule { kPingpong, kCooperative };

template <int kTileM_, int kTileN_, int kTileK_, int kClusterM_, int kClusterN_, Schedule kSchedule_, int kEpilogueN_, int kStagesLoad_,
          int kStagesStore_, int kSubtilesPerStore_>
struct Config {
  static constexpr int kTileM = kTileM_, kTileN = kTileN_, kTileK = kTileK_;
  static constexpr int kClusterM = kClusterM_, kClusterN = kClusterN_;
  static constexpr Schedule kSchedule = kSchedule_;
  static constexpr bool kCooperative = kSchedule_ == Schedule::kCooperative;
  static constexpr int kEpilogueM = kCooperative ? 128 : 64;  // the rows that the consumer warpgroups of one tile cover at a time
  static constexpr int kEpilogueN = kEpilogueN_;              // columns of an epilogue subtile
  static constexpr int kStagesLoad = kStagesLoad_;            // subtiles in flight from global memory
  static constexpr int kStagesStore = kStagesStore_;          // subtiles in flight to global memory
  static constexpr int kSubtilesPerStore = kSubtilesPerStore_;  // that share a fence and a barrier, collective.hpp
};

// How the operands are stored. acc = A B^T with A [M, K] and B [N, K].
enum class Layout { kTN /* both K-major */, kNN /* B N-major */, kNT /* A M-major, B N-major */ };

}  // namespace coda::sm90
