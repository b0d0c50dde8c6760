"""Worker's messages to and from all servers: a push and a pull for each, whose tensors are rows of the parameters."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dure.host.device_kinds import copies_beside
from dure.strategies.parameter_server.shards import Message, Shard
from dure.strategies.parameter_server.transport import Transport


class Exchange:
    """Pushes and pulls of one worker, with all servers."""

    def __init__(
        self,
        transport: Transport,
        server_ranks: Sequence[int],
        shards: Sequence[Sequence[Shard]],
        parameters: Mapping[str, Tensor],
        *,
        num_push_numbers: int,
        num_pull_numbers: int,
        device: torch.device,
        are_pulls_flagged: bool = False,
    ) -> None:
        """Lay out the messages.

        Args:
            transport: Transport of messages.
            server_ranks: Ranks of the servers.
            shards: Rows of each server.
            parameters: Parameters by the names in the shards.
            num_push_numbers: Length of a push's header, before a flag for each shard: whether it has a value.
            num_pull_numbers: Length of a pull's header.
            device: Device of the parameters.
            are_pulls_flagged: Whether a pull has such flags too.
        """
        is_pinned = copies_beside(device.type)
        self._transport = transport
        self._server_ranks = server_ranks
        self._device = device
        self._num_push_numbers, self._num_pull_numbers = num_push_numbers, num_pull_numbers
        self._are_pulls_flagged = are_pulls_flagged
        flags = [len(each) for each in shards]
        self.pushes = [
            Message(num_push_numbers + count, each, is_pinned=is_pinned)
            for count, each in zip(flags, shards, strict=True)
        ]
        self.pulls = [
            Message(num_pull_numbers + count * are_pulls_flagged, each, is_pinned=is_pinned)
            for count, each in zip(flags, shards, strict=True)
        ]
        self._served = [[(parameters[shard.name], shard) for shard in each] for each in shards]

    def write(self, value_of: Callable[[Tensor], Tensor | None]) -> None:
        """Write into the pushes the values of all parameters, such as their gradients, and which have none."""
        for push, served in zip(self.pushes, self._served, strict=True):
            used = push.numbers[self._num_push_numbers :]
            for position, ((parameter, shard), target) in enumerate(zip(served, push.tensors, strict=True)):
                value = value_of(parameter)
                if value is None:
                    target.zero_()
                    used[position] = 0.0
                else:
                    target.copy_(shard.of(value), non_blocking=True)
                    used[position] = 1.0
        self._wait_for_device()

    def push(self) -> None:
        """Send the pushes.

        Communication: one message to each server, its shards' bytes and a header; waits until all are sent.
        """
        under_way = [
            self._transport.send(message.buffer, rank)
            for message, rank in zip(self.pushes, self._server_ranks, strict=True)
        ]
        for message in under_way:
            message.wait()

    def pull(self, target_of: Callable[[Tensor, bool], Tensor | None]) -> None:
        """Receive the pulls.

        Args:
            target_of: Function of a parameter and its flag, which returns the tensor to overwrite; None for none.

        Communication: one message from each server, its shards' bytes and a header; waits for all.
        """
        under_way = [
            self._transport.receive(message.buffer, rank)
            for message, rank in zip(self.pulls, self._server_ranks, strict=True)
        ]
        with torch.no_grad():
            for message, pull, served in zip(under_way, self.pulls, self._served, strict=True):
                message.wait()
                for (parameter, shard), values, flag in zip(served, pull.tensors, self._flags(pull), strict=True):
                    target = target_of(parameter, flag)
                    if target is not None:
                        shard.of(target).copy_(values, non_blocking=True)
        self._wait_for_device()  # the next pull overwrites the source of the copies

    def _flags(self, pull: Message) -> Iterator[bool]:
        if not self._are_pulls_flagged:
            return iter([True] * len(pull.tensors))
        return map(bool, pull.numbers[self._num_pull_numbers :].tolist())

    def _wait_for_device(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
