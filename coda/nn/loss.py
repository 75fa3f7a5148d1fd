"""The head and its loss as a module."""

from torch import nn

import coda


class LinearCrossEntropy(nn.Module):
    """`coda.linear_cross_entropy` with its options kept. It owns no parameter: the head's weight stays where it is, tied to an embedding or not.

    loss = LinearCrossEntropy(label_smoothing=0.1)
    loss(head.weight, x, target)

    The options are those of `coda.linear_cross_entropy`, checked at each call. Arguments come in the order of Liger's fused linear cross-entropy,
    weight before x. The weight does not pass through its module's forward: hooks on that do not run, nor does an adapter that wraps it count.
    """

    def __init__(
        self,
        *,
        ignore_index=-100,
        reduction="mean",
        label_smoothing=0.0,
        z_loss=0.0,
        softcap=None,
        keep_logits=False,
        return_lse=False,
        eps=1e-6,
        chunk_bytes=None,
    ):
        super().__init__()
        self.options = dict(
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            keep_logits=keep_logits,
            return_lse=return_lse,
            eps=eps,
            chunk_bytes=chunk_bytes,
        )

    def forward(self, weight, x, target, bias=None, *, norm_weight=None, stats=None, shard=None):
        """weight: [V, D]; x: [..., D]; target: [...]; bias: [V]. norm_weight: [D], of an RMSNorm of x before the head; stats, shard: see there."""
        tensors = dict(bias=bias, norm_weight=norm_weight, stats=stats, shard=shard)
        return coda.linear_cross_entropy(x, weight, target, **tensors, **self.options)

    def extra_repr(self):
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())
