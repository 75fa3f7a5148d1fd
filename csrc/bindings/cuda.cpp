// The CUDA back end: prepares operands, picks a kernel, launches it, and says what it did. Operands that TMA cannot take (base not
// aligned, rows not a multiple of 16 bytes apart, extents not a multiple of 8) are copied or padded.
#include <ATen/ATen.h>

#include <map>
#include <mutex>

#include "bindings/launch.h"
#include "coda/dispatch.hpp"
#include "coda/registry.h"

#ifdef CODA_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "reduce/reduce.h"
#endif

namespace coda::bindings {

namespace {
int forced_swizzle = 0, forced_raster = 0, forced_splits = 0;
}
void force_schedule(int swizzle, int raster, int splits) { forced_swizzle = swizzle, forced_raster = raster, forced_splits = splits; }

namespace cuda {

#ifndef CODA_WITH_CUDA
namespace {
char const* const kNoCuda = "this build of coda has no CUDA kernels (see coda.info())";
[[noreturn]] void no_cuda() { TORCH_CHECK(false, kNoCuda); }
}  // namespace
std::string unsupported(at::Tensor const&) { return kNoCuda; }
char const* arch() { no_cuda(); }
// calls.cpp asks `unsupported` first, so nothing below is reached.
void run(Kinds const&, Launch&) { no_cuda(); }
std::tuple<at::Tensor, at::Tensor> row_stats(at::Tensor const&, OptionalTensor const&, double) { no_cuda(); }
at::Tensor rstd_from_partials(at::Tensor const&, std::int64_t, std::int64_t, double) { no_cuda(); }
at::Tensor correction_from_partials(at::Tensor const&, std::int64_t, OptionalTensor const&, std::int64_t) { no_cuda(); }
at::Tensor sum_groups(at::Tensor const&, std::int64_t, at::ScalarType) { no_cuda(); }
std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_stats(at::Tensor const&, LayerNorm const&, double, bool) { no_cuda(); }
LayerVectors layer_vectors(at::Tensor const&, LayerNorm const&, OptionalTensor const&) { no_cuda(); }
std::tuple<at::Tensor, at::Tensor> moments_from_partials(at::Tensor const&, at::Tensor const&, std::int64_t, std::int64_t, double) { no_cuda(); }
std::tuple<at::Tensor, at::Tensor> layer_correction_from_partials(at::Tensor const&, at::Tensor const&, std::int64_t, at::Tensor const&, std::int64_t) {
  no_cuda();
}
ActivationGradient rope_backward(at::Tensor const&, at::Tensor const&, at::Tensor const&, at::Tensor const&, OptionalTensor const&, OptionalTensor const&,
                                 RopeArguments const&, std::int64_t) {
  no_cuda();
}
void rope_in_place(at::Tensor const&, RopeArguments const&) { no_cuda(); }
at::Tensor qknorm_rope(at::Tensor const&, RopeArguments const&, QkNorm const&) { no_cuda(); }
QkNormGradient qknorm_rope_backward(at::Tensor const&, at::Tensor const&, at::Tensor const&, at::Tensor const&, at::Tensor const&, OptionalTensor const&,
                                    OptionalTensor const&, RopeArguments const&, QkNorm const&, std::int64_t) {
  no_cuda();
}
void scale(at::Tensor const&, at::Tensor const&, at::Tensor const&) { no_cuda(); }
void softmax_statistics(at::Tensor const&, at::Tensor const&) { no_cuda(); }
at::Tensor exponential_gradient(at::Tensor const&, at::Tensor const&, at::Tensor const&, at::Tensor const&, at::Tensor const&, OptionalTensor const&,
                                std::int64_t, double, bool) {
  no_cuda();
}
LogitGradient logit_gradient(KeptLogits const&, at::Tensor const&, at::Tensor const&) { no_cuda(); }
bool can_norm_heads(RopeArguments const&) { no_cuda(); }
bool has_rope_kernel(char const*, RopeArguments const&, at::ScalarType) { no_cuda(); }
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

}  // namespace

namespace {
Archs archs() {
  Device const& device = current_device();
  return archs_for(kernel_table(), 10 * device.major + device.minor, forced_arch());
}
}  // namespace

char const* arch() { return archs().names[0]; }

std::string unsupported(at::Tensor const& t) {
  Device const& device = current_device();
  if (std::string const why = why_no_archs(kernel_table(), 10 * device.major + device.minor, forced_arch()); !why.empty()) return why;
  if (!dtype_name(t.scalar_type())) return std::string("no CUDA kernels for ") + c10::toString(t.scalar_type());
  return {};
}

namespace {

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
  return t.size(outer) == 1 || (t.stride(outer) % kAlignment == 0 && t.stride(outer) >= t.size(inner) && t.stride(outer) <= kMaxExtent);
}

// A copy with zeros around it, row-major.
at::Tensor padded(at::Tensor const& t, std::int64_t rows, std::int64_t columns) {
  at::Tensor copy = t.size(0) == rows && t.size(1) == columns ? at::empty({rows, columns}, t.options()) : at::zeros({rows, columns}, t.options());
  copy.narrow(0, 0, t.size(0)).narrow(1, 0, t.size(1)).copy_(t);
  return copy;
}

at::Tensor row_major(at::Tensor const& t) { return readable(t, 1) ? t : padded(t, t.size(0), t.size(1)); }
at::Tensor column_major(at::Tensor const& t) { return readable(t, 0) ? t : padded(t.t(), t.size(1), t.size(0)).t(); }

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
  KernelInfo const* kernel = select_kernel(table, archs(), program, layout, dtype_name(dtype), g, current_device().sm_count, &reason);
  TORCH_CHECK(kernel != nullptr, "no kernel ", program, "_", layout, "_", dtype_name(dtype), " can run M ", g.m, ", N ", g.n, ", K ", g.k, ": ",
              reason);
  return *kernel;
}

