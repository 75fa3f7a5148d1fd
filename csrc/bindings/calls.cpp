#include "bindings/calls.h"

#include <cstdlib>
#include <map>
#include <mutex>

#include "bindings/checks.h"
#include "coda/registry.h"

namespace coda::bindings {

at::Tensor gemm(GemmCall const& call) { return call.a.is_cpu() ? cpu::gemm(call) : cuda::gemm(call); }

SwigluResult rstd_swiglu(at::Tensor const& h, OptionalTensor const& rstd, at::Tensor const& w_gate, at::Tensor const& w_up, bool store) {
  return h.is_cpu() ? cpu::rstd_swiglu(h, rstd, w_gate, w_up, store) : cuda::rstd_swiglu(h, rstd, w_gate, w_up, store);
}

DSwigluResult dswiglu(at::Tensor const& dy, at::Tensor const& w_down, at::Tensor const& preactivation, OptionalTensor const& rstd) {
  return dy.is_cpu() ? cpu::dswiglu(dy, w_down, preactivation, rstd) : cuda::dswiglu(dy, w_down, preactivation, rstd);
}

std::tuple<at::Tensor, at::Tensor> row_stats(at::Tensor const& x, OptionalTensor const& weight, double eps) {
  return x.is_cpu() ? cpu::row_stats(x, weight, eps) : cuda::row_stats(x, weight, eps);
}

std::tuple<at::Tensor, at::Tensor> norm_backward(at::Tensor const& dn, at::Tensor const& x, at::Tensor const& weight, at::Tensor const& rstd,
                                                 at::Tensor const& row_dot, bool want_dx, bool want_dweight) {
  return dn.is_cpu() ? cpu::norm_backward(dn, x, weight, rstd, row_dot, want_dx, want_dweight)
                     : cuda::norm_backward(dn, x, weight, rstd, row_dot, want_dx, want_dweight);
}

namespace {

std::mutex mutex;  // backward runs on autograd's threads
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

}  // namespace coda::bindings
