#include "accesses.hpp"

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

namespace coda::sm80::emulation {
namespace {

constexpr std::size_t kCell = 2;  // bytes
constexpr int kSeveral = -2;

struct Cell {
  Place read, written;
  int copied_by = -1;  // a thread whose copy is under way
};
struct Range {
  std::uintptr_t begin, end;
  bool shared;
  std::vector<Cell> cells;
};
std::map<std::uintptr_t, Range> ranges;  // by their end
std::uintptr_t lowest = UINTPTR_MAX, highest = 0;
Range* last = nullptr;
std::string found;
int lines = 0;

Range* range_of(std::uintptr_t address) {
  if (address < lowest || address >= highest) return nullptr;
  if (last != nullptr && address >= last->begin && address < last->end) return last;
  auto const it = ranges.upper_bound(address);
  if (it == ranges.end() || address < it->second.begin) return nullptr;
  return last = &it->second;
}

bool unordered(Place const& before, Range const& range) {
  if (before.thread == -1 || before.launch != here.launch) return false;
  if (before.block != here.block) return !range.shared;  // shared memory is another one for each block
  return before.epoch == here.epoch && before.thread != here.thread;
}

void report(Range const& range, std::size_t cell, char const* now, char const* before, Place const& other) {
  if (++lines > 5) return;
  auto const number = [](int i) { return i == kSeveral ? std::string("several") : std::to_string(i); };
  found += std::string(range.shared ? "shared" : "global") + " memory at " + std::to_string(cell * kCell) + ": thread " + number(here.thread) + " of block " +
           number(here.block) + " " + now + " what thread " + number(other.thread) + " of block " + number(other.block) + " " + before + ", in epoch " +
           number(here.epoch) + "\n";
}

template <class F>
void for_cells(void const* p, std::size_t bytes, F f) {
  auto const address = reinterpret_cast<std::uintptr_t>(p);
  Range* const range = running ? range_of(address) : nullptr;
  if (range == nullptr) return;
  for (std::size_t i = (address - range->begin) / kCell; i < range->cells.size() && i * kCell < address + bytes - range->begin; ++i) f(*range, i, range->cells[i]);
}

void check_copy(Range const& range, std::size_t i, Cell const& cell, char const* now) {
  if (cell.copied_by >= 0) report(range, i, now, "has asked to be copied to", {here.launch, here.block, here.epoch, cell.copied_by});
}

}  // namespace

void watch(void const* begin, std::size_t bytes, bool shared) {
  auto const address = reinterpret_cast<std::uintptr_t>(begin);
  ranges[address + bytes] = Range{address, address + bytes, shared, std::vector<Cell>((bytes + kCell - 1) / kCell)};
  lowest = std::min(lowest, address), highest = std::max(highest, address + bytes);
  last = nullptr;
}

void forget() {
  ranges.clear();
  lowest = UINTPTR_MAX, highest = 0;
  last = nullptr;
}

void note_read(void const* from, std::size_t bytes) {
  for_cells(from, bytes, [](Range const& range, std::size_t i, Cell& cell) {
    check_copy(range, i, cell, "reads");
    if (unordered(cell.written, range)) report(range, i, "reads", "wrote", cell.written);
    // Of those that have read without a barrier between them, a writer need only know that there are several.
    if (cell.read.launch == here.launch && cell.read.thread != -1 && !(range.shared && cell.read.block != here.block)) {
      if (cell.read.block != here.block) {
        cell.read.block = cell.read.thread = kSeveral;
        return;
      }
      if (cell.read.epoch == here.epoch && cell.read.thread != here.thread) {
        cell.read.thread = kSeveral;
        return;
      }
    }
    cell.read = here;
  });
}

void note_write(void const* to, std::size_t bytes) {
  for_cells(to, bytes, [](Range const& range, std::size_t i, Cell& cell) {
    check_copy(range, i, cell, "writes");
    if (unordered(cell.written, range)) report(range, i, "writes", "wrote", cell.written);
    if (unordered(cell.read, range)) report(range, i, "writes", "read", cell.read);
    cell.written = here;
  });
}

void begin_copy(void const* to, std::size_t bytes) {
  note_write(to, bytes);
  for_cells(to, bytes, [](Range const&, std::size_t, Cell& cell) { cell.copied_by = here.thread; });
}

void end_copy(void const* to, std::size_t bytes) {
  for_cells(to, bytes, [](Range const&, std::size_t, Cell& cell) { cell.copied_by = -1, cell.written = here; });
}

std::string races() {
  if (lines > 5) found += "and " + std::to_string(lines - 5) + " more\n";
  lines = 0;
  return std::move(found);
}

}  // namespace coda::sm80::emulation

// What the compiler calls.
using coda::sm80::emulation::note_read;
using coda::sm80::emulation::note_write;

extern "C" {
void __tsan_init() {}
#define CODA_ACCESSES(bytes)                                                      \
  void __tsan_read##bytes(void* p) { note_read(p, bytes); }                       \
  void __tsan_write##bytes(void* p) { note_write(p, bytes); }                     \
  void __tsan_unaligned_read##bytes(void* p) { note_read(p, bytes); }             \
  void __tsan_unaligned_write##bytes(void* p) { note_write(p, bytes); }
CODA_ACCESSES(1)
CODA_ACCESSES(2)
CODA_ACCESSES(4)
CODA_ACCESSES(8)
CODA_ACCESSES(16)
#undef CODA_ACCESSES
void __tsan_read_range(void* p, std::size_t bytes) { note_read(p, bytes); }
void __tsan_write_range(void* p, std::size_t bytes) { note_write(p, bytes); }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