// The operand layout to use: the one that the operands have, if the program has kernels for it, else any it has.
std::string choose_layout(char const* program, char const* dtype, bool a_transposed, bool b_transposed) {
  std::string const wanted = a_transposed && b_transposed ? "nt" : b_transposed ? "nn" : "tn";
  KernelTable const table = kernel_table();
  Archs const candidates = archs();
  std::string any;
  for (int a = 0; a < candidates.count; ++a) {
    for (int i = 0; i < table.count; ++i) {
      KernelInfo const& k = *table.kernels[i];
      if (std::strcmp(k.arch, candidates.names[a]) || std::strcmp(k.program, program) || std::strcmp(k.dtype, dtype)) continue;
      if (wanted == k.layout) return wanted;
      if (any.empty()) any = k.layout;
    }
  }
  TORCH_CHECK(!any.empty(), "no kernel of program ", program, " was built for ", dtype);
  return any;
}

bool wide(at::Tensor const& t) { return t.scalar_type() == at::kFloat; }

reduce::DType reduce_type(at::ScalarType t) {
  return t == at::kBFloat16 ? reduce::DType::kBf16 : t == at::kHalf ? reduce::DType::kFp16 : reduce::DType::kFp32;
}

// A call without a product.
void run_pointwise(Kinds const& kinds, Launch& call) {
  GemmArguments g;
  std::vector<at::Tensor> alive;
  bind_resources(kinds, call, call.a, call.a.options().dtype(at::kFloat), g, alive);
  if (g.m == 0 || g.n == 0) return;
  at::Tensor const a = call.a.stride(1) == 1 ? call.a : call.a.contiguous();
  g.a.data = a.data_ptr(), g.a.ld = a.stride(0);
  g.stream = current_stream();
  check(reduce::pointwise(call.program, reduce_type(call.a.scalar_type()), g), call.program);
  note(arch(), call.program);
}

// A vector of one value a column, padded to n8 columns (in each half).
at::Tensor row_vector(at::Tensor const& t, std::int64_t n, std::int64_t n8, bool halves) {
  if (n == n8) return t.contiguous();
  return halves ? padded(t.view({2, n}), 2, n8).flatten() : at::constant_pad_nd(t, {0, n8 - n}).contiguous();
}

}  // namespace

