import os
import re
import subprocess
import sys

import pytest
from stubs import write_cutlass

from build_support.settings import ROOT, cutlass


@pytest.mark.parametrize("sub", ["", "include"])
def test_path_is_a_checkout_or_its_include_folder(cutlass_path, sub):
    found = cutlass.find({"CUTLASS_PATH": str(cutlass_path / sub)})
    assert found.include == cutlass_path / "include" and found.version == "4.2.0"


def test_wheel(tmp_path):
    write_cutlass(tmp_path / "site" / "cutlass_library" / "source", "4.2.0")
    found = cutlass.find({}, [str(tmp_path / "empty"), str(tmp_path / "site")])
    assert found.include == tmp_path / "site" / "cutlass_library" / "source" / "include"


def test_path_comes_before_the_wheel(tmp_path, cutlass_path):
    write_cutlass(tmp_path / "site" / "cutlass_library" / "source", "4.2.0")
    assert cutlass.find({"CUTLASS_PATH": str(cutlass_path)}, [str(tmp_path / "site")]).include == cutlass_path / "include"


def test_missing(tmp_path):
    with pytest.raises(cutlass.CutlassMissing, match="nvidia-cutlass==4.2.0.0"):
        cutlass.find({}, [str(tmp_path)])
    with pytest.raises(cutlass.CutlassMissing, match="CUTLASS_PATH="):
        cutlass.find({"CUTLASS_PATH": str(tmp_path)}, [])


def test_other_version(tmp_path):
    environ = {"CUTLASS_PATH": str(write_cutlass(tmp_path / "other", "4.3.1"))}
    with pytest.raises(cutlass.CutlassError) as e:
        cutlass.find(environ)
    assert "4.3.1" in str(e.value) and "4.2.0" in str(e.value) and "\n" not in str(e.value)
    assert cutlass.find({**environ, "CODA_ALLOW_CUTLASS_VERSION": "1"}).version == "4.3.1"


def test_header_without_a_version(tmp_path):
    (tmp_path / "cutlass").mkdir()
    (tmp_path / "cutlass" / "version.h").write_text("#pragma once\n")
    with pytest.raises(cutlass.CutlassError, match="CUTLASS_MAJOR"):
        cutlass.find({"CUTLASS_PATH": str(tmp_path)})


def run(*arguments, **environ):
    command = [sys.executable, str(ROOT / "third_party" / "cutlass.py"), *arguments]
    return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True)


def test_script(tmp_path, cutlass_path):
    done = run(CUTLASS_PATH=str(cutlass_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{cutlass_path / 'include'}\n", "")
    done = run(CUTLASS_PATH=str(write_cutlass(tmp_path / "other", "3.9.2")))
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1 and "3.9.2" in done.stderr
    assert run("--wheel").stdout == f"{cutlass.WHEEL}\n"


def test_the_extra_has_the_same_pin():
    text = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^cuda = \["(.+)"\]$', text, re.MULTILINE)[1] == cutlass.WHEEL
