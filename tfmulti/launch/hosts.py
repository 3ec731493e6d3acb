"""Reads the names of the machines that a job may use, from a flag, a file or a script."""

from __future__ import annotations

import ipaddress
import os
import shlex
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tfmulti.cluster import listening
from tfmulti.cluster.allocation import MOST_BYTES
from tfmulti.cluster.host_lists import MOST_HOSTS
from tfmulti.config.limited_reading import read_small, whole_number
from tfmulti.errors import ConfigError

# The names that each machine has only for itself.
LOOPBACK_NAMES = ("localhost", listening.LOOPBACK, "[::1]")

# The longest name that DNS has.
_MOST_CHARACTERS = 255
# The time limit for a discovery script.
SCRIPT_LIMIT_S = 30.0


@dataclass(frozen=True)
class Host:
    """A machine that is named for a job.

    Attributes:
        name: the name under which the other machines reach it, with an IPv6 address in brackets.
        slots: the number of its workers; None if --nproc-per-node gives the number.
    """

    name: str
    slots: int | None = None


def parse_hosts(text: str, source: str = "--hosts") -> tuple[Host, ...]:
    """Returns the hosts of a list such as `h1:2,h2:2`.

    A name without a number leaves the number of workers to --nproc-per-node. An IPv6 address must
    be in brackets.

    Args:
        text: the list.
        source: where the list comes from, for error messages.

    Raises:
        ConfigError: a part has another form, or a host is named twice.
    """
    return _distinct([_host(part.strip(), source) for part in text.split(",")], source)


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Returns the hosts of a file that has a line `host slots=N` for each, as OpenMPI uses it.

    `#` begins a comment. `slots` may be left out, as the number in `parse_hosts`.

    Args:
        path: the file.

    Raises:
        ConfigError: the file cannot be read, names no host or the same host twice, or a line has
            another form.
    """
    try:
        lines = read_small(path, MOST_BYTES).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--hostfile {path}: {reason}. Give a readable file.") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        line_source = f"line {number} of --hostfile {path}"
        name, *rest = fields
        if len(rest) > 1 or (rest and not rest[0].startswith("slots=")):
            raise ConfigError(f"{line_source} is {line.strip()[:80]!r}. Write: host slots=N")
        hosts.append(_host(f"{name}:{rest[0][6:]}" if rest else name, line_source))
    if not hosts:
        raise ConfigError(f"--hostfile {path} names no machine. Write a line: host slots=N")
    return _distinct(hosts, f"--hostfile {path}")


def discover(command: str) -> tuple[Host, ...]:
    """Returns the hosts that a program prints, a line `host:slots` or `host` for each.

    Source: https://horovod.readthedocs.io/en/stable/elastic_include.html

    Args:
        command: the command that runs the program.

    Raises:
        ConfigError: the program cannot be run, fails, takes more than 30 s, prints another form, or
            prints the same host twice.
    """
    source = f"--host-discovery-script {command}"
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
        raise ConfigError(f"{source} took over {SCRIPT_LIMIT_S:g} s. Make it answer.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{source}: {reason}. Give a program that can be run.") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
        raise ConfigError(
            f"{source} exited with {done.returncode}: {last}. Run it yourself to see the error."
        )
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return _distinct([_host(line, f"a line of {source}") for line in lines], source)


def is_here(name: str) -> bool:
    """Returns whether a name belongs to this machine: one of its addresses can be bound here.

    Args:
        name: a host name or an address, with an IPv6 address in brackets.
    """
    own_names = (*LOOPBACK_NAMES, socket.gethostname())
    return name in own_names or listening.is_here(name.strip("[]"))


def _host(text: str, source: str) -> Host:
    """Returns the host of `host:N` or `host`, or raises ConfigError."""
    name, colon, slots = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        name, slots = text, ""
    no_host = f"{source}: {text[:80]!r} is not a host. Write: host:N, N the workers on it."
    # SSH would take a name that begins with - for a flag. A name with a zero byte or a line feed is
    # not printable.
    is_safe = name.isprintable() and not set(name) & set(" '\"=;&|$`@\\/")
    if not (0 < len(name) <= _MOST_CHARACTERS) or name.startswith("-") or not is_safe:
        raise ConfigError(no_host)
    if "[" in name or "]" in name:
        try:
            ipaddress.IPv6Address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            raise ConfigError(
                f"{source}: {text[:80]!r}: only an IPv6 address may stand in brackets."
            ) from None
    if ":" in name and not (name.startswith("[") and name.endswith("]")):
        raise ConfigError(f"{source}: {text[:80]!r}: put an IPv6 address into brackets: [::1]:N.")
    count = whole_number(slots)
    if colon and not (count and count <= MOST_HOSTS):
        raise ConfigError(no_host)
    return Host(name, count)


def _distinct(hosts: Sequence[Host], source: str) -> tuple[Host, ...]:
    """Returns the hosts, or raises ConfigError if a name occurs twice."""
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{source} names {name} twice. Give one line with all its workers.")
    return tuple(hosts)


def slots_of(per_node: str, gpus: int, cores: int | None = None) -> int:
    """Returns how many workers `--nproc-per-node` means on a machine.

    Args:
        per_node: the value of the flag: a number, auto, cpu or gpu.
        gpus: the number of GPUs of the machine.
        cores: the number of cores of the machine. None: those of this machine.

    Raises:
        ConfigError: the value is `gpu`, and the machine has no GPU.
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
