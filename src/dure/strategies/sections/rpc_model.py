"""Model in sections on different processes, driven by rank 0 through torch RPC.

This is the purpose of `torch.distributed.rpc`. A forward pass is a chain of remote calls. Each leaves its result where
it was computed and returns a reference to it (RRef), from which the next section fetches it. Distributed autograd
records transfers between processes and runs one backward through all of them; DistributedOptimizer steps every
parameter on its rank. Sections are cut from outside as `pipeline` cuts them; here one works at a time, and only rank 0
has data. Other ranks follow the loop by the facts of each step, and compute in the threads of their agents.
"""

import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dure.comm.rpc import agent_name, close_agent, open_agent
from dure.errors import DureError, SpecInvalid, TaskInvalid
from dure.spec import RunSpec
from dure.strategies.contract.batch_parts import DataShare
from dure.strategies.contract.batches import Microbatch, to_device
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.reduced_facts import reduced_facts
from dure.strategies.contract.step_facts import Requests, StepFacts
from dure.strategies.sections.absent_tensors import guarded
from dure.strategies.sections.cuts import cut_names, faults_of, registered_chain
from dure.strategies.sections.options import SectionOptions
from dure.strategies.sections.plan import CURE, SectionPlan, held_bytes, look_at, plan_sections
from dure.strategies.sections.rpc_calls import HOST, Call, Failed, Result, backward_error, leads_to, on_host
from dure.strategies.sections.sectioned_strategy import SectionedStrategy
from dure.strategies.sections.stand_in import derivatives_refused, stand_in
from dure.strategies.sections.trace import tensors_of
from dure.strategies.sections.verify import SETS_GRADIENTS, changes_module, hooks_gradients, rehearse
from dure.terminal import few
from dure.torchcompat.gradients import has_accumulation_hooks
from dure.torchcompat.imports import import_distributed_optim
from dure.torchcompat.rpc import optimizer_of_references
from dure.torchcompat.tensors import multiply_

_UNUSED = (
    "{what} has no part in this batch's gradient (it is detached, or not used), and rpc_model's backward would wait "
    "for it for ever: let every batch use it, or use pipeline or ddp"
)
"""Message about a value between sections that backward would not reach."""

_NEVER_ACCUMULATED = (
    "strategy is rpc_model: {names} have hooks by register_post_accumulate_grad_hook, which torch's distributed "
    "backward does not call: use register_hook, or pipeline or ddp"
)


