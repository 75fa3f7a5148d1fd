#!/usr/bin/env python3
"""Train a byte-level language model on real text with coda.

    python examples/train.py                        # the Python standard library's source, 2 to 3 minutes on 2 cores
    python examples/train.py notes.txt src/         # your own files and folders
    python examples/train.py --compare --steps 100  # beside the same model in plain PyTorch, on the same batches
    python examples/train.py --resume               # continue an interrupted run, bit for bit

The model is coda.nn.Decoder. Ctrl-C stops after the current step and saves. The folder --out holds

    checkpoint.pt   model, optimizer, random states and history
    run.json        configuration, history, final losses, tokens per second, back end
    loss.png        training and validation loss over the steps

Losses are in nats per byte: 5.55 (ln 256) is a uniform guess; divide by ln 2 for bits per byte.
"""

import argparse
import hashlib
import json
import math
import os
import signal
import sys
import sysconfig
import time
from contextlib import contextmanager
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draw into files; a display is not needed
import matplotlib.pyplot as plt
import torch
from tqdm import tqdm

import coda
from coda.nn import Decoder, DecoderConfig

# What a run uses for each option that is not given, by device. heads, kv_heads and ffn_dim follow from dim.
DEFAULTS = {
    "cpu": dict(dim=128, layers=4, seq_len=256, batch=8, steps=1000, lr=3e-3, warmup=50, dtype="fp32", eval_every=100),
    "cuda": dict(
        dim=1024, layers=12, seq_len=1024, batch=16, steps=1000, lr=6e-4, warmup=100, dtype="bf16", eval_every=100
    ),
}
HEAD_DIM = 64
MIN_LR_FRACTION = 0.1
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
MAX_GRAD_NORM = 1.0
VALIDATION_BATCHES = 8
FINAL_WINDOW = 20  # the final training loss is the mean over this many steps
SAMPLE_BYTES = 300

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CHECKPOINT_FORMAT = 1


class TrainError(Exception):
    """A mistake in the arguments or the data: main() prints the message without a traceback."""


# Configuration


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("data", nargs="*", type=Path, help="text files or folders (default: Python's standard library)")

    model = parser.add_argument_group("model and training (kept by --resume)")
    model.add_argument("--steps", type=positive_int)
    model.add_argument("--batch", type=positive_int, help="sequences per step")
    model.add_argument("--seq-len", type=positive_int, help="bytes per sequence")
    model.add_argument("--dim", type=positive_int, help="width of the model")
    model.add_argument("--layers", type=positive_int)
    model.add_argument("--heads", type=positive_int, help=f"query heads (default: dim / {HEAD_DIM})")
    model.add_argument("--kv-heads", type=positive_int, help="key and value heads (default: heads / 2 if even)")
    model.add_argument("--ffn-dim", type=positive_int, help="feed-forward width (default: 8/3 dim)")
    model.add_argument("--lr", type=positive_float, help="peak learning rate")
    model.add_argument("--warmup", type=natural_int, help="steps of linear warm-up before the cosine decay")
    model.add_argument("--seed", type=natural_int, help="default: 0")
    model.add_argument("--dtype", choices=DTYPES, help="bf16: autocast over fp32 parameters (default on CUDA)")
    model.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    model.add_argument("--eval-every", type=positive_int, help="steps between validations")
    model.add_argument(
        "--compare", action="store_true", default=None, help="train the plain PyTorch reference too (twice the time)"
    )

    run = parser.add_argument_group("this run")
    run.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the results (default: runs/demo)")
    run.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    run.add_argument("--save-every", type=positive_int, default=100, help="steps between checkpoints (default: 100)")
    run.add_argument("--threads", type=positive_int, help="CPU threads (default: torch's choice)")
    return parser.parse_args(argv)


