"""Modules that divide a batch unevenly over the devices of one process, with the loss on the replicas."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dure.data.partition import shares
from dure.data.randomness import kept_global_randomness
from dure.errors import EnvironmentLacks, TaskInvalid
from dure.host.devices import accelerator, count_accelerators
from dure.records.sums import Sum
from dure.strategies.contract.batch_layout import has_rows
from dure.strategies.contract.batches import split_batch, to_device
from dure.strategies.data_parallel.device_shares import USUAL_STATE_TENSORS, device0_share_by_memory, fractions_of
from dure.strategies.device_threads import DeviceThreads
from dure.strategies.division.divided_calls import check_parameters
from dure.strategies.division.gathering import Gathering
from dure.strategies.state.containers import tensors_in
from dure.strategies.state.module_replicas import replicate


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Outputs of the devices that had samples, each still on its device."""

    outputs: Sequence[Any]
    counts: Sequence[int]
    """Samples of each output."""
    devices: Sequence[torch.device]
    home: torch.device
    """Device of the model."""
    threads: DeviceThreads

    def gathered(self) -> Any:
        """Return the outputs of all samples, on the model's device.

        Raises:
            TaskInvalid: They are not divided by samples.
        """
        return _gathered(self.outputs, self.home, self.counts)


class BalancedDataParallel(nn.Module):
    """Model on several devices of one process, of which the first gets its own share of each batch.

    It is used as `torch.nn.DataParallel` is. There the first device also holds the optimiser's state, all outputs and
    the loss, and is full while the others have room. Here it gets fewer samples; and with `gathers=False` the outputs
    stay where they are, for a `DataParallelCriterion`, which computes the loss there too.

    As with `torch.nn.DataParallel`, BatchNorm's statistics are those of one device's samples, dropout draws on each
    device, and attributes that a forward sets on the other devices' replicas are lost.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        *,
        device0_share: float | None = None,
        gathers: bool = True,
    ) -> None:
        """Choose the devices and their shares.

        Args:
            module: Model, whose parameters and buffers are on the first device.
            device_ids: Devices, by index or name; None for all accelerators. The CPU may be named several times.
            device0_share: Fraction of a batch for the first device, from 0 to 1; None for one by which all devices are
                equally full, with an optimiser that keeps two tensors for each parameter, as Adam does.
            gathers: Whether outputs are joined on the first device.

        Raises:
            EnvironmentLacks: There is no accelerator, and no device is given.
            TaskInvalid: The share is no fraction, or the model is elsewhere.
        """
        super().__init__()
        if device0_share is not None and not 0 <= device0_share <= 1:
            raise TaskInvalid(f"device0_share is {device0_share} but must be a fraction from 0 to 1")
        self.module = module
        self.devices = _devices_of(device_ids)
        self.gathers = gathers
        if len(self.devices) == 1:
            device0_share = 1.0
        elif device0_share is None:
            gradient_bytes = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
            device0_share = device0_share_by_memory(
                self.devices,
                gradient_bytes=gradient_bytes,
                state_bytes=gradient_bytes * USUAL_STATE_TENSORS,
                counts_all=False,
            )
        self.device0_share = device0_share
        """Fraction of a batch for the first device."""
        self._check_place()
        self._threads: DeviceThreads | None = None

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Call the replicas on their parts of the inputs; return the outputs joined, or as `Parts`.

        Inputs are divided along their first dimension; what has none goes to every device.

        Communication: parameters and buffers to each other device, the inputs, and the outputs if they are joined.

        Raises:
            TaskInvalid: Inputs or outputs cannot be divided, or forward changes parameters in place.
        """
        self._check_place()
        counts = shares(_num_samples((inputs, keywords)), len(self.devices), self._fractions)
        used = [device for device, count in enumerate(counts) if count] or [0]
        replicas = replicate(self.module, [self.devices[device] for device in used if device], linked=True)
        modules = [*([self.module] if used[0] == 0 else []), *(replica.model for replica in replicas)]
        devices = [self.devices[device] for device in used]
        counts = [counts[device] for device in used]
        parts = split_batch((inputs, keywords), counts) if len(used) > 1 else [(inputs, keywords)]
        calls = [_call(*each) for each in zip(modules, parts, devices, strict=True)]
        outputs = self._own_threads().run(calls)
        check_parameters(replicas)
        if used[0] > 0 and self.training:
            replicas[0].give_back_buffers()
        home = self.devices[0]
        found = Parts(outputs=outputs, counts=counts, devices=devices, home=home, threads=self._own_threads())
        return found.gathered() if self.gathers else found

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.close()
            self._threads = None

    @property
    def _fractions(self) -> list[float]:
        return fractions_of(len(self.devices), self.device0_share)

    def _own_threads(self) -> DeviceThreads:
        if self._threads is None:
            # on CPUs, which have one generator, calls in order draw the same numbers every time
            self._threads = DeviceThreads(self.devices, in_order=self.devices[0].type == "cpu")
        return self._threads

    def _check_place(self) -> None:
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if tensor.device != self.devices[0]:
                raise TaskInvalid(
                    f"{name} is on {tensor.device}, and the first device is {self.devices[0]}: move the model there"
                )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the threads, which cannot be copied."""
        return {**self.__dict__, "_threads": None}


class DataParallelCriterion(nn.Module):
    """Loss that is computed on the devices that have the outputs, and joined to one number.

    The criterion gives the mean over the samples that it gets, or a `dure.Sum` where it is a mean over something else
    (tokens, boxes, pixels that are not masked), or one value for each sample. Means are weighted by their samples.
    `nn.CrossEntropyLoss` and `nn.NLLLoss` may have weights and ignored targets. Whether other criteria are means is
    looked at in some calls, with the samples of one device: in the first, second, fourth, eighth and so on. A module
    whose `reduction` is `sum` is added up.
    """

    def __init__(self, criterion: Callable[..., Any]) -> None:
        """Take a criterion: a module, which is on the first device, or a function of outputs and targets."""
        super().__init__()
        self.criterion = criterion
        self._num_calls = 0

    def forward(self, outputs: Any, *targets: Any, **keywords: Any) -> Tensor:
        """Return the loss of all samples, on the first device.

        Args:
            outputs: `Parts` of a model with `gathers=False`, or outputs of one device.
            targets: Other arguments of the criterion, which are divided by samples.
            keywords: The same by name.

        Raises:
            TaskInvalid: The criterion is no mean over samples, or targets cannot be divided.
        """
        if not isinstance(outputs, Parts):
            devices = _devices_in(outputs)
            outputs = Parts(
                outputs=[outputs],
                counts=[_num_samples(outputs)],
                devices=devices,
                home=devices[0],
                threads=_NO_THREADS,
            )
        self._num_calls += 1
        counts, devices = outputs.counts, outputs.devices
        parts = split_batch((targets, keywords), counts) if len(counts) > 1 else [(targets, keywords)]
        criteria = [_as_sum(criterion) for criterion in self._criteria(devices, outputs.home)]
        arguments = [((output, *args), kwargs) for output, (args, kwargs) in zip(outputs.outputs, parts, strict=True)]
        if self._num_calls & (self._num_calls - 1) == 0:
            self._check(outputs, targets, keywords, arguments[0])
        calls = [_call(*each) for each in zip(criteria, arguments, devices, strict=True)]
        return _joined(outputs.threads.run(calls), counts, outputs.home, is_summed=self._is_summed)

    def _check(self, outputs: Parts, targets: Any, keywords: Any, first: Any) -> None:
        """Look at whether the criterion is a mean, on a copy, because it may keep a state."""
        device, num_samples = outputs.devices[0], outputs.counts[0]
        if num_samples == 1 < len(outputs.counts):  # one sample cannot be divided: take those of all devices
            device, num_samples = outputs.home, sum(outputs.counts)
            first = ((outputs.gathered(), *targets), keywords)
        criterion = self.criterion
        if isinstance(criterion, nn.Module):
            criterion = replicate(criterion, [device], linked=False)[0].model
        _check_mean(_as_sum(criterion), to_device(first, device), num_samples, is_summed=self._is_summed)

    @property
    def _is_summed(self) -> bool:
        return getattr(self.criterion, "reduction", None) == "sum"

    def _criteria(self, devices: Sequence[torch.device], home: torch.device) -> list[Callable[..., Any]]:
        if not isinstance(self.criterion, nn.Module):
            return [self.criterion] * len(devices)
        own = [self.criterion] if devices[0] == home else []  # the first device may have no samples
        return [*own, *(replica.model for replica in replicate(self.criterion, devices[len(own) :], linked=True))]


_NO_THREADS = DeviceThreads([torch.device("cpu")], in_order=True)


def _gathered(outputs: Sequence[Any], home: torch.device, counts: Sequence[int]) -> Any:
    if len(outputs) == 1:
        return to_device(outputs[0], home)
    cure = "return one row per sample, or compute the loss by gathers=False and a DataParallelCriterion"
    return Gathering(device=home, counts=counts, cure=cure).of(outputs)


def _devices_of(device_ids: Sequence[int | str | torch.device] | None) -> list[torch.device]:
    kind = accelerator()
    if device_ids is None:
        if kind is None or not count_accelerators(kind):
            raise EnvironmentLacks(
                'this machine shows no accelerator: name the devices, as in device_ids=["cpu", "cpu"]'
            )
        device_ids = range(count_accelerators(kind))
    if not device_ids:
        raise TaskInvalid("device_ids is empty: name at least one device")
    found = [torch.device(kind or "cpu", each) if isinstance(each, int) else torch.device(each) for each in device_ids]
    return [torch.device("cpu") if each.type == "cpu" else torch.device(each.type, each.index or 0) for each in found]


def _num_samples(values: Any) -> int:
    """Return the length of the first tensor with a first dimension; one where there is none."""
    return next((len(tensor) for tensor in tensors_in(values) if has_rows(tensor)), 1)


def _devices_in(outputs: Any) -> list[torch.device]:
    return [next((tensor.device for tensor in tensors_in(outputs)), torch.device("cpu"))]


def _call(function: Callable[..., Any], arguments: tuple[Any, Any], device: torch.device) -> Callable[[], Any]:
    def run() -> Any:
        args, keywords = to_device(arguments, device)
        return function(*args, **keywords)

    return run


def _as_sum(criterion: Any) -> Callable[..., Any]:
    """Return a criterion that gives a `Sum`, if it is a mean of torch's over the weights of targets."""
    known = (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)  # and not a derived class's own
    if getattr(type(criterion), "forward", None) not in known or getattr(criterion, "reduction", None) != "mean":
        return criterion  # type: ignore[no-any-return]

    def summed(output: Tensor, target: Tensor) -> Any:
        if target.is_floating_point():  # a probability for each class: a mean over samples
            return criterion(output, target)
        with _reduction(criterion, "sum"):
            total = criterion(output, target)
        is_counted = target != criterion.ignore_index
        weight = criterion.weight
        count = is_counted.sum() if weight is None else weight[target[is_counted]].sum()
        return Sum(total, count)

    return summed


