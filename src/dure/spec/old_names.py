"""Names of options and settings before they were grouped, accepted for one version: `--bucket-bytes`."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

_COMPRESSION = ("ddp", "zero1", "ring_ddp")
_DDP = ("ddp", "zero1")

STRATEGIES_WITH: Mapping[str, tuple[str, ...]] = {
    "bucket_bytes": (*_DDP, "pipeline", "tensor_parallel"),
    **dict.fromkeys(("gradient_as_bucket_view", "find_unused_parameters", "compression_rank"), _DDP),
    **dict.fromkeys(("compression", "compression_fraction"), _COMPRESSION),
    **dict.fromkeys(("message_size", "delay_allreduce", "allreduce_always_fp32", "gradient_average"), ("ring_ddp",)),
    "gradient_predivide_factor": ("ring_ddp",),
    "device0_share": ("balanced_dp",),
    **dict.fromkeys(("reshard_after_forward", "fsdp_units", "activation_checkpointing", "cpu_offload"), ("fsdp",)),
    "tp_plan": ("tensor_parallel",),
    **dict.fromkeys(("average_every", "warmup_steps"), ("averaging", "diloco")),
    **dict.fromkeys(("outer_lr", "outer_momentum"), ("diloco",)),
    "cuts": ("model_parallel", "pipeline", "rpc_model"),
    **dict.fromkeys(("schedule", "stages_per_rank"), ("pipeline",)),
    **dict.fromkeys(("servers", "transport", "sync", "staleness"), ("parameter_server",)),
}
"""Old names, each with the strategies that have such an option."""

TRUTHS = frozenset(
    {
        *("gradient_as_bucket_view", "find_unused_parameters", "delay_allreduce", "allreduce_always_fp32"),
        *("gradient_average", "reshard_after_forward", "activation_checkpointing", "cpu_offload", "sync"),
        "checkpoint_async",
    }
)
"""Old names of boolean options and settings."""

WITHOUT_EFFECT = frozenset({"bucket_bytes", "gradient_as_bucket_view", "find_unused_parameters"})
"""Old names that every strategy accepted, even without effect."""

_NEW_NAMES = {"fsdp_units": "units", "tp_plan": "plan"}


def option_name(old: str) -> str:
    """Return the current name of an option, without its strategy's."""
    return _NEW_NAMES.get(old, old)


SETTINGS: Mapping[str, str] = {
    "checkpoint_every_samples": "checkpoint.every_samples",
    "checkpoint_every_minutes": "checkpoint.every_minutes",
    "checkpoint_async": "checkpoint.background",
    "keep_checkpoints": "checkpoint.keep",
}
"""Old names of settings that are now in a table, with their current names."""


def of_now(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a spec's record with options under `options`, and with current names such as `checkpoint.keep`."""
    settings = {SETTINGS.get(name, name): value for name, value in record.items() if name not in STRATEGIES_WITH}
    if "options" in record:
        return settings
    strategy = record.get("strategy") or "single"
    options = {
        option_name(name): record[name]
        for name, strategies in STRATEGIES_WITH.items()
        if strategy in strategies and record.get(name) is not None
    }
    return {"options": options, **settings}


class Names(Protocol):
    """Spelling of settings in one source."""

    @property
    def origin_of(self) -> Callable[[str], str]: ...

    @property
    def spell(self) -> Callable[[str], str]: ...


def note(source: Names, old: str, name: str) -> str:
    """Return a note that an old name was accepted, with the current one."""
    where, spelled = source.origin_of(old), source.spell(old)
    where = where if where.endswith(spelled) else f"{where}: {spelled}"
    return f"{where} is called {source.spell(name)} now; the old name is understood in this version only"


def given_twice(source: Names, old: str, name: str) -> str:
    """Return a message about a setting with two values in one source, under its old and its current name."""
    return (
        f"{source.origin_of(old)}: {source.spell(old)} is the old name of {source.spell(name)}, which is given too: "
        "leave it out"
    )
