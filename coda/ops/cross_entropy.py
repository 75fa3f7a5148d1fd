"""The language-model head and its loss, without the M x V logits.

The product's epilogue takes the statistics of the logits (csrc/programs/loss.hpp), and the logits themselves stay on the chip. For gradients tokens are
taken in chunks. Where the loss is a sum or a mean, all that the backward will bring is one scalar: the forward forms the gradients and the backward scales
them. Then the epilogue leaves the exponentials of a chunk's logits, a pass over them makes the gradient of the logits in their place, and two products
turn it into the gradients of the operands before the next chunk takes its place: three products in all. Else the backward forms the logits again, with
their gradient in the epilogue: four products.

What is held in between lies, where it can, in memory that the gradients take in the end.
"""
from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from coda.ops._common import (
    cast_for_autocast,
    check_devices,
    check_optional_tensor,
    check_tensor,
    check_vector,
    check_weights,
    fake,
    joined,
    main_grad,
    mark_added_to_main_grad,
    needs_grad,
    no_second_derivative,
    once,
    statistics_dtype,
)
from coda.ops.norm import NormStats, norm_gradient, norm_statistics

REDUCTIONS = ("mean", "sum", "none")
CHUNK_BYTES = 512 * 2**20
_TILE = 128  # rows of a GEMM's tile: whole ones, where a chunk has that many
_GROUP = 64  # columns that have a reference, kSoftmaxGroup in csrc/coda/sinks.hpp
_LEAD = 2048  # rows of the weight's gradient that hold no exponentials, see _places_within


