"""`dure bench` as functions: the cost of collectives on this machine, and the messages of an algorithm."""

import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dure.comm.algorithms.base import REDUCE_OPS, ReduceOp
from dure.comm.algorithms.table import ALGORITHMS, find_algorithm
from dure.documents import parse_json
from dure.errors import Interrupted, SpecInvalid, WorkerFailed
from dure.host.backends import OVER_SOCKETS, device_backend, fault_of_backend, known_backends
from dure.host.device_kinds import name_of_device
from dure.host.devices import check_devices, count_cores, resolve_device
from dure.launch.nodes.peers import Nodes
from dure.launch.rounds.request import Launch
from dure.launch.rounds.supervisor import run_workers
from dure.process.jobs import BenchJob, BenchPlan
from dure.process.stop_signals import stop_exit_code
from dure.records.link_costs import LinkCost, fit_cost, write_costs
from dure.spec import unknown_name
from dure.spec.fields import MOST_PROCESSES

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send_recv")
_USUAL_ALGORITHMS = ("backend", "ring", "shm")
_ON_CPU_ONLY = ("shm",)
DTYPES = ("float32", "float64", "float16", "bfloat16", "int64")
MOST_RANKS, MOST_ELEMENTS = 16, 64
"""Limits of `explain`: more ranks or elements make the listing unreadable."""


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Settings of `dure bench`."""

    nproc: int = 2
    collectives: Sequence[str] = ("all_reduce",)
    algorithms: Sequence[str] | None = None
    """Algorithms for all_reduce; None for backend, ring and, on the CPU, shm."""
    min_bytes: int = 8
    max_bytes: int = 256 * 2**20
    factor: float = 4.0
    dtype: str = "float32"
    op: str = "sum"
    warm_up: int = 2
    device: str = "auto"
    backend: str = "auto"
    timeout_seconds: float = 600.0


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """Measurements of one `dure bench`."""

    rows: list[dict[str, Any]]
    """`comm.timing.BenchRow.to_json()` and the `time` of each row, in seconds since the epoch."""
    costs: list[LinkCost]

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain JSON values."""
        return {"rows": self.rows, "costs": [asdict(cost) for cost in self.costs]}


