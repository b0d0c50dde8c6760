"""The one table of strategies: what each divides, preserves and needs. Importing it does not import torch."""

import importlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dure.strategies.base import Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyInfo:
    """One row of the table: what a user needs to know to choose a strategy, and what the tests hold it to."""

    name: str
    implementation: str
    """`module:Class`, imported when the strategy is used."""
    summary: str
    divides: str
    synchronises: str
    """When ranks or devices wait for each other."""
    preserves: str
    does_not_preserve: tuple[str, ...]
    """Where a run differs from the one-device run; shown in the record and the end table."""
    needs: str
    sent_bytes: str
    """Bytes sent per step as a formula; P ranks or devices, G bytes of gradients, W bytes of parameters."""
    memory: str
    """Bytes per device as a formula; S bytes of optimiser state, A(b) of activations at b samples."""
    right_when: str
    one_process: bool
    """Whether `nproc` counts the devices of one process instead of processes."""
    many_devices: bool = True
    default_for: str = ""
    """`one` or `many`: chosen when the user names no strategy for so many devices."""
    settings: tuple[str, ...] = ()
    """Settings that not every strategy can honour, and this one does."""

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain JSON values."""
        return asdict(self)


_BATCHNORM = "BatchNorm without --sync-batchnorm: statistics of each {unit}'s own samples, rank 0's are kept"
_DROPOUT = "dropout: other draws than on one device (augmentation is the same)"

STRATEGIES: dict[str, StrategyInfo] = {
    info.name: info
    for info in (
        StrategyInfo(
            name="single",
            implementation="dure.strategies.single:Single",
            summary="one process, one device: what every other strategy is held to",
            divides="nothing",
            synchronises="never",
            preserves="everything: it is the definition",
            does_not_preserve=(),
            needs="a model, its gradients, optimiser state and activations that fit one device",
            sent_bytes="0",
            memory="W + G + S + A(microbatch)",
            right_when="the model trains fast enough on one device: it is always the most efficient per device",
            one_process=True,
            many_devices=False,
            default_for="one",
            settings=("compile", "sync_batchnorm"),
        ),
        StrategyInfo(
            name="dp",
            implementation="dure.strategies.dp:DataParallel",
            summary="one process, a thread per device; outputs gathered and the loss computed on device 0",
            divides="each microbatch over the devices of one process",
            synchronises="every microstep: parameters out, outputs gathered, gradients back",
            preserves="weights after every step (to rounding), sample order, evaluation",
            does_not_preserve=(
                "BatchNorm: statistics of each device's own samples, device 0's are kept",
                _DROPOUT,
            ),
            needs="one process that sees all devices; a model whose outputs have the samples first",
            sent_bytes="device 0: (P-1) W per microstep; every other device: G per microstep",
            memory="device 0: W + G + S + A(b/P) + all outputs and the loss; others: W + G + A(b/P)",
            right_when="to try a second device without a second process; ddp is faster in nearly every case",
            one_process=True,
        ),
        StrategyInfo(
            name="balanced_dp",
            implementation="dure.strategies.balanced_dp:BalancedDataParallel",
            summary="dp with the loss on the replicas and a smaller share for the fuller device 0",
            divides="each microbatch over the devices of one process, device 0's share given or found by memory",
            synchronises="every step: parameters out; every step: gradients back",
            preserves="weights after every step (to rounding), sample order, evaluation",
            does_not_preserve=(
                "BatchNorm: statistics of each device's own samples, device 0's are kept",
                _DROPOUT,
            ),
            needs="one process that sees all devices; batches whose tensors have the samples first",
            sent_bytes="device 0: (P-1) W per step; every other device: G per step",
            memory="device 0: W + G + S + A(share of device 0); others: W + G + A(their share)",
            settings=("device0_share",),
            right_when="dp runs out of memory on device 0 while the others have room",
            one_process=True,
        ),
        StrategyInfo(
            name="ddp",
            implementation="dure.strategies.ddp:DDP",
            summary="a process per device; gradients all-reduced in buckets while backward still runs",
            divides="each global batch over the ranks",
            synchronises="every step: gradients, overlapped with the last microstep's backward",
            preserves="weights after every step (to rounding), sample order, evaluation",
            does_not_preserve=(_BATCHNORM.format(unit="rank"), _DROPOUT),
            needs="a model that fits one device; every parameter in every step, or --find-unused-parameters",
            sent_bytes="every rank: 2 (P-1)/P G per step",
            memory="W + G + S + A(microbatch), buckets share G's memory (--gradient-as-bucket-view)",
            default_for="many",
            settings=("compile", "sync_batchnorm"),
            right_when="the model fits one device and several should share the work: the first thing to try",
            one_process=False,
        ),
    )
}


def load_strategy(name: str) -> "type[Strategy]":
    """Import the class that implements a strategy of the table."""
    module, _, class_name = STRATEGIES[name].implementation.partition(":")
    return getattr(importlib.import_module(module), class_name)  # type: ignore[no-any-return]
