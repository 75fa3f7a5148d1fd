"""Every kernel once on small shapes, for compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tests.csrc.sanitize

also with --tool racecheck, which takes minutes: --shard 0/8 to 7/8 are eight processes' parts of it. Without torch's cache an access behind a buffer is not
inside another. initcheck does not see the bulk stores of TMA: it reports torch's reads of what they wrote.
"""
import argparse
import re
import time

import torch

from coda import _C
from coda._extension import force_kernel
from tests.csrc.test_kernels import KERNELS, run

ops = torch.ops.coda
new = lambda *shape: torch.randn(*shape, device="cuda").to(torch.bfloat16)


def row_kernels(m, d):
    x, g, rstd = new(m, d), new(d), torch.rand(m, device="cuda")
    ops.rms_norm_stats(x, g, 1e-6)
    for bias, normalised in ((g, True), (None, False)):
        ops.layer_norm_stats(x, g, bias, 1e-6, normalised)
    for head_dim, rotary_dim, interleaved in ((64, 64, False), (128, 128, False), (256, 256, False), (64, 32, False), (16, 16, True), (10, 4, False)):
        q, k = 3, 2
        columns, n = (q + k) * head_dim, (q + 2 * k) * head_dim
        y, product, h, w, bias = new(m, n), new(m, columns), new(m, 32), new(n, 32), new(n)
        norms = new(head_dim), new(head_dim), 1e-6, q * head_dim
        table = torch.rand(m, rotary_dim // 2, device="cuda")
        rope = table, table, None, m, head_dim, columns, interleaved
        heads = [new(1, m, count, head_dim) for count in (q, k, k)]
        for b in (None, bias):
            ops.rope_backward(*heads, y, rstd, b, *rope, d)
            ops.qknorm_rope_backward(*heads, product, y, rstd, b, *norms, *rope, d)
        ops.rstd_rope(h, rstd, w, bias, *rope)
        ops.rstd_qknorm_rope(h, rstd, w, None, *norms, *rope, True)
    ops.dglu(new(m, 24), None, new(m, 48), None, "silu", d, True)
    ops.dact(new(m, 24), None, new(m, 24), None, new(24), "gelu", d, True)
    lse, factors, target = torch.rand(m, device="cuda"), torch.rand(3, m, device="cuda"), torch.arange(m, device="cuda") % d
    for logits, incoming, b in ((new(m, d), None, None), (new(m, d + 3)[:, 3:], new(m, d), new(d)), (new(m, 5), new(5, m).t(), new(5))):
        ops.logit_gradient(logits, incoming, target, lse, factors, rstd, b, 3.0, True, True)
    for count in (5, m * d + 3):
        t = torch.randn(count, device="cuda")
        ops.scale_(ops.scaled(t, t[:1].clone(), torch.bfloat16), t[:1].clone())


def gemm_kernel(key):
    kernel = KERNELS[key]
    for m, n, k in ((8 if kernel["layout"] == "nt" else 1, 8, 8), (136, 264, 72)):
        for splits in (0, 2) if kernel["splits"] else (0,):
            _C.force_schedule(0, 0, splits)
            with force_kernel(key):
                for _ in run(kernel, m, n, k, 0):
                    pass
        _C.force_schedule(0, 0)


def selected(keys, shard):
    """(name, function) of what a process runs: what `keys`, a regular expression, finds, of that every n-th from the i-th on for `shard`, i/n."""
    parts = {key: lambda key=key: gemm_kernel(key) for key in KERNELS}
    parts |= {f"row_kernels_{m}x{d}": lambda m=m, d=d: row_kernels(m, d) for m, d in ((3, 40), (130, 264))}
    i, n = map(int, shard.split("/"))
    return [part for part in parts.items() if re.search(keys, part[0])][i::n]


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.csrc.sanitize", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("keys", nargs="?", default="", help="a regular expression of kernels' keys and row_kernels, such as 'bf16.*sm80$'; default all")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="the I-th of N parts")
    args = parser.parse_args()
    for name, function in selected(args.keys, args.shard):
        torch.manual_seed(0)  # the numbers of a kernel, and so whether they are within its bounds, must not depend on what ran before it
        print(name, end="", flush=True)  # before it runs: so that the last line is about what went wrong, or took too long
        begin = time.monotonic()
        function()
        torch.cuda.synchronize()
        print(f": {time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
