"""All-reduce of torch and the group's backend, with the interface of the algorithms in this folder."""

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from dure.comm.algorithms import ring as bandwidth_optimal
from dure.comm.algorithms.base import AllReduce, ReduceOp
from dure.comm.algorithms.over_wire import check_reducible
from dure.comm.algorithms.segments import finish_mean


class BackendAllReduce(AllReduce):
    """`torch.distributed.all_reduce`, whose bytes are not counted, because its messages are not visible.

    `sent_bytes` adds up what a bandwidth-optimal algorithm would send, by a ring's formula. gloo transfers as many
    bytes over the loopback interface (to 1 %, `tests/comm/algorithms/test_kernel_counter.py`).
    """

    name = "backend"

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, hosts: Sequence[int] | None = None) -> None:
        """Use an existing group; `hosts` is ignored, because the backend itself knows which rank is on which host."""
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        self._group = process_group
        self._sent_bytes = 0

    @property
    def sent_bytes(self) -> int:
        """Bytes of all calls so far, by the formula."""
        return self._sent_bytes

    def all_reduce(self, vector: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce a vector over all ranks, in place.

        A mean is a sum and a division here too: gloo has no mean, and the other algorithms also divide once.
        """
        check_reducible(vector, op)
        self._begin(vector.detach(), op, is_waited_for=True)
        finish_mean(vector.detach(), op, self.world_size)

    def start(self, vector: Tensor, op: ReduceOp = "sum") -> Callable[[], None]:
        """Start to reduce a vector; on an accelerator the current stream continues meanwhile."""
        check_reducible(vector, op)
        work = self._begin(vector.detach(), op, is_waited_for=False)

        def finish() -> None:
            if work is not None:
                work.wait()
            finish_mean(vector.detach(), op, self.world_size)

        return finish

    def _begin(self, vector: Tensor, op: ReduceOp, *, is_waited_for: bool) -> dist.Work | None:
        reduction = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
        work: dist.Work | None = dist.all_reduce(vector, reduction, group=self._group, async_op=not is_waited_for)
        self._sent_bytes += self.sent_bytes_for(vector.numel(), vector.element_size())
        return work

    def sent_bytes_for(self, num_elements: int, element_bytes: int) -> int:
        """Return the minimum bytes that an all-reduce can send from this rank."""
        return sent_elements(num_elements, self.world_size)[self.rank] * element_bytes


sent_elements = bandwidth_optimal.sent_elements
