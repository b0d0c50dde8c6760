"""`dure diff`: where two runs diverge."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from dure.cli.output import JsonFlag
from dure.errors import Misuse, RunsDiffer
from dure.terminal import one_line, print_json, print_text

if TYPE_CHECKING:
    from dure.api.diff import Difference, WeightsDifference

MOST_WEIGHTS = 8
"""Maximum positions shown, around the divergence; `--json` has all of them."""


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
    """Show where two runs differ: settings, samples, losses, weights. Exits with 4 if they do."""
    if not 0 <= tolerance < 1:
        raise Misuse(f"tolerance is {tolerance:g} but must be a number of at least 0 and below 1")
    from dure.api.diff import compare

    found = compare(first, second, tolerance=tolerance)
    if json:
        print_json(found.to_json())
    else:
        print_text("\n".join(map(one_line, _lines(found))))
    if found.part_at is not None:
        hint = "" if tolerance else " (what differs by rounding alone is let pass by --tolerance 1e-6)"
        raise RunsDiffer(f"the runs part: {found.part_at}{hint}")


def _lines(found: "Difference") -> Iterator[str]:
    for number, (name, both) in enumerate(found.settings.items()):
        yield f"{'settings' if number == 0 else '':10}{name}: {both[0]} | {both[1]}"
    more = " | ".join(str(count) for count in found.steps_of_one)
    yield f"{'steps':10}{found.steps} in both" + (f", further {more}" if any(found.steps_of_one) else "")
    if not found.steps:
        yield f"{'samples':10}not compared, nor are losses: no step that both have on record"
        yield from _weights_lines(found)
        return
    kind = "the same in every step" if found.has_samples else "as many in every step (which ones: --record-samples)"
    other = f"not the same from step {found.samples_from} on"
    yield f"{'samples':10}{kind if found.samples_from is None else other}"
    same = "the same, bit by bit" if found.tolerance == 0 else f"the same up to {found.tolerance:g}"
    if found.losses is None:
        neither = f" (in {_counted(found.steps_without_loss, 'step')} neither has one)"
        yield f"{'losses':10}{same}{neither if found.steps_without_loss else ''}"
    else:
        values = " | ".join(str(loss) for loss in found.losses.losses)
        yield f"{'losses':10}first differ at step {found.losses.step}: {values} (relative {found.losses.relative:.1e})"
    yield from _weights_lines(found)


def _weights_lines(found: "Difference") -> Iterator[str]:
    for number, line in enumerate(_all_weights_lines(found)):
        yield f"{'' if number else 'weights':10}{line}"


def _all_weights_lines(found: "Difference") -> Iterator[str]:
    whole = "whole " if found.damaged else ""
    if found.weights:
        yield f"compared at the {_counted(len(found.weights), 'position')} at which both have a {whole}checkpoint"
    else:
        yield f"not compared: no {whole}checkpoint at a position that both have"
    yield from (f"{one.run}: {one.reason}" for one in found.damaged)
    first = _first_shown(found)
    shown = found.weights[first : first + MOST_WEIGHTS]
    if first:
        yield f"({first} before, the same too)"
    yield from (f"after {one.samples_seen:,} samples: {_weights_text(one)}" for one in shown)
    if behind := len(found.weights) - first - len(shown):
        yield f"({behind} behind)"
    if found.apart is not None:
        yield _where_weights_part(found)


def _first_shown(found: "Difference") -> int:
    """Return the index of the first checkpoint to show, so that the last equal one is shown first.

    It is 0 if all fit, or none differ.
    """
    if found.apart is None or len(found.weights) <= MOST_WEIGHTS:
        return 0
    return max(0, found.weights.index(found.apart) - 1)


def _where_weights_part(found: "Difference") -> str:
    assert found.apart is not None
    apart = f"{found.apart.samples_seen:,} samples ({_step(found.apart)})"
    if found.last_same is None:
        return f"they part before {apart}, the first position that is compared"
    return f"they part between {found.last_same.samples_seen:,} samples ({_step(found.last_same)}) and {apart}"


def _step(one: "WeightsDifference") -> str:
    first, second = one.steps
    return f"step {first}" if first == second else f"steps {first} | {second}"


def _weights_text(one: "WeightsDifference") -> str:
    nan = f" ({_counted(one.num_nan, 'element')} {'is' if one.num_nan == 1 else 'are'} NaN in both)"
    return _difference_text(one) + (nan if one.num_nan else "")


def _difference_text(one: "WeightsDifference") -> str:
    if one.tensor is None:
        return "the same, bit by bit"
    if one.largest == 0:
        return f"{one.tensor} differs in bits, not in values (0.0 and -0.0, or NaN of other bits)"
    if one.largest == math.inf:
        return f"{one.tensor} differs most: of another shape, missing, or not finite in one of them"
    return f"{one.tensor} differs most, by up to {one.largest:.1e} ({one.relative:.1e} of its largest element)"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
