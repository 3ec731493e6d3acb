"""Tests that a checkpoint which somebody else has written sets numbers, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmulti import Checkpoint, LiveCurves, prepare
from tfmulti.errors import ResumeError
from tfmulti.run.callbacks import live_curves
from tfmulti.run.curves import curves_svg
from tfmulti.training.checkpoint import file_format
from tfmulti.training.checkpoint.callback_states import CallbackStates
from tfmulti.training.input import positions

# Eight batches a pass. The oldest checkpoint is of step 10, far from the end of its pass.
ROWS = np.arange(128, dtype=np.float32).reshape(32, 4)


class Counts(keras.callbacks.Callback):
    def __init__(self, folder: Path, epochs: int) -> None:
        super().__init__()
        self.filepath = str(folder / "mine.keras")
        self.target: Any = None
        self.batches = 0
        self.limit = 3.0
        self.epochs = epochs

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1


class Rows(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        rows = ROWS[4 * index : 4 * index + 4]
        return rows, rows[:, :1]


def made(kind: str) -> Any:
    """Returns the rows as a shuffled Dataset, one of a generator, or a PyDataset."""
    if kind == "PyDataset":
        return Rows()
    data = tf.data.Dataset.from_tensor_slices((ROWS, ROWS[:, :1]))
    if kind == "generator":
        # TensorFlow cannot save the position of such a Dataset.
        data = data.map(lambda x, y: (tf.numpy_function(np.array, [x], tf.float32), y))
        data = data.map(lambda x, y: (tf.ensure_shape(x, (4,)), y))
    return data.shuffle(16, seed=3).batch(4)


def trained(folder: Path, epochs: int = 2, kind: str = "dataset") -> Counts:
    """Returns a callback after training that resumes from the newest checkpoint, if any."""
    keras.utils.set_random_seed(1)
    model = prepare(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
    model.compile("sgd", "mse")
    counts = Counts(folder, epochs)
    keeper = Checkpoint(folder / "checkpoints", every_steps=10)
    model.fit(made(kind), epochs=epochs, verbose=0, callbacks=[counts, keeper])
    return counts


def crafted(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes a checkpoint from within a pass, corrects its checksums, and removes the others."""
    *newer, path = file_format.Checkpoints(folder / "checkpoints", keep=2).files()
    for other in newer:
        other.unlink()
    record = file_format.from_bytes(path.read_bytes())
    change(record.tree)
    path.write_bytes(file_format.to_bytes(record))


def paths_of_a_position(tree: dict[str, Any], outside: str) -> None:
    """Adds the paths of a file outside of the run directory to the position in the data."""
    position = tree["feeds"]["training"]["iterator"]
    position[outside] = position["../" * 12 + outside[1:]] = np.zeros(3, np.uint8)


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("name", ["../../escaped", "{folder}/absolute", "position.index/../x", ""])
def test_names_of_a_position_are_no_paths(tmp_path: Path, name: str) -> None:
    name = name.format(folder=tmp_path)
    data = tf.data.Dataset.range(4)
    position = positions.position_of(iter(data))
    assert position is not None
    before = files_below(tmp_path)
    assert positions.iterator_at({**position, name: np.zeros(3, np.uint8)}, data) is None
    assert files_below(tmp_path) == before
    assert positions.iterator_at(position, data) is not None


def test_a_run_from_a_crafted_position_writes_nothing_elsewhere(tmp_path: Path) -> None:
    trained(tmp_path)
    outside = tmp_path / "outside"
    crafted(tmp_path, lambda tree: paths_of_a_position(tree, str(outside)))
    assert trained(tmp_path, epochs=3).batches == 24
    assert not outside.exists()


def test_a_position_that_cannot_be_set_is_an_error(tmp_path: Path) -> None:
    """The trial's iterator has drawn a seed, so later iterators would have other orders."""
    trained(tmp_path)

    def change(tree: dict[str, Any]) -> None:
        position = tree["feeds"]["training"]["iterator"]
        position.update({name: content[:-9] for name, content in position.items()})

    crafted(tmp_path, change)
    with pytest.raises(ResumeError, match="cannot restore the position in the data of the newest"):
        trained(tmp_path, epochs=3)


@pytest.mark.parametrize("has_position", [True, False])
def test_a_checkpoint_of_an_older_version_is_resumed(tmp_path: Path, has_position: bool) -> None:
    """The older version stores the parts of the feeds' states as separate entries."""
    whole = trained(tmp_path / "whole", epochs=3)
    trained(tmp_path)

    def change(tree: dict[str, Any]) -> None:
        state = tree.pop("feeds")["training"]
        tree["progress"]["goes_on"] = True
        tree["passes"] = {"training": state.pop("passes") + 1}
        tree["unread"] = {"training": state.pop("unread")}
        tree["positions"] = {"training": state if has_position else None}

    crafted(tmp_path, change)
    again = trained(tmp_path, epochs=3)
    assert again.batches == whole.batches
    np.testing.assert_equal(again.model.get_weights(), whole.model.get_weights())


