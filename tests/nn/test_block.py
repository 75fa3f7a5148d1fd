"""A block in a chain: what it launches, what it saves, its gradients."""
import pytest
import torch

import coda
from coda import _C
from coda.nn import DecoderConfig, TransformerBlock
from coda.nn.layers import make_norm, rope_tables
from tests.reference import assert_no_worse, error

# The deferred norm stores rstd times the gradient of its product in 16 bits, one rounding that eager does not have: sqrt(3/2) at most.
ROUNDINGS = 1.25
GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")])


def make_config(**changes):
    return DecoderConfig(**{**dict(vocab_size=8, dim=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, ffn_dim=184), **changes})


# What a GPT-2 block is made of, but for its embedding of positions.
GPT2 = dict(norm="layer", mlp="plain", activation="gelu_tanh", mlp_bias=True, qkv_bias=True, o_bias=True, rotary_dim=0, num_kv_heads=4)


def make_block(config, dtype, device, backend="coda", seed=0):
    """Norm weights away from 1, biases away from 0, and matrices of ordinary size, so that no term is too small to be missed."""
    torch.manual_seed(seed)
    with torch.device(device):
        block = TransformerBlock(config, backend=backend).to(dtype)
        with torch.no_grad():
            for name, p in block.named_parameters():
                noise = torch.randn(p.shape, dtype=torch.float32)
                # Biases of a mean would give the residual stream one, and a deferred LayerNorm pays for that.
                p.copy_(noise / p.shape[1] ** 0.5 if p.dim() == 2 else 0.3 * noise if name.endswith("bias") else 1 + 0.3 * noise)
    return block


def next_norm(config, dtype, device):
    norm = make_norm(config.norm, config.dim, config.norm_eps)
    torch.nn.init.normal_(norm.weight, 1, 0.3)
    if config.norm == "layer":
        torch.nn.init.normal_(norm.bias, 0, 0.3)
    return norm.to(device, dtype)


def in_the_middle(block, x, norm):
    """The block's output and its statistics, with those of x at hand, as behind another block."""
    own = block.attention.norm
    stats = coda.NormStats.make(x, *coda.rms_norm_stats(x.detach(), own.weight.detach(), own.eps), own.weight, own.eps)
    rope = rope_tables(None, block.attention.rotary_dim, block.attention.rope_theta, like=x)
    return lambda: block(x, rope=rope, stats=stats, next_norm=norm)


