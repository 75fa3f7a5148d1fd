// What accesses.hpp finds, and what it leaves alone. Prints what is not as expected.
#include <cstdio>

#include "sm80/device.hpp"

namespace emulation = coda::sm80::emulation;
using namespace coda::sm80;

namespace {

constexpr int kThreads = 64;
alignas(16) float shared[4 * kThreads];
alignas(16) float global[4 * kThreads];
int failures = 0;

template <class F>
void expect(bool race, char const* what, F kernel, int blocks = 1, int launches = 1) {
  emulation::watch(shared, sizeof shared, true);
  emulation::watch(global, sizeof global, false);
  for (int launch = 0; launch < launches; ++launch)
    for (int block = 0; block < blocks; ++block) emulation::run_block(launch, block, kThreads, [&] { kernel(block); });
  emulation::forget();
  std::string const found = emulation::races();
  if (found.empty() == race) ++failures, std::printf("%s: %s\n", what, race ? "no race was found" : found.c_str());
}

}  // namespace

int main() {
  auto const mine = [] { return shared + thread_index(); };
  auto const other = [] { return shared + (thread_index() + 1) % kThreads; };
  volatile float sink;
  for (bool late : {false, true}) {
    emulation::late_copies = late;
    expect(false, "a barrier between writing and reading", [&](int) { *mine() = 1, barrier(), sink = *other(); });
    expect(true, "none", [&](int) { *mine() = 1, sink = *other(); });
    expect(true, "one that comes too early", [&](int) { barrier(), *mine() = 1, sink = *other(); });
    expect(true, "lanes that meet without one", [&](int) { *mine() = from_lane_xor(1, 1), from_lane_xor(1, 1), sink = *other(); });
    expect(true, "reading, then writing", [&](int) { sink = *other(), *mine() = 1; });
    expect(false, "a barrier between reading and writing", [&](int) { sink = *other(), barrier(), *mine() = 1; });
    expect(true, "writing the same", [&](int) { shared[0] = 1; });
    expect(false, "reading the same", [&](int) { sink = shared[0]; });
    expect(false, "a copy that is waited for", [&](int) { copy_async(mine(), global, true), commit_copies(), wait_copies<0>(), barrier(), sink = *other(); });
    expect(true, "a copy that the others do not wait for", [&](int) { copy_async(mine(), global, true), commit_copies(), wait_copies<0>(), sink = *other(); });
    expect(true, "a copy that comes behind the barrier", [&](int) { copy_async(mine(), global, true), commit_copies(), barrier(), sink = *other(), wait_copies<0>(); });
    expect(true, "a copy that its thread does not wait for", [&](int) { copy_async(mine(), global, true), commit_copies(), sink = *mine(), wait_copies<0>(); });
    expect(true, "a copy of zeros over what is still read", [&](int) { sink = *other(), copy_async(mine(), nullptr, false), commit_copies(), wait_copies<0>(); });
    expect(true, "two of a ring", [&](int) {
      copy_async(mine(), global, true), commit_copies(), copy_async(mine() + kThreads, global, true), commit_copies();
      wait_copies<1>(), sink = mine()[kThreads], wait_copies<0>();
    });
    expect(false, "the first of a ring", [&](int) {
      copy_async(mine(), global, true), commit_copies(), copy_async(mine() + kThreads, global, true), commit_copies();
      wait_copies<1>(), sink = *mine(), wait_copies<0>();
    });
    expect(false, "shared memory of another block", [&](int) { *mine() = 1; }, 2);
    expect(true, "blocks that write the same", [&](int) { global[thread_index()] = 1; }, 2);
    expect(true, "a block that reads what others write", [&](int block) { block == 0 ? void(global[0] = thread_index() == 0) : void(sink = global[0]); }, 2);
    expect(false, "blocks that read the same", [&](int) { sink = global[0]; }, 3);
    expect(true, "a block that writes what two have read", [&](int block) { block < 2 ? void(sink = global[0]) : void(global[thread_index()] = 1); }, 3);
    expect(false, "a launch behind another", [&](int) { global[thread_index()] = 1; }, 1, 2);
  }
  return failures > 0;
}
