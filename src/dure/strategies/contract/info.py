"""Row of the table of strategies. Importing it does not import torch."""

import importlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dure.spec.options import StrategyOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyInfo:
    """Row of the table: the facts by which a user chooses a strategy, and which the tests verify."""

    name: str
    implementation: str
    """`module:Class`, imported when the strategy is used."""
    options: str = ""
    """`module:Class` of the model of its own options, imported on first use; the module does not import torch. Empty if
    it has none.
    """
    summary: str
    divides: str
    synchronises: str
    """Points at which ranks or devices wait for each other."""
    preserves: str
    does_not_preserve: tuple[str, ...]
    """Differences from the one-device run, shown in the record and the end table."""
    needs: str
    sent_bytes: str
    """Bytes sent per step as a formula; P ranks or devices, G bytes of gradients, W bytes of parameters."""
    memory: str
    """Bytes per device as a formula; S bytes of optimiser state, A(b) of activations at b samples."""
    right_when: str
    one_process: bool
    """True if `nproc` counts the devices of one process instead of processes."""
    is_exact: bool = True
    """True if the weights after every step are those of one device, to rounding."""
    mesh_axes: tuple[str, ...] = ("data",)
    """Axes that `--mesh` may name, outermost first."""
    main_axis: str | None = None
    """Axis that has all ranks without `--mesh`; None for the last one."""
    alike_axes: tuple[str, ...] = ()
    """Axes along which all ranks work on the same samples."""
    extra_processes: str = ""
    """Name of the option that counts processes in addition to the `nproc` devices (parameter servers); its default is
    the number of devices.
    """
    exchanges_on_host: bool = False
    """True if ranks with accelerators exchange tensors in host memory, which NCCL does not support."""
    outlives_ranks_without: str = ""
    """Name of the option without which a run continues after a rank with a device is killed."""
    checks_model: bool = False
    """True if it cannot train every model; `check_model` is then called before any process starts."""
    many_devices: bool = True
    default_for: str = ""
    """`one` or `many` devices for which it is the default strategy; empty for neither."""
    settings: tuple[str, ...] = ()
    """General settings that this strategy honours but some others do not."""

    @property
    def flag(self) -> str:
        """Name as in the strategy's flags: `ring-ddp`."""
        return self.name.replace("_", "-")

    def option_class(self) -> "type[StrategyOptions]":
        """Import the model of this strategy's own options."""
        if not self.options:
            from dure.spec.options import StrategyOptions

            return StrategyOptions
        module, _, name = self.options.partition(":")
        return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain JSON values."""
        return asdict(self)
