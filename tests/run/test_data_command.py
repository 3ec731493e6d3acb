"""`python -m tfmulti.data`, as users run it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.support.forked import run
from tests.support.made_data import EXAMPLES, KINDS
from tests.support.processes import Finished
from tfmulti.data.data_set import CLASSIFICATION, DataSpec
from tfmulti.data.transforms.labels import Labels
from tfmulti.run.data_command import main
from tfmulti.run.inspection import class_words

pytestmark = pytest.mark.processes


def command(folder: Path, *arguments: str) -> Finished:
    argv = ["-m", "tfmulti.data", *arguments]
    return run(argv, folder / "logs", limit_s=120, cwd=folder)


def lines_of(text: str) -> dict[str, list[str]]:
    """Returns the printed lines by label; a line without a label belongs to the line before."""
    found: dict[str, list[str]] = {}
    label = ""
    for line in text.splitlines():
        label = line[:10].strip() or label
        found.setdefault(label, []).append(line[10:].strip())
    return found


def test_images(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    dataset = KINDS["images"](tmp_path / "data")
    arguments = ["--global_batch_size", "9", "--replicas", "4", "--strategy", "mirrored"]
    done = command(tmp_path, dataset, *arguments, "--model", "linear", "--validation_fraction=0")
    assert done.returncode == 0, done.stderr
    said = lines_of(done.stdout)
    assert said["train"] == [f"{EXAMPLES} examples"]
    assert said["x"] == ["uint8 [8, 10, 3]"]
    assert said["y"] == ["int32 []"]
    assert said["classes"] == [
        "3; class0: 8, class1: 8, class2: 7; the largest has 1.14 × the smallest"
    ]
    assert said["plan"] == [
        "3 steps an epoch of 9 rows on 4 replicas",
        "first step: 9 rows = 1×3 + 3×2 (3 + 2 + 2 + 2)",
        "last step: 5 rows = 1×2 + 3×1 (2 + 1 + 1 + 1)",
    ]
    picture = cv2.imread(str(tmp_path / "first_batch.png"))
    assert picture is not None
    assert picture.shape[0] > 300
    assert len(set(picture.reshape(-1).tolist())) > 50  # there is something on it
    for label in ("data alone", "step alone", "together"):
        assert re.match(r"[\d,.]+ examples/s: [\d,.]+ ms", said[label][0])
    assert re.match(
        r"the data keeps up: \d+ % of the step|input-bound: \d+ % of the step is waiting",
        said["together"][1],
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "first_batch.png", "logs"]


def test_classes_that_must_be_read(tmp_path: Path) -> None:
    """Of records, of which one is damaged and in the first batch."""
    (tmp_path / "data").mkdir()
    dataset = KINDS["tfrecord"](tmp_path / "data")
    path = tmp_path / "data" / "c"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    arguments = ["--global_batch_size", str(EXAMPLES), "--validation_fraction=0", "--model=linear"]
    done = command(tmp_path, dataset, *arguments, "--skip_bad_records=1")
    assert done.returncode == 0, done.stderr
    said = lines_of(done.stdout)
    assert said["classes"] == [
        "3; 0: 7, 1: 8, 2: 7; the largest has 1.14 × the smallest; 1 cannot be read"
    ]
    assert said["picture"][0].startswith("the first 22 training images")
    assert "together" in said
    words = "the checksum is wrong (the file is damaged)."
    assert set(done.lines()) == {f"tfmulti: left out {path}, record 14: {words}"}


def test_the_words_for_classes() -> None:
    spec = DataSpec((3,), "float32", CLASSIFICATION, 3, class_names=("cat", "dog", "eel"))
    labels = Labels(np.repeat([0, 1, 2], [2703, 2647, 2650]), 8000)
    uneven = "cat: 2,703, dog: 2,647, eel: 2,650; the largest has 1.02 × the smallest"
    assert class_words(labels, spec, 1_200_000) == f" of 8,000 of 1,200,000 examples: {uneven}"
    assert class_words(labels, spec, 8000) == f"; {uneven}"
    assert (
        class_words(None, spec, 8000)
        == "; their sizes are not known without reading all of the data"
    )
    some = class_words(Labels(np.arange(2), 5), spec, 9)
    assert some.endswith("dog: 1, eel: 0; 1 of them has none; 3 cannot be read")


@pytest.mark.parametrize(
    ("kind", "header", "row"),
    [
        ("csv", ["number, color=blue, color=red, half → y"], r"[\d. ]+ → \d+\.?\d*"),
        ("text", [], r"\d+ .* … → [01]"),
    ],
)
def test_rows_and_workers(kind: str, header: list[str], row: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    dataset = KINDS[kind](tmp_path / "data")
    arguments = ["--workers", "3", "--global_batch_size", "8", "--nomeasure"]
    done = command(tmp_path, dataset, *arguments, "--validation_fraction=0")
    assert done.returncode == 0, done.stderr
    said = lines_of(done.stdout)
    assert said["rows"][0] == "the first 5 of training"
    shown = said["rows"][1:]
    assert shown[: len(header)] == header
    assert len(shown) - len(header) == 5
    assert all(re.fullmatch(row, line) for line in shown[len(header) :])
    assert said["plan"][0] == "3 steps an epoch of 8 rows on 3 workers × 1 replicas"
    workers = [re.findall(r"\d+", line.split("examples")[1]) for line in said["plan"][-3:]]
    assert [len(examples) for examples in workers] == [3, 3, 2]
    assert len({e for examples in workers for e in examples}) == 8
    assert "together" not in said


def test_the_columns_of_a_wide_table_are_named(tmp_path: Path) -> None:
    names = [*"abcdefghi", "w", "y"]
    rows = [[row * 100 + i for i in range(11)] for row in range(1, 5)]
    lines = [names, *rows]
    (tmp_path / "t.csv").write_text("\n".join(",".join(map(str, line)) for line in lines))
    dataset = "csv:t.csv,target=y,weight=w,task=regression"
    arguments = ["--global_batch_size", "2", "--nomeasure", "--validation_fraction=0"]
    done = command(tmp_path, dataset, *arguments)
    assert done.returncode == 0, done.stderr
    head, names_shown, *shown = lines_of(done.stdout)["rows"]
    assert (head, len(shown)) == ("the first 2 of training", 2)
    assert names_shown == "a, b, c, d, e, f, g, h, … → y → weight"
    assert re.fullmatch(r"(\d00) \d01 \d02 \d03 \d04 \d05 \d06 \d07 … → \d10 → \d09", shown[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no argument: one SOURCE is needed"),
        (["digits", "mnist"], "the arguments digits mnist: one SOURCE"),
        (["diggits"], "did you mean 'digits'"),
        (["digits", "--wokers=2"], "no flag --wokers; did you mean --workers"),
        (["digits", "--workers=0"], "--workers is '0', but it must be a number from 1"),
        (["images:/nowhere"], "--dataset images:/nowhere: /nowhere does not exist"),
        (["digits", "--global_batch_size=9999"], "is larger than the training data"),
    ],
)
def test_mistakes(
    arguments: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert not said.out


def test_help_names_the_source_and_all_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "--help"]) == 0
    said = capsys.readouterr().out
    for word in (
        "SOURCE",
        "--workers",
        "--picture",
        "--measure",
        "--dataset",
        "--skip_bad_records",
    ):
        assert word in said
