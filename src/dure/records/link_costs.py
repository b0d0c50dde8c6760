"""Costs of this machine's links, as measured by `dure bench`: alpha (seconds) and beta (seconds per byte)."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dure.documents import read_json
from dure.errors import Misuse
from dure.own_files import PRIVATE, open_own

VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkCost:
    """Cost of one collective over one link: `alpha_seconds + beta_seconds_per_byte * bytes` (Hockney 1994)."""

    link: str
    """Type of the link: `shared memory`, `loopback`, `network` or a GPU link."""
    device: str
    """`cpu`, or the accelerator's name."""
    collective: str
    algorithm: str
    world_size: int
    alpha_seconds: float
    beta_seconds_per_byte: float
    relative_error: float
    """Median of |fitted - measured| / measured over the sizes, which says how reliable the straight line is."""
    num_sizes: int
    measured_at: float
    """Time of the measurement in seconds since the epoch."""

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """Key by which a newer measurement replaces this one."""
        return self.link, self.device, self.collective, self.algorithm, self.world_size


def default_path() -> Path:
    """Return the path of this machine's record, by the XDG rules."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local/state") / "dure/machine.json"


def read_costs(path: Path) -> list[LinkCost]:
    """Return the recorded costs; empty if there is no record yet.

    Raises:
        Misuse: The file is not a machine record.
    """
    try:
        data = read_json(path)
        if data["version"] != VERSION:
            raise Misuse(f"{path} is a machine record of version {data['version']}, and this dure reads {VERSION}")
        return [LinkCost(**entry) for entry in data["links"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Misuse(
            f"{path} is no machine record ({type(error).__name__}): name another --record, or remove it"
        ) from error


def write_costs(path: Path, costs: Sequence[LinkCost]) -> None:
    """Add measurements to the record, replacing older ones of the same link and collective.

    Raises:
        Misuse: The file is not a machine record, or cannot be written.
    """
    merged: dict[Any, LinkCost] = {cost.key: cost for cost in [*read_costs(path), *costs]}
    text = json.dumps({"version": VERSION, "links": [asdict(cost) for cost in merged.values()]}, indent=2)
    new = path.with_name(f".{path.name}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=PRIVATE)
        with open(new, "w", encoding="utf-8", opener=open_own) as file:
            file.write(text + "\n")
        new.replace(path)
    except OSError as error:
        raise Misuse(f"{path} cannot be written ({error.strerror}): name another --record") from None


def fit_cost(num_bytes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Fit `alpha + beta * bytes` to measured times; return alpha, beta and the median relative error.

    The fit minimises the relative error, so that 8 bytes count as much as 256 MB. Neither result is negative.

    Args:
        num_bytes: Size of each message, with at least two different sizes.
        seconds: Time of each message.
    """
    import numpy as np

    sizes, times = np.asarray(num_bytes, dtype=float), np.asarray(seconds, dtype=float)
    rows = np.stack([np.ones_like(sizes), sizes], axis=1) / times[:, None]
    (alpha, beta), *_ = np.linalg.lstsq(rows, np.ones_like(times), rcond=None)
    if beta < 0:
        alpha, beta = float(1 / np.mean(1 / times)), 0.0
    elif alpha < 0:
        alpha, beta = 0.0, float(np.sum(sizes / times) / np.sum((sizes / times) ** 2))
    error = float(np.median(np.abs((alpha + beta * sizes) / times - 1)))
    return float(alpha), float(beta), error
