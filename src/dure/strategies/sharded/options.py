"""Options of fsdp."""

from typing import Literal

from pydantic import Field

from dure.spec import RunSpec
from dure.spec.options import StrategyOptions


class FSDPOptions(StrategyOptions):
    """Units that are gathered together, and memory options."""

    reshard_after_forward: bool = Field(
        True, description="free gathered parameters after forward (ZeRO-3; without it ZeRO-2)"
    )
    reshard_size: int | None = Field(
        None,
        gt=1,
        description="after forward keep parameters divided over this many ranks, as of one host, and gather "
        "them from these in backward",
    )
    units: str | None = Field(None, description="modules gathered on their own, as blocks.* (default: repeated blocks)")
    activation_checkpointing: bool = Field(
        False, description="keep no activations inside a unit, compute them again in backward"
    )
    recompute: Literal["all", "cheap"] = Field(
        "all", description="cheap: keep the results of matrix products, convolutions and attention"
    )
    recompute_every: int = Field(1, gt=0, description="compute again only every so many units")
    prefetch: int | None = Field(
        None, gt=0, description="units gathered ahead of the one that computes (default: as torch does)"
    )
    reduce_dtype: Literal["fp32", "bf16"] | None = Field(
        None, description="dtype in which gradients are added up (default: the parameters'; with bf16 and fp16 fp32)"
    )
    cpu_offload: bool = Field(False, description="keep shards and optimiser state in host memory")
    tensor_plan: str | None = Field(
        None, description="what the axis tensor of the mesh divides, as tensor-parallel.plan says it (default: found)"
    )
    sequence_parallel: bool = Field(False, description="with an axis tensor, as tensor-parallel.sequence-parallel")

    def faults(self, spec: RunSpec) -> list[tuple[str, str]]:
        """Refuse fp16 with shards in host memory, and options without effect."""
        found = []
        if spec.precision == "fp16" and self.cpu_offload:
            found.append(
                (
                    "precision",
                    "precision is fp16 and cpu_offload is set, but torch's GradScaler would use its scale in host "
                    "memory before the copy from the device has arrived: choose bf16, which needs no scale, or leave "
                    "cpu_offload out",
                )
            )
        if self.recompute == "cheap" and spec.compile:
            found.append(
                (
                    "recompute",
                    "recompute is cheap, with which compiled units that work in place would compute something else, "
                    "and torch.compile itself chooses what is cheap: leave one of them out",
                )
            )
        if self.reshard_size is not None and not self.reshard_after_forward:
            found.append(
                (
                    "reshard_size",
                    "reshard_size divides parameters after forward, and without reshard_after_forward they stay whole: "
                    "leave one of them out",
                )
            )
        found += [
            (
                name,
                f"{name} is {value} but nothing is computed again: set activation_checkpointing, or leave it out",
            )
            for name, value, usual in (
                ("recompute", self.recompute, "all"),
                ("recompute_every", self.recompute_every, 1),
            )
            if value != usual and not self.activation_checkpointing
        ]
        return found
