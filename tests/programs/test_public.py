"""Tests the script that runs public programs, as far as it needs no checkout of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.programs import public, synthetic
from tests.programs.public_programs import PUBLIC


def test_data_are_cut_in_any_form() -> None:
    x = np.zeros((100, 2))
    found = synthetic.cut(({"a": x, "b": [x, None]}, tf.zeros((100, 3))))
    assert found[0]["a"].shape == (synthetic.ROWS, 2)
    assert found[0]["b"][0].shape == (synthetic.ROWS, 2)
    assert found[0]["b"][1] is None
    assert found[1].shape == (synthetic.ROWS, 3)
    batches = synthetic.cut(tf.data.Dataset.from_tensor_slices(x).batch(10))
    assert len(list(batches)) == synthetic.STEPS


def test_commands_of_a_notebook_are_left_out() -> None:
    assert public._without_magic("!pip install x\nx = 1\n  %time x") == "x = 1"


def test_an_error_is_one_line_of_the_table() -> None:
    error = np.array(["ModelError", "first\n\n a | b \n"])
    assert public._line(error) == "ModelError: a / b"


def test_a_missing_program_is_reported(tmp_path: Path) -> None:
    found = public.verdicts("vae", tmp_path / "vae.py", ["mirrored-2"], tmp_path, 1)
    assert found == ["cannot run here: not in this checkout"]


def test_a_program_that_fails_alone_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = {"error": np.array(["ValueError", "no data"])}
    monkeypatch.setattr(public, "_run", lambda *args: error)
    (tmp_path / "vae.py").touch()
    found = public.verdicts("vae", tmp_path / "vae.py", ["mirrored-2"], tmp_path, 1)
    assert found == ["cannot run here: ValueError: no data"]


@pytest.mark.parametrize(
    ("value", "words"),
    [(1.0, "equal (fit_0/weight/0 differs by 0.00e+00"), (2.0, "fit_0/weight/0")],
)
def test_differences_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, words: str
) -> None:
    def run(file: Path, place: str, *more: object) -> dict[str, np.ndarray]:
        return {"fit_0/weight/0": np.array([value if place == "mirrored-2" else 1.0])}

    monkeypatch.setattr(public, "_run", run)
    (tmp_path / "vae.py").touch()
    (found,) = public.verdicts("vae", tmp_path / "vae.py", ["mirrored-2"], tmp_path, 1)
    assert found.startswith(words)


def test_the_public_programs_are_many() -> None:
    assert len(PUBLIC) >= 20
    assert {root for root, _ in PUBLIC.values()} == {"keras_io", "tensorflow_docs"}