@dataclasses.dataclass(frozen=True)
class VocabularyShard:
    """Of a head that is divided over the ranks of `group`, by its rows: which of the `classes` rows this rank's weight (and bias) are, `start` and
    those that follow. Every row belongs to one rank."""

    group: Any
    start: int
    classes: int

    def combined(self, lse: Tensor, picked: Tensor, total: Tensor | None, inside: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """`chunk_statistics` of all columns from those of each rank's. A label that is no rank's gives NaN."""
        top = lse.clone()
        torch.distributed.all_reduce(top, torch.distributed.ReduceOp.MAX, self.group)
        sums = torch.stack((torch.exp(lse - top), picked, torch.zeros_like(lse) if total is None else total, inside.to(lse.dtype)))
        torch.distributed.all_reduce(sums, group=self.group)
        return top + sums[0].log(), torch.where(sums[3] == 1, sums[1], math.nan), None if total is None else sums[2]

    def summed(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is not None:
            torch.distributed.all_reduce(gradient, group=self.group)
        return gradient


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    stats: NormStats | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    keep_logits: bool = False,
    return_lse: bool = False,
    chunk_bytes: int | None = None,
    shard: VocabularyShard | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """The cross-entropy of logits = x W^T + b, or RMSNorm(x; norm_weight) W^T + b, with the targets:

        z = logits, or softcap * tanh(logits / softcap),   lse = log(sum(exp(z)))
        loss = lse - (1 - label_smoothing) z[target] - label_smoothing mean(z) + z_loss lse^2

    Args:
        x: [..., D]; float32, float64, bfloat16 or float16.
        weight: [V, D], dtype and device of x (inside autocast, of any of these dtypes). bias: [V].
        target: [...], int64 or int32, each in [0, V) or ignore_index.
        norm_weight: [D] in x's dtype or, beside 16 bits, float32: x is the input of an RMSNorm with this weight and eps. None: no norm, or
            with stats one without a weight.
        stats: the statistics that came with x from `coda.linear_residual`. None: they are computed here, in a pass over x.
        ignore_index: rows with this target have loss 0, no gradient, and are not counted in the mean.
        reduction: "mean" over the rows that count, "sum" or "none" (for a weight for each token, which then multiplies the result).
        label_smoothing: in [0, 1]. z_loss: its factor, 0 or more. softcap: positive.
        keep_logits: return the logits too, which then are held.
        return_lse: return lse too, also of ignored rows.
        chunk_bytes: at most so much memory for the gradient of a chunk of logits in x's dtype, of some tokens or, in the backward, of some classes, but at
            least for one. Where there is no kernel (on the CPU, in float32 or float64) torch operations hold several times as much. Results depend on
            it by rounding only. None: 512 MiB; but all tokens at once where that takes no more memory than a chunk and the sum over chunks of the
            weight's gradient in float32, [V, D], which only chunks need (up to 10240 tokens for D = 4096, V = 128256 in 16 bits), and then in the
            memory of the weight's gradient as far as it goes.
        shard: weight, bias and the kept logits are this rank's rows of a vocabulary that is divided over a process group; V above is the number of
            all. The other arguments, the loss and lse are the same on every rank, and so are the gradients of x and norm_weight, which are summed
            over the ranks. All ranks make the same calls, with the same options and tensors that need a gradient.

    Returns:
        The loss, a scalar or [...] with "none", in float32 (float64 for float64 x); or a tuple of it, with keep_logits the logits [..., V] in x's
        dtype, before the softcap, and with return_lse lse [...] in the loss's dtype. Differentiable once in x, weight, bias and norm_weight, through
        every output.

    Raises:
        TypeError, ValueError: an argument of another type, dtype, device, shape or range, or stats of another tensor, norm weight or eps.
        IndexError: a target outside [0, V), on the CPU. On a GPU the range is not checked, which would wait for the device: the loss of such a row
            is NaN.
        NotImplementedError: when a second derivative is asked for.

    As in torch the mean over no row is NaN, and its gradients are zero. Logits are sums in float32 (float64), of which the statistics are taken
    before anything is rounded; their gradient is rounded once to x's dtype for the products. Sums over chunks are in float32 and rounded once: of the
    weight's gradient where gradients are formed in the forward, of x's where they are formed in the backward. With "mean" and "sum", without
    keep_logits and while nothing but the loss is differentiated, they are formed in the forward, and only multiplied by the incoming scalar in the
    backward; if that is no power of two, what was formed in 16 bits is rounded a second time. In between, the weight's gradient of several chunks is held
    in float32. With keep_logits gradients are formed in the backward, from the logits as they were rounded.

    Source: Szegedy et al., arXiv:1512.00567 (label smoothing); Chowdhery et al., arXiv:2204.02311 (z-loss); Gemma Team, arXiv:2408.00118
    (soft-capping); Hsu et al., Liger Kernel, arXiv:2410.10989 (gradients in the forward, chunk by chunk).
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}, expected one of {', '.join(map(repr, REDUCTIONS))}")
    _check_number("label_smoothing", label_smoothing, "a number from 0 to 1", lambda v: 0 <= v <= 1)
    _check_number("z_loss", z_loss, "a finite number, 0 or more", lambda v: v >= 0)
    options = _Options(reduction, float(label_smoothing), float(z_loss), softcap, bool(keep_logits), bool(return_lse), shard)
    outputs = _outputs("coda.linear_cross_entropy", x, weight, target, bias, norm_weight, eps, stats, ignore_index, options, chunk_bytes)
    return outputs if len(outputs) > 1 else outputs[0]


def linear_log_prob(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    stats: NormStats | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    chunk_bytes: int | None = None,
    shard: VocabularyShard | None = None,
) -> Tensor:
    """The log-probability of each target, z[target] - lse, 0 for ignored rows: [...] in float32 (float64 for float64 x).

    The negative of `linear_cross_entropy` with reduction "none", bit for bit: arguments, errors and derivatives are as there.
    """
    options = _Options("none", 0.0, 0.0, softcap, False, False, shard)
    (loss,) = _outputs("coda.linear_log_prob", x, weight, target, bias, norm_weight, eps, stats, ignore_index, options, chunk_bytes)
    return loss.neg()


class _Options(NamedTuple):
    reduction: str
    label_smoothing: float
    z_loss: float
    softcap: float | None
    keep_logits: bool
    return_lse: bool
    shard: VocabularyShard | None


def _check_number(name: str, value: Any, expected: str, allowed: Callable) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not (abs(value) < math.inf and allowed(value)):
        raise ValueError(f"{name} is {value!r}, expected {expected}")


def _check_target(target: Tensor, x: Tensor, classes: int, ignore_index: int) -> None:
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"target has dtype {target.dtype}, expected int64 or int32")
    if target.shape != x.shape[:-1]:
        raise ValueError(f"target has shape {list(target.shape)}, expected {list(x.shape[:-1])} (that of x without its last dimension)")
    if target.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = target[(target != ignore_index) & ((target < 0) | (target >= classes))]
        if wrong.numel():
            value = wrong[0].item()
            raise IndexError(f"target has the value {value}, expected 0 to {classes - 1} (a row of weight) or ignore_index = {ignore_index}")


def _check_shard(shard: Any, weight: Tensor) -> None:
    if not isinstance(shard, VocabularyShard):
        raise TypeError(f"shard is {type(shard).__name__}, expected a coda.VocabularyShard")
    if not 0 <= shard.start < shard.start + weight.shape[0] <= shard.classes:
        raise ValueError(
            f"shard starts at row {shard.start} and weight has {weight.shape[0]} rows, expected one or more within 0 to {shard.classes - 1}"
        )


def _outputs(public, x, weight, target, bias, norm_weight, eps, stats, ignore_index, options, chunk_bytes) -> tuple[Tensor, ...]:
    """The loss, and of logits and lse what is asked for, in the shapes that the caller knows."""
    if options.softcap is not None:
        _check_number("softcap", options.softcap, "None or a positive finite number", lambda v: v > 0)
    if chunk_bytes is not None:
        _check_number("chunk_bytes", chunk_bytes, "None or a positive number of bytes", lambda v: v > 0)
    if not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index is {ignore_index!r}, expected an integer")
    check_tensor("x", x)
    check_tensor("weight", weight)
    check_tensor("target", target)
    check_optional_tensor("bias", bias)
    check_optional_tensor("norm_weight", norm_weight)
    check_devices(x, weight=weight, target=target, bias=bias, norm_weight=norm_weight)
    if stats is not None:
        if not isinstance(stats, NormStats):
            raise TypeError(f"stats is {type(stats).__name__}, expected the coda.NormStats that came with x")
        stats.check(x, norm_weight, eps)
    given = x
    x, weight, bias = cast_for_autocast(x, x, weight, bias)
    rows = check_weights("x", x, weight=weight)
    if weight.shape[0] == 0:
        raise ValueError(f"weight has shape {list(weight.shape)}, expected at least one row, a class")
    check_vector("bias", bias, weight.shape[0], x)
    check_vector("norm_weight", norm_weight, x.shape[-1], x, torch.float32)
    shard, classes = options.shard, weight.shape[0]
    if shard is not None:
        _check_shard(shard, weight)
        classes = shard.classes
    _check_target(target, x, classes, ignore_index)
    h = rstd = None
    if stats is not None and x is given:
        h, rstd = stats.rows
    elif stats is not None or norm_weight is not None:
        h, rstd, _ = norm_statistics(rows, norm_weight, eps, "rms")
    labels = target.reshape(-1).long()
    counted = labels != ignore_index
    labels, inside = labels.masked_fill(~counted, 0 if shard is None else shard.start), None
    if shard is not None:
        labels = labels - shard.start
        inside = (labels >= 0) & (labels < weight.shape[0])
        labels = labels.masked_fill(~inside, 0)
        # The largest shard has at least so many rows: a number of chunks that is the same on all ranks.
        classes = -(-classes // torch.distributed.get_world_size(shard.group))
    chunk = chunk_rows(chunk_bytes, classes, x.element_size())
    arguments = rows, h, rstd, norm_weight, weight, bias, labels, inside, counted, options, chunk
    if needs_grad(rows, norm_weight, weight, bias):
        outputs = _LinearCrossEntropy.apply(public, chunk_bytes, *arguments)
    else:
        outputs = _wanted(_forward(*arguments, None)[:3], options)
    shapes = _wanted((x.shape[:-1] if options.reduction == "none" else (), (*x.shape[:-1], weight.shape[0]), x.shape[:-1]), options)
    return tuple(t.view(shape) for t, shape in zip(outputs, shapes))


def _wanted(all_three: tuple, options: _Options) -> tuple:
    """Of loss, logits and lse those that are returned."""
    wanted = True, options.keep_logits, options.return_lse
    return tuple(t for t, wants in zip(all_three, wanted) if wants)


def chunk_rows(chunk_bytes: float | None, classes: int, element_size: int) -> int:
    """How many rows of logits a chunk has; or, of so many `classes` as there are tokens, how many columns."""
    rows = max(1, int(CHUNK_BYTES if chunk_bytes is None else chunk_bytes) // (max(1, classes) * element_size))
    return rows - rows % _TILE if rows > _TILE else rows


class _Statistics(NamedTuple):
    """Of rows of logits, in float32 (float64), see csrc/programs/loss.hpp; over the columns of all ranks, but for what is marked."""

    lse: Tensor
    picked: Tensor
    total: Tensor  # sum(z), and 0 where label smoothing does not ask for it
    columns: Tensor  # as the operator gave it, of this rank, but with lse over all ranks
    share: Tensor | None  # of this rank in sum(exp(z))

    def row_dot(self, factors: Tensor, inside: Tensor | None) -> Tensor:
        """The sum over columns of the gradient of the logits times the logits without their bias."""
        _, _, picked, mean, _, total = self.columns
        picked = picked if inside is None else picked.masked_fill(~inside, 0)
        return factors[0] * (mean if self.share is None else mean * self.share) - factors[1] * total - factors[2] * picked


def _over_ranks(columns: Tensor, inside: Tensor | None, options: _Options) -> _Statistics:
    lse, picked, total = columns[0], columns[1], columns[4]
    if inside is None:
        return _Statistics(lse, picked, total, columns, None)
    lse, picked, total = options.shard.combined(lse, picked.masked_fill(~inside, 0), total if options.label_smoothing else None, inside)
    return _Statistics(lse, picked, total, torch.cat((lse.unsqueeze(0), columns[1:])), torch.exp(columns[0] - lse))


def _over_blocks(columns: list[Tensor], starts: list[int], target: Tensor) -> Tensor:
    """`columns` of all classes from those of blocks of classes that begin at `starts`."""
    picked = columns[0][1:3]
    for some, start in zip(columns[1:], starts[1:]):
        picked = torch.where(target >= start, some[1:3], picked)  # of the block that has the target, or NaN
    every = torch.stack(columns)
    lse = torch.logsumexp(every[:, 0], 0)
    share = torch.exp(every[:, 0] - lse)
    return torch.cat((lse.unsqueeze(0), picked, (share * every[:, 3]).sum(0, keepdim=True), every[:, 4:].sum(0)))


def _factors(lse, inside, loss_weight, lse_weight, classes, options) -> Tensor:
    """by_softmax, by_all and by_target of csrc/programs/loss.hpp for the gradient of sum(loss_weight loss + lse_weight lse)."""
    by_softmax = loss_weight * (1 + 2 * options.z_loss * lse) if options.z_loss else loss_weight
    by_softmax = by_softmax if lse_weight is None else by_softmax + lse_weight
    by_target = loss_weight if inside is None else loss_weight.masked_fill(~inside, 0)
    smoothing = options.label_smoothing
    return torch.stack((by_softmax, loss_weight * (smoothing / classes), by_target * (1 - smoothing)))


def _classes(columns: int, options: _Options) -> int:
    return columns if options.shard is None else options.shard.classes


class _LogitGradient(NamedTuple):
    """Of a chunk: rstd times the gradient of the logits, in their dtype; what `_Statistics.row_dot` describes; the sum over rows, or None."""

    dz: Tensor
    row_dot: Tensor | None
    dbias: Tensor | None


class _Exponentials:
    """What the gradient of the logits of rows h is formed from, in its place: their exponentials (csrc/programs/loss.hpp). places: blocks of classes, and
    where theirs are, [rows, the block's classes and up to 7 more]. room: flat memory for their references, and workspace for what launches leave behind,
    both in float32, if there is enough of it; or None."""

    def __init__(self, places, room, workspace, h, rstd, weight, bias, target, inside, options, dots):
        self.places, self.rstd, self.softcap = places, rstd, options.softcap or 0.0
        self.targets = [target - s.start if s.start else target for s, _ in places]
        rows, groups = h.shape[0], [-(-(s.stop - s.start) // _GROUP) for s, _ in places]
        if room is None or room.numel() < rows * sum(groups):
            room = h.new_empty((rows * sum(groups),), dtype=statistics_dtype(h))
        self.references = [t.view(rows, g) for t, g in zip(room[: rows * sum(groups)].split([rows * g for g in groups]), groups)]
        columns = []
        for (s, place), references, labels in zip(places, self.references, self.targets):
            arguments = h, rstd, weight[s], None if bias is None else bias[s], labels, self.softcap, dots, bool(options.label_smoothing), rows
            columns.append(torch.ops.coda.exponentials_into_(place, references, workspace, *arguments))
        self.statistics = _over_ranks(_over_blocks(columns, [s.start for s, _ in places], target), inside, options)

    def gradient(self, factors, want_dbias) -> tuple[list[tuple[slice, Tensor]], Tensor | None]:
        """rstd times the gradient of the logits, by blocks, and its sum over rows."""
        dbias = []
        for (s, place), references, labels in zip(self.places, self.references, self.targets):
            arguments = self.statistics.columns, factors, labels, self.rstd, s.stop - s.start, self.softcap, want_dbias
            dbias.append(torch.ops.coda.exponential_gradient_(place, references, *arguments))
        return [(s, place[:, : s.stop - s.start]) for s, place in self.places], joined(dbias) if want_dbias else None


def _flat(t: Tensor | None) -> Tensor | None:
    """The memory of t, contiguous, in float32 (float64); None where torch does not let it be seen so."""
    if t is None or torch.compiler.is_compiling():
        return None
    wide = statistics_dtype(t)
    if any(size * t.element_size() % wide.itemsize for size in (t.numel(), t.storage_offset())):
        return None
    return t.view(-1).view(wide)


def _gradient_of_kept(logits, incoming, lse, target, factors, rstd, bias, options, want_dbias, want_dot) -> _LogitGradient:
    """From logits as they were kept, with the gradient that arrives at them. target: column numbers, those of other columns too."""
    arguments = logits, incoming, target, lse, factors, rstd, bias, options.softcap or 0.0, want_dbias, want_dot
    dz, dot, dbias = torch.ops.coda.logit_gradient(*arguments)
    return _LogitGradient(dz[:, : logits.shape[1]], dot if want_dot else None, dbias if want_dbias else None)


def _chunks(tokens: int, chunk: int) -> list[slice]:
    if 0 < tokens <= chunk:  # torch.compile needs one graph for all these numbers of tokens
        return [slice(0, tokens)]
    return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]


def _mean_weight(count: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """1 / `count`, or 1 for no rows, as a quotient (m, p) = m / p, and None for 1.

    The gradients that the forward forms have the factor m, and p is divided out later. In float16, where they would underflow with m = 1 / count, m is in
    (1/2, 1] and p a power of two, by which nothing is rounded.
    """
    count = count.clamp(min=1).to(statistics_dtype(x))
    if x.dtype != torch.float16:
        return 1 / count, None
    mantissa = 2 * torch.frexp(count)[0]
    return 1 / mantissa, count / mantissa


def _forward(x, h, rstd, norm_weight, weight, bias, target, inside, counted, options, chunk, needs):
    """(loss, logits or an empty tensor, lse, the gradients of a loss that is a scalar, if `needs` says of what)"""
    wide, tokens = statistics_dtype(x), x.shape[0]
    h = x if h is None else h
    kept = x.new_empty((0,))
    smoothing, width = options.label_smoothing, _classes(weight.shape[0], options)
    # Exponentials do not tell z of the smallest, which only the gradient of smoothing behind a cap would want.
    again = bool(smoothing) and options.softcap is not None
    by_exponentials = needs is not None and not again
    sums = None
    count = counted.sum() if options.reduction == "mean" else None
    if needs is not None:
        sums = _Gradients(x, rstd, norm_weight, weight, bias, needs, tokens <= chunk and not _stays_wide(weight), options.shard)
        loss_weight = counted.to(wide) if count is None else counted * _mean_weight(count, x)[0]
        factors_of = lambda s, lse: _factors(lse, None if inside is None else inside[s], loss_weight[s], None, width, options)
        if not options.z_loss:  # then they do not depend on lse
            of_all_rows = factors_of(slice(None), None)
            factors_of = lambda s, lse: of_all_rows[:, s]
    every = []
    within = by_exponentials and sums.single and needs[2] and _fits_within(weight, tokens)
    if within:
        every.append(_form_within_gradient(sums, h, bias, target, inside, options, factors_of))
    for s in [] if within else [slice(0, tokens)] if sums is None else _chunks(tokens, chunk):
        if by_exponentials:
            every.append(_form_chunk(sums, s, h, bias, target, inside, options, factors_of))
            continue
        at, here = None if rstd is None else rstd[s], None if inside is None else inside[s]
        arguments = h[s], at, weight, bias, target[s], options.softcap or 0.0, bool(smoothing), options.keep_logits, chunk
        columns, logits = torch.ops.coda.lse_select(*arguments)
        found = _over_ranks(columns, here, options)
        every.append(found)
        if options.keep_logits:
            # Not a view of all of it: Dynamo loses the gradient of such an output (torch 2.11).
            kept = logits if logits.shape[1] == weight.shape[0] else logits[:, : weight.shape[0]].contiguous()
        if sums is not None:
            factors = factors_of(s, found.lse)
            arguments = found.lse, target[s], factors, at, bias, options, sums.needs[3], sums.wants_dot
            sums.add(s, h[s], _formed_again(h[s], weight, *arguments))
    every_row = lambda i: torch.cat([f[i] for f in every]) if every else x.new_empty((0,), dtype=wide)
    lse, picked = every_row(0), every_row(1)
    losses = lse - (1 - smoothing) * picked
    if smoothing:
        losses = losses - every_row(2) * (smoothing / width)
    if options.z_loss:
        losses = losses + options.z_loss * lse.square()
    losses = losses.masked_fill(~counted, 0)  # not in place: Dynamo loses the gradient of an output that was (torch 2.11)
    loss = losses
    if options.reduction != "none":
        loss = losses.sum() if count is None else losses.sum() / count
    return loss, kept, lse, None if sums is None else sums.result()


def _stays_wide(weight: Tensor) -> bool:
    """Whether the gradient of weight is float32 until the incoming scalar multiplies it, even if it is no sum over chunks."""
    # A sum over tokens, before it is divided by their number, may be too large for float16.
    return weight.dtype == torch.float16 or main_grad(weight) is not None


def _formed_again(h, weight, lse, target, factors, rstd, bias, options, want_dbias, want_dot) -> _LogitGradient:
    dz, dot, dbias = torch.ops.coda.dlogits(h, rstd, weight, bias, target, lse, factors, options.softcap or 0.0, want_dbias)
    return _LogitGradient(dz[:, : weight.shape[0]], dot if want_dot else None, dbias if want_dbias else None)


def _correction(rstd: Tensor | None, row_dot: Tensor | None, x: Tensor) -> Tensor | None:
    """The factor of x in its gradient behind a norm."""
    return None if rstd is None else rstd.square() * row_dot / max(x.shape[1], 1)


def _through_norm(dn: Tensor, correction: Tensor | None, x: Tensor, norm_weight: Tensor | None, need_norm: bool) -> tuple[Tensor, Tensor | None]:
    """(dx, dnorm_weight) in dn's dtype, the first in its place, from dn, the gradient of the norm's output over rstd. Without a correction there is no norm."""
    dnorm = (dn * x).sum(0) if need_norm else None
    dx = dn if norm_weight is None else dn.mul_(norm_weight)
    return (dx if correction is None else dx.addcmul_(correction.unsqueeze(1), x.to(dn.dtype), value=-1)), dnorm


class _Gradients:
    """The gradients of (x, norm_weight, weight, bias), those that `needs` asks for, from the gradients of logits of chunks of rows.

    single: there is one chunk, and the gradient of weight is its product, rounded by itself; else it is summed, and stays, in float32 (float64)."""

    def __init__(self, x, rstd, norm_weight, weight, bias, needs, single, shard):
        self.x, self.rstd, self.weight, self.bias = x, rstd, weight, bias
        self.needs, self.single, self.shard = needs, single, shard
        need_x, need_norm, need_weight, need_bias = needs
        dtype = statistics_dtype(x)
        zeros = lambda like: like.new_zeros(like.shape, dtype=dtype)
        # In float32 the operator gives its part of the gradient unrounded.
        self.norm_weight = None if norm_weight is None else norm_weight.to(dtype)
        self.dx = x.new_empty(x.shape) if need_x else None
        self.dnorm = zeros(norm_weight) if need_norm else None
        self.dbias = zeros(bias) if need_bias else None
        self.dweight = zeros(weight) if need_weight and x.shape[0] == 0 else None

    @property
    def wants_dot(self) -> bool:
        return self.rstd is not None and (self.needs[0] or self.needs[1])

    def add(self, s: slice, h: Tensor, logits: _LogitGradient) -> None:
        """Those of the rows s."""
        need_x, need_norm, need_weight, need_bias = self.needs
        dz, correction = logits.dz, None
        if need_bias:
            self.dbias += logits.dbias
        if self.wants_dot:
            correction = _correction(self.rstd[s], logits.row_dot, self.x)
        if need_x and self.rstd is None:
            _product_into(self.dx[s], dz, self.weight)
        elif need_x or need_norm:
            arguments = dz, correction, self.x[s], self.norm_weight, (self.weight,), None
            dx, dnorm, _ = norm_gradient(*arguments, need_x, need_norm, (False,))
            if need_x:
                self.dx[s] = dx
            if need_norm:
                self.dnorm += dnorm
        if need_weight and self.single:
            self.dweight = torch.ops.coda.gemm(dz.t(), h)
        elif need_weight and self.weight.dtype == torch.float64:
            product = torch.ops.coda.gemm(dz.t(), h)
            self.dweight = product if self.dweight is None else self.dweight.add_(product)
        elif need_weight:
            first = self.dweight is None
            if first:
                self.dweight = torch.empty_like(self.weight, dtype=torch.float32, memory_format=torch.contiguous_format)
            torch.ops.coda.gemm_accumulate_(self.dweight, dz.t(), h, not first)

    def result(self) -> tuple[Tensor | None, ...]:
        """That of x in its dtype, those of the vectors in float32 (float64)."""
        dx, dnorm = self.dx, self.dnorm
        if self.shard is not None:
            dx, dnorm = self.shard.summed(dx), self.shard.summed(dnorm)
        return dx, dnorm, self.dweight, self.dbias


def _fits_within(weight: Tensor, tokens: int) -> bool:
    """Whether `_form_within_gradient` has anything to save: there are more tokens than weight has columns, and more classes than it sets aside."""
    classes, d = weight.shape
    if torch.compiler.is_compiling() or weight.dtype != torch.bfloat16:  # a graph for any number of tokens must not ask for it
        return False
    return d % 8 == 0 and 4 * tokens >= 5 * d and classes >= 8 * _LEAD


def _places_within(dweight: Tensor, tokens: int) -> list[tuple[slice, Tensor]]:
    """Blocks of classes, and the places of their exponentials [tokens, width]: one behind the other in the memory of dweight, from its row _LEAD on, and of
    the last block in memory of its own.

    If the blocks are taken in turn, the rows of dweight that are the product of one lie where nothing was, or only exponentials of blocks before it: of
    those there are more, the more tokens there are, so blocks grow.
    """
    classes, d = dweight.shape
    places, flat, row, free = [], dweight.view(-1), 0, _LEAD
    while width := min(free - row, (classes - free) * d // tokens) // _GROUP * _GROUP:
        places.append((slice(row, row + width), flat[free * d : free * d + tokens * width].view(tokens, width)))
        row, free = row + width, free + -(-tokens * width // d)
    places.append((slice(row, classes), dweight.new_empty((tokens, -(-(classes - row) // 8) * 8))))
    return places


def _form_chunk(sums: _Gradients, s: slice, h, bias, target, inside, options, factors_of) -> _Statistics:
    """The statistics of the rows s, and what they add to `sums`. What is held in between is free when this returns."""
    weight, here = sums.weight, None if inside is None else inside[s]
    place = h.new_empty((s.stop - s.start, -(-weight.shape[0] // 8) * 8))
    workspace = _flat(None if sums.dx is None else sums.dx[s])  # whose turn comes later
    arguments = h[s], None if sums.rstd is None else sums.rstd[s], weight, bias, target[s], here, options, sums.wants_dot
    formed = _Exponentials([(slice(0, weight.shape[0]), place)], None, workspace, *arguments)
    found = formed.statistics
    factors = factors_of(s, found.lse)
    [(_, dz)], dbias = formed.gradient(factors, sums.needs[3])
    sums.add(s, h[s], _LogitGradient(dz, found.row_dot(factors, here) if sums.wants_dot else None, dbias))
    return found


def _form_within_gradient(sums: _Gradients, h, bias, target, inside, options, factors_of) -> _Statistics:
    """The statistics of all rows at once, and `sums` from them, with most of what is needed in between in memory that gradients take in the end: the
    exponentials in that of weight's, their references in that of x's."""
    x, rstd, weight = sums.x, sums.rstd, sums.weight
    need_x, need_norm, _, need_bias = sums.needs
    tokens, d = h.shape[0], weight.shape[1]
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    places = _places_within(dweight, tokens)
    free = dweight.view(-1)[: _LEAD * d].view(torch.float32)  # the only memory that has nothing to hold
    formed = _Exponentials(places, _flat(sums.dx), free, h, rstd, weight, bias, target, inside, options, sums.wants_dot)
    found = formed.statistics
    factors = factors_of(slice(None), found.lse)
    gradients, dbias = formed.gradient(factors, need_bias)
    if need_bias:
        sums.dbias = dbias
    if need_x or need_norm:
        correction = _correction(rstd, found.row_dot(factors, inside), x) if sums.wants_dot else None
        for r in _chunks(tokens, _LEAD // 2):
            dn = free.view(-1, d)[: r.stop - r.start]
            for s, dz in gradients:
                torch.ops.coda.gemm_accumulate_(dn, dz[r], weight[s], s.start > 0)
            dx, dnorm = _through_norm(dn, None if correction is None else correction[r], x[r], sums.norm_weight, need_norm)
            if need_x:
                sums.dx[r] = dx
            if need_norm:
                sums.dnorm += dnorm
    for s, dz in gradients:
        _product_into(dweight[s], dz.t(), h)
    sums.dweight = dweight
    return found


def _scaled(gradient: Tensor | None, scale: Tensor, like: Tensor | None, in_place: bool) -> Tensor | None:
    """gradient * scale in like's dtype, rounded once: torch would first round scale to gradient's dtype."""
    if gradient is None:
        return None
    if in_place and gradient.dtype == like.dtype:
        torch.ops.coda.scale_(gradient, scale)
        return gradient
    return torch.ops.coda.scaled(gradient, scale, like.dtype)


def _keeps_graph() -> bool:
    """Whether the backward that runs may run again (retain_graph); True where torch does not tell."""
    asks = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return torch.compiler.is_compiling() or asks is None or asks()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, public, chunk_bytes, x, h, rstd, norm_weight, weight, bias, target, inside, counted, options, chunk):
        needs = tuple(ctx.needs_input_grad[i] for i in (2, 5, 6, 7))
        at_once = options.reduction != "none" and not options.keep_logits
        if chunk_bytes is None and needs[2] and weight.dtype == torch.bfloat16 and main_grad(weight) is None:
            # For each class: of all tokens a logit, against those of a chunk and a row of the float32 sum.
            if 2 * x.shape[0] <= 2 * chunk + 4 * x.shape[1]:
                chunk = max(chunk, x.shape[0])
        arguments = x, h, rstd, norm_weight, weight, bias, target, inside, counted, options, chunk
        loss, logits, lse, gradients = _forward(*arguments, needs if at_once else None)
        saved = logits if options.keep_logits else None
        ctx.save_for_backward(x, rstd, norm_weight, weight, bias, target, inside, counted, saved, lse, *(gradients or ()))
        ctx.public, ctx.options, ctx.chunk_bytes, ctx.needs = public, options, chunk_bytes, needs
        ctx.set_materialize_grads(False)
        return _wanted((loss, logits, lse), options)

    @staticmethod
    def backward(ctx: Any, dloss, *others):
        saved = ctx.saved_tensors
        tensors, formed = saved[:10], saved[10:]
        x, _, norm_weight, weight, bias, _, _, counted, _, lse = tensors
        incoming = iter(others)
        dlogits = next(incoming) if ctx.options.keep_logits else None
        dlse = next(incoming) if ctx.options.return_lse else None
        if dloss is None and dlogits is None and dlse is None:
            return (None,) * 13
        with torch.no_grad():
            if formed and dlse is None:
                divisor = _mean_weight(counted.sum(), x)[1] if ctx.options.reduction == "mean" and x.dtype == torch.float16 else None
                scale = dloss if divisor is None else dloss / divisor
                gradients = _scale(formed, scale, x, norm_weight, weight, bias)
            else:
                gradients = _backward(ctx, dloss, dlogits, dlse, *tensors)
        dx, dnorm, dweight, dbias = once(ctx.public, gradients, dloss, *others, x, norm_weight, weight, bias)
        return None, None, dx, None, None, dnorm, dweight, dbias, *[None] * 5


def _scale(formed, scale, x, norm_weight, weight, bias) -> tuple[Tensor | None, ...]:
    """What the forward formed, times the gradient of its scalar. That of a weight with main_grad goes there."""
    dx, dnorm, dweight, dbias = formed
    total = None if dweight is None else main_grad(weight)
    if total is not None:
        total.addcmul_(dweight, scale.to(total.dtype))
        mark_added_to_main_grad(weight)
        dweight = None
    # What no one will ask for again takes its result; where the loss is differentiated by itself, scale is 1 and there is nothing to do.
    in_place = not _keeps_graph()
    return tuple(_scaled(t, scale, like, in_place) for t, like in zip((dx, dnorm, dweight, dbias), (x, norm_weight, weight, bias)))


def _product_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out = a b. On a GPU a product without an epilogue is the library's anyway, which then needs no copy."""
    if out.is_cuda:
        torch.mm(a, b, out=out)
    else:
        out.copy_(torch.ops.coda.gemm(a, b))


def _backward(ctx, dloss, dlogits, dlse, x, rstd, norm_weight, weight, bias, target, inside, counted, saved, lse) -> tuple[Tensor | None, ...]:
    """The gradients from those of all outputs, with the logits kept or formed again.

    Once lse is known columns are independent: chunks are of the vocabulary. The rows of weight's gradient that belong to one are then complete after one
    product over all tokens, rounded once, and what is summed over chunks is no larger than x.
    """
    wide, options = lse.dtype, ctx.options
    tokens, classes = x.shape[0], weight.shape[0]
    need_x, need_norm, need_weight, need_bias = ctx.needs
    h = x if norm_weight is None else torch.ops.coda.rms_norm_stats(x, norm_weight, 0.0)[0]
    if dloss is None:
        loss_weight = lse.new_zeros(lse.shape)
    else:
        dloss = dloss / counted.sum() if options.reduction == "mean" else dloss
        loss_weight = torch.where(counted, dloss, 0).to(wide)
    factors = _factors(lse, inside, loss_weight, dlse, _classes(classes, options), options)
    wants_dot = rstd is not None and (need_x or need_norm)
    into = main_grad(weight) if need_weight else None
    chunks = _chunks(classes, chunk_rows(ctx.chunk_bytes, tokens, x.element_size()))
    dweight = torch.empty_like(weight) if need_weight and into is None and len(chunks) > 1 else None
    dbias, dot, dn, dx, dnorm = [], None, None, None, None
    for s in chunks:
        arguments = lse, target - s.start, factors, rstd, None if bias is None else bias[s], options, need_bias, wants_dot
        if saved is None:
            gradient = _formed_again(h, weight[s], *arguments)
        else:
            gradient = _gradient_of_kept(saved[:, s], None if dlogits is None else dlogits[:, s], *arguments)
        dz = gradient.dz
        dbias.append(gradient.dbias)
        if wants_dot:
            dot = gradient.row_dot if dot is None else dot + gradient.row_dot
        if into is not None:
            torch.ops.coda.gemm_accumulate_(into[s], dz.t(), h)
        elif dweight is not None:
            _product_into(dweight[s], dz.t(), h)
        elif need_weight:
            dweight = torch.ops.coda.gemm(dz.t(), h)
        if not (need_x or need_norm):
            pass
        elif len(chunks) == 1:
            dx, dnorm, _ = norm_gradient(dz, _correction(rstd, dot, x), x, norm_weight, (weight,), None, need_x, need_norm, (False,))
        elif wide == torch.float64:
            dn = torch.ops.coda.gemm(dz, weight[s]) if dn is None else dn + torch.ops.coda.gemm(dz, weight[s])
        else:
            dn = x.new_zeros(x.shape, dtype=wide) if dn is None else dn
            torch.ops.coda.gemm_accumulate_(dn, dz, weight[s])
        del gradient, dz  # before the next is made
    if into is not None:
        mark_added_to_main_grad(weight)
    if dn is not None:
        dx, dnorm = _through_norm(dn, _correction(rstd, dot, x) if wants_dot else None, x, norm_weight, need_norm)
        dx = dx.to(x.dtype)
    if options.shard is not None:
        dx, dnorm = options.shard.summed(dx if need_x else None), options.shard.summed(dnorm)
    dnorm = None if dnorm is None else dnorm.to(norm_weight.dtype)
    return dx if need_x else None, dnorm, dweight, torch.cat(dbias).to(bias.dtype) if need_bias else None


@fake("coda::lse_select")
def _(h, rstd, weight, bias, target, softcap, want_totals, want_logits, rows):
    m, v = h.shape[0], weight.shape[0]
    return h.new_empty((6, m), dtype=statistics_dtype(h)), h.new_empty((m, (v + 7) // 8 * 8) if want_logits else (0,))


@fake("coda::exponentials_into_")
def _(stored, references, workspace, h, rstd, weight, bias, target, softcap, want_dots, want_totals, rows):
    return references.new_empty((6, h.shape[0]))


@fake("coda::exponential_gradient_")
def _(stored, references, statistics, factors, target, rstd, classes, softcap, want_dbias):
    return statistics.new_empty((classes,) if want_dbias else (0,))


@fake("coda::logit_gradient")
def _(logits, incoming, target, lse, factors, rstd, bias, softcap, want_dbias, want_dot):
    m, v = logits.shape
    return logits.new_empty((m, (v + 7) // 8 * 8)), lse.new_empty((m,) if want_dot else (0,)), lse.new_empty((v,) if want_dbias else (0,))


@fake("coda::scale_")
def _(t, factor):
    return None


@fake("coda::scaled")
def _(t, factor, dtype):
    return t.new_empty(t.shape, dtype=dtype)


@fake("coda::dlogits")
def _(h, rstd, weight, bias, target, lse, factors, softcap, want_dbias):
    m, v = h.shape[0], weight.shape[0]
    return h.new_empty((m, (v + 7) // 8 * 8)), lse.new_empty((m,)), lse.new_empty((v,) if want_dbias else (0,))


for _op in ("lse_select", "dlogits", "logit_gradient"):
    no_second_derivative(f"coda::{_op}", "coda.linear_cross_entropy")
