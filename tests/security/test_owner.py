"""One process at a time owns a run's folder; a process that lost it changes nothing there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.compat.proto import event_pb2

from tests.support.launching import wait_for
from tests.support.processes import processes
from tfmulti import Watchdog
from tfmulti.config import run_directory
from tfmulti.distribution.strategies import Placement
from tfmulti.errors import ResumeError
from tfmulti.run import train
from tfmulti.run.callbacks.scalars import WritesScalars
from tfmulti.run.callbacks.tensorboard import TensorBoard
from tfmulti.training.checkpoint import owner
from tfmulti.training.checkpoint.file_format import Checkpoints, Record
from tfmulti.training.checkpoint.owner import FILE, NotOwnerError, Owner, Ownership, ownership_of
from tfmulti.training.watchdog import respect_owner, watching

pytestmark = pytest.mark.processes

LIMIT_S = 120


def job(attempt: int, run_id: str = "r") -> dict[str, str]:
    return {"TFMULTI_RUN_ID": run_id, "TFMULTI_ATTEMPT": str(attempt)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, and an owner that is taken for gone after a second without a touch."""
    monkeypatch.setattr(owner, "SILENT_S", 1.0)
    monkeypatch.setattr(owner, "BEAT_S", 0.1)
    return tmp_path / "checkpoints"


@pytest.fixture
def living() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)"])
    yield process
    process.kill()
    process.wait()


def left_by(folder: Path, process: subprocess.Popen[bytes], **values: Any) -> None:
    """Leaves the record of a process as owner."""
    mine = Ownership(folder, job(5))._mine
    record = replace(mine, pid=process.pid, began=owner._began(process.pid), token="other")
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_text(json.dumps({**vars(record), **values}))


def has_ended(folder: Path) -> bool:
    """Whether the last owner has given the folder back."""
    return bool(json.loads((folder / FILE).read_text())["ended"])


def test_a_second_start_is_told_who_owns_the_folder(
    folder: Path, living: subprocess.Popen[bytes]
) -> None:
    left_by(folder, living, run_id="")
    before = (folder / FILE).read_text()
    with pytest.raises(ResumeError) as error:
        Ownership(folder, {}).take()
    assert f"is in use by another run: process {living.pid} on '" in str(error.value)
    assert "since '20" in str(error.value)
    assert (folder / FILE).read_text() == before
    living.kill()
    living.wait()
    begun = time.monotonic()
    last = Ownership(folder, {})
    last.take()
    assert time.monotonic() - begun < owner.SILENT_S / 2  # it is known at once, on one machine
    last.release()
    assert has_ended(folder)


STARTS = """
import sys, time
from pathlib import Path
from tfmulti import Watchdog
from tfmulti.distribution.strategies import Placement
from tfmulti.errors import ResumeError
from tfmulti.training.checkpoint.owner import ownership_of
print("ready", flush=True)
sys.stdin.readline()
try:
    ownership_of(Path(sys.argv[1])).take()
except ResumeError as error:
    sys.exit(str(error))
time.sleep(2)
"""


