"""One process at a time owns a folder that two machines see over a network.

The second machine is a process with another namespace of process ids, and another mount of the
folder by sshfs, whose caches are on as by default.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security.test_owner import started_at_once, steps_in
from tests.support.launching import wait_for
from tests.support.mounts import seen_by_two_machines, why_not_over_network
from tests.support.processes import processes

WHY_NOT = why_not_over_network()
pytestmark = [pytest.mark.hosts, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

LIMIT_S = 240
# Linux then takes the processes for those of another machine.
OTHER_MACHINE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    with seen_by_two_machines(tmp_path) as places:
        yield places


def fit(place: Path, epochs: int) -> list[str]:
    flags = ["--epochs", str(epochs), "--checkpoint_every_steps", "20"]
    return ["-m", "tfmulti.fit", "--run_dir", str(place / "run"), *flags]


def test_a_run_is_refused_until_the_run_on_another_machine_has_ended(
    tmp_path: Path, machines: tuple[Path, Path]
) -> None:
    """Then a later attempt of its job, on the first machine again, ends it without saving."""
    one, two = machines
    server, job = tmp_path / "server" / "run" / "checkpoints", {"TFMULTI_RUN_ID": "r"}
    with processes(tmp_path / "logs") as group:
        first = group.start(fit(one, 100_000))
        wait_for(lambda: steps_in(server), LIMIT_S)
        refused = group.start(fit(two, 100_000), before=OTHER_MACHINE)
        assert refused.wait(LIMIT_S) == 2
        assert group.errors(1).count("\n") == 1
        assert "is in use by another run: process " in group.errors(1)
        assert first.poll() is None
        first.kill()
        first.wait()
        left = max(steps_in(server))
        group.start(fit(two, 100_000), {**job, "TFMULTI_ATTEMPT": "0"}, before=OTHER_MACHINE)
        wait_for(lambda: max(steps_in(server)) > left, LIMIT_S)
        group.start(fit(one, 100_000), {**job, "TFMULTI_ATTEMPT": "1"})
        wait_for(lambda: "ends without saving" in group.errors(2), LIMIT_S)
        left = max(steps_in(server))
        wait_for(lambda: max(steps_in(server)) > left, LIMIT_S)
        assert json.loads((server / "owner.json").read_text())["attempt"] == 1
        os.killpg(group.pid(3), 15)
        *_, fenced, later = group.wait(LIMIT_S)
    assert "see whether that run is alive" in fenced.stderr
    assert (fenced.returncode, later.returncode) == (1, 143)


def test_of_two_machines_that_start_at_once_one_takes_the_folder(
    machines: tuple[Path, Path],
) -> None:
    """Each of the two can lock the folder, because sshfs keeps locks on the machine."""
    locked = [os.open(place, os.O_RDONLY) for place in machines]
    for descriptor in locked:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for descriptor in locked:
        os.close(descriptor)
    folders = [place / "checkpoints" for place in machines]
    codes, said = started_at_once(zip(((), OTHER_MACHINE), folders, strict=True), 60)
    assert sum("is in use by another run: process " in words for words in said) == 1, said
    assert codes == [0, 1], said
