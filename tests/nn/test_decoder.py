"""coda.nn: the coda back end against the eager reference, and attention against a formula written out here."""

import copy

import pytest
import torch
import torch.utils.checkpoint

from coda.nn import MLP, Attention, Decoder, DecoderConfig, TransformerBlock

# The parts of GPT-2 but for its embedding of positions.
GPT2 = dict(norm="layer", mlp="plain", activation="gelu_tanh", mlp_bias=True, qkv_bias=True, o_bias=True, rotary_dim=0)
CONFIG = dict(vocab_size=61, dim=48, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=88, max_seq_len=32)


def make_decoder(backend="coda", dtype=torch.float32, seed=0, **changes):
    torch.manual_seed(seed)
    return Decoder(DecoderConfig(**{**CONFIG, **changes}), backend=backend).to(dtype)


def make_tokens(batch=3, length=17, seed=1):
    return torch.randint(CONFIG["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


def randomise(module, seed=2):
    """Weights of ordinary size, norms away from 1, so that no term of a formula is too small to be missed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            value = 1 + 0.3 * noise if parameter.dim() == 1 else noise / parameter.shape[1] ** 0.5
            parameter.copy_(value)
    return module


# The two back ends


@pytest.mark.parametrize("tie_embeddings", [True, False])
@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 2e-5), (torch.float64, 1e-11)])
@pytest.mark.parametrize("changes", [{}, dict(norm="layer"), dict(mlp="plain", activation="relu2", o_bias=True), GPT2, dict(qk_norm=True)], ids=["llama", "layer", "plain", "gpt2", "qk-norm"])
def test_coda_and_eager_agree_on_logits_loss_and_gradients(dtype, rtol, tie_embeddings, changes):
    ours = randomise(make_decoder("coda", dtype, tie_embeddings=tie_embeddings, **changes))
    eager = make_decoder("eager", dtype, tie_embeddings=tie_embeddings, **changes)
    eager.load_state_dict(ours.state_dict())
    tokens, targets = make_tokens(), make_tokens(seed=3)

    def close(a, b):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * b.abs().max().item())

    close(ours(tokens), eager(tokens))
    losses = [model(tokens, targets) for model in (ours, eager)]
    assert losses[0].dtype == losses[1].dtype == dtype
    close(*losses)
    for loss in losses:
        loss.backward()
    for (name, a), (_, b) in zip(ours.named_parameters(), eager.named_parameters(), strict=True):
        assert a.grad is not None and a.grad.abs().max() > 0, name
        close(a.grad, b.grad)


def test_loss_is_the_mean_cross_entropy_of_the_logits():
    model, tokens, targets = make_decoder(), make_tokens(), make_tokens(seed=3)
    targets[0, :5] = -100
    log_probabilities = model(tokens).log_softmax(-1)
    kept = targets != -100
    picked = log_probabilities[kept].gather(-1, targets[kept].unsqueeze(-1))
    torch.testing.assert_close(model(tokens, targets), -picked.mean())


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_back_ends_share_names_initial_values_and_state_dict(tie_embeddings):
    ours = make_decoder("coda", tie_embeddings=tie_embeddings)
    eager = make_decoder("eager", tie_embeddings=tie_embeddings)
    for (name, a), (other, b) in zip(ours.state_dict().items(), eager.state_dict().items(), strict=True):
        assert name == other and torch.equal(a, b)
    assert ("head.weight" in ours.state_dict()) is not tie_embeddings

    shapes = {name: tuple(value.shape) for name, value in ours.blocks[0].state_dict().items()}
    assert shapes == {
        "attention.norm.weight": (48,),
        "attention.qkv_proj.weight": ((4 + 2 * 2) * 12, 48),
        "attention.o_proj.weight": (48, 48),
        "mlp.norm.weight": (48,),
        "mlp.gate_up_proj.weight": (2 * 88, 48),
        "mlp.down_proj.weight": (48, 88),
    }


def test_state_dict_round_trip_and_writes_through_it_reach_the_model():
    source, target, tokens = make_decoder(seed=0), make_decoder(seed=9), make_tokens()
    target.load_state_dict(source.state_dict(), strict=True)
    assert torch.equal(source(tokens), target(tokens))
    with torch.no_grad():
        target.state_dict()["blocks.1.mlp.gate_up_proj.weight"].mul_(2)
    assert not torch.equal(source(tokens), target(tokens))


def test_parameters_of_a_gpt2_block():
    shapes = {n.removeprefix("blocks.0."): tuple(p.shape) for n, p in make_decoder(**GPT2).named_parameters() if n.startswith("blocks.0.")}
    assert shapes == {
        "attention.norm.weight": (48,),
        "attention.norm.bias": (48,),
        "attention.qkv_proj.weight": (96, 48),
        "attention.qkv_proj.bias": (96,),
        "attention.o_proj.weight": (48, 48),
        "attention.o_proj.bias": (48,),
        "mlp.norm.weight": (48,),
        "mlp.norm.bias": (48,),
        "mlp.up_proj.weight": (88, 48),
        "mlp.up_proj.bias": (88,),
        "mlp.down_proj.weight": (48, 88),
        "mlp.down_proj.bias": (48,),
    }
    assert not any(p.any() for n, p in make_decoder(**GPT2).named_parameters() if n.endswith("bias"))


def test_initial_scale():
    model = make_decoder(dim=128, num_layers=8, ffn_dim=256, vocab_size=512)
    assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.blocks[0].mlp.gate_up_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.blocks[7].mlp.down_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert model.blocks[7].attention.o_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert torch.equal(model.norm.weight, torch.ones(128))


# MLP


@pytest.mark.parametrize("backend", ["coda", "eager"])
@pytest.mark.parametrize("with_residual", [False, True])
def test_mlp_formula_and_gate_up_order(backend, with_residual):
    mlp = randomise(MLP(10, 24, eps=1e-3, backend=backend).double())
    x, residual = torch.randn(2, 5, 10, dtype=torch.float64), torch.randn(2, 5, 10, dtype=torch.float64)

    normalised = x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * mlp.norm.weight
    gate = normalised @ mlp.gate_up_proj.weight[:24].T
    up = normalised @ mlp.gate_up_proj.weight[24:].T
    expected = (gate / (1 + (-gate).exp()) * up) @ mlp.down_proj.weight.T
    if with_residual:
        torch.testing.assert_close(mlp(x, residual), expected + residual)
    else:
        torch.testing.assert_close(mlp(x), expected)


# Attention


def rotate_by_complex_numbers(x, positions, theta):
    """Rotary embedding of x [B, T, H, d]: the pair (x_i, x_{i + d/2}) times exp(i position theta^(-2i/d))."""
    half = x.shape[-1] // 2
    frequency = torch.tensor([theta ** (-2 * i / x.shape[-1]) for i in range(half)], dtype=torch.float64)
    angle = positions.double()[..., None, None] * frequency  # [B, T, 1, d/2]
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), dim=-1)


def attention_formula(module, x, positions):
    """The attention layer without residual, head by head in float64."""
    heads, kv_heads, d = module.num_heads, module.num_kv_heads, module.head_dim
    weight = module.qkv_proj.weight.double()
    x = x.double()
    normalised = x * (x.square().mean(-1, keepdim=True) + module.norm.eps).rsqrt() * module.norm.weight.double()
    batch, length, _ = x.shape
    rows = {"q": heads * d, "k": kv_heads * d, "v": kv_heads * d}
    w_q, w_k, w_v = weight.split(list(rows.values()))
    q, k, v = ((normalised @ w.T).view(batch, length, -1, d) for w in (w_q, w_k, w_v))
    q = rotate_by_complex_numbers(q, positions, module.rope_theta)
    k = rotate_by_complex_numbers(k, positions, module.rope_theta)
    outputs = []
    for head in range(heads):
        group = head // (heads // kv_heads)
        scores = q[:, :, head] @ k[:, :, group].transpose(1, 2) / d**0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        outputs.append(scores.softmax(-1) @ v[:, :, group])
    return torch.cat(outputs, dim=-1) @ module.o_proj.weight.double().T


@pytest.mark.parametrize("backend", ["coda", "eager"])
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(4, 4, None), (4, 2, None), (6, 1, 10), (1, 1, 2)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-11), (torch.float32, 2e-5)])
def test_attention_against_float64_formula(backend, heads, kv_heads, head_dim, dtype, tolerance):
    module = Attention(24, heads, kv_heads, head_dim, rope_theta=500.0, eps=1e-5, backend=backend).to(dtype)
    randomise(module)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(2, 9, 24, dtype=dtype, generator=generator)
    default = torch.arange(9).expand(2, 9)
    packed = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5], [700, 701, 702, 703, 5000, 4999, 3, 2, 1]])
    for positions, given in ((default, None), (default, default[0]), (packed, packed)):
        expected = attention_formula(module, x, positions)
        result = module(x, positions=given).double()
        torch.testing.assert_close(result, expected, rtol=0, atol=tolerance * expected.abs().max().item())
        result = module(x, residual=x, positions=given).double()
        torch.testing.assert_close(result, expected + x, rtol=0, atol=tolerance * expected.abs().max().item())


def test_rotation_stays_accurate_far_out_and_in_a_low_precision_model():
    """Attention depends on differences of positions alone, so a far offset must not change it."""
    module = randomise(Attention(24, 2))
    x = torch.randn(1, 8, 24, generator=torch.Generator().manual_seed(5))
    near, far = torch.arange(8), torch.arange(8) + 1_000_000
    torch.testing.assert_close(module(x, positions=far), module(x, positions=near), rtol=0, atol=1e-5)

    module, x = module.bfloat16(), x.bfloat16()
    expected = attention_formula(module, x, far.expand(1, 8))
    error = (module(x, positions=far).double() - expected).abs().max() / expected.abs().max()
    assert error < 0.03


@pytest.mark.parametrize("backend", ["coda", "eager"])
def test_no_token_sees_a_later_one(backend):
    model, tokens = randomise(make_decoder(backend, torch.float64)), make_tokens(batch=1, length=12)
    before = model(tokens)
    for changed in (0, 5, 11):
        other = tokens.clone()
        other[0, changed] = (other[0, changed] + 1) % CONFIG["vocab_size"]
        after = model(other)
        torch.testing.assert_close(after[:, :changed], before[:, :changed], rtol=1e-12, atol=1e-12)
        assert (after[:, changed:] - before[:, changed:]).abs().amax(-1).min() > 1e-6


def test_decoder_positions():
    model, tokens = randomise(make_decoder(dtype=torch.float64)), make_tokens(batch=2, length=6)
    default = model(tokens)
    assert torch.equal(model(tokens, positions=torch.arange(6)), default)
    shifted = torch.stack((torch.arange(6) + 3, torch.arange(6) + 40))
    torch.testing.assert_close(model(tokens, positions=shifted), default)
    stretched = torch.stack((torch.arange(6), 2 * torch.arange(6)))
    result = model(tokens, positions=stretched)
    torch.testing.assert_close(result[0], default[0])
    assert (result[1, 1:] - default[1, 1:]).abs().max() > 1e-3


# What the modules must live through


@pytest.mark.parametrize("backend", ["coda", "eager"])
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_meta_device_then_to_empty(backend, tie_embeddings):
    with torch.device("meta"):
        model = make_decoder(backend, tie_embeddings=tie_embeddings)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not list(model.buffers())
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.reset_parameters()
    assert torch.isfinite(model(make_tokens())).all()

    source = make_decoder(backend, tie_embeddings=tie_embeddings)
    with torch.device("meta"):
        model = make_decoder(backend, tie_embeddings=tie_embeddings)
    model.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(model(make_tokens()), source(make_tokens()))


def test_deepcopy_is_equal_and_independent():
    model, tokens = make_decoder(), make_tokens()
    model(tokens, tokens).backward()
    twin = copy.deepcopy(model)
    before = model(tokens)
    assert torch.equal(twin(tokens), before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    assert torch.equal(model(tokens), before)
    assert not torch.equal(twin(tokens), before)


@pytest.mark.parametrize("backend", ["coda", "eager"])
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
def test_bf16_autocast_and_bf16_parameters(backend, parameters):
    reference = randomise(make_decoder("eager", torch.float64))
    model = make_decoder(backend)
    model.load_state_dict(reference.state_dict())
    model.to(parameters)
    tokens, targets = make_tokens(), make_tokens(seed=3)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=parameters == torch.float32):
        logits, loss = model(tokens), model(tokens, targets)
    assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
    expected = reference(tokens)
    assert (logits.double() - expected).norm() / expected.norm() < 0.05
    loss.backward()
    reference(tokens, targets).backward()
    for (name, a), b in zip(model.named_parameters(), reference.parameters()):
        assert a.grad.dtype == parameters, name
        assert (a.grad.double() - b.grad).norm() / b.grad.norm() < 0.1, name


@pytest.mark.parametrize("changes", [{}, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("backend", ["coda", "eager"])
def test_compile_fullgraph(backend, changes):
    torch._dynamo.reset()
    model, tokens, targets = make_decoder(backend, **changes), make_tokens(), make_tokens(seed=3)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens), model(tokens))
    compiled(tokens, targets).backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(tokens, targets).backward()
    for parameter, gradient in zip(model.parameters(), gradients):
        torch.testing.assert_close(gradient, parameter.grad)


def test_activation_checkpointing_gives_the_same_gradients():
    block = TransformerBlock(DecoderConfig(**CONFIG))
    x = torch.randn(2, 7, 48, requires_grad=True)
    block(x).square().sum().backward()
    expected = [x.grad.clone()] + [p.grad.clone() for p in block.parameters()]
    for use_reentrant in (False, True):
        x.grad = None
        block.zero_grad()
        torch.utils.checkpoint.checkpoint(block, x, use_reentrant=use_reentrant).square().sum().backward()
        for a, b in zip([x.grad] + [p.grad for p in block.parameters()], expected):
            assert torch.equal(a, b)


def test_same_values_with_and_without_grad():
    model, tokens = make_decoder(), make_tokens()
    expected = model(tokens)
    with torch.no_grad():
        assert torch.equal(model(tokens), expected)
    with torch.inference_mode():
        assert torch.equal(model(tokens), expected)


def test_a_few_steps_of_training_lower_the_loss():
    model, tokens = make_decoder(), make_tokens(length=20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


# generate


def test_generate_greedy_follows_the_logits_and_crops_to_max_seq_len():
    model = randomise(make_decoder(max_seq_len=8))
    prompt = make_tokens(batch=2, length=5)
    result = model.generate(prompt, 7, temperature=0)
    assert result.shape == (2, 12) and result.dtype == torch.int64
    assert torch.equal(result[:, :5], prompt)
    for end in range(5, 12):
        assert torch.equal(result[:, end], model(result[:, max(0, end - 8) : end])[:, -1].argmax(-1))


def test_generate_sampling():
    model, prompt = randomise(make_decoder()), make_tokens(batch=2, length=3)

    def sample(seed, **options):
        return model.generate(prompt, 12, generator=torch.Generator().manual_seed(seed), **options)

    assert torch.equal(sample(0, temperature=0.9), sample(0, temperature=0.9))
    assert not torch.equal(sample(0, temperature=0.9), sample(1, temperature=0.9))
    assert torch.equal(sample(0, top_k=1), model.generate(prompt, 12, temperature=0))
    assert torch.equal(sample(0, top_k=10_000), sample(0))
    assert torch.equal(model.generate(prompt, 0), prompt)
    result = sample(2, top_k=3)
    for end in range(3, 15):
        top = model(result[:, :end])[:, -1].topk(3).indices
        assert (top == result[:, end : end + 1]).any(-1).all()


# Errors


@pytest.mark.parametrize(
    "changes, field",
    [
        (dict(vocab_size=0), "vocab_size is 0"),
        (dict(dim=48.0), "dim is 48.0"),
        (dict(num_layers=-1), "num_layers is -1"),
        (dict(num_heads=True), "num_heads is True"),
        (dict(num_heads=5, num_kv_heads=5), "dim is 48, expected a multiple of num_heads = 5"),
        (dict(num_kv_heads=3), "num_kv_heads is 3, expected a divisor of num_heads = 4"),
        (dict(num_kv_heads=0), "num_kv_heads is 0"),
        (dict(head_dim=7), "head_dim is 7, expected an even number"),
        (dict(ffn_dim="64"), "ffn_dim is '64'"),
        (dict(rope_theta=0.0), "rope_theta is 0.0"),
        (dict(norm_eps=float("nan")), "norm_eps is nan"),
        (dict(max_seq_len=None), "max_seq_len is None"),
        (dict(tie_embeddings=1), "tie_embeddings is 1"),
        (dict(rotary_dim=False), "rotary_dim is False"),
        (dict(rotary_dim=-2), "rotary_dim is -2"),
        (dict(norm="batch"), "norm is 'batch', expected 'rms' or 'layer'"),
        (dict(mlp="deep"), "mlp is 'deep', expected 'gated' or 'plain'"),
        (dict(activation="relu"), "activation is 'relu'"),
        (dict(mlp="plain", activation="swiglu"), "activation is 'swiglu', expected 'relu', 'relu2'"),
        (dict(mlp_bias=True), "mlp_bias is True, expected False with mlp = 'gated'"),
        (dict(mlp="plain", mlp_bias=1), "mlp_bias is 1"),
        (dict(o_bias="yes"), "o_bias is 'yes'"),
    ],
)
def test_config_errors_name_field_value_and_expectation(changes, field):
    with pytest.raises(ValueError, match=field) as error:
        DecoderConfig(**{**CONFIG, **changes})
    assert "expected" in str(error.value) and "\n" not in str(error.value)


def test_config_defaults():
    config = DecoderConfig(vocab_size=8, dim=24, num_layers=1, num_heads=4, ffn_dim=8)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta, config.norm_eps) == (4, 6, 10000.0, 1e-6)
    assert DecoderConfig(vocab_size=8, dim=24, num_layers=1, num_heads=5, head_dim=8, ffn_dim=8).head_dim == 8


def test_argument_errors():
    model = make_decoder()
    with pytest.raises(ValueError, match="33 positions, expected at most max_seq_len = 32"):
        model(make_tokens(length=33))
    with pytest.raises(ValueError, match="tokens has shape .* expected integers"):
        model(make_tokens()[0])
    with pytest.raises(ValueError, match="dtype torch.float32, expected integers"):
        model(make_tokens().float())
    for positions in (torch.arange(5), torch.arange(17.0), torch.zeros(2, 17, dtype=torch.long)):
        with pytest.raises(ValueError, match="positions has shape"):
            model(make_tokens(), positions=positions)
    for arguments in (dict(n=-1), dict(n=1, temperature=-0.5), dict(n=1, top_k=0)):
        with pytest.raises(ValueError, match="expected"):
            model.generate(make_tokens(), **arguments)
    with pytest.raises(ValueError, match="at least one token"):
        model.generate(torch.zeros(1, 0, dtype=torch.long), 1)
    with pytest.raises(ValueError, match="norm is 'batch', expected 'rms' or 'layer'"):
        MLP(8, 8, norm="batch")
    with pytest.raises(ValueError, match="bias is True, expected False for a gated layer"):
        MLP(8, 8, bias=True)
    for build in (lambda: make_decoder("cuda"), lambda: MLP(8, 8, backend="x"), lambda: Attention(8, 2, backend=None)):
        with pytest.raises(ValueError, match="backend is .*, expected one of 'coda', 'eager'"):
            build()
