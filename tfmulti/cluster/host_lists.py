"""Expands Slurm's lists of hosts, such as `n[1-3,07],login`, and of counts, such as `2(x3),1`.

The rules are those of https://slurm.schedmd.com/scontrol.html (`show hostnames`): a host has any
number of brackets, the last one counts fastest, and a number keeps the zeros before it.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess

# A crafted list may stand for more hosts than memory holds.
MOST_HOSTS = 1 << 16
_HOST = re.compile(r"(?:[^\s,\[\]]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


class HostListError(ValueError):
    """Raised for a list that does not follow the rules; the message is one sentence."""


def expand_hosts(text: str) -> list[str]:
    """Returns the hosts of a list, in its order.

    `scontrol show hostnames` is asked first, if it is installed. In a container it often is not.

    Raises:
        HostListError: the list does not follow the rules, or has more than `MOST_HOSTS` hosts.
    """
    hosts = parse_hosts(text)
    return _by_scontrol(text) or hosts


def parse_hosts(text: str) -> list[str]:
    """Returns the hosts of a list, as `expand_hosts`, without asking scontrol.

    Raises:
        HostListError: the list does not follow the rules, or has more than `MOST_HOSTS` hosts.

    >>> parse_hosts("n[1-2,07]-ib,login")
    ['n1-ib', 'n2-ib', 'n07-ib', 'login']
    """
    hosts: list[str] = []
    position = 0
    while position <= len(text):
        match = _HOST.match(text, position)
        end = match.end() if match else position
        if match is None or text[end : end + 1] not in ("", ","):
            raise HostListError(f"the host list {text[:80]!r} does not parse at character {end}.")
        hosts += _hosts_of(match[0], text)
        if len(hosts) > MOST_HOSTS:
            raise HostListError(f"the host list {text[:80]!r} has more than {MOST_HOSTS} hosts.")
        position = end + 1
    return hosts


def _hosts_of(pattern: str, text: str) -> list[str]:
    """Returns the hosts of one entry of a list."""
    parts: list[list[str]] = []
    count = 1
    for piece in re.split(r"(\[[^\[\]]*\])", pattern):
        parts.append(_numbers(piece[1:-1], text) if piece.startswith("[") else [piece])
        count *= len(parts[-1])
        if count > MOST_HOSTS:
            raise HostListError(f"the host list {text[:80]!r} has more than {MOST_HOSTS} hosts.")
    return ["".join(combination) for combination in itertools.product(*parts)]


def _numbers(ranges: str, text: str) -> list[str]:
    """Returns the numbers of one bracket, each with its zeros."""
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None or len(part) > 40:
            raise HostListError(f"the host list {text[:80]!r} has a bracket that is no range.")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or int(last) - int(first) >= MOST_HOSTS:
            raise HostListError(f"the host list {text[:80]!r} has the wrong range {part[:40]!r}.")
        width = len(first)
        numbers += [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]
    return numbers


def expand_counts(text: str) -> list[int]:
    """Returns the numbers of tasks of all nodes.

    Raises:
        HostListError: the list does not follow the rules, or has more than `MOST_HOSTS` tasks.

    >>> expand_counts("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    total = 0
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None or not int(match[2] or 1):
            raise HostListError(f"the list of tasks {text[:80]!r} does not parse.")
        tasks, nodes = int(match[1]), int(match[2] or 1)
        total += max(tasks, 1) * nodes
        if total > MOST_HOSTS:
            raise HostListError(f"the list of tasks {text[:80]!r} has more than {MOST_HOSTS}.")
        counts += [tasks] * nodes
    return counts


def _by_scontrol(text: str) -> list[str] | None:
    """Returns what scontrol makes of a list, or None if it is not there or fails."""
    program = shutil.which("scontrol")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "show", "hostnames", text], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split() if done.returncode == 0 else None
