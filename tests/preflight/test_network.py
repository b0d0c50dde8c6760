"""A preflight of hosts joined by a network: namespaces, where the first is the way between the two others."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Command, Prewarmed
from tests.two_hosts import ip, made_namespaces

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]

HEAD, SECOND, THIRD = "10.77.1.1", "10.77.1.2", "10.77.2.2"


ENTER = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
assert libc.setns(os.open("/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC), 0) == 0, os.strerror(ctypes.get_errno())
{script}
from dure.cli import main
sys.exit(main({words}))
"""


@dataclass
class Network:
    """Three hosts; there is no forwarding on the first, so that the others do not reach each other."""

    names: tuple[str, str, str]
    server: Prewarmed

    def start(
        self, folder: Path, node: int, *words: object, of: int = 2, script: str = "", secret: str = "secret"
    ) -> Command:
        """Start a node's command; a script is Python that comes before it."""
        where = ("--nnodes", of, "--node-rank", node, "--rendezvous", f"{HEAD}:29400", "--secret-file", secret)
        call = [*map(str, (words[0], *where, *words[1:]))]
        file = folder / f"node{node}.py"
        file.write_text(ENTER.format(name=self.names[node], script=script, words=call))
        return self.server.start(folder, script=file)

    def preflight(self, folder: Path, *words: object, of: int = 2, script: str = "") -> tuple[list[int], Any]:
        """Let all nodes look, and return their exit codes, and what they all said; the script is the last one's."""
        call = ("preflight", "--nproc", 1, "--threads", 1, "--device", "cpu", "--json", *words)
        commands = [self.start(folder, node, *call, of=of, script=script * (node == of - 1)) for node in range(of)]
        codes = [command.wait() for command in commands]
        said = [json.loads(command.out) for command in commands]
        assert all(one["checks"] == said[0]["checks"] for one in said)
        return codes, said[0]


@pytest.fixture(scope="module")
def network(prewarmed) -> Iterator[Network]:
    names = tuple(f"durep{os.getpid()}{letter}" for letter in "abc")
    try:
        made_namespaces(names)
        ip("-n", names[1], "route", "add", "10.77.2.0/24", "via", HEAD)
        # a default route leads names to be asked for somewhere, and the answer to be waited for
        ip("-n", names[2], "route", "delete", "default")
        ip("-n", names[2], "route", "add", "10.77.1.0/24", "via", "10.77.2.1")
        yield Network(names, prewarmed)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or error
        pytest.skip(f"network namespaces cannot be made here (root and iproute2 are needed): {said}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def checks(said: Any, name: str) -> list[dict[str, Any]]:
    return [check for check in said["checks"] if check["name"] == name]


def test_nodes_when_all_is_well_then_both_say_the_same_and_leave_nothing(network, tmp_path):
    codes, said = network.preflight(tmp_path)
    assert (codes, said["status"]) == ([0, 0], "ok"), said
    assert [node["address"] for node in said["nodes"]] == [HEAD, SECOND]
    assert [node["interface"]["name"] for node in said["nodes"]] == ["to1", "cable"]
    assert "2 ranks over gloo: sums right" in checks(said, "collective")[0]["seen"]
    assert checks(said, "shared folder")[0]["status"] == "ok"
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith("output-")}
    assert left == {"secret", "node0.py", "node1.py"}


def test_pair_when_the_way_between_two_is_missing_then_both_directions_are_named_with_their_causes(network, tmp_path):
    ip("-n", network.names[1], "route", "change", "unreachable", "10.77.2.0/24")
    try:
        began = time.monotonic()
        codes, said = network.preflight(tmp_path, of=3)
    finally:
        ip("-n", network.names[1], "route", "delete", "unreachable", "10.77.2.0/24")
        ip("-n", network.names[1], "route", "add", "10.77.2.0/24", "via", HEAD)
    assert codes == [3, 3, 3]
    assert time.monotonic() - began < 30
    host = os.uname().nodename
    here, there = f"node 1 ({host}, {SECOND})", f"node 2 ({host}, {THIRD})"
    lost = {tuple(check["pair"]): check for check in checks(said, "pairs")}
    assert lost.keys() == {(here, there), (there, here)}
    assert lost[here, there]["seen"] == f"{here} does not reach {there} at {THIRD} (No route to host)"
    assert "add a route" in lost[here, there]["cure"]
    assert lost[there, here]["seen"] == f"{there} does not reach {here} at {SECOND} (timed out)"
    assert f"pass all TCP ports from {THIRD} to {SECOND}" in lost[there, here]["cure"]
    assert checks(said, "collective")[0]["seen"] == "it could not come through: see pairs"


def test_versions_when_a_node_has_another_torch_then_both_values_and_nodes_are_named(network, tmp_path):
    codes, said = network.preflight(tmp_path, script="import torch; torch.__version__ = '2.0.1'")
    assert codes == [3, 3]
    (found,) = checks(said, "versions")
    assert found["seen"].endswith(f"and 2.0.1 on node 1 ({os.uname().nodename}, {SECOND})")
    assert found["cure"] == "install the same torch on all nodes"


def test_versions_when_a_node_has_another_dure_then_nothing_else_is_compared(network, tmp_path):
    other = "import importlib.metadata as m; real = m.version; m.version = lambda n: '9' if n == 'dure' else real(n)"
    codes, said = network.preflight(tmp_path, script=other)
    assert codes == [3, 3]
    assert [(check["name"], check["status"]) for check in said["checks"]] == [
        ("versions", "failure"),
        ("all else", "skipped"),
    ]


def test_limits_when_one_node_has_less_then_it_alone_is_named(network, tmp_path):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (70, 70))"
    codes, said = network.preflight(tmp_path, script=limit)
    assert codes == [3, 3]
    assert [(check["status"], check["nodes"]) for check in checks(said, "open files")] == [
        ("failure", [1]),
        ("ok", [0]),
    ]


def test_secret_when_a_node_has_another_then_it_is_told_and_node_zero_says_who_is_missing(network, tmp_path):
    other = tmp_path / "other"
    other.write_text("another secret of that length")
    other.chmod(0o600)
    words = ("preflight", "--nproc", 1, "--device", "cpu")
    head = network.start(tmp_path, 0, *words, "--rendezvous-timeout", 4)
    wrong = network.start(tmp_path, 1, *words, secret="other")
    assert [wrong.wait(), head.wait()] == [2, 3]
    assert f"node 0 at {HEAD}:29400 has another secret than this node" in wrong.err
    assert "node 1 of 2 did not come" in " ".join(head.out.split())
    assert "3 that came did not know the secret" in " ".join(head.out.split())


def test_script_when_nodes_look_first_then_it_runs_on_both(network, tmp_path):
    (tmp_path / "script.py").write_text("import torch.distributed as d; d.init_process_group('gloo'); d.barrier()\n")
    words = ("run", "--nproc", 1, "--threads", 1, "--preflight", "script.py")
    commands = [network.start(tmp_path, node, *words) for node in range(2)]
    assert [command.wait() for command in commands] == [0, 0], [command.err for command in commands]
    assert all("dure: preflight: ready: 12 checks of 2 hosts in " in command.err for command in commands)


def test_script_when_only_one_node_looks_first_then_both_are_told(network, tmp_path):
    (tmp_path / "script.py").write_text("")
    head = network.start(tmp_path, 0, "run", "--nproc", 1, "--preflight", "script.py")
    other = network.start(tmp_path, 1, "run", "--nproc", 1, "script.py")
    assert [head.wait(), other.wait()] == [2, 2]
    for command in (head, other):
        assert "command is dure run --preflight on node 0 and dure run on node 1 (" in command.err
