"""Settings that strategies read."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """The settings that strategies read, under the names they have in `RunSpec`; each takes what concerns it."""

    clip_norm: float | None = None
    on_nonfinite: str = "stop"
    deterministic: bool = False
    sync_batchnorm: bool = False
    compile: bool = False
    mesh: str | None = None
    comm: str = "auto"
    bucket_bytes: int = 25 * 2**20
    gradient_as_bucket_view: bool = True
    find_unused_parameters: bool = False
    device0_share: float | None = None
    device: str = "auto"
    precision: str = "fp32"
    global_batch_size: int = 64
    microbatch_size: int | None = None
    cuts: str | None = None
    schedule: str | None = None
    stages_per_rank: int | None = None
    reshard_after_forward: bool | None = None
    fsdp_units: str | None = None
    activation_checkpointing: bool = False
    cpu_offload: bool = False
    tp_plan: str | None = None
    average_every: int | None = None
    warmup_steps: int = 0
    outer_lr: float | None = None
    outer_momentum: float | None = None
    servers: int | None = None
    transport: str = "c10d"
    sync: bool = True
    staleness: int | None = None
    timeout_seconds: float = 600.0
    compression: str | None = None
    compression_fraction: float = 0.01
    compression_rank: int = 1
    message_size: int = 10_000_000
    delay_allreduce: bool = False
    allreduce_always_fp32: bool = False
    gradient_average: bool = True
    gradient_predivide_factor: float = 1.0
