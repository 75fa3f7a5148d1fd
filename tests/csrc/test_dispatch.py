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
//                          tile           cluster stages smem threads halves head whole rows align rate min_k
KernelInfo const large{"large", "p", "sm90", "tn", "bf16", 128, 256, 64, 1, 1, 4, 0, 0, 1, 0, false, 16, 8, 1.0, 0, nullptr};
KernelInfo const small{"small", "p", "sm90", "tn", "bf16", 128, 128, 64, 1, 1, 4, 0, 0, 1, 0, false, 16, 8, 0.9, 0, nullptr};
KernelInfo const deep{"deep", "d", "sm90", "nn", "bf16", 128, 128, 64, 1, 1, 6, 0, 0, 1, 0, false, 16, 8, 1.0, 3072, nullptr};
KernelInfo const plain{"plain", "d", "sm90", "nn", "bf16", 128, 128, 64, 1, 1, 5, 0, 0, 1, 0, false, 16, 8, 0.97, 0, nullptr};
KernelInfo const heads{"heads", "h", "sm90", "tn", "bf16", 128, 128, 64, 1, 1, 5, 0, 0, 1, 64, true, 16, 8, 1.0, 0, nullptr};
KernelInfo const* const table[] = {&large, &small, &deep, &plain, &heads};
int main(int, char** argv) {
  GemmArguments g;
  g.m = std::atoll(argv[3]), g.n = std::atoll(argv[4]), g.k = std::atoll(argv[5]);
  g.a.data = g.b.data = reinterpret_cast<void*>(4096);
  g.a.ld = g.b.ld = 8192;
  g.rotation.rotary_dim = std::atoll(argv[6]), g.rotation.head_dim = std::atoll(argv[7]);
  char const* reason = nullptr;
  KernelInfo const* k = select_kernel({table, 5}, argv[1], argv[2], "bf16", g, 132, &reason);
  std::puts(k == nullptr ? reason : k->key);
}
"""


@pytest.fixture(scope="module")
def select(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("dispatch")
    (folder / "main.cpp").write_text(PROGRAM)
    subprocess.run([COMPILER, "-std=c++17", "-Wall", "-Werror", f"-I{ROOT / 'csrc'}", folder / "main.cpp", "-o", folder / "main"], check=True)

    def run(program, layout, m, n, k, rotary_dim=0, head_dim=0):
        command = [folder / "main", program, layout, *map(str, (m, n, k, rotary_dim, head_dim))]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    return run


def test_the_fewest_waves_decide(select):
    assert select("p", "tn", 16384, 16384, 4096) == "large"
    assert select("p", "tn", 128, 128, 4096) == "small"  # one tile of either, and the small one is shorter


def test_a_configuration_for_long_products(select):
    assert select("d", "nn", 16384, 8192, 2048) == "plain"
    assert select("d", "nn", 16384, 8192, 3072) == select("d", "nn", 16384, 14336, 4096) == "deep"


def test_whole_heads(select):
    assert select("h", "tn", 128, 256, 64, 64, 64) == "heads"
    assert select("h", "tn", 128, 256, 64, 64, 128) == "it was built for another width of heads"
    assert select("h", "tn", 128, 256, 64, 32, 32) == "it was built for another rotary dimension"


def test_what_cannot_run_has_a_reason(select):
    assert select("p", "tn", 128, 100, 64) == "N must be a multiple of 8"
    assert select("p", "tn", 128, 128, 60) == "K must be a multiple of 8"
    assert select("p", "tn", 0, 128, 64) == "M, N and K must be positive"
    assert select("p", "nt", 128, 128, 64) == "no such kernel was built"
