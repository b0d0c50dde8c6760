"""RunSpec: what the user wants of a run, and the words for it."""

import os
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from dure.errors import SpecInvalid


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


RUN_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""Pattern of a run's name, which is also the name of its folder: it can neither leave the runs folder nor look like an
option."""


class RunSpec(BaseModel):
    """Every setting of a run. A field's description is its help text; its name is its flag.

    The fields of the first group define the run (the same samples in the same order with the same weight); the
    rest is execution and may change on every resume.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)

    # what the run is
    task: str = Field(description="file.py:Class or package.module:Class")
    task_options: dict[str, Any] = Field(default_factory=dict, description="the task's own options")
    epochs: float | None = Field(None, gt=0, description="length in passes over the training data (default 1)")
    samples: int | None = Field(None, gt=0, description="length in samples, instead of epochs")
    global_batch_size: int = Field(64, gt=0, description="samples per optimiser step, over all ranks")
    seed: int = Field(0, ge=0, lt=2**63, description="covers Python, NumPy, torch, loader workers, sample order")
    shuffle: bool = Field(True, description="draw each epoch's order from (seed, epoch)")
    drop_last: bool = Field(False, description="drop an epoch's short last batch instead of using it")
    clip_norm: float | None = Field(None, gt=0, description="clip by the norm of the global gradient")

    # how it is executed
    strategy: str = Field("single", description="see `dure strategies`; on several devices the default is ddp")
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="autocast; fp16 scales the loss")
    nproc: int = Field(1, gt=0, description="devices (ranks) of each host; for dp, devices of its one process")
    microbatch_size: int | None = Field(None, gt=0, description="most samples per backward on one device")
    mesh: str | None = Field(
        None, description="hybrid layout, as data=2,pipeline=2 (the product is the devices of all hosts)"
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", description="auto takes an accelerator if any")
    share_devices: bool = Field(False, description="let several processes use one CUDA device")
    backend: Literal["auto", "gloo", "nccl", "dure_shm"] = Field(
        "auto", description="process group; auto: NCCL, or shared memory between CPU ranks of one host, or gloo"
    )
    comm: Literal["auto", "backend", "shm", "ring", "naive", "star", "halving_doubling", "tree", "hierarchical"] = (
        Field("auto", description="all-reduce algorithm; auto: shared memory between CPU ranks of one host")
    )
    start: Literal["auto", "fork", "spawn", "inline"] = Field("auto", description="how worker processes start")
    threads: int | None = Field(None, gt=0, description="CPU threads per process (default: cores / processes)")
    timeout_seconds: float = Field(600.0, gt=0, description="a collective that takes longer is an error")
    accept_changes: bool = Field(False, description="resume although the task's code or data are not as they were")
    trust_task: bool = Field(
        False, description="resume although the run names a task's file outside the current folder, which is run"
    )
    preflight: bool = Field(False, description="check machines and network first, and start only if all is well")
    deterministic: bool = Field(False, description="a repeated run at the same world size is bit-identical")
    compile: bool = Field(False, description="torch.compile the model")
    sync_batchnorm: bool = Field(False, description="BatchNorm statistics over all ranks")
    bucket_bytes: int = Field(25 * 2**20, gt=0, description="ddp: gradient bucket size")
    gradient_as_bucket_view: bool = Field(True, description="ddp: gradients are views into the buckets")
    find_unused_parameters: bool = Field(False, description="ddp: allow parameters that take no part in a step")
    device0_share: float | None = Field(
        None, ge=0, le=1, description="balanced_dp: fraction of a batch that device 0 gets (default: by memory)"
    )
    compression: Literal["fp16", "bf16", "powersgd", "topk", "int8"] | None = Field(
        None, description="ddp, zero1, ring_ddp: send gradients smaller than they are (not exact)"
    )
    compression_fraction: float = Field(0.01, gt=0, le=1, description="topk: fraction of the elements that is sent")
    compression_rank: int = Field(1, gt=0, description="powersgd: rank of the approximation")
    message_size: int = Field(10_000_000, gt=0, description="ring_ddp: gradient elements of a bucket, as in Apex")
    delay_allreduce: bool = Field(False, description="ring_ddp: send nothing before backward has ended")
    allreduce_always_fp32: bool = Field(False, description="ring_ddp: halves are sent and added in float32")
    gradient_average: bool = Field(True, description="ring_ddp: the sum over ranks is divided, not the losses before")
    gradient_predivide_factor: float = Field(1.0, gt=0, description="ring_ddp: divide by this before adding up")
    reshard_after_forward: bool | None = Field(
        None, description="fsdp: free gathered parameters after forward (default: true, ZeRO-3; false: ZeRO-2)"
    )
    fsdp_units: str | None = Field(
        None, description="fsdp: modules gathered on their own, as blocks.* (default: repeated blocks)"
    )
    activation_checkpointing: bool = Field(
        False, description="fsdp: keep no activations inside a unit, compute them again in backward"
    )
    cpu_offload: bool = Field(False, description="fsdp: keep shards and optimiser state in host memory")
    tp_plan: str | None = Field(
        None, description="tensor_parallel: what to divide, as blocks.*.up=column,blocks.*.down=row (default: found)"
    )
    average_every: int | None = Field(
        None, gt=0, description="averaging, diloco: steps from one averaging to the next (default 16)"
    )
    warmup_steps: int = Field(0, ge=0, description="averaging, diloco: synchronous steps at the start of the run")
    outer_lr: float | None = Field(None, gt=0, description="diloco: learning rate of the outer step (default 0.7)")
    outer_momentum: float | None = Field(
        None, ge=0, lt=1, description="diloco: Nesterov momentum of the outer step (default 0.9)"
    )
    cuts: str | None = Field(
        None,
        description="model_parallel, pipeline: modules that begin a section, as layers.4,layers.8 (default: found)",
    )
    schedule: Literal["gpipe", "1f1b", "interleaved"] | None = Field(
        None, description="pipeline: order of forward and backward over the microbatches (default 1f1b)"
    )
    stages_per_rank: int | None = Field(
        None, gt=0, description="pipeline: sections of each rank with --schedule interleaved (default 2)"
    )
    servers: int | None = Field(
        None, gt=0, description="parameter_server: processes that keep the parameters (default: as many as nproc)"
    )
    transport: Literal["c10d", "rpc"] = Field(
        "c10d", description="parameter_server: how messages travel; rpc unpickles what peers send"
    )
    sync: bool = Field(True, description="parameter_server: all take each step together; --no-sync: at their own pace")
    staleness: int | None = Field(
        None, ge=0, description="parameter_server --no-sync: most steps ahead of the slowest worker (default: any)"
    )
    num_workers: int = Field(0, ge=0, description="loader processes per rank")

    # evaluation and checkpoints
    eval_every_epochs: float = Field(1.0, gt=0, description="evaluate this often, and always at the end")
    eval_batch_size: int | None = Field(None, gt=0, description="samples per evaluation batch, at any world size")
    best_metric: str = Field("loss", description="evaluation metric that decides the best checkpoint")
    best_mode: Literal["auto", "min", "max"] = Field(
        "auto", description="auto: by its name, min for losses, max for accuracies"
    )
    checkpoint_every_samples: int | None = Field(None, gt=0, description="beside the end of each epoch")
    checkpoint_every_minutes: float | None = Field(None, gt=0, description="beside the end of each epoch")
    checkpoint_async: bool = Field(
        True, description="write checkpoints while training goes on, from a copy of the state in host memory"
    )
    keep_checkpoints: int = Field(2, gt=0, description="newest checkpoints to keep, beside the best")
    on_nonfinite: Literal["stop", "skip"] = Field(
        "stop", description="a loss that is NaN or infinite: end the run, or skip its step on all ranks"
    )
    check_replicas_every: int | None = Field(
        None,
        ge=0,
        description="steps from comparing replicas to the next time, 0: never (default: for less than 1 % of the time)",
    )
    on_divergence: Literal["stop", "heal"] = Field(
        "stop", description="a replica that differs: end the run and name it, or go back to where all agreed"
    )
    faults: Path | None = Field(None, description="TOML file of failures on purpose: which rank, which step, how")
    max_restarts: int = Field(3, ge=0, description="restarts of all ranks after one failed, within the window")
    restart_window_seconds: float = Field(600.0, gt=0, description="restarts longer ago do not count")
    on_hang: Literal["restart", "stop", "wait"] = Field(
        "restart", description="when no step finishes: start all ranks again, end the run, or only say why"
    )
    hang_after: float | None = Field(
        None,
        gt=0,
        description="seconds without a finished step that are a hang (default: 10, or 10 median steps; 300 before 3 "
        "are known; 6 times that before a rank that may only be slow is ended); at least 60 before the first step, "
        "where only ranks that can never go on are ended",
    )
    grace_seconds: float = Field(
        30.0,
        gt=0,
        description="seconds from a stop signal until ranks that have not ended are ended, and what they have in "
        "memory is saved",
    )
    snapshot_every: int | None = Field(
        None,
        gt=0,
        description="steps between snapshots in memory, to go on from (default: each step, or for 2 % of the time)",
    )

    # several hosts: said at each start, and not kept for a resume
    nnodes: Annotated[str, BeforeValidator(_as_text)] = Field(
        "1",
        pattern=r"^[1-9][0-9]{0,5}(:[1-9][0-9]{0,5})?$",
        description="hosts, each with nproc devices; 1:4: at most 4, and it goes on with 1",
    )
    node_rank: int | None = Field(None, ge=0, description="which of the hosts this is, from 0; another on each")
    rendezvous: str | None = Field(None, description="where the hosts meet: an address of host 0, as 10.0.0.1:29400")
    secret_file: Path | None = Field(
        None, description="what the hosts know each other by (default: ~/.config/dure/secret)"
    )
    rendezvous_timeout: float = Field(600.0, gt=0, description="seconds to wait for the other hosts")
    allow_public_address: bool = Field(False, description="meet at a public address, without encryption")

    # where, and what is shown
    runs_dir: Path = Field(Path("runs"), description="folder of the runs")
    name: str | None = Field(
        None, pattern=RUN_NAME_PATTERN, description="name of the run (default: date, task and strategy)"
    )
    share_run: bool = Field(False, description="let others read the run's folder as far as the umask does")
    record_samples: bool = Field(False, description="write the data indices of every step into the records")
    tensorboard: bool = Field(False, description="write TensorBoard scalars into the run folder")
    quiet: bool = Field(False, description="no progress and no table; errors only")

    # no setting: a fact of the start, for the record
    total_devices: int | None = Field(
        None,
        gt=0,
        description="devices of all hosts, where that is not nproc for each: of a launcher, or of hosts left",
    )

    @property
    def num_nodes(self) -> int:
        """Hosts of the run, when all are there."""
        return int(self.nnodes.rpartition(":")[2])

    @property
    def fewest_nodes(self) -> int:
        """Hosts without which it does not go on."""
        return int(self.nnodes.partition(":")[0])

    @property
    def num_devices(self) -> int:
        """Devices of all hosts, when all are there: the product of `mesh`, the world size of most strategies."""
        return self.total_devices or self.nproc * self.num_nodes

    @property
    def counted_devices(self) -> str:
        """Number of devices of all hosts in words, with its reasons."""
        if self.total_devices is not None:
            return f"the world size is {self.total_devices}"
        if self.num_nodes > 1:
            return f"the world size is {self.num_devices} (nnodes {self.num_nodes} x nproc {self.nproc})"
        return f"nproc is {self.nproc}"


GROUPS: dict[str, tuple[str, ...]] = {
    "What the run is": (
        *("task", "task_options", "epochs", "samples", "global_batch_size", "seed", "shuffle", "drop_last"),
        "clip_norm",
    ),
    "How it is executed": (
        *(
            "strategy",
            "nproc",
            "mesh",
            "microbatch_size",
            "precision",
            "device",
            "share_devices",
            "backend",
            "comm",
            "start",
        ),
        *(
            "threads",
            "timeout_seconds",
            "preflight",
            "accept_changes",
            "trust_task",
            "deterministic",
            "compile",
            "sync_batchnorm",
            "bucket_bytes",
        ),
        *(
            "gradient_as_bucket_view",
            "find_unused_parameters",
            "device0_share",
            "compression",
            "compression_fraction",
            "compression_rank",
            "message_size",
            "delay_allreduce",
        ),
        *("allreduce_always_fp32", "gradient_average", "gradient_predivide_factor", "num_workers"),
        *("reshard_after_forward", "fsdp_units", "activation_checkpointing", "cpu_offload", "tp_plan"),
        *("cuts", "schedule", "stages_per_rank"),
        *("average_every", "warmup_steps", "outer_lr", "outer_momentum"),
        *("servers", "transport", "sync", "staleness"),
    ),
    "Evaluation and checkpoints": (
        *("eval_every_epochs", "eval_batch_size", "best_metric", "best_mode", "checkpoint_every_samples"),
        *("checkpoint_every_minutes", "checkpoint_async", "keep_checkpoints"),
    ),
    "After a failure": (
        *("on_nonfinite", "check_replicas_every", "on_divergence", "max_restarts", "restart_window_seconds"),
        *("on_hang", "hang_after", "grace_seconds", "snapshot_every", "faults"),
    ),
    "Several hosts": (
        *("nnodes", "node_rank", "rendezvous", "secret_file", "rendezvous_timeout", "allow_public_address"),
    ),
    "Where, and what is shown": ("runs_dir", "name", "share_run", "record_samples", "tensorboard", "quiet"),
}
"""Fields by group, each once, as `--help` and `--show-spec` show them."""

LENGTH_FIELDS = ("epochs", "samples")
"""Fields for a run's length, of which one is in effect: the higher source wins and sets the other aside. They may grow
on a resume."""

RECORD_FIELDS = ("total_devices",)
"""Fields of a run's record that are no settings: no flag, variable or file gives them."""

SETTINGS = tuple(name for name in RunSpec.model_fields if name not in RECORD_FIELDS)
"""Fields that a user may set."""

OTHER_NAMES = {"nproc_per_node": "nproc"}
"""Other names of settings: torchrun's."""

IDENTITY_FIELDS = ("task", "task_options", "global_batch_size", "seed", "shuffle", "drop_last", "clip_norm")
"""Fields that define a run; a resume that changes them is refused."""

NODE_FIELDS = GROUPS["Several hosts"]
"""Fields for the run's nodes. They are given at each start on each host, never taken from the resumed run."""

PLACE_FIELDS = ("runs_dir", "name", "share_run")
"""Fields for the run's location, fixed when its folder is made."""

EXECUTION_FIELDS = tuple(name for name in SETTINGS if name not in (*LENGTH_FIELDS, *IDENTITY_FIELDS, *PLACE_FIELDS))
"""Fields that every resume may choose again."""


EVALUATION_FIELDS = (
    *("nproc", "device", "share_devices", "backend", "precision", "start", "threads", "timeout_seconds"),
    *("num_workers", "eval_batch_size", "quiet", "trust_task"),
)
"""Fields that an evaluation may choose again; all others are the run's own."""


def read_record(record: Mapping[str, Any]) -> RunSpec:
    """Make a spec of a run's record.

    Before `nproc` counted the devices of each host, it counted those of all hosts; a record of that time has no
    `total_devices`, not even None.

    Raises:
        ValueError: It holds something else.
    """
    spec = RunSpec.model_validate(record)
    if any(name in record for name in RECORD_FIELDS) or spec.num_nodes == 1:
        return spec
    return spec.model_copy(update={"nproc": max(1, spec.nproc // spec.num_nodes)})


class StrategyTraits(Protocol):
    """Part of a strategy's row in the table that a spec needs."""

    @property
    def many_devices(self) -> bool: ...

    @property
    def default_for(self) -> str:
        """`one` or `many` devices, or nothing."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings that not every strategy can honour, and this one does."""

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The axes that `mesh` may name."""


def flag_name(setting: str) -> str:
    """Return the flag of a setting: `global_batch_size` is `--global-batch-size`."""
    return "--" + setting.replace("_", "-")


def with_own_names(settings: Mapping[str, Any], spell: Callable[[str], str] = str) -> dict[str, Any]:
    """Return settings with `nproc_per_node` under its own name, `nproc`.

    Raises:
        SpecInvalid: One setting has two values, under two names.
    """
    own = {name: value for name, value in settings.items() if name not in OTHER_NAMES}
    faults = []
    for other, name in OTHER_NAMES.items():
        value, first = settings.get(other), settings.get(name)
        if value is not None and first is not None and str(value).strip() != str(first).strip():
            faults.append(f"{spell(name)} is {first} but {spell(other)}, its other name, is {value}: give one of them")
        elif value is not None:
            own[name] = value
    if faults:
        raise SpecInvalid(faults)
    return own


def same_task(one: str, other: str) -> bool:
    """Tell whether two references name the same class, however the file's path is spelled.

    Where the other's file is no longer there, one of its name is taken for it: a project's folder may be moved.
    """
    (file, _, cls), (other_file, _, other_cls) = one.rpartition(":"), other.rpartition(":")
    if not (file.endswith(".py") and other_file.endswith(".py")):
        return one == other
    is_moved = os.path.basename(file) == os.path.basename(other_file) and not os.path.exists(other_file)
    return cls == other_cls and (is_moved or os.path.realpath(file) == os.path.realpath(other_file))


def kinds(info: FieldInfo) -> tuple[Any, ...]:
    """Return the types that a field may have, without None."""
    annotation = info.annotation
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return tuple(kind for kind in typing.get_args(annotation) if kind is not types.NoneType)
    return (annotation,)


def requirement(name: str) -> str:
    """Say in words what a setting's value must be: `a whole number above 0`."""
    info = RunSpec.model_fields[name]
    kind = kinds(info)[0]
    if name == "name":
        return "1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit"
    if name == "nnodes":
        return "a whole number above 0, or the fewest and the most, as 1:4"
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(typing.get_args(kind))
    words = {bool: "true or false", int: "a whole number", float: "a number"}.get(kind, "text")
    bounds = [(Gt, "gt", "above"), (Ge, "ge", "of at least"), (Lt, "lt", "below"), (Le, "le", "of at most")]
    said = [
        f"{word} {getattr(limit, attribute)}"
        for cls, attribute, word in bounds
        for limit in info.metadata
        if isinstance(limit, cls)
    ]
    return " ".join([words, " and ".join(said)]).strip()
