"""Tests that crafted files change no numbers of a real job, or end it with one line."""

from __future__ import annotations

import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.security.test_crafted_checkpoints import paths_of_a_position
from tests.security.test_files import npy, packed_records
from tests.support import forked
from tests.support.launching import launch
from tests.support.processes import Finished
from tfmulti.training.checkpoint import file_format

pytestmark = pytest.mark.processes

LIMIT_S = 120
LAUNCH = ("--nproc-per-node", "2", "--max-restarts", "0", "--no-standby")
FLAGS = ("--model=mlp", "--global_batch_size=4", "--epochs=1", "--run_dir=run")


def attributes_of_a_callback(tree: dict[str, Any], outside: str) -> None:
    (state,) = (found for name, found in tree["callbacks"].items() if "ModelCheckpoint" in name)
    state.update(filepath=outside, _filepath=outside)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[np.ndarray]:
    """Returns the weights of a run without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    assert saving(folder).returncode == 0
    return left_in(folder)


@pytest.mark.parametrize("change", [paths_of_a_position, attributes_of_a_callback])
def test_a_crafted_checkpoint_writes_nothing_elsewhere(
    tmp_path: Path,
    interrupted: Path,
    weights: list[np.ndarray],
    change: Callable[[dict[str, Any], str], None],
) -> None:
    """The newest checkpoint was changed, with correct checksums. The job ends with its numbers."""
    outside = str(tmp_path / "outside.weights.h5")
    take_up(interrupted, tmp_path)
    change_newest(tmp_path, lambda tree: change(tree, outside))
    done = saving(tmp_path)
    assert done.returncode == 0, done.stderr
    assert not Path(outside).exists()
    assert (tmp_path / "model.keras").exists()
    np.testing.assert_equal(left_in(tmp_path), weights)


def test_a_compressed_checkpoint_is_ignored(
    tmp_path: Path, interrupted: Path, weights: list[np.ndarray]
) -> None:
    """A file that would unpack to more than its size is not unpacked. The previous one is used."""
    take_up(interrupted, tmp_path)
    newest = file_format.Checkpoints(tmp_path / "checkpoints", keep=2).files()[0]
    with zipfile.ZipFile(newest, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb.npy", bytes(100 << 20))
    done = saving(tmp_path)
    assert done.returncode == 0, done.stderr
    assert newest.name in done.stderr + done.stdout
    np.testing.assert_equal(left_in(tmp_path), weights)


def test_a_record_of_another_form_is_one_line(tmp_path: Path, interrupted: Path) -> None:
    take_up(interrupted, tmp_path)
    change_newest(tmp_path, lambda tree: tree.update(progress="../x"))
    before = sorted((tmp_path / "checkpoints").iterdir())
    done = saving(tmp_path)
    assert done.returncode == 2, done.stderr
    assert "the newest checkpoint does not have the format of this version" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted((tmp_path / "checkpoints").iterdir()) == before


def saving(folder: Path, *stop: str) -> Finished:
    program = ["-m", "tests.support.saving", str(folder), *stop]
    return launch(folder, *LAUNCH, *program)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a job that ended within its second epoch, and left checkpoints."""
    folder = tmp_path_factory.mktemp("interrupted")
    done = saving(folder, "10")
    assert done.returncode == 3, done.stderr
    return folder


def take_up(interrupted: Path, folder: Path) -> None:
    """Copies the interrupted job to another folder, in which it can go on."""
    shutil.copytree(interrupted, folder, dirs_exist_ok=True)


def change_newest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the newest checkpoint, and corrects all its checksums."""
    path = file_format.Checkpoints(folder / "checkpoints", keep=2).files()[0]
    record = file_format.from_bytes(path.read_bytes())
    change(record.tree)
    path.write_bytes(file_format.to_bytes(record))


def left_in(folder: Path) -> list[np.ndarray]:
    with np.load(folder / "out.npz") as archive:
        return [archive[name] for name in archive.files]


def npz_of_terabytes(folder: Path) -> list[str]:
    with zipfile.ZipFile(folder / "x.npz", "w") as archive:
        archive.writestr("x.npy", npy((1 << 43,), b"few"))
    return [f"--dataset=npz:{folder}/x.npz"]


def code_in_an_npz(folder: Path) -> list[str]:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (os.mkdir, (str(folder / "outside"),))

    np.savez(folder / "x.npz", x=np.array([Evil()], object), y=np.zeros(1, np.int64))
    return [f"--dataset=npz:{folder}/x.npz"]


def pipes_and_devices(folder: Path) -> list[str]:
    picture(folder, (8, 8))
    os.mkfifo(folder / "images" / "a" / "pipe.png")
    (folder / "images" / "b" / "zero.png").symlink_to("/dev/zero")
    return [f"--dataset=images:{folder}/images,size=8x8"]


def large_pictures(folder: Path) -> list[str]:
    picture(folder, (8, 8))
    Image.new("1", (30_000, 30_000)).save(folder / "images" / "a" / "large.png")
    return [f"--dataset=images:{folder}/images,size=8x8"]


def large_pictures_in_packed_records(folder: Path) -> list[str]:
    """A black picture of 900 megapixels, packed twice: a file of less than 1 KB."""
    out = io.BytesIO()
    Image.new("1", (30_000, 30_000)).save(out, "PNG")
    data_set = packed_records(folder, out.getvalue())
    assert Path(data_set).stat().st_size < 5_000
    return [f"--dataset=tfrecord:{data_set}"]


def code_in_a_prepared_data_set(folder: Path) -> list[str]:
    """The description names a class, whose module tensorflow-datasets would import."""
    described = folder / "crafted" / "1.0.0"
    described.mkdir(parents=True)
    (folder / "crafted_module.py").write_text(f"import os\nos.mkdir({str(folder / 'outside')!r})\n")
    (described / "dataset_info.json").write_text('{"name": "crafted", "version": "1.0.0"}')
    features = {"pythonClassName": "crafted_module.Class", "featuresDict": {"features": {}}}
    (described / "features.json").write_text(json.dumps(features))
    return [f"--dataset=tfds:crafted,data_dir={folder}"]


def picture(folder: Path, size: tuple[int, int]) -> None:
    for label in ("a", "b"):
        (folder / "images" / label).mkdir(parents=True)
        for number in range(8):
            Image.new("RGB", size).save(folder / "images" / label / f"{number}.png")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (npz_of_terabytes, "declares 35,184,372,088,832 bytes"),
        (code_in_an_npz, "x.npz"),
        (pipes_and_devices, "not a regular file"),
        (large_pictures, "megapixels"),
        (large_pictures_in_packed_records, "a.gz, record 0: feature 'image': the image has more"),
        (code_in_a_prepared_data_set, "the class 'crafted_module.Class', which is not part of"),
    ],
)
def test_a_crafted_data_file_is_one_line(
    tmp_path: Path, make: Callable[[Path], list[str]], words: str
) -> None:
    argv = ["-m", "tfmulti.fit", *make(tmp_path), *FLAGS]
    # The crafted module lies in this folder, from which Python imports.
    done = forked.run(argv, tmp_path / "log", limit_s=LIMIT_S, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "outside").exists()


def test_a_crafted_data_file_ends_a_job_of_two_workers(tmp_path: Path) -> None:
    program = ["-m", "tfmulti.fit", *code_in_an_npz(tmp_path), *FLAGS]
    done = launch(tmp_path, *LAUNCH, *program, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "x.npz" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "outside").exists()
