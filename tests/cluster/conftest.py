"""A Slurm of two nodes on this host: munged, slurmctld and two slurmd, in a folder and on ports of their own."""

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.cluster.jobs import BASE
from tests.commands import PATIENCE_SECONDS, wait_until

NODES = ("n1", "n2")
CORES = 2
"""CPUs of each node, whatever the host has."""

CONFIGURATION = """
ClusterName=dure
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
KillWait=10
MessageTimeout=30
FirstJobId={first_job}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
# what is in a partition of a higher tier takes the nodes of what is in a lower one
PartitionName=DEFAULT Nodes={names} MaxTime=INFINITE State=UP
PartitionName=main Default=YES PriorityTier=10 PreemptMode=OFF
PartitionName=low PriorityTier=1 PreemptMode=REQUEUE
PartitionName=low_grace PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=low_short_grace PriorityTier=1 PreemptMode=REQUEUE GraceTime=1
PartitionName=low_cancel PriorityTier=1 PreemptMode=CANCEL
PartitionName=low_cancel_grace PriorityTier=1 PreemptMode=CANCEL GraceTime=60
"""


@dataclass(frozen=True)
class Slurm:
    """A running cluster, and how to speak to it."""

    folder: Path

    def run(self, *command: object, cwd: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run a command that finds this cluster."""
        words = [str(word) for word in command]
        environ = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), **environment}
        return subprocess.run(words, cwd=cwd, env=environ, capture_output=True, text=True, timeout=120)

    def ask(self, *command: object) -> str:
        """Run one of Slurm's own commands, which must succeed."""
        done = self.run(*command, cwd=self.folder)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def nodes(self) -> list[str]:
        """Return the state of each node, or nothing while nobody answers."""
        time.sleep(0.1)
        return self.run("sinfo", "-hN", "-pmain", "-o%t", cwd=self.folder).stdout.split()

    def fields(self, job: str) -> dict[str, str]:
        """Return what Slurm knows of a job."""
        return dict(word.split("=", 1) for word in self.ask("scontrol", "show", "job", job).split() if "=" in word)

    def state(self, job: str) -> str:
        """Return a job's state and the reason for it."""
        fields = self.fields(job)
        return f"{fields['JobState']} {fields['Reason']}"

    def wait_for(self, job: str, state: str, seconds: float = 2 * PATIENCE_SECONDS) -> None:
        """Wait until a job is in a state."""
        deadline = time.monotonic() + seconds
        while not (now := self.state(job)).startswith(state):
            assert time.monotonic() < deadline, f"job {job} is {now} and not {state}"
            time.sleep(0.2)  # each question is a process

    def release(self, job: str) -> None:
        """Let a requeued job start: Slurm keeps it for two minutes, in which its nodes report the end of the last one.

        Started at once, it can be taken for ended by such a report.
        """
        self.wait_for(job, "PENDING BeginTime")
        time.sleep(8)
        self.ask("scontrol", "update", f"JobId={job}", "StartTime=now")

    @contextmanager
    def nodes_taken(self) -> Iterator[None]:
        """Have a job of a higher tier on all nodes, which is there before this returns, and gone afterwards."""
        words = ["--parsable", f"--nodes={len(NODES)}", "--exclusive", "--output=/dev/null", "--wrap=exec sleep 600"]
        job = self.ask("sbatch", "--partition=main", *words)
        try:
            self.wait_for(job, "RUNNING")
            yield
        finally:
            self.ask("scancel", job)

    @contextmanager
    def configured(self, line: str) -> Iterator[None]:
        """Have a further line in the configuration for a while."""
        configuration = self.folder / "slurm.conf"
        before = configuration.read_text()
        try:
            configuration.write_text(f"{before}{line}\n")
            self.ask("scontrol", "reconfigure")
            yield
        finally:
            configuration.write_text(before)
            self.ask("scontrol", "reconfigure")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """Start the cluster; end it, and every process of it, afterwards."""
    for program in ("munged", "slurmctld", "slurmd", "srun"):
        assert shutil.which(program), f"{program} is not installed: `make cluster` installs what these tests need"
    # a socket's path has at most 107 bytes, and pytest's folders are deep
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        write_configuration(folder)
        start_daemons(folder, daemons)
        cluster = Slurm(folder)
        wait_until(lambda: cluster.nodes() == ["idle"] * len(NODES), "idle nodes")
        yield cluster
        cluster.run("scancel", "--user", getpass.getuser(), cwd=folder)
        wait_until(lambda: cluster.ask("squeue", "-h") == "", "the end of all jobs", 30)
    finally:
        end(daemons, folder)
        shutil.rmtree(folder, ignore_errors=True)


def write_configuration(folder: Path) -> None:
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    nodes = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs={CORES} State=UNKNOWN"
        for name in NODES
    ]
    for name in ("state", *(f"spool-{name}" for name in NODES)):
        (folder / name).mkdir()
    text = CONFIGURATION.format(
        host=host,
        controller_port=free_port(),
        user=getpass.getuser(),
        folder=folder,
        nodes="\n".join(nodes),
        names=",".join(NODES),
        # ranks meet at a port made of it, and another such cluster may be on this host
        first_job=1 + secrets.randbelow(1_000_000),
    )
    (folder / "slurm.conf").write_text(text)


def start_daemons(folder: Path, daemons: "list[subprocess.Popen[bytes]]") -> None:
    def start(*words: str) -> None:
        with (folder / f"{len(daemons)}-{words[0]}.log").open("wb") as log:
            daemons.append(subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL))

    configuration = str(folder / "slurm.conf")
    files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "seed-file": "munged.seed"}
    start("munged", "--foreground", "--force", *(f"--{flag}={folder / name}" for flag, name in files.items()))
    wait_until((folder / "munge.socket").exists, "munged")
    start("slurmctld", "-D", "-f", configuration)
    for name in NODES:
        start("slurmd", "-D", "-N", name, "-f", configuration)


def end(daemons: "list[subprocess.Popen[bytes]]", folder: Path) -> None:
    """End the daemons and what they started, by process id: all that has the cluster's folder in its command line."""
    for daemon in reversed(daemons):
        daemon.terminate()
    for daemon in reversed(daemons):
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
    for process in processes_of(folder):
        process.kill()


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return the processes that have a folder in their command line or environment."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), *process.environ().values()]
        except psutil.Error:
            continue
        if process.pid != os.getpid() and any(str(folder) in word for word in words):
            found.append(process)
    return found


@pytest.fixture
def dure(tmp_path: Path) -> list[str]:
    """Return the words of the command `dure`, of this interpreter."""
    return [sys.executable, "-m", "dure"]


def eventually_gone(folder: Path, seconds: float = 10.0) -> list[psutil.Process]:
    """Give processes a moment to end, and return those that did not."""
    deadline = time.monotonic() + seconds
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@pytest.fixture(scope="session")
def control(tmp_path_factory) -> Path:
    """Return an undisturbed run of two ranks under our own supervisor."""
    folder = tmp_path_factory.mktemp("control")
    words = [sys.executable, "-m", "dure", *BASE, "--nproc", "2", "--name", "control"]
    subprocess.run(words, cwd=folder, check=True, timeout=60)
    return folder / "runs/control"
