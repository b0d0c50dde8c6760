"""Rules on combinations of settings, independent of the strategy."""

from collections.abc import Callable
from dataclasses import dataclass

from dure.spec.fields import RunSpec


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Rule that several settings must fulfil together."""

    fields: tuple[str, ...]
    blame: str
    """Setting whose source is named in the message."""
    is_broken: Callable[[RunSpec], bool]
    fault: Callable[[RunSpec], str]

    def breaks(self, spec: RunSpec, bad: set[str]) -> bool:
        """Return whether these settings break the rule, unless one of them is invalid by itself."""
        return not bad.intersection(self.fields) and self.is_broken(spec)


RULES = (
    Rule(
        fields=("microbatch_size", "global_batch_size"),
        blame="microbatch_size",
        is_broken=lambda spec: (spec.microbatch_size or 0) > spec.global_batch_size,
        fault=lambda spec: (
            f"microbatch_size is {spec.microbatch_size}, more than the global_batch_size of"
            f" {spec.global_batch_size} that it is a part of: lower the one or raise the other"
        ),
    ),
    Rule(
        fields=("backend", "device"),
        blame="backend",
        is_broken=lambda spec: spec.backend == "nccl" and spec.device == "cpu",
        fault=lambda spec: "backend nccl cannot reach device cpu: choose gloo, or another device",
    ),
    Rule(
        fields=("prefetch_factor", "num_workers"),
        blame="prefetch_factor",
        is_broken=lambda spec: spec.prefetch_factor is not None and spec.num_workers == 0,
        fault=lambda spec: (
            f"prefetch_factor is {spec.prefetch_factor} but there is no loader process to fetch ahead: set num_workers"
            " too, or leave prefetch_factor out"
        ),
    ),
    Rule(
        fields=("compile_mode", "compile"),
        blame="compile_mode",
        is_broken=lambda spec: spec.compile_mode is not None and not spec.compile,
        fault=lambda spec: (
            f"compile_mode is {spec.compile_mode} but nothing is compiled: set compile too, or leave compile_mode out"
        ),
    ),
    Rule(
        fields=("on_divergence", "max_restarts"),
        blame="on_divergence",
        is_broken=lambda spec: spec.on_divergence == "heal" and spec.max_restarts == 0,
        fault=lambda spec: (
            "on_divergence is heal, which starts all ranks again where they agreed, but max_restarts is 0: raise it, or"
            " choose stop"
        ),
    ),
    Rule(
        fields=("on_divergence", "check_replicas_every"),
        blame="on_divergence",
        is_broken=lambda spec: spec.on_divergence == "heal" and spec.check_replicas_every == 0,
        fault=lambda spec: (
            "on_divergence is heal but check_replicas_every is 0, so nothing would be noticed: leave one of them out"
        ),
    ),
)
