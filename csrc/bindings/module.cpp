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
                  "stages"_a = k.stages, "shared_memory"_a = k.shared_memory, "threads"_a = k.threads, "rate"_a = k.rate, "min_k"_a = k.min_k);
}

py::list kernels() {
  coda::KernelTable const table = coda::kernel_table();
  py::list out;
  for (int i = 0; i < table.count; ++i) out.append(describe(*table.kernels[i]));
  return out;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("kernels", &kernels, "The compiled kernels, one dict each.");
  m.def("build_info", [] { return std::string(CODA_BUILD_INFO); }, "How this extension was built, as JSON.");
  m.def("last_call", &coda::bindings::last_call);
  m.def("launch_count", &coda::bindings::launch_count);
  m.def("force_kernel", &coda::bindings::force_kernel, py::arg("program"), py::arg("key"));
  m.def("force_schedule", &coda::bindings::force_schedule, py::arg("swizzle"), py::arg("raster"));
}
