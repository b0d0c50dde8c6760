"""`dure horovodrun`: horovodrun's flags for `dure run --as horovod`."""

import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dure.errors import Misuse, SpecInvalid
from dure.terminal import one_line, print_status, print_text

VARIABLES = {
    "fusion-threshold-mb": "HOROVOD_FUSION_THRESHOLD",
    "cycle-time-ms": "HOROVOD_CYCLE_TIME",
    "cache-capacity": "HOROVOD_CACHE_CAPACITY",
    "timeline-filename": "HOROVOD_TIMELINE",
    "stall-check-warning-time-seconds": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "stall-check-shutdown-time-seconds": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "gloo-timeout-seconds": "HOROVOD_GLOO_TIMEOUT_SECONDS",
    "start-timeout": "HOROVOD_START_TIMEOUT",
}
"""Variables that flags with a value set for the ranks."""

SWITCHES = {
    "timeline-mark-cycles": ("HOROVOD_TIMELINE_MARK_CYCLES", "1"),
    "no-timeline-mark-cycles": ("HOROVOD_TIMELINE_MARK_CYCLES", "0"),
    "no-stall-check": ("HOROVOD_STALL_CHECK_DISABLE", "1"),
    "stall-check": ("HOROVOD_STALL_CHECK_DISABLE", "0"),
}
"""Variables that flags without a value set for the ranks."""

WITHOUT_EFFECT = {
    "gloo": "ranks always meet without MPI",
    "verbose": "dure says what it does when something is wrong",
    "disable-cache": "there are no checks before the start that could be kept",
    "tcp": "sockets are what gloo uses",
    "log-with-timestamp": "lines of dure have no time",
    "log-without-timestamp": "lines of dure have no time",
    "log-hide-timestamp": "lines of dure have no time",
    "no-log-hide-timestamp": "lines of dure have no time",
    "no-autotune": "nothing is tuned",
    "no-hierarchical-allreduce": "gloo and NCCL choose their algorithms",
    "no-hierarchical-allgather": "gloo and NCCL choose their algorithms",
    "no-torus-allreduce": "gloo and NCCL choose their algorithms",
    "no-mpi-threads-disable": "there is no MPI",
}
"""Flags without a value that have no effect, each with the reason."""

REFUSED = {
    "mpi": "there is no MPI here: leave it out, and ranks meet by themselves",
    "jsrun": "there is no MPI here: leave it out, or let jsrun start `dure run --as horovod`",
    "mpi-args": "there is no MPI here: leave it out",
    "mpi-threads-disable": "there is no MPI here: leave it out",
    "binding-args": "dure binds no rank: let the script do it, by os.sched_setaffinity",
    "thread-affinity": "dure binds no thread: leave it out",
    "num-nccl-streams": "torch chooses NCCL's streams: leave it out",
    "network-interface": "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME instead",
    "network-interfaces": "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME instead",
    "output-filename": "logs are in the run's folder: look there, at runs/NAME/logs",
    "prefix-output-with-timestamp": "lines are shown with their rank in front: leave it out",
    "config-file": "give its settings as flags",
    "ssh-port": "dure starts no ranks on other hosts: start the command on each with `dure run --nnodes`",
    "ssh-identity-file": "dure starts no ranks on other hosts: start the command on each with `dure run --nnodes`",
    "log-level": "dure has no levels of messages: leave it out",
    "hierarchical-allreduce": "gloo and NCCL choose their algorithms: leave it out",
    "hierarchical-allgather": "gloo and NCCL choose their algorithms: leave it out",
    "torus-allreduce": "gloo and NCCL choose their algorithms: leave it out",
    "autotune": "nothing is tuned: set --fusion-threshold-mb and --cycle-time-ms yourself",
    "autotune-log-file": "nothing is tuned: leave it out",
    "autotune-warmup-samples": "nothing is tuned: leave it out",
    "autotune-steps-per-sample": "nothing is tuned: leave it out",
    "autotune-bayes-opt-max-samples": "nothing is tuned: leave it out",
    "autotune-gaussian-process-noise": "nothing is tuned: leave it out",
    "host-discovery-script": "hosts of a script do not come and go: give -np, and --max-restarts to `dure run`",
    "slots-per-host": "it belongs to --host-discovery-script, which dure has not: leave it out",
    "elastic-timeout": "it belongs to --host-discovery-script, which dure has not: leave it out",
    "blacklist-cooldown-range": "it belongs to --host-discovery-script, which dure has not: leave it out",
}
"""Flags that are refused, with their replacements."""

_SHORT = {
    "np": "num-proc",
    "H": "hosts",
    "hostfile": "hostfile",
    "p": "ssh-port",
    "i": "ssh-identity-file",
    "cb": "check-build",
    "v": "version",
    "h": "help",
    "prefix-timestamp": "prefix-output-with-timestamp",
    "min-num-proc": "min-np",
    "max-num-proc": "max-np",
}
_OWN = ("num-proc", "hosts", "hostfile", "min-np", "max-np", "reset-limit")
_ALONE = ("check-build", "version", "help")
_LOCAL = ("localhost", "127.0.0.1", "::1")
_PYTHON = re.compile(r"(.*/)?python(\d+(\.\d+)?)?")


