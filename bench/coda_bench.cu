// coda_bench: error and speed of the compiled kernels, next to cuBLASLt's plain GEMM. README.md in this folder says how to read it.
#include <getopt.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "problem.hpp"

namespace coda::bench {
namespace {

// --- options ------------------------------------------------------------------------------------------------------------------------
struct Option {
  char const* name;
  char const* argument;  // null: none
  char const* help;
};
enum {  // in the order of kOptions; those of the second line hold for the whole run
  kProgram, kM, kN, kK, kLayout, kDtype, kHeadDim, kKernel, kAllKernels, kSwizzle, kRaster, kRounds, kSeed, kWorkspace,
  kSweep, kSkipMissing, kJson, kList, kHelp
};
Option const kOptions[] = {
    {"program", "NAME", "the epilogue program"},
    {"m", "M", "rows of the result"},
    {"n", "N", "columns of the program's result, see below"},
    {"k", "K", "length of the sums"},
    {"layout", "tn|nn|nt", "tn: A [M, K], B [N, K]; nn: B is [K, N]; nt: also A is [K, M]; default: the program's usual one"},
    {"dtype", "bf16|fp16", "of operands and results, default bf16"},
    {"head-dim", "COLUMNS", "of a head, for rotary programs; default 64, or what the kernel of --kernel was built for"},
    {"kernel", "KEY", "take this kernel, not the one that dispatch chooses; it implies program, layout and dtype"},
    {"all-kernels", nullptr, "measure every kernel that can run the case"},
    {"swizzle", "TILES", "width of a raster band, default the kernel's own"},
    {"raster", "m|n", "the direction in which tiles are walked first, default the kernel's own"},
    {"rounds", "COUNT", "rounds of the measurement, default 15; 0: only check the results"},
    {"seed", "NUMBER", "of the random inputs, default 0"},
    {"workspace", "MIB", "that cuBLASLt may use, default 64"},
    {"sweep", "FILE", "one case a line, in these options (-m 8 -n 8 ...); those given beside --sweep are the lines' defaults"},
    {"skip-missing", nullptr, "pass over cases whose program, layout and dtype were not built, instead of stopping"},
    {"json", "FILE", "write the results there as well"},
    {"list", nullptr, "list the compiled kernels; needs no GPU"},
    {"help", nullptr, "print this text; needs no GPU"},
};

struct Options {
  bool skip_missing = false, list = false, help = false;
  std::string sweep, json;
};

template <class Range, class Name>
std::string joined(Range const& range, Name name) {
  std::string text;
  for (auto const& item : range) text += (text.empty() ? "" : ", ") + std::string(name(item));
  return text;
}
std::string program_names() {
  return joined(programs(), [](Program const& p) { return p.name; });
}
Program const* find_program(std::string const& name) {
  for (Program const& p : programs())
    if (name == p.name) return &p;
  return nullptr;
}
std::string spelled(Option const& o) { return (std::strlen(o.name) == 1 ? "-" : "--") + std::string(o.name); }
std::string option_names() { return joined(kOptions, spelled); }

std::vector<KernelInfo const*> kernels() {
  KernelTable const table = kernel_table();
  return {table.kernels, table.kernels + table.count};
}

void print_help() {
  std::printf(
      "usage: coda_bench --program NAME -m M -n N -k K [options]\n\n"
      "Measures a GEMM with an epilogue program: its error against fp64 on 16 rows, and its speed next to cuBLASLt's plain GEMM of the\n"
      "same operands, in turns in this process. Sums over all rows are checked in 16 columns.\n\n");
  for (Option const& o : kOptions) {
    std::string const left = spelled(o) + (o.argument ? std::string(" ") + o.argument : "");
    std::printf("  %-20s  %s\n", left.c_str(), o.help);
  }
  std::string list;
  for (Program const& p : programs()) list += std::string("  ") + p.layout + "  " + p.name + "\n";
  std::printf(
      "\nPrograms, behind the layout that each takes by default:\n%s\n"
      "-n is the number of columns of the program's result: F for rstd_swiglu, rstd_geglu and their _preactivation, whose GEMM has\n"
      "2F columns, the gates' and the ups'. For rotary programs it is a multiple of --head-dim, and the last sixth of the heads does not\n"
      "turn. FLOPs are 2 M N_gemm K, with the GEMM's columns, for both sides. The ratio is CODA's speed over cuBLASLt's: above 1, CODA did\n"
      "the GEMM and the epilogue in less time than cuBLASLt the GEMM.\n\n"
      "Exit code: 0; 1 if a result was wrong or a call failed; 2 for a wrong command line, or without a suitable GPU.\n",
      list.c_str());
}

Error usage(std::string const& what) { return {Error::kUsage, what}; }

std::int64_t integer(Option const& o, char const* text, std::int64_t least, std::int64_t most) {
  char* end;
  errno = 0;
  long long const value = std::strtoll(text, &end, 10);
  if (end == text || *end != 0 || errno != 0 || value < least || value > most)
    throw usage(spelled(o) + " takes a whole number from " + std::to_string(least) + " to " + std::to_string(most) + ", not '" + text +
                "'");
  return value;
}

void choose(Option const& o, std::string const& text, std::vector<std::string> const& known) {
  if (std::find(known.begin(), known.end(), text) == known.end())
    throw usage("unknown " + std::string(o.name) + " '" + text + "'; known are " + joined(known, [](std::string const& s) { return s; }));
}

// `options` is null for a line of a sweep, which cannot set what holds for the whole run.
void parse(std::vector<std::string> arguments, Case& c, Options* options) {
  std::vector<option> long_options;
  for (Option const& o : kOptions)
    long_options.push_back({o.name, o.argument ? required_argument : no_argument, nullptr, static_cast<int>(&o - kOptions)});
  long_options.push_back({});
  std::vector<char*> argv;
  for (std::string& a : arguments) argv.push_back(a.data());
  argv.push_back(nullptr);
  int const argc = int(arguments.size());
  opterr = 0;
  optind = 0;  // starts over, in glibc also the scan inside an argument
  for (int code; (code = getopt_long(argc, argv.data(), ":m:n:k:h", long_options.data(), nullptr)) != -1;) {
    if (code == '?' || code == ':') {
      bool const letter = optopt > 0 && optopt < 128 && std::isalpha(optopt);  // else a long option: optopt is 0 or an index
      std::string const given = letter ? std::string("-") + char(optopt) : argv[std::size_t(optind) - 1];
      throw usage(code == ':' ? given + " needs a value" : "unknown option " + given + "; known are " + option_names());
    }
    int const index = code == 'm' ? kM : code == 'n' ? kN : code == 'k' ? kK : code == 'h' ? kHelp : code;
    Option const& o = kOptions[index];
    if (index >= kSweep && options == nullptr) throw usage(spelled(o) + " holds for the whole run and cannot stand in a sweep file");
    constexpr std::int64_t kLargest = kMaxExtent;
    switch (index) {
      case kProgram: {
        c.program = find_program(optarg);
        if (c.program == nullptr) throw usage("unknown program '" + std::string(optarg) + "'; known are " + program_names());
        break;
      }
      case kM: c.m = integer(o, optarg, 1, kLargest); break;
      case kN: c.n = integer(o, optarg, 1, kLargest); break;
      case kK: c.k = integer(o, optarg, 1, kLargest); break;
      case kLayout: choose(o, c.layout = optarg, {"tn", "nn", "nt"}); break;
      case kDtype: choose(o, c.dtype = optarg, {"bf16", "fp16"}); break;
      case kHeadDim: c.head_dim = integer(o, optarg, 8, 1024); break;
      case kKernel: c.kernel = optarg; break;
      case kAllKernels: c.all_kernels = true; break;
      case kSwizzle: c.swizzle = int(integer(o, optarg, 1, 1024)); break;
      case kRaster:
        choose(o, optarg, {"m", "n"});
        c.raster = *optarg == 'm' ? 1 : 2;
        break;
      case kRounds: c.rounds = int(integer(o, optarg, 0, 100000)); break;
      case kSeed: c.seed = std::uint64_t(integer(o, optarg, 0, INT64_MAX)); break;
      case kWorkspace: c.workspace_mib = integer(o, optarg, 0, 1 << 20); break;
      case kSweep: options->sweep = optarg; break;
      case kSkipMissing: options->skip_missing = true; break;
      case kJson: options->json = optarg; break;
      case kList: options->list = true; break;
      case kHelp: options->help = true; break;
    }
  }
  if (optind < argc)
    throw usage("unexpected argument '" + std::string(argv[std::size_t(optind)]) + "'; known options are " + option_names());
}

// Fills in what follows from the rest, and refuses what cannot be meant.
void complete(Case& c) {
  int built_for = 0;  // this rotary dimension
  if (!c.kernel.empty()) {
    if (c.all_kernels) throw usage("--kernel and --all-kernels exclude each other");
    std::vector<KernelInfo const*> const all = kernels();
    auto const found = std::find_if(all.begin(), all.end(), [&](KernelInfo const* k) { return c.kernel == k->key; });
    if (found == all.end())
      throw usage("unknown kernel '" + c.kernel + "'; known are " + joined(all, [](KernelInfo const* k) { return k->key; }));
    KernelInfo const& kernel = **found;
    if (c.program != nullptr && std::strcmp(c.program->name, kernel.program) != 0)
      throw usage("the kernel " + c.kernel + " runs " + kernel.program + ", not " + c.program->name);
    c.program = find_program(kernel.program);
    if (c.program == nullptr)
      throw usage(std::string("the benchmark does not know the program ") + kernel.program + "; known are " + program_names());
    c.layout = kernel.layout, c.dtype = kernel.dtype;
    built_for = kernel.head_halves;
  }
  if (c.program == nullptr) throw usage("--program is missing; known are " + program_names());
  if (c.m == 0 || c.n == 0 || c.k == 0) throw usage("-m, -n and -k are all needed");
  if (c.layout.empty()) c.layout = c.program->layout;
  if (!c.program->rotates()) {
    c.head_dim = 0;
  } else {
    if (c.head_dim == 0) c.head_dim = built_for != 0 ? built_for : 64;
    if (c.head_dim % 8 != 0) throw usage("--head-dim takes a multiple of 8, not " + std::to_string(c.head_dim));
    if (c.n % c.head_dim != 0)
      throw usage("-n " + std::to_string(c.n) + " is no whole number of heads of --head-dim " + std::to_string(c.head_dim) + ", which " +
                  c.program->name + " needs");
  }
}

std::vector<Case> read_sweep(std::string const& path, Case const& defaults) {
  std::ifstream file(path);
  if (!file) throw usage("cannot read the sweep file " + path + ": " + std::strerror(errno));
  std::vector<Case> cases;
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    std::istringstream words(line.substr(0, line.find('#')));
    std::vector<std::string> arguments = {"coda_bench"};
    for (std::string word; words >> word;) arguments.push_back(word);
    if (arguments.size() == 1) continue;
    try {
      cases.push_back(defaults);
      parse(arguments, cases.back(), nullptr);
      complete(cases.back());
    } catch (Error const& e) {
      throw Error(e.code, path + ":" + std::to_string(number) + ": " + e.what());
    }
  }
  if (cases.empty()) throw usage("the sweep file " + path + " holds no case");
  return cases;
}

// --- the device and its kernels -----------------------------------------------------------------------------------------------------
struct Device {
  cudaDeviceProp properties;
  int driver = 0, runtime = 0, clock_khz = 0;

