"""python -m coda.bench without a GPU: what it would time."""
import torch

from build_support.settings import manifest
from coda.bench import PRESETS, Preset, problems


def test_every_program_is_timed_somewhere():
    rows = problems(Preset(64, 96, 4, 2, 16, 200), torch.bfloat16, 32, "cpu")
    assert {r.program for r in rows} == {k.program for k in manifest.manifest()}
    layouts = {(k.program, k.layout) for k in manifest.manifest()}
    assert all((r.program, r.layout) in layouts for r in rows)
    for row in rows:
        row.ours()
        row.bare()
        if row.eager is not None:
            row.eager(*row.operands)


def test_presets_are_whole_heads():
    assert all(p.heads * p.head_dim == p.dim and p.heads % p.kv_heads == 0 for p in PRESETS.values())
