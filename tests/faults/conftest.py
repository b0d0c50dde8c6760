"""Hosts for tests of runs on several."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TypeVar

import pytest

from tests.commands import Prewarmed
from tests.two_hosts import Hosts, SwitchedHosts, made_distant, made_namespaces, made_switch

H = TypeVar("H", bound=Hosts)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    yield from _connected(Hosts, "abc", 2, made_namespaces)


@pytest.fixture(scope="module")
def switched() -> Iterator[SwitchedHosts]:
    yield from _connected(SwitchedHosts, "abcs", 3, made_switch)


@pytest.fixture(scope="module")
def distant() -> Iterator[Hosts]:
    with ExitStack() as cables:
        yield from _connected(Hosts, "ab", 2, lambda names: cables.enter_context(made_distant(names)))


def _connected(
    kind: type[H], letters: str, num_servers: int, connect: Callable[[tuple[str, ...]], object]
) -> Iterator[H]:
    names = tuple(f"dure{os.getpid()}{letter}" for letter in letters)
    try:
        connect(names)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or error
        pytest.skip(f"network namespaces cannot be made here (root and iproute2 are needed): {said}")
    try:
        servers = tuple(Prewarmed("ip", "netns", "exec", name) for name in names[:num_servers])
        yield kind(names, servers)
        for server in servers:
            server.close()
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
