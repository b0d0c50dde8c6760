"""Settings of a run (`RunSpec`), with their types, defaults and help texts."""

import os
import types
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from dure.errors import SpecInvalid
from dure.spec.old_names import of_now

MOST_SECONDS = 10**9
"""Upper limit in seconds of a timeout, about 30 years: torch counts nanoseconds, and takes a much larger one for 0."""
MOST_THREADS = 4096
"""Upper limit of CPU threads per process. OpenMP crashes if the system refuses it a thread."""
MOST_PREFETCHED = 2**20
"""Upper limit of the batches that a loader process fetches ahead."""
MOST_PROCESSES = 4096
"""Upper limit of ranks per host, and of loader processes per rank: more would take every process number of a host."""


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _without_nul(path: Path | None) -> Path | None:
    if path is not None and "\0" in str(path):
        raise ValueError("a path has no NUL")
    return path


_OfFileSystem = AfterValidator(_without_nul)

RUN_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""Pattern of a run's name, which is also the name of its folder: it can neither leave the runs folder nor look like an
option."""


class Everyday:
    """Mark of a setting that most runs need, so that `dure train --help` shows it."""


class _Group(BaseModel):
    """Settings that `--help` and `--show-spec` show as one group."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)

    title: ClassVar[str]


class _Identity(_Group):
    """Settings that define the run (the same samples in the same order with the same weight), and its length."""

    title: ClassVar[str] = "What the run is"

    task: Annotated[str, Everyday] = Field(description="file.py:Class or package.module:Class")
    task_options: dict[str, Any] = Field(default_factory=dict, description="the task's own options")
    epochs: Annotated[float | None, Everyday] = Field(
        None, gt=0, description="length in passes over the training data (default 1)"
    )
    samples: Annotated[int | None, Everyday] = Field(None, gt=0, description="length in samples, instead of epochs")
    global_batch_size: Annotated[int, Everyday] = Field(
        64, gt=0, description="samples per optimiser step, over all ranks"
    )
    seed: Annotated[int, Everyday] = Field(
        0, ge=0, lt=2**63, description="covers Python, NumPy, torch, loader workers, sample order"
    )
    shuffle: bool = Field(True, description="draw each epoch's order from (seed, epoch)")
    drop_last: bool = Field(False, description="drop an epoch's short last batch instead of using it")
    clip_norm: float | None = Field(None, gt=0, description="clip by the norm of the global gradient")


class _Execution(_Group):
    """Settings of its execution, which every resume may change."""

    title: ClassVar[str] = "How it is executed"

    strategy: Annotated[str, Everyday] = Field(
        "single", description="see `dure strategies`; on several devices the default is ddp"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="options of the strategy")
    nproc: Annotated[int, Everyday] = Field(
        1, gt=0, le=MOST_PROCESSES, description="devices (ranks) of each host; for dp, devices of its one process"
    )
    mesh: str | None = Field(
        None, description="hybrid layout, as data=2,pipeline=2 (the product is the devices of all hosts)"
    )
    microbatch_size: Annotated[int | None, Everyday] = Field(
        None, gt=0, description="most samples per backward on one device"
    )
    precision: Annotated[Literal["fp32", "tf32", "bf16", "fp16"], Everyday] = Field(
        "fp32", description="bf16, fp16: autocast; fp16 scales the loss; tf32: on CUDA"
    )
    device: Annotated[str, Everyday] = Field(
        "auto", description="cpu, or the kind of an accelerator, as cuda; auto: one if any"
    )
    share_devices: bool = Field(False, description="let several processes use one device")
    backend: str = Field(
        "auto",
        description="process group; auto: the device's, as nccl, or dure_shm between CPU ranks of one host, or gloo",
    )
    comm: Literal["auto", "backend", "shm", "ring", "naive", "star", "halving_doubling", "tree", "hierarchical"] = (
        Field("auto", description="all-reduce algorithm; auto: shared memory between CPU ranks of one host")
    )
    start: Literal["auto", "fork", "spawn", "inline"] = Field("auto", description="how worker processes start")
    threads: int | None = Field(
        None, gt=0, le=MOST_THREADS, description="CPU threads per process (default: cores / processes)"
    )
    timeout_seconds: float = Field(
        600.0, gt=0, le=MOST_SECONDS, description="a collective that takes longer is an error"
    )
    preflight: bool = Field(False, description="check machines and network first, and start only if all is well")
    accept_changes: bool = Field(False, description="resume although the task's code or data are not as they were")
    trust_task: bool = Field(
        False,
        description="accept a run whose record names a task's file outside the current folder; that file is executed",
    )
    deterministic: bool = Field(False, description="a repeated run at the same world size is bit-identical")
    compile: bool = Field(False, description="torch.compile the model (fsdp: each of its units)")
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = Field(
        None, description="mode of torch.compile: how long it searches for faster code"
    )
    sync_batchnorm: bool = Field(False, description="BatchNorm statistics over all ranks")
    num_workers: Annotated[int, Everyday] = Field(0, ge=0, le=MOST_PROCESSES, description="loader processes per rank")
    prefetch_factor: int | None = Field(
        None, gt=0, le=MOST_PREFETCHED, description="batches that each loader process fetches ahead (default 2)"
    )
    numa_binding: Literal["node", "socket", "exclusive", "core-complex"] | None = Field(
        None, description="bind each rank to the cores near its CUDA device, as torchrun does (default: not)"
    )


