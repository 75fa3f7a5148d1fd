"""The language-model head and its loss, without the M x V logits.

Tokens are taken in chunks. Of a chunk the logits are formed, their statistics, and from these the gradient of the logits, which two products turn
into the gradients of the operands before the next chunk takes its place. Where the loss is a sum or a mean, all that the backward will bring is one
scalar: the forward forms the gradients, three products in all, and the backward scales them. Else the backward forms the logits again: four products.

`chunk_statistics` and `chunk_gradient` are the whole mathematics. They are torch operations so far, on logits in float32, which no epilogue rounds.
"""
from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from coda.ops._common import (
    as_rows,
    cast_for_autocast,
    check_devices,
    check_optional_tensor,
    check_tensor,
    check_vector,
    check_weights,
    main_grad,
    mark_added_to_main_grad,
    needs_grad,
    once,
    statistics_dtype,
)
from coda.ops.norm import NormStats, norm_gradient, norm_statistics

REDUCTIONS = ("mean", "sum", "none")
CHUNK_BYTES = 512 * 2**20
_TILE = 128  # rows of a GEMM's tile: whole ones, where a chunk has that many


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
    chunk_bytes: int = CHUNK_BYTES,
    shard: VocabularyShard | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """The cross-entropy of logits = x W^T + b, or RMSNorm(x; norm_weight) W^T + b, with the targets:

        z = logits, or softcap * tanh(logits / softcap),   lse = log(sum(exp(z)))
        loss = lse - (1 - label_smoothing) z[target] - label_smoothing mean(z) + z_loss lse^2

    Args:
        x: [..., D]; float32, float64, bfloat16 or float16.
        weight: [V, D], dtype and device of x (inside autocast, of any of these dtypes). bias: [V].
        target: [...], int64 or int32, each in [0, V) or ignore_index.
        norm_weight: [D] in x's dtype or float32: x is the input of an RMSNorm with this weight and eps. None: no norm, or with stats one without a
            weight.
        stats: the statistics that came with x from `coda.linear_residual`. None: they are computed here, in a pass over x.
        ignore_index: rows with this target have loss 0, no gradient, and are not counted in the mean.
        reduction: "mean" over the rows that count, "sum" or "none" (for a weight for each token, which then multiplies the result).
        label_smoothing: in [0, 1]. z_loss: its factor, 0 or more. softcap: positive.
        keep_logits: return the logits too, which then are held.
        return_lse: return lse too, also of ignored rows.
        chunk_bytes: at most so much memory for the logits of one chunk of tokens in x's dtype, but at least a row. The torch operations on a chunk
            hold several times as much. Results depend on it by rounding only.
        shard: weight, bias and the kept logits are this rank's rows of a vocabulary that is divided over a process group; V above is the number of
            all. The other arguments, the loss and lse are the same on every rank, and so are the gradients of x and norm_weight, which are summed
            over the ranks. All ranks make the same calls, with the same options and tensors that need a gradient.

    Returns:
        The loss, a scalar or [...] with "none", in float32 (float64 for float64 x); or a tuple of it, with keep_logits the logits [..., V] in x's
        dtype, before the softcap, and with return_lse lse [...] in the loss's dtype. Differentiable once in x, weight, bias and norm_weight, through
        every output.

    Raises:
        TypeError, ValueError: an argument of another type, dtype, device, shape or range, or stats of another tensor, norm weight or eps.
        IndexError: a target outside [0, V), on the CPU. On a GPU the range is not checked here, which would wait for the device: torch's indexing
            fails with its device-side assertion; with shard, the loss is NaN.
        NotImplementedError: when a second derivative is asked for.

    As in torch the mean over no row is NaN, and its gradients are zero. Logits are sums in float32 (float64), of which the statistics are taken
    before anything is rounded; their gradient is rounded once to x's dtype for the products. The weight's gradient is summed over chunks in float32
    and rounded once. With "mean" and "sum", without keep_logits and while nothing but the loss is differentiated, gradients are formed in the
    forward, and only multiplied by the incoming scalar in the backward; if that is no power of two, the gradients of x and weight are rounded a second time.
    With keep_logits they are formed in the backward, from the logits as they were rounded.

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
    chunk_bytes: int = CHUNK_BYTES,
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
    _check_number("chunk_bytes", chunk_bytes, "a positive number of bytes", lambda v: v > 0)
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
        outputs = _LinearCrossEntropy.apply(public, *arguments)
    else:
        outputs = _wanted(_forward(*arguments, None)[:3], options)
    shapes = _wanted((x.shape[:-1] if options.reduction == "none" else (), (*x.shape[:-1], weight.shape[0]), x.shape[:-1]), options)
    return tuple(t.view(shape) for t, shape in zip(outputs, shapes))


def _wanted(all_three: tuple, options: _Options) -> tuple:
    """Of loss, logits and lse those that are returned."""
    wanted = True, options.keep_logits, options.return_lse
    return tuple(t for t, wants in zip(all_three, wanted) if wants)


def chunk_rows(chunk_bytes: float, classes: int, element_size: int) -> int:
    """How many rows of logits a chunk has."""
    rows = max(1, int(chunk_bytes) // (max(1, classes) * element_size))
    return rows - rows % _TILE if rows > _TILE else rows


def chunk_logits(h: Tensor, rstd: Tensor | None, weight: Tensor, bias: Tensor | None) -> Tensor:
    """rstd (h W^T) + b of a chunk [m, D] in float32 (float64)."""
    wide = statistics_dtype(h)
    if h.dtype == wide:
        logits = torch.ops.coda.gemm(h, weight.t())
    else:
        logits = h.new_zeros((h.shape[0], weight.shape[0]), dtype=wide)
        torch.ops.coda.gemm_accumulate_(logits, h, weight.t())
    if rstd is not None:
        logits.mul_(rstd.unsqueeze(1))
    return logits if bias is None else logits.add_(bias)


def _classes(columns: int, options: _Options) -> int:
    return columns if options.shard is None else options.shard.classes


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else (logits / softcap).tanh_().mul_(softcap)


def chunk_statistics(logits: Tensor, target: Tensor, inside: Tensor | None, options: _Options) -> tuple[Tensor, Tensor, Tensor | None]:
    """(lse, z[target], with label smoothing sum(z)) of each row of logits [m, V]; target [m] int64 in [0, V). inside: [m], where not, the target
    is another rank's and its logit 0 here."""
    z = _capped(logits, options.softcap)
    picked = z.gather(1, target.unsqueeze(1)).squeeze(1)
    picked = picked if inside is None else picked.masked_fill(~inside, 0)
    return z.logsumexp(1), picked, z.sum(1) if options.label_smoothing else None


