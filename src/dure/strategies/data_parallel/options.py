"""Options of the strategies in which every rank or device has the whole model."""

from typing import Literal

from pydantic import Field

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


class DDPOptions(Compressing, Buckets):
    """Options of ddp and zero1."""

    gradient_as_bucket_view: bool = Field(True, description="gradients are views into the buckets")
    find_unused_parameters: bool = Field(False, description="allow parameters that take no part in a step")
    compression_rank: int = Field(1, gt=0, le=MOST_BYTES, description="powersgd: rank of the approximation")


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
