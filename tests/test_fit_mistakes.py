"""Users' mistakes at the command: one line, exit code 2, nothing written, no TensorFlow.

All run in one process of their own, so that what one imports would be seen.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.processes import clean_env
from tfmulti.config.fit_config import FitConfig
from tfmulti.config.registry import DATASETS

TWO = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": %s}}'
SMALL = ["--global_batch_size", "4"]
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
SAGEMAKER = {"SM_HOSTS": '["a","b"]', "SM_CURRENT_HOST": "a"}

MISTAKES: list[tuple[list[str], dict[str, str], str]] = [
    (["--stratgy", "auto"], {}, "no flag --stratgy; did you mean --strategy"),
    (["--strategy", "mirored"], {}, "did you mean 'mirrored'"),
    (["--model", "resnet5"], {}, "did you mean 'resnet50'"),
    (["--dataset", "digts"], {}, "did you mean 'digits'"),
    (["--optimizer", "adm"], {}, "did you mean 'adam'"),
    (["--epochs", "x"], {}, "--epochs is 'x', but it must be a whole number"),
    (["--learning_rate", "fast"], {}, "must be a number"),
    (["--replicas"], {}, "Missing value for flag --replicas"),
    (["--dry_run=perhaps"], {}, "dry_run"),
    (["digits"], {}, "the argument 'digits' belongs to no flag"),
    (["--config", "none.json"], {}, "--config none.json: No such file"),
    (["--config", "odd.json"], {}, "no field 'epoch'; did you mean 'epochs'"),
    (["--global_batch_size", "4", "--per_replica_batch_size", "2"], {}, "Give one of them"),
    (["--dataset", "npz:whole.npz"], {}, "no batch size was given for"),
    (["--global_batch_size", "1198"], {}, "larger than the training data, which has 1197"),
    (["--per_replica_batch_size", "700", "--replicas", "2"], {}, "on 2 replicas (1400 in all)"),
    (["--microbatches", "33", "--replicas", "2"], {}, "more than the 32 examples of a replica"),
    (["--microbatches", "0"], {}, "--microbatches is 0, but it must be at least 1"),
    (["--dataset", "npz:none.npz", *SMALL], {}, "no such file"),
    (["--dataset", "npz:half.npz", *SMALL], {}, "truncated"),
    (["--dataset", "npz:short.npz", *SMALL], {}, "x has 20 rows and y has 7"),
    (["--dataset", "csv:t.csv,targt=y"], {}, "no option 'targt'; did you mean 'target'"),
    (["--dataset", "csv:t.csv,target=y"], {}, "'n' has no value in row 2 of t.csv. Correct it, or"),
    (["--dataset", "csv:ragged.csv,target=y"], {}, "row 2 of ragged.csv: it has 1 column, but"),
    (
        ["--dataset", "csv:ragged.csv,target=y", "--skip_bad_records", "1"],
        {},
        "2 examples cannot be read, more than --skip_bad_records 1 allows; the first is row 2",
    ),
    (["--dataset", "text:used,token=3"], {}, "no option 'token'; did you mean 'tokens'"),
    (["--dataset", "text:used"], {}, "used has no class folders, but at least two"),
    (["--dataset", "nowhere.data:load", *SMALL], {}, "no module 'nowhere.data'"),
    (["--model", "nowhere:build"], {}, "no module 'nowhere'"),
    (["--model", "transformer"], {}, "takes tokens data"),
    (["--dataset", "regression", "--model", "cnn"], {}, "Use --model linear or mlp"),
    (["--run_dir", "used"], {}, "used holds another program's config.json. Give a new"),
    (["--run_dir", "begun", "--resume", "never"], {}, "holds another run (config.json is there)"),
    (["--run_dir", "begun", "--seed", "4"], {}, "a run with seed=0, and this one has seed=4"),
    (["--run_dir", "begun", "--optimizer", "sgd"], {}, "Give --optimizer=adam, or a new"),
    (["--run_dir", "new", "--resume", "must"], {}, "--run_dir new holds no run"),
    (["--resume", "must"], {}, "--resume must, but no --run_dir"),
    (["--resume", "perhaps"], {}, "known: auto, must, never"),
    (["--keep_checkpoints", "0"], {}, "--keep_checkpoints is 0, but it must be at least 1"),
    (["--run_dir", "whole.npz"], {}, "is a file"),
    (["--export_dir", "used"], {}, "is not an empty folder"),
    (["--strategy", "multi_worker_mirrored"], {}, "TF_CONFIG is not set"),
    ([], {"TF_CONFIG": "{"}, "TF_CONFIG is not JSON"),
    ([], {"TF_CONFIG": '{"cluster": 3}'}, "TF_CONFIG['cluster'] is 3"),
    ([], {"TF_CONFIG": TWO % 2}, "task.index is 2"),
    (["--strategy", "mirrored"], {"TF_CONFIG": TWO % 0}, "--ignore_cluster"),
    (["--global_batch_size", "1198"], {"TF_CONFIG": TWO % 0}, "larger than the training data"),
    (["--replicas", "2"], {"TF_CONFIG": TWO % 0}, "is one replica on its CPU"),
    ([], SLURM | {"SLURM_STEP_NODELIST": "n[1-"}, "slurm: the host list 'n[1-' does not parse"),
    ([], SLURM | {"SLURM_PROCID": "2"}, "slurm: the rank is 2, but there are 2 processes (0..1)"),
    ([], SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2"}, "has 2 tasks on 1 nodes, but the step has 2"),
    ([], SLURM | SAGEMAKER, "slurm says that this is process 1 of 2, and sagemaker that it is pro"),
    (
        ["--environment", "sagemaker"],
        SLURM,
        "--environment sagemaker was asked for, but it has not",
    ),
    (
        ["--environment", "slurn"],
        SLURM,
        "no environment 'slurn' for --environment; did you mean",
    ),
    ([], SAGEMAKER | {"SM_CURRENT_HOST": "c"}, "SM_CURRENT_HOST is 'c', but SM_HOSTS"),
    ([], {"PMI_RANK": "4", "PMI_SIZE": "4"}, "mpi: the rank is 4, but there are 4 processes"),
]

RUNNER = """
import contextlib, io, json, os, sys
from tfmulti.fit import main
results = []
before = dict(os.environ)
for argv, env, _ in json.load(open(sys.argv[1])):
    os.environ.clear()
    os.environ.update(before | env)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["fit", *argv])
    slow = [m for m in ("tensorflow", "keras", "matplotlib") if m in sys.modules]
    results.append([code, out.getvalue(), err.getvalue(), slow])