def chunk_gradient(
    logits: Tensor,
    lse: Tensor,
    target: Tensor,
    inside: Tensor | None,
    loss_weight: Tensor,
    lse_weight: Tensor | None,
    incoming: Tensor | None,
    options: _Options,
) -> Tensor:
    """The gradient of sum(loss_weight loss + lse_weight lse) + sum(incoming logits) by logits [m, V], in their dtype:

        softmax(z) (loss_weight (1 + 2 z_loss lse) + lse_weight) - loss_weight ((1 - label_smoothing) onehot(target) + label_smoothing / V)

    times 1 - (z / softcap)^2, plus incoming. loss_weight, lse_weight: [m], 0 where a row counts for nothing. target, inside: as in
    `chunk_statistics`. Nothing given is changed.
    """
    z = _capped(logits, options.softcap)
    by_lse = loss_weight * (1 + 2 * options.z_loss * lse) if options.z_loss else loss_weight
    by_lse = by_lse if lse_weight is None else by_lse + lse_weight
    gradient = (z - lse.unsqueeze(1)).exp_().mul_(by_lse.unsqueeze(1))
    smoothing = options.label_smoothing
    if smoothing:
        gradient.sub_((loss_weight * (smoothing / _classes(logits.shape[1], options))).unsqueeze(1))
    here = loss_weight if inside is None else loss_weight.masked_fill(~inside, 0)
    rows = torch.arange(logits.shape[0], device=logits.device)
    gradient[rows, target] -= here * (1 - smoothing)
    if options.softcap is not None:
        gradient.mul_(1 - (z / options.softcap).square_())
    return gradient if incoming is None else gradient.add_(incoming)


def _chunks(tokens: int, chunk: int) -> list[slice]:
    if 0 < tokens <= chunk:  # torch.compile needs one graph for all these numbers of tokens
        return [slice(0, tokens)]
    return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]