class _Evaluation(_Group):
    """Settings of evaluations."""

    title: ClassVar[str] = "Evaluation"

    eval_every_epochs: float = Field(1.0, gt=0, description="evaluate this often, and always at the end")
    eval_batch_size: int | None = Field(None, gt=0, description="samples per evaluation batch, at any world size")
    best_metric: str = Field("loss", description="evaluation metric that decides the best checkpoint")
    best_mode: Literal["auto", "min", "max"] = Field(
        "auto", description="auto: by its name, min for losses, max for accuracies"
    )


class CheckpointSettings(_Group):
    """Settings of checkpoints, in the table `checkpoint`."""

    title: ClassVar[str] = "Checkpoints"

    every_samples: int | None = Field(None, gt=0, description="in addition to the end of each epoch")
    every_minutes: float | None = Field(None, gt=0, description="in addition to the end of each epoch")
    background: bool = Field(
        True, description="write them while training goes on, from a copy of the state in host memory"
    )
    keep: int = Field(2, gt=0, description="newest ones to keep, in addition to the best")


class _Tables(_Group):
    """Settings grouped under one name each, as a table in TOML."""

    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings, description="settings of checkpoints")


class _Failures(_Group):
    """Settings for failures."""

    title: ClassVar[str] = "After a failure"

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
    faults: Annotated[Path | None, _OfFileSystem] = Field(
        None, description="TOML file of failures on purpose: which rank, which step, how"
    )


class _Hosts(_Group):
    """Settings of the nodes, given at each start on each host and not saved for a resume."""

    title: ClassVar[str] = "Several hosts"

    nnodes: Annotated[str, BeforeValidator(_as_text)] = Field(
        "1",
        pattern=r"^[1-9][0-9]{0,5}(:[1-9][0-9]{0,5})?$",
        description="hosts, each with nproc devices; 1:4: at most 4, and it goes on with 1",
    )
    node_rank: int | None = Field(None, ge=0, description="which of the hosts this is, from 0; another on each")
    rendezvous: str | None = Field(None, description="where the hosts meet: an address of host 0, as 10.0.0.1:29400")
    secret_file: Annotated[Path | None, _OfFileSystem] = Field(
        None, description="file by which the hosts prove that they belong together (default: ~/.config/dure/secret)"
    )
    rendezvous_timeout: float = Field(600.0, gt=0, description="seconds to wait for the other hosts")
    allow_public_address: bool = Field(False, description="meet at a public address, without encryption")


TRACKERS = ("mlflow", "wandb", "tensorboard")
"""Names of experiment trackers to which a run can be handed over."""


def _as_list_text(value: Any) -> Any:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else value


def _known_trackers(value: str | None) -> str | None:
    names = [name.strip() for name in (value or "").split(",")]
    if value is not None and not {*names} <= {*TRACKERS}:
        raise ValueError(f"it must be one or several of {', '.join(TRACKERS)}")
    return None if value is None else ",".join(dict.fromkeys(names))


class _Place(_Group):
    """Settings of the run's location, and of the output."""

    title: ClassVar[str] = "Where, and what is shown"

    runs_dir: Annotated[Path, Everyday, _OfFileSystem] = Field(Path("runs"), description="folder of the runs")
    name: Annotated[str | None, Everyday] = Field(
        None, pattern=RUN_NAME_PATTERN, description="name of the run (default: date, task and strategy)"
    )
    share_run: bool = Field(False, description="let others read the run's folder as far as the umask does")
    record_samples: bool = Field(False, description="write the data indices of every step into the records")
    tensorboard: bool = Field(False, description="write TensorBoard scalars into the run folder")
    trace: int | None = Field(
        None,
        gt=0,
        le=1000,
        description="write so many steps of all ranks, with operators, as a trace for Perfetto",
    )
    log: Annotated[str | None, BeforeValidator(_as_list_text), AfterValidator(_known_trackers)] = Field(
        None, description="hand the run over to its trackers as it goes: mlflow, wandb, or both: mlflow,wandb"
    )
    quiet: Annotated[bool, Everyday] = Field(
        False, description="no progress, and no table at the end of training; errors only"
    )