  Device() {
    int count = 0;
    cudaError_t const e = cudaGetDeviceCount(&count);
    if (e != cudaSuccess) throw usage(std::string("no CUDA device: ") + cudaGetErrorString(e));
    if (count == 0) throw usage("no CUDA device: none is visible");
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
    if (cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, device) != cudaSuccess) {
      clock_khz = 0;
      cudaGetLastError();
    }
  }
  int capability() const { return properties.major * 10 + properties.minor; }
  std::string arch() const { return "sm" + std::to_string(capability()); }
};

std::string version(int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); }

std::string title(Case const& c) {
  return std::string(c.program->name) + " " + c.layout + " " + c.dtype + ", M " + std::to_string(c.m) + ", N " + std::to_string(c.n) +
         ", K " + std::to_string(c.k) + (c.head_dim != 0 ? ", heads of " + std::to_string(c.head_dim) : "");
}

bool serves(KernelInfo const& kernel, Case const& c) {
  return c.program->name == std::string(kernel.program) && c.layout == kernel.layout && c.dtype == kernel.dtype;
}

// At least one, or an error that says why there is none.
std::vector<KernelInfo const*> kernels_for(Case const& c, Device const& device) {
  GemmArguments const g = shape_of(c);
  std::vector<KernelInfo const*> chosen;
  char const* reason = "no such kernel was built";
  if (!c.kernel.empty() || c.all_kernels) {
    for (KernelInfo const* kernel : kernels()) {
      if (!serves(*kernel, c) || (!c.kernel.empty() && c.kernel != kernel->key)) continue;
      if (char const* why = why_not(*kernel, g)) {
        reason = why;
      } else {
        chosen.push_back(kernel);
      }
    }
  } else {
    int const sm_count = device.properties.multiProcessorCount;
    auto const* best = select_kernel(kernel_table(), archs_for(kernel_table(), device.capability(), nullptr), c.program->name, c.layout.c_str(), c.dtype.c_str(), g, sm_count, &reason);
    if (best != nullptr) chosen.push_back(best);
  }
  if (chosen.empty())
    throw usage("no kernel for " + title(c) + " (N " + std::to_string(g.n) + " of the GEMM): " + reason + "; --list shows what was built");
  for (KernelInfo const* kernel : chosen)
    if (!has_code(kernel_table(), kernel->arch, device.capability()))
      throw usage(std::string("the kernel ") + kernel->key + " was built for " + kernel->arch + ", but this GPU is " + device.arch() +
                  " (" + device.properties.name + ")");
  return chosen;
}

