"""Model in sections on several devices of one process, for models that do not fit one device.

The oldest way to use two devices (Krizhevsky et al. 2012, section 3.2, had half of each layer on each of two GPUs; here
each GPU has half of the layers). Every device waits for the one before it, so nothing gets faster: `pipeline` is the
strategy that keeps all of them busy. The model itself is unchanged; only its blocks' inputs are moved. Hooks send the
activations to the device of the next section, and autograd sends the gradients back.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dure.data.randomness import drawing_devices
from dure.errors import SpecInvalid
from dure.spec import RunSpec
from dure.strategies.contract.batches import Microbatch, to_device
from dure.strategies.contract.declarations import Findings
from dure.strategies.contract.step_facts import Requests, StepFacts
from dure.strategies.contract.strategy import Strategy
from dure.strategies.contract.weight_rules import WeightRules
from dure.strategies.sections.cuts import cut_names, faults_of, registered_chain
from dure.strategies.sections.options import SectionOptions
from dure.strategies.sections.plan import CURE, SectionPlan, held_bytes, look_at, plan_sections
from dure.strategies.sections.trace import tensors_of
from dure.torchcompat.compilation import without_compilation
from dure.torchcompat.tensors import give_data, multiply_
from dure.units import format_bytes


class ModelParallel(Strategy):
    """One process with many devices, each with some consecutive blocks of the model."""

    options: SectionOptions

    rules = WeightRules(changes_in_step_only=True, freezing="followed")

    plan: SectionPlan
    """Plan of the sections, which have the numbers of their devices."""

    @classmethod
    def check_model(cls, model: nn.Module, spec: RunSpec) -> list[str]:
        """Refuse a model with fewer blocks than devices, with ties across the cuts, or without a place to cut."""
        return faults_of(registered_chain(model), spec.num_devices, cut_names(SectionOptions.of(spec).cuts), CURE)

    def place(self, model: nn.Module) -> nn.Module:
        """Cut the model, and move every section to its device."""
        self.plan = self._decide(model)
        self._section, self._sent = 0, 0
        for name, section in self.plan.owners(model).items():
            _move(model, name, self.devices[section])
        if len(self.devices) > 1:
            # functions, which a deep copy of the model shares, and not methods, with which it would copy this object
            model.register_forward_pre_hook(lambda *_: self._begin())
            for name in dict.fromkeys(self.plan.calls):
                block = model.get_submodule(name)
                block.register_forward_pre_hook(self._entrance(self.plan.section_of_block(name)), with_kwargs=True)
            model.register_forward_hook(lambda _, __, output: self._leave(output))
        return model

    def _decide(self, model: nn.Module) -> SectionPlan:
        num_sections = len(self.devices)
        seen = look_at(self, model) if num_sections > 1 else None
        plan, faults = plan_sections(
            model, seen, num_sections, self.options.cuts,
            costs=partial(held_bytes, model, self.spec), keeps_batch_apart=True,
        )  # fmt: skip
        if plan is None:
            raise SpecInvalid([f"strategy is {self.info.name}: {fault}" for fault in faults])
        return plan

    # transfers between devices

    def _begin(self) -> None:
        self._section = 0

    def _entrance(self, section: int) -> Callable[[nn.Module, Any, Any], Any]:
        """Return a hook that moves the inputs of a section's blocks to its device."""

        def enter(block: nn.Module, args: Any, kwargs: Any) -> Any:
            self._note_crossing(section, (args, kwargs))
            return to_device((args, kwargs), self.devices[section])

        return enter

    def _leave(self, output: Any) -> Any:
        """Move the output to the first device, where the task's loss expects it."""
        self._note_crossing(0, output)
        return to_device(output, self.devices[0])

    def _note_crossing(self, section: int, values: Any) -> None:
        if section == self._section:
            return
        self._section = section
        for tensor in tensors_of(values):
            # the gradient is sent back
            self._sent += tensor.numel() * tensor.element_size() * (2 if tensor.requires_grad else 1)

    def declared_by_row(self, found: Findings) -> list[str]:
        """Return the row's declarations: the parts of the CPU draw from one generator, as one device does."""
        texts = super().declared_by_row(found)
        has_several = len(drawing_devices(self.devices)) > 1
        return [text for text in texts if has_several or not text.startswith("random numbers")]

    # step

    def computed(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the task without compilation, for the hooks between devices change what they read."""
        with without_compilation():
            return function(*args)

    def forward_backward(self, microbatches: Iterable[Microbatch], *, global_samples: int, requests: Requests) -> None:
        """Accumulate the gradients of all microbatches, each section's on its device."""
        self._sent = 0
        super().forward_backward(microbatches, global_samples=global_samples, requests=requests)

    def sync_gradients(self) -> StepFacts:
        """Sum the terms; there is no other rank."""
        return self.sums.step_facts()

    def _correct_count(self) -> None:
        if self.expectation is None:
            return
        factor = self.expectation / self.sums.count
        for device in dict.fromkeys(self.devices):
            gradients = [p.grad for p in self.trainable if p.grad is not None and p.device == device]
            if gradients:
                there = factor.to(device, non_blocking=True) if isinstance(factor, Tensor) else factor
                multiply_(gradients, there)

    def sent_bytes(self, num_microsteps: int) -> int:
        """Return the bytes of the activations that crossed a cut, or returned as output, and of their gradients."""
        return self._sent

    def describe(self) -> list[str]:
        """Return a line about the cuts of the model."""
        if len(self.devices) == 1:
            return []
        sizes = ", ".join(format_bytes(size) for size in self.section_bytes())
        return [f"cut before {self.plan.first_blocks()}: {sizes} of parameters and buffers"]

    def section_bytes(self) -> list[int]:
        """Return the bytes of parameters and buffers of each section."""
        sizes = [0] * len(self.devices)
        seen: set[int] = set()
        tensors: Mapping[str, Tensor] = {
            **dict(self.model.named_parameters(remove_duplicate=False)),
            **dict(self.model.named_buffers(remove_duplicate=False)),
        }
        for name, section in self.plan.owners(self.model).items():
            tensor = tensors[name]
            if id(tensor) not in seen:
                sizes[section] += tensor.numel() * tensor.element_size()
                seen.add(id(tensor))
        return sizes


def _move(model: nn.Module, name: str, device: torch.device) -> None:
    """Move one parameter or buffer; a parameter stays the same object, so that ties are kept."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    tensor = getattr(module, leaf)
    if isinstance(tensor, nn.Parameter):
        give_data(tensor, tensor.data.to(device))
    else:
        setattr(module, leaf, tensor.to(device))
