"""Which kernel is taken, from a table of made-up ones; csrc/coda/dispatch.hpp needs neither a GPU nor CUDA."""
import shutil
import subprocess

import pytest

from build_support.settings import ROOT

COMPILER = shutil.which("c++") or shutil.which("g++")
PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include "coda/dispatch.hpp"
using namespace coda;
//                                           tile           cluster stages smem threads halves head within whole rows align rate min_k
KernelInfo const large{"large", "p", "sm90", "tn", "bf16", 128, 256, 64, 1, 1, 4, 0, 0, 1, 0, 0, false, 16, 8, 1.0, 0, nullptr};
KernelInfo const small{"small", "p", "sm90", "tn", "bf16", 128, 128, 64, 1, 1, 4, 0, 0, 1, 0, 0, false, 16, 8, 0.9, 0, nullptr};
KernelInfo const deep{"deep", "d", "sm90", "nn", "bf16", 128, 128, 64, 1, 1, 6, 0, 0, 1, 0, 0, false, 16, 8, 1.0, 3072, nullptr};
KernelInfo const plain{"plain", "d", "sm90", "nn", "bf16", 128, 128, 64, 1, 1, 5, 0, 0, 1, 0, 0, false, 16, 8, 0.97, 0, nullptr};
KernelInfo const heads{"heads", "h", "sm90", "tn", "bf16", 128, 128, 64, 1, 1, 5, 0, 0, 1, 64, 0, true, 16, 8, 1.0, 0, nullptr};
KernelInfo const ampere{"ampere", "p", "sm80", "tn", "bf16", 128, 128, 32, 1, 1, 4, 0, 0, 1, 0, 0, false, 128, 8, 1.0, 0, nullptr};
KernelInfo const any{"any", "h", "sm80", "tn", "bf16", 128, 128, 32, 1, 1, 4, 0, 0, 1, 0, 128, true, 128, 8, 1.0, 0, nullptr};
KernelInfo const parts{"parts", "s", "sm80", "nt", "bf16", 128, 128, 32, 1, 1, 4, 0, 0, 1, 0, 0, false, 128, 8, 1.0, 0, nullptr, true};
KernelInfo const few{"few", "p", "sm80", "tn", "bf16", 64, 128, 32, 1, 1, 4, 0, 0, 1, 0, 0, false, 64, 8, 0.8, 0, nullptr, true, true};
KernelInfo const* const table[] = {&large, &small, &deep, &plain, &heads, &ampere, &any, &parts, &few};
CodeInfo const code[] = {{"sm90", 90, false}, {"sm80", 80, false}, {"sm80", 86, false}, {"sm80", 80, true}, {"sm90", 90, false}, {"sm80", 90, false, true}};
int main(int count, char** argv) {
  if (count == 6) {
    Bands const b = bands(std::atoi(argv[1]), std::atoi(argv[2]), std::atoi(argv[3]), std::atoi(argv[4]), std::atoi(argv[5]));
    return std::printf("%d %d", b.width, int(b.waves)), 0;
  }
  GemmArguments g;
  g.m = std::atoll(argv[3]), g.n = std::atoll(argv[4]), g.k = std::atoll(argv[5]);
  g.a.data = g.b.data = reinterpret_cast<void*>(4096);
  g.a.ld = g.b.ld = 8192;
  g.rotation.rotary_dim = std::atoll(argv[6]), g.rotation.head_dim = std::atoll(argv[7]);
  int const capability = std::atoi(argv[8]), first = std::atoi(argv[9]);
  KernelTable const all{table, 9, code + first, std::atoi(argv[10])};
  std::string const why = why_no_archs(all, capability, argv[11]);
  char const* reason = nullptr;
  KernelInfo const* k = select_kernel(all, archs_for(all, capability, argv[11]), argv[1], argv[2], "bf16", g, 132, &reason);
  std::printf("%s", !why.empty() ? why.c_str() : k == nullptr ? reason : k->key);
  if (int const splits = k == nullptr ? 1 : best_splits(*k, g.m, g.n, g.k, 132); splits > 1) std::printf(" in %d parts", splits);
}
"""
BUILDS = {"all": (0, 4), "9.0": (0, 1), "8.0": (1, 1), "8.6": (2, 1), "8.0;8.6": (1, 2), "PTX": (3, 1), "9.0 alone": (4, 2)}  # slices of `code`


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("dispatch")
    (folder / "main.cpp").write_text(PROGRAM)
    subprocess.run([COMPILER, "-std=c++17", "-Wall", "-Werror", f"-I{ROOT / 'csrc'}", folder / "main.cpp", "-o", folder / "main"], check=True)
    return folder / "main"


@pytest.fixture(scope="module")
def select(program):
    def run(name, layout, m, n, k, rotary_dim=0, head_dim=0, capability="9.0", build="all", force=""):
        command = [program, name, layout, *map(str, (m, n, k, rotary_dim, head_dim, capability.replace(".", ""), *BUILDS[build])), force]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    return run


def test_the_fewest_waves_decide(select):
    assert select("p", "tn", 16384, 16384, 4096) == "large"
    assert select("p", "tn", 128, 128, 4096, build="9.0") == "small"  # one tile of either, and the small one is shorter


@pytest.mark.parametrize(
    "tiles_m, tiles_n, cluster, expected",
    [
        (128, 64, (2, 1), (8, 63)),
        (64, 1002, (2, 1), (8, 489)),  # 487 waves without bands
        (128, 86, (1, 1), (8, 86)),  # 84 in bands of two, which cost more
        (8, 1002, (2, 1), (4, 61)),  # with bands of eight clusters 16 rows of tiles: 123 waves
        (10, 32, (2, 1), (2, 3)),
        (10, 32, (1, 1), (4, 3)),
        (2, 128, (2, 1), (1, 2)),
        (2, 32, (2, 1), (2, 1)),  # four rows of tiles for two, but all at a time
        (1, 1, (2, 1), (1, 1)),
        (1, 64, (2, 1), (1, 1)),  # two rows of tiles for one, as a cluster has
    ],
)
def test_bands_that_add_few_waves(program, tiles_m, tiles_n, cluster, expected):
    found = subprocess.run([program, *map(str, (tiles_m, tiles_n, *cluster, 132))], check=True, capture_output=True, text=True).stdout
    assert tuple(map(int, found.split())) == expected


def test_phantom_tiles_count(select):
    assert select("p", "tn", 9 * 128, 1280, 4096, build="9.0") == "small"  # 90 tiles, but 9 x 5 of the large ones are 10 x 6


def test_a_configuration_for_long_products(select):
    assert select("d", "nn", 16384, 8192, 2048) == "plain"
    assert select("d", "nn", 16384, 8192, 3072) == select("d", "nn", 16384, 14336, 4096) == "deep"


def test_few_tiles_and_a_long_k_are_split(select):
    assert select("s", "nt", 1024, 1024, 16384) == "parts in 2 parts"
    assert select("s", "nt", 128, 256, 65536) == "parts in 16 parts"
    assert select("s", "nt", 128, 128, 64) == select("s", "nt", 1024, 1024, 512) == "parts"  # adding takes longer
    assert select("s", "nt", 4096, 4096, 65536) == "parts"  # the device is full
    assert select("p", "tn", 128, 128, 65536, build="9.0") == "small"  # it cannot split


def test_few_rows(select):
    for build in ("9.0 alone", "all"):
        assert select("p", "tn", 16, 4096, 14336, build=build) == "few in 8 parts"
        assert select("p", "tn", 16, 28672, 4096, build=build) == "few"  # tiles enough, and all of them at a time
        assert select("p", "tn", 256, 4096, 14336, build=build) == "few in 2 parts"
        assert select("p", "tn", 512, 4096, 14336, build=build) == "small"
        assert select("p", "tn", 16384, 2048, 2048, build=build) in ("small", "large")
    assert select("p", "tn", 16, 4096, 14336, build="9.0") == select("p", "tn", 16, 4096, 14336, force="sm90") == "small"
    assert select("p", "tn", 16, 4096, 14336, build="9.0 alone", force="sm80").startswith("CODA_FORCE_ARCH=sm80 leaves no kernels")
    assert select("p", "tn", 16, 4096, 14336, capability="8.0", build="9.0 alone").endswith("there are some for 9.0")


def test_whole_heads(select):
    assert select("h", "tn", 128, 256, 64, 64, 64) == "heads"
    assert select("h", "tn", 128, 256, 64, 64, 128) == "it was built for another width of heads"
    assert select("h", "tn", 128, 256, 64, 32, 32, build="9.0") == "it was built for another rotary dimension"


def test_any_heads(select):
    for width in (16, 32, 64, 128):
        assert select("h", "tn", 128, 256, 64, width, width, capability="8.6") == "any"
    for width in (8, 48, 256):
        assert select("h", "tn", 128, 256, 64, width, width, capability="8.6") == "it was built for another rotary dimension"
    assert select("h", "tn", 128, 256, 64, 32, 64, capability="8.6") == "it was built for another width of heads"


@pytest.mark.parametrize("capability, expected", [("8.0", "ampere"), ("8.6", "ampere"), ("8.9", "ampere"), ("9.0", "large"), ("10.0", "ampere"), ("12.0", "ampere")])
def test_the_device_decides(select, capability, expected):
    assert select("p", "tn", 16384, 16384, 4096, capability=capability) == expected


def test_a_device_without_kernels_is_told_what_was_built(select):
    call = lambda capability, build="all", force="": select("p", "tn", 16384, 16384, 4096, capability=capability, build=build, force=force)
    without = "no kernels were built for compute capability"
    assert call("7.5") == f"{without} 7.5, there are some for 9.0, 8.0, 8.6 and PTX for 8.0 and newer"
    assert call("8.0", "9.0") == f"{without} 8.0, there are some for 9.0"
    assert call("10.0", "8.0;8.6") == f"{without} 10.0, there are some for 8.0, 8.6"
    assert call("9.0", "8.0;8.6") == f"{without} 9.0, there are some for 8.0, 8.6"
    assert call("8.0", "8.6") == f"{without} 8.0, there are some for 8.6"
    assert call("8.0", force="sm90") == "CODA_FORCE_ARCH=sm90 leaves no kernels for compute capability 8.0"
    assert call("8.9", "8.0") == call("8.9", "8.6") == call("12.0", "PTX") == call("9.0", force="sm80") == "ampere"


def test_sm80_kernels_take_what_sm90_ones_cannot(select):
    assert select("h", "tn", 128, 256, 64, 64, 64) == "heads"
    assert select("h", "tn", 128, 256, 64, 32, 32) == "any"


def test_what_cannot_run_has_a_reason(select):
    assert select("p", "tn", 128, 100, 64) == "N must be a multiple of 8"
    assert select("p", "tn", 128, 128, 60) == "K must be a multiple of 8"
    assert select("p", "tn", 0, 128, 64) == "M, N and K must be positive"
    assert select("p", "nt", 128, 128, 64) == "no such kernel was built"
