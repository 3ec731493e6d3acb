"""Compares Slurm's host lists with ClusterShell's: brackets, suffixes, zeros, order."""

from __future__ import annotations

import contextlib
import stat
from pathlib import Path

import pytest
from ClusterShell.NodeSet import NodeSet
from hypothesis import given
from hypothesis import strategies as st

from tfmulti.cluster.host_lists import HostListError, expand_counts, expand_hosts, parse_hosts

NAMES = st.from_regex(r"[a-z]{1,3}", fullmatch=True)
SUFFIXES = st.sampled_from(["", "-ib", "x"])


@st.composite
def ranges(draw: st.DrawFn) -> str:
    """Draws a bracket as Slurm writes it: distinct numbers of one width, in order."""
    width = draw(st.integers(1, 3))
    ends = sorted(draw(st.sets(st.integers(0, 10**width - 1), min_size=1, max_size=6)))
    found = []
    while ends:
        first = ends.pop(0)
        if ends and draw(st.booleans()) and ends[0] - first < 20:
            found.append(f"{first:0{width}d}-{ends.pop(0):0{width}d}")
        else:
            found.append(f"{first:0{width}d}")
    return f"[{','.join(found)}]"


@given(st.lists(st.tuples(NAMES, ranges(), SUFFIXES), min_size=1, max_size=4))
def test_lists_are_those_of_clustershell(parts: list[tuple[str, str, str]]) -> None:
    entries = ["".join(part) for part in parts]
    # ClusterShell sorts the hosts of a list, and names each once, so it is asked for each entry.
    expected = [host for entry in entries for host in NodeSet(entry)]
    assert parse_hosts(",".join(entries)) == expected


@given(NAMES, ranges(), NAMES, ranges())
def test_several_brackets_are_those_of_clustershell(a: str, b: str, c: str, d: str) -> None:
    assert parse_hosts(a + b + c + d) == list(NodeSet(a + b + c + d))


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n2,n1", ["n2", "n1"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("a[2,1]-x.org,b", ["a2-x.org", "a1-x.org", "b"]),
        ("n[9-10]", ["n9", "n10"]),
    ],
)
def test_the_order_is_that_of_the_list(text: str, hosts: list[str]) -> None:
    assert parse_hosts(text) == hosts


@given(st.text(alphabet="n1[]-,0 (x)", max_size=20))
def test_any_other_text_is_a_mistake(text: str) -> None:
    for parse in (parse_hosts, expand_counts):
        with contextlib.suppress(HostListError):
            assert parse(text)


@pytest.mark.parametrize("text", ["a[1-65536]b[1-2]", "a[1-70000]", "n[0-9]" * 12])
def test_a_list_of_too_many_hosts_takes_no_memory(text: str) -> None:
    with pytest.raises(HostListError):
        parse_hosts(text)


def test_scontrol_is_used_if_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "scontrol"
    program.write_text('#!/bin/sh\n[ "$3" = "n[1-2]" ] && printf "real1\\nreal2\\n"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert expand_hosts("n[1-2]") == ["real1", "real2"]
    # The scontrol of this test fails for this list, so tfmulti expands it itself.
    assert expand_hosts("n[3-4]") == ["n3", "n4"]


def test_counts() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
