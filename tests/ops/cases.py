"""The differentiable functions as cases: each with its formula in plain torch and random arguments, for tests that ask the same of all."""
import dataclasses
import itertools
from typing import Callable

import torch
import torch.nn.functional as F

import coda
from coda import _C
from coda.ops.mlp import mlp_residual
from tests.reference import assert_no_worse, mlp

SIXTEEN = (torch.bfloat16, torch.float16)
gelu_tanh = lambda t: F.gelu(t, approximate="tanh")
ACTIVATIONS = {None: lambda t: t, "relu": F.relu, "relu2": lambda t: F.relu(t).square(), "silu": F.silu, "gelu": F.gelu, "gelu_tanh": gelu_tanh}
GATES = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": gelu_tanh}
GATED = {"swiglu": F.silu, "geglu": F.gelu, "geglu_tanh": gelu_tanh}


def kernels_of_this_gpu():
    """How coda.backend_of_last_call() may begin where kernels ran."""
    arch, _ = _C.arch_for(*torch.cuda.get_device_capability())
    return f"{arch}:", "sm80:"  # those for few rows


def sixteen_on_cuda(device, otherwise=torch.float32):
    """The dtype to use where one is enough: kernels exist for 16 bits only."""
    return torch.bfloat16 if device == "cuda" else otherwise


def new(*shape, dtype, device, scale=1.0):
    """Normal random numbers, the same on every device."""
    return (torch.randn(*shape, dtype=torch.float64) * scale).to(dtype).to(device)


def norm(x, weight, eps=1e-6):
    return F.rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps)


def layer_norm(x, weight, bias, eps=1e-6):
    return F.layer_norm(x, x.shape[-1:], *(None if t is None else t.to(x.dtype) for t in (weight, bias)), eps)


def tables(positions, half, x):
    """cos and sin [positions, half] in float32, or beside a float64 x the same values in float64."""
    angle = torch.arange(positions, device=x.device).unsqueeze(1) * 0.7 ** torch.arange(1, half + 1, device=x.device)
    return [t.to(torch.promote_types(x.dtype, torch.float32)) for t in (angle.float().cos(), angle.float().sin())]


