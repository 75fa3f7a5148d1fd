// The CUDA back end: prepares operands, picks a kernel, launches it, and says what it did. Operands that TMA cannot take (base not
// aligned, rows not a multiple of 16 bytes apart, extents not a multiple of 8) are copied or padded; what has no kernel runs eagerly.
#include <ATen/ATen.h>

#include <map>
#include <mutex>

#include "bindings/calls.h"
#include "coda/dispatch.hpp"
#include "coda/registry.h"
#include "programs/plain.hpp"
#include "programs/swiglu.hpp"

#ifdef CODA_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "reduce/reduce.h"
#endif

namespace coda::bindings {

namespace {
int forced_swizzle = 0, forced_raster = 0;
}
void force_schedule(int swizzle, int raster) { forced_swizzle = swizzle, forced_raster = raster; }

namespace cuda {

#ifndef CODA_WITH_CUDA
namespace {
char const* const kNoCuda = "this build of coda has no CUDA kernels (see coda.info())";
}
at::Tensor gemm(GemmCall const& call) { return note_eager(kNoCuda), eager::gemm(call); }
SwigluResult rstd_swiglu(at::Tensor const& h, OptionalTensor const& rstd, at::Tensor const& w_gate, at::Tensor const& w_up, bool store) {
  return note_eager(kNoCuda), eager::rstd_swiglu(h, rstd, w_gate, w_up, store);
}
DSwigluResult dswiglu(at::Tensor const& dy, at::Tensor const& w_down, at::Tensor const& preactivation, OptionalTensor const& rstd) {
  return note_eager(kNoCuda), eager::dswiglu(dy, w_down, preactivation, rstd);
}
std::tuple<at::Tensor, at::Tensor> row_stats(at::Tensor const& x, OptionalTensor const& weight, double eps) {
  return note_eager(kNoCuda), eager::row_stats(x, weight, eps);
}
std::tuple<at::Tensor, at::Tensor> norm_backward(at::Tensor const& dn, at::Tensor const& x, at::Tensor const& weight, at::Tensor const& rstd,
                                                 at::Tensor const& row_dot, bool want_dx, bool want_dweight) {
  return note_eager(kNoCuda), eager::norm_backward(dn, x, weight, rstd, row_dot, want_dx, want_dweight);
}
#else
namespace {

void check(LaunchStatus const& status, std::string const& kernel) {
  TORCH_CHECK(status.ok(), "coda kernel ", kernel, " failed at ", status.stage, ": ", status.reason);
}

void* current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

struct Device {
  int major = 0, minor = 0, sm_count = 0;
};

// Attributes of the current device. torch's own header for this pulls in cuSPARSE, which not every toolkit has.
Device const& current_device() {
  static std::mutex mutex;
  static std::map<int, Device> devices;
  int index = 0;
  C10_CUDA_CHECK(cudaGetDevice(&index));
  std::lock_guard<std::mutex> lock(mutex);
  auto const [it, inserted] = devices.try_emplace(index);
  if (inserted) {
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&it->second.major, cudaDevAttrComputeCapabilityMajor, index));
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&it->second.minor, cudaDevAttrComputeCapabilityMinor, index));
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&it->second.sm_count, cudaDevAttrMultiProcessorCount, index));
  }
  return it->second;
}

char const* dtype_name(at::ScalarType t) { return t == at::kBFloat16 ? "bf16" : t == at::kHalf ? "fp16" : nullptr; }

// Why this device or dtype has no kernel at all; empty if it has.
std::string unsupported(at::Tensor const& t) {
  Device const& device = current_device();
  if (device.major != 9)
    return "no kernels were built for compute capability " + std::to_string(device.major) + "." + std::to_string(device.minor) +
           ", there are some for 9.0";
  if (!dtype_name(t.scalar_type())) return std::string("no CUDA kernels for ") + c10::toString(t.scalar_type());
  return {};
}

