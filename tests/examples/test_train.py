"""examples/train.py: tiny runs from the command line to the files, interruption and resumption, error messages."""

import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib", reason="the example draws with matplotlib")
pytest.importorskip("tqdm", reason="the example shows its progress with tqdm")

import coda

SCRIPT = Path(__file__).parents[2] / "examples" / "train.py"
TINY = (
    "--device cpu --dim 16 --layers 1 --heads 2 --kv-heads 1 --ffn-dim 24 --seq-len 16 --batch 4 "
    "--steps 12 --warmup 3 --lr 0.01 --eval-every 4 --seed 3"
).split()


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_example", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"line {i}: the quick brown fox jumps over the lazy dog\n" for i in range(200)))
    return str(path)


def interrupt_at(script, monkeypatch, step, number=signal.SIGINT):
    """The process signals itself while that step runs."""
    original = script.Run.train_step

    def train_step(self, data):
        if self.step + 1 == step:
            os.kill(os.getpid(), number)
        original(self, data)

    monkeypatch.setattr(script.Run, "train_step", train_step)


def assert_same(a, b):
    """Equal bit for bit, through nested dicts and lists."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_same(x, y)
    else:
        assert a == b


def checkpoint(out):
    return torch.load(out / "checkpoint.pt", weights_only=True)


# Whole runs


def test_a_run_leaves_its_files_and_lowers_the_loss(script, text, tmp_path, capsys):
    out = tmp_path / "new" / "run"
    assert script.main([text, *TINY, "--steps", "60", "--out", str(out)]) == 0
    printed = capsys.readouterr().out

    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((out / "run.json").read_text())
    history = summary["history"]
    assert summary["finished"] and summary["step"] == 60 and summary["unit"] == "nats per byte"
    assert len(history["train_loss"]) == 60
    assert history["val_step"] == list(range(0, 61, 4))
    assert history["train_loss"][0] == pytest.approx(math.log(256), abs=0.1)
    assert summary["final_train_loss"] == pytest.approx(sum(history["train_loss"][-20:]) / 20)
    assert summary["final_train_loss"] < history["train_loss"][0] - 1
    assert summary["final_val_loss"] == history["val_loss"][-1] < history["val_loss"][0] - 1
    assert summary["tokens_per_second"] > 0
    assert summary["backend"] == coda.backend_of_last_call() == "cpu"
    assert summary["config"]["dim"] == 16 and summary["config"]["data"] == [text]
    assert "compare" not in summary

    assert "coda:" in printed and "back end of this model: cpu" in printed and "sample:" in printed
    last = printed.splitlines()[-1]
    assert re.fullmatch(r"final loss after 60 steps: training \d\.\d{4}, validation \d\.\d{4} nats per byte", last)
    assert f"{summary['final_val_loss']:.4f}" in last
    assert sorted(path.name for path in out.iterdir()) == ["checkpoint.pt", "loss.png", "run.json"]


def test_the_seed_decides_the_run(script, text, tmp_path):
    for name, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        assert script.main([text, *TINY, "--steps", "3", "--seed", seed, "--out", str(tmp_path / name)]) == 0
    a, b, c = (checkpoint(tmp_path / name)["history"]["train_loss"] for name in "abc")
    assert a == b != c


def test_compare_reports_the_largest_difference(script, text, tmp_path, capsys):
    assert script.main([text, *TINY, "--compare", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    summary = json.loads((tmp_path / "run.json").read_text())
    ours, reference = summary["history"]["train_loss"], summary["history"]["reference_loss"]
    largest = max(abs(a - b) for a, b in zip(ours, reference, strict=True))
    assert summary["compare"]["max_abs_loss_difference"] == largest < 1e-3
    assert summary["compare"]["max_abs_loss_difference_first_100_steps"] == largest
    assert f"over 12 steps: {largest:.3g} nats per byte" in printed


def test_the_reference_is_plain_torch(script, text, tmp_path, monkeypatch):
    """So that --compare does not compare coda with itself."""
    config = script.new_config(script.given_options(script.parse_args([text, *TINY])))
    learner = script.Learner(config, "eager")

    def refuse(*args, **options):
        raise AssertionError("the reference called coda")

    for name in ("fused_mlp_forward", "linear", "linear_residual", "norm_linear", "norm_linear_rope"):
        monkeypatch.setattr(coda, name, refuse)
    monkeypatch.setattr(coda.nn.backends, "mlp_residual", refuse)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    learner.step(tokens, tokens, 1e-3)
    with pytest.raises(AssertionError, match="called coda"):
        script.Learner(config, "coda").step(tokens, tokens, 1e-3)


def test_bf16_run(script, text, tmp_path):
    assert script.main([text, *TINY, "--steps", "40", "--dtype", "bf16", "--out", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "run.json").read_text())
    assert summary["final_train_loss"] < 5
    assert checkpoint(tmp_path)["learner"]["model"]["embedding.weight"].dtype == torch.float32


# Interruption and resumption


@pytest.mark.parametrize("number, extra", [(signal.SIGINT, ()), (signal.SIGTERM, ("--compare",))])
def test_a_resumed_run_equals_the_uninterrupted_one(script, text, tmp_path, monkeypatch, capsys, number, extra):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert script.main([text, *TINY, *extra, "--out", str(whole)]) == 0

    handler = signal.getsignal(number)
    with monkeypatch.context() as patch:
        interrupt_at(script, patch, 5, number)
        assert script.main([text, *TINY, *extra, "--out", str(parts)]) == 128 + number
    assert signal.getsignal(number) is handler
    printed = capsys.readouterr().out
    assert "stopped at step 5 of 12" in printed and f"--resume --out {parts}" in printed
    summary = json.loads((parts / "run.json").read_text())
    assert not summary["finished"] and len(summary["history"]["train_loss"]) == 5
    assert (parts / "loss.png").exists()

    torch.manual_seed(12345)  # what the process did before must not matter
    assert script.main(["--resume", "--out", str(parts)]) == 0
    assert f"resumed from {parts / 'checkpoint.pt'} at step 5 of 12" in capsys.readouterr().out
    expected, resumed = checkpoint(whole), checkpoint(parts)
    for state in (expected, resumed):
        del state["seconds"]
    assert_same(resumed, expected)
    assert_same(
        json.loads((parts / "run.json").read_text())["history"],
        json.loads((whole / "run.json").read_text())["history"],
    )


def test_resume_after_a_kill_repeats_from_the_last_checkpoint(script, text, tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert script.main([text, *TINY, "--out", str(whole)]) == 0

    class Killed(BaseException):
        pass

    original = script.Run.train_step

    def train_step(self, data):
        if self.step == 7:
            raise Killed
        original(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(script.Run, "train_step", train_step)
        with pytest.raises(Killed):
            script.main([text, *TINY, "--save-every", "3", "--out", str(parts)])
    assert checkpoint(parts)["step"] == 6
    assert script.main(["--resume", *TINY, text, "--out", str(parts)]) == 0
    assert_same(checkpoint(parts)["history"], checkpoint(whole)["history"])
    assert_same(checkpoint(parts)["learner"], checkpoint(whole)["learner"])


def test_resuming_a_finished_run_changes_nothing(script, text, tmp_path):
    assert script.main([text, *TINY, "--out", str(tmp_path)]) == 0
    before = (tmp_path / "checkpoint.pt").read_bytes(), json.loads((tmp_path / "run.json").read_text())
    assert script.main(["--resume", "--out", str(tmp_path)]) == 0
    assert ((tmp_path / "checkpoint.pt").read_bytes(), json.loads((tmp_path / "run.json").read_text())) == before


def test_ctrl_c_in_a_real_process(text, tmp_path):
    """As a user runs it: own process, Ctrl-C somewhere in the middle."""
    package_parent = str(Path(coda.__file__).parents[1])
    path = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(SCRIPT), text, *TINY, "--steps", "1000000", "--save-every", "1", "--threads", "1"]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "checkpoint.pt").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert "Traceback" not in output and "--resume --out" in output
    state = checkpoint(tmp_path)
    assert state["step"] == len(state["history"]["train_loss"]) >= 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.pt", "loss.png", "run.json"]


def test_a_failed_write_keeps_the_old_file(script, tmp_path):
    path = tmp_path / "checkpoint.pt"
    path.write_text("old")
    with pytest.raises(RuntimeError), script.replacing(path) as temporary:
        temporary.write_text("half of the n")
        raise RuntimeError("disk full")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


# Error messages: one line at the end, no traceback, exit status 1


def run_for_error(script, capsys, *argv):
    assert script.main(list(argv)) == 1
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    message = errors.splitlines()[-1]
    assert message.startswith("error: ")
    return message


@pytest.fixture(scope="module")
def finished_run(script, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished")
    assert script.main([text, *TINY, "--steps", "2", "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize(
    "options, field, value, saved",
    [
        (["--dim", "32"], "--dim", 32, 16),
        (["--kv-heads", "2"], "--kv-heads", 2, 1),
        (["--lr", "0.5"], "--lr", 0.5, 0.01),
        (["--steps", "20"], "--steps", 20, 2),
        (["--compare"], "--compare", True, False),
        (["--dtype", "bf16"], "--dtype", "bf16", "fp32"),
        ([str(SCRIPT)], "the data", [str(SCRIPT)], None),
    ],
)
def test_resume_with_another_config_names_the_field(script, capsys, finished_run, options, field, value, saved):
    message = run_for_error(script, capsys, *options, "--resume", "--out", str(finished_run))
    assert f"{field} is {value!r} but the checkpoint was made with {'' if saved is None else repr(saved)}" in message


def test_resume_with_changed_text(script, capsys, tmp_path):
    data, out = tmp_path / "data.txt", tmp_path / "out"
    data.write_text("some text " * 100)
    assert script.main([str(data), *TINY, "--steps", "2", "--out", str(out)]) == 0
    data.write_text("other text " * 100)
    capsys.readouterr()
    assert "the text differs" in run_for_error(script, capsys, "--resume", "--out", str(out))


def test_missing_and_damaged_checkpoints(script, capsys, finished_run, tmp_path):
    resume = ("--resume", "--out", str(tmp_path))
    assert "there is no checkpoint" in run_for_error(script, capsys, *resume)
    whole = (finished_run / "checkpoint.pt").read_bytes()
    for damaged in (b"", b"not a checkpoint", whole[: len(whole) // 2]):
        (tmp_path / "checkpoint.pt").write_bytes(damaged)
        assert "cannot read the checkpoint" in run_for_error(script, capsys, *resume)
    for other in ({"weights": torch.zeros(2)}, [1, 2]):
        torch.save(other, tmp_path / "checkpoint.pt")
        assert "cannot read the checkpoint" in run_for_error(script, capsys, *resume)
    torch.save({"format": 99}, tmp_path / "checkpoint.pt")
    assert "has format 99, expected 1" in run_for_error(script, capsys, *resume)


def test_data_errors(script, capsys, tmp_path):
    out = ("--out", str(tmp_path / "out"))
    missing = str(tmp_path / "nothing.txt")
    assert f"there is no file or folder {missing!r}" in run_for_error(script, capsys, missing, *TINY, *out)

    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "empty.txt").touch()
    (folder / "binary.dat").write_bytes(b"\0\1\2" * 100)
    (folder / ".hidden").write_text("text " * 100)
    assert "found no text in" in run_for_error(script, capsys, str(folder), *TINY, *out)

    (folder / "short.txt").write_text("x" * 100)
    message = run_for_error(script, capsys, str(folder), *TINY, *out)
    assert "the validation split has 10 bytes, too few for --seq-len 16, which needs 17" in message
    assert not (tmp_path / "out").exists()


def test_argument_errors(script, capsys, text, tmp_path):
    out = ("--out", str(tmp_path / "out"))
    message = run_for_error(script, capsys, text, *TINY, "--kv-heads", "3", *out)
    assert "num_kv_heads is 3, expected a divisor of num_heads = 2" in message
    assert "--device is 'tpu'" in run_for_error(script, capsys, text, *TINY, "--device", "tpu", *out)
    assert "CUDA devices" in run_for_error(script, capsys, text, *TINY, "--device", "cuda:99", *out)
    (tmp_path / "file").touch()
    message = run_for_error(script, capsys, text, *TINY, "--out", str(tmp_path / "file"))
    assert "cannot make the folder --out" in message
    for bad in (["--steps", "0"], ["--lr", "-1"], ["--lr", "nan"], ["--seed", "-1"], ["--dtype", "fp8"]):
        with pytest.raises(SystemExit) as exit_:
            script.main([text, *TINY, *bad, *out])
        assert exit_.value.code == 2


def test_a_diverging_run_stops_with_advice(script, capsys, text, tmp_path, monkeypatch):
    monkeypatch.setattr(script.Learner, "step", lambda self, tokens, targets, lr: float("nan"))
    message = run_for_error(script, capsys, text, *TINY, "--out", str(tmp_path))
    assert "the loss of step 1 is nan; try a smaller --lr" in message


# Pieces


def test_default_data_is_the_standard_library(script):
    files = script.find_files([])
    assert len(files) > 200 and files == script.find_files([])
    assert all(path.suffix == ".py" for path in files)
    parts = {part for path in files for part in path.relative_to(os.path.dirname(os.__file__)).parts}
    assert "argparse.py" in parts and not parts & {"site-packages", "test", "tests", "__pycache__"}


def test_the_last_tenth_of_the_files_is_held_out(script, tmp_path):
    for i in range(30):
        (tmp_path / f"{i:02}.txt").write_text(f"{i:02} " * 20)
    train, val = script.load_text({"data": [str(tmp_path)], "seq_len": 16})
    assert set(train.split()) == {b"%02d" % i for i in range(27)}
    assert set(val.split()) == {b"27", b"28", b"29"}


@pytest.mark.parametrize("size", [17, 18, 1000])
def test_batches_stay_inside_the_text(script, size):
    data = torch.arange(size).to(torch.uint8)
    config = {"seq_len": 16, "batch": 8}
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(50):
        tokens, targets = script.training_batch(data, config, generator)
        assert tokens.shape == targets.shape == (8, 16) and tokens.dtype == torch.int64
        assert torch.equal((tokens + 1) % 256, targets)
        seen |= set(tokens[:, 0].tolist())
    if size < 256:
        assert seen == set(range(size - 16))
    batches = list(script.validation_batches(data, config))
    assert len(batches) == script.VALIDATION_BATCHES
    assert batches[0][0][0, 0] == data[0] and batches[-1][1][-1, -1] == data[-1]


def test_learning_rate_schedule(script):
    config = {"lr": 2.0, "warmup": 4, "steps": 14}
    rates = [script.learning_rate(step, config) for step in range(15)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[9] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert rates[14] == pytest.approx(0.2)
    assert all(a >= b for a, b in zip(rates[3:], rates[4:]))
    assert script.learning_rate(0, {"lr": 1.0, "warmup": 0, "steps": 1}) == 1.0


def test_smoothing_keeps_a_constant_and_the_length(script):
    assert script.smooth([3.0] * 40) == pytest.approx([3.0] * 40)
    assert script.smooth([]) == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_defaults_make_a_valid_model(script, monkeypatch, device):
    monkeypatch.setattr(script, "check_device", lambda name: None)
    for given in ({}, {"dim": 64}, {"dim": 192}):
        config = script.new_config({"device": device, **given})
        assert script.decoder_config(config).ffn_dim % 64 == 0
        assert config["dtype"] == {"cpu": "fp32", "cuda": "bf16"}[device]
        options = vars(script.parse_args([]))
        assert set(config) == set(options) - {"out", "resume", "save_every", "threads"}