def rotate(t, cos, sin, interleaved=False):
    """t [..., T, heads, head_dim] turned by cos, sin [..., T, rotary_dim / 2], in the dtype of the tables."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turning, rest = t.tensor_split((2 * cos.shape[-1],), -1)
    turning = turning.to(cos.dtype)
    a, b = (turning[..., 0::2], turning[..., 1::2]) if interleaved else turning.chunk(2, -1)
    pair = a * cos - b * sin, a * sin + b * cos
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((turned.to(t.dtype), rest), -1)


@dataclasses.dataclass(frozen=True)
class Case:
    function: Callable  # of named tensors
    reference: Callable  # the same formula in plain torch
    shapes: Callable  # (tokens, width, output width) -> the shape of each tensor
    kink: bool = False  # at 0: the bias keeps away from it, where rounding would decide between two derivatives

    def tensors(self, m, d, n, dtype, device):
        """Random arguments of sensible magnitudes."""

        def value(name, shape):
            scale = shape[-1] ** -0.5 if name.startswith("w") and min(shape) > 0 else 1
            t = new(*shape, dtype=dtype, device=device, scale=0.2 if "norm" in name else scale)
            return 1 + t if "norm" in name else 4 * t.sign() + t / 8 if name == "bias" and self.kink else t

        return {name: value(name, shape) for name, shape in self.shapes(m, d, n).items()}


def _linear(activation=None):
    def reference(x, weight, bias=None, residual=None):
        y = ACTIVATIONS[activation](F.linear(x, weight, bias))
        return y if residual is None else residual + y

    shapes = lambda m, d, n: dict(x=(m, d), weight=(n, d), bias=(n,), residual=(m, n))
    function = lambda x, weight, bias=None, residual=None: coda.linear(x, weight, bias, residual=residual, activation=activation)
    return Case(function, reference, shapes, activation == "relu")


def _linear_residual(norm="rms"):
    def function(a, weight, residual, bias=None):
        return coda.linear_residual(a, weight, residual, bias=bias, next_norm_weight=torch.ones_like(weight[:, 0]), next_norm=norm)[0]

    shapes = lambda m, d, n: dict(a=(m, d), weight=(n, d), residual=(m, n), bias=(n,))
    return Case(function, lambda a, weight, residual, bias=None: residual + F.linear(a, weight, bias), shapes)


def _norm_linear(activation=None):
    def function(x, weight, norm_weight=None, bias=None):
        return coda.norm_linear(x, norm_weight, weight, bias, activation=activation, eps=1e-5)

    def reference(x, weight, norm_weight=None, bias=None):
        return x, ACTIVATIONS[activation](F.linear(norm(x, norm_weight, 1e-5), weight, bias))

    return Case(function, reference, lambda m, d, n: dict(x=(m, d), weight=(n, d), norm_weight=(d,), bias=(n,)), activation == "relu")


def _layer_norm_linear(activation=None):
    options = dict(activation=activation, eps=1e-5, norm="layer")

    def function(x, weight, norm_weight=None, norm_bias=None, bias=None):
        return coda.norm_linear(x, norm_weight, weight, bias, norm_bias=norm_bias, **options)

    def reference(x, weight, norm_weight=None, norm_bias=None, bias=None):
        act = GATED[activation] if activation in GATED else ACTIVATIONS[activation]
        y = F.linear(layer_norm(x, norm_weight, norm_bias, 1e-5), weight, bias)
        return x, act(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1] if activation in GATED else act(y)

    def shapes(m, d, n):
        weights = dict(weight=(2 * n, d)) if activation in GATED else dict(weight=(n, d), bias=(n,))
        return dict(x=(m, d), norm_weight=(d,), norm_bias=(d,)) | weights

    return Case(function, reference, shapes, activation == "relu")


def _norm_linear_gated(activation, pair):
    def function(x, w, w_up=None, norm_weight=None):
        return coda.norm_linear(x, norm_weight, (w, w_up) if pair else w, activation=activation)

    def reference(x, w, w_up=None, norm_weight=None):
        gate, up = F.linear(norm(x, norm_weight), torch.cat((w, w_up)) if pair else w).chunk(2, -1)
        return x, GATED[activation](gate) * up

    weights = lambda d, n: dict(w=(n, d), w_up=(n, d)) if pair else dict(w=(2 * n, d))
    return Case(function, reference, lambda m, d, n: dict(x=(m, d), norm_weight=(d,)) | weights(d, n))


def positions_of(kind, batch, length, device):
    """(positions as given to the function, their [batch, length]); the tables have 3 * length + 1 rows."""
    if kind is None:
        return None, torch.arange(length, device=device).expand(batch, length)
    name, dtype = kind
    rows = torch.arange(batch * length if name == "BT" else length, device=device) * 5 % (3 * length + 1)
    rows = rows.view(batch, length) if name == "BT" else rows
    return rows.to(dtype), rows.expand(batch, length)


def head_norm(t, weight, eps):
    """RMSNorm of each head of t [..., heads, head_dim], in t's dtype."""
    return F.rms_norm(t, t.shape[-1:], weight.to(t.dtype), eps)


