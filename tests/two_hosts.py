"""Hosts, as network namespaces: two at a cable and one that does not belong, three at a switch, two far apart."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from tests.commands import Command, Prewarmed

ROOT = Path(__file__).parents[1]
HEAD, OTHER = "10.77.1.1", "10.77.1.2"
ROUNDING = 1e-10
"""Tolerance for float64 sums in another order, over a few dozen steps."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass
class Hosts:
    """Two hosts of a run, and one from which a stranger comes."""

    names: tuple[str, ...]
    servers: tuple[Prewarmed, ...]

    def start(
        self,
        node: int,
        folder: Path,
        *words: object,
        several: bool = True,
        secret: str = "secret",
        nnodes: str = "2",
        at: int | None = None,
        script: Path | None = None,
        **environ: str,
    ) -> Command:
        where = ("--nnodes", nnodes, "--node-rank", node, "--rendezvous", f"{HEAD}:29400", "--secret-file", secret)
        where = (*where, "--rendezvous-timeout", 30) if several else ()
        server = self.servers[node if at is None else at]
        return server.start(folder, words[0], *where, *words[1:], script=script, **environ)

    def cut(self) -> None:
        """Pull the cable between the hosts."""
        self.inside(1, "ip", "link", "set", "cable", "down")

    def mend(self) -> None:
        """Put it back."""
        self.inside(1, "ip", "link", "set", "cable", "up")

    def both(self, folder: Path, *words: object, **environ: str) -> tuple[Command, Command]:
        return self.start(0, folder, *words, **environ), self.start(1, folder, *words, **environ)

    def inside(self, host: int, *command: str) -> str:
        words = ["ip", "netns", "exec", self.names[host], *command]
        return subprocess.run(words, check=True, capture_output=True, text=True, timeout=30).stdout

    def listeners(self, node: int) -> set[str]:
        """Return the addresses on which something listens, as the kernel writes them."""
        lines = self.inside(node, "cat", "/proc/net/tcp", "/proc/net/tcp6").splitlines()
        fields = [line.split() for line in lines if not line.lstrip().startswith("sl")]
        return {words[1].partition(":")[0] for words in fields if words[3] == "0A"}


SWITCH = 3


class SwitchedHosts(Hosts):
    """Three hosts at a switch, a namespace of its own: cables are cut at its end, and the hosts' links stay up."""

    def cut(self, host: int) -> None:
        self.inside(SWITCH, "ip", "link", "set", f"port{host}", "nomaster")

    def cut_to(self, host: int) -> None:
        """Let nothing come to a host; what it sends arrives."""
        self.inside(SWITCH, *_limited(f"port{host}", *_NOTHING))

    def cut_from(self, host: int) -> None:
        """Let nothing that a host sends arrive; what is sent to it does."""
        self.inside(host, *_limited("cable", *_NOTHING))

    def slow(self, host: int, rate: str) -> None:
        """Let only so many bits a second come to a host."""
        self.inside(SWITCH, *_limited(f"port{host}", rate, "5kb", "50kb"))

    def mend(self, host: int) -> None:
        """Put all that is cut or slow in order."""
        self.inside(SWITCH, "ip", "link", "set", f"port{host}", "master", "switch")
        for where, link in ((SWITCH, f"port{host}"), (host, "cable")):
            words = ["ip", "netns", "exec", self.names[where], "tc", "qdisc", "delete", "dev", link, "root"]
            subprocess.run(words, check=False, capture_output=True)


_NOTHING = ("8bit", "10b", "10b")
"""Rate, bucket and queue: no packet is so small."""


def _limited(link: str, rate: str, burst: str, queue: str) -> tuple[str, ...]:
    words = ("rate", rate, "burst", burst, "limit", queue)
    return ("tc", "qdisc", "replace", "dev", link, "root", "tbf", *words)


def made_switch(names: tuple[str, ...]) -> None:
    *hosts, switch = names
    for name in names:
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
    ip("-n", switch, "link", "add", "switch", "type", "bridge")
    ip("-n", switch, "link", "set", "switch", "up")
    for number, name in enumerate(hosts):
        ip("-n", switch, "link", "add", f"port{number}", "type", "veth", "peer", "name", "cable", "netns", name)
        ip("-n", switch, "link", "set", f"port{number}", "master", "switch", "up")
        ip("-n", name, "address", "add", f"10.77.1.{number + 1}/24", "dev", "cable")
        ip("-n", name, "link", "set", "cable", "up")


@contextmanager
def made_distant(names: tuple[str, str]) -> Iterator[None]:
    """Join two hosts by a cable on which packets are under way for 50 to 300 ms."""
    for name in names:
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
    words = [sys.executable, "-m", "tests.distant_cable", names[0], HEAD, names[1], OTHER]
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as cable:
        if cable.stdout.readline() != "ready\n":
            raise OSError("a TUN interface cannot be made")
        yield
        cable.stdin.close()


def made_namespaces(names: tuple[str, str, str]) -> None:
    for name in names:
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
    for name, net in zip(names[1:], (1, 2), strict=True):
        ip("-n", names[0], "link", "add", f"to{net}", "type", "veth", "peer", "name", "cable", "netns", name)
        for where, link, host in ((names[0], f"to{net}", 1), (name, "cable", 2)):
            ip("-n", where, "address", "add", f"10.77.{net}.{host}/24", "dev", link)
            ip("-n", where, "link", "set", link, "up")
    ip("-n", names[2], "route", "add", "default", "via", "10.77.2.1")


def ended(commands: tuple[Command, ...], seconds: float = 60.0) -> list[int]:
    return [command.wait(seconds) for command in commands]


def last_weights(run: Path) -> dict[str, np.ndarray]:
    newest = sorted((run / "checkpoints").glob("samples-*"))[-1]
    return {name: value for file in newest.glob("model*.safetensors") for name, value in load_file(file).items()}
