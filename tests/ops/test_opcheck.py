"""torch.library.opcheck of every operator: the schema, the fake kernel, the autograd registration, and tracing."""
import pytest
import torch

from tests.ops.cases import new, sixteen_on_cuda

ops = torch.ops.coda
M, D, F, N, HEAD = 6, 16, 24, 32, 8


def calls(dtype, device):
    """operator -> argument lists."""
    t = lambda *shape: new(*shape, dtype=dtype, device=device)
    statistics = lambda: torch.rand(M, device=device) + 0.5
    x, g, w, bias, res, rstd = t(M, D), t(D), t(N, D), t(N), t(M, N), statistics()
    angle = torch.rand(10, HEAD // 2, device=device)
    tables, positions = (angle.cos(), angle.sin()), torch.arange(M, device=device)
    heads = [t(2, M // 2, h, HEAD) for h in (2, 1, 1)]
    gate_up, down, z, dy = t(2 * F, D), t(D, F), t(M, 2 * F), t(M, D)
    u = torch.randn(F, device=device)
    pair = gate_up[:F].clone(), gate_up[F:].clone()
    rope = (*tables, positions, 1, HEAD, 3 * HEAD, False)
    head_norms = t(HEAD), t(HEAD), 1e-5, 2 * HEAD
    by_row = (*tables, None, M // 2, HEAD, 3 * HEAD, True)
    labels, factors = torch.arange(M, device=device) * 7 % 24, torch.randn(3, M, device=device)
    selected = lambda: torch.randn(6, M, device=device)
    return {
        "lse_select": [
            (x, rstd, w, bias, labels, 3.0, True, True, 4),
            (x, None, w[:24], None, labels, 0.0, False, False, 4),
            (x, rstd, w[:24], None, labels, 0.0, True, False, 100),
        ],
        "exponentials_into_": [
            (t(M, N), torch.zeros(M, 1, device=device), torch.zeros(2000, device=device), x, rstd, w, bias, labels, 3.0, True, True, 4),
            (t(M, 24), torch.zeros(M, 1, device=device), None, x, None, w[:24], None, labels, 0.0, False, False, 100),
        ],
        "exponential_gradient_": [
            (t(M, N).abs(), torch.zeros(M, 1, device=device), selected(), factors, labels, rstd, N, 3.0, True),
            (t(M, N).abs(), torch.zeros(M, 1, device=device), selected(), factors, labels, None, N, 0.0, False),
        ],
        "dlogits": [
            (x, rstd, w, bias, labels, statistics(), factors, 3.0, True),
            (x, None, w[:24], None, labels, statistics(), factors, 0.0, False),
        ],
        "logit_gradient": [
            (t(M, N), t(M, N), labels, statistics(), factors, rstd, bias, 3.0, True, True),
            (t(M, 30)[:, 3:27], None, labels, statistics(), factors, None, None, 0.0, False, False),
        ],
        "scale_": [(t(M, D), torch.rand(1, device=device)), (t(M, D).t(), torch.ones((), device=device))],
        "scaled": [(t(M, D).float(), torch.rand(1, device=device), t(1).dtype), (t(M, D), torch.rand((), device=device), t(1).dtype)],
        "rms_norm_stats": [(x, g, 1e-6), (x, None, 1e-6)],
        "gemm": [(x, w.t(), bias, res, 1.5, 0.5), (x, w.t())],
        "gemm_accumulate_": [(torch.randn(M, N, device=device), x, w.t(), add) for add in (True, False)],
        "linear": [(x, w, bias, res), (x, w, None, None)],
        "layer_norm_stats": [(x, g, t(D), 1e-6, True), (x, g, None, 1e-6, False), (x, None, None, 1e-6, False)],
        "linear_residual_moments": [(x, w, bias, res, t(N), 1e-6), (x, w, None, res, None, 1e-6)],
        "layer_act": [(x, rstd, statistics(), w, bias, g, t(D), "gelu", True), (x, rstd, statistics(), w, None, None, None, "identity", True)],
        "dact_layer": [
            (dy, down, t(M, F), rstd, u, u + 1, "gelu", D, True, True),
            (t(M, F), None, t(M, F), rstd, u, u, "relu", D, False, False),
        ],
        "layer_norm_backward": [
            (t(M, F), t(F, D), x, g, t(D), rstd, *(statistics() for _ in range(3)), dy, True, True),
            (t(M, F), t(F, D), x, None, None, rstd, *(statistics() for _ in range(3)), None, True, False),
        ],
        "linear_residual": [(x, w, bias, res, t(N), 1e-6), (x, w, None, res, None, 1e-6)],
        "rstd_act": [(x, rstd, w, bias, "gelu", True), (x, None, w, None, "identity", True), (x, rstd, w, None, "relu", False)],
        "rstd_glu": [(x, rstd, gate_up, None, "silu", True), (x, None, *pair, "gelu", False)],
        "rstd_rope": [(x, rstd, w, bias, *rope), (x, None, w, None, *by_row)],
        "rstd_qknorm_rope": [(x, rstd, w, bias, *head_norms, *rope, True), (x, None, w, None, *head_norms, *by_row, True),
                             (x, None, w, None, *head_norms, *by_row, False)],
        "qknorm_rope_backward": [
            (*heads, res[:, : 3 * HEAD].contiguous(), res, rstd, bias, *head_norms, *rope, D),
            (*heads, res[:, : 3 * HEAD], res, None, None, *head_norms, *by_row, D),
        ],
        "dglu": [(dy, down, z, rstd, "silu", D, True), (t(M, F), None, z, None, "gelu_tanh", D, False)],
        "dact": [(dy, down, t(M, F), rstd, t(F), "gelu", D, True), (t(M, F), None, t(M, F), None, None, "relu", D, False)],
        "rope_backward": [(*heads, res, rstd, bias, *rope, D), (*heads, res, None, None, *by_row, D)],
        "norm_backward": [(z, gate_up, None, x, g, rstd, dy, True, True), (z, *pair, x, None, rstd, None, False, False)],
        "fused_mlp": [
            (x, None, None, gate_up, None, down, g, dy, False, None, "silu", 1e-6, 1e-6, False, True),
            (x, x * g, rstd, *pair, down, g, None, True, t(D), "gelu", 1e-6, 1e-6, True, True),
            (x, None, None, gate_up, None, down, None, None, False, None, "silu", 1e-6, 1e-6, False, False),
        ],
    }


NAMES = sorted(calls(torch.float32, "cpu"))
DIFFERENTIABLE = ("rms_norm_stats", "linear", "linear_residual", "linear_residual_moments", "fused_mlp")


def test_every_operator_is_here():
    found = {n.split("::")[1].split(".")[0] for n in torch._C._dispatch_get_all_op_names() if n.startswith("coda::")}
    assert found == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(device, name):
    op = getattr(ops, name).default
    for arguments in calls(sixteen_on_cuda(device), device)[name]:
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))
        if name in ("gemm_accumulate_", "exponential_gradient_", "scale_"):
            continue
        saves = name != "fused_mlp" or arguments[-1]
        leaves = [a.detach().clone().requires_grad_(a.is_floating_point()) if isinstance(a, torch.Tensor) and saves else a for a in arguments]
        # The others are backward formulas and raw programs, for which autograd has an error only.
        torch.library.opcheck(op, leaves, test_utils="ALL" if name in DIFFERENTIABLE else ("test_autograd_registration",))
