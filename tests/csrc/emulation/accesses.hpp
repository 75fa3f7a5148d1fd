// Finds accesses to the same memory that nothing orders, at least one of which writes: what compute-sanitizer's racecheck looks for, on the CPU, and between
// blocks too.
//
// What includes this is compiled with -fsanitize=thread, so every access calls what would be the sanitizer's library; accesses.cpp, compiled without, takes its
// place. Threads of a block are ordered by the barriers of the block alone: that fibers run in turns, and that the lanes of a warp meet, orders nothing.
// Blocks of a launch are not ordered. A copy that was asked for may write at any time until it is waited for.
#pragma once

#include <cstddef>
#include <string>

namespace coda::sm80::emulation {

// Who accesses memory. epoch: the number of barriers that its block has passed.
struct Place {
  int launch = 0, block = 0, epoch = 0, thread = -1;
};
inline Place here;
inline bool running = false;  // a thread of a kernel, not what is around it

void watch(void const* begin, std::size_t bytes, bool shared);
void forget();
void note_read(void const* from, std::size_t bytes);
void note_write(void const* to, std::size_t bytes);
void begin_copy(void const* to, std::size_t bytes);
void end_copy(void const* to, std::size_t bytes);
// The races since the last call, in words, a line each.
std::string races();

}  // namespace coda::sm80::emulation
