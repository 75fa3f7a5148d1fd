import os
import pathlib
import subprocess
import sys

import pytest

from build_support import compile, settings
from build_support.compile import Object
from build_support.settings import BuildError, Torch

TIMED = str(compile.TIMED)


@pytest.fixture(params=["ninja", "pool"])
def tool(request, monkeypatch):
    if request.param == "pool":
        monkeypatch.setattr(settings, "find_ninja", lambda environ: None)
    elif settings.find_ninja(os.environ) is None:
        pytest.skip("ninja is not installed")
    return request.param


class Workshop:
    """Three sources: a and b include common.h, c includes nothing."""

    def __init__(self, root: pathlib.Path, toolkit: pathlib.Path) -> None:
        self.root, self.log, self.flags = root, toolkit / "log", ()
        self.nvcc = str(toolkit / "bin" / "nvcc")
        root.mkdir()
        self.header = root / "common.h"
        self.header.write_text("// one\n")
        for name in "abc":
            (root / f"{name}.cu").write_text(f'#include "{self.header}"\n' if name != "c" else "// nothing\n")

    def object(self, name: str) -> Object:
        source, output = self.root / f"{name}.cu", self.root / f"{name}.o"
        return Object(source, output, (self.nvcc, *self.flags, "-MD", "-MF", f"{output}.d", "-c", str(source), "-o", str(output)))

    def build(self, names: str = "abc") -> str:
        """The names of what was compiled."""
        self.log.unlink(missing_ok=True)
        compile.update([self.object(n) for n in names], self.root)
        return "".join(sorted(pathlib.Path(line).stem for line in self.log.read_text().split())) if self.log.exists() else ""


@pytest.fixture
def shop(tmp_path, toolkit):
    return Workshop(tmp_path / "shop", toolkit)


def test_only_what_changed_is_compiled(tool, shop):
    assert shop.build() == "abc"
    assert shop.build() == ""
    shop.header.write_text("// two\n")
    assert shop.build() == "ab"
    (shop.root / "c.cu").write_text("// still nothing\n")
    assert shop.build() == "c"
    shop.flags = ("-O2",)
    assert shop.build() == "abc"
    assert shop.build() == ""
    shop.object("b").output.unlink()
    assert shop.build() == "b"


def test_a_selection_leaves_the_others_current(tool, shop):
    assert shop.build() == "abc"
    assert shop.build("a") == ""
    assert shop.build() == ""


def test_ninja_and_the_pool_agree(shop, monkeypatch):
    if settings.find_ninja(os.environ) is None:
        pytest.skip("ninja is not installed")
    assert shop.build() == "abc"
    with monkeypatch.context() as m:
        m.setattr(settings, "find_ninja", lambda environ: None)
        assert shop.build() == ""
        shop.header.write_text("// two\n")
        assert shop.build() == "ab"


def test_a_failure_is_one_sentence_and_leaves_no_object(tool, shop, capfd):
    (shop.root / "b.cu").write_text("#error\n")
    with pytest.raises(BuildError, match="did not compile"):
        shop.build("b")
    assert "#error" in capfd.readouterr().out
    assert not shop.object("b").output.exists() and not shop.object("b").record_file.exists()
    (shop.root / "b.cu").write_text("// mended\n")
    assert shop.build("b") == "b"


def test_the_pool_does_not_trust_an_interrupted_object(shop, monkeypatch):
    monkeypatch.setattr(settings, "find_ninja", lambda environ: None)
    assert shop.build() == "abc"
    shop.object("a").record_file.unlink()  # timed.py removes it first, and writes it last
    assert shop.build() == "a"


def test_the_pool_warns_once_in_one_line(shop, monkeypatch, capsys):
    monkeypatch.setattr(settings, "find_ninja", lambda environ: None)
    shop.build()
    assert capsys.readouterr().err.count("\n") == 1


