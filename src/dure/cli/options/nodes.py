"""Flags for the meeting of a command's hosts, for all verbs that may run on several."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from dure.errors import Misuse


def _all_needed(_: Any, tokens: Sequence[Any]) -> int:
    """Refuse 1:4, with which only `dure train` continues without some hosts."""
    most = _most(_, tokens)
    if ":" in tokens[0].value:
        raise Misuse(
            f"nnodes is {tokens[0].value}, but a script needs all its hosts, for it has no snapshots from which the "
            f"others could go on: use --nnodes {most}"
        )
    return most


def _most(_: Any, tokens: Sequence[Any]) -> int:
    text = tokens[0].value
    if not re.fullmatch(r"(\d+:)?\d+", text):
        raise Misuse(f"nnodes is {text!r} but must be a whole number above 0")
    return int(text.rpartition(":")[2])


NumNodes = Annotated[
    int, Parameter(converter=_all_needed, help="hosts: start the same command on each, with its own --node-rank")
]
MostNodes = Annotated[
    int,
    Parameter(
        converter=_most,
        help="hosts: start the same command on each, with its own --node-rank; of 1:4, as a run may have it, all 4",
    ),
]
NodeRank = Annotated[int | None, Parameter(help="which of the hosts this is, from 0", show_default=False)]
Rendezvous = Annotated[
    str | None, Parameter(help="where the hosts meet: an address of host 0, as 10.0.0.1:29400", show_default=False)
]
SecretFile = Annotated[
    Path | None,
    Parameter(
        help="file by which the hosts prove that they belong together (default: ~/.config/dure/secret)",
        show_default=False,
    ),
]
RendezvousTimeout = Annotated[float, Parameter(help="seconds to wait for the other hosts")]
PublicAddressFlag = Annotated[
    bool, Parameter(negative=(), show_default=False, help="meet at a public address, without encryption")
]