void print_list() {
  std::vector<KernelInfo const*> const all = kernels();
  std::printf("%-58s %12s %8s %7s %14s %8s\n", "kernel", "tile", "cluster", "stages", "shared memory", "threads");
  for (KernelInfo const* k : all) {
    std::string const tile = std::to_string(k->tile_m) + "x" + std::to_string(k->tile_n) + "x" + std::to_string(k->tile_k);
    std::string const cluster = std::to_string(k->cluster_m) + "x" + std::to_string(k->cluster_n);
    std::printf("%-58s %12s %8s %7d %14d %8d\n", k->key, tile.c_str(), cluster.c_str(), k->stages, k->shared_memory, k->threads);
  }
  std::printf("%zu kernels\n", all.size());
}

// --- JSON ---------------------------------------------------------------------------------------------------------------------------
std::string json(std::string const& text) {
  std::string quoted = "\"";
  for (char c : text) {
    char escaped[8];
    std::snprintf(escaped, sizeof escaped, "\\u%04x", c);
    quoted += c == '"' || c == '\\' ? std::string("\\") + c : c >= 0 && c < 0x20 ? escaped : std::string(1, c);
  }
  return quoted + "\"";
}
std::string json(char const* text) { return json(std::string(text)); }
std::string json(bool value) { return value ? "true" : "false"; }
std::string json(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return std::isfinite(value) ? text : "null";
}
template <class Integer, class = std::enable_if_t<std::is_integral_v<Integer>>>
std::string json(Integer value) {
  return std::to_string(value);
}
template <class T>
std::string json(std::vector<T> const& values) {
  return "[" + joined(values, [](T const& v) { return json(v); }) + "]";
}