json.dump(results, open(sys.argv[2], "w"))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    outside, folder = tmp_path_factory.mktemp("outside"), tmp_path_factory.mktemp("inside")
    x, y = np.zeros((20, 3), np.float32), np.arange(20) % 4
    np.savez(folder / "whole.npz", x=x, y=y)
    np.savez(folder / "short.npz", x=x, y=y[:7])
    whole = (folder / "whole.npz").read_bytes()
    (folder / "half.npz").write_bytes(whole[: len(whole) // 2])
    (folder / "t.csv").write_text("n,y\n1,a\n,b\n")
    (folder / "ragged.csv").write_text("n,y\n1,a\n2\n3,b\n4,a,5\n")
    (folder / "odd.json").write_text('{"epoch": 3}')
    (folder / "used").mkdir()
    (folder / "used" / "config.json").write_text("{}")
    (folder / "begun").mkdir()
    (folder / "begun" / "config.json").write_text(FitConfig().resolved("image").to_json())
    (outside / "in.json").write_text(json.dumps([*MISTAKES, [["--help"], {}, ""]]))
    before = sorted(folder.rglob("*"))
    subprocess.run(
        [sys.executable, "-c", RUNNER, str(outside / "in.json"), str(outside / "out.json")],
        cwd=folder,
        env=clean_env(),
        check=True,
        timeout=60,
    )
    assert sorted(folder.rglob("*")) == before, "a mistake wrote something"
    results = json.loads((outside / "out.json").read_text())
    assert isinstance(results, list)
    return results


@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=lambda n: " ".join(MISTAKES[n][0]))
def test_one_line_and_exit_code_2(outcomes: list[Any], number: int) -> None:
    code, out, err, slow = outcomes[number]
    assert MISTAKES[number][2] in err
    assert (code, out, err.count("\n"), slow) == (2, "", 1, [])
    assert err.startswith("tfmulti: ")


def test_help_names_every_flag(outcomes: list[Any]) -> None:
    code, out, err, slow = outcomes[-1]
    assert (code, err, slow) == (0, "", [])
    for name in ("--strategy", "--replicas", "--config", "--dry_run", "--export_dir"):
        assert re.search(rf"^  {name}( \(.*\))?$", out, re.M)
    of_dataset = out.partition("  --dataset (")[2].partition("\n  --")[0]
    for name in ("npy", "images", "tfrecord", "tfds", *DATASETS):
        assert re.search(rf"[ \n]{name}\b", of_dataset), name


def test_the_module_runs_as_a_program(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tfmulti.fit", "--epochs", "0"],
        cwd=tmp_path,
        env=clean_env(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "tfmulti: --epochs is 0, but it must be at least 1. (docs: troubleshooting#configuration)\n"
    )
    assert list(tmp_path.iterdir()) == []