@dataclass
class _Asked:
    """Settings that the flags ask for."""

    num_ranks: int | None = None
    min_ranks: int | None = None
    max_ranks: int | None = None
    hosts: str | None = None
    max_restarts: int = 0
    variables: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    alone: str | None = None
    """Flag after which nothing is run."""


def read(tokens: list[str]) -> tuple[list[str], Callable[..., None]]:
    """Return the verb alone, and the command with the flags and the script, which are read here as horovodrun does."""
    words = tokens[1:]

    def command() -> None:
        _run(words)

    command.__doc__ = horovodrun.__doc__
    is_help = any(_name(word) == "help" for word in _flags_of(words))
    return [tokens[0], *(["--help"] if is_help else [])], command


def horovodrun() -> None:
    """Run a Horovod script on many ranks: the flags of horovodrun.

    dure horovodrun -np 2 python train.py ARGUMENTS is `dure run --as horovod --nproc 2 train.py ARGUMENTS`. Known are
    -np, -H, --hostfile, --start-timeout, --timeline-filename, --timeline-mark-cycles, --fusion-threshold-mb,
    --cycle-time-ms, --cache-capacity, --min-np, --max-np, --reset-limit, --check-build, --no-stall-check,
    --stall-check-warning-time-seconds, --stall-check-shutdown-time-seconds, --gloo-timeout-seconds and --gloo; a
    message names the replacement of every other one.
    """


def _run(words: Sequence[str]) -> None:
    asked, script = _read_flags(words)
    if asked.faults:
        raise SpecInvalid(asked.faults)
    if asked.alone == "check-build":
        print_text(_build())
        return
    if asked.alone == "version":
        from dure.compat.horovod import __version__

        print_text(__version__)
        return
    target, is_module, arguments = _script_of(script)
    for note in asked.notes:
        print_status(note)
    os.environ.update(asked.variables)
    from dure.api.script import ScriptSettings, run_script

    run_script(
        ScriptSettings(
            script=target,
            arguments=arguments,
            is_module=is_module,
            nproc=str(_num_ranks(asked)),
            max_restarts=asked.max_restarts,
            face="horovod",
        )
    )


def _name(word: str) -> str:
    bare = word.partition("=")[0].lstrip("-").replace("_", "-")
    return _SHORT.get(bare, bare)


def _takes_value(name: str) -> bool:
    return not (name in SWITCHES or name in WITHOUT_EFFECT or name in _ALONE or name in _REFUSED_SWITCHES)


_REFUSED_SWITCHES = (
    "mpi", "jsrun", "mpi-threads-disable", "prefix-output-with-timestamp", "hierarchical-allreduce",
    "hierarchical-allgather", "torus-allreduce", "autotune",
)  # fmt: skip


def _flags_of(words: Sequence[str]) -> Iterator[str]:
    """Return the flags before the command."""
    position = 0
    while position < len(words) and words[position].startswith("-") and words[position] != "--":
        yield words[position]
        position += 1 + ("=" not in words[position] and _takes_value(_name(words[position])))


def _read_flags(words: Sequence[str]) -> tuple[_Asked, list[str]]:
    asked = _Asked()
    position = 0
    while position < len(words) and words[position].startswith("-") and words[position] != "--":
        word = words[position]
        name, (_, is_one, value) = _name(word), word.partition("=")
        position += 1
        if not is_one and _takes_value(name):
            if name in (*_OWN, *VARIABLES) and position >= len(words):
                asked.faults.append(f"flag {one_line(word)} has no value: see `dure horovodrun --help`")
                break
            value = words[position] if position < len(words) else ""
            position += 1
        _take(asked, word.partition("=")[0], name, value)
    return asked, [*words[position + (words[position : position + 1] == ["--"]) :]]


def _take(asked: _Asked, flag: str, name: str, value: str) -> None:
    """Note one flag, or a fault."""
    if name in REFUSED:
        asked.faults.append(f"{flag} is a flag of horovodrun; {REFUSED[name]}")
    elif name in WITHOUT_EFFECT:
        if name not in ("gloo", "verbose"):
            asked.notes.append(f"{flag} of horovodrun has no effect: {WITHOUT_EFFECT[name]}")
    elif name in SWITCHES:
        variable, setting = SWITCHES[name]
        asked.variables[variable] = setting
    elif name in _ALONE:
        asked.alone = name
    elif name == "timeline-filename":
        asked.variables[VARIABLES[name]] = value
    elif name == "hosts":
        asked.hosts = value
    elif name == "hostfile":
        asked.hosts = _hosts_in(asked, value)
    elif name in VARIABLES:
        _take_number(asked, flag, name, value)
    elif name in _OWN:
        if not re.fullmatch(r"\d{1,6}", value) or int(value) < (name != "reset-limit"):
            asked.faults.append(f"{flag} is {one_line(value)!r} but must be a whole number above 0")
            return
        number = int(value)
        if name == "num-proc":
            asked.num_ranks = number
        elif name == "min-np":
            asked.min_ranks = number
        elif name == "max-np":
            asked.max_ranks = number
        else:
            asked.max_restarts = number
    else:
        asked.faults.append(f"{one_line(flag)} is no flag of horovodrun: `dure horovodrun --help` lists those known")


