"""Starts a Slurm cluster of two nodes on this machine: munged, slurmctld and two slurmd.

Each node is a network namespace with its own address. The daemons are ended by their process ids.
Root and Debian's packages slurmctld, slurmd, slurm-client, munge and iproute2 are needed. The names
of the nodes must resolve, so they are in /etc/hosts while Slurm runs. munge refuses folders that
others may write to. There is no TaskPlugin and no cgroup, so `linuxproc` tracks the processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support import networks
from tests.support.processes import ROOT, is_alive

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel", "squeue")
# Other processes may have other clusters.
NODES = (f"tfm{os.getpid()}-1", f"tfm{os.getpid()}-2")
HOSTS = Path("/etc/hosts")
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")


def why_not() -> str | None:
    """Returns why no Slurm can be started here, or None."""
    if (reason := networks.why_not()) is not None:
        return reason
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


@dataclass
class Slurm:
    """A running Slurm cluster.

    Attributes:
        folder: the folder of Slurm's files, in which the jobs also run.
        config: Slurm's configuration.
    """

    folder: Path
    config: Path

    def run(
        self, *argv: str, limit_s: float = 60, text: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs one of Slurm's programs in the folder, and returns what it printed."""
        return subprocess.run(
            argv,
            cwd=self.folder,
            env=self.env(),
            input=text,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )

    def env(self) -> dict[str, str]:
        """Returns the environment of Slurm's programs and of the jobs."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "TF_CONFIG"))}
        paths = f"{kept.get('PATH', '')}:/usr/sbin:/sbin"
        return kept | {
            "SLURM_CONF": str(self.config),
            "PATH": paths,
            "PYTHONPATH": str(ROOT),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }

    def submit(self, script: str, *options: str) -> str:
        """Returns the number of a job that runs a batch script."""
        done = self.run("sbatch", "--parsable", *options, text=script)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip().partition(";")[0]

    def about(self, job: str) -> Mapping[str, str]:
        """Returns Slurm's description of a job."""
        done = self.run("scontrol", "show", "job", job)
        return dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)

    def wait(self, job: str, limit_s: float, *states: str) -> Mapping[str, str]:
        """Waits until a job has one of the states, by default a state of an ended job."""
        deadline = time.monotonic() + limit_s
        while True:
            about = self.about(job)
            # A requeued job has ended first, and is in the queue again a moment later.
            if about.get("JobState") in (states or _ENDED):
                return about
            assert time.monotonic() < deadline, f"{dict(about)}\n{self.logs()}"
            time.sleep(0.3)

    def logs(self) -> str:
        """Returns the output of the jobs, and the logs of Slurm's daemons."""
        files = [*self.folder.glob("*.out"), *(self.folder / "log").glob("*")]
        return "\n".join(f"== {file.name}\n{file.read_text()[-3000:]}" for file in files)


@contextlib.contextmanager
def started(folder: Path, cores: int = 4) -> Iterator[Slurm]:
    """Yields a Slurm cluster of two nodes, which ends with the context."""
    (folder / "network").mkdir()
    with contextlib.ExitStack() as at_end:
        hosts = at_end.enter_context(networks.hosts(len(NODES), folder / "network"))
        addresses = {node: hosts.address(number) for number, node in enumerate(NODES, 1)}
        _resolve(addresses, at_end)
        munge = folder / "munge"
        _start_munge(munge, at_end)
        config = _configured(folder, munge, cores, {"": hosts.address(254)} | addresses)
        slurm = Slurm(folder, config)
        at_end.callback(_end, slurm)
        nodes = [
            [*hosts.on_network(n, node), "slurmd", "-N", node] for n, node in enumerate(NODES, 1)
        ]
        for argv in (["slurmctld"], *nodes):
            done = slurm.run(*argv, "-f", str(slurm.config))
            assert done.returncode == 0, done.stderr + slurm.logs()
        deadline = time.monotonic() + 30
        while slurm.run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() != "2":
            assert time.monotonic() < deadline, slurm.logs()
            time.sleep(0.3)
        yield slurm


