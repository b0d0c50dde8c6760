"""`dure diff`: where two runs part."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from dure.cli.output import JsonFlag, print_json
from dure.errors import Misuse, RunsDiffer

if TYPE_CHECKING:
    from dure.difference import Difference, WeightsDifference

MOST_WEIGHTS = 8
"""Positions that are shown; `--json` has all."""


def read(tokens: list[str]) -> tuple[list[str], Callable[..., None]]:
    """Return the tokens and the verb."""
    return tokens, diff


def diff(
    first: Annotated[Path, Parameter(help="a run's folder")],
    second: Annotated[Path, Parameter(help="another run's folder")],
    /,
    *,
    tolerance: Annotated[float, Parameter(help="relative difference that counts as none")] = 0.0,
    json: JsonFlag = False,
) -> None:
    """Show where two runs part: settings, samples, losses, weights. Ends with 4 if they do."""
    if not 0 <= tolerance < 1:
        raise Misuse(f"tolerance is {tolerance:g} but must be a number of at least 0 and below 1")
    from dure.difference import compare

    found = compare(first, second, tolerance=tolerance)
    parted = found.part_at(tolerance)
    if json:
        print_json({**found.to_json(), "tolerance": tolerance, "part_at": parted})
    else:
        print("\n".join(_told(found, tolerance)))
    if parted is not None:
        hint = "" if tolerance else " (what differs by rounding alone is let pass by --tolerance 1e-6)"
        raise RunsDiffer(f"the runs part: {parted}{hint}")


def _told(found: "Difference", tolerance: float) -> Iterator[str]:
    for number, (name, both) in enumerate(found.settings.items()):
        yield f"{'settings' if number == 0 else '':10}{name}: {both[0]} | {both[1]}"
    more = " | ".join(str(count) for count in found.steps_of_one)
    yield f"{'steps':10}{found.steps} in both" + (f", further {more}" if any(found.steps_of_one) else "")
    kind = "the same in every step" if found.has_samples else "as many in every step (which ones: --record-samples)"
    other = f"not the same from step {found.samples_from} on"
    yield f"{'samples':10}{kind if found.samples_from is None else other}"
    same = "the same, bit by bit" if tolerance == 0 else f"the same up to {tolerance:g}"
    if found.losses is None:
        yield f"{'losses':10}{same}"
    else:
        values = " | ".join(str(loss) for loss in found.losses.losses)
        yield f"{'losses':10}first differ at step {found.losses.step}: {values} (relative {found.losses.relative:.1e})"
    if not found.weights:
        yield f"{'weights':10}no checkpoint at a position that both have"
    for number, one in enumerate(found.weights[:MOST_WEIGHTS]):
        yield f"{'weights' if number == 0 else '':10}after {one.samples_seen:,} samples: {_weights_told(one)}"


def _weights_told(one: "WeightsDifference") -> str:
    if one.tensor is None:
        return "the same, bit by bit"
    return f"{one.tensor} differs most, by up to {one.largest:.1e} ({one.relative:.1e} of its largest element)"