def _rope(head_dim, rotary_dim, interleaved=False, positions=None, heads=(1, 1), kind="rms", qk_norm=False):
    def parts(x):
        cos, sin = tables(3 * x.shape[1] + 1, rotary_dim // 2, x)
        return cos, sin, *positions_of(positions, *x.shape[:2], x.device)

    def function(x, w_qkv, norm_weight=None, bias=None, norm_bias=None, q_norm=None, k_norm=None):
        cos, sin, given, _ = parts(x)
        options = dict(num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, positions=given, interleaved=interleaved)
        if qk_norm:
            options |= dict(q_norm_weight=q_norm, k_norm_weight=k_norm, qk_norm_eps=1e-4)
        return coda.norm_linear_rope(x, norm_weight, w_qkv, cos, sin, bias=bias, norm=kind, norm_bias=norm_bias, **options)

    def reference(x, w_qkv, norm_weight=None, bias=None, norm_bias=None, q_norm=None, k_norm=None):
        cos, sin, _, rows = parts(x)
        normed = norm(x, norm_weight) if kind == "rms" else layer_norm(x, norm_weight, norm_bias)
        qkv = F.linear(normed, w_qkv, bias).unflatten(-1, (-1, head_dim))
        q, k, v = qkv.split((heads[0], heads[1], heads[1]), -2)
        if qk_norm:
            q, k = head_norm(q, q_norm, 1e-4), head_norm(k, k_norm, 1e-4)
        return x, rotate(q, cos[rows], sin[rows], interleaved), rotate(k, cos[rows], sin[rows], interleaved), v

    columns = (heads[0] + 2 * heads[1]) * head_dim
    batch = lambda m: 2 if m % 2 == 0 else 1
    heads_norms = dict(q_norm=(head_dim,), k_norm=(head_dim,)) if qk_norm else {}

    def shapes(m, d, n):
        always = dict(x=(batch(m), m // batch(m), d), w_qkv=(columns, d), norm_weight=(d,), bias=(columns,))
        return always | heads_norms | ({} if kind == "rms" else dict(norm_bias=(d,)))

    return Case(function, reference, shapes)


def _mlp(activation="silu", residual="given", pair=False):
    def function(x, w_gate_up, w_down, w_up=None, norm_weight=None, given=None):
        added = x if residual == "x" else given
        w = w_gate_up if w_up is None else (w_gate_up, w_up)
        return coda.fused_mlp_forward(x, w, w_down, norm_weight=norm_weight, residual=added, activation=activation)

    def reference(x, w_gate_up, w_down, w_up=None, norm_weight=None, given=None):
        w = w_gate_up if w_up is None else torch.cat((w_gate_up, w_up))
        gate, up = F.linear(x if norm_weight is None else norm(x, norm_weight), w).chunk(2, -1)
        y = F.linear(GATES[activation](gate) * up, w_down)
        added = x if residual == "x" else given
        return y if added is None else added + y

    def shapes(m, d, n):
        weights = dict(w_gate_up=(n, d), w_up=(n, d)) if pair else dict(w_gate_up=(2 * n, d))
        return dict(x=(m, d), norm_weight=(d,), w_down=(d, n)) | weights | (dict(given=(m, d)) if residual == "given" else {})

    return Case(function, reference, shapes)


def _plain_mlp(activation="gelu_tanh", kind="rms", residual="given"):
    def function(x, w_up, w_down, bias=None, b_down=None, norm_weight=None, norm_bias=None, given=None):
        options = dict(residual=x if residual == "x" else given, activation=activation, norm_weight=norm_weight, eps=1e-5)
        biases = dict(up_bias=bias, down_bias=b_down, norm_bias=norm_bias)
        return coda.fused_mlp_forward(x, w_up, w_down, gated=False, norm=kind, **options, **biases)

    def reference(x, w_up, w_down, bias=None, b_down=None, norm_weight=None, norm_bias=None, given=None):
        normed = x
        if norm_weight is not None:
            normed = norm(x, norm_weight, 1e-5) if kind == "rms" else layer_norm(x, norm_weight, norm_bias, 1e-5)
        y = F.linear(ACTIVATIONS[activation](F.linear(normed, w_up, bias)), w_down, b_down)
        added = x if residual == "x" else given
        return y if added is None else added + y

    def shapes(m, d, n):
        always = dict(x=(m, d), norm_weight=(d,), w_up=(n, d), bias=(n,), w_down=(d, n), b_down=(d,))
        return always | (dict(norm_bias=(d,)) if kind == "layer" else {}) | (dict(given=(m, d)) if residual == "given" else {})

    return Case(function, reference, shapes, activation == "relu")


def _rope_separate():
    """The weights and biases of q, k and v as tensors of their own."""
    whole = _rope(8, 8, heads=(3, 1))

    def function(x, w_q, w_k, w_v, norm_weight=None, b_q=None, b_k=None, b_v=None):
        cos, sin = tables(x.shape[1], 4, x)
        bias = None if b_q is None or b_k is None or b_v is None else (b_q, b_k, b_v)
        options = dict(num_heads=3, num_kv_heads=1, head_dim=8, bias=bias)
        return coda.norm_linear_rope(x, norm_weight, (w_q, w_k, w_v), cos, sin, **options)

    def reference(x, w_q, w_k, w_v, norm_weight=None, b_q=None, b_k=None, b_v=None):
        bias = None if b_q is None or b_k is None or b_v is None else torch.cat((b_q, b_k, b_v))
        return whole.reference(x, torch.cat((w_q, w_k, w_v)), norm_weight, bias)

    def shapes(m, d, n):
        rows = dict(q=24, k=8, v=8)
        weights = {f"w_{k}": (r, d) for k, r in rows.items()}
        return dict(x=whole.shapes(m, d, n)["x"], norm_weight=(d,)) | weights | {f"b_{k}": (r,) for k, r in rows.items()}

    return Case(function, reference, shapes)


def targets(x, classes):
    """A label for each row of x, some of them ignored."""
    labels = torch.arange(x.shape[:-1].numel(), device=x.device) * 7 % classes
    labels[1::4] = -100
    return labels.view(x.shape[:-1])


def cross_entropy(logits, target, softcap=None, z_loss=0.0, reduction="mean", label_smoothing=0.0):
    """The loss of logits [..., V] in float32, or float64, step by step."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    z = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    flat, labels = z.reshape(-1, z.shape[-1]), target.reshape(-1).long()
    loss = F.cross_entropy(flat, labels, reduction="none", label_smoothing=label_smoothing)
    loss = loss + z_loss * torch.where(labels == -100, 0, flat.logsumexp(-1).square())
    if reduction == "none":
        return loss.view(target.shape)
    return loss.sum() if reduction == "sum" else loss.sum() / (labels != -100).sum()


def _cross_entropy(keep_logits=False, return_lse=False, chunk_bytes=2**29, **options):
    vector = lambda loss: loss if options.get("reduction") == "none" else loss.view(1)  # tests index the outputs

    def function(x, weight, norm_weight=None, bias=None):
        held = dict(keep_logits=keep_logits, return_lse=return_lse, chunk_bytes=chunk_bytes)
        target = targets(x, weight.shape[0])
        outputs = as_tuple(coda.linear_cross_entropy(x, weight, target, bias=bias, norm_weight=norm_weight, eps=1e-5, **held, **options))
        return (vector(outputs[0]), *outputs[1:])

    def reference(x, weight, norm_weight=None, bias=None):
        logits = F.linear(x if norm_weight is None else norm(x, norm_weight, 1e-5), weight, bias)
        loss = cross_entropy(logits, targets(x, weight.shape[0]), **options)
        wide = logits.to(loss.dtype)
        z = options["softcap"] * torch.tanh(wide / options["softcap"]) if "softcap" in options else wide
        return (vector(loss), *((logits,) if keep_logits else ()), *((z.logsumexp(-1),) if return_lse else ()))

    return Case(function, reference, lambda m, d, n: dict(x=(m, d), weight=(n, d), norm_weight=(d,), bias=(n,)))


ALL_TERMS = dict(softcap=4.0, z_loss=0.01, label_smoothing=0.1)


# A chain of blocks as coda.nn builds it: every norm's statistics come from the epilogue before it.
def _chain():
    def function(a, w_out, residual, norm1, w1, bias, w2, norm2, w_gate_up, w_down, norm3, w_head):
        x, stats = coda.linear_residual(a, w_out, residual, next_norm_weight=norm1, eps=1e-5)
        x, y = coda.norm_linear(x, norm1, w1, bias, activation="gelu_tanh", eps=1e-5, stats=stats)
        x, stats = coda.linear_residual(y, w2, x, next_norm_weight=norm2)
        x, stats = mlp_residual(x, w_gate_up, w_down, norm_weight=norm2, eps=1e-6, stats=stats, next_norm_weight=norm3, next_eps=1e-4)
        return coda.norm_linear(x, norm3, w_head, eps=1e-4, stats=stats)

    def reference(a, w_out, residual, norm1, w1, bias, w2, norm2, w_gate_up, w_down, norm3, w_head):
        x = residual + F.linear(a, w_out)
        x = x + F.linear(gelu_tanh(F.linear(norm(x, norm1, 1e-5), w1, bias)), w2)
        x = mlp(x, w_gate_up, w_down, norm2, x)
        return x, F.linear(norm(x, norm3, 1e-4), w_head)

    def shapes(m, d, n):
        block = dict(norm1=(d,), w1=(n, d), bias=(n,), w2=(d, n), norm2=(d,), w_gate_up=(2 * n, d), w_down=(d, n))
        return dict(a=(m, n), w_out=(d, n), residual=(m, d)) | block | dict(norm3=(d,), w_head=(n, d))

    return Case(function, reference, shapes)


# The same with LayerNorms and biases, as in GPT-2.
def _layer_chain():
    layer = dict(norm="layer", eps=1e-5)
    following = dict(next_norm="layer", eps=1e-5)

    def function(a, w_out, b_out, residual, norm1, norm_bias1, w_up, bias, w_down, b_down, norm2, norm_bias2, w_qkv):
        x, stats = coda.linear_residual(a, w_out, residual, bias=b_out, next_norm_weight=norm1, **following)
        x, y = coda.norm_linear(x, norm1, w_up, bias, activation="gelu_tanh", stats=stats, norm_bias=norm_bias1, **layer)
        x, stats = coda.linear_residual(y, w_down, x, bias=b_down, next_norm_weight=norm2, **following)
        return coda.norm_linear(x, norm2, w_qkv, stats=stats, norm_bias=norm_bias2, **layer)

    def reference(a, w_out, b_out, residual, norm1, norm_bias1, w_up, bias, w_down, b_down, norm2, norm_bias2, w_qkv):
        x = residual + F.linear(a, w_out, b_out)
        x = x + F.linear(gelu_tanh(F.linear(layer_norm(x, norm1, norm_bias1, 1e-5), w_up, bias)), w_down, b_down)
        return x, F.linear(layer_norm(x, norm2, norm_bias2, 1e-5), w_qkv)

    def shapes(m, d, n):
        mlp = dict(norm1=(d,), norm_bias1=(d,), w_up=(n, d), bias=(n,), w_down=(d, n), b_down=(d,))
        return dict(a=(m, n), w_out=(d, n), b_out=(d,), residual=(m, d)) | mlp | dict(norm2=(d,), norm_bias2=(d,), w_qkv=(n, d))

    return Case(function, reference, shapes)


# Plain MLPs between other layers: statistics of either kind, from any epilogue to any.
def _plain_chain():
    def function(a, w_out, residual, norm1, norm_bias1, w1, bias, w2, b2, norm2, w3, w4, norm3, w_head, norm_bias3):
        x, stats = coda.linear_residual(a, w_out, residual, next_norm_weight=norm1, next_norm="layer", eps=1e-5)
        options = dict(norm="layer", norm_bias=norm_bias1, eps=1e-5, up_bias=bias, down_bias=b2, activation="gelu_tanh", gated=False)
        x, stats = mlp_residual(x, w1, w2, norm_weight=norm1, stats=stats, next_norm_weight=norm2, next_eps=1e-4, **options)
        options = dict(eps=1e-4, activation="relu2", gated=False)
        x, stats = mlp_residual(x, w3, w4, norm_weight=norm2, stats=stats, next_norm_weight=norm3, next_norm="layer", **options)
        return coda.norm_linear(x, norm3, w_head, stats=stats, norm="layer", norm_bias=norm_bias3)

    def reference(a, w_out, residual, norm1, norm_bias1, w1, bias, w2, b2, norm2, w3, w4, norm3, w_head, norm_bias3):
        x = residual + F.linear(a, w_out)
        x = x + F.linear(gelu_tanh(F.linear(layer_norm(x, norm1, norm_bias1, 1e-5), w1, bias)), w2, b2)
        x = x + F.linear(ACTIVATIONS["relu2"](F.linear(norm(x, norm2, 1e-4), w3)), w4)
        return x, F.linear(layer_norm(x, norm3, norm_bias3), w_head)

    def shapes(m, d, n):
        first = dict(norm1=(d,), norm_bias1=(d,), w1=(n, d), bias=(n,), w2=(d, n), b2=(d,))
        second = dict(norm2=(d,), w3=(n, d), w4=(d, n))
        return dict(a=(m, n), w_out=(d, n), residual=(m, d)) | first | second | dict(norm3=(d,), w_head=(n, d), norm_bias3=(d,))

    return Case(function, reference, shapes)


CASES = {
    "linear": _linear(),
    **{f"linear-{a}": _linear(a) for a in ACTIVATIONS if a},
    "linear_residual": _linear_residual(),
    "linear_residual-layer": _linear_residual("layer"),
    **{f"norm_linear-{a}": _norm_linear(a) for a in ACTIVATIONS},
    **{f"norm_linear-{a}{'-pair' * pair}": _norm_linear_gated(a, pair) for a in GATED for pair in (False, True)},
    **{f"norm_linear-layer-{a}": _layer_norm_linear(a) for a in (*ACTIVATIONS, "swiglu")},
    "rope": _rope(4, 4, heads=(2, 1)),
    "rope-layer": _rope(4, 4, heads=(2, 1), kind="layer"),
    "rope-interleaved": _rope(8, 8, True, ("T", torch.int64)),
    "rope-partial": _rope(4, 2, positions=("BT", torch.int32), heads=(2, 1)),
    "rope-partial-interleaved": _rope(8, 4, True, ("BT", torch.int64)),
    "rope-not-divisible": _rope(5, 4, positions=("T", torch.int32)),
    "rope-not-divisible-interleaved": _rope(6, 4, True),
    **{f"rope-{r}": _rope(r, r, heads=(4, 2)) for r in (32, 64, 128)},  # the widths that have a kernel
    "rope-separate": _rope_separate(),
    "rope-qk-norm": _rope(4, 4, heads=(2, 1), qk_norm=True),
    "rope-layer-qk-norm": _rope(4, 4, heads=(2, 1), kind="layer", qk_norm=True),
    "rope-qk-norm-interleaved": _rope(8, 8, True, ("T", torch.int64), qk_norm=True),
    "rope-qk-norm-partial": _rope(6, 2, positions=("BT", torch.int32), heads=(4, 2), qk_norm=True),
    "rope-qk-norm-still": _rope(4, 0, qk_norm=True),
    **{f"rope-qk-norm-{r}": _rope(r, r, heads=(4, 2), qk_norm=True) for r in (64, 128)},  # the widths that have a kernel
    **{f"mlp-{a}": _mlp(a) for a in GATES},
    "mlp-residual-is-x": _mlp(residual="x"),
    "mlp-pair": _mlp("gelu", residual="x", pair=True),
    **{f"mlp-plain-{a}": _plain_mlp(a) for a in ACTIVATIONS if a},
    **{f"mlp-plain-layer-{a}": _plain_mlp(a, "layer") for a in ACTIVATIONS if a},
    "mlp-plain-residual-is-x": _plain_mlp(residual="x"),
    "mlp-plain-layer-residual-is-x": _plain_mlp(kind="layer", residual="x"),
    "chain": _chain(),
    "layer-chain": _layer_chain(),
    "plain-chain": _plain_chain(),
    "cross_entropy": _cross_entropy(reduction="none", **ALL_TERMS),
    "cross_entropy-mean": _cross_entropy(**ALL_TERMS),
    "cross_entropy-sum": _cross_entropy(reduction="sum", chunk_bytes=2**10),
    "cross_entropy-kept": _cross_entropy(keep_logits=True, return_lse=True, chunk_bytes=2**10, **ALL_TERMS),
    "cross_entropy-none-kept": _cross_entropy(keep_logits=True, reduction="none"),
    "cross_entropy-lse": _cross_entropy(return_lse=True, softcap=4.0, z_loss=0.01),
}
# One of each kind, for what does not depend on the formula.
KINDS = [
    "linear",
    "linear-gelu",
    "linear_residual",
    "norm_linear-None",
    "norm_linear-gelu",
    "norm_linear-swiglu-pair",
    "norm_linear-layer-None",
    "norm_linear-layer-gelu",
    "norm_linear-layer-swiglu",
    "rope",
    "rope-layer",
    "rope-partial-interleaved",
    "rope-qk-norm",
    "rope-separate",
    "mlp-silu",
    "mlp-residual-is-x",
    "mlp-plain-gelu_tanh",
    "mlp-plain-layer-residual-is-x",
    "chain",
    "layer-chain",
    "plain-chain",
    "cross_entropy",
    "cross_entropy-mean",
    "cross_entropy-kept",
]


def as_tuple(outputs):
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


def leaves(tensors, dtype=None, wanted=None):
    """Copies, of which `wanted` (None: all) require grad."""
    return {k: t.detach().to(dtype or t.dtype, copy=True).requires_grad_(wanted is None or k in wanted) for k, t in tensors.items()}


def results(function, tensors, gradients=None):
    """(outputs, incoming gradients, gradient of each tensor that requires one) of function(**tensors)."""
    outputs = as_tuple(function(**tensors))
    if gradients is None:
        generator = torch.Generator().manual_seed(0)
        gradients = [torch.randn(o.shape, generator=generator).to(o.device, o.dtype) for o in outputs]
    wanted = {k: t for k, t in tensors.items() if t.requires_grad}
    found = torch.autograd.grad(outputs, list(wanted.values()), [g.to(o.dtype) for g, o in zip(gradients, outputs)])
    return [o.detach() for o in outputs], gradients, dict(zip(wanted, found))


def compare(case, tensors, factor=1.0):
    """Outputs and gradients against float64, the formula in the same dtype being the yardstick. Nothing given may change. Returns the back ends of
    the last forward and the last backward operator."""
    ours = leaves(tensors)
    outputs = as_tuple(case.function(**ours))
    forward = coda.backend_of_last_call()
    gradients = [new(*o.shape, dtype=o.dtype, device=o.device) for o in outputs]
    kept = [t.detach().clone() for t in (*ours.values(), *gradients)]
    found = torch.autograd.grad(outputs, list(ours.values()), gradients)
    backward = coda.backend_of_last_call()
    assert all(torch.equal(a.detach(), b) for a, b in zip((*ours.values(), *gradients), kept)), "an argument was changed in place"
    eager, exact = (results(case.reference, leaves(tensors, dtype), gradients) for dtype in (None, torch.float64))
    for i, o in enumerate(outputs):
        assert_no_worse(f"output {i}", o, eager[0][i], exact[0][i], factor)
    for name, g in zip(ours, found):
        assert g.dtype == tensors[name].dtype
        assert_no_worse(f"gradient of {name}", g, eager[2][name], exact[2][name], factor)
    return forward, backward


def subsets(names):
    """All of up to five names; of more only none, each one, all but one, and all."""
    names = list(names)
    sizes = range(len(names) + 1) if len(names) <= 5 else (0, 1, len(names) - 1, len(names))
    return [s for size in sizes for s in itertools.combinations(names, size)]


def views(t):
    """The same values in other memory: (what, view)."""
    wide = t.new_zeros(*t.shape[:-1], 3 * t.shape[-1] + 8)
    wide[..., 8 : 8 + t.shape[-1]] = t
    yield "columns of a wider tensor", wide[..., 8 : 8 + t.shape[-1]]
    odd = t.new_zeros(t.numel() + 1)
    odd[1:] = t.reshape(-1)
    yield "odd storage offset", odd[1:].view(t.shape)
    yield "every second column", torch.stack((t, t), -1).flatten(-2)[..., ::2]
    short = t.new_zeros(*t.shape[:-1], t.shape[-1] + 1)
    short[..., :-1] = t
    yield "odd row stride", short[..., :-1]
    if t.dim() > 1:
        yield "transposed", t.transpose(0, -1).contiguous().transpose(0, -1)


def raises(error, words, function, *args, **kwargs):
    """function(*args, **kwargs) raises `error` with one line that holds `words`."""
    try:
        function(*args, **kwargs)
    except error as e:
        assert words in str(e) and "\n" not in str(e).strip(), f"the message is {e}, expected {words!r} in it"
    else:
        raise AssertionError(f"nothing was raised, expected {error.__name__} with {words!r}")
