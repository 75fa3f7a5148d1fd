"""A head whose rows are divided over ranks, each a process on the CPU."""
import math
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import coda
from tests.ops.cases import leaves, new, raises

M, D, V, BOUNDS = 9, 8, 23, (0, 14, 23)  # not the same number of rows on both
OPTIONS = [
    dict(),
    dict(reduction="sum", label_smoothing=0.1, z_loss=1e-2, softcap=3.0),
    dict(reduction="none", label_smoothing=0.1, z_loss=1e-2, softcap=3.0, return_lse=True),
    dict(keep_logits=True, return_lse=True, z_loss=1e-2),
]


def arguments():
    torch.manual_seed(0)
    shapes = dict(x=(M, D), weight=(V, D), bias=(V,), norm_weight=(D,))
    target = torch.arange(M) * 5 % V
    target[3] = -100
    return {k: new(*s, dtype=torch.float64, device="cpu") for k, s in shapes.items()}, target


def run(tensors, target, rows, **options):
    """Outputs, and the gradients of a sum of loss and lse."""
    values = leaves(tensors)
    outputs = coda.linear_cross_entropy(**values, target=target, chunk_bytes=rows * V * 8, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    # Of the kept logits each rank has its own columns: their gradient is left out.
    total = sum((o * torch.linspace(1, 2, o.numel(), dtype=o.dtype).view(o.shape)).sum() for o in outputs if o.dim() < 2)
    return [o.detach() for o in outputs], dict(zip(values, torch.autograd.grad(total, list(values.values()))))


def rank_of_two(rank, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        compare_with_the_whole(rank)
    finally:
        dist.destroy_process_group()


def compare_with_the_whole(rank):
    tensors, target = arguments()
    mine = slice(BOUNDS[rank], BOUNDS[rank + 1])
    shard = coda.VocabularyShard(dist.group.WORLD, BOUNDS[rank], V)
    local = {k: t[mine].clone() if k in ("weight", "bias") else t for k, t in tensors.items()}
    for options in OPTIONS:
        for rows in (2, M):
            expected, wanted = run(tensors, target, rows, **options)
            outputs, found = run(local, target, rows, shard=shard, **options)
            for a, b in zip(outputs, expected):
                torch.testing.assert_close(a, b[:, mine] if b.dim() == 2 else b)
            for k in found:
                torch.testing.assert_close(found[k], wanted[k][mine] if k in ("weight", "bias") else wanted[k], msg=lambda m: f"{options}, {k}: {m}")
    torch.testing.assert_close(coda.linear_log_prob(**local, target=target, shard=shard), coda.linear_log_prob(**tensors, target=target))
    gap = coda.VocabularyShard(dist.group.WORLD, 10 * rank, V)  # label 9 is no rank's, label 5 is
    two = {k: t[: 9 if rank == 0 else 13] if k in ("weight", "bias") else t[:2] if k == "x" else t for k, t in tensors.items()}
    each = coda.linear_cross_entropy(**two, target=torch.tensor([9, 5]), shard=gap, reduction="none")
    assert math.isnan(each[0]) and each[1].isfinite()


def test_two_ranks():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(rank_of_two, (port,), nprocs=2)


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_one_rank_is_the_whole(one_rank):
    tensors, target = arguments()
    for options in OPTIONS:
        expected, found = (run(tensors, target, M, **options, **s) for s in ({}, dict(shard=coda.VocabularyShard(one_rank, 0, V))))
        assert all(torch.equal(a, b) for a, b in zip((*expected[0], *expected[1].values()), (*found[0], *found[1].values())))


def test_bad_shards(one_rank):
    tensors, target = arguments()
    raises(TypeError, "shard is int, expected a coda.VocabularyShard", coda.linear_cross_entropy, **tensors, target=target, shard=1)
    for start, classes in ((1, V), (-1, V), (0, V - 1)):
        words = f"shard starts at row {start} and weight has {V} rows, expected one or more within 0 to {classes - 1}"
        raises(ValueError, words, coda.linear_cross_entropy, **tensors, target=target, shard=coda.VocabularyShard(one_rank, start, classes))
    shard = coda.VocabularyShard(one_rank, 2, V + 3)
    raises(IndexError, f"target has the value {V + 3}", coda.linear_log_prob, **tensors, target=target + V + 3, shard=shard)
