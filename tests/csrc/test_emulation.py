"""The code of the SM80 kernels runs on the CPU, with csrc/sm80/device.hpp replaced by emulation/sm80/device.hpp."""
import shutil
import subprocess

import pytest

from build_support.settings import ROOT

COMPILER = shutil.which("g++") or shutil.which("c++")


def test_every_program_agrees_with_the_cpu_back_end(tmp_path):
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    folder = ROOT / "tests" / "csrc" / "emulation"
    flags = ["-std=c++17", "-O1", "-Wall", "-Werror", "-Wno-unknown-pragmas", f"-I{folder}", f"-I{ROOT / 'csrc'}"]
    subprocess.run([COMPILER, *flags, folder / "main.cpp", "-o", tmp_path / "main"], check=True)
    done = subprocess.run([tmp_path / "main"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
