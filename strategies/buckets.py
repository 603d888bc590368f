"""The order in which DDP sends gradients: found out in its first backward pass, and brought back on a resume.

Where more than two processes add up a bucket, the last bit of a sum depends on where in the bucket it lies. DDP makes
its buckets anew after its first backward pass, in the order in which gradients were ready; a resumed run would do its
first step with other buckets than the run that never stopped.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .replica import zero_loss


def bucket_order(replica: DistributedDataParallel) -> list[int]:
    """The trained parameters, by their numbers, in the order of the buckets; none before DDP has found it. Local."""
    found = replica._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")  # type: ignore[no-untyped-call]
    if found:  # not before the third pass
        return [int(number) for number in found.replace(",", " ").split()]
    if replica.reducer._rebuild_buckets():  # the next forward pass would begin with this
        replica._has_rebuilt_buckets = True
    if not replica._has_rebuilt_buckets:
        return []
    numbers = {id(parameter): number for number, parameter in enumerate(_trained(replica))}
    buckets = replica.reducer._get_zeros_like_grad_buckets()
    return [numbers[id(parameter)] for bucket in buckets for parameter in bucket.parameters()]


def restore_bucket_order(replica: DistributedDataParallel, order: Sequence[int]) -> None:
    """Let DDP find this order, by a backward pass of zeros in which gradients become ready so. Collective."""
    parameters = _trained(replica)
    if sorted(order) != list(range(len(parameters))):
        return  # others are trained now, for which DDP finds an order by itself
    # Autograd goes backward from what was computed last.
    latest_first = [parameters[number] for number in reversed(order)]
    replica._pre_forward()  # type: ignore[no-untyped-call]
    loss = replica._post_forward(zero_loss(latest_first))  # type: ignore[no-untyped-call]
    loss.backward()
    for parameter in parameters:
        parameter.grad = None


def _trained(replica: DistributedDataParallel) -> list[Tensor]:
    return [parameter for parameter in replica.module.parameters() if parameter.requires_grad]
