"""Options of tensor_parallel."""

from pydantic import Field

from dure.strategies.data_parallel.options import Buckets


class TensorParallelOptions(Buckets):
    """Plan of the divided layers."""

    plan: str | None = Field(
        None, description="what to divide, as blocks.*.up=column,blocks.*.down=row (default: found)"
    )