def test_list_objects(tmp_path, toolkit, cutlass_path):
    environ = {"CUDA_HOME": str(toolkit), "CUTLASS_PATH": str(cutlass_path), "CODA_CUDA": "1", "PATH": str(tmp_path)}
    plan = settings.make_plan({**environ, "CODA_PROGRAMS": "dswiglu", "TORCH_CUDA_ARCH_LIST": "8.0;9.0"}, Torch("2.11.0", "13.0"))
    objects = compile.list_objects(plan, tmp_path / "kernels", environ)
    commands = {o.source.stem: " ".join(o.command) for o in objects}
    kernels = {k.source for k in plan.kernels}
    assert {k.program for k in plan.kernels} == {"dswiglu"} and set(commands) - kernels == {p.stem for p in (settings.ROOT / "csrc" / "reduce").glob("*.cu")}
    ptx = "-gencode=arch=compute_80,code=compute_80"
    for name in kernels:
        few_rows = " -gencode=arch=compute_90,code=sm_90" if "_64x" in name else ""
        expected = f"-gencode=arch=compute_80,code=sm_80 {ptx}{few_rows} -MD" if name.endswith("_sm80") else "-gencode=arch=compute_90a,code=sm_90a -MD"
        assert expected in commands[name] and commands[name].count("-gencode") == expected.count("-gencode")
    assert f"-gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=sm_90 {ptx} -MD" in commands["reduce"]
    assert commands["reduce"].startswith(str(toolkit / "bin" / "nvcc"))  # no ccache on this PATH
    sources = list((tmp_path / "kernels" / "src").glob("*.cu"))
    assert len(sources) == len({k.source for k in settings.manifest.manifest()})  # of all programs, so that none is regenerated when the selection changes


def test_the_whole_manifest_with_a_stub(tool, tmp_path, toolkit, cutlass_path):
    environ = {**os.environ, "CUDA_HOME": str(toolkit), "CUTLASS_PATH": str(cutlass_path), "CODA_CUDA": "1", "CCACHE_DISABLE": "1"}
    plan = settings.make_plan({**environ, "CODA_PROGRAMS": "", "TORCH_CUDA_ARCH_LIST": ""}, Torch("2.11.0", "13.0"))
    objects = compile.build(plan, tmp_path / "kernels", environ)
    assert len(objects) > len({k.source for k in plan.kernels}) and all(o.output.exists() for o in objects)
    log = toolkit / "log"
    log.unlink()
    assert compile.build(plan, tmp_path / "kernels", environ) == objects
    assert not log.exists()
    assert f"{len(objects)} files" in compile.report(objects)


def test_ninja_file_escapes(tmp_path):
    o = Object(pathlib.Path("/a b/c$d.cu"), pathlib.Path("/a b/c:d.o"), ("nvcc", "$HOME", "it's"))
    text = compile.ninja_file([o])
    assert "build /a$ b/c$:d.o: compile /a$ b/c$$d.cu\n" in text
    assert "compile = nvcc '$$HOME' 'it'\"'\"'s'\n" in text


def test_dependencies():
    text = "/o ut.o: /s\\ rc.cu \\\n    /usr/include/a.h \\\n  b$$.h\n"
    assert compile.dependencies(text) == ["/s rc.cu", "/usr/include/a.h", "b$.h"]


def test_report_limit(shop):
    shop.build("c")
    o = shop.object("c")
    assert "c.cu" in compile.report([o], limit=settings.GIB)
    with pytest.raises(BuildError, match="to compile: c.cu"):
        compile.report([o], limit=1)


def test_timed(tmp_path):
    target = tmp_path / "x.o"
    code = f"open({str(target)!r}, 'w').close()"
    assert subprocess.run([sys.executable, TIMED, str(target), sys.executable, "-c", code]).returncode == 0
    record = Object(target, target, ()).record()
    assert record["seconds"] >= 0 and record["peak_memory"] > 1 << 20 and record["command"] == [sys.executable, "-c", code]
    assert subprocess.run([sys.executable, TIMED, str(target), sys.executable, "-c", f"{code}; exit(3)"]).returncode == 3
    assert list(tmp_path.iterdir()) == []
