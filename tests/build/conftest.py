import shutil

import pytest
from stubs import write_cutlass, write_toolkit

from build_support.settings import ROOT


@pytest.fixture
def toolkit(tmp_path):
    return write_toolkit(tmp_path / "cuda")


@pytest.fixture
def cutlass_path(tmp_path):
    return write_cutlass(tmp_path / "cutlass", "4.2.0")


@pytest.fixture
def project(tmp_path):
    """A copy of what an sdist needs."""
    copy = tmp_path / "project"
    copy.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "Makefile", "CMakeLists.txt"):
        shutil.copy(ROOT / name, copy)
    for name in ("build_support", "coda", "csrc", "third_party"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (copy / "README.md").write_text("# CODA\n")
    return copy
