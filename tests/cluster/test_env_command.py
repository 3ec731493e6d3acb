"""Tests what `tfmulti env` prints."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.processes import clean_env
from tfmulti.cluster.__main__ import main

ADDRESSES = ["a:1", "b:1"]
SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def tf_config(**task: Any) -> str:
    return json.dumps({"cluster": {"worker": ADDRESSES, "evaluator": ["c:1"]}, "task": task})


WORKER = {"TF_CONFIG": tf_config(type="worker", index=1)}
EVALUATOR = {"TF_CONFIG": tf_config(type="evaluator", index=0)}


@pytest.mark.parametrize(
    ("argv", "env", "lines"),
    [
        ([], {}, ["found      no job: this process trains alone"]),
        (["--environment", "none"], SLURM, ["found      no job: this process trains alone"]),
        (
            [],
            WORKER,
            ["found      tf_config: process 1 of 2", "by         TF_CONFIG", "TF_CONFIG  {"],
        ),
        ([], EVALUATOR, ["found      tf_config: an evaluator, which does not train", "by  ", "TF"]),
        (
            [],
            SLURM,
            [
                "found      slurm: process 1 of 2",
                "by         SLURM_JOB_ID, SLURM_STEP_ID, SLURM_PROCID, SLURM_LOCALID, ",
                'TF_CONFIG  {"cluster": {"worker": ["n1:',
                "ports      planned; the processes agree on others if one is taken",
            ],
        ),
        # The ports follow from the name of the job, and no variable tells it.
        (
            [],
            HYDRA,
            [
                "found      mpi: process 1 of 2",
                "by         PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS",
                "TF_CONFIG  known when all have started",
            ],
        ),
        (
            [],
            {"JOB_COMPLETION_INDEX": "1"},
            ["found      no job: this", "but        kubernetes: JOB_COMPLETION_INDEX is set, but "],
        ),
        (
            [],
            {"VC_TASK_INDEX": "1", "VC_TRAIN_HOSTS": "a,b"},
            ["found      no job: this", "but        volcano: VC_TASK_INDEX is set, but VC_WORKER_"],
        ),
        ([], {"JOB_COMPLETION_INDEX": "1", "TFMULTI_WORKERS": "1"}, ["found      no job: this"]),
    ],
)
def test_the_words(
    argv: list[str], env: dict[str, str], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv, env) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line[: len(start)] for line, start in zip(shown, lines, strict=True)] == lines


@pytest.mark.parametrize(
    ("env", "rank", "size", "is_final"),
    [({}, 0, 1, True), (WORKER, 1, 2, True), (EVALUATOR, None, 2, True), (SLURM, 1, 2, False)],
)
def test_json(
    env: dict[str, str],
    rank: int | None,
    size: int,
    is_final: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--json"], env) == 0
    about = json.loads(capsys.readouterr().out)
    assert (about["rank"], about["size"], about["is_final"]) == (rank, size, is_final)


@pytest.mark.parametrize(
    ("argv", "env", "words"),
    [
        (["--jsn"], {}, "no flag --jsn; did you mean --json? Known: --environment, --json."),
        (["--environment"], {}, "--environment: expected one argument. See tfmulti env --help."),
        (["--environment", "slurn"], {}, "no environment 'slurn'; did you mean 'slurm'? Known: "),
        (
            ["--environment", "mpi"],
            SLURM,
            "--environment mpi was asked for, but it has not started",
        ),
        ([], {"TF_CONFIG": "{"}, "TF_CONFIG"),
        ([], SLURM | HYDRA | {"PMI_RANK": "x"}, "mpi: PMI_RANK is 'x', but it must be a whole"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], env: dict[str, str], words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tfmulti", "env", *argv],
        env=clean_env(env),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"tfmulti: {words}")
    assert done.stderr.count("\n") == 1