def _mean_weight(counted: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """1 / the number of rows that count, as a quotient (m, p) = m / p, with m in (1/2, 1] and p a power of two.

    The gradients that the forward forms have the factor m. In float16 they would underflow with 1 / count, and p is divided out without rounding.
    """
    count = counted.sum().clamp(min=1).to(dtype)
    mantissa = 2 * torch.frexp(count)[0]
    return 1 / mantissa, count / mantissa


def _forward(x, h, rstd, norm_weight, weight, bias, target, inside, counted, options, chunk, needs):
    """(loss, logits or an empty tensor, lse, the gradients of a loss that is a scalar, if `needs` says of what)"""
    wide, tokens = statistics_dtype(x), x.shape[0]
    h = x if h is None else h
    losses, lse = (x.new_empty((tokens,), dtype=wide) for _ in range(2))
    kept = x.new_empty((tokens, weight.shape[0]) if options.keep_logits else (0,))
    sums = None
    if needs is not None:
        # A sum over tokens, before it is divided by their number, may be too large for float16.
        unrounded = main_grad(weight) is not None or weight.dtype == torch.float16
        sums = _Gradients(x, rstd, norm_weight, weight, bias, needs, tokens <= chunk, None, unrounded, options.shard)
        factor = _mean_weight(counted, wide)[0] if options.reduction == "mean" else 1
        loss_weight = counted.to(wide) * factor
    for s in _chunks(tokens, chunk):
        logits = chunk_logits(h[s], None if rstd is None else rstd[s], weight, bias)
        here = None if inside is None else inside[s]
        lse[s], picked, total = chunk_statistics(logits, target[s], here, options)
        if here is not None:
            lse[s], picked, total = options.shard.combined(lse[s], picked, total, here)
        smoothing = options.label_smoothing
        losses[s] = lse[s] - (1 - smoothing) * picked
        if smoothing:
            losses[s] -= total * (smoothing / _classes(weight.shape[0], options))
        if options.z_loss:
            losses[s] += options.z_loss * lse[s].square()
        if options.keep_logits:
            kept[s] = logits
        if sums is not None:
            sums.add(s, h[s], logits, chunk_gradient(logits, lse[s], target[s], here, loss_weight[s], None, None, options))
        del logits  # before the next are made
    losses = losses.masked_fill(~counted, 0)  # not in place: Dynamo loses the gradient of an output that was (torch 2.11)
    loss = losses
    if options.reduction != "none":
        loss = losses.sum() if options.reduction == "sum" else losses.sum() / counted.sum()
    return loss, kept, lse, None if sums is None else sums.result()


class _Gradients:
    """The gradients of (x, norm_weight, weight, bias), those that `needs` asks for, from the gradients of chunks of logits.

    into: what the gradient of weight is added to, float32, instead of a tensor of its own. wide: that tensor stays in float32 (float64)."""

    def __init__(self, x, rstd, norm_weight, weight, bias, needs, single, into, wide, shard):
        self.x, self.rstd, self.weight, self.bias = x, rstd, weight, bias
        self.needs, self.into, self.wide, self.shard = needs, into, wide, shard
        need_x, need_norm, need_weight, need_bias = needs
        dtype = statistics_dtype(x)
        zeros = lambda like: like.new_zeros(like.shape, dtype=dtype)
        # In float32 the operator gives its part of the gradient unrounded.
        self.norm_weight = None if norm_weight is None else norm_weight.to(dtype)
        self.dx = x.new_empty(x.shape) if need_x else None
        self.dnorm = zeros(norm_weight) if need_norm else None
        self.dbias = zeros(bias) if need_bias else None
        self.dweight = into
        self.single = single and into is None and not wide and x.shape[0] > 0  # one product, rounded by itself
        if need_weight and into is None and not self.single:
            self.dweight = zeros(weight)

    def add(self, s: slice, h: Tensor, logits: Tensor, dlogits: Tensor) -> None:
        """Those of the rows s, from the result of `chunk_gradient`, which is used up."""
        need_x, need_norm, need_weight, need_bias = self.needs
        if need_bias:
            self.dbias += dlogits.sum(0)
        correction = None
        if self.rstd is not None:
            rstd = self.rstd[s]
            if need_x or need_norm:
                y = logits
                if self.bias is not None:  # a column that the bias takes away has no gradient
                    y = (logits - self.bias).masked_fill_(self.bias.isinf(), 0)
                correction = rstd.square() * (dlogits * y).sum(1) / max(self.x.shape[1], 1)
            dlogits.mul_(rstd.unsqueeze(1))
        dz = dlogits.to(self.x.dtype)
        if need_x or need_norm:
            arguments = dz, correction, self.x[s], self.norm_weight, (self.weight,), None
            dx, dnorm, _ = norm_gradient(*arguments, need_x, need_norm, (False,))
            if need_x:
                self.dx[s] = dx
            if need_norm:
                self.dnorm += dnorm
        if need_weight and self.single:
            self.dweight = torch.ops.coda.gemm(dz.t(), h)
        elif need_weight and self.dweight.dtype == torch.float64:
            self.dweight += torch.ops.coda.gemm(dz.t(), h)
        elif need_weight:
            torch.ops.coda.gemm_accumulate_(self.dweight, dz.t(), h)

    def result(self) -> tuple[Tensor | None, ...]:
        """Those of x and weight (but see `wide`) in their dtypes, those of the vectors in float32 (float64)."""
        dweight, dbias, dnorm = self.dweight, self.dbias, self.dnorm
        if self.into is not None or not self.needs[2]:
            dweight = None
        elif not self.wide:
            dweight = dweight.to(self.weight.dtype)
        dx = self.dx
        if self.shard is not None:
            dx, dnorm = self.shard.summed(dx), self.shard.summed(dnorm)
        return dx, dnorm, dweight, dbias


def _scaled(gradient: Tensor | None, scale: Tensor, like: Tensor | None) -> Tensor | None:
    """gradient * scale in like's dtype, rounded once: a tensor without dimensions, as scale is, torch would first round to gradient's dtype."""
    return None if gradient is None else torch.mul(gradient, scale.view(1), out=like.new_empty(gradient.shape))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, public, x, h, rstd, norm_weight, weight, bias, target, inside, counted, options, chunk):
        needs = tuple(ctx.needs_input_grad[i] for i in (1, 4, 5, 6))
        at_once = options.reduction != "none" and not options.keep_logits
        arguments = x, h, rstd, norm_weight, weight, bias, target, inside, counted, options, chunk
        loss, logits, lse, gradients = _forward(*arguments, needs if at_once else None)
        saved = logits if options.keep_logits else None
        ctx.save_for_backward(x, rstd, norm_weight, weight, bias, target, inside, counted, saved, lse, *(gradients or ()))
        ctx.public, ctx.options, ctx.chunk, ctx.needs = public, options, chunk, needs
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
            return (None,) * 12
        with torch.no_grad():
            if formed and dlse is None:
                scale = dloss / _mean_weight(counted, lse.dtype)[1] if ctx.options.reduction == "mean" else dloss
                gradients = _scale(formed, scale, x, norm_weight, weight, bias)
            else:
                gradients = _backward(ctx, dloss, dlogits, dlse, *tensors)
        dx, dnorm, dweight, dbias = once(ctx.public, gradients, dloss, *others, x, norm_weight, weight, bias)
        return None, dx, None, None, dnorm, dweight, dbias, *[None] * 5