void run(Kinds const& kinds, Launch& call) {
  if (!call.b.defined()) return run_pointwise(kinds, call);
  bool const halves = kinds.pairing == Pairing::kHalves;
  std::int64_t const m = call.a.size(0), k = call.a.size(1), n = call.b.size(0);
  std::int64_t const k8 = round_up(std::max<std::int64_t>(k, 1), kAlignment), n8 = round_up(n, kAlignment);
  auto const statistics = call.a.options().dtype(at::kFloat);
  if (m == 0 || n == 0) {
    for (std::size_t i = 0; i < kinds.sinks.size(); ++i) {
      if (kinds.sinks[i] == Kind::kRowPartial) call.sinks[i] = at::zeros({1, m}, statistics);
      if (kinds.sinks[i] == Kind::kSoftmax) call.sinks[i] = at::zeros({call.planes, 1, m}, statistics);
      if (kinds.sinks[i] == Kind::kColPartial && call.sinks[i].defined()) call.sinks[i] = at::zeros({1, n}, statistics);
    }
    return;
  }
  char const* dtype = dtype_name(call.a.scalar_type());
  std::vector<at::Tensor> alive;  // copies that the kernel reads
  auto const keep = [&](at::Tensor const& t) { return alive.push_back(t), t; };

  GemmArguments g;
  g.m = m, g.n = n8 * (halves ? 2 : 1), g.k = k8;
  at::Tensor a = k8 == k ? call.a : padded(call.a, m, k8), b = k8 == k && n8 == n ? call.b : padded(call.b, n8, k8);
  bool const a_transposed = !readable(a, 1) && readable(a, 0), b_transposed = !halves && !readable(b, 1) && readable(b, 0);
  std::string const layout = choose_layout(call.program, dtype, a_transposed, b_transposed);
  a = keep(layout == "nt" ? column_major(a) : row_major(a));
  g.a = Operand{a, layout == "nt"}.resource();
  if (halves) {
    at::Tensor second = k8 == k && n8 == n ? call.b_second : padded(call.b_second, n8, k8);
    b = row_major(b), second = row_major(second);
    std::int64_t const bytes = static_cast<char const*>(second.data_ptr()) - static_cast<char const*>(b.data_ptr()), size = b.element_size();
    bool const in_place = b.stride(0) == second.stride(0) && bytes > 0 && bytes % kBaseAlignment == 0 && bytes / size < kMaxPairStride;
    if (!in_place) {
      // The kernel reaches the second half by a positive stride from the first, so these two are laid behind each other.
      at::Tensor const both = at::cat({b, second}, 0);
      b = both.narrow(0, 0, n8), second = both.narrow(0, n8, n8);
    }
    g.b = Operand{keep(b), false}.resource();
    g.b.pair_stride = (static_cast<char const*>(keep(second).data_ptr()) - static_cast<char const*>(b.data_ptr())) / size;
  } else {
    b = keep(layout == "tn" ? row_major(b) : column_major(b));
    g.b = Operand{b, layout != "tn"}.resource();
  }

  g.rotation = call.rotation;
  if (call.positions.defined()) {
    g.rotation.positions = keep(call.positions.contiguous()).data_ptr();
    g.rotation.positions64 = call.positions.scalar_type() == at::kLong;
  }
  for (std::size_t i = 0; i < kinds.loads.size(); ++i) {
    Resource& r = g.loads[i];
    at::Tensor t = call.loads[i].tensor;
    r.value = call.loads[i].value;
    if (!t.defined()) continue;
    switch (kinds.loads[i]) {
      case Kind::kTile:
        t = keep(n8 == n ? row_major(t) : padded(t, m, n8));
        r = Operand{t, false}.resource();
        break;
      case Kind::kRowVector:
        r.data = keep(row_vector(t, n, n8, halves)).data_ptr();
        r.fp32 = wide(t);
        r.pair_stride = n8;
        break;
      case Kind::kHeadVector:
        r.data = keep(t.contiguous()).data_ptr();
        r.second = keep(call.loads[i].second.contiguous()).data_ptr();
        r.fp32 = wide(t);
        break;
      case Kind::kTable:
        // Two neighbouring fp32 values are read at once.
        if (t.stride(1) != 1 || t.stride(0) % 2 != 0 || reinterpret_cast<std::uintptr_t>(t.data_ptr()) % 8 != 0) t = t.clone(at::MemoryFormat::Contiguous);
        r.data = keep(t).data_ptr();
        r.ld = t.stride(0);
        r.fp32 = wide(t);
        break;
      default: r.data = keep(t.contiguous()).data_ptr();
    }
  }

  std::vector<std::pair<at::Tensor, at::Tensor>> copy_back;  // what the kernel writes, where it belongs
  for (std::size_t i = 0; i < kinds.sinks.size(); ++i) {
    at::Tensor const& t = call.sinks[i];
    if (!t.defined()) continue;
    // What a thread stores by itself, where it belongs.
    if (kinds.sinks[i] == Kind::kSelect) bind_softmax(Kind::kSelect, call, t, n, g.sinks[i], alive);
    if (kinds.sinks[i] != Kind::kTile && kinds.sinks[i] != Kind::kHalfTile && kinds.sinks[i] != Kind::kExponentials) continue;
    int const parts = halves && kinds.sinks[i] == Kind::kTile ? 2 : 1;
    at::Tensor out = t;
    if ((n8 != n && (halves || t.size(1) != n8)) || !readable(t, 1)) {
      out = at::empty({m, parts * n8}, t.options());
      for (int part = 0; part < parts; ++part) copy_back.emplace_back(out.narrow(1, part * n8, n), t.narrow(1, part * n, n));
    }
    g.sinks[i] = Operand{keep(out), false}.resource();
    g.sinks[i].pair_stride = n8;
    if (kinds.sinks[i] == Kind::kTile && t.size(1) < n) g.sinks[i].columns = t.size(1);
  }

  KernelInfo const& kernel = pick(call.program, layout.c_str(), call.a.scalar_type(), g);
  for (std::size_t i = 0; i < kinds.sinks.size(); ++i) {
    if (kinds.sinks[i] == Kind::kSoftmax) {
      std::int64_t const tiles = ceil_div(n, kernel.tile_n), size = call.planes * tiles * m;
      bool const given = call.workspace.defined() && call.workspace.numel() >= size;
      call.sinks[i] = given ? call.workspace.narrow(0, 0, size).view({call.planes, tiles, m}) : at::empty({call.planes, tiles, m}, statistics);
      bind_softmax(Kind::kSoftmax, call, call.sinks[i], n, g.sinks[i], alive);
      continue;
    }
    bool const rows = kinds.sinks[i] == Kind::kRowPartial;
    if (!call.sinks[i].defined() || (!rows && kinds.sinks[i] != Kind::kColPartial)) continue;
    std::int64_t const lines = rows ? ceil_div(g.n, kernel.tile_n) : ceil_div(m, kernel.tile_m) * (kernel.tile_m / kernel.partial_rows);
    call.sinks[i] = at::empty({lines, rows ? m : n8}, statistics);
    g.sinks[i] = {call.sinks[i].data_ptr(), call.sinks[i].size(1), 0, 0};
  }
  g.stream = current_stream();
  g.sm_count = current_device().sm_count;
  g.swizzle = forced_swizzle;
  g.raster = forced_raster;
  std::string what = kernel.key;
  if (kernel.splits) {
    g.splits = forced_splits > 0 ? int(count_parts(g.k, forced_splits, kernel.tile_k)) : best_splits(kernel, g.m, g.n, g.k, g.sm_count);
    if (g.splits > 1) {
      std::int64_t const tile = std::int64_t(kernel.tile_m) * kernel.tile_n;
      g.parts = keep(at::empty({g.splits * count_tiles(kernel, g.m, g.n) * tile}, statistics)).data_ptr<float>();
      what += " in " + std::to_string(g.splits) + " parts";
    }
  }
  check(kernel.launch(g), kernel.key);
  note(kernel.arch, what);
  for (auto const& [from, to] : copy_back) to.copy_(from);
}

