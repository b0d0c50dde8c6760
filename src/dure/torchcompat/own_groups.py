"""Process groups that are not registered with torch: a script's own default group is left to the script."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor


class OwnGroup:
    """Process group of some ranks, with blocking collectives on contiguous tensors."""

    def __init__(self, backend: str, store: dist.Store, rank: int, size: int, timeout_seconds: float) -> None:
        """Connect to the other ranks, which all do the same.

        Args:
            backend: `gloo` or `nccl`.
            store: Store of this group alone.
            rank: Rank in the group.
            size: Number of ranks.
            timeout_seconds: Maximum time of a collective.
        """
        timeout = timedelta(seconds=timeout_seconds)
        # the classes exist only in builds of torch with these backends
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.rank, self.size = rank, size

    def all_reduce(self, tensor: Tensor, op: str = "SUM") -> None:
        """Reduce in place. Communication: one all_reduce."""
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, op)
        self._group.allreduce([tensor], options).wait()

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite with the tensor of a rank of the group. Communication: one broadcast."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        self._group.broadcast([tensor], options).wait()

    def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        """Gather tensors of one size. Communication: one all_gather."""
        self._group._allgather_base(output, tensor).wait()

    def all_to_all(self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        """Exchange slices of the first dimension. Communication: one all_to_all."""
        self._group.alltoall_base(output, tensor, list(received), list(sent), dist.AllToAllOptions()).wait()

    def exchange(self, output: Tensor, tensor: Tensor, peer: int) -> None:
        """Exchange equal tensors with one other rank. Communication: one send and one receive."""
        if self.rank < peer:
            self._group.send([tensor], peer, 0).wait()
            self._group.recv([output], peer, 0).wait()
        else:
            self._group.recv([output], peer, 0).wait()
            self._group.send([tensor], peer, 0).wait()

    def abort(self) -> None:
        """End calls that wait for ranks that are gone, as far as the backend can."""
        abort = getattr(self._group, "abort", None)
        if abort is not None:
            abort()