// --- operands -----------------------------------------------------------------------------------------------------------------------
// A matrix as a kernel reads it. `transposed`: contiguous along dimension 0.
struct Operand {
  at::Tensor tensor;
  bool transposed = false;
  Resource resource() const {
    // A single row or column has no distance to the next one: any valid stride serves.
    std::int64_t const outer = transposed ? 1 : 0, ld = tensor.stride(outer);
    return {tensor.data_ptr(), tensor.size(outer) == 1 ? round_up(tensor.size(1 - outer), kAlignment) : ld, 0, 0};
  }
};

bool readable(at::Tensor const& t, std::int64_t inner) {
  std::int64_t const outer = 1 - inner;
  if (reinterpret_cast<std::uintptr_t>(t.data_ptr()) % kBaseAlignment != 0 || t.size(inner) % kAlignment != 0 || t.size(inner) == 0)
    return false;
  if (t.stride(inner) != 1 && t.size(inner) != 1) return false;
  return t.size(outer) == 1 || (t.stride(outer) % kAlignment == 0 && t.stride(outer) >= t.size(inner));
}

// Row-major copy with the columns padded with zeros to a multiple of 8.
at::Tensor padded(at::Tensor const& t) {
  std::int64_t const columns = round_up(std::max<std::int64_t>(t.size(1), 1), kAlignment);
  if (columns == t.size(1)) return t.clone(at::MemoryFormat::Contiguous).view({t.size(0), columns});
  at::Tensor copy = at::zeros({t.size(0), columns}, t.options());
  copy.narrow(1, 0, t.size(1)).copy_(t);
  return copy;
}

at::Tensor row_major(at::Tensor const& t) {
  if (readable(t, 1)) return t;
  // clone() keeps odd strides of size-1 dimensions; a fresh tensor does not.
  if (t.size(1) % kAlignment == 0 && t.size(1) != 0) return at::empty({t.size(0), t.size(1)}, t.options()).copy_(t);
  return padded(t);
}

Operand operand(at::Tensor const& t) {
  if (readable(t, 1)) return {t, false};
  if (readable(t, 0)) return {t, true};
  return {row_major(t), false};
}

// --- kernels ------------------------------------------------------------------------------------------------------------------------
KernelInfo const& pick(char const* program, char const* layout, at::ScalarType dtype, GemmArguments const& g) {
  KernelTable const table = kernel_table();
  if (std::string const key = forced_kernel(program); !key.empty()) {
    for (int i = 0; i < table.count; ++i) {
      if (key != table.kernels[i]->key) continue;
      bool const fits = !std::strcmp(table.kernels[i]->layout, layout) && !std::strcmp(table.kernels[i]->dtype, dtype_name(dtype));
      char const* why = fits ? why_not(*table.kernels[i], g) : "it is for another layout or dtype";
      TORCH_CHECK(why == nullptr, "the forced kernel ", key, " cannot run this call: ", why);
      return *table.kernels[i];
    }
  }
  char const* reason = nullptr;
  KernelInfo const* kernel = select_kernel(table, program, layout, dtype_name(dtype), g, current_device().sm_count, &reason);
  TORCH_CHECK(kernel != nullptr, "no kernel ", program, "_", layout, "_", dtype_name(dtype), " can run M ", g.m, ", N ", g.n, ", K ", g.k, ": ",
              reason);
  return *kernel;
}

void launch(KernelInfo const& kernel, GemmArguments& g) {
  g.stream = current_stream();
  g.sm_count = current_device().sm_count;
  g.swizzle = forced_swizzle;
  g.raster = forced_raster;
  check(kernel.launch(g), kernel.key);
  note("sm90", kernel.key);
}

Resource matrix(at::Tensor const& t) { return Operand{t, false}.resource(); }
Resource vector(at::Tensor const* t) { return {t ? t->data_ptr() : nullptr, 0, 0, 0}; }
Resource scalar(double value) { return {nullptr, 0, 0, value}; }

at::Tensor columns(at::Tensor const& t, std::int64_t n) { return t.size(1) == n ? t : t.narrow(1, 0, n).contiguous(); }

}  // namespace