def _resolve(addresses: Mapping[str, str], at_end: contextlib.ExitStack) -> None:
    """Makes the names of the nodes resolve to their addresses, until the end."""
    lines = "".join(f"{address} {node}\n" for node, address in addresses.items())
    _change_hosts(lambda text: f"{text.rstrip()}\n{lines}")
    at_end.callback(_change_hosts, lambda text: text.replace(lines, ""))


def _change_hosts(change: Callable[[str], str]) -> None:
    """Changes the names of this machine; waits for another process that changes them."""
    with HOSTS.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        text = change(file.read())
        file.seek(0)
        file.truncate()
        file.write(text)


def _start_munge(folder: Path, at_end: contextlib.ExitStack) -> None:
    """Starts munged, by which Slurm's programs authenticate each other, on a socket of its own."""
    for part in (folder, folder / "run"):
        part.mkdir(mode=0o755, parents=True)
    key = folder / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    # munged runs as root here, and accepts only folders that no other user may write to.
    argv = ["munged", "--force", "--foreground", f"--key-file={key}"]
    argv += [f"--{name}-file={folder / 'run' / name}" for name in ("pid", "log", "seed")]
    munged = subprocess.Popen(
        [*argv, f"--socket={folder / 'run' / 'socket'}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PATH": f"{os.environ.get('PATH', '')}:/usr/sbin"},
    )
    at_end.callback(munged.wait)
    at_end.callback(munged.terminate)
    deadline = time.monotonic() + 10
    while not (folder / "run" / "socket").exists():
        assert munged.poll() is None, (folder / "run" / "log").read_text()
        assert time.monotonic() < deadline, "munged does not start"
        time.sleep(0.05)


def _configured(folder: Path, munge: Path, cores: int, addresses: Mapping[str, str]) -> Path:
    """Writes the configuration, with ports that are free now, and returns its path.

    The addresses are those of slurmctld (the empty name) and of the nodes.
    """
    for name in ("state", "log", "run"):
        (folder / name).mkdir()
    with socket.create_server((addresses[""], 0)) as server:
        port = server.getsockname()[1]
    here = socket.gethostname()
    lines = [
        "ClusterName=tests",
        f"SlurmctldHost={here}({addresses['']})",
        f"SlurmctldPort={port}",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={munge / 'run' / 'socket'},cred_expire=5",
        "CredType=cred/munge",
        f"StateSaveLocation={folder / 'state'}",
        f"SlurmdSpoolDir={folder}/spool-%n",
        f"SlurmctldPidFile={folder}/run/slurmctld.pid",
        f"SlurmdPidFile={folder}/run/slurmd-%n.pid",
        f"SlurmctldLogFile={folder}/log/slurmctld.log",
        f"SlurmdLogFile={folder}/log/slurmd-%n.log",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        # The nodes have more cores than the machine.
        "SlurmdParameters=config_overrides",
        "ReturnToService=2",
        "MpiDefault=none",
        "KillWait=5",
        "SchedulerParameters=batch_sched_delay=1,sched_interval=2",
    ]
    for node in NODES:
        lines.append(
            f"NodeName={node} NodeHostname={here} NodeAddr={addresses[node]} Port=6818 "
            f"CPUs={cores} RealMemory=4000"
        )
    # A job of the partition `high` takes the nodes of a job of `p`, which has 20 s to save.
    lines += ["PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE"]
    partition = f"Nodes={','.join(NODES)} MaxTime=INFINITE State=UP"
    lines.append(f"PartitionName=p {partition} Default=YES PriorityTier=1 GraceTime=20")
    lines.append(f"PartitionName=high {partition} PriorityTier=2 PreemptMode=OFF")
    path = folder / "slurm.conf"
    path.write_text("\n".join(lines) + "\n")
    return path


def _end(slurm: Slurm) -> None:
    """Ends all jobs, and then Slurm's daemons."""
    slurm.run("scancel", "--signal=KILL", "--full", "--user=root")
    slurm.run("scancel", "--user=root")
    deadline = time.monotonic() + 15
    while slurm.run("squeue", "-h").stdout and time.monotonic() < deadline:
        time.sleep(0.2)
    folder = slurm.folder
    pids = [int(file.read_text()) for file in (folder / "run").glob("*.pid")]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 15
    while any(is_alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.1)
