"""Options of tensor_parallel."""

from pydantic import Field

from dure.strategies.data_parallel.options import Buckets


class TensorParallelOptions(Buckets):
    """Plan of the divided layers."""

    plan: str | None = Field(
        None, description="what to divide, as blocks.*.up=column,blocks.*.down=row (default: found)"
    )
    sequence_parallel: bool = Field(
        False, description="divide norms, dropout and sums between divided layers too, along the sequence (dimension 1)"
    )