class RpcModel(SectionedStrategy):
    """Strategy with one section of the model on each rank; rank 0 has the data and calls the others."""

    options: SectionOptions

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self.section_ranks = self.group
        self.drives = self.group.rank == 0
        self.take_share(DataShare(index=0, count=1, takes_samples=self.drives, leads=self.drives))
        self.facts_lag = 0
        self._outputs: list[Sequence[Tensor]] = []
        """Tensors of the output of each call of the model in the current microbatch, on rank 0."""
        self._threads = threading.local()
        self._num_threads = torch.get_num_threads()

    @classmethod
    def import_late_parts(cls) -> None:
        """Import the remote optimisers: 0.8 s of processor time in every rank."""
        import_distributed_optim()

    @classmethod
    def check_model(cls, model: nn.Module, spec: RunSpec) -> list[str]:
        """Refuse a model with fewer blocks than ranks, with ties across the cuts, or without a place to cut."""
        return faults_of(registered_chain(model), spec.num_devices, cut_names(SectionOptions.of(spec).cuts), CURE)

    def check_traits(self, model: nn.Module) -> list[str]:
        """Refuse also a loss that changes state of modules: other ranks, which compute these, would not see it."""
        faults = super().check_traits(model)
        if self.group.world_size > 1 and (paths := self.traits.module_state):
            faults.append(changes_module(paths[0]))
        if self.group.world_size > 1 and self.traits.sets_gradients:
            faults.append(SETS_GRADIENTS)
        if self.group.world_size > 1 and (names := self.traits.hooked_by_loss):
            faults.append(hooks_gradients(names))
        return faults

    # the cut

    def decide(self, model: nn.Module) -> dict[str, Any]:
        """Return the plan, by the bytes of each section, and its faults."""
        num_sections = self.group.world_size
        if num_sections == 1:
            return {"faults": [], "plan": asdict(SectionPlan(calls=[], begins=[0], homes={}))}
        seen, costs = look_at(self, model), partial(held_bytes, model, self.spec)
        plan, faults = plan_sections(model, seen, num_sections, self.options.cuts, costs=costs)
        if plan is not None and seen is not None:
            # rank 0 computes the loss, with the weights that the loss alone uses
            plan = replace(plan, homes={**plan.homes, **dict.fromkeys(seen.unused, 0)})
            fault = rehearse(self, model, plan, seen, loss_section=0)
            faults = [] if fault is None else [fault]
        return {"faults": faults, "plan": None if plan is None else asdict(plan)}

    def distribute(self) -> None:
        """Keep this rank's section, of the model and of the optimiser, and start to serve calls.

        Communication: rank 0's weights broadcast to all; the agents' rendezvous; a reference to each parameter.
        """
        hooked = [name for name, p in self.model.named_parameters() if has_accumulation_hooks(p)]
        if hooked:
            raise SpecInvalid([_NEVER_ACCUMULATED.format(names=few(hooked))])
        self.group.broadcast([tensor for tensor in self.model.state_dict().values() if isinstance(tensor, Tensor)])
        self.keep([self.group.rank])
        self.evaluated = stand_in(self.model, self._call, self.part.state_dict)
        self._gradients: dict[int, Tensor] = {}
        self._sent_bytes = 0
        self._open_context = ExitStack()
        self._context_id = 0
        import_distributed_optim()
        _here[:] = [self]
        open_agent(self.group, timeout_seconds=self.spec.timeout_seconds)
        if self.drives:
            self._remote_optimizer: Any = optimizer_of_references(_take_optimizer, self._references())

    def _references(self) -> list[Any]:
        """Return a reference to every trained parameter, on the rank that has it."""
        from torch.distributed import rpc

        owners = self.plan.owners(self.model)
        named = [(name, owners[name]) for name, p in self.model.named_parameters() if p.requires_grad]
        return [rpc.remote(agent_name(owner), _parameter, args=(name,)) for name, owner in named]

    def describe(self) -> list[str]:
        """Return lines about the cuts of the model."""
        if self.group.world_size == 1:
            return []
        return [f"cut before {self.plan.first_blocks()}: {self.group.world_size} sections, called from rank 0 by RPC"]

    # calls of the model

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's sections one after the other, each on its rank, and return the output here.

        Communication: the call's arguments to every other rank; over each cut the output of the block before it, from
        its owner to the next; the output to rank 0. Gradients are sent back in the same way.
        """
        from torch.distributed import rpc

        # an evaluation seeds the generators for each batch, and must find them unchanged
        seed = self._seeds.draw() if self.model.training else torch.default_generator.initial_seed() % 2**62
        call = Call(args, kwargs, seed, self.model.training, torch.is_grad_enabled())
        result: Any = self.run_section(call, Result(None, []))
        sent = to_device(call, HOST)
        for rank in range(1, self.group.world_size):
            self._count_sent(call, (call.args, call.kwargs))
            result = rpc.remote(agent_name(rank), _run_section, args=(sent, on_host(result)))
        if self.group.world_size == 1:
            return result.value
        result = result.to_here()
        if isinstance(result, Failed):
            failure = DureError(result.message)
            failure.exit_code = result.exit_code
            raise failure
        output = to_device(result.value, self.device)
        self._outputs.append(tensors_of(output))
        self._count_sent(call, output, only_gradients=True)
        return output

    def _count_sent(self, call: Call, values: Any, *, only_gradients: bool = False) -> None:
        """Count the bytes of a step's tensors, or of their gradients on the way back; evaluations do not count."""
        if call.is_training and self.group.world_size > 1:
            tensors = [tensor for tensor in tensors_of(values) if tensor.requires_grad or not only_gradients]
            self._sent_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def run_section(self, call: Call, received: Result) -> Result:
        """Compute this rank's section of a call.

        Args:
            call: Call of the model.
            received: Result of the previous section.
        """
        self._prepare_thread()
        if self.model.training != call.is_training:
            self.model.train(call.is_training)
        begin, end = self.plan.bounds(self.group.rank)
        is_last = self.group.rank == self.group.world_size - 1
        draws = self._draws.of(call.seed, begin, in_training=call.is_training)
        with torch.set_grad_enabled(call.has_gradient), draws, self.precision.autocast(), guarded():
            value, _, learned = self.sections.learn(
                (begin, None if is_last else end), call.args, call.kwargs, received=received.value,
                known=received.known, device=self.device,
            )  # fmt: skip
        if call.has_gradient and not leads_to(tensors_of(value), tensors_of(received.value)):
            raise TaskInvalid(_UNUSED.format(what=f"what the section before {self.plan.calls[begin]} gives"))
        self._count_sent(call, value)
        self._count_sent(call, received.value, only_gradients=True)
        return Result(value, [*received.known, *learned])

    def _prepare_thread(self) -> None:
        """Set the number of threads and the device of the main thread in a thread of the agent."""
        if not hasattr(self._threads, "is_prepared"):
            torch.set_num_threads(self._num_threads)
            if self.device.type != "cpu":
                torch.accelerator.set_device_index(self.device)
            self._threads.is_prepared = True

    # step

    def forward_backward(self, microbatches: Iterable[Microbatch], *, global_samples: int, requests: Requests) -> None:
        """Run every microbatch through all sections and back.

        Communication: a barrier before the calls. Without it rank 0 would call a section whose rank still copies its
        buffers for a snapshot of the step before.
        """
        self.serve_step(requests)
        from torch.distributed import autograd

        model = stand_in(self.model, self._call)
        for microbatch in microbatches:
            # a new context: a second backward in one context waits forever (2.11 and 2.13)
            self._open_context.close()
            self._context_id = self._open_context.enter_context(autograd.context())
            self._outputs = []
            with derivatives_refused(self.model):
                term = self.loss_term(model, microbatch, global_samples)
            if not all(leads_to([term.root], output) for output in self._outputs):
                raise TaskInvalid(_UNUSED.format(what="the model's output"))
            try:
                autograd.backward(self._context_id, [self.precision.scale(term.root)])
            except RuntimeError as error:
                raise backward_error(error) from None
            self._collect(self._context_id)
            self.sums.add(term)

    def serve_step(self, requests: Requests) -> None:
        """Begin a step, in which rank 0 calls the other ranks' sections."""
        self.sums.begin(requests)
        self.group.barrier()

    def _collect(self, context_id: int) -> None:
        """Make every rank add the context's gradients to those of the step."""
        from torch.distributed import rpc

        others = range(1, self.group.world_size)
        under_way = [rpc.rpc_async(agent_name(rank), _add_gradients, args=(context_id,)) for rank in others]
        self.add_gradients(context_id)
        for answer in under_way:
            answer.wait()

    def add_gradients(self, context_id: int) -> None:
        """Add a context's gradients of this rank's parameters."""
        from torch.distributed import autograd

        found = autograd.get_gradients(context_id)
        self.part.refuse_lost_gradients(found.keys())
        for parameter in self.trainable:
            gradient = found.get(parameter)
            if gradient is None:
                continue
            before = self._gradients.get(id(parameter))
            # the context keeps its own
            self._gradients[id(parameter)] = gradient.clone() if before is None else before.add_(gradient)

    def sync_gradients(self) -> StepFacts:
        """Reduce the facts and send rank 0's expected count: other ranks have computed no loss.

        Communication: one blocking all_reduce of 5 float64.
        """
        own = (self.expectation or 0.0) if self.drives else 0.0
        expected = torch.tensor([own], dtype=self.sums.dtype, device=self.device)
        facts = reduced_facts(self, expected)
        self.expectation = expected.item() or None
        return facts

    def optimizer_step(self) -> None:
        """Correct, unscale and clip gradients on their ranks; then step all sections from rank 0.

        Communication: numbers of the norm and of overflows; two barriers around one remote call to each rank.
        """
        for parameter in self.trainable:
            parameter.grad = self._gradients.get(id(parameter))
        self._correct_count()
        self.unscale_gradients()
        if self.spec.clip_norm is not None:
            self.clip_gradients(self.stepped_parameters(), self.spec.clip_norm)
        self.group.barrier()  # every rank has its final gradients and learning rates
        if self.drives:
            self._remote_optimizer.step(self._context_id)
            self._open_context.close()
        if not self.trainable:
            self.precision.step(self.optimizer)  # no rank without parameters is called, and its scale follows too
        self.group.barrier()

    def step_section(self) -> None:
        """Step this rank's parameters; called by rank 0's DistributedOptimizer."""
        # DistributedOptimizer has set the gradients of the last microbatch
        for parameter in self.trainable:
            parameter.grad = self._gradients.get(id(parameter))
        self.precision.step(self.optimizer)
        # here and not in the rank's own loop, which may reach it after gradients of the next step have arrived
        self.zero_gradients()
        self._gradients.clear()

    def _correct_count(self) -> None:
        if self.expectation is not None and self._gradients:
            multiply_(list(self._gradients.values()), self.expectation / self.sums.count)

    def sent_bytes(self, num_microsteps: int) -> int:
        """Return the bytes of the tensors that this rank sent to others since the last call."""
        sent, self._sent_bytes = self._sent_bytes, 0
        return sent

    # evaluation, checkpoints, closing

    def before_reading(self) -> None:
        """Broadcast the tensors outside the blocks, once all ranks have arrived."""
        self.group.barrier()
        super().before_reading()

    def close(self) -> None:
        """Release remote references, and shut the agent down together with the others."""
        self._open_context.close()
        if self.drives:
            del self._remote_optimizer
        close_agent()
        _here.clear()


_here: list[RpcModel] = []
"""Strategy of this process, in a list: remote calls can only reach objects of a module."""


def _run_section(call: Call, received: Any) -> Any:
    """Compute the section of the process in which this is called.

    Args:
        call: Call of the model.
        received: Result of the previous section, or a reference to it.
    """
    before = received if isinstance(received, Result) else received.to_here()
    if isinstance(before, Failed):
        return before
    here = _here[0]
    try:
        return on_host(here.run_section(to_device(call, here.device), to_device(before, here.device)))
    except BaseException as error:  # sent as it is, a `SystemExit` would end rank 0
        return Failed.of(here.group.rank, error)


def _add_gradients(context_id: int) -> None:
    _here[0].add_gradients(context_id)


def _parameter(name: str) -> nn.Parameter:
    return _here[0].model.get_parameter(name)


class _SectionOptimizer:
    """Optimiser for DistributedOptimizer to step on each rank: a wrapper of the existing one."""

    def step(self) -> None:
        """Step the rank's section."""
        _here[0].step_section()


def _take_optimizer(parameters: list[nn.Parameter]) -> _SectionOptimizer:
    """Return the existing optimiser, in place of the constructor of a class: only the task knows its arguments."""
    return _SectionOptimizer()