class MeasurementFailed(WorkerFailed):
    """Failure of ranks during the measurements; `rows` holds those completed before."""

    def __init__(self, verdict: str, exit_code: int, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        super().__init__(verdict, exit_code)


def check(settings: BenchSettings) -> None:
    """Refuse settings that cannot be measured.

    Raises:
        SpecInvalid: There are such settings; the message lists all faults.
    """
    faults = []
    for name, words, known in (
        ("collective", settings.collectives, COLLECTIVES),
        ("algorithm", settings.algorithms or (), ALGORITHMS),
        ("dtype", [settings.dtype], DTYPES),
        ("op", [settings.op], REDUCE_OPS),
    ):
        faults += [unknown_name(name, word, known) for word in words if word not in known]
    if not 2 <= settings.nproc <= MOST_PROCESSES:
        faults.append(f"nproc is {settings.nproc} but a link has two ends: give from 2 to {MOST_PROCESSES}")
    if not 0 < settings.min_bytes <= settings.max_bytes:
        faults.append(f"sizes from {settings.min_bytes} to {settings.max_bytes} bytes: the first must be the smaller")
    if any(part.rpartition(":")[2] not in known_backends() for part in settings.backend.split(",")):
        faults.append(unknown_name("backend", settings.backend, known_backends()))
    if settings.warm_up < 0:
        faults.append(f"warm_up is {settings.warm_up} but is a number of calls: give 0 or more")
    if not 1 < settings.factor < math.inf:
        faults.append(
            f"factor is {settings.factor:g} but each size is that many times the one before: give more than 1"
        )
    if faults:
        raise SpecInvalid(faults)


def bench(settings: BenchSettings, *, record: Path | None = None) -> BenchResult:
    """Measure collectives between processes of this host, and add the costs of links to the machine's record.

    Args:
        settings: Settings of the measurement.
        record: Path of the machine's record; None to write none.

    Raises:
        SpecInvalid: The settings cannot be measured.
        MeasurementFailed: A rank failed; the measurements are not recorded.
        Interrupted: A signal stopped it; the measurements are not recorded.
    """
    check(settings)
    kind = resolve_device(settings.device)
    check_devices(kind, settings.nproc, shared=False)
    # torch takes one for each kind of device too, as `cpu:gloo,cuda:nccl`
    if ":" not in settings.backend and (fault := fault_of_backend(settings.backend, kind)):
        raise SpecInvalid([fault])
    settings = replace(settings, algorithms=_algorithms_on(kind, settings.algorithms))
    with tempfile.TemporaryDirectory(prefix="dure-bench-") as folder:
        file = Path(folder, "rows.jsonl")
        file.touch()
        try:
            _run(settings, kind, Path(folder), file)
        except WorkerFailed as failure:
            raise MeasurementFailed(str(failure), failure.exit_code, _read_rows(file)) from None
        rows = _read_rows(file)
    costs = link_costs(rows, settings, kind)
    if record is not None:
        write_costs(record, costs)
    return BenchResult(rows=rows, costs=costs)


def algorithms_of(kind: str) -> tuple[str, ...]:
    """Return all all-reduce algorithms that run on a type of device."""
    return tuple(name for name in ALGORITHMS if kind == "cpu" or name not in _ON_CPU_ONLY)


def _algorithms_on(kind: str, wanted: Sequence[str] | None) -> tuple[str, ...]:
    known = algorithms_of(kind)
    if wanted is None:
        return tuple(name for name in _USUAL_ALGORITHMS if name in known)
    faults = [
        f"algorithm {name} reduces CPU tensors only, but the device is {kind}: leave it out, or use --device cpu"
        for name in wanted
        if name not in known
    ]
    if faults:
        raise SpecInvalid(faults)
    return tuple(wanted)


def _run(settings: BenchSettings, kind: str, folder: Path, file: Path) -> None:
    from dure.comm.timing import sizes_between

    job = BenchJob(
        device=kind,
        backend=(device_backend(kind) or OVER_SOCKETS) if settings.backend == "auto" else settings.backend,
        rows=str(file),
        timeout_seconds=settings.timeout_seconds,
        plan=BenchPlan(
            collectives=tuple(settings.collectives),
            algorithms=tuple(settings.algorithms or ()),
            sizes=tuple(sizes_between(settings.min_bytes, settings.max_bytes, settings.factor)),
            dtype=settings.dtype,
            op=settings.op,
            warm_up=settings.warm_up,
        ),
    )
    outcome = run_workers(
        Launch(
            entry="dure.comm.entrypoints.bench",
            job=job,
            nodes=Nodes.alone(settings.nproc),
            threads=max(1, count_cores() // settings.nproc),
            store_prefix=f"bench/{time.time_ns()}",
            start="auto",
        )
    )
    verdict = outcome.judge(folder)
    if verdict is not None:
        raise WorkerFailed(verdict.text, verdict.exit_code)
    if outcome.stopped_by is not None:
        raise Interrupted("the measurement was stopped; nothing was recorded", stop_exit_code(outcome.stopped_by))


def _read_rows(file: Path) -> list[dict[str, Any]]:
    return [parse_json(line) for line in file.read_text(encoding="utf-8").splitlines()]


def link_costs(rows: Sequence[Mapping[str, Any]], settings: BenchSettings, kind: str) -> list[LinkCost]:
    """Fit alpha and beta for every collective and algorithm measured at two or more sizes."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["collective"], row["algorithm"]), []).append(row)
    costs = []
    for (collective, algorithm), measured in groups.items():
        if len({row["num_bytes"] for row in measured}) < 2:
            continue
        alpha, beta, error = fit_cost([r["num_bytes"] for r in measured], [r["seconds"] for r in measured])
        costs.append(
            LinkCost(
                link=_link(settings, kind, algorithm),
                device=name_of_device(kind),
                collective=collective,
                algorithm=algorithm,
                world_size=settings.nproc,
                alpha_seconds=alpha,
                beta_seconds_per_byte=beta,
                relative_error=error,
                num_sizes=len(measured),
                measured_at=time.time(),
            )
        )
    return costs


def _link(settings: BenchSettings, kind: str, algorithm: str) -> str:
    if (own := device_backend(kind)) is not None:
        return own
    is_memory = algorithm == "shm" or (algorithm == "backend" and "dure_shm" in settings.backend)
    return "shared memory" if is_memory else "loopback"


def explain(algorithm: str, *, world_size: int, num_elements: int, op: ReduceOp = "sum") -> Iterator[str]:
    """Run an algorithm between threads on a small vector, and yield a line for each message that it sends.

    Args:
        algorithm: One of `ALGORITHMS` that sends messages.
        world_size: Number of ranks.
        num_elements: Elements of the vector.
        op: `sum`, `mean` or `max`.

    Raises:
        SpecInvalid: The algorithm sends no messages, or there are more ranks or elements than the limits allow.
    """
    from dure.comm.algorithms.trace import trace

    info = find_algorithm(algorithm)
    if not (1 <= world_size <= MOST_RANKS and 1 <= num_elements <= MOST_ELEMENTS):
        raise SpecInvalid(
            [
                f"{world_size} ranks and {num_elements} elements are more than can be followed: give --nproc up to "
                f"{MOST_RANKS} and --elements up to {MOST_ELEMENTS}"
            ]
        )
    # two hosts, so that the phases of a hierarchical algorithm are visible
    hosts = [rank * 2 // world_size for rank in range(world_size)] if info.uses_hosts else None
    seen = trace(algorithm, world_size, num_elements, op=op, hosts=hosts)
    yield f"{algorithm}: {info.summary}"
    for rank, vector in enumerate(seen.vectors):
        host = "" if hosts is None else f" (host {hosts[rank]})"
        yield f"  rank {rank}{host} has {_numbers(vector)}"
    before: tuple[str, int] | None = None
    for message in seen.messages:
        if (message.phase, message.step) != before:
            before = message.phase, message.step
            yield f"\n{message.phase}, round {message.step + 1}"
        more = " …" if message.num_elements > len(message.values) else ""
        where = f"[{message.start}:{message.end})"
        yield f"  rank {message.source} -> rank {message.destination}  {where:9} {_numbers(message.values)}{more}"
    yield f"\nafterwards every rank has {_numbers(seen.result)}"
    sent = seen.sent_bytes
    yield f"bytes sent: {', '.join(f'rank {rank} {count}' for rank, count in enumerate(sent))}"
    yield f"            busiest {max(sent)}: N {num_elements}, P {world_size}, 4 bytes each: {info.sent_busiest}"
    yield f"            total {sum(sent)}: {info.sent_total}"


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{value:g}" for value in values)
