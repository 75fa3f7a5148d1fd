"""coda.nn.LinearCrossEntropy, and the decoder's loss."""

import pytest
import torch

import coda
from coda.nn import LinearCrossEntropy
from tests.nn.test_decoder import GPT2, make_decoder, make_tokens, randomise


@pytest.mark.parametrize(
    "options",
    [{}, dict(reduction="none", label_smoothing=0.1, z_loss=1e-3, softcap=5.0, ignore_index=3, eps=0.1), dict(keep_logits=True, return_lse=True)],
)
def test_module_is_the_function(options):
    torch.manual_seed(0)
    x, weight, bias, norm_weight = torch.randn(2, 6, 8), torch.randn(11, 8), torch.randn(11), torch.rand(8)
    target = torch.arange(12).view(2, 6) % 11
    found = LinearCrossEntropy(**options)(weight, x, target, bias, norm_weight=norm_weight)
    expected = coda.linear_cross_entropy(x, weight, target, bias=bias, norm_weight=norm_weight, **options)
    found, expected = (t if isinstance(t, tuple) else (t,) for t in (found, expected))
    assert len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected))


def test_module_has_options_only():
    module = LinearCrossEntropy(softcap=30.0)
    assert not list(module.parameters()) and not module.state_dict() and "softcap=30.0" in repr(module)
    with pytest.raises(TypeError):
        LinearCrossEntropy(weight=None)
    with pytest.raises(ValueError, match="reduction is 'batch'"):
        LinearCrossEntropy(reduction="batch")(torch.ones(3, 2), torch.ones(4, 2), torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("changes", [{}, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_decoder_takes_the_norm_into_the_loss(changes, tie_embeddings):
    """With a gradient for every parameter, the final norm's among them, and none for ignored positions."""
    model = randomise(make_decoder(dtype=torch.float64, tie_embeddings=tie_embeddings, **changes))
    tokens, targets = make_tokens(), make_tokens(seed=3)
    targets[:, 9:] = -100
    model(tokens, targets).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert all(g.any() for g in gradients.values())
    model.zero_grad()
    model(tokens[:, :9], targets[:, :9]).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name])