// {"name": value, ...}; a value that is an Object goes in as it is.
class Object {
 public:
  template <class T>
  Object& add(char const* name, T const& value) {
    text_ += (text_.empty() ? "" : ", ") + json(name) + ": " + json_of(value);
    return *this;
  }
  std::string text() const { return "{" + text_ + "}"; }

 private:
  static std::string json_of(Object const& o) { return o.text(); }
  template <class T>
  static std::string json_of(T const& value) {
    return json(value);
  }
  std::string text_;
};

double tflops(Case const& c, double ms) { return c.flops() / (ms * 1e9); }

std::string describe(Case const& c, Problem const& problem, Result const& r) {
  Object errors, elements, bounds;
  for (Result::Output const& o : r.outputs) {
    errors.add(o.name, o.error.norm);
    elements.add(o.name, o.error.element);
    bounds.add(o.name, o.bound);
  }
  Object result;
  result.add("program", c.program->name).add("layout", c.layout).add("dtype", c.dtype);
  result.add("m", c.m).add("n", c.n).add("n_gemm", c.gemm_n()).add("k", c.k);
  if (c.head_dim != 0) result.add("head_dim", c.head_dim);
  result.add("kernel", r.kernel->key);
  if (c.swizzle != 0) result.add("swizzle", c.swizzle);
  if (c.raster != 0) result.add("raster", c.raster == 1 ? "m" : "n");
  result.add("seed", c.seed).add("rounds", c.rounds).add("input_sets", problem.input_sets());
  result.add("passed", r.passed()).add("error", r.worst().error.norm);
  result.add("errors", errors).add("element_errors", elements).add("bounds", bounds);
  result.add("not_finite", r.not_finite).add("overrun", r.overrun).add("reproducible", r.reproducible);
  if (c.rounds > 0) {
    result.add("ms", r.coda_ms).add("tflops", tflops(c, r.coda_ms)).add("ratio", r.ratio).add("rounds_ms", r.coda_rounds);
    Object library;
    library.add("ms", r.library_ms).add("tflops", tflops(c, r.library_ms)).add("error", problem.library_error());
    library.add("algorithms", problem.library_algorithms()).add("workspace_mib", c.workspace_mib).add("rounds_ms", r.library_rounds);
    result.add("cublaslt", library);
  }
  return result.text();
}

