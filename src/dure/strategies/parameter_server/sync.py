"""Synchronous parameter servers: every worker's gradient is added before any rank goes on. Exact.

In a step, workers push gradients and facts. Servers add them in the order of ranks and send the facts back. Every rank
checks the facts; then servers step and send the parameters. A worker that dies ends the run: no other rank can compute
its share of the step, and the step would be wrong without it.
"""

import math

import torch
from torch import Tensor, nn

from dure.comm.groups import Group, ProcessGroup
from dure.strategies.contract.precision import refuse_closure
from dure.strategies.contract.replica_state import ReplicaState, replica_state
from dure.strategies.contract.step_facts import Requests, StepFacts
from dure.strategies.parameter_server.server import Server
from dure.strategies.parameter_server.worker import Worker
from dure.torchcompat.optimizers import found_overflows

_LOSS, _COUNT, _STOP, _SAVE, _OVERFLOW, _EXPECTATION = range(6)
_NUM_FACTS = 5
"""Loss sum, count, stop, save, overflow: summed over workers and sent to all."""


class SyncWorker(Worker):
    """Worker that pushes, receives the facts, and pulls the parameters of the step."""

    num_push_numbers = 6
    num_pull_numbers = 2
    """Requests of the server to stop and to save, which workers pass on."""

    def distribute(self) -> None:
        """Allocate the message of facts."""
        super().distribute()
        self._facts = torch.zeros(_NUM_FACTS, dtype=torch.float64)
        self._passed_on = Requests()
        if len(self.serving.server_ranks) > 1:
            self.serving.everyone.subgroup(list(self.serving.server_ranks))  # collective over all ranks

    def sync_gradients(self) -> StepFacts:
        """Push the gradients and return the facts over all workers.

        Communication: G bytes in one message to each server; 40 bytes from one of them.
        """
        facts = self.known_facts()
        facts[_STOP] += self._passed_on.stop
        facts[_SAVE] += self._passed_on.save
        overflows = self._unscale()
        overflow = float(any(bool(found.item()) for found in overflows))
        self.write_gradients()
        for push in self.pushes:
            push.numbers[: self.num_push_numbers] = torch.tensor(
                [*facts, overflow, self.expectation or 0.0], dtype=torch.float64
            )
        self.push()
        server = self.serving.server_ranks[self.group.rank % len(self.serving.server_ranks)]
        self.serving.transport.receive(_bytes(self._facts), server).wait()
        known = self._facts.tolist()
        self.sums.count = known[_COUNT]
        for found in overflows:
            found.fill_(known[_OVERFLOW])
        return StepFacts(known[:_OVERFLOW], self.sums.terms)

    def _unscale(self) -> list[Tensor]:
        """Unscale fp16's gradients; return the tensors in which the scaler recorded overflows."""
        if self.precision.scaler is None:
            return []
        self.precision.unscale(self.optimizer)
        return found_overflows(self.precision.scaler, self.optimizer)

    def replica(self) -> ReplicaState:
        """Return the weights that the servers sent, and the untrained ones, which are equal on all workers."""
        return replica_state("all weights", self.model.named_parameters())

    def optimizer_step(self) -> None:
        """Take the parameters that the servers have stepped."""
        self.pull()
        wishes = torch.stack([pull.numbers for pull in self.pulls]).sum(0).tolist()
        self._passed_on = Requests(stop=wishes[0] > 0, save=wishes[1] > 0)
        self.precision.update()
        self.zero_gradients()


class SyncServer(Server):
    """Server that adds the gradients of all workers in the order of their ranks, and steps its rows."""

    num_push_numbers = SyncWorker.num_push_numbers
    num_pull_numbers = SyncWorker.num_pull_numbers

    def distribute(self) -> None:
        """Create the group over which servers reduce the gradient's norm."""
        super().distribute()
        self._facts = torch.zeros(_NUM_FACTS, dtype=torch.float64)
        self._servers: Group | None = None
        if len(self.serving.server_ranks) > 1:
            self._servers = ProcessGroup(self.device, self.serving.everyone.subgroup(list(self.serving.server_ranks)))

    def sync_gradients(self) -> StepFacts:
        """Wait for every worker's push, and send the facts.

        Communication: one message from each worker; 40 bytes to every S-th of them.
        """
        transport, workers = self.serving.transport, self.serving.worker_ranks
        under_way = [transport.receive(m.buffer, r) for m, r in zip(self.pushes, workers, strict=True)]
        known = [0.0] * _NUM_FACTS
        for message, push in zip(under_way, self.pushes, strict=True):
            message.wait()
            known = [total + value for total, value in zip(known, push.numbers[:_NUM_FACTS].tolist(), strict=True)]
        self._facts.copy_(torch.tensor(known, dtype=torch.float64))
        for message in [transport.send(_bytes(self._facts), rank) for rank in self._receivers_of_facts()]:
            message.wait()
        self.sums.count = known[_COUNT]
        self._has_overflowed = known[_OVERFLOW] > 0
        self.expectation = self.pushes[0].numbers[_EXPECTATION].item() or None
        return StepFacts(known[:_OVERFLOW], self.sums.terms)

    def _receivers_of_facts(self) -> list[int]:
        return [rank for rank in self.serving.worker_ranks if rank % len(self.serving.server_ranks) == self.number]

    def optimizer_step(self) -> None:
        """Correct the count, clip by the norm over all servers, step, and send the parameters.

        Communication: this server's W bytes to each worker; with --clip-norm one all_reduce of a number over servers.
        """
        self._add_up()
        self._correct_count()
        if self.spec.clip_norm is not None:
            self.clip_gradients(self.pieces, self.spec.clip_norm)
        if not self._has_overflowed:
            try:
                self.optimizer.step()
            except Exception as error:
                refuse_closure(self.optimizer, error)
                raise
        self.zero_gradients()
        self.pull_message.numbers[0], self.pull_message.numbers[1] = map(float, self.requests)
        transport, workers = self.serving.transport, self.serving.worker_ranks
        for message in [transport.send(self.pull_message.buffer, rank) for rank in workers]:
            message.wait()

    def _add_up(self) -> None:
        """Give every shard the sum of its gradients; one that no worker used gets none, and is not stepped."""
        first, *others = self.pushes
        used = torch.stack([push.numbers[self.num_push_numbers :] for push in self.pushes]).sum(0).tolist()
        for position, piece in enumerate(self.pieces):
            if not used[position]:
                continue
            total = first.tensors[position]
            for push in others:
                total.add_(push.tensors[position])
            piece.grad = total

    def clip_gradients(self, parameters: list[nn.Parameter], most: float) -> None:
        """Clip by the norm of the whole gradient: servers sum their squares."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        square = nn.utils.get_total_norm(gradients).double().reshape(1) ** 2
        if self._servers is not None:
            self._servers.all_reduce_sum(square)
        if gradients:
            norm = torch.tensor(math.sqrt(square.item()), dtype=gradients[0].dtype)
            nn.utils.clip_grads_with_norm_(parameters, most, norm)

    def sent_bytes(self, num_microsteps: int) -> int:
        """Return the bytes of the parameters and facts to the workers, and of the norm among servers."""
        pulls = self.pull_message.num_bytes * self.serving.num_workers
        facts = self._facts.nbytes * len(self._receivers_of_facts())
        num_servers = len(self.serving.server_ranks)
        norm = 0 if self.spec.clip_norm is None else 2 * (num_servers - 1) * 8 // num_servers
        return pulls + facts + norm


def _bytes(numbers: Tensor) -> Tensor:
    return numbers.view(torch.uint8)
