"""Options of pipeline."""

from typing import Literal

from pydantic import Field

from dure.strategies.data_parallel.options import Buckets
from dure.strategies.sections.options import SectionOptions


class PipelineOptions(Buckets, SectionOptions):
    """First modules of the stages, and the schedule of their work."""

    schedule: Literal["gpipe", "1f1b", "interleaved"] = Field(
        "1f1b", description="order of forward and backward over the microbatches"
    )
    stages_per_rank: int | None = Field(
        None, gt=0, description="sections of each rank with the schedule interleaved (default 2)"
    )
    tensor_plan: str | None = Field(
        None, description="what the axis tensor of the mesh divides, as tensor-parallel.plan says it (default: found)"
    )
    sequence_parallel: bool = Field(False, description="with an axis tensor, as tensor-parallel.sequence-parallel")
