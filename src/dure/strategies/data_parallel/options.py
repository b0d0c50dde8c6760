"""Options of the strategies in which every rank or device has the whole model."""

from typing import Literal

from pydantic import Field

from dure.spec import RunSpec
from dure.spec.options import StrategyOptions

MOST_BYTES = 2**50
"""Upper limit of a bucket, more than any device has: torch counts in 64 bits, and ends with an error beyond them."""


class Buckets(StrategyOptions):
    """Option of strategies that send gradients in buckets."""

    bucket_bytes: int = Field(25 * 2**20, gt=0, le=MOST_BYTES, description="gradient bucket size")


class Compressing(StrategyOptions):
    """Options of strategies that can compress gradients."""

    compression: Literal["fp16", "bf16", "powersgd", "topk", "int8"] | None = Field(
        None, description="send gradients smaller than they are (not exact)"
    )
    compression_fraction: float = Field(0.01, gt=0, le=1, description="topk: fraction of the elements that is sent")
    compression_error: bool = Field(True, description="measure what is lost, for the records, in passes of its own")


class DDPOptions(Compressing, Buckets):
    """Options of ddp and zero1."""

    gradient_as_bucket_view: bool = Field(True, description="gradients are views into the buckets")
    find_unused_parameters: bool = Field(False, description="allow parameters that take no part in a step")
    static_graph: bool = Field(
        False, description="every step uses the parameters that the first one used, each as often"
    )
    broadcast_buffers: bool = Field(True, description="send rank 0's buffers to all before each forward")
    compression_rank: int = Field(1, gt=0, le=MOST_BYTES, description="powersgd: rank of the approximation")

    def faults(self, spec: RunSpec) -> list[tuple[str, str]]:
        """Refuse a search for unused parameters in each step of which none differs from the first."""
        faults = []
        if self.static_graph and self.find_unused_parameters:
            faults.append(
                "static_graph finds the unused parameters in the first step, and find_unused_parameters in each: leave "
                "one of them out"
            )
        if self.static_graph and (spec.microbatch_size or spec.global_batch_size) * spec.num_devices < (
            spec.global_batch_size
        ):
            faults.append(
                f"static_graph does not go with several microbatches in a step, and microbatch_size is "
                f"{spec.microbatch_size}: leave one of them out"
            )
        return [("static_graph", fault) for fault in faults]


class RingDDPOptions(Compressing):
    """Options of ring_ddp, with their names in Apex."""

    message_size: int = Field(10_000_000, gt=0, le=MOST_BYTES, description="gradient elements of a bucket")
    delay_allreduce: bool = Field(False, description="send nothing before backward has ended")
    allreduce_always_fp32: bool = Field(False, description="halves are sent and added in float32")
    gradient_average: bool = Field(True, description="the sum over ranks is divided, not the losses before")
    gradient_predivide_factor: float = Field(1.0, gt=0, description="divide by this before adding up")


class BalancedOptions(StrategyOptions):
    """Option of balanced_dp."""

    device0_share: float | None = Field(
        None, ge=0, le=1, description="fraction of a batch that device 0 gets (default: by memory)"
    )