@pytest.mark.parametrize("key", ["progress", "feeds", "model", "examples"])
@pytest.mark.parametrize("value", [None, [], {}, {"x": 1}, "text"])
def test_a_record_of_another_form_is_one_line(tmp_path: Path, key: str, value: Any) -> None:
    trained(tmp_path)
    crafted(tmp_path, lambda tree: tree.update({key: value}))
    with pytest.raises(
        ResumeError, match="the newest checkpoint does not have the format of this version"
    ):
        trained(tmp_path, epochs=3)


# The counts of a record are from step 10, in the second epoch of eight steps.
@pytest.mark.parametrize(
    ("kind", "name", "value", "rule"),
    [
        ("dataset", "passes", 10**12, "from 0 to 2"),
        ("generator", "passes", 10**12, "from 0 to 2"),
        ("PyDataset", "passes", 10**12, "from 0 to 2"),
        ("PyDataset", "passes", -1, "from 0 to 2"),
        ("PyDataset", "passes", 1.0, "from 0 to 2"),
        ("PyDataset", "passes", True, "from 0 to 2"),
        ("generator", "unread", 10**12, "from 0 to 1"),
        ("generator", "batches", 10**12, "from 0 to 10"),
    ],
)
def test_counts_of_a_feed_must_fit_the_position(
    tmp_path: Path, kind: str, name: str, value: Any, rule: str
) -> None:
    trained(tmp_path, kind=kind)

    def change(tree: dict[str, Any]) -> None:
        tree["feeds"]["training"][name] = value
        tree["feeds"]["training"].pop("iterator", None)

    crafted(tmp_path, change)
    with pytest.raises(ResumeError, match=rf"feeds\.training\.{name} is .* whole number {rule}"):
        trained(tmp_path, epochs=3, kind=kind)


@pytest.mark.parametrize("name", ["epoch", "step", "batches", "lost"])
@pytest.mark.parametrize("value", ["1", -1])
def test_counts_of_the_progress_are_whole_numbers(tmp_path: Path, name: str, value: Any) -> None:
    trained(tmp_path)
    crafted(tmp_path, lambda tree: tree["progress"].update({name: value}))
    with pytest.raises(ResumeError, match=rf"progress\.{name} is .* a whole number from 0"):
        trained(tmp_path, epochs=3)


@pytest.mark.parametrize(
    ("name", "value"),
    [("logs", None), ("logs", [1]), ("logs", "text"), ("is_over", np.zeros(0))],
)
def test_the_rest_of_the_progress_has_its_types(tmp_path: Path, name: str, value: Any) -> None:
    trained(tmp_path)
    crafted(tmp_path, lambda tree: tree["progress"].update({name: value}))
    with pytest.raises(ResumeError, match=rf"progress\.{name} is not a (dict|bool)"):
        trained(tmp_path, epochs=3)


@pytest.mark.parametrize("position", [-1, 625, 10**6, 2**31 - 1])
def test_numpys_generator_stays_within_its_numbers(tmp_path: Path, position: int) -> None:
    """NumPy does not check the position, and read other memory of the process there."""
    trained(tmp_path)
    crafted(tmp_path, lambda tree: put_position(tree, position))
    with pytest.raises(ResumeError, match="the position in NumPy's random numbers is"):
        trained(tmp_path, epochs=3)


def put_position(tree: dict[str, Any], position: int) -> None:
    tree["model"]["random"]["numpy"][2] = position


def test_the_state_of_keras_generator_has_numbers(tmp_path: Path) -> None:
    trained(tmp_path)
    crafted(tmp_path, lambda tree: tree["model"].update(generator=np.array("text")))
    with pytest.raises(ResumeError, match="does not have the format of this version"):
        trained(tmp_path, epochs=3)


def test_a_position_after_the_last_epoch_reads_no_data(tmp_path: Path) -> None:
    """A number of passes that fits a made-up epoch would keep the run busy without end."""
    trained(tmp_path, kind="generator")

    def change(tree: dict[str, Any]) -> None:
        tree["progress"].update(epoch=10**12, step=0)
        tree["feeds"]["training"].update(passes=10**12)

    crafted(tmp_path, change)
    assert trained(tmp_path, epochs=3, kind="generator").batches == 10


@pytest.mark.parametrize(
    "history",
    [
        None,
        ["loss"],
        {"loss": 1.0},
        {"loss": "text"},
        {"loss": [1]},
        {"loss": [[1.0]]},
        {3: [1.0]},
        {str(number): [1.0] for number in range(65)},
    ],
)
def test_live_curves_of_another_form_are_refused(history: Any) -> None:
    curves = LiveCurves()
    curves.set_state({"history": {"loss": [2.0]}})
    with pytest.raises(ValueError, match="of LiveCurves is no"):
        curves.set_state({"history": history})
    assert curves.get_state() == {"history": {"loss": [2.0]}}


