"""setup.py and the Makefile's environment, up to where a compiler would run."""
import os
import subprocess
import sys
import tarfile

import pytest

from build_support.settings import ROOT


def setup(project, *arguments, **environ):
    command = [sys.executable, "setup.py", *arguments]
    return subprocess.run(command, cwd=project, env={**os.environ, **environ}, capture_output=True, text=True)


@pytest.fixture
def no_torch(tmp_path):
    """The environment of a Python without torch."""
    module = tmp_path / "blocked" / "torch" / "__init__.py"
    module.parent.mkdir(parents=True)
    module.write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    return {"PYTHONPATH": str(tmp_path / "blocked")}


def test_without_torch_the_build_says_what_to_do(project, no_torch):
    done = setup(project, "build_ext", "--inplace", **no_torch)
    assert done.returncode != 0
    assert "--no-build-isolation" in done.stderr and "Traceback" not in done.stderr


def test_metadata_needs_no_torch(project, no_torch):
    done = setup(project, "--name", "--version", **no_torch)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["coda-kernels", "0.1.0"]
    done = setup(project, "egg_info", "--egg-base", ".", **no_torch)
    assert done.returncode == 0, done.stderr
    assert "Name: coda-kernels" in (project / "coda_kernels.egg-info" / "PKG-INFO").read_text()


def test_sdist_has_all_that_a_build_needs(project, no_torch):
    done = setup(project, "sdist", **no_torch)
    assert done.returncode == 0, done.stderr
    (archive,) = (project / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    for folder in ("build_support", "coda", "csrc", "third_party"):
        files = [p for p in (project / folder).rglob("*.*") if p.is_file()]
        assert {str(p.relative_to(project)) for p in files} <= names
    assert {"Makefile", "CMakeLists.txt", "pyproject.toml", "setup.py"} <= names


@pytest.mark.parametrize(
    "environ, message",
    [({"CODA_PROGRAMS": "nothing"}, "unknown program 'nothing'"), ({"CODA_CUDA": "1", "CUDA_HOME": "/nowhere"}, "CODA_CUDA=1: "),
     ({"MAX_JOBS": "x"}, "MAX_JOBS=x")],
)  # fmt: skip
def test_a_wrong_setting_is_one_line(project, environ, message):
    pytest.importorskip("torch")
    done = setup(project, "build_ext", "--inplace", **environ)
    assert done.returncode != 0
    assert message in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_environment_shares_an_installed_torch(tmp_path):
    torch = pytest.importorskip("torch")
    subprocess.run([sys.executable, str(ROOT / "build_support" / "make_venv.py"), str(tmp_path / "venv")], check=True)
    code = "import sys, torch, pip; print(sys.prefix, torch.__version__)"
    done = subprocess.run([str(tmp_path / "venv" / "bin" / "python"), "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(tmp_path / "venv"), torch.__version__]


def test_make_help():
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "make train" in done.stdout and "make test" in done.stdout