def _scale(formed, scale, x, norm_weight, weight, bias) -> tuple[Tensor | None, ...]:
    """What the forward formed, times the gradient of its scalar. That of a weight with main_grad goes there."""
    dx, dnorm, dweight, dbias = formed
    total = None if dweight is None else main_grad(weight)
    if total is not None:
        total.addcmul_(dweight, scale.to(total.dtype))
        mark_added_to_main_grad(weight)
        dweight = None
    return tuple(_scaled(t, scale, like) for t, like in zip((dx, dnorm, dweight, dbias), (x, norm_weight, weight, bias)))


def _backward(ctx, dloss, dlogits, dlse, x, rstd, norm_weight, weight, bias, target, inside, counted, saved, lse) -> tuple[Tensor | None, ...]:
    """The gradients from those of all outputs, chunk by chunk, with the logits kept or formed again."""
    wide, tokens = lse.dtype, x.shape[0]
    h = x if norm_weight is None else torch.ops.coda.rms_norm_stats(x, norm_weight, 0.0)[0]
    if dloss is None:
        loss_weight = lse.new_zeros(lse.shape)
    else:
        dloss = dloss / counted.sum() if ctx.options.reduction == "mean" else dloss
        loss_weight = torch.where(counted, dloss, 0).to(wide)
    into = main_grad(weight) if ctx.needs[2] else None
    sums = _Gradients(x, rstd, norm_weight, weight, bias, ctx.needs, tokens <= ctx.chunk, into, False, ctx.options.shard)
    for s in _chunks(tokens, ctx.chunk):
        logits = saved[s].to(wide) if saved is not None else chunk_logits(h[s], None if rstd is None else rstd[s], weight, bias)
        here, lse_weight, incoming = (None if t is None else t[s] for t in (inside, dlse, dlogits))
        sums.add(s, h[s], logits, chunk_gradient(logits, lse[s], target[s], here, loss_weight[s], lse_weight, incoming, ctx.options))
        del logits
    if into is not None:
        mark_added_to_main_grad(weight)
    dx, dnorm, dweight, dbias = sums.result()
    return dx, None if dnorm is None else dnorm.to(norm_weight.dtype), dweight, None if dbias is None else dbias.to(bias.dtype)