def test_names_of_curves_are_no_formulas() -> None:
    picture = curves_svg({"$\\frac$": [1.0, 2.0], "val_$\\frac$": [1.0, 2.0], "a$b$c": [1.0]})
    assert ">$\\frac$<" in picture
    assert ">a$b$c<" in picture


def test_live_curves_keep_as_many_metrics_as_a_checkpoint_may_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live_curves, "in_notebook", lambda: True)
    monkeypatch.setattr(live_curves, "curves_svg", lambda history: "")
    curves = LiveCurves()
    curves.on_epoch_end(0, {str(number): np.float64(number) for number in range(70)})
    state = curves.get_state()
    assert len(state["history"]) == 64
    LiveCurves().set_state(state)


def test_a_run_whose_workers_trained_alone_is_not_resumed(tmp_path: Path) -> None:
    """An older version had `sync_every`, and stored the state of that option in the checkpoint."""
    trained(tmp_path)
    crafted(tmp_path, lambda tree: tree.update(apart={"sync_every": 5, "velocities": []}))
    with pytest.raises(ResumeError, match="saved sync_every=5, which this version does not have"):
        trained(tmp_path)
    crafted(tmp_path, lambda tree: tree.update(apart={"sync_every": None, "velocities": []}))
    trained(tmp_path)


@pytest.mark.parametrize("key", ["seed", "data"])
@pytest.mark.parametrize("value", [[], "text", 1.5])
def test_values_that_are_checked_early_must_have_their_form(
    tmp_path: Path, key: str, value: Any
) -> None:
    trained(tmp_path)
    crafted(tmp_path, lambda tree: tree.update({key: value}))
    with pytest.raises(
        ResumeError, match=r"the newest checkpoint (in .* )?does not have the format"
    ):
        trained(tmp_path, epochs=3)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("filepath", "/etc/passwd", "it is a path"),
        ("target", "../elsewhere", "it is a path"),
        ("on_train_end", "x", "it was not there"),
        ("__class__", "x", "it was not there"),
        ("new", 1, "it was not there"),
        ("target", np.array(["/etc/passwd"]), "it is a path"),
        ("target", np.array([b"../elsewhere"]), "it is a path"),
        ("batches", "many", "it is a str, and was a float"),
        ("limit", [1.0], "it is a list, and was a float"),
    ],
)
def test_attributes_that_are_not_set(tmp_path: Path, key: str, value: Any, why: str) -> None:
    counts = Counts(tmp_path, 1)
    before = vars(counts).copy()
    states = CallbackStates([counts])
    states.restore({"Counts 1": {key: value, "epochs": 7}})
    assert vars(counts) == before | {"epochs": 7}
    (line,) = states.left_out
    assert key in line
    assert why in line


class Keeps(keras.callbacks.Callback):
    """Removes all but the last few files that it has written, as many users' callbacks do."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[str] = []
        self.best: dict[str, Any] = {"epoch": 0, "where": [None]}
        self.by_name = {"train/loss": 1.0}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kept", ["/home/somebody/.ssh/id"]),
        ("kept", ["ok", ("../x",)]),
        ("best", {"epoch": 1, "where": [{"file": "a/b"}]}),
        ("best", {"epoch": 1, "where": [b"/etc/passwd"]}),
    ],
)
def test_paths_inside_of_lists_and_dicts_are_not_set(key: str, value: Any) -> None:
    callback = Keeps()
    before = getattr(callback, key)
    states = CallbackStates([callback])
    states.restore({"Keeps 1": {key: value, "by_name": {"train/loss": 2.0}}})
    assert getattr(callback, key) == before
    # The names of values may contain a slash, because they are no paths.
    assert callback.by_name == {"train/loss": 2.0}
    (line,) = states.left_out
    assert "it is a path, or holds one" in line


def test_a_checkpoint_callback_writes_where_it_was_told(tmp_path: Path) -> None:
    wanted, elsewhere = str(tmp_path / "wanted.keras"), str(tmp_path / "elsewhere.keras")
    saves = keras.callbacks.ModelCheckpoint(wanted)
    state = {"filepath": elsewhere, "best": 0.5, "save_best_only": 1}
    CallbackStates([saves]).restore({"ModelCheckpoint 1": state})
    assert (saves.filepath, saves.best, saves.save_best_only) == (wanted, 0.5, False)


def test_types_of_arrays_are_those_that_are_known(tmp_path: Path) -> None:
    data = file_format.to_bytes(file_format.Record(1, {"a": np.zeros(2, np.uint8)}))
    assert b'\\"types\\": [\\"\\"]' in data
    with pytest.raises(file_format.DamagedCheckpointError):
        file_format.from_bytes(data.replace(b'\\"types\\": [\\"\\"]', b'\\"types\\": [\\"os\\"]'))


def test_valid_attributes_of_callbacks_are_still_restored(tmp_path: Path) -> None:
    assert trained(tmp_path).batches == 16
    counts = trained(tmp_path, epochs=3)
    assert counts.batches == 24
    assert os.path.basename(counts.filepath) == "mine.keras"
