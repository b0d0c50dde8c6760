"""Cases of the campaign, drawn from a seed: one run, and one fault that happens to it."""

import random
import signal
from dataclasses import dataclass

from dure.strategies.table import STRATEGIES

SAMPLES, BATCH, EPOCHS, EVAL_SAMPLES = 61, 8, 3, 30
STEPS = EPOCHS * -(-SAMPLES // BATCH)
STEP_SECONDS = 0.015
"""Pause in each training loss."""
HANG_AFTER_SECONDS = 2.0
"""Limit for silence in runs that hang: in a shorter one a busy machine may not even import what their end needs."""

OPTIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    "ddp": ((), ("--backend", "gloo"), ("--check-replicas-every", "2")),
    "ring_ddp": ((), ("--comm", "ring"), ("--comm", "tree")),
    "naive_ddp": ((), ("--comm", "naive")),
    "fsdp": ((), ("--no-fsdp.reshard-after-forward",)),
    "pipeline": ((), ("--pipeline.schedule", "gpipe")),
    "averaging": (("--averaging.average-every", "4"),),
    "diloco": (("--diloco.average-every", "4"),),
    "parameter_server": (
        (),
        ("--parameter-server.servers", "1"),
        ("--no-parameter-server.sync",),
        ("--no-parameter-server.sync", "--parameter-server.staleness", "2"),
        ("--parameter-server.transport", "rpc"),
        ("--parameter-server.transport", "rpc", "--no-parameter-server.sync"),
    ),
}
"""Settings of strategies that change how ranks work together; one is drawn."""

ADD_IN_ANY_ORDER = ("dp", "balanced_dp")
"""Strategies whose threads add gradients up in the order in which they are ready: equal to rounding only."""
FIRST_RANK_COMPUTES = ("model_parallel", "rpc_model")
"""Strategies in which only rank 0 calls the loss."""
CALL_UNEQUALLY = ("balanced_dp",)
"""Strategies whose devices call the loss unequally often when a microbatch is halved, and which refuse a task that
counts its calls then, as this one does."""
DRAW_OTHERWISE = ("model_parallel", "pipeline", "rpc_model", *ADD_IN_ANY_ORDER)
"""Strategies whose dropout is not the same in each run."""
ONE_HOST = ("single", "dp", "balanced_dp", "model_parallel", "parameter_server")