def positive_int(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return value


def natural_int(text):
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or a positive integer")
    return value


def positive_float(text):
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def given_options(args):
    """The options that shape the result and were given: their names and values, fit for JSON."""
    run_only = ("out", "resume", "save_every", "threads")
    given = {name: value for name, value in vars(args).items() if name not in run_only and value is not None}
    given["data"] = [str(path.resolve()) for path in args.data]
    if not given["data"]:
        del given["data"]
    return given


def new_config(given):
    """The full configuration of a new run: what was given, and DEFAULTS of the device for the rest."""
    device = given.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    config = {"data": [], "seed": 0, "compare": False, **DEFAULTS[torch.device(device).type], **given, "device": device}
    config.setdefault("heads", max(1, config["dim"] // HEAD_DIM))
    config.setdefault("kv_heads", config["heads"] // 2 if config["heads"] % 2 == 0 else config["heads"])
    config.setdefault("ffn_dim", max(1, round(config["dim"] * 8 / 3 / 64)) * 64)
    return config


def resumed_config(given, saved):
    """The configuration of the checkpoint; an option that was given must agree with it."""
    for name, value in given.items():
        if value != saved[name]:
            option = "the data" if name == "data" else "--" + name.replace("_", "-")
            raise TrainError(
                f"{option} is {value!r} but the checkpoint was made with {saved[name]!r}: "
                "leave it out to continue that run, or start a new one with another --out and without --resume."
            )
    check_device(saved["device"])
    return saved


def check_device(name):
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in DEFAULTS:
        raise TrainError(f"--device is {name!r}, expected cpu, cuda or cuda:N.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise TrainError(f"--device is {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices.")


def decoder_config(config):
    return DecoderConfig(
        vocab_size=256,
        dim=config["dim"],
        num_layers=config["layers"],
        num_heads=config["heads"],
        num_kv_heads=config["kv_heads"],
        ffn_dim=config["ffn_dim"],
        max_seq_len=config["seq_len"],
    )


# Data


def find_files(paths):
    """The files to read, in an order that depends on their names alone."""
    if not paths:
        library = Path(sysconfig.get_path("stdlib"))
        skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
        return walk(library, skip, "*.py")
    files = []
    for path in map(Path, paths):
        if path.is_dir():
            files += walk(path, {"__pycache__"}, "*")
        elif path.exists():
            files.append(path)
        else:
            raise TrainError(f"there is no file or folder {str(path)!r}.")
    return files


def walk(root, skip, pattern):
    """Files below root, sorted, without those in hidden folders or in folders named in skip."""
    relative = sorted((path.relative_to(root) for path in root.rglob(pattern)), key=lambda path: path.as_posix())
    kept = (path for path in relative if not any(part in skip or part.startswith(".") for part in path.parts))
    return [root / path for path in kept if (root / path).is_file()]


def load_text(config):
    """(training, validation) bytes. Validation is the last tenth of the files, or of the bytes if the files are few."""
    texts = []
    for path in find_files(config["data"]):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise TrainError(f"cannot read {str(path)!r}: {error.strerror}.") from error
        if content and b"\0" not in content:  # empty and binary files teach nothing
            texts.append(content)
    if not texts:
        where = ", ".join(map(repr, config["data"])) or "the Python standard library (it has no .py files here)"
        raise TrainError(f"found no text in {where}; name text files, or folders that hold some.")

    if len(texts) >= 10:
        cut = len(texts) - len(texts) // 10
        splits = b"\n".join(texts[:cut]), b"\n".join(texts[cut:])
    else:
        everything = b"\n".join(texts)
        cut = len(everything) - len(everything) // 10
        splits = everything[:cut], everything[cut:]

    for name, split in zip(("training", "validation"), splits):
        if len(split) <= config["seq_len"]:
            raise TrainError(
                f"the {name} split has {len(split)} bytes, too few for --seq-len {config['seq_len']}, which needs "
                f"{config['seq_len'] + 1}: give more text or a smaller --seq-len."
            )
    print(f"data: {len(texts)} files, {len(splits[0]):,} bytes to train on, {len(splits[1]):,} held out")
    return splits


def as_tensor(text, device):
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)


def windows(data, starts, seq_len):
    """The sequences at starts, and the byte that follows each of their positions: two int64 [len(starts), seq_len]."""
    index = starts.to(data.device)[:, None] + torch.arange(seq_len + 1, device=data.device)
    chunk = data[index].long()
    return chunk[:, :-1], chunk[:, 1:]


def training_batch(data, config, generator):
    starts = torch.randint(len(data) - config["seq_len"], (config["batch"],), generator=generator)
    return windows(data, starts, config["seq_len"])


def validation_batches(data, config):
    """The same windows every time, spread evenly over the held-out text."""
    count = VALIDATION_BATCHES * config["batch"]
    last = len(data) - config["seq_len"] - 1
    starts = torch.arange(count) * last // max(1, count - 1)
    for part in starts.split(config["batch"]):
        yield windows(data, part, config["seq_len"])


# Model and optimizer


class Learner:
    """A model with its optimizer."""

    def __init__(self, config, backend):
        torch.manual_seed(config["seed"])  # so that the reference starts from the same weights
        self.config = config
        self.device = torch.device(config["device"])
        self.model = Decoder(decoder_config(config), backend=backend).to(self.device)
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        norms = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": norms, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=config["lr"], betas=BETAS)

    def loss(self, tokens, targets):
        dtype = DTYPES[self.config["dtype"]]
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32):
            return self.model(tokens, targets)

    def step(self, tokens, targets, lr):
        """One update. Returns the loss before it."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self.loss(tokens, targets)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate(self, batches):
        losses = [self.loss(tokens, targets).item() for tokens, targets in batches]
        return sum(losses) / len(losses)

    def state_dict(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def learning_rate(step, config):
    """Linear warm-up, then a cosine down to MIN_LR_FRACTION of the peak. step counts from 0."""
    if step < config["warmup"]:
        return config["lr"] * (step + 1) / config["warmup"]
    progress = (step - config["warmup"]) / max(1, config["steps"] - config["warmup"])
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config["lr"] * (MIN_LR_FRACTION + (1 - MIN_LR_FRACTION) * cosine)


# One run: all that a checkpoint has to hold


class Run:
    def __init__(self, config, text_hash):
        self.config = config
        self.text_hash = text_hash
        self.learner = Learner(config, "coda")
        self.reference = Learner(config, "eager") if config["compare"] else None
        self.batch_rng = torch.Generator().manual_seed(config["seed"])
        self.step = 0
        self.seconds = 0.0  # spent in the learner's steps
        self.backend = None  # of coda's last call
        self.history = {"train_loss": [], "reference_loss": [], "val_step": [], "val_loss": []}

    def train_step(self, data):
        tokens, targets = training_batch(data, self.config, self.batch_rng)
        lr = learning_rate(self.step, self.config)
        start = time.perf_counter()
        loss = self.learner.step(tokens, targets, lr)
        self.seconds += time.perf_counter() - start
        self.backend = coda.backend_of_last_call()
        if not math.isfinite(loss):
            raise TrainError(f"the loss of step {self.step + 1} is {loss}; try a smaller --lr or a longer --warmup.")
        if self.reference:
            self.history["reference_loss"].append(self.reference.step(tokens, targets, lr))
        self.history["train_loss"].append(loss)
        self.step += 1

    def validate(self, data):
        self.history["val_loss"].append(self.learner.evaluate(validation_batches(data, self.config)))
        self.history["val_step"].append(self.step)
        self.backend = coda.backend_of_last_call()

    def tokens_per_second(self):
        return self.step * self.config["batch"] * self.config["seq_len"] / self.seconds if self.seconds else 0.0

    def largest_difference(self, steps=None):
        """Largest |loss - reference loss| over the first steps, or over all."""
        pairs = zip(self.history["train_loss"][:steps], self.history["reference_loss"][:steps])
        return max((abs(ours - reference) for ours, reference in pairs), default=0.0)

    def state_dict(self):
        return {
            "format": CHECKPOINT_FORMAT,
            "config": self.config,
            "text_hash": self.text_hash,
            "learner": self.learner.state_dict(),
            "reference": self.reference.state_dict() if self.reference else None,
            "batch_rng": self.batch_rng.get_state(),
            # Nothing here draws from the global generators after initialisation, but dropout, say, would.
            "torch_rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(self.learner.device) if self.learner.device.type == "cuda" else None,
            "step": self.step,
            "seconds": self.seconds,
            "backend": self.backend,
            "history": self.history,
        }

    def load_state_dict(self, state):
        self.learner.load_state_dict(state["learner"])
        if self.reference:
            self.reference.load_state_dict(state["reference"])
        self.batch_rng.set_state(state["batch_rng"])
        torch.set_rng_state(state["torch_rng"])
        if state["cuda_rng"] is not None:
            torch.cuda.set_rng_state(state["cuda_rng"], self.learner.device)
        self.step, self.seconds, self.backend = state["step"], state["seconds"], state["backend"]
        self.history = state["history"]


# Files


@contextmanager
def replacing(path):
    """A temporary name to write to. It takes path's place only when complete, so that path is never half written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_checkpoint(run, path):
    with replacing(path) as temporary, open(temporary, "wb") as file:
        torch.save(run.state_dict(), file)
        file.flush()
        os.fsync(file.fileno())


def load_checkpoint(path):
    if not path.exists():
        raise TrainError(f"there is no checkpoint {str(path)!r} to resume; start the run without --resume.")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        readable = state["format"] == CHECKPOINT_FORMAT
    except Exception as error:  # torch.load has no error type of its own for a damaged file
        raise TrainError(f"cannot read the checkpoint {str(path)!r}, it may be damaged: {first_line(error)}") from error
    if not readable:
        raise TrainError(f"the checkpoint {str(path)!r} has format {state['format']}, expected {CHECKPOINT_FORMAT}.")
    return state


def first_line(error):
    return (str(error) or type(error).__name__).splitlines()[0]


def write_summary(run, path, finished):
    history, config = run.history, run.config
    recent = history["train_loss"][-FINAL_WINDOW:]
    summary = {
        "finished": finished,
        "unit": "nats per byte",
        "step": run.step,
        "final_train_loss": sum(recent) / len(recent) if recent else None,
        "final_train_loss_is_mean_of_last_steps": len(recent),
        "final_val_loss": history["val_loss"][-1] if history["val_loss"] else None,
        "tokens_per_second": run.tokens_per_second(),
        "train_seconds": run.seconds,
        "parameters": sum(p.numel() for p in run.learner.model.parameters()),
        "backend": run.backend,
        "info": coda.info(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "config": config,
        "history": history,
    }
    if run.reference:
        summary["compare"] = {
            "max_abs_loss_difference": run.largest_difference(),
            "max_abs_loss_difference_first_100_steps": run.largest_difference(100),
        }
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(summary, indent=2, default=str) + "\n")
    return summary


def smooth(values, window=25):
    """Exponential moving average, without the pull of its starting value."""
    decay, average, weight, result = 1 - 1 / window, 0.0, 0.0, []
    for value in values:
        average = decay * average + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        result.append(average / weight)
    return result


def plot_losses(run, path):
    history, config = run.history, run.config
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    steps = range(1, len(history["train_loss"]) + 1)
    axes.plot(steps, history["train_loss"], color="tab:blue", alpha=0.25, linewidth=0.8, label="training, each step")
    axes.plot(steps, smooth(history["train_loss"]), color="tab:blue", label="training, smoothed")
    if run.reference:
        reference = smooth(history["reference_loss"])
        axes.plot(steps, reference, color="black", linestyle=":", label="PyTorch reference, smoothed")
    axes.plot(history["val_step"], history["val_loss"], color="tab:orange", marker="o", label="validation")
    axes.set_xlabel(f"step ({config['batch']} x {config['seq_len']} bytes each)")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title(f"byte-level decoder, {config['layers']} layers of width {config['dim']}, {config['dtype']}")
    axes.grid(alpha=0.3)
    axes.legend()
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    plt.close(figure)


# The loop


class StopSignal:
    """Within its `with` block, the first SIGINT or SIGTERM sets `received`; a second one acts as usual."""

    def __init__(self):
        self.received = None
        self._previous = {}

    def __enter__(self):
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        except ValueError:
            pass  # not the main thread: Python delivers no signals here
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number, frame):
        self.received = number
        for each, handler in self._previous.items():
            signal.signal(each, handler)


def train(run, train_data, val_data, args, stop):
    """Trains to the last step, or until stop."""
    if run.step == 0:
        run.validate(val_data)
        print(f"back end of this model: {run.backend}")
    interval = 0.2 if sys.stderr.isatty() else 10  # seconds; a log file needs no animation
    bar = tqdm(total=run.config["steps"], initial=run.step, unit="step", dynamic_ncols=True, mininterval=interval)
    with bar:
        while run.step < run.config["steps"] and not stop.received:
            run.train_step(train_data)
            if run.step % run.config["eval_every"] == 0 or run.step == run.config["steps"]:
                run.validate(val_data)
            if run.step % args.save_every == 0 or run.step == run.config["steps"]:
                save_checkpoint(run, args.out / "checkpoint.pt")
            recent = run.history["train_loss"][-FINAL_WINDOW:]
            bar.set_postfix_str(
                f"loss {sum(recent) / len(recent):.3f}, validation {run.history['val_loss'][-1]:.3f}, "
                f"{run.tokens_per_second():,.0f} tokens/s, {shorten(run.backend, 32)}",
                refresh=False,
            )
            bar.update()


def shorten(text, width):
    return text if len(text) <= width else text[: width - 3] + "..."


def print_info():
    print("coda:")
    for name, value in coda.info().items():
        print(f"  {name}: {shorten(str(value), 100)}")


def print_sample(run):
    """Continues a first line that suits the default data, in a repeatable way."""
    device = run.learner.device
    prompt = torch.tensor([list(b"def ")], device=device)
    generator = torch.Generator(device).manual_seed(run.config["seed"])
    tokens = run.learner.model.generate(prompt, SAMPLE_BYTES, temperature=0.8, top_k=40, generator=generator)
    print("sample:")
    for line in bytes(tokens[0].tolist()).decode("utf-8", errors="replace").splitlines():
        print(f"  | {line}")


def start_run(args):
    """A new or a resumed run, and its (training, validation) data on the device."""
    given = given_options(args)
    checkpoint = args.out / "checkpoint.pt"
    state = load_checkpoint(checkpoint) if args.resume else None
    config = resumed_config(given, state["config"]) if state else new_config(given)
    try:
        decoder_config(config)
    except ValueError as error:
        raise TrainError(f"the model cannot be built: {error}") from error

    text = load_text(config)
    text_hash = hashlib.sha256(b"\0".join(text)).hexdigest()
    run = Run(config, text_hash)
    if state:
        if text_hash != state["text_hash"]:
            raise TrainError("the text differs from the text that the checkpoint was trained on; start a new run.")
        run.load_state_dict(state)
        print(f"resumed from {checkpoint} at step {run.step} of {config['steps']}")
    elif checkpoint.exists():
        print(f"note: {checkpoint} of an earlier run will be replaced")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainError(f"cannot make the folder --out {str(args.out)!r}: {error.strerror}.") from error
    if not os.access(args.out, os.W_OK):
        raise TrainError(f"cannot write into the folder --out {str(args.out)!r}.")
    return run, [as_tensor(split, config["device"]) for split in text]


def run_training(args):
    """Returns the exit status."""
    if args.threads:
        torch.set_num_threads(args.threads)
    run, (train_data, val_data) = start_run(args)
    config = run.config
    parameters = sum(p.numel() for p in run.learner.model.parameters())
    print(
        f"model: {parameters:,} parameters, {config['layers']} layers of width {config['dim']}, "
        f"{config['heads']} heads ({config['kv_heads']} for keys and values), feed-forward {config['ffn_dim']}, "
        f"{config['dtype']} on {config['device']}"
    )
    print_info()

    with StopSignal() as stop:
        train(run, train_data, val_data, args, stop)
        finished = run.step == config["steps"]
        if not finished:
            save_checkpoint(run, args.out / "checkpoint.pt")
        summary = write_summary(run, args.out / "run.json", finished)
        plot_losses(run, args.out / "loss.png")

    if run.reference:
        first = f" ({run.largest_difference(100):.3g} over the first 100)" if run.step > 100 else ""
        print(
            f"largest loss difference between coda and the PyTorch reference over {run.step} steps: "
            f"{run.largest_difference():.3g} nats per byte{first}"
        )
    if not finished:
        print(
            f"stopped at step {run.step} of {config['steps']} and saved to {args.out}; continue with\n"
            f"  python {sys.argv[0]} --resume --out {args.out}"
        )
        return 128 + stop.received
    print_sample(run)
    print(f"wrote {args.out / 'loss.png'}, {args.out / 'run.json'} and {args.out / 'checkpoint.pt'}")
    print(
        f"final loss after {run.step} steps: training {summary['final_train_loss']:.4f}, "
        f"validation {summary['final_val_loss']:.4f} nats per byte"
    )
    return 0


def main(argv=None):
    args = parse_args(argv)
    try:
        return run_training(args)
    except TrainError as error:
        message = str(error)
    except torch.OutOfMemoryError:
        message = "the GPU's memory is too small for this run; try a smaller --batch, --seq-len, --dim or --layers."
    print(f"error: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