at::Tensor gemm(GemmCall const& call) {
  bool const has_source = get(call.source), has_bias = get(call.bias);
  std::int64_t const m = call.a.size(0), n = call.b.size(1), k = call.a.size(1);
  bool const forced = !forced_kernel(has_source ? "plain_residual" : "plain").empty();
  if (std::string const why = unsupported(call.a); !why.empty()) return note_eager(why), eager::gemm(call);
  if (m == 0 || n == 0) return at::empty({m, n}, call.a.options());
  // Nothing in the epilogue: the library, which measured about as fast in every layout (bench/results/programs.json) and takes any operand.
  // A residual it would copy into the output first, a pass that our epilogue does not need.
  if (!forced && !has_bias && !has_source && call.alpha == 1) {
    note("sm90", "library");
    return at::mm(call.a, call.b);
  }
  Operand a = operand(call.a), b = operand(call.b.t());  // b as [N, K]
  if (a.transposed && !b.transposed) a = {row_major(call.a), false};
  std::string const layout = a.transposed ? "nt" : b.transposed ? "nn" : "tn";
  // Padding along K must agree; along N it shows in the output.
  std::int64_t const k8 = round_up(std::max<std::int64_t>(k, 1), kAlignment);
  if (!a.transposed && a.tensor.size(1) != k8) a.tensor = padded(call.a);
  if (!b.transposed && b.tensor.size(1) != k8) b.tensor = padded(call.b.t());
  if (layout == "nn" && a.tensor.size(1) != b.tensor.size(1)) b = {padded(call.b.t()), false};
  std::int64_t const n8 = round_up(n, kAlignment);

  GemmArguments g;
  at::Tensor out = at::empty({m, n8}, call.a.options());
  at::Tensor const bias = has_bias ? at::constant_pad_nd(*get(call.bias), {0, n8 - n}).contiguous() : at::Tensor();
  at::Tensor source;
  g.m = m, g.n = n8, g.k = a.transposed ? k : k8;
  g.a = a.resource();
  g.b = b.resource();
  if (!b.transposed && n8 != n) {  // rows of B beyond n: their products go to columns that are cut off, but must exist
    b.tensor = at::constant_pad_nd(b.tensor, {0, 0, 0, n8 - n}).contiguous();
    g.b = b.resource();
  }
  g.loads[Plain::kAlpha] = scalar(call.alpha);
  g.loads[Plain::kBias] = vector(has_bias ? &bias : nullptr);
  g.sinks[0] = matrix(out);
  if (has_source) {
    source = row_major(*get(call.source));
    g.loads[PlainResidual::kBeta] = scalar(call.beta);
    g.loads[PlainResidual::kSource] = matrix(source);
  }
  char const* program = has_source ? "plain_residual" : "plain";
  launch(pick(program, b.transposed && !a.transposed ? "nn" : a.transposed ? "nt" : "tn", call.a.scalar_type(), g), g);
  return columns(out, n);
}