def started_at_once(
    commands: Iterable[tuple[Sequence[str], Path]], limit_s: float
) -> tuple[list[int], list[str]]:
    """Starts processes that take a folder at the same moment.

    Args:
        commands: for each process, the words before its command, and the folder.
        limit_s: the seconds after which a process that still runs is an error.

    Returns:
        The exit codes in ascending order, and what each process has written to standard error.
    """
    pipe = subprocess.PIPE
    starts = [
        subprocess.Popen(
            [*before, sys.executable, "-c", STARTS, str(folder)],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        for before, folder in commands
    ]
    for start in starts:
        assert start.stdout is not None
        start.stdout.readline()
    for start in starts:
        assert start.stdin is not None
        start.stdin.write("go\n")
        start.stdin.flush()
    said = [start.communicate(timeout=limit_s)[1] for start in starts]
    return sorted(start.returncode for start in starts), said


def test_of_those_that_start_at_once_one_takes_the_folder(tmp_path: Path) -> None:
    codes, said = started_at_once([((), tmp_path / "checkpoints")] * 6, 30)
    assert codes == [0, 1, 1, 1, 1, 1]
    assert sum("is in use by another run: process " in words for words in said) == 5


def test_a_process_of_the_same_number_is_not_taken_for_the_owner(
    folder: Path, living: subprocess.Popen[bytes]
) -> None:
    left_by(folder, living, run_id="", began=1)
    ownership = Ownership(folder, {})
    ownership.take()
    ownership.release()


@pytest.mark.parametrize("lives", [True, False])
def test_an_owner_on_another_machine_is_known_by_its_touches(
    folder: Path, living: subprocess.Popen[bytes], lives: bool
) -> None:
    """Whatever its clock says: only that the time of the file changes counts."""
    left_by(folder, living, run_id="", machine="another kernel")
    os.utime(folder / FILE, (1e9, 1e9))
    over = threading.Event()

    def touch() -> None:
        while lives and not over.wait(0.2):
            os.utime(folder / FILE, (1e9, time.monotonic()))

    toucher = threading.Thread(target=touch)
    toucher.start()
    ownership = Ownership(folder, {})
    try:
        if lives:
            with pytest.raises(ResumeError, match="is in use by another run"):
                ownership.take()
        else:
            ownership.take()
            ownership.release()
    finally:
        over.set()
        toucher.join()


def test_a_stale_owner_blocks_for_less_than_half_a_minute() -> None:
    assert owner.SILENT_S + owner._LOOK_S + owner.ROUND_S <= 30
    assert owner.BEAT_S * 5 <= owner.SILENT_S


def test_a_later_attempt_takes_over_from_one_that_lives(folder: Path) -> None:
    ended: list[int] = []
    first = Ownership(folder, job(1), ended.append)
    first.take()
    second = Ownership(folder, job(2), ended.append)
    second.take()
    with pytest.raises(NotOwnerError, match=r"attempt 2\): this process \(attempt 1\) ends with"):
        first.check()
    wait_for(lambda: ended == [1], 10)
    first.release()
    second.check()  # what the first leaves behind is not the second's record
    assert (folder / FILE).exists()
    with pytest.raises(ResumeError, match="is in use"):
        Ownership(folder, job(1)).take()
    with pytest.raises(ResumeError, match="is in use"):
        Ownership(folder, job(3, "another job")).take()
    second.release()
    assert ended == [1]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0\xff",
        b"[]",
        b"3",
        b'{"token": "x"}',
        b"[" * 5000,
        b'{"run_id": "' + b"x" * 10_000 + b'"}',
    ],
)
def test_a_record_of_another_form_is_nobodys(folder: Path, content: bytes) -> None:
    folder.mkdir()
    (folder / FILE).write_bytes(content)
    ownership = Ownership(folder, {})
    ownership.take()
    ownership.check()
    ownership.release()


def test_words_of_a_record_stay_in_one_line(folder: Path, living: subprocess.Popen[bytes]) -> None:
    left_by(folder, living, run_id="\n\x1b[2J" * 30, host="h\n" * 300, since="\n")
    with pytest.raises(ResumeError) as error:
        Ownership(folder, {}).take()
    assert "\x1b" not in str(error.value)
    assert len(str(error.value)) < 1500


def test_the_record_comes_back_where_somebody_cleaned_up(folder: Path) -> None:
    ownership = Ownership(folder, {})
    ownership.take()
    (folder / FILE).unlink()
    wait_for((folder / FILE).exists, 10)
    ownership.release()
    assert has_ended(folder)


