"""python -m coda.bench without a GPU: what it would time."""
import pytest
import torch

from build_support.settings import manifest
from coda.bench import PRESETS, Preset, main, problems


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


@pytest.mark.parametrize("arguments, message", [("--tokens 16,x", "--tokens has x, expected positive"), ("--tokens 0", "--tokens has 0"),
                                                ("--whole --tokens 7", "--tokens has 7, expected even"), ("--tokens 7,", "--tokens has nothing")])
def test_tokens_are_numbers(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench", *arguments.split()])
    with pytest.raises(SystemExit):
        main()
    assert message in capsys.readouterr().err
