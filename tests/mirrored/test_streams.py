"""A stream that is closed: its threads end at once, and nothing more is read."""

from __future__ import annotations

import threading

import pytest

from tests.unit.test_reader import Gated
from tfmulti.plan import Plan
from tfmulti.reader import Reader
from tfmulti.reading import Reading
from tfmulti.strategies import Placement
from tfmulti.streams import stream_of


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_a_closed_stream_reads_no_more(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads that are in work when it is closed end after it was stopped, and no other begins."""
    source, stop = Gated(64), Reader.stop

    def stopping(reader: Reader) -> None:
        stop(reader)
        source.go.set()

    monkeypatch.setattr(Reader, "stop", stopping)
    before = set(threading.enumerate())
    stream = stream_of(source, Plan(64, 16), Placement(0, 2, 2), 0, Reading(threads))
    in_work = max(threads, 1)
    source.wait_for(in_work)
    stream.close()
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith("tfmulti")]
    assert len(source.calls) == in_work
    assert stream.error is None
