"""Run as Ray actors: a placement group with a bundle per node, an actor per rank, and their supervision."""

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from dure.cluster.rank import RankInfo
from dure.errors import EnvironmentLacks, Interrupted, WorkerFailed
from dure.failures.verdict import STOP_ENDS
from dure.process.stop_signals import handled_signals, signal_name, stop_exit_code
from dure.submit.job import Job
from dure.submit.ray_rank import Look, RayRank
from dure.terminal import pass_on, print_status, shell_word

_LOOK_SECONDS = 0.2
_CONNECT_SECONDS = 10.0
_GRACE_SECONDS = 60.0
"""Seconds that the other ranks have to end after one has failed."""
_PRINT_AFTER_SECONDS = 10.0
"""Seconds before a message reports the wait for a placement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Job for Ray, with the settings specific to it."""

    job: Job
    address: str | None = None
    """Address of a running cluster; None for that of RAY_ADDRESS, a running one on this host, or a new local one."""

    def bundles(self) -> list[dict[str, float]]:
        """Return the resources of each node."""
        tasks = self.job.tasks_per_node
        bundle = {"CPU": float((self.job.cpus_per_task or 1) * tasks)}
        if self.job.gpus_per_task:
            bundle["GPU"] = float(self.job.gpus_per_task * tasks)
        return [dict(bundle) for _ in range(self.job.nodes)]

    def ranks(self) -> list[RankInfo]:
        """Return the position of each rank."""
        tasks = self.job.tasks_per_node
        return [
            RankInfo(
                rank=rank,
                local_rank=rank % tasks,
                node_rank=rank // tasks,
                world_size=self.job.num_ranks,
                local_world_size=tasks,
            )
            for rank in range(self.job.num_ranks)
        ]

    def environment(self, rank: RankInfo) -> dict[str, str]:
        """Return torchrun's variables of a rank; none for a single rank, which may start ranks of its own."""
        if rank.world_size == 1:
            return {}
        return {**rank.to_environment(), "TORCHELASTIC_RUN_ID": self.job.name, "TORCHELASTIC_RESTART_COUNT": "0"}

    def to_json(self) -> dict[str, Any]:
        """Return the plan for display; MASTER_ADDR and MASTER_PORT are unknown until rank 0 is placed."""
        return {
            "address": self.address,
            "placement_group": {"bundles": self.bundles(), "strategy": self.strategy},
            "folder": str(self.job.folder),
            "command": ["dure", "train", *self.job.words],
            "actors": [
                {
                    "bundle": rank.node_rank,
                    "num_cpus": self.job.cpus_per_task or 1,
                    "num_gpus": self.job.gpus_per_task,
                    "environment": self.environment(rank),
                }
                for rank in self.ranks()
            ],
        }

    @property
    def strategy(self) -> str:
        """Ray's name of the placement strategy, which puts bundles on different nodes."""
        return "STRICT_SPREAD" if self.job.nodes > 1 else "PACK"


def run(plan: Plan) -> None:
    """Run all ranks, forward their output and signals to them, and leave nothing of the run in Ray.

    Raises:
        EnvironmentLacks: Ray is not installed or not reachable, or never has enough resources.
        WorkerFailed: A rank failed.
        Interrupted: A signal stopped the run, which can be resumed.
    """
    ray = _import_ray()
    is_ours = _connect(ray, plan.address)
    group: Any = None
    actors: list[Any] = []
    try:
        with _keeping_signals() as received:
            group = ray.util.placement_group(plan.bundles(), strategy=plan.strategy, name=plan.job.name)
            _wait_for_place(ray, group, plan, received, is_ours=is_ours)
            actors += _make_actors(ray, group, plan)
            _start(ray, actors, plan)
            code = _watch(ray, actors, received)
        _judge(code, plan)
    finally:
        for actor in actors:
            ray.kill(actor)
        if group is not None:
            ray.util.remove_placement_group(group)
        ray.shutdown()


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster that we start sends no usage reports
    try:
        import ray
        import ray.util
        from ray.util import scheduling_strategies  # noqa: F401 - used as an attribute
    except ImportError:
        raise EnvironmentLacks("ray is not installed: pip install 'dure[ray]'") from None
    return ray


def _connect(ray: Any, address: str | None) -> bool:
    """Connect to a cluster, or start one on this host; return whether it was started for this run."""
    options = {"log_to_driver": False, "logging_level": "warning"}
    try:
        if address is None and not os.environ.get("RAY_ADDRESS"):
            try:
                ray.init(address="auto", **options)
            except ConnectionError:  # there is none on this host
                ray.init(address="local", include_dashboard=False, **options)
                return True
        else:
            _refuse_unreachable(address)
            ray.init(address=address, **options)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:500]
        raise EnvironmentLacks(f"no cluster of Ray can be reached at {address or 'this host'}: {reason}") from None
    return False