// Written anew after each case, so that a crash loses one case only.
void write_json(std::string const& path, Device const& device, std::vector<std::string> const& command,
                std::vector<std::string> const& results) {
  if (path.empty()) return;
  std::ofstream file(path);
  Object card;
  card.add("name", device.properties.name).add("arch", device.arch()).add("sm_count", device.properties.multiProcessorCount);
  card.add("l2_bytes", device.properties.l2CacheSize).add("memory_bytes", device.properties.totalGlobalMem);
  card.add("sm_clock_mhz", device.clock_khz / 1000);
  file << "{\"device\": " << card.text() << ",\n \"driver_cuda\": " << json(version(device.driver))
       << ", \"runtime_cuda\": " << json(version(device.runtime)) << ", \"cublaslt\": " << cublasLtGetVersion()
       << ",\n \"command\": " << json(command) << ",\n \"results\": [";
  for (std::size_t i = 0; i < results.size(); ++i) file << (i == 0 ? "\n  " : ",\n  ") << results[i];
  file << "\n]}\n";
  file.close();
  if (!file) throw usage("cannot write " + path);
}

// --- a run --------------------------------------------------------------------------------------------------------------------------
void print(Case const& c, Result const& r) {
  std::printf("  %s\n    %s, relative error", r.kernel->key, r.passed() ? "correct" : "WRONG");
  for (Result::Output const& o : r.outputs) {
    std::printf(" %s %.2e", o.name, std::fabs(o.error.norm));  // fabs: a NaN may carry a sign
    if (!o.right()) std::printf(" (one element: %.2e; at most %.1e and %.1e are right)", o.error.element, o.bound, 2 * o.bound);
  }
  if (r.not_finite > 0) std::printf("; %llu values are not finite", r.not_finite);
  if (r.overrun > 0) std::printf("; %zu values were written behind the partial sums", r.overrun);
  if (!r.reproducible) std::printf("; a second launch gave other bits");
  std::printf("\n");
  if (c.rounds > 0)
    std::printf("    %.4f ms, %.1f TFLOP/s; cuBLASLt %.4f ms, %.1f TFLOP/s; ratio %.4f\n", r.coda_ms, tflops(c, r.coda_ms), r.library_ms,
                tflops(c, r.library_ms), r.ratio);
  std::fflush(stdout);
}

int run(std::vector<std::string> const& command) {
  Case base;
  Options options;
  parse(command, base, &options);
  if (options.help) return print_help(), 0;
  if (options.list) return print_list(), 0;
  std::vector<Case> cases;
  if (options.sweep.empty()) {
    complete(base);
    cases.push_back(base);
  } else {
    cases = read_sweep(options.sweep, base);
  }

  Device const device;
  if (options.skip_missing) {
    std::vector<Case> left;
    for (Case const& c : cases) {
      std::vector<KernelInfo const*> const all = kernels();
      if (std::any_of(all.begin(), all.end(), [&](KernelInfo const* kernel) { return serves(*kernel, c); })) {
        left.push_back(c);
      } else {
        std::printf("skipped, not built: %s\n", title(c).c_str());
      }
    }
    cases = left;
    if (cases.empty()) throw usage("no kernel was built for any of the cases; --list shows what was built");
  }
  std::vector<std::vector<KernelInfo const*>> chosen;  // for all cases first: a typo must not cost a long run
  for (Case const& c : cases) chosen.push_back(kernels_for(c, device));
  std::vector<std::string> results;
  write_json(options.json, device, command, results);
  std::printf("%s, %d SMs, up to %d MHz; CUDA %s, driver for CUDA %s, cuBLASLt %zu\n", device.properties.name,
              device.properties.multiProcessorCount, device.clock_khz / 1000, version(device.runtime).c_str(),
              version(device.driver).c_str(), cublasLtGetVersion());
  bool passed = true;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    Case const& c = cases[i];
    std::printf("%s\n", title(c).c_str());
    std::fflush(stdout);
    Problem problem(c, device.properties.multiProcessorCount, std::size_t(device.properties.l2CacheSize));
    for (KernelInfo const* kernel : chosen[i]) {
      Result const result = problem.measure(*kernel);
      print(c, result);
      passed = passed && result.passed();
      results.push_back(describe(c, problem, result));
      write_json(options.json, device, command, results);
    }
  }
  return passed ? 0 : Error::kFailed;
}

}  // namespace
}  // namespace coda::bench

int main(int argc, char** argv) {
  try {
    return coda::bench::run({argv, argv + argc});
  } catch (coda::bench::Error const& e) {
    std::fprintf(stderr, "coda_bench: %s\n", e.what());
    return e.code;
  }
}