class RunSpec(_Place, _Hosts, _Failures, _Tables, _Evaluation, _Execution, _Identity):
    """All settings of a run. A field's description is its help text; its name is its flag.

    All options of the chosen strategy are in `options`; their types are in the strategy's own model.
    """

    # not a setting: a fact about the start, for the record
    total_devices: int | None = Field(
        None,
        gt=0,
        description="devices of all hosts, where that is not nproc for each: of a launcher, or of hosts left",
    )

    def by_name(self, exclude: Collection[str] = ()) -> dict[str, Any]:
        """Return all settings as plain JSON values, with the strategy's name before its options: `fsdp.units`."""
        settings = self.model_dump(mode="json", exclude={*exclude, *OPTIONS_FIELDS})
        return without_tables(settings) | {f"{self.strategy}.{name}": value for name, value in self.options.items()}

    @property
    def trackers(self) -> tuple[str, ...]:
        """Names of the experiment trackers to which the run is handed over."""
        names = [*(self.log.split(",") if self.log else []), *(["tensorboard"] if self.tensorboard else [])]
        return tuple(dict.fromkeys(names))

    def setting(self, name: str) -> Any:
        """Return the value of a setting by its name, such as `checkpoint.keep` for one in a table."""
        table, is_inner, inner = name.partition(".")
        return getattr(getattr(self, table), inner) if is_inner else getattr(self, name)

    @property
    def num_nodes(self) -> int:
        """Number of hosts of the run if all are present."""
        return int(self.nnodes.rpartition(":")[2])

    @property
    def fewest_nodes(self) -> int:
        """Minimum number of hosts."""
        return int(self.nnodes.partition(":")[0])

    @property
    def num_devices(self) -> int:
        """Devices of all hosts if all are present: the product of `mesh`, the world size of most strategies."""
        return self.total_devices or self.nproc * self.num_nodes

    @property
    def counted_devices(self) -> str:
        """Number of devices of all hosts as text, with its origin."""
        if self.total_devices is not None:
            return f"the world size is {self.total_devices}"
        if self.num_nodes > 1:
            return f"the world size is {self.num_devices} (nnodes {self.num_nodes} x nproc {self.nproc})"
        return f"nproc is {self.nproc}"


OPTIONS_FIELDS = ("options",)
"""Field of the strategy's options, which users set under the strategy's name."""

TABLES: dict[str, type[_Group]] = {"checkpoint": CheckpointSettings}
"""Tables of settings by name; a setting in one is named `checkpoint.keep`."""

_NAMES = {cls: name for name, cls in TABLES.items()}


def _names_in(group: type[_Group]) -> tuple[str, ...]:
    table = f"{_NAMES[group]}." if group in _NAMES else ""
    return tuple(f"{table}{name}" for name in group.model_fields if name not in OPTIONS_FIELDS)


GROUPS = {
    group.title: _names_in(group)
    for group in (_Identity, _Execution, _Evaluation, CheckpointSettings, _Failures, _Hosts, _Place)
}
"""Settings by group, each once, for `--help` and `--show-spec`."""

LENGTH_FIELDS = ("epochs", "samples")
"""Fields for a run's length, of which one is in effect: the higher source overrides the other field too. They may grow
on a resume.
"""

RECORD_FIELDS = ("total_devices",)
"""Fields of a run's record that are not settings: no flag, variable or file sets them."""

SETTINGS = tuple(name for names in GROUPS.values() for name in names)
"""Settings that a user may give: fields of `RunSpec`, or of one of its tables."""

OTHER_NAMES = {"nproc_per_node": "nproc"}
"""Alternative names of settings, from torchrun."""

IDENTITY_FIELDS = ("task", "task_options", "global_batch_size", "seed", "shuffle", "drop_last", "clip_norm")
"""Fields that define a run; a resume that changes them is refused."""

NODE_FIELDS = GROUPS[_Hosts.title]
"""Fields for the run's nodes. They are given at each start on each host, never taken from the resumed run."""

