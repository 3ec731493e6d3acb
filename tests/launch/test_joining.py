"""Tests that a worker whose peers do not join names them, and writes what it waits for."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tfmulti.config.run_directory import write_text
from tfmulti.launch import joining
from tfmulti.launch.addresses import reserved
from tfmulti.launch.joining import Join, hang_file, report, watch
from tfmulti.launch.stacks import STACKS_FILE
from tfmulti.training.watchdog import read

STACKS = """Stack (most recent call first):
  File "/a/reader.py", line 7 in read
Stack (most recent call first):
  File "/b/context.py", line 745 in ensure_initialized
  File "/b/train.py", line 3 in <module>
"""


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Join]:
    """Gives worker 0 of three, of which worker 1 listens and worker 2 does not."""
    with reserved(2) as (own, silent), socket.create_server(("127.0.0.1", 0)) as other:
        addresses = (own, f"127.0.0.1:{other.getsockname()[1]}", silent)
        yield Join(0, addresses, str(tmp_path / "run"), os.getpid(), None)


def test_the_missing_worker_and_the_stacks_are_told(
    join: Join, capsys: pytest.CaptureFixture[str]
) -> None:
    report(join, False, 61.0, STACKS)
    assert join.folder is not None
    path = Path(join.folder) / hang_file(0)
    assert capsys.readouterr().err == (
        "tfmulti: worker 0: it has waited for 61 s for the others to join; worker 2 does not "
        f"listen at {join.addresses[2]} (refused). Start it, or correct its address. See {path} "
        "(docs: troubleshooting#no-port)\n"
    )
    found = json.loads(path.read_text())
    assert found["waits"] == [{"what": "the rendezvous", "missing": [2], "seconds": 61.0}]
    assert found["stacks"] == {
        "MainThread": ["/b/train.py:3 <module>", "/b/context.py:745 ensure_initialized"],
    }
    # The watchdog of `fit` reads the files of other workers.
    assert read(path) == found


@pytest.mark.parametrize(("rank", "prints"), [(0, True), (1, False), (2, False)])
def test_the_first_late_worker_prints(
    join: Join, capsys: pytest.CaptureFixture[str], rank: int, prints: bool
) -> None:
    addresses = (join.addresses[1], *join.addresses[1:])
    report(dataclasses.replace(join, rank=rank, addresses=addresses), False, 61.0, "")
    assert bool(capsys.readouterr().err) == prints
    assert join.folder is not None
    assert (Path(join.folder) / hang_file(rank)).exists()


def test_a_signal_before_the_watching_process_has_started_counts(
    join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_LOOK_S", 0.01)
    (tmp_path / "stacks").write_text(STACKS)
    reader, writer = os.pipe()
    asked = []

    def reports(join: Join, is_asked: bool, waited_s: float, stacks: str) -> None:
        asked.append((is_asked, stacks))
        os.close(writer)

    monkeypatch.setattr(joining, "report", reports)
    with os.fdopen(reader) as stdin, open(tmp_path / "stacks") as stacks:
        monkeypatch.setattr(sys, "stdin", stdin)
        # A watch that misses the signal reports the worker as late.
        watch(dataclasses.replace(join, stacks=stacks.fileno()), 1.0, 1.0)
    assert asked == [(True, STACKS)]


def test_a_late_worker_is_told_early_and_late_until_the_input_ends(
    join: Join, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(joining, "_LOOK_S", 0.01)
    reader, writer = os.pipe()
    told = threading.Event()

    def tells(path: Path, text: str) -> None:
        write_text(path, text)
        told.set()

    monkeypatch.setattr(joining, "write_text", tells)
    with os.fdopen(reader) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        thread = threading.Thread(target=watch, args=(join, 0.0, 0.0))
        thread.start()
        assert told.wait(30)
        # It could tell again in the next looks.
        thread.join(0.1)
        assert thread.is_alive()
        os.close(writer)
        thread.join(30)
        assert not thread.is_alive()
    # The first line comes early, and has no file.
    early, late = capsys.readouterr().err.splitlines()
    assert "it has waited for" in early
    assert hang_file(0) not in early
    assert "it has waited for" in late
    assert hang_file(0) in late


def test_a_name_that_does_not_resolve_is_told_with_who_set_tf_config(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with reserved(1) as (own,):
        join = Join(0, (own, "no-such-host.invalid:2222"), None, os.getpid(), None)
        joining.tell(join, 5.0, joining.not_listening(join))
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": join.addresses}}))
        joining.tell(join, 5.0, joining.not_listening(join))
        monkeypatch.setenv(STACKS_FILE, "x")
        joining.tell(join, 5.0, joining.not_listening(join))
    one, own_script, launched = capsys.readouterr().err.splitlines()
    assert (
        "worker 1 does not listen at no-such-host.invalid:2222 (the name does not resolve)" in one
    )
    assert "TF_CONFIG" not in one
    assert "in TF_CONFIG, which the script itself has set (docs: " in own_script
    assert "in TF_CONFIG, which the launcher has set (docs: " in launched