def test_a_full_disk_stops_no_run(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of the attempt before goes, and this one's follows when there is room."""
    ended: list[int] = []
    first = Ownership(folder, job(0), ended.append)
    first.take()
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    second = Ownership(folder, job(1))
    second.take()
    second.check()
    assert capfd.readouterr().err.count("a second start there is not noticed") == 1
    monkeypatch.undo()
    wait_for(lambda: ended == [1], 10)
    assert json.loads((folder / FILE).read_text())["attempt"] == 1
    second.release()
    first.release()


def test_an_earlier_attempt_finds_a_later_one_that_has_ended(folder: Path) -> None:
    """It was suspended all the while: the later one has come and gone."""
    ended: list[int] = []
    stale, live = Ownership(folder, job(0), ended.append), Ownership(folder, job(1))
    stale.take()
    with stale._lock:  # it stands still
        live.take()
        live.release()
    with pytest.raises(NotOwnerError, match=r"attempt 1\): this process \(attempt 0\) ends"):
        stale.check()
    wait_for(lambda: ended == [1], 10)
    assert json.loads((folder / FILE).read_text())["attempt"] == 1
    last = Ownership(folder, {})
    last.take()  # a new run takes it at once
    last.release()


def test_no_file_of_a_runs_folder_is_replaced_or_removed_by_who_has_lost_it(
    tmp_path: Path,
) -> None:
    stale = Ownership(tmp_path / "checkpoints", job(0), lambda code: None)
    live = Ownership(tmp_path / "checkpoints", job(1))
    stale.take()
    inside, outside = tmp_path / "report.json", tmp_path.parent / "other.json"
    with run_directory.guarded(tmp_path, stale.check):
        run_directory.write_text(inside, "mine")
        live.take()
        for change in (
            lambda: run_directory.write_text(inside, "stale"),
            lambda: run_directory.remove(inside),
        ):
            with pytest.raises(NotOwnerError):
                change()
        run_directory.write_text(outside, "elsewhere")
    assert inside.read_text() == "mine"
    assert not list(tmp_path.glob(".partial-*"))
    live.release()


def test_who_has_lost_the_folder_writes_no_scalars(tmp_path: Path) -> None:
    stale = Ownership(tmp_path / "checkpoints", job(0), lambda code: None)
    live = Ownership(tmp_path / "checkpoints", job(1))
    stale.take()
    board, scalars = TensorBoard(tmp_path / "board"), WritesScalars(tmp_path / "board")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    board.set_model(model)
    with run_directory.guarded(tmp_path, stale.check):
        board.on_epoch_end(0, {"loss": 1.0})
        scalars.write_scalars(0, {"speed": 1.0})
        live.take()
        with pytest.raises(NotOwnerError):
            board.on_epoch_end(1, {"loss": 2.0})
        with pytest.raises(NotOwnerError):
            scalars.write_scalars(1, {"speed": 2.0})
    for writer in (board, scalars):
        writer.get_state()
    steps = [
        event_pb2.Event.FromString(record.numpy()).step
        for path in tmp_path.rglob("*tfevents*")
        for record in tf.data.TFRecordDataset(str(path))
    ]
    assert steps
    assert set(steps) == {0}
    live.release()


def test_a_record_that_cannot_be_read_is_not_none(folder: Path) -> None:
    (folder / FILE).mkdir(parents=True)  # root may read any file
    with pytest.raises(IsADirectoryError):
        Ownership(folder, {}).take()


def test_a_folder_that_stays_locked_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "SILENT_S", -4.0)
    folder.mkdir()
    number = os.open(folder, os.O_RDONLY)
    fcntl.flock(number, fcntl.LOCK_EX)
    with pytest.raises(ResumeError, match="is locked by another process"):
        Ownership(folder, {}).take()
    os.close(number)


def test_a_record_may_be_replaced_while_it_is_read(
    folder: Path, living: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS server then no longer knows the file that was opened."""
    left_by(folder, living, run_id="")
    stale, content = OSError(errno.ESTALE, "Stale file handle"), (folder / FILE).read_bytes()
    monkeypatch.setattr(owner, "read_small", Mock(side_effect=[stale, content]))
    with pytest.raises(ResumeError, match="is in use by another run"):
        Ownership(folder, {}).take()


def test_where_nothing_can_be_locked_the_record_decides(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines write in the same moment: whose record stays has the folder."""
    monkeypatch.setattr(owner, "ROUND_S", 0.3)
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.EBADF, "NFS")))
    left = {**vars(Ownership(folder, {})._mine), "token": "the other machine's"}
    first = Ownership(folder, {}, lambda code: None)
    threading.Timer(0.1, lambda: (folder / FILE).write_text(json.dumps(left))).start()
    with pytest.raises(ResumeError, match="is in use by another run"):
        first.take()


def test_who_cannot_say_why_it_ends_does_end(folder: Path) -> None:
    """Its output is a pipe that is full, and nobody reads."""
    reader, writer = os.pipe()
    words = (
        "import sys; from tfmulti.training.checkpoint.owner import *; from pathlib import Path; "
    )
    words += "sys.stderr.write('x' * 65530); sys.stderr.flush(); "
    words += "Ownership(Path(sys.argv[1]), {}).end(NotOwnerError('words' * 50))"
    argv = [sys.executable, "-c", words, str(folder)]
    process = subprocess.Popen(argv, stderr=writer)
    try:
        assert process.wait(30) == 1
    finally:
        process.kill()
        os.close(reader)
        os.close(writer)


