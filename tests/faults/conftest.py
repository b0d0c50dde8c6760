"""Hosts for tests of runs on several."""

import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.commands import Prewarmed
from tests.two_hosts import Hosts, made_namespaces


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    names = tuple(f"dure{os.getpid()}{letter}" for letter in "abc")
    try:
        made_namespaces(names)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or error
        pytest.skip(f"network namespaces cannot be made here (root and iproute2 are needed): {said}")
    try:
        servers = tuple(Prewarmed("ip", "netns", "exec", name) for name in names[:2])
        yield Hosts(names, servers)
        for server in servers:
            server.close()
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