CRASHES = (signal.SIGKILL, signal.SIGSEGV)
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
IN_THE_TASK = {"raise": "raise", "out of memory": "out_of_memory", "hang": "hang"}
"""Faults that the task itself makes, by its own names for them."""
KINDS = {
    **{number.name: 3 for number in CRASHES},
    **{number.name: 2 for number in STOPS},
    "SIGSTOP": 3,
    "raise": 1,
    "out of memory": 1,
    "hang": 1,
    "full disk": 2,
}
"""Kinds of faults, and how often each is drawn."""
TARGETS = ("rank", "rank", "all ranks", "two ranks", "rank again", "server", "loader", "supervisor", "everybody")
"""Receivers of signals; `everybody` is the process group, as when a terminal sends it."""
ON_HOSTS = ("SIGKILL rank", "SIGKILL everybody", "SIGTERM supervisor", "SIGINT supervisor", "SIGUSR1 rank", "cut cable")
MOMENTS = ("start", "step", "step", "step", "evaluation", "saving", "leaving")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault that happens to a run."""

    kind: str
    """Name of a signal, or one of `KINDS`."""
    target: str
    rank: int
    """Rank that is meant where the target is one, or its loader; of servers, the index among them."""
    moment: str
    fraction: float
    """Part of the moment's usual time that passes before it happens, in [0, 1)."""
    seconds: float
    """Duration, of faults that have one: well below or above `HANG_AFTER_SECONDS`."""

    @property
    def signal(self) -> signal.Signals | None:
        """Number of the signal, or None if it is none."""
        return getattr(signal, self.kind) if self.kind.startswith("SIG") else None

    def __str__(self) -> str:
        """Describe it in the words of the table."""
        return f"{self.kind} to {self.target}" if self.signal else self.kind


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run with a fault."""

    number: int
    strategy: str
    options: tuple[str, ...]
    nproc: int
    """Devices of all hosts."""
    start: str
    num_workers: int
    microbatch_size: int | None
    checkpoint_every: int
    checkpoint_async: bool
    snapshot_every: int | None
    max_restarts: int
    adam: bool
    dropout: float
    nnodes: str
    """`1`, or on two hosts `2` (both are needed) or `1:2`."""
    fault: Fault
    resumed_as: tuple[str, int] | None
    """Strategy and `nproc` with which the run is resumed; None for the same."""

    @property
    def is_on_hosts(self) -> bool:
        """True if the run is on two hosts."""
        return self.nnodes != "1"

    @property
    def num_servers(self) -> int:
        """Processes without a device."""
        if self.strategy != "parameter_server":
            return 0
        flag = "--parameter-server.servers"
        return int(self.options[self.options.index(flag) + 1]) if flag in self.options else self.nproc

    @property
    def num_processes(self) -> int:
        """Processes of the run that train or serve."""
        return 1 if STRATEGIES[self.strategy].one_process else self.nproc + self.num_servers

    @property
    def is_synchronous(self) -> bool:
        """True if ranks take every step together, so that snapshots in memory are taken."""
        return STRATEGIES[self.strategy].is_exact and "--no-parameter-server.sync" not in self.options

    def __str__(self) -> str:
        """Describe all that was drawn in one line."""
        fault = self.fault
        more = {
            f" x {self.nproc}": True,
            f" {' '.join(self.options)}": self.options,
            f" on {self.nnodes} hosts": self.is_on_hosts,
            f" microbatch {self.microbatch_size}": self.microbatch_size,
            f" loaders {self.num_workers}": self.num_workers,
            f" {self.start}": self.start != "fork",
            f" restarts {self.max_restarts}": True,
            f" checkpoints every {self.checkpoint_every}": True,
            f"; {fault.kind} to {fault.target} {fault.rank} in {fault.moment} {fault.fraction:.2f}": True,
            f" for {fault.seconds:.1f} s": True,
            f"; resumed as {self.resumed_as}": self.resumed_as,
        }
        return self.strategy + "".join(text for text, is_so in more.items() if is_so)


def draw_case(seed: int, number: int, *, can_have_hosts: bool, can_mount: bool) -> Case:
    """Draw one case; the same seed and number give the same case, whatever was drawn before.

    Args:
        seed: The campaign's.
        number: The case's.
        can_have_hosts: True if network namespaces can be made; elsewhere other cases are drawn.
        can_mount: True if a small disk can be mounted; elsewhere other cases are drawn.
    """
    draw = random.Random(f"{seed}/{number}")
    strategy = draw.choice(list(STRATEGIES))
    info = STRATEGIES[strategy]
    options = draw.choice(OPTIONS.get(strategy, ((),)))
    nnodes = draw.choice(("2", "1:2")) if draw.random() < 0.12 else "1"
    if strategy in ONE_HOST or not can_have_hosts or "gloo" in options:
        nnodes = "1"
    nproc = draw_nproc(draw, strategy)
    if nnodes != "1":
        nproc = 2
    num_processes = 1 if info.one_process else nproc
    has_servers = bool(info.extra_processes)
    fault, num_workers = draw_fault(draw, strategy, num_processes, has_servers, nnodes != "1", can_mount)
    others = [name for name, other in STRATEGIES.items() if other.is_exact and not OPTIONS.get(name)]
    other = draw.choice(others)
    is_resumed_otherwise = info.is_exact and not options and nnodes == "1" and draw.random() < 0.3
    # two settings and no more: each has an undisturbed run of its own, which cases share
    adam = draw.random() < 0.5
    has_dropout = adam and strategy not in DRAW_OTHERWISE and not is_resumed_otherwise and nnodes == "1"
    return Case(
        number=number,
        strategy=strategy,
        options=options,
        nproc=nproc,
        start="spawn" if draw.random() < 0.04 and nnodes == "1" else "fork",
        num_workers=num_workers,
        microbatch_size=None if adam else 2,
        checkpoint_every=draw.choice((8, 24, 1000)),
        checkpoint_async=draw.random() < 0.8,
        snapshot_every=draw.choice((None, 1)),
        max_restarts=draw.choice((0, 3, 3)),
        adam=adam,
        dropout=0.2 if has_dropout else 0.0,
        nnodes=nnodes,
        fault=fault,
        resumed_as=(other, draw_nproc(draw, other)) if is_resumed_otherwise else None,
    )


def draw_nproc(draw: random.Random, strategy: str) -> int:
    """Draw a number of devices that a strategy can use."""
    return draw.choice((2, 3)) if STRATEGIES[strategy].many_devices else 1


def draw_fault(
    draw: random.Random, strategy: str, num_ranks: int, has_servers: bool, is_on_hosts: bool, can_mount: bool
) -> tuple[Fault, int]:
    """Draw a fault that can happen to such a run, and the number of loader processes.

    Args:
        draw: The case's random numbers.
        strategy: Name in the table.
        num_ranks: Ranks that have a device.
        has_servers: True if there are processes without a device, too.
        is_on_hosts: True if the run is on two hosts.
        can_mount: True if the disk may be full.
    """
    left_out = {"full disk"} if not can_mount else set()
    if strategy in CALL_UNEQUALLY:
        left_out.add("out of memory")
    kinds = {kind: weight for kind, weight in KINDS.items() if kind not in left_out}
    (kind,) = draw.choices(list(kinds), list(kinds.values()))
    target = draw.choice([name for name in TARGETS if has_servers or name != "server"])
    moment = draw.choice(MOMENTS)
    if is_on_hosts:
        kind, target = draw.choice(ON_HOSTS).split()
        moment = "step"
    num_workers = draw.choice((1, 2)) if target == "loader" else draw.choice((0, 0, 0, 1))
    if kind in IN_THE_TASK or kind == "full disk":
        target, moment = "rank", "step"
    if target == "loader" and moment in ("start", "leaving"):
        moment = "step"
    rank = draw.randrange(num_ranks)
    if kind in IN_THE_TASK and strategy in FIRST_RANK_COMPUTES:
        rank = 0
    seconds = draw.choice((draw.uniform(0.05, 0.5), draw.uniform(2.3, 4.0)))
    fault = Fault(kind=kind, target=target, rank=rank, moment=moment, fraction=draw.random(), seconds=seconds)
    return fault, num_workers
