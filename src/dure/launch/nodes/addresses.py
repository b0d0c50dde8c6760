"""Rendezvous addresses of launchers: parsing, look-up, and refusal of addresses that any host could reach."""

import errno
import ipaddress
import socket
import time

from dure.errors import DureError, EnvironmentLacks, Misuse
from dure.launch.nodes.channel import Address

DEFAULT_PORT = 29400
"""Port of torchrun's own rendezvous."""
LOOK_SECONDS = 0.2


def split_address(text: str) -> tuple[str, int]:
    """Parse `host`, `host:port` or `[IPv6]:port`.

    Raises:
        ValueError: It is none of these; the message has the reason.
    """
    if text.startswith("["):
        host, closing, rest = text[1:].partition("]")
        if not closing or (rest and not rest.startswith(":")):
            raise ValueError("that is no address")
        port = rest[1:] or str(DEFAULT_PORT)
    elif text.count(":") > 1:
        host, port = text, str(DEFAULT_PORT)
    else:
        host, _, port = text.partition(":")
        port = port or str(DEFAULT_PORT)
    if not host or any(letter.isspace() or letter == "/" for letter in host):
        raise ValueError("that is no address")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{port!r} is no port")
    return host, int(port)


def resolved(rendezvous: str, patience_seconds: float, *, allow_public_address: bool = False) -> tuple[int, Address]:
    """Look up the rendezvous address, and refuse one that any host could reach.

    Args:
        rendezvous: Address as the user gave it.
        patience_seconds: Seconds to wait for an unknown name.
        allow_public_address: Whether the user allows a public address.

    Raises:
        Misuse: Launchers cannot meet at this address.
    """
    host, port = split_address(rendezvous)
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            break
        except (socket.gaierror, UnicodeError) as error:  # names of pods appear some time after the pods
            if time.monotonic() >= deadline:
                raise Misuse(
                    f"the rendezvous host {host} is not known here ({getattr(error, 'strerror', error)}): give its "
                    "address, as 10.0.0.1:29400"
                ) from None
            time.sleep(LOOK_SECONDS)
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    numeric = ipaddress.ip_address(str(address[0]).partition("%")[0])
    if numeric.is_unspecified:
        raise Misuse(
            f"the rendezvous {rendezvous} names all interfaces: give the one address of node 0 at which the "
            "other nodes reach it"
        )
    if numeric.is_multicast:
        raise Misuse(f"the rendezvous {rendezvous} is a multicast address: give node 0's own")
    if numeric.is_global and not allow_public_address:
        raise Misuse(
            f"the rendezvous {rendezvous} ({numeric}) is a public address, and gradients would travel "
            "unencrypted: use an address of a private network, or add --allow-public-address"
        )
    return family, address


def own_addresses() -> list[str]:
    """Return the addresses of this host except loopback."""
    import psutil

    kinds = (socket.AF_INET, socket.AF_INET6)
    found = [
        one.address.partition("%")[0] for all_ in psutil.net_if_addrs().values() for one in all_ if one.family in kinds
    ]
    return [address for address in found if not ipaddress.ip_address(address).is_loopback]


def cannot_listen(rendezvous: str, error: OSError) -> DureError:
    """Return an error with the reason why a node cannot listen at the rendezvous."""
    host, port = split_address(rendezvous)
    if error.errno == errno.EADDRNOTAVAIL:
        own = ", ".join(own_addresses()) or "none but loopback"
        return Misuse(
            f"the rendezvous host {host} is not this host, which is node 0 (its addresses: {own}): start node 0 on "
            f"{host}, or give an address of this host on all nodes"
        )
    if error.errno == errno.EADDRINUSE:
        return Misuse(
            f"port {port} of {host} is taken by another process: give another one in --rendezvous, on all nodes"
        )
    return EnvironmentLacks(f"node 0 cannot listen on {rendezvous} ({error.strerror}): give another port")
