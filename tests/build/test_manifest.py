import re

from build_support.settings import ROOT, manifest


def test_keys_are_unique_and_valid_names():
    keys = [k.key for k in manifest.manifest()]
    assert len(keys) == len(set(keys))
    assert all(re.fullmatch(r"[a-z]\w*", k) for k in keys)


def test_headers_exist():
    for kernel in manifest.manifest():
        assert (ROOT / "csrc" / kernel.header).is_file()
        assert (ROOT / "csrc" / kernel.arch / "gemm.hpp").is_file()


def test_sources_keep_their_time_stamps(tmp_path):
    kernels = manifest.manifest()
    files = manifest.write_sources(tmp_path, kernels)
    assert len(files) == len({k.source for k in kernels}) + 1 < len(kernels)
    before = {f: f.stat().st_mtime_ns for f in files}
    assert manifest.write_sources(tmp_path, kernels) == files
    assert {f: f.stat().st_mtime_ns for f in files} == before


def test_sources_of_removed_kernels_go(tmp_path):
    kernels = manifest.manifest()
    manifest.write_sources(tmp_path, kernels)
    manifest.write_sources(tmp_path, kernels[:1])
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([f"{kernels[0].source}.cu", "registry.cpp"])


def test_every_kernel_is_in_one_source_for_its_architecture(tmp_path):
    kernels = manifest.manifest()
    manifest.write_sources(tmp_path, kernels)
    texts = {p.stem: p.read_text() for p in tmp_path.glob("*.cu")}
    for k in kernels:
        assert [name for name, text in texts.items() if f"const {k.key} =" in text] == [k.source]
        assert {other.arch for other in kernels if other.source == k.source} == {k.arch}
        assert all(f'#include "{h}"' in texts[k.source] for h in (k.header, f"{k.arch}/gemm.hpp"))


def test_a_source_does_not_depend_on_the_selection(tmp_path):
    kernels = manifest.manifest()
    manifest.write_sources(tmp_path / "all", kernels)
    some = manifest.select(kernels, "residual_sqsum, dlogits")
    files = manifest.write_sources(tmp_path / "some", some)
    assert {f.name for f in files} == {f"{k.source}.cu" for k in some} | {"registry.cpp"}
    assert all(f.read_text() == (tmp_path / "all" / f.name).read_text() for f in files if f.suffix == ".cu")
    registry = (tmp_path / "some" / "registry.cpp").read_text()
    assert [k.key for k in kernels if f"&{k.key}," in registry] == [k.key for k in some]


def test_every_program_exists_for_every_architecture():
    rows = lambda arch: {(k.program, k.layout, k.dtype) for k in manifest.manifest() if k.arch == arch}
    assert rows("sm90") == rows("sm80")


def test_registry_says_what_was_compiled():
    text = manifest.registry_source([], [manifest.Code("sm80", "8.6"), manifest.Code("sm80", "8.0", ptx=True), manifest.Code("sm80", "9.0", few_rows=True)])
    assert '{"sm80", 86, false, false},\n    {"sm80", 80, true, false},\n    {"sm80", 90, false, true},' in text and "{nullptr, 0, code, 3}" in text


def test_registry_lists_every_kernel():
    kernels = manifest.manifest()
    text = manifest.registry_source(kernels)
    assert all(f"&{k.key}," in text for k in kernels)
    assert "nullptr, 0" in manifest.registry_source([])
