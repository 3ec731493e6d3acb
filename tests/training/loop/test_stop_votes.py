"""Tests the votes of workers, and signals that become votes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from tfmulti.distribution.agreement import MOST_EXACT
from tfmulti.errors import ConfigError
from tfmulti.launch.signals import SignalWatch, sigterm_grace_s
from tfmulti.training.loop.stop_votes import Votes
from tfmulti.training.step.steps_per_execution import SHORTEST_STEP_S, TARGET_S


def test_the_strongest_reason_to_stop_counts() -> None:
    assert Votes(checkpoint=1, steps=9, comparison=2).reason_to_stop() is None
    assert Votes(requested=2).reason_to_stop() == "requested"
    assert Votes(requested=1, sigint=1).reason_to_stop() == "SIGINT"
    assert Votes(requested=1, sigint=1, sigterm=1).reason_to_stop() == "SIGTERM"


@pytest.mark.parametrize("local_replicas", [1, 2, 8])
def test_only_the_chiefs_number_of_steps_counts(local_replicas: int) -> None:
    """All sums are exact in float32, in which votes travel."""
    largest = round(TARGET_S / SHORTEST_STEP_S)
    assert largest * local_replicas < MOST_EXACT
    for steps in (37, largest - 1, largest):
        chief, other = np.float32(Votes(steps=steps)), np.float32(Votes())
        summed = Votes(*sum([chief] * local_replicas + [other] * 64).astype(int).tolist())
        assert summed.agreed_steps(local_replicas) == steps
        assert summed.reason_to_stop() is None
        assert not summed.checkpoint


def wait_for(condition: Callable[[], object]) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("nothing happened within 5 s")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_to_stop(number: signal.Signals) -> None:
    asked: list[str] = []
    exits: list[int] = []
    with SignalWatch(grace_s=60, exit=exits.append) as watch:
        watch.stop = asked.append
        os.kill(os.getpid(), number)
        wait_for(lambda: asked)
        watch.finished()
    assert asked == [number.name]
    assert exits == []


def test_a_signal_without_anything_to_save_ends_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    exits: list[int] = []
    with SignalWatch(exit=exits.append):
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(lambda: exits)
    assert exits == [130]
    assert "nothing was begun" in capfd.readouterr().err


def test_a_second_signal_ends_at_once() -> None:
    asked: list[str] = []
    exits: list[int] = []
    with SignalWatch(grace_s=60, exit=exits.append) as watch:
        watch.stop = asked.append
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: asked)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: exits)
    assert exits == [143]


def test_a_training_that_hangs_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    exits: list[int] = []
    with SignalWatch(grace_s=0.05, exit=exits.append) as watch:
        watch.stop = lambda reason: None
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(lambda: exits)
    assert exits == [130]
    assert "no step ended, or no checkpoint was written, within 0.05 s" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("given", "grace_s"), [(None, 4), ("30", 29), ("120.5", 119.5), ("2", 1.5), ("0.4", 0.3)]
)
def test_the_grace_period_is_the_launchers_less_a_margin(given: str | None, grace_s: float) -> None:
    assert sigterm_grace_s({} if given is None else {"TFMULTI_GRACE_S": given}) == pytest.approx(
        grace_s
    )


@pytest.mark.parametrize("given", ["soon", "", "0", "-1", "nan", "inf"])
def test_an_invalid_grace_period_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=f"TFMULTI_GRACE_S is '{given}'"):
        sigterm_grace_s({"TFMULTI_GRACE_S": given})


@pytest.mark.parametrize(("number", "ends"), [(signal.SIGTERM, False), (signal.SIGINT, True)])
def test_a_long_checkpoint_is_finished_after_sigterm(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, ends: bool
) -> None:
    """After Ctrl-C the limit is five seconds, whatever the launcher's grace period is."""
    monkeypatch.setattr("tfmulti.launch.signals.GRACE_S", 0.05)
    monkeypatch.setenv("TFMULTI_GRACE_S", "60")
    exits: list[int] = []
    asked: list[str] = []
    with SignalWatch(exit=exits.append) as watch:
        watch.stop = asked.append
        os.kill(os.getpid(), number)
        wait_for(lambda: asked)
        # The checkpoint is being written during this time.
        time.sleep(0.5)
        watch.finished()
    assert bool(exits) is ends


def test_signal_handlers_are_restored() -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    threads = threading.active_count()
    with SignalWatch():
        pass
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    assert threading.active_count() == threads


def test_another_thread_than_the_main_one_is_left_alone() -> None:
    def enter() -> None:
        with SignalWatch():
            pass

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before