def test_parts_of_a_program_own_a_folder_together(folder: Path) -> None:
    assert ownership_of(folder) is ownership_of(folder)
    ownership = ownership_of(folder)
    ownership.take()
    ownership.take()
    ownership.release()
    assert (folder / FILE).exists()
    ownership.release()
    assert has_ended(folder)


def record(step: int) -> Record:
    return Record(step, {"x": np.zeros(3)})


def test_newer_checkpoints_are_removed_only_where_they_were_found_damaged(tmp_path: Path) -> None:
    """A chief that had been cut off once removed the checkpoints of the job that went on."""
    live, stale = Checkpoints(tmp_path, keep=2), Checkpoints(tmp_path, keep=2)
    for step in (10, 20):
        live.write(record(step))
    stale.write(record(15))
    assert {path.stem for path in live.files()} == {"step-000000010", "step-000000015"} | {
        "step-000000020"
    }
    newest = live.files()[0]
    newest.write_bytes(b"damaged")
    after = Checkpoints(tmp_path, keep=2)
    found, wrong = after.newest()
    assert (found and found.step, len(wrong)) == (15, 1)
    after.write(record(16))
    assert [path.stem for path in after.files()] == ["step-000000016", "step-000000015"]


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step-")) for path in folder.glob("step-*.npz"))


def test_checkpoints_that_another_process_has_written_since_are_not_removed(tmp_path: Path) -> None:
    before = Checkpoints(tmp_path, keep=2)
    before.write(record(10))
    resumed, other = Checkpoints(tmp_path, keep=1), Checkpoints(tmp_path, keep=2)
    assert resumed.newest()[0] is not None
    other.write(record(12))
    resumed.write(record(14))
    # It went on from step 10, so that file goes. It knows nothing of step 12.
    assert steps_in(tmp_path) == [12, 14]
    resumed.write(record(16))
    assert steps_in(tmp_path) == [12, 16]


def test_the_checkpoints_of_many_restarts_do_not_add_up(tmp_path: Path) -> None:
    for attempt in range(6):
        checkpoints = Checkpoints(tmp_path, keep=2)
        found, _ = checkpoints.newest()
        assert (found.step if found else 0) == 20 * attempt
        for step in (10, 20):
            checkpoints.write(record(20 * attempt + step))
        assert steps_in(tmp_path) == [20 * attempt + 10, 20 * attempt + 20]


def test_a_worker_that_was_cut_off_leaves_the_hang_files_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Only the chief owns the folder, and the other workers write hang_worker_K.json, too."""
    run, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    first, second = (
        Ownership(checkpoints, job(0), lambda code: None),
        Ownership(checkpoints, job(1)),
    )
    first.take()
    file = run / "hang_worker_1.json"
    callbacks = [Watchdog(run)]
    with watching(callbacks, Placement(rank=1, workers=2, local_replicas=1)):
        respect_owner(callbacks, checkpoints)
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(file.exists, 10)
        second.take()
        file.write_text("of the later attempt")
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(lambda: "this process writes nothing more there" in capfd.readouterr().err, 10)
        assert file.read_text() == "of the later attempt"
    second.release()
    first.release()


def test_who_has_lost_the_folder_writes_and_removes_nothing(tmp_path: Path) -> None:
    first = Ownership(tmp_path, job(1), lambda code: None)
    first.take()
    checkpoints = Checkpoints(tmp_path, 1, first.check)
    checkpoints.write(record(1))
    second = Ownership(tmp_path, job(2))
    second.take()
    with pytest.raises(NotOwnerError):
        checkpoints.write(record(2))
    assert [path.stem for path in checkpoints.files()] == ["step-000000001"]
    assert not list(tmp_path.glob(".partial-*"))
    second.release()


PROGRAM = """
import sys, time
import keras, numpy as np
from tfmulti import Checkpoint, make_strategy, prepare

class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.05)

keras.utils.set_random_seed(1)
with make_strategy().scope():
    model = prepare(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), seed=1)
    model.compile("sgd", "mse")
x = np.arange(64, dtype="float32").reshape(16, 4) / 64
model.fit(x, x[:, :1], batch_size=4, epochs=int(sys.argv[2]), verbose=0,
          callbacks=[Checkpoint(sys.argv[1], every_steps=4), Slow()])
