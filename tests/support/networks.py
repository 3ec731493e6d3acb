"""Several hosts on one machine: network namespaces with addresses of their own and sshd in each.

Each host has a name of its own, `h1` and so on, which resolves on the hosts of its network alone.
Needs root, iproute2 and an OpenSSH server; `why_not` says what is missing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.processes import ROOT

NUMBERS = range(1, 251)
SSHD_CONFIG = """
Port 22
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
PasswordAuthentication no
UsePAM no
PermitRootLogin yes
Subsystem sftp internal-sftp
SetEnv HOME={folder} PATH={path} PYTHONPATH={root}
"""
SSH_CONFIG = """
Host *
    IdentityFile {folder}/key
    IdentitiesOnly yes
    StrictHostKeyChecking no
    UserKnownHostsFile {folder}/known_hosts
    LogLevel ERROR
"""


def why_not() -> str | None:
    """Returns why there can be no hosts here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for name in ("ip", "ssh", "sshd", "ssh-keygen"):
        if program(name) is None:
            return f"{name} is not installed (apt-get install iproute2 openssh-server)"
    with tempfile.TemporaryDirectory() as folder:
        try:
            with hosts(1, Path(folder)):
                return None
        except (subprocess.CalledProcessError, TimeoutError) as error:
            return f"network namespaces are not allowed here: {error}"


class Hosts:
    """Hosts by number from 1: host 2 has the address 10.77.N.2 of a network of its own."""

    def __init__(self, count: int, folder: Path) -> None:
        self._net, self._reservation = _reserved_number()
        self._folder = folder
        self._servers: list[subprocess.Popen[bytes]] = []
        self.count = count

    def address(self, host: int) -> str:
        return f"10.77.{self._net}.{host}"

    def inside(self, host: int) -> list[str]:
        """Returns the words before a command that runs on a host."""
        return [_ip(), "netns", "exec", self.name(host), *_named(f"h{host}")]

    def on_network(self, host: int, name: str) -> list[str]:
        """Returns the words before a command with a host's network and a name of its own.

        It sees this machine's /sys, which `ip netns exec` hides. Slurm's daemon looks there for
        control groups.
        """
        return ["nsenter", f"--net=/run/netns/{self.name(host)}", *_named(name)]

    def ssh(self) -> str:
        """Returns what --ssh is given."""
        return f"ssh -F {self.ssh_config}"

    @property
    def ssh_config(self) -> Path:
        return self._folder / "ssh_config"

    @property
    def search_path(self) -> str:
        """PATH on a host: `python` is that of the tests, and `ssh` reaches the other hosts."""
        return f"{self._folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"

    def cut_off(self, host: int) -> None:
        """From now on the packets from and to a host are dropped; it does not see why."""
        _run("link", "set", self._link(host), "nomaster")

    def bring_back(self, host: int) -> None:
        """Ends `cut_off`."""
        _run("link", "set", self._link(host), "master", self._bridge)

    @property
    def _bridge(self) -> str:
        return f"tfm{self._net}"

    def name(self, host: int) -> str:
        return f"tfm{self._net}-{host}"

    def _link(self, host: int) -> str:
        return f"tfm{self._net}v{host}"

    def hosts_file(self, host: int) -> Path:
        """Returns the file with the names that a host resolves. `inside` shows it as /etc/hosts."""
        return _own_etc(self.name(host)) / "hosts"

    def begin(self) -> None:
        # A process that had this number may have been killed.
        self._remove()
        _run("link", "add", self._bridge, "type", "bridge")
        _run("address", "add", f"{self.address(254)}/24", "dev", self._bridge)
        _run("link", "set", self._bridge, "up")
        numbers = range(1, self.count + 1)
        names = "".join(f"{self.address(host)} h{host}\n" for host in numbers)
        for host in numbers:
            name, link = self.name(host), self._link(host)
            _run("netns", "add", name)
            _run("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("link", "set", link, "master", self._bridge)
            _run("link", "set", link, "up")
            _run("-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            _run("-n", name, "link", "set", "eth0", "up")
            _run("-n", name, "link", "set", "lo", "up")
            _own_etc(name).mkdir(parents=True)
            self.hosts_file(host).write_text(f"127.0.0.1 localhost\n{names}")
        self._begin_ssh()

    def _begin_ssh(self) -> None:
        folder = self._folder
        for key in ("key", "host_key"):
            argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
            subprocess.run(argv, check=True)
        self.ssh_config.write_text(SSH_CONFIG.format(folder=folder))
        agent = folder / "ssh"
        agent.write_text(f'#!/bin/sh\nexec {program("ssh")} -F {folder}/ssh_config "$@"\n')
        agent.chmod(0o755)
        Path("/run/sshd").mkdir(exist_ok=True)
        server = program("sshd")
        assert server is not None
        for host in range(1, self.count + 1):
            path = folder / f"sshd_config_{host}"
            values = {"address": self.address(host), "path": self.search_path, "root": ROOT}
            path.write_text(SSHD_CONFIG.format(folder=folder, **values))
            argv = [*self.inside(host), server, "-D", "-e", "-f", str(path)]
            with open(folder / f"sshd_{host}.log", "wb") as log:
                self._servers.append(subprocess.Popen(argv, stderr=log))
        deadline = time.monotonic() + 60
        for host in range(1, self.count + 1):
            while subprocess.run(
                [agent, self.address(host), "true"], capture_output=True, check=False
            ).returncode:
                if time.monotonic() > deadline:
                    log_text = (folder / f"sshd_{host}.log").read_text()
                    raise TimeoutError(f"sshd of host {host} does not answer: {log_text}")
                time.sleep(0.1)

    def end(self) -> None:
        for server in self._servers:
            server.kill()
            server.wait()
        self._remove()
        self.give_back()

    def give_back(self) -> None:
        """Lets another network have this number."""
        self._reservation.close()

    def _remove(self) -> None:
        """Removes the network with its hosts, as far as they exist."""
        for host in range(1, self.count + 1):
            with contextlib.suppress(subprocess.CalledProcessError):
                _run("link", "del", self._link(host))
            with contextlib.suppress(subprocess.CalledProcessError):
                _run("netns", "del", self.name(host))
            shutil.rmtree(_own_etc(self.name(host)), ignore_errors=True)
        with contextlib.suppress(subprocess.CalledProcessError):
            _run("link", "del", self._bridge)


def _reserved_number() -> tuple[int, socket.socket]:
    """Returns a number that no other network on this machine has, and what reserves it.

    The system lets one socket have an abstract name, until the socket is closed or its process
    ends (unix(7)).
    """
    for number in NUMBERS:
        reservation = socket.socket(socket.AF_UNIX)
        try:
            reservation.bind(f"\0tfmulti-tests-network-{number}")
        except OSError:
            reservation.close()
        else:
            return number, reservation
    raise TimeoutError(f"all {len(NUMBERS)} networks are in use")


@contextlib.contextmanager
def hosts(count: int, folder: Path) -> Iterator[Hosts]:
    """Gives so many hosts that reach each other; afterwards nothing of them is left."""
    made = Hosts(count, folder)
    try:
        made.begin()
        yield made
    finally:
        made.end()


def _named(name: str) -> list[str]:
    """Returns the words before a command that sees another name of this machine."""
    return ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', name]


def _own_etc(name: str) -> Path:
    """Returns the folder with the files that a network namespace sees in /etc."""
    return Path("/etc/netns") / name


def program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _ip() -> str:
    found = program("ip")
    assert found is not None
    return found


def _run(*words: str) -> None:
    subprocess.run([_ip(), *words], check=True, capture_output=True)
