"""Flags of torchrun in `dure run`: most have the same meaning, the others come with a message on their replacement."""

from collections.abc import Iterator, Sequence

from dure.errors import SpecInvalid

SAME = {
    "nnodes": "--nnodes",
    "nproc-per-node": "--nproc",
    "node-rank": "--node-rank",
    "max-restarts": "--max-restarts",
    "module": "--module",
    "m": "--module",
    "role": "--role",
    "start-method": "--start",
    "rdzv-endpoint": "--rendezvous",
    "local-ranks-filter": "--local-ranks-filter",
}
"""Names of our flags for torchrun's."""

WITHOUT_EFFECT = {
    "standalone": "one node meets by itself",
    "rdzv-backend": "ranks meet at a store of dure's own",
    "rdzv-id": "a run is known by --name, and nodes know each other by --secret-file",
    "rdzv-conf": "how long nodes wait for each other is --rendezvous-timeout",
    "local-addr": "the address is found from --rendezvous",
    "monitor-interval": "the end of a rank is seen at once",
    "event-log-handler": "events are in runs/NAME/events.jsonl",
    "run-path": "a script is always run so",
    "redirects": "what ranks print is always shown and kept in runs/NAME/logs",
    "r": "what ranks print is always shown and kept in runs/NAME/logs",
    "tee": "what ranks print is always shown and kept in runs/NAME/logs",
    "t": "what ranks print is always shown and kept in runs/NAME/logs",
}
"""Flags of torchrun without effect, each with the reason why it is not needed."""

REFUSED = {
    "log-dir": "logs are in the run's folder: use --runs-dir DIR and --name NAME, for DIR/NAME/logs",
    "no-python": "dure run runs Python alone: start the program from a script, by subprocess",
    "logs-specs": "logs are in the run's folder: look there, at runs/NAME/logs",
    "duplicate-stdout-filters": "logs are in the run's folder: search runs/NAME/logs",
    "duplicate-stderr-filters": "logs are in the run's folder: search runs/NAME/logs",
    "log-line-prefix-template": "lines are shown with their rank in front: use --no-prefix for none",
    "print-completion": "it completes torchrun's own flags: leave it out",
    "numa-binding": "dure run binds no rank: let the script do it, by os.sched_setaffinity and LOCAL_RANK",
    "signals-to-handle": "SIGINT, SIGTERM, SIGHUP and SIGUSR1 are passed on to all ranks: leave it out",
    "shutdown-timeout": "a rank has 30 s after a signal, and as long as it likes until then: leave it out",
    "virtual-local-rank": "every rank sees all devices: let the script take device LOCAL_RANK, and leave it out",
}
"""Flags that are refused, with their replacements."""

TRUTHS = frozenset({"standalone", "module", "m", "no-python", "run-path", "virtual-local-rank"})
"""Flags without a value."""

_TOGETHER = ("master-addr", "master-port")
"""Address in two flags, which is one flag of ours. It was never more than one node's own affair."""
_AUTO = "--nproc-per-node auto is one rank without an accelerator, where torchrun starts one per core: that is cpu here"
_METHODS = ("fork", "spawn")
_MOST_LETTERS_OF_SHORT = 1


def known() -> frozenset[str]:
    """Return the names of all flags that are recognised."""
    return frozenset((*SAME, *WITHOUT_EFFECT, *REFUSED, *_TOGETHER))


def bare_name(flag: str) -> str:
    """Return a flag's name without leading dashes, and with dashes for underscores."""
    return flag.partition("=")[0].lstrip("-").replace("_", "-")


def translated(flags: Sequence[tuple[str, str | None]]) -> tuple[list[str], list[str]]:
    """Return our flags for those given, and a line for each flag without effect or of another meaning.

    Args:
        flags: Flags before the script as written by the user, each with its value or None.

    Raises:
        SpecInvalid: Flags have a meaning that `dure run` does not support.
    """
    ours: list[str] = []
    notes: list[str] = []
    faults: list[str] = []
    meeting = {bare_name(flag): value for flag, value in flags if bare_name(flag) in _TOGETHER}
    is_one_node = all(value in (None, "1", "1:1") for flag, value in flags if bare_name(flag) == "nnodes")
    for flag, value in flags:
        name = bare_name(flag)
        if name in REFUSED:
            faults.append(f"{_shown(name)} is a flag of torchrun; {REFUSED[name]}")
        elif name in WITHOUT_EFFECT:
            if name == "rdzv-backend" and value not in ("static", "c10d"):
                faults.append(f"--rdzv-backend is {value} but {WITHOUT_EFFECT[name]}: leave it out")
            notes.append(f"{_shown(name)} of torchrun has no effect: {WITHOUT_EFFECT[name]}")
        elif name in (*_TOGETHER, "rdzv-endpoint") and is_one_node:
            notes.append(f"{_shown(name)} of torchrun has no effect: one node meets by itself, on a free port")
        elif name in _TOGETHER:
            continue
        elif name == "start-method" and value not in _METHODS:
            faults.append(f"--start-method is {value} but must be fork or spawn")
        else:
            if (name, value) == ("nproc-per-node", "auto"):
                notes.append(_AUTO)
            ours += _as_ours(flag, name, value)
    if meeting and not is_one_node:
        if len(meeting) < len(_TOGETHER):
            faults.append("--master-addr and --master-port go together: give both, or --rendezvous ADDRESS:PORT")
        else:
            ours += ["--rendezvous", f"{meeting['master-addr']}:{meeting['master-port']}"]
    if faults:
        raise SpecInvalid(faults)
    return ours, list(dict.fromkeys(notes))


def _as_ours(flag: str, name: str, value: str | None) -> Iterator[str]:
    if name == "nnodes" and value == "1:1":  # torchrun's own default
        value = "1"
    is_short = not flag.startswith("--")
    yield SAME.get(name, flag if is_short else f"--{name}")
    if value is not None:
        yield value


def _shown(name: str) -> str:
    return f"-{name}" if len(name) <= _MOST_LETTERS_OF_SHORT else f"--{name}"
