"""Tests which files and folders a worker besides the chief makes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras
import pytest

from tfmulti.distribution.strategies import Placement
from tfmulti.training.safe_callbacks import saving_elsewhere


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("saves", [False, True])
def test_only_a_model_checkpoint_besides_the_chief_needs_a_folder(
    rank: int, saves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is killed leaves its folder behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    callback = keras.callbacks.ModelCheckpoint("m.keras") if saves else keras.callbacks.History()
    with saving_elsewhere([callback], Placement(rank, 2, 1)):
        assert len(list(tmp_path.iterdir())) == (rank > 0 and saves)
    assert not list(tmp_path.iterdir())
