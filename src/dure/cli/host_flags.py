"""The flags that say where a command's hosts meet, for all verbs that may run on several."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

NumNodes = Annotated[int, Parameter(help="hosts: start the same command on each, with its own --node-rank")]
NodeRank = Annotated[int | None, Parameter(help="which of the hosts this is, from 0", show_default=False)]
Rendezvous = Annotated[
    str | None, Parameter(help="where the hosts meet: an address of host 0, as 10.0.0.1:29400", show_default=False)
]
SecretFile = Annotated[
    Path | None,
    Parameter(help="what the hosts know each other by (default: ~/.config/dure/secret)", show_default=False),
]
RendezvousTimeout = Annotated[float, Parameter(help="seconds to wait for the other hosts")]
PublicAddressFlag = Annotated[
    bool, Parameter(negative=(), show_default=False, help="meet at a public address, without encryption")
]
