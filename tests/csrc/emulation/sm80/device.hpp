// The functions of csrc/sm80/device.hpp for the CPU: the threads of a block are fibers that take turns, each until it waits for others.
//
// Asynchronous copies arrive as late as they may, when they are waited for, or as early, at once; `late_copies` says which. A kernel that reads too
// early fails with late ones, one that overwrites too early with early ones.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "accesses.hpp"

#define CODA_D inline

namespace coda::sm80 {

struct bf16 {
  std::uint16_t bits;
  bf16() = default;
  explicit bf16(float f) {
    std::uint32_t word;
    std::memcpy(&word, &f, 4);
    bits = std::uint16_t(f != f ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16);
  }
  operator float() const {
    std::uint32_t const word = std::uint32_t(bits) << 16;
    float f;
    std::memcpy(&f, &word, 4);
    return f;
  }
};

struct fp16 {
  std::uint16_t bits;
  fp16() = default;
  explicit fp16(float f) {
    std::uint32_t word;
    std::memcpy(&word, &f, 4);
    std::uint32_t const sign = word >> 16 & 0x8000, size = word & 0x7fffffff;
    if (size > 0x7f800000) {
      bits = 0x7fff;
    } else if (size >= 0x477ff000) {
      bits = std::uint16_t(sign | 0x7c00);
    } else if (size < 0x38800000) {
      bits = std::uint16_t(sign | std::uint32_t(std::nearbyint(std::ldexp(std::abs(f), 24))));
    } else {
      bits = std::uint16_t(sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
    }
  }
  operator float() const {
    int const exponent = bits >> 10 & 31, mantissa = bits & 0x3ff;
    float const size = exponent == 31  ? (mantissa != 0 ? NAN : INFINITY)
                       : exponent == 0 ? std::ldexp(float(mantissa), -24)
                                       : std::ldexp(float(mantissa + 1024), exponent - 25);
    return (bits & 0x8000) != 0 ? -size : size;
  }
};

namespace emulation {

inline bool late_copies = true;

struct Meeting {
  int size, arrived = 0, number = 0;
};
struct Copy {
  unsigned char* to;
  std::size_t bytes;
  unsigned char value[16];
};
struct Fiber {
  ucontext_t start;
  jmp_buf paused;
  bool started = false;
  std::unique_ptr<unsigned char[]> stack;
  bool done = false;
  std::vector<Copy> copies;
  std::deque<std::vector<Copy>> groups;
};
// What the lanes of a warp show each other. Two of each take turns: a lane that is at the next meeting leaves alone what others still look at.
struct Shown {
  unsigned char const* addresses[32];
  std::uint32_t words[32][6];
  float values[32];
};
struct Warp {
  Meeting meeting{32};
  Shown shown[2];
};

inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline Meeting block{0};
inline jmp_buf scheduler;
inline int current = 0;
inline std::function<void()> body;

inline void fail(char const* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

// swapcontext would ask the system for the mask of signals each time, which takes longer than all else here.
inline void pause() {
  running = false;
  if (_setjmp(fibers[std::size_t(current)].paused) == 0) _longjmp(scheduler, 1);
}
inline void resume() {
  Fiber& fiber = fibers[std::size_t(current)];
  if (_setjmp(scheduler) != 0) return;
  running = true;
  if (fiber.started) _longjmp(fiber.paused, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

inline void meet(Meeting& m) {
  if (++m.arrived == m.size) {
    m.arrived = 0, ++m.number;
  } else {
    for (int const number = m.number; m.number == number;) pause();
  }
  here.epoch = block.number;
}

inline void enter() {
  body();
  Fiber& fiber = fibers[std::size_t(current)];
  if (!fiber.copies.empty() || !fiber.groups.empty()) fail("a thread ends before its copies have arrived");
  fiber.done = true, running = false;
  _longjmp(scheduler, 1);
}

// Runs `f` in every thread of a block.
inline void run_block(int launch, int number, int threads, std::function<void()> f) {
  constexpr std::size_t kStack = 1 << 18;
  body = std::move(f);
  fibers = std::vector<Fiber>(std::size_t(threads));
  warps = std::vector<Warp>(std::size_t(threads / 32));
  block = {threads};
  for (Fiber& fiber : fibers) {
    fiber.stack.reset(new unsigned char[kStack]);
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get(), fiber.start.uc_stack.ss_size = kStack;
    makecontext(&fiber.start, enter, 0);
  }
  for (bool going = true; going;) {
    going = false;
    for (current = 0; current < threads; ++current) {
      if (fibers[std::size_t(current)].done) continue;
      going = true;
      here = {launch, number, block.number, current};
      resume();
    }
  }
  for (Warp const& warp : warps)
    if (warp.meeting.arrived != 0) fail("a warp's threads did not stay together");
}

// Shows with `show`, and waits until the whole warp has.
template <class F>
Shown const& exchange(F show) {
  Warp& warp = warps[std::size_t(current / 32)];
  Shown& shown = warp.shown[warp.meeting.number % 2];
  show(shown, current % 32);
  meet(warp.meeting);
  return shown;
}

}  // namespace emulation

using SharedAddress = unsigned char*;

inline int thread_index() { return emulation::current; }
inline void barrier() { emulation::meet(emulation::block); }
inline SharedAddress shared_address(void const* p) { return static_cast<unsigned char*>(const_cast<void*>(p)); }

__attribute__((no_sanitize("thread"))) inline void deliver(std::vector<emulation::Copy> const& copies) {
  for (auto const& copy : copies) std::memcpy(copy.to, copy.value, copy.bytes);
}
inline void copy_async(SharedAddress to, void const* from, bool valid, std::size_t bytes) {
  if (reinterpret_cast<std::uintptr_t>(to) % bytes != 0 || (valid && reinterpret_cast<std::uintptr_t>(from) % bytes != 0)) emulation::fail("a copy is not aligned");
  emulation::Copy copy{to, bytes, {}};
  if (valid) emulation::note_read(from, bytes), std::memcpy(copy.value, from, bytes);
  emulation::begin_copy(to, bytes);
  emulation::fibers[std::size_t(emulation::current)].copies.push_back(copy);
}
inline void copy_async(SharedAddress to, void const* from, bool valid) { copy_async(to, from, valid, 16); }
inline void copy_async(float* to, void const* from, bool valid) { copy_async(shared_address(to), from, valid, 4); }
inline void commit_copies() {
  auto& fiber = emulation::fibers[std::size_t(emulation::current)];
  if (!emulation::late_copies) deliver(fiber.copies);
  fiber.groups.push_back(std::move(fiber.copies));
  fiber.copies.clear();
}
template <int kPending>
inline void wait_copies() {
  auto& groups = emulation::fibers[std::size_t(emulation::current)].groups;
  for (; groups.size() > kPending; groups.pop_front()) {
    for (auto const& copy : groups.front()) emulation::end_copy(copy.to, copy.bytes);
    if (emulation::late_copies) deliver(groups.front());
  }
}

template <bool kTransposed>
inline void load_matrices(std::uint32_t (&r)[4], SharedAddress from) {
  int const lane = emulation::current % 32;
  if (reinterpret_cast<std::uintptr_t>(from) % 16 != 0) emulation::fail("a row of a matrix is not aligned");
  auto const& warp = emulation::exchange([&](emulation::Shown& shown, int lane) { shown.addresses[lane] = from; });
  for (int m = 0; m < 4; ++m) {
    std::uint16_t two[2];
    for (int i = 0; i < 2; ++i) {
      int const row = kTransposed ? lane % 4 * 2 + i : lane / 4, column = kTransposed ? lane / 4 : lane % 4 * 2 + i;
      unsigned char const* const at = warp.addresses[8 * m + row] + 2 * column;
      emulation::note_read(at, 2), std::memcpy(&two[i], at, 2);
    }
    r[m] = two[0] | std::uint32_t(two[1]) << 16;
  }
}

inline float as_float(std::uint32_t word) {
  float f;
  std::memcpy(&f, &word, 4);
  return f;
}
inline std::uint32_t as_word(float value) {
  std::uint32_t word;
  std::memcpy(&word, &value, 4);
  return word;
}
template <class Element>
std::uint32_t pack(float a, float b) {
  return Element(a).bits | std::uint32_t(Element(b).bits) << 16;
}
template <class Element>
float unpack(std::uint32_t word, int which) {
  Element e;
  e.bits = std::uint16_t(word >> (16 * which));
  return float(e);
}

// Its accesses are to memory of its own, and many.
template <class Element>
__attribute__((no_sanitize("thread"))) void multiply_shown(float (&d)[4], emulation::Shown const& warp, int lane) {
  for (int v = 0; v < 4; ++v) {
    int const row = lane / 4 + 8 * (v / 2), column = lane % 4 * 2 + v % 2;
    for (int k = 0; k < 16; ++k) {
      int const quad = k % 8 / 2;
      float const x = unpack<Element>(warp.words[row % 8 * 4 + quad][row / 8 + k / 8 * 2], k % 2);
      float const y = unpack<Element>(warp.words[column * 4 + quad][4 + k / 8], k % 2);
      d[v] += x * y;
    }
  }
}
template <class Element>
void multiply(float (&d)[4], std::uint32_t const (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  auto const& warp = emulation::exchange([&](emulation::Shown& shown, int lane) {
    for (int i = 0; i < 4; ++i) shown.words[lane][i] = a[i];
    shown.words[lane][4] = b0, shown.words[lane][5] = b1;
  });
  multiply_shown<Element>(d, warp, emulation::current % 32);
}

inline float from_lane_xor(float value, int mask) {
  return emulation::exchange([&](emulation::Shown& shown, int lane) { shown.values[lane] = value; }).values[emulation::current % 32 ^ mask];
}

template <class To, class From>
void copy_aligned(To* to, From const* from, std::size_t bytes, void const* memory) {
  if (reinterpret_cast<std::uintptr_t>(memory) % bytes != 0) emulation::fail("an access is not aligned");
  emulation::note_read(from, bytes), emulation::note_write(to, bytes), std::memcpy(to, from, bytes);
}
inline float load_one(float const* from) { return *from; }
inline std::int64_t load_one(std::int64_t const* from) { return *from; }
inline void load_16_bytes(std::uint32_t (&r)[4], void const* from) { copy_aligned(r, static_cast<unsigned char const*>(from), 16, from); }
inline void store_16_bytes(void* to, std::uint32_t const (&r)[4], bool valid) {
  if (valid) copy_aligned(static_cast<unsigned char*>(to), r, 16, to);
}
inline void store_one(float* to, float value, bool valid) {
  if (valid) *to = value;
}
inline void load_shared_16_bytes(std::uint32_t (&r)[4], void const* from) { load_16_bytes(r, from); }
inline void load_four(float* to, float const* from) { copy_aligned(to, from, 16, from); }
inline void store_four(float* to, float const* from) { copy_aligned(to, from, 16, to); }
inline void store_two(float* to, float a, float b) {
  float const two[2] = {a, b};
  copy_aligned(to, two, 8, to);
}

}  // namespace coda::sm80
