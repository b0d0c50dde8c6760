"""The words of `--mesh`: which axes a run is laid out over, and how many ranks each has."""

import math
import re
from collections.abc import Sequence

_AXIS = re.compile(r"\s*([a-z]+)\s*=\s*([1-9][0-9]{0,5})\s*")


def parse_mesh(text: str | None, axes: Sequence[str], num_devices: int, counted: str | None = None) -> dict[str, int]:
    """Return the size of every axis, outermost first.

    Args:
        text: `data=2,pipeline=2`; None puts all devices on the last axis.
        axes: The axes that the strategy knows, outermost first; those not named have size 1.
        num_devices: What the product must be.
        counted: That number in words, as the user came by it.

    Raises:
        ValueError: One sentence: not of that form, an unknown axis, or another product.
    """
    if text is None:
        return {axis: num_devices if axis == axes[-1] else 1 for axis in axes}
    named: dict[str, int] = {}
    for word in text.split(","):
        match = _AXIS.fullmatch(word)
        if match is None:
            raise ValueError(f"mesh is {text!r} but must name axes and sizes, such as {_example(axes, num_devices)}")
        name, size = match[1], int(match[2])
        if name not in axes:
            raise ValueError(
                f"mesh names the axis {name}, which this strategy does not have: it knows {_listed(axes)}; choose "
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
            f"mesh to {_example(axes, num_devices)}"
        )
    return {axis: named.get(axis, 1) for axis in axes}


def _example(axes: Sequence[str], num_devices: int) -> str:
    return f"{axes[-1]}={num_devices}"


def _listed(axes: Sequence[str]) -> str:
    return " and ".join(axes)
