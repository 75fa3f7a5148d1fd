"""The code of the SM80 kernels runs on the CPU, with csrc/sm80/device.hpp replaced by emulation/sm80/device.hpp, and its accesses to memory are compared."""
import shutil
import subprocess

import pytest

from build_support.settings import ROOT, manifest

COMPILER = shutil.which("g++") or shutil.which("c++")
FOLDER = ROOT / "tests" / "csrc" / "emulation"
FLAGS = ["-std=c++17", "-O1", "-Wall", "-Werror", "-Wno-unknown-pragmas", f"-I{FOLDER}", f"-I{ROOT / 'csrc'}"]
TILES = {k.config.name: k.config.cpp for k in manifest.manifest() if k.arch == "sm80" and not k.config.splits}


def run(program, folder, *definitions):
    """Of the two files only the program is sanitized: the other one is what the sanitizer calls."""
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    objects = {program: ["-fsanitize=thread"], "accesses": []}
    for name, flags in objects.items():
        subprocess.run([COMPILER, *FLAGS, *flags, *definitions, "-c", FOLDER / f"{name}.cpp", "-o", folder / f"{name}.o"], check=True)
    subprocess.run([COMPILER, *(folder / f"{name}.o" for name in objects), "-o", folder / program], check=True)
    done = subprocess.run([folder / program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("tile", TILES)
def test_every_program(tile, tmp_path):
    """Agrees with the CPU back end, and no access races with another."""
    run("main", tmp_path, f"-DCODA_CONFIG={TILES[tile]}")


def test_races_are_found(tmp_path):
    run("races", tmp_path)
