// coda._C: the registry of compiled kernels and the record of what ran. Importing it touches no device.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/calls.h"
#include "coda/dispatch.hpp"
#include "coda/registry.h"
#include "coda_build_info.h"

namespace py = pybind11;

namespace {

py::dict describe(coda::KernelInfo const& k) {
  using namespace py::literals;
  return py::dict("key"_a = k.key, "program"_a = k.program, "arch"_a = k.arch, "layout"_a = k.layout, "dtype"_a = k.dtype,
                  "tile"_a = py::make_tuple(k.tile_m, k.tile_n, k.tile_k), "cluster"_a = py::make_tuple(k.cluster_m, k.cluster_n),
                  "stages"_a = k.stages, "shared_memory"_a = k.shared_memory, "threads"_a = k.threads, "rate"_a = k.rate,
                  "min_k"_a = k.min_k, "heads_within"_a = k.heads_within, "splits"_a = k.splits,
                  "few_rows"_a = k.few_rows);
}

py::list kernels() {
  coda::KernelTable const table = coda::kernel_table();
  py::list out;
  for (int i = 0; i < table.count; ++i) out.append(describe(*table.kernels[i]));
  return out;
}

// What a device of this compute capability would use: the best architecture, or why there is none.
py::tuple arch_for(int major, int minor) {
  coda::KernelTable const table = coda::kernel_table();
  char const* forced = coda::bindings::forced_arch();
  coda::Archs const archs = coda::archs_for(table, 10 * major + minor, forced);
  return py::make_tuple(archs.count > 0 ? py::object(py::str(archs.names[0])) : py::none(), coda::why_no_archs(table, 10 * major + minor, forced));
}

// The key of the kernel that a product of aligned operands would run; raises where none can.
std::string kernel_for(int major, int minor, std::string const& program, std::string const& layout, std::string const& dtype, std::int64_t m,
                       std::int64_t n, std::int64_t k, std::int64_t rotary_dim, std::int64_t head_dim, int sm_count) {
  coda::GemmArguments g;
  g.m = m, g.n = n, g.k = k;
  g.a.data = g.b.data = reinterpret_cast<void*>(coda::kBaseAlignment);
  g.a.ld = g.b.ld = g.b.pair_stride = coda::kAlignment;
  g.rotation.rotary_dim = rotary_dim, g.rotation.head_dim = head_dim;
  coda::KernelTable const table = coda::kernel_table();
  char const* forced = coda::bindings::forced_arch();
  std::string why = coda::why_no_archs(table, 10 * major + minor, forced);
  char const* reason = nullptr;
  auto const* kernel = coda::select_kernel(table, coda::archs_for(table, 10 * major + minor, forced), program.c_str(), layout.c_str(), dtype.c_str(), g,
                                           sm_count, &reason);
  if (kernel == nullptr) throw py::value_error(why.empty() ? reason : why);
  return kernel->key;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("kernels", &kernels, "The compiled kernels, one dict each.");
  m.def("build_info", [] { return std::string(CODA_BUILD_INFO); }, "How this extension was built, as JSON.");
  m.def("arch_for", &arch_for, py::arg("major"), py::arg("minor"), "(architecture or None, why there is none) of a device of this compute capability.");
  m.def("kernel_for", &kernel_for, "The key of the kernel that a device of this compute capability would run.", py::arg("major"), py::arg("minor"),
        py::arg("program"), py::arg("layout"), py::arg("dtype"), py::arg("m"), py::arg("n"), py::arg("k"), py::arg("rotary_dim") = 0,
        py::arg("head_dim") = 0, py::arg("sm_count") = 108);
  m.def("last_call", &coda::bindings::last_call);
  m.def("launch_count", &coda::bindings::launch_count);
  m.def("force_kernel", &coda::bindings::force_kernel, py::arg("program"), py::arg("key"));
  m.def("force_schedule", &coda::bindings::force_schedule, py::arg("swizzle"), py::arg("raster"), py::arg("splits") = 0);
}