@contextmanager
def _reduction(criterion: Any, reduction: str) -> Iterator[None]:
    before, criterion.reduction = criterion.reduction, reduction
    try:
        yield
    finally:
        criterion.reduction = before


def _check_mean(
    criterion: Callable[..., Any], arguments: tuple[Any, Any], num_samples: int, *, is_summed: bool
) -> None:
    """Compare a criterion's value of some samples with the one joined from two parts of them.

    Raises:
        TaskInvalid: They differ.
    """
    if num_samples < 2:
        return
    counts = [num_samples // 3 or 1, num_samples - (num_samples // 3 or 1)]
    with torch.no_grad(), kept_global_randomness(*_devices_in(arguments)):
        values = [criterion(*args, **keywords) for args, keywords in [arguments, *split_batch(arguments, counts)]]
    device = torch.device("cpu")
    whole = _joined(values[:1], [num_samples], device, is_summed=is_summed)
    joined = _joined(values[1:], counts, device, is_summed=is_summed)
    tolerance = min(20 * torch.finfo(whole.dtype).eps ** 0.75, 0.05) if whole.is_floating_point() else 0.0
    if whole.shape != joined.shape or not torch.allclose(whole, joined, rtol=tolerance, atol=tolerance, equal_nan=True):
        raise TaskInvalid(
            f"the criterion gives {_text(whole)} for {num_samples} samples, and {_text(joined)} if they are divided in "
            "two parts, so it is no mean over samples: let it return dure.Sum(total, count)"
        )


def _text(value: Tensor) -> str:
    return f"{value.item():.6g}" if value.numel() == 1 else f"a tensor of {tuple(value.shape)}"


def _joined(values: Sequence[Any], counts: Sequence[int], device: torch.device, *, is_summed: bool) -> Tensor:
    """Return the loss of all samples from those of the parts."""
    if any(isinstance(value, Sum) for value in values):
        total = sum(to_device(value.total, device) for value in values)
        count = sum(to_device(value.count, device) for value in values)
        return total / count  # type: ignore[no-any-return]
    if not all(isinstance(value, Tensor) for value in values):
        raise TaskInvalid("the criterion returned no tensor and no dure.Sum: return the mean loss of the samples")
    if all(value.dim() and len(value) == count for value, count in zip(values, counts, strict=True)):
        return torch.cat([value.to(device) for value in values])
    weights = [1.0 if is_summed else count / sum(counts) for count in counts]
    weighted = [value.to(device) * weight for value, weight in zip(values, weights, strict=True)]
    return torch.stack(weighted).sum(0)