QWEN3 = dict(qk_norm=True, head_dim=64, num_heads=2, num_kv_heads=1)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("changes, more", [({}, 0), (QWEN3, 1)], ids=["llama", "qwen3"])
def test_launches(device, changes, more):
    """Forward: 4 products and 2 finalisers of statistics. Backward: 8 products, the rotation back behind attention, and 3 finalisers: the row
    sums of the activation's gradient, and the gradient of each norm's weight; with QK-norm one more, for its weights. Attention is torch's."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = make_config(**changes)
    block, norm = make_block(config, dtype, device), next_norm(config, dtype, device)
    x = torch.randn(2, 24, config.dim, device=device, dtype=dtype, requires_grad=True)
    forward = in_the_middle(block, x, norm)
    before = _C.launch_count()
    out, stats = forward()
    assert _C.launch_count() - before == 4 + 2
    assert isinstance(stats, coda.NormStats) and stats.of is out
    before = _C.launch_count()
    torch.autograd.grad(out, [x, *block.parameters()], torch.randn_like(out))
    assert _C.launch_count() - before == 8 + 1 + 3 + (more if device == "cuda" else 0)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_launches_with_layer_norm(device):
    """Forward: 4 products, 2 finalisers of statistics, and for each norm what its parameters come to behind the weight. Backward: 8 products; for
    each norm the finaliser of its row sums, and the sums for the biases and for the norm's weight; and one pass behind attention, which scales dy of the
    qkv product and forms its sums. The activation's gradient is in the epilogue of the down-projection's input gradient."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = make_config(**GPT2)
    first, second = (make_block(config, dtype, device, seed=s) for s in (0, 1))
    x = torch.randn(2, 24, config.dim, device=device, dtype=dtype, requires_grad=True)
    x, stats = first(x, next_norm=second.attention.deferred_norm)
    assert stats.norm == "layer" and stats.mean.shape == x.shape[:-1]
    x = x.detach().requires_grad_()
    stats = coda.NormStats.make(x, stats.h, stats.rstd, stats.norm_weight, stats.eps, stats.mean)
    before = _C.launch_count()
    out, _ = second(x, stats=stats, next_norm=next_norm(config, dtype, device))
    assert _C.launch_count() - before == 4 + 2 + 2
    before = _C.launch_count()
    torch.autograd.grad(out, [x, *second.parameters()], torch.randn_like(out))
    assert _C.launch_count() - before == 8 + 2 * 3 + 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nothing_else_runs_on_the_gpu():
    from torch.profiler import ProfilerActivity, profile

    config = make_config(dim=256, num_heads=4, num_kv_heads=4, head_dim=64, ffn_dim=512)
    dtype = torch.bfloat16
    block, norm = make_block(config, dtype, "cuda"), next_norm(config, dtype, "cuda")
    x = torch.randn(2, 256, config.dim, device="cuda", dtype=dtype, requires_grad=True)
    forward, leaves = in_the_middle(block, x, norm), [x, *block.parameters()]
    grad = torch.randn_like(x)
    torch.autograd.grad(forward()[0], leaves, grad)

    def kernels(run):
        """The names of what ran beside attention."""
        with profile(activities=[ProfilerActivity.CUDA]) as record:
            result = run()
            torch.cuda.synchronize()
        names = [e.name for e in record.events() if e.device_type == torch.autograd.DeviceType.CUDA and not e.name.startswith("Mem")]
        return result, [n for n in names if not any(word in n.lower() for word in ("flash", "sdpa", "fmha", "cudnn"))]

    (out, _), names = kernels(forward)
    assert len(names) == 4 + 2 and all("coda" in n for n in names), names
    _, names = kernels(lambda: torch.autograd.grad(out, leaves, grad))
    assert len(names) == 8 + 1 + 3 and sum("coda" in n for n in names) == 3 + 1 + 3, names  # five products without an epilogue are the library's


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_saved_for_backward(device, qk_norm):
    """x twice, q, k, v, attention's output and its statistics, the pre-activation, two rstd vectors; with QK-norm also q and k before it; nothing else
    of the size of the tokens."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = make_config(num_heads=2, num_kv_heads=2, head_dim=64, qk_norm=qk_norm)  # grouped heads make torch's CPU attention save copies of its own, in some versions
    block, norm = make_block(config, dtype, device), next_norm(config, dtype, device)
    batch, length = 2, 64
    x = torch.randn(batch, length, config.dim, device=device, dtype=dtype, requires_grad=True)
    forward = in_the_middle(block, x, norm)
    own = {p.untyped_storage().data_ptr() for p in block.parameters()} | {t.untyped_storage().data_ptr() for t in rope_storages(forward)}
    saved = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in own:
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out, _ = forward()
    m, size = batch * length, x.element_size()
    qkv = (config.num_heads + (3 if qk_norm else 2) * config.num_kv_heads + (config.num_heads if qk_norm else 0)) * config.head_dim
    wanted = size * m * (2 * config.dim + qkv + config.num_heads * config.head_dim + 2 * config.ffn_dim) + 4 * m * (config.num_heads + 2)
    assert out.shape == x.shape and sum(saved.values()) <= wanted + 4096, (saved, wanted)


def rope_storages(forward):
    return [t for cell in forward.__closure__ for t in (cell.cell_contents if isinstance(cell.cell_contents, tuple) else ())]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(qkv_bias=True),
        dict(activation="gelu_tanh"),
        dict(rotary_dim=16),
        dict(num_kv_heads=4),
        dict(mlp="plain", activation="relu2", o_bias=True, rotary_dim=0),
        dict(norm="layer"),
        GPT2,
        QWEN3,
        dict(qk_norm=True, norm="layer", rotary_dim=16),
    ],
    ids=["llama", "bias", "gelu", "partial rotary", "no grouping", "plain", "layer", "gpt2", "qwen3", "qk-norm"],
)
@pytest.mark.parametrize("device, dtype", [("cpu", torch.float64), ("cpu", torch.bfloat16), pytest.param(*("cuda", torch.bfloat16), marks=GPU.marks)])
@pytest.mark.parametrize("batch, length", [(2, 24), (1, 1), (1, 7)])
def test_gradients_against_float64(device, dtype, batch, length, changes):
    check_gradients(make_config(**changes), device, dtype, batch, length)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("length", [1, 7, 1000, 4096])
@pytest.mark.parametrize("dim, head_dim, ffn_dim", [(2048, 64, 8192), (4096, 128, 14336)], ids=["1b", "8b"])
def test_llama_shapes_against_float64(dim, head_dim, ffn_dim, length):
    config = make_config(dim=dim, num_heads=32, num_kv_heads=8, head_dim=head_dim, ffn_dim=ffn_dim)
    check_gradients(config, "cuda", torch.bfloat16, 1, length)


def check_gradients(config, device, dtype, batch, length):
    """Two blocks in a chain; the error of every gradient is at most that of the eager sequence in the same dtype, but for ROUNDINGS."""
    blocks = [make_block(config, dtype, device, seed=s) for s in (0, 1)]
    norm = next_norm(config, dtype, device)
    x = torch.randn(batch, length, config.dim, device=device, dtype=dtype)
    grad = torch.randn_like(x)

    def run(backend, kind):
        pair = [make_block(config, kind, device, backend) for _ in blocks]
        for copy, block in zip(pair, blocks):
            copy.load_state_dict(block.state_dict())
        leaf = x.to(kind).requires_grad_()
        rope = rope_tables(None, config.rotary_dim, config.rope_theta, like=leaf)
        y, stats = pair[0](leaf, rope=rope, next_norm=pair[1].attention.norm)
        out, _ = pair[1](y, rope=rope, stats=stats, next_norm=norm.to(kind))
        # What one token attends to does not depend on its query and key: their norms have a gradient of rounding errors.
        still = ("q_norm.weight", "k_norm.weight") if length == 1 else ()
        leaves = {"x": leaf} | {f"{i}.{n}": p for i, block in enumerate(pair) for n, p in block.named_parameters() if not still or not n.endswith(still)}
        gradients = torch.autograd.grad(out, list(leaves.values()), grad.to(kind))
        return {"out": out.detach()} | dict(zip(leaves, gradients))

    ours, exact = run("coda", dtype), run("eager", torch.float64)
    norm.to(dtype)
    if dtype == torch.float64:
        for name, value in ours.items():
            assert error(value, exact[name]) < 1e-11, name
        return
    eager = run("eager", dtype)
    for name, value in ours.items():
        assert_no_worse(name, value, eager[name], exact[name], factor=ROUNDINGS)


def test_chain_gives_what_separate_blocks_give():
    """Statistics from the epilogue are those of a pass over the tensor, to rounding."""
    config = make_config()
    first, second = (make_block(config, torch.float32, "cpu", seed=s) for s in (0, 1))
    x = torch.randn(2, 9, config.dim)
    y, stats = first(x, next_norm=second.attention.norm)
    torch.testing.assert_close(y, first(x), rtol=0, atol=0)
    torch.testing.assert_close(second(y, stats=stats), second(y), rtol=1e-5, atol=1e-5)


def test_layer_norm_takes_statistics_where_it_is_deferred():
    rotary, gpt2 = (make_block(make_config(**c), torch.float32, "cpu") for c in (dict(norm="layer"), GPT2))
    assert rotary.attention.deferred_norm is None and rotary.mlp.deferred_norm is None
    assert gpt2.attention.deferred_norm is gpt2.attention.norm and gpt2.mlp.deferred_norm is gpt2.mlp.norm
    x = torch.randn(2, 9, 128)
    y, stats = gpt2(x, next_norm=gpt2.attention.norm)
    torch.testing.assert_close(gpt2(y, stats=stats), gpt2(y), rtol=1e-5, atol=1e-5)
    y, stats = rotary(x, next_norm=torch.nn.RMSNorm(128, eps=1e-6))  # a block may end in statistics for the other kind
    assert stats.norm == "rms"


def test_statistics_of_another_tensor_are_refused():
    config = make_config()
    block = make_block(config, torch.float32, "cpu")
    x = torch.randn(1, 4, config.dim)
    _, stats = block(x, next_norm=block.attention.norm)
    with pytest.raises(ValueError, match="stats"):
        block(x, stats=stats)


def test_attention_matches_the_formula_with_partial_rotation():
    config = make_config(rotary_dim=16)
    ours, eager = (make_block(config, torch.float64, "cpu", b) for b in ("coda", "eager"))
    x = torch.randn(2, 5, config.dim, dtype=torch.float64)
    torch.testing.assert_close(ours.attention(x, x), eager.attention(x, x), rtol=1e-11, atol=1e-11)