def _take_number(asked: _Asked, flag: str, name: str, value: str) -> None:
    if not re.fullmatch(r"\d{1,9}(\.\d+)?", value):
        asked.faults.append(f"{flag} is {one_line(value)!r} but must be a number of at least 0")
    elif name == "fusion-threshold-mb":
        asked.variables[VARIABLES[name]] = str(int(float(value) * 2**20))
    else:
        asked.variables[VARIABLES[name]] = value


def _hosts_in(asked: _Asked, path: str) -> str | None:
    """Return the hosts of a file of lines such as `host1 slots=2`, in the form of -H."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        asked.faults.append(f"hostfile {one_line(path)} cannot be read: {error}")
        return None
    found = []
    for line in filter(None, (line.partition("#")[0].strip() for line in lines)):
        match = re.fullmatch(r"(\S+)(?:\s+slots\s*=\s*(\d+))?", line)
        if match is None:
            asked.faults.append(
                f"hostfile {one_line(path)} has the line {one_line(line)!r} but each must be HOST slots=N"
            )
            return None
        found.append(f"{match[1]}:{match[2] or 1}")
    return ",".join(found)


def _num_ranks(asked: _Asked) -> int:
    """Return the number of ranks on this host, which is the only one.

    Raises:
        SpecInvalid: Hosts are others, or have fewer slots.
    """
    faults = []
    entries = [] if not asked.hosts else asked.hosts.split(",")
    slots: dict[str, int] = {}
    for entry in entries:
        host, _, room = entry.rpartition(":") if ":" in entry else (entry, "", "1")
        if not host or not re.fullmatch(r"[1-9]\d{0,5}", room):
            faults.append(f"-H has {one_line(entry)!r} but each host must be NAME:SLOTS")
        else:
            slots[host] = slots.get(host, 0) + int(room)
    others = [host for host in slots if host not in (*_LOCAL, os.uname().nodename)]
    if others:
        faults.append(
            f"-H names {one_line(others[0])}, but dure starts no ranks on other hosts: start the command on each with "
            "`dure run --as horovod --nnodes`"
        )
    number = asked.num_ranks or asked.min_ranks or sum(slots.values())
    if not number:
        faults.append("the number of ranks is missing: give -np 2")
    elif slots and not others and number > sum(slots.values()):
        faults.append(f"-np is {number} but -H has {sum(slots.values())} slots: raise the slots, or lower -np")
    low, high = asked.min_ranks or number, asked.max_ranks or number
    if number and not low <= number <= high:
        faults.append(f"-np is {number} but must be from --min-np {low} to --max-np {high}")
    if faults:
        raise SpecInvalid(faults)
    return number


def _script_of(words: Sequence[str]) -> tuple[str, bool, tuple[str, ...]]:
    """Return a script or module, whether it is a module, and its arguments.

    Raises:
        Misuse: The command starts no Python script.
    """
    rest = [*words]
    if rest and _PYTHON.fullmatch(rest[0]):
        del rest[0]
        while rest[:1] == ["-u"]:  # ranks are never buffered longer than a line
            del rest[0]
    is_module = rest[:1] == ["-m"]
    if is_module:
        del rest[0]
    if not rest:
        raise Misuse("no script is given: write `dure horovodrun -np 2 python train.py ARGUMENTS`")
    if rest[0].startswith("-") or not (is_module or rest[0].endswith(".py") or Path(rest[0]).is_file()):
        shown = shlex.join(words[:2])
        raise Misuse(f"the command is {one_line(shown)} but must be a Python script: write `python train.py ARGUMENTS`")
    return rest[0], is_module, tuple(rest[1:])


def _build() -> str:
    """Return what horovodrun --check-build shows, for this torch."""
    from dure.compat.horovod import __version__
    from dure.compat.horovod.common import basics

    def mark(is_there: Any) -> str:
        return "[X]" if is_there else "[ ]"

    return "\n".join(
        [
            f"Horovod v{__version__}, by dure over torch.distributed:",
            "",
            "Available Frameworks:",
            "    [ ] TensorFlow",
            "    [X] PyTorch",
            "    [ ] MXNet",
            "",
            "Available Controllers:",
            f"    {mark(basics.mpi_built())} MPI",
            f"    {mark(basics.gloo_built())} Gloo",
            "",
            "Available Tensor Operations:",
            f"    {mark(basics.nccl_built())} NCCL",
            f"    {mark(basics.ddl_built())} DDL",
            f"    {mark(basics.ccl_built())} CCL",
            f"    {mark(basics.mpi_built())} MPI",
            f"    {mark(basics.gloo_built())} Gloo",
        ]
    )
