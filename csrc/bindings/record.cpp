// What ran, and which kernel to force.
#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>

#include "bindings/calls.h"
#include "coda/registry.h"

namespace coda::bindings {
namespace {

std::mutex mutex;  // backward runs on autograd's threads
std::atomic<std::int64_t> launches{0};
std::string last_backend, last_kernels, eager_reason;
std::map<std::string, std::string> forced;

}  // namespace

void begin_call() {
  std::lock_guard<std::mutex> lock(mutex);
  last_backend.clear();
  last_kernels.clear();
  eager_reason.clear();
}

void note(char const* backend, std::string const& what) {
  ++launches;
  std::lock_guard<std::mutex> lock(mutex);
  last_backend = backend;
  if (!what.empty()) last_kernels += (last_kernels.empty() ? "" : "+") + what;
}

void note_eager(std::string const& reason) {
  char const* strict = std::getenv("CODA_STRICT");
  TORCH_CHECK(strict == nullptr || std::string(strict) != "1", "CODA_STRICT=1 and no kernel can run this call: ", reason);
  std::lock_guard<std::mutex> lock(mutex);
  if (eager_reason.empty()) eager_reason = reason;
}

std::string last_call() {
  std::lock_guard<std::mutex> lock(mutex);
  if (!eager_reason.empty()) return "eager:" + eager_reason;
  return last_kernels.empty() ? last_backend : last_backend + ":" + last_kernels;
}

std::int64_t launch_count() { return launches; }

void force_kernel(std::string const& program, std::string const& key) {
  if (!key.empty()) {
    KernelTable const table = kernel_table();
    bool found = false;
    std::string near;
    for (int i = 0; i < table.count; ++i) {
      if (program != table.kernels[i]->program) continue;
      found |= key == table.kernels[i]->key;
      near += (near.empty() ? "" : ", ") + std::string(table.kernels[i]->key);
    }
    TORCH_CHECK_VALUE(found, "no kernel ", key, " of program ", program, " was built, there is: ", near.empty() ? "none" : near);
  }
  std::lock_guard<std::mutex> lock(mutex);
  if (key.empty()) {
    forced.erase(program);
  } else {
    forced[program] = key;
  }
}

std::string forced_kernel(std::string const& program) {
  std::lock_guard<std::mutex> lock(mutex);
  auto const it = forced.find(program);
  return it == forced.end() ? std::string() : it->second;
}

char const* forced_arch() { return std::getenv("CODA_FORCE_ARCH"); }

}  // namespace coda::bindings