PLACE_FIELDS = ("runs_dir", "name", "share_run")
"""Fields for the run's location, fixed when its folder is created."""


EVALUATION_FIELDS = (
    *("nproc", "device", "share_devices", "backend", "precision", "start", "threads", "timeout_seconds"),
    *("num_workers", "eval_batch_size", "quiet", "trust_task"),
)
"""Fields that an evaluation may change; all others are the run's own."""


def field_of(name: str) -> FieldInfo:
    """Return the field of a setting by its name."""
    table, is_inner, inner = name.partition(".")
    return TABLES[table].model_fields[inner] if is_inner else RunSpec.model_fields[name]


def without_tables(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those in tables as separate entries: `checkpoint.keep` for `keep` in `checkpoint`."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if name in TABLES and isinstance(value, Mapping):
            flat |= {f"{name}.{inner}": each for inner, each in value.items()}
        else:
            flat[name] = value
    return flat


def in_tables(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with entries such as `checkpoint.keep` in tables, the inverse of `without_tables`."""
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        table, is_inner, inner = name.partition(".")
        if is_inner:
            nested.setdefault(table, {})[inner] = value
        else:
            nested[name] = value
    return nested


def read_record(record: Mapping[str, Any]) -> RunSpec:
    """Return the spec from a run's record, also from one of an older version.

    Before `nproc` counted the devices of each host, it counted those of all hosts; such records have no
    `total_devices`, not even None. Before strategies had their own options, and settings had tables, all settings were
    in one mapping.

    Raises:
        ValueError: It is not a record of a spec.
    """
    spec = RunSpec.model_validate(in_tables(of_now(record)) if isinstance(record, Mapping) else record)
    if any(name in record for name in RECORD_FIELDS) or spec.num_nodes == 1:
        return spec
    return spec.model_copy(update={"nproc": max(1, spec.nproc // spec.num_nodes)})


def flag_name(setting: str) -> str:
    """Return the flag of a setting or option: `global_batch_size` is `--global-batch-size`."""
    return "--" + setting.replace("_", "-")


def with_own_names(settings: Mapping[str, Any], spell: Callable[[str], str] = str) -> dict[str, Any]:
    """Return settings with `nproc_per_node` under its main name, `nproc`.

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
    """Return whether two references name the same class, however the file's path is spelled.

    If the other's file no longer exists, a file of the same name is accepted: a project's folder may have been moved.
    """
    (file, _, cls), (other_file, _, other_cls) = one.rpartition(":"), other.rpartition(":")
    if not (file.endswith(".py") and other_file.endswith(".py")):
        return one == other
    is_moved = os.path.basename(file) == os.path.basename(other_file) and not os.path.exists(other_file)
    return cls == other_cls and (is_moved or os.path.realpath(file) == os.path.realpath(other_file))


def is_everyday(info: FieldInfo) -> bool:
    """Return whether most runs need a setting."""
    return Everyday in info.metadata


def kinds(info: FieldInfo) -> tuple[Any, ...]:
    """Return the types that a field may have, without None."""
    annotation = info.annotation
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return tuple(kind for kind in typing.get_args(annotation) if kind is not types.NoneType)
    return (annotation,)


def is_bool_for_number(info: FieldInfo, value: Any) -> bool:
    """Return whether a boolean is given for a number; Python would take True for 1."""
    return isinstance(value, bool) and bool not in kinds(info)


def shown(value: Any) -> str:
    """Return a value as shown in messages about faults."""
    return repr(str(value)) if isinstance(value, str | Path) else repr(value)


def requirement(name: str) -> str:
    """Return a description of a setting's valid values: `a whole number above 0`."""
    if name == "name":
        return "1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit"
    if name == "nnodes":
        return "a whole number above 0, or the fewest and the most, as 1:4"
    if name == "log":
        return f"one or several of {', '.join(TRACKERS)}, separated by commas"
    return requirement_of(field_of(name))


def requirement_of(info: FieldInfo) -> str:
    """Return a description of the valid values of a setting or option."""
    kind = kinds(info)[0]
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(typing.get_args(kind))
    words = {bool: "true or false", int: "a whole number", float: "a number", Path: "a path"}.get(kind, "text")
    bounds = [(Gt, "gt", "above"), (Ge, "ge", "of at least"), (Lt, "lt", "below"), (Le, "le", "of at most")]
    conditions = [
        f"{word} {getattr(limit, attribute)}"
        for cls, attribute, word in bounds
        for limit in info.metadata
        if isinstance(limit, cls)
    ]
    return " ".join([words, " and ".join(conditions)]).strip()
