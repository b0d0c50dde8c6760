"""Parser of `--mesh`: the axes of a run, and the number of ranks along each."""

import math
import re
from collections.abc import Sequence

_AXIS = re.compile(r"\s*([a-z]+)\s*=\s*([1-9][0-9]{0,5})\s*")


def parse_mesh(
    text: str | None, axes: Sequence[str], num_devices: int, counted: str | None = None, *, main: str | None = None
) -> dict[str, int]:
    """Return the size of every axis, outermost first.

    Args:
        text: `data=2,pipeline=2`; None puts all devices on the main axis.
        axes: Axes of the strategy, outermost first; those not named have size 1.
        num_devices: Required product of the sizes.
        counted: That number as text, with its origin.
        main: Axis that the strategy is named after; None for the last one.

    Raises:
        ValueError: The form, an axis or the product is wrong; one sentence.
    """
    main = main or axes[-1]
    if text is None:
        return {axis: num_devices if axis == main else 1 for axis in axes}
    named: dict[str, int] = {}
    for word in text.split(","):
        match = _AXIS.fullmatch(word)
        if match is None:
            raise ValueError(f"mesh is {text!r} but must name axes and sizes, such as {main}={num_devices}")
        name, size = match[1], int(match[2])
        if name not in axes:
            raise ValueError(
                f"mesh names the axis {name}, which this strategy does not have: it knows {' and '.join(axes)}; choose "
                "another axis or --strategy"
            )
        if name in named:
            raise ValueError(f"mesh names the axis {name} twice: give each axis once")
        named[name] = size
    if math.prod(named.values()) != num_devices:
        product = " x ".join(f"{name} {size}" for name, size in named.items())
        seen = counted or f"nproc is {num_devices}"
        raise ValueError(
            f"{seen} but mesh {product} needs {math.prod(named.values())}: start as many, or set "
            f"mesh to {main}={num_devices}"
        )
    return {axis: named.get(axis, 1) for axis in axes}