print("done", model.optimizer.iterations.numpy())
"""


def test_a_chief_that_was_cut_off_ends_without_saving(tmp_path: Path) -> None:
    """It stands still, as behind a broken network, while the job moves on without it."""
    script, checkpoints = tmp_path / "train.py", tmp_path / "checkpoints"
    script.write_text(PROGRAM)
    with processes(tmp_path / "logs") as group:
        stale = group.start([str(script), str(checkpoints), "1000"], job(0))
        wait_for(lambda: len(list(checkpoints.glob("step-*"))) == 2, 60)
        stale.send_signal(signal.SIGSTOP)
        live = group.start([str(script), str(checkpoints), "1000"], job(1))
        wait_for(lambda: Owner(**json.loads((checkpoints / FILE).read_text())).attempt == 1, 60)
        first = max(checkpoints.glob("step-*"))
        wait_for(lambda: max(checkpoints.glob("step-*")) > first, 60)
        stale.send_signal(signal.SIGCONT)
        stale.wait(30)
        at_its_end = max(checkpoints.glob("step-*"))
        wait_for(lambda: max(checkpoints.glob("step-*")) > at_its_end, 60)  # the job goes on
        live.send_signal(signal.SIGTERM)
        ended, done = group.wait(LIMIT_S)
    assert ended.returncode == 1
    assert "this process (attempt 0) ends without saving." in ended.stderr
    assert done.returncode == 143, done.stderr
    assert has_ended(checkpoints)


def test_two_starts_in_one_directory(tmp_path: Path) -> None:
    """The second of the launcher's jobs answers in a line; the first one does not notice."""
    script, checkpoints = tmp_path / "train.py", tmp_path / "checkpoints"
    script.write_text(PROGRAM)
    argv = ["-m", "tfmulti.launch", "--log-dir", str(tmp_path / "out")]
    with processes(tmp_path / "logs") as group:
        running = group.start([*argv, str(script), str(checkpoints), "1000"])
        wait_for(lambda: any(checkpoints.glob("step-*")), 60)
        second = group.start([*argv, str(script), str(checkpoints), "1000"])
        assert second.wait(60) == 2
        newest = max(checkpoints.glob("step-*"))
        wait_for(lambda: max(checkpoints.glob("step-*")) > newest, 60)  # the first goes on
        running.send_signal(signal.SIGTERM)
        first, refused = group.wait(LIMIT_S)
    assert first.returncode == 143, first.stderr
    [line] = [line for line in refused.lines() if "tfmulti: " in line]
    assert "is in use by another run: process " in line
    assert "starting all workers again" not in refused.stderr


def test_the_record_of_a_run_that_was_killed_blocks_nobody(tmp_path: Path) -> None:
    script, checkpoints = tmp_path / "train.py", tmp_path / "checkpoints"
    script.write_text(PROGRAM)
    with processes(tmp_path / "logs") as group:
        killed = group.start([str(script), str(checkpoints), "1000"])
        wait_for(lambda: any(checkpoints.glob("step-*")), 60)
        killed.kill()
        killed.wait()
        assert (checkpoints / FILE).exists()
        shutil.copytree(checkpoints, tmp_path / "kept")
        group.start([str(script), str(checkpoints), "10"])
        _, done = group.wait(LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert "done" in done.stdout


@pytest.mark.parametrize("loses", [False, True])
def test_a_start_that_trained_nothing_removes_its_own_files_only(
    tmp_path: Path, loses: bool
) -> None:
    """The files of a run that has taken the folder since stay."""
    path = tmp_path / "run"
    config = SimpleNamespace(run_dir=path, to_json=lambda: "{}")
    data = SimpleNamespace(features=None, vocabulary=["word"])
    setup: Any = SimpleNamespace(placement=Placement(0, 1, 1), config=config, data=data)
    with ExitStack() as at_end:
        run_dir = train.make_run_dir(setup, at_end)
        assert run_dir is not None
        record = run_dir.checkpoints / FILE
        if loses:
            theirs = {**vars(Ownership(run_dir.checkpoints, {})._mine), "token": "another run's"}
            record.write_text(json.dumps(theirs))
        train.remove_start(run_dir)
        if not loses:
            assert not path.exists()
    assert path.exists() is loses
    if loses:
        assert json.loads(record.read_text()) == theirs
        assert run_dir.config.exists()
        assert run_dir.vocabulary.exists()
