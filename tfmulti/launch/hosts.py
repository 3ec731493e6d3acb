"""The machines that a job may use: from a flag, a file, or a script that finds them."""

from __future__ import annotations

import ipaddress
import os
import shlex
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tfmulti.cluster.listening import can_bind
from tfmulti.errors import ConfigError
from tfmulti.launch.addresses import LOOPBACK

LOOPBACK_NAMES = ("localhost", LOOPBACK, "[::1]")  # each machine's for itself alone
SCRIPT_LIMIT_S = 30.0


@dataclass(frozen=True)
class Host:
    """A machine by the name under which the others reach it, and how many workers it takes.

    `slots` is None where --nproc-per-node says it.
    """

    name: str
    slots: int | None = None


def parse_hosts(text: str, place: str = "--hosts") -> tuple[Host, ...]:
    """Returns the hosts of `h1:2,h2:2`; a bare name leaves the workers to --nproc-per-node.

    An IPv6 address stands in brackets.

    Raises:
        ConfigError: a part has another form, or a host is named twice.
    """
    return _distinct([_host(part.strip(), place) for part in text.split(",")], place)


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Returns the hosts of a file with a line `host slots=N` for each, as OpenMPI's.

    `#` begins a comment; `slots` may be left out, as in `parse_hosts`.

    Raises:
        ConfigError: the file cannot be read, or a line has another form.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--hostfile {path}: {reason}. Give a readable file.") from None
    found = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        place = f"line {number} of --hostfile {path}"
        name, *rest = words
        if len(rest) > 1 or (rest and not rest[0].startswith("slots=")):
            raise ConfigError(f"{place} is {line.strip()!r}. Write: host slots=N")
        found.append(_host(f"{name}:{rest[0][6:]}" if rest else name, place))
    if not found:
        raise ConfigError(f"--hostfile {path} names no machine. Write a line: host slots=N")
    return _distinct(found, f"--hostfile {path}")


def discover(command: str) -> tuple[Host, ...]:
    """Returns the hosts that a program prints, a line `host:slots` or `host` for each.

    Raises:
        ConfigError: it cannot be run, fails, takes over 30 s, or prints another form.

    Source: https://horovod.readthedocs.io/en/stable/elastic_include.html
    """
    place = f"--host-discovery-script {command}"
    try:
        done = subprocess.run(
            shlex.split(command),
            capture_output=True,
            text=True,
            timeout=SCRIPT_LIMIT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{place} took over {SCRIPT_LIMIT_S:g} s. Make it answer.") from None
    except (OSError, ValueError) as error:
        words = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{place}: {words}. Give a program that can be run.") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
        raise ConfigError(f"{place} exited with {done.returncode}: {last}. Run it by hand.")
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return _distinct([_host(line, f"a line of {place}") for line in lines], place)


def is_here(name: str) -> bool:
    """Whether a name is this machine's: one of its addresses can be bound."""
    if name in (*LOOPBACK_NAMES, socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(name.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(can_bind(family, address) for family, _, _, _, address in found)


def _host(text: str, place: str) -> Host:
    name, colon, slots = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        name, slots = text, ""
    form = f"{place}: {text!r} is no host. Write: host:N, N the workers on it."
    # A name that began with - would be a flag of ssh's.
    if not name or name.startswith("-") or any(c in name for c in " \t'\"=;&|$`@"):
        raise ConfigError(form)
    if "[" in name or "]" in name:
        try:
            ipaddress.IPv6Address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            raise ConfigError(f"{place}: {text!r}: in brackets stands an IPv6 address.") from None
    if ":" in name and not (name.startswith("[") and name.endswith("]")):
        raise ConfigError(f"{place}: {text!r}: put an IPv6 address into brackets: [::1]:N.")
    if colon and not (slots.isdecimal() and 0 < len(slots) < 6 and int(slots) > 0):
        raise ConfigError(form)
    return Host(name, int(slots) if colon else None)


def _distinct(hosts: Sequence[Host], place: str) -> tuple[Host, ...]:
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{place} names {name} twice. Give one line with all its workers.")
    return tuple(hosts)


class HostSources:
    """Where the hosts of a job come from, and what that says now.

    Args:
        hosts: those of the command line.
        file, script: a host file or a program, which are read again while the job runs.
    """

    def __init__(
        self, hosts: Sequence[Host], file: Path | None = None, script: str | None = None
    ) -> None:
        self._hosts, self._file, self._script = tuple(hosts), file, script

    @property
    def may_change(self) -> bool:
        """Whether the hosts may be others later."""
        return self._file is not None or self._script is not None

    def now(self) -> tuple[Host, ...]:
        """Returns the hosts as they are named now.

        Raises:
            ConfigError: the file or the program is not in order.
        """
        if self._script is not None:
            return discover(self._script)
        if self._file is not None:
            return read_hostfile(self._file)
        return self._hosts


def slots_of(per_node: str, gpus: int, cores: int | None = None) -> int:
    """Returns how many workers `--nproc-per-node` means on a machine.

    Raises:
        ConfigError: `gpu` on a machine without.
    """
    if per_node == "gpu" and not gpus:
        raise ConfigError(
            "--nproc-per-node gpu, but this machine has no GPU that a program may see. Give a "
            "number, or cpu for one worker a core."
        )
    if per_node in ("auto", "gpu"):
        return max(1, gpus)
    if per_node == "cpu":
        return cores or os.cpu_count() or 1
    return int(per_node)
