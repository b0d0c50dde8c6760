"""Options of fsdp."""

from pydantic import Field

from dure.spec import RunSpec
from dure.spec.options import StrategyOptions


class FSDPOptions(StrategyOptions):
    """Units that are gathered together, and memory options."""

    reshard_after_forward: bool = Field(
        True, description="free gathered parameters after forward (ZeRO-3; without it ZeRO-2)"
    )
    units: str | None = Field(None, description="modules gathered on their own, as blocks.* (default: repeated blocks)")
    activation_checkpointing: bool = Field(
        False, description="keep no activations inside a unit, compute them again in backward"
    )
    cpu_offload: bool = Field(False, description="keep shards and optimiser state in host memory")

    def faults(self, spec: RunSpec) -> list[tuple[str, str]]:
        """Refuse fp16 with shards in host memory."""
        if spec.precision != "fp16" or not self.cpu_offload:
            return []
        return [
            (
                "precision",
                "precision is fp16 and cpu_offload is set, but torch's GradScaler would use its scale in host memory "
                "before the copy from the device has arrived: choose bf16, which needs no scale, or leave cpu_offload "
                "out",
            )
        ]