SwigluResult rstd_swiglu(at::Tensor const& h, OptionalTensor const& rstd, at::Tensor const& w_gate, at::Tensor const& w_up, bool store) {
  if (std::string const why = unsupported(h); !why.empty()) return note_eager(why), eager::rstd_swiglu(h, rstd, w_gate, w_up, store);
  std::int64_t const m = h.size(0), f = w_gate.size(0), f8 = round_up(f, kAlignment);
  SwigluResult result{at::empty({m, f8}, h.options()), at::empty(store ? at::IntArrayRef({m, 2 * f8}) : at::IntArrayRef({0}), h.options())};
  if (m == 0 || f == 0) return result;

  at::Tensor const a = row_major(h);
  at::Tensor gate = row_major(w_gate), up = row_major(w_up);
  std::int64_t const size = gate.element_size();
  std::int64_t const distance = static_cast<char const*>(up.data_ptr()) - static_cast<char const*>(gate.data_ptr());
  bool const in_place = f == f8 && gate.stride(0) == up.stride(0) && distance > 0 && distance % kBaseAlignment == 0 && distance / size < kMaxPairStride;
  std::int64_t pair_stride = distance / size;
  at::Tensor both;
  if (!in_place) {
    // The kernel reaches `up` by a positive stride from `gate`, so these two are laid behind each other.
    both = at::zeros({2 * f8, gate.size(1)}, h.options());
    both.narrow(0, 0, f).copy_(gate);
    both.narrow(0, f8, f).copy_(up);
    gate = both.narrow(0, 0, f8);
    pair_stride = f8 * both.stride(0);
  }
  at::Tensor const scale = get(rstd) ? get(rstd)->contiguous() : at::Tensor();
  GemmArguments g;
  g.m = m, g.n = 2 * f8, g.k = a.size(1);
  g.a = matrix(a);
  g.b = matrix(gate);
  g.b.pair_stride = pair_stride;
  g.loads[0] = vector(get(rstd) ? &scale : nullptr);
  Resource const product = matrix(result.product);
  if (store) {
    g.sinks[0] = matrix(result.preactivation);
    g.sinks[0].pair_stride = f8;
    g.sinks[1] = product;
  } else {
    g.sinks[0] = product;
  }
  launch(pick(store ? "rstd_swiglu_preactivation" : "rstd_swiglu", "tn", h.scalar_type(), g), g);
  if (f8 != f) {
    result.product = columns(result.product, f);
    if (store) result.preactivation = at::cat({result.preactivation.narrow(1, 0, f), result.preactivation.narrow(1, f8, f)}, 1);
  }
  return result;
}

DSwigluResult dswiglu(at::Tensor const& dy, at::Tensor const& w_down, at::Tensor const& preactivation, OptionalTensor const& rstd) {
  if (std::string const why = unsupported(dy); !why.empty()) return note_eager(why), eager::dswiglu(dy, w_down, preactivation, rstd);
  std::int64_t const m = dy.size(0), f = w_down.size(1), f8 = round_up(f, kAlignment);
  auto const statistics = dy.options().dtype(at::kFloat);
  DSwigluResult result{at::empty({m, 2 * f8}, dy.options()), at::empty({m, f8}, dy.options()), at::empty({m}, statistics)};
  if (m == 0 || f == 0) return result.row_dot.zero_(), result;

  at::Tensor a = row_major(dy), b = row_major(w_down), z = row_major(preactivation);
  if (a.size(1) != b.size(0)) b = at::constant_pad_nd(b, {0, 0, 0, a.size(1) - b.size(0)}).contiguous();
  if (f8 != f) z = at::cat({at::constant_pad_nd(preactivation.narrow(1, 0, f), {0, f8 - f}), at::constant_pad_nd(preactivation.narrow(1, f, f), {0, f8 - f})}, 1);
  at::Tensor const scale = get(rstd) ? get(rstd)->contiguous() : at::Tensor();
  auto const half = [&](at::Tensor const& t, int which) {
    Resource r = matrix(t);
    r.data = static_cast<char*>(r.data) + which * f8 * t.element_size();
    return r;
  };
  GemmArguments g;
  g.m = m, g.n = f8, g.k = a.size(1);
  g.a = matrix(a);
  g.b = matrix(b);
  g.loads[DSwiglu::kGate] = half(z, 0);
  g.loads[DSwiglu::kUp] = half(z, 1);
  g.loads[DSwiglu::kRstd] = vector(get(rstd) ? &scale : nullptr);
  g.sinks[DSwiglu::kDgate] = half(result.dz, 0);
  g.sinks[DSwiglu::kDup] = half(result.dz, 1);
  g.sinks[DSwiglu::kProduct] = matrix(result.product);
  KernelInfo const& kernel = pick("dswiglu", "nn", dy.scalar_type(), g);
  std::int64_t const tiles = ceil_div(f8, kernel.tile_n), ld = round_up(m, kernel.tile_m);
  at::Tensor const partials = at::empty({tiles, ld}, statistics);
  g.sinks[DSwiglu::kRowDot] = matrix(partials);
  launch(kernel, g);
  check(reduce::sum_row_partials(partials.const_data_ptr<float>(), ld, tiles, m, result.row_dot.data_ptr<float>(), g.stream), "sum_row_partials");
  if (f8 != f) {
    result.product = columns(result.product, f);
    result.dz = at::cat({result.dz.narrow(1, 0, f), result.dz.narrow(1, f8, f)}, 1);
  }
  return result;
}