bool has_rope_kernel(char const* program, RopeArguments const& rope, at::ScalarType dtype) {
  KernelTable const table = kernel_table();
  std::string const key = forced_kernel(program);
  for (int i = 0; i < table.count; ++i) {
    KernelInfo const& k = *table.kernels[i];
    if (std::strcmp(k.program, program) || std::strcmp(k.dtype, dtype_name(dtype)) || !turns(k, rope.rotary_dim())) continue;
    if (key.empty() ? !std::strcmp(k.arch, arch()) : key == k.key) return true;
  }
  return false;
}

// --- row kernels ----------------------------------------------------------------------------------------------------------------------
std::tuple<at::Tensor, at::Tensor> row_stats(at::Tensor const& x_, OptionalTensor const& weight, double eps) {
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
  note(arch(), "row_stats");
  return {h, rstd};
}

namespace {

// The parameters of a LayerNorm as the row kernels read them: contiguous, of one dtype.
struct LayerWeights {
  at::Tensor gamma, beta;
  reduce::DType dtype;
  LayerWeights(LayerNorm const& norm, at::Tensor const& like) {
    bool const fp32 = (get(norm.gamma) && wide(*get(norm.gamma))) || (get(norm.beta) && wide(*get(norm.beta)));
    auto const type = fp32 ? at::kFloat : like.scalar_type();
    if (get(norm.gamma)) gamma = get(norm.gamma)->to(type).contiguous();
    if (get(norm.beta)) beta = get(norm.beta)->to(type).contiguous();
    dtype = reduce_type(type);
  }
};

void* data(at::Tensor const& t) { return t.defined() ? t.data_ptr() : nullptr; }

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_stats(at::Tensor const& x_, LayerNorm const& norm, double eps, bool normalised) {
  at::Tensor const x = x_.stride(1) == 1 ? x_ : x_.contiguous();
  LayerWeights const weights(norm, x);
  at::Tensor rstd = at::empty({x.size(0)}, x.options().dtype(at::kFloat)), mean = at::empty_like(rstd);
  at::Tensor h = normalised || weights.gamma.defined() ? at::empty({x.size(0), x.size(1)}, x.options()) : at::Tensor();
  if (x.size(0) == 0) return {h, rstd, mean};
  reduce::LayerStats args{};
  args.dtype = reduce_type(x.scalar_type());
  args.weight_dtype = weights.dtype;
  args.m = x.size(0), args.d = x.size(1);
  args.x = x.data_ptr(), args.x_ld = x.stride(0);
  args.gamma = data(weights.gamma), args.beta = data(weights.beta), args.h = data(h);
  args.rstd = rstd.data_ptr<float>(), args.mean = mean.data_ptr<float>();
  args.eps = float(eps);
  args.normalised = normalised;
  check(reduce::layer_stats(args, current_stream()), "layer_stats");
  note(arch(), "layer_stats");
  return {h, rstd, mean};
}

LayerVectors layer_vectors(at::Tensor const& w_, LayerNorm const& norm, OptionalTensor const& bias_) {
  at::Tensor const w = w_.stride(1) == 1 ? w_ : w_.contiguous(), bias = get(bias_) ? get(bias_)->contiguous() : at::Tensor();
  LayerWeights const weights(norm, w);
  at::Tensor const u = at::empty({w.size(0)}, w.options().dtype(at::kFloat)), v = at::empty_like(u);
  if (w.size(0) == 0) return {u, v};
  check(reduce::layer_vectors({reduce_type(w.scalar_type()), weights.dtype, w.size(0), w.size(1), w.data_ptr(), w.stride(0), data(weights.gamma),
                               data(weights.beta), data(bias), u.data_ptr<float>(), v.data_ptr<float>()},
                              current_stream()),
        "layer_vectors");
  note(arch(), "layer_vectors");
  return {u, v};
}

std::tuple<at::Tensor, at::Tensor> moments_from_partials(at::Tensor const& squares, at::Tensor const& values, std::int64_t m, std::int64_t width,
                                                         double eps) {
  at::Tensor const rstd = at::empty({m}, squares.options()), mean = at::empty_like(rstd);
  if (m == 0) return {rstd, mean};
  check(reduce::finish_layer({reduce::LayerFinish::kMoments, squares.const_data_ptr<float>(), values.const_data_ptr<float>(), squares.stride(0),
                              squares.size(0), m, nullptr, float(width), float(eps), rstd.data_ptr<float>(), mean.data_ptr<float>()},
                             current_stream()),
        "finish_layer");
  note(arch(), "moments_from_partials");
  return {rstd, mean};
}

std::tuple<at::Tensor, at::Tensor> layer_correction_from_partials(at::Tensor const& dots, at::Tensor const& direction_dots, std::int64_t m,
                                                                  at::Tensor const& rstd_, std::int64_t width) {
  at::Tensor const correction = at::empty({m}, dots.options()), offset = at::empty_like(correction), rstd = rstd_.contiguous();
  if (m == 0) return {correction, offset};
  check(reduce::finish_layer({reduce::LayerFinish::kCorrection, dots.const_data_ptr<float>(), direction_dots.const_data_ptr<float>(), dots.stride(0),
                              dots.size(0), m, rstd.const_data_ptr<float>(), float(width), 0, correction.data_ptr<float>(), offset.data_ptr<float>()},
                             current_stream()),
        "finish_layer");
  note(arch(), "layer_correction_from_partials");
  return {correction, offset};
}

at::Tensor rstd_from_partials(at::Tensor const& partials, std::int64_t m, std::int64_t width, double eps) {
  at::Tensor const out = at::empty({m}, partials.options());
  if (m == 0) return out;
  check(reduce::finish_rows({reduce::RowFinish::kRstd, partials.const_data_ptr<float>(), partials.stride(0), partials.size(0), m, nullptr, float(width),
                             float(eps), out.data_ptr<float>()},
                            current_stream()),
        "finish_rows");
  note(arch(), "rstd_from_partials");
  return out;
}

at::Tensor correction_from_partials(at::Tensor const& partials, std::int64_t m, OptionalTensor const& rstd_, std::int64_t width) {
  at::Tensor const out = at::empty({m}, partials.options()), rstd = get(rstd_) ? get(rstd_)->contiguous() : at::Tensor();
  if (m == 0) return out;
  check(reduce::finish_rows({reduce::RowFinish::kCorrection, partials.const_data_ptr<float>(), partials.stride(0), partials.size(0), m,
                             rstd.defined() ? rstd.const_data_ptr<float>() : nullptr, float(width), 0, out.data_ptr<float>()},
                            current_stream()),
        "finish_rows");
  note(arch(), "correction_from_partials");
  return out;
}

at::Tensor sum_groups(at::Tensor const& partials, std::int64_t n, at::ScalarType dtype) {
  at::Tensor const out = at::empty({n}, partials.options().dtype(dtype));
  if (n == 0) return out;
  check(reduce::sum_groups(partials.const_data_ptr<float>(), partials.stride(0), partials.size(0), n, reduce_type(dtype), out.data_ptr(), current_stream()),
        "sum_groups");
  note(arch(), "sum_groups");
  return out;
}

void scale(at::Tensor const& out, at::Tensor const& t, at::Tensor const& factor) {
  if (t.numel() == 0) return;
  check(reduce::scale(reduce_type(t.scalar_type()), t.const_data_ptr(), reduce_type(out.scalar_type()), out.data_ptr(), t.numel(),
                      factor.const_data_ptr<float>(), current_stream()),
        "scale");
  note(arch(), "scale");
}

void softmax_statistics(at::Tensor const& partials, at::Tensor const& statistics) {
  std::int64_t const m = statistics.size(1);
  if (m == 0) return;
  auto const row = [&](int i) { return statistics[i].data_ptr<float>(); };
  check(reduce::finish_softmax({partials.const_data_ptr<float>(), partials.stride(0), partials.stride(1), partials.size(0), partials.size(1), m,
                                row(LseSelection::kLse), row(LseSelection::kMeanQ), row(LseSelection::kTotalZ), row(LseSelection::kTotalQ)},
                               current_stream()),
        "finish_softmax");
  note(arch(), "softmax_statistics");
}

at::Tensor exponential_gradient(at::Tensor const& stored, at::Tensor const& references, at::Tensor const& statistics, at::Tensor const& factors_,
                                at::Tensor const& target_, OptionalTensor const& rstd_, std::int64_t classes, double cap, bool want_dbias) {
  std::int64_t const m = stored.size(0);
  at::Tensor const partials = want_dbias ? at::empty({ceil_div(m, reduce::kGradientRows), classes}, statistics.options()) : at::Tensor();
  if (m == 0) return want_dbias ? at::zeros({classes}, statistics.options()) : at::Tensor();
  at::Tensor const factors = factors_.stride(1) == 1 ? factors_ : factors_.contiguous(), target = target_.contiguous(), rstd = get(rstd_) ? get(rstd_)->contiguous() : at::Tensor();
  at::Tensor const values = statistics.stride(1) == 1 ? statistics : statistics.contiguous();
  check(reduce::exponential_gradient({reduce_type(stored.scalar_type()), m, classes, stored.data_ptr(), stored.stride(0),
                                      references.const_data_ptr<float>(), references.stride(0), values[LseSelection::kLse].const_data_ptr<float>(),
                                      values[LseSelection::kPickedZ].const_data_ptr<float>(), factors.const_data_ptr<float>(), factors.stride(0),
                                      target.const_data_ptr<std::int64_t>(), rstd.defined() ? rstd.const_data_ptr<float>() : nullptr, float(cap),
                                      want_dbias ? partials.data_ptr<float>() : nullptr},
                                     current_stream()),
        "exponential_gradient");
  note(arch(), "exponential_gradient");
  return want_dbias ? sum_groups(partials, classes, at::kFloat) : at::Tensor();
}

LogitGradient logit_gradient(KeptLogits const& kept, at::Tensor const& lse_, at::Tensor const& factors_) {
  auto const readable_rows = [](at::Tensor const& t) { return t.stride(1) == 1 || t.size(1) == 1 ? t : t.contiguous(); };
  at::Tensor const logits = readable_rows(kept.logits), incoming = get(kept.incoming) ? readable_rows(*get(kept.incoming)) : at::Tensor();
  at::Tensor const lse = lse_.contiguous(), factors = factors_.contiguous(), target = kept.target.contiguous();
  at::Tensor const rstd = get(kept.rstd) ? get(kept.rstd)->contiguous() : at::Tensor(), bias = get(kept.bias) ? get(kept.bias)->contiguous() : at::Tensor();
  std::int64_t const m = logits.size(0), n = logits.size(1);
  LogitGradient result{at::empty({m, stored_columns(n)}, logits.options()), {}, {}};
  if (logits.numel() == 0) {
    auto const zeros = [&](bool wanted, std::int64_t size) { return wanted ? at::zeros({size}, lse.options()) : at::Tensor(); };
    return {result.dz, zeros(kept.want_dot, m), zeros(kept.want_dbias, n)};
  }
  at::Tensor const sums = kept.want_dbias ? at::empty({ceil_div(m, reduce::kGradientRows), n}, lse.options()) : at::Tensor();
  at::Tensor const dots = kept.want_dot ? at::empty({ceil_div(n, reduce::kGradientColumns), m}, lse.options()) : at::Tensor();
  auto const floats = [](at::Tensor const& t) { return t.defined() ? t.const_data_ptr<float>() : nullptr; };
  auto const written = [](at::Tensor const& t) { return t.defined() ? t.data_ptr<float>() : nullptr; };
  check(reduce::kept_logit_gradient({reduce_type(logits.scalar_type()), m, n, logits.const_data_ptr(), logits.stride(0),
                                     incoming.defined() ? incoming.const_data_ptr() : nullptr, incoming.defined() ? incoming.stride(0) : 0, floats(lse),
                                     floats(factors), factors.stride(0), target.const_data_ptr<std::int64_t>(), floats(rstd),
                                     bias.defined() ? bias.const_data_ptr() : nullptr, float(kept.cap), result.dz.data_ptr(), result.dz.stride(0),
                                     written(sums), written(dots)},
                                    current_stream()),
        "logit_gradient");
  note(arch(), "logit_gradient");
  if (kept.want_dbias) result.dbias = sum_groups(sums, n, at::kFloat);
  if (kept.want_dot) result.row_dot = correction_from_partials(dots, m, std::nullopt, 1);
  return result;
}

namespace {

reduce::Rope rope_arguments(at::Tensor const& y, RopeArguments const& rope, std::vector<at::Tensor>& alive) {
  auto const keep = [&](at::Tensor const& t) { return alive.push_back(t), t; };
  auto const table = [&](at::Tensor const& t) { return keep(t.stride(1) == 1 || t.size(1) <= 1 ? t : t.contiguous()); };
  at::Tensor const cos = table(rope.cos), sin = table(rope.sin);
  reduce::Rope r{};
  r.dtype = reduce_type(y.scalar_type());
  r.m = y.size(0), r.n = y.size(1), r.sequence = 1;
  r.y = y.data_ptr(), r.y_ld = y.stride(0);
  r.cos = cos.data_ptr(), r.cos_ld = cos.stride(0), r.sin = sin.data_ptr(), r.sin_ld = sin.stride(0);
  r.wide_tables = wide(cos);
  r.interleaved = rope.interleaved;
  r.rotation.head_dim = rope.head_dim;
  r.rotation.rotary_dim = rope.rotary_dim();
  r.rotation.columns = rope.rotary_dim() == 0 ? 0 : rope.columns;
  r.rotation.period = rope.period;
  if (get(rope.positions)) {
    r.rotation.positions = keep(get(rope.positions)->contiguous()).data_ptr();
    r.rotation.positions64 = get(rope.positions)->scalar_type() == at::kLong;
  }
  return r;
}

// Fills in what the backward of a rotation reads and writes; result.dbias becomes partial sums.
void set_backward(reduce::Rope& r, at::Tensor const& dq, at::Tensor const& dk, at::Tensor const& dv, OptionalTensor const& rstd, OptionalTensor const& bias,
                  std::int64_t width, ActivationGradient& result, std::vector<at::Tensor>& alive) {
  auto const keep = [&](at::Tensor const& t) { return alive.push_back(t), t; };
  at::Tensor const* gradients[] = {&dq, &dk, &dv};
  for (int i = 0; i < 3; ++i) {
    at::Tensor const& t = *gradients[i];
    at::Tensor const c = keep(t.stride(3) == 1 || t.size(3) == 1 ? t : t.contiguous());
    r.gradients[i] = {c.data_ptr(), c.stride(0), c.stride(1), c.stride(2), t.size(2)};
  }
  r.sequence = dq.size(1);
  r.out = result.dz.data_ptr(), r.out_ld = result.dz.stride(0);
  r.rstd = get(rstd) ? keep(get(rstd)->contiguous()).const_data_ptr<float>() : nullptr;
  r.bias = get(bias) ? keep(get(bias)->contiguous()).data_ptr() : nullptr;
  r.wide_bias = get(bias) && wide(*get(bias));
  if (get(bias)) {
    result.dbias = at::empty({ceil_div(r.m, reduce::kBiasRows), r.n}, result.correction.options());
    r.bias_partials = result.dbias.data_ptr<float>();
  }
  r.width = float(width);
  r.correction = result.correction.data_ptr<float>();
}

ActivationGradient empty_gradient(at::Tensor const& y) {
  return {at::empty({y.size(0), y.size(1)}, y.options()), {}, at::empty({y.size(0)}, y.options().dtype(at::kFloat)), {}};
}

void set_norm(reduce::Rope& r, at::Tensor const& product, RopeArguments const& rope, QkNorm const& norm, std::vector<at::Tensor>& alive) {
  auto const keep = [&](at::Tensor const& t) { return alive.push_back(t), t; };
  at::Tensor const z = keep(product.stride(1) == 1 ? product : product.contiguous());
  r.product = z.data_ptr(), r.product_ld = z.stride(0);
  r.gammas[0] = keep(norm.q.contiguous()).data_ptr(), r.gammas[1] = keep(norm.k.contiguous()).data_ptr();
  r.wide_gammas = wide(norm.q);
  r.eps = float(norm.eps);
  r.rotation.columns = rope.columns;  // heads have their norm even if nothing turns
  r.rotation.query_columns = norm.query_columns;
}

}  // namespace

ActivationGradient rope_backward(at::Tensor const& dq, at::Tensor const& dk, at::Tensor const& dv, at::Tensor const& y_, OptionalTensor const& rstd,
                                 OptionalTensor const& bias, RopeArguments const& rope, std::int64_t width) {
  at::Tensor const y = y_.stride(1) == 1 ? y_ : y_.contiguous();
  std::vector<at::Tensor> alive;
  ActivationGradient result = empty_gradient(y);
  if (y.numel() == 0) {
    result.correction.zero_();
    if (get(bias)) result.dbias = at::zeros_like(*get(bias));
    return result;
  }
  reduce::Rope r = rope_arguments(y, rope, alive);
  set_backward(r, dq, dk, dv, rstd, bias, width, result, alive);
  check(reduce::rope_backward(r, current_stream()), "rope_backward");
  note(arch(), "rope_backward");
  if (get(bias)) result.dbias = sum_groups(result.dbias, r.n, get(bias)->scalar_type());
  return result;
}

bool can_norm_heads(RopeArguments const& rope) { return rope.head_dim <= reduce::kMaxNormedHead; }

at::Tensor qknorm_rope(at::Tensor const& product, RopeArguments const& rope, QkNorm const& norm) {
  at::Tensor const out = at::empty({product.size(0), product.size(1)}, product.options());
  if (out.numel() == 0) return out;
  std::vector<at::Tensor> alive;
  reduce::Rope r = rope_arguments(out, rope, alive);
  set_norm(r, product, rope, norm, alive);
  r.out = out.data_ptr(), r.out_ld = out.stride(0);
  check(reduce::qk_norm_rope(r, current_stream()), "qk_norm_rope");
  note(arch(), "qk_norm_rope");
  return out;
}

QkNormGradient qknorm_rope_backward(at::Tensor const& dq, at::Tensor const& dk, at::Tensor const& dv, at::Tensor const& product, at::Tensor const& y_,
                                    OptionalTensor const& rstd, OptionalTensor const& bias, RopeArguments const& rope, QkNorm const& norm,
                                    std::int64_t width) {
  at::Tensor const y = y_.stride(1) == 1 ? y_ : y_.contiguous();
  std::vector<at::Tensor> alive;
  QkNormGradient result{empty_gradient(y), {}, {}};
  if (y.numel() == 0) {
    result.product.correction.zero_();
    if (get(bias)) result.product.dbias = at::zeros_like(*get(bias));
    result.dq_norm = at::zeros_like(norm.q), result.dk_norm = at::zeros_like(norm.k);
    return result;
  }
  reduce::Rope r = rope_arguments(y, rope, alive);
  set_backward(r, dq, dk, dv, rstd, bias, width, result.product, alive);
  set_norm(r, product, rope, norm, alive);
  at::Tensor const partials = at::empty({ceil_div(r.m, reduce::kBiasRows), 2 * rope.head_dim}, y.options().dtype(at::kFloat));
  r.gamma_partials = partials.data_ptr<float>();
  check(reduce::qk_norm_rope_backward(r, current_stream()), "qk_norm_rope_backward");
  note(arch(), "qk_norm_rope_backward");
  at::Tensor const both = sum_groups(partials, 2 * rope.head_dim, norm.q.scalar_type());
  // No output of an operator may be a view of another.
  result.dq_norm = both.narrow(0, 0, rope.head_dim), result.dk_norm = both.narrow(0, rope.head_dim, rope.head_dim).clone();
  if (get(bias)) result.product.dbias = sum_groups(result.product.dbias, r.n, get(bias)->scalar_type());
  return result;
}

void rope_in_place(at::Tensor const& y, RopeArguments const& rope) {
  if (y.numel() == 0 || rope.rotary_dim() == 0 || rope.columns == 0) return;
  std::vector<at::Tensor> alive;
  reduce::Rope r = rope_arguments(y, rope, alive);
  r.out = y.data_ptr(), r.out_ld = y.stride(0);
  check(reduce::rope_in_place(r, current_stream()), "rope");
  note(arch(), "rope");
}
#endif

}  // namespace cuda
}  // namespace coda::bindings