def _refuse_unreachable(address: str | None) -> None:
    """Refuse an address without a listener, because Ray itself retries for minutes."""
    match = re.fullmatch(r"(?:ray://)?([^/]+):(\d{1,5})", address or "")
    if match is not None:
        socket.create_connection((match[1], int(match[2])), timeout=_CONNECT_SECONDS).close()


def _wait_for_place(ray: Any, group: Any, plan: Plan, received: list[int], *, is_ours: bool) -> None:
    """Wait until the cluster has enough resources; a cluster started for this run never grows."""
    wanted = sum(bundle["CPU"] for bundle in plan.bundles())
    ready, start, has_printed = group.ready(), time.monotonic(), False
    while not ray.wait([ready], timeout=_LOOK_SECONDS)[0]:
        if received:
            raise Interrupted("stopped before the run had a place", stop_exit_code(received[0]))
        total = ray.cluster_resources()
        if not has_printed and time.monotonic() - start > (0 if is_ours else _PRINT_AFTER_SECONDS):
            has_printed = True
            there = ", ".join(f"{name} {total.get(name, 0):g}" for name in ("CPU", "GPU"))
            words = f"{plan.job.nodes} node(s) with {plan.bundles()[0]}, and the cluster has {there}"
            if is_ours and (wanted > total.get("CPU", 0) or plan.job.nodes > 1):
                raise EnvironmentLacks(f"the run needs {words}: ask for less, or give a larger cluster's --address")
            print_status(f"waiting for {words}")


def _make_actors(ray: Any, group: Any, plan: Plan) -> list[Any]:
    options = {"num_cpus": plan.job.cpus_per_task or 1, "num_gpus": plan.job.gpus_per_task, "max_restarts": 0}
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    return [
        ray.remote(RayRank)
        .options(**options, scheduling_strategy=strategy(group, placement_group_bundle_index=rank.node_rank))
        .remote()
        for rank in plan.ranks()
    ]


def _start(ray: Any, actors: list[Any], plan: Plan) -> None:
    host, port = ray.get(actors[0].find_meeting_point.remote(is_one_host=plan.job.nodes == 1))
    meeting = {"MASTER_ADDR": host, "MASTER_PORT": str(port)} if len(actors) > 1 else {}
    words = ["train", *plan.job.words]
    failures = ray.get(
        [
            actor.start.remote(words, {**plan.environment(rank), **meeting}, str(plan.job.folder))
            for actor, rank in zip(actors, plan.ranks(), strict=True)
        ]
    )
    for rank, why in enumerate(failures):
        if why is not None:
            raise EnvironmentLacks(f"rank {rank} cannot be started on its node: {why}; all nodes need the same folders")


def _watch(ray: Any, actors: list[Any], received: list[int]) -> int:
    """Forward output and signals until all ranks have ended; return the first exit code that was not 0."""
    codes: dict[int, int] = {}
    first, num_sent = 0, 0
    deadline: float | None = None
    while len(codes) < len(actors):
        for number in received[num_sent:]:
            ray.get([actor.send.remote(number) for actor in actors])
            num_sent += 1
        for rank, actor in enumerate(actors):
            if rank in codes:
                continue
            look = _look(ray, actor, rank)
            _pass_on(look)
            if look.exit_code is not None:
                codes[rank] = look.exit_code
                first = first or look.exit_code
        if first and deadline is None:
            deadline = time.monotonic() + _GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            break  # the others hang, and are killed with their actors
        time.sleep(_LOOK_SECONDS)
    return first


def _look(ray: Any, actor: Any, rank: int) -> Look:
    try:
        look: Look = ray.get(actor.look.remote())
    except ray.exceptions.RayActorError as error:
        reason = " ".join(str(error).split())[:300]
        return Look(exit_code=1, out=b"", err=f"dure: Ray lost the actor of rank {rank}: {reason}\n".encode())
    return look


def _pass_on(look: Look) -> None:
    for is_error, data in ((False, look.out), (True, look.err)):
        if data:
            pass_on(data.decode(errors="replace"), is_error=is_error)


def _judge(code: int, plan: Plan) -> None:
    """Raise an error for the exit code of the ranks; their own messages have given the reason."""
    if code in STOP_ENDS:
        raise Interrupted(
            f"stopped; continue with `dure train --resume {shell_word(plan.job.run)}`, or submit that",
            stop_exit_code(STOP_ENDS[code]),
        )
    if code:
        how = f"ended by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        raise WorkerFailed(f"a rank {how}; what it said is above", code if code > 0 else 1)


@contextmanager
def _keeping_signals() -> Iterator[list[int]]:
    """Collect stop signals for the ranks, which write a checkpoint; this process continues."""
    received: list[int] = []

    def keep(number: int, frame: FrameType | None) -> None:
        received.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, keep) for number in handled_signals()}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