namespace {

reduce::DType reduce_type(at::ScalarType t) {
  return t == at::kBFloat16 ? reduce::DType::kBf16 : t == at::kHalf ? reduce::DType::kFp16 : reduce::DType::kFp32;
}

bool reducible(at::Tensor const& x) { return dtype_name(x.scalar_type()) != nullptr; }

}  // namespace

std::tuple<at::Tensor, at::Tensor> row_stats(at::Tensor const& x_, OptionalTensor const& weight, double eps) {
  if (!reducible(x_)) return note_eager(unsupported(x_)), eager::row_stats(x_, weight, eps);
  at::Tensor const x = x_.stride(1) == 1 ? x_ : x_.contiguous();
  at::Tensor h, gamma, rstd = at::empty({x.size(0)}, x.options().dtype(at::kFloat));
  reduce::RowStats args{};
  args.dtype = reduce_type(x.scalar_type());
  args.weight_dtype = args.dtype;
  if (get(weight)) {
    gamma = get(weight)->contiguous();
    h = at::empty({x.size(0), x.size(1)}, x.options());
    args.weight_dtype = reduce_type(gamma.scalar_type());
    args.gamma = gamma.data_ptr();
    args.h = h.data_ptr();
  }
  if (x.size(0) == 0) return {h, rstd};
  args.m = x.size(0), args.d = x.size(1);
  args.x = x.data_ptr();
  args.x_ld = x.stride(0);
  args.rstd = rstd.data_ptr<float>();
  args.eps = float(eps);
  check(reduce::row_stats(args, current_stream()), "row_stats");
  note("sm90", "row_stats");
  return {h, rstd};
}

std::tuple<at::Tensor, at::Tensor> norm_backward(at::Tensor const& dn_, at::Tensor const& x_, at::Tensor const& weight, at::Tensor const& rstd,
                                                 at::Tensor const& row_dot, bool want_dx, bool want_dweight) {
  if (!reducible(x_)) return note_eager(unsupported(x_)), eager::norm_backward(dn_, x_, weight, rstd, row_dot, want_dx, want_dweight);
  at::Tensor const dn = dn_.contiguous(), x = x_.stride(1) == 1 ? x_ : x_.contiguous(), gamma = weight.contiguous();
  at::Tensor const dx = want_dx ? at::empty({x.size(0), x.size(1)}, x.options()) : at::Tensor();
  at::Tensor const dgamma = want_dweight ? at::zeros({x.size(1)}, gamma.options()) : at::Tensor();
  if (x.numel() == 0) return {dx, dgamma};
  reduce::NormBackward args{};
  args.dtype = reduce_type(x.scalar_type());
  args.weight_dtype = reduce_type(gamma.scalar_type());
  args.m = x.size(0), args.d = x.size(1);
  args.dn = dn.data_ptr();
  args.x = x.data_ptr();
  args.x_ld = x.stride(0);
  args.gamma = gamma.data_ptr();
  args.rstd = rstd.data_ptr<float>();
  args.row_dot = row_dot.data_ptr<float>();
  args.dx = want_dx ? dx.data_ptr() : nullptr;
  at::Tensor partials;
  if (want_dweight) {
    partials = at::empty({reduce::norm_backward_chunks(args.m, args.d), args.d}, rstd.options());
    args.partials = partials.data_ptr<float>();
    args.dgamma = dgamma.data_ptr();
  }
  check(reduce::norm_backward(args, current_stream()), "norm_backward");
  note("sm90", "norm_backward");
  return {dx, dgamma};
}
#endif

}  // namespace cuda
}  // namespace coda::bindings
