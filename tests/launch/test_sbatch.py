"""Tests the batch script for Slurm: its lines, what it does after each exit code, and mistakes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import clean_env
from tfmulti.errors import ConfigError
from tfmulti.launch import sbatch
from tfmulti.launch.sbatch import BatchScript

FIT = ("-m", "tfmulti.fit")
JOB = {"SLURM_JOB_ID": "7"}
ELEMENT = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "2"}


def options_of(text: str) -> dict[str, str]:
    """Returns the options that sbatch reads from a script."""
    found = re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", text, re.M)
    return dict(found)


def run(
    folder: Path, script: BatchScript, env: Mapping[str, str], code: int = 0, scontrol: bool = True
) -> subprocess.CompletedProcess[str]:
    """Runs a script with an srun that prints what it is given, and ends with an exit code."""
    programs = {
        "srun": f'printf "%s\\n" "$@"; env > {shlex.quote(str(folder / "seen"))}; exit {code}'
    }
    if scontrol:
        programs["scontrol"] = 'echo "scontrol $*"'
    for tool in ("od", "tr", "env"):
        programs[tool] = f'exec /usr/bin/{tool} "$@"'
    for name, body in programs.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
    return subprocess.run(
        ["/bin/bash", "-c", script.text],
        env={"PATH": str(folder), **env},
        capture_output=True,
        text=True,
        timeout=20,
    )


def test_each_flag_is_an_option_of_sbatch() -> None:
    script = BatchScript(
        program=("train.py",),
        nodes=2,
        gpus_per_node=4,
        cpus_per_task=3,
        time="1-12",
        signal="USR1",
        array="0-20:4%2",
        name="digits",
        options=("partition=gpu", "exclusive"),
    )
    assert options_of(script.text) == {
        "job-name": "digits",
        "nodes": "2",
        "ntasks-per-node": "4",
        "gpus-per-node": "4",
        "cpus-per-task": "3",
        "time": "1-12",
        "array": "0-20:4%2",
        "output": "%x-%A_%a.out",
        "open-mode": "append",
        "signal": "USR1@90",
        "requeue": "",
        "partition": "gpu",
        "exclusive": "",
    }
    assert "export TFMULTI_PREEMPTION_SIGNAL=USR1\n" in script.text
    assert "TFMULTI_PREEMPTION_SIGNAL" not in BatchScript(program=("a",)).text


def test_srun_gets_the_cores_of_a_task(tmp_path: Path) -> None:
    """From 22.05 on it does not take them from sbatch."""
    script = BatchScript(program=("a",), cpus_per_task=3)
    run(tmp_path, script, {**JOB, "SLURM_CPUS_PER_TASK": "3"})
    assert "SRUN_CPUS_PER_TASK=3\n" in (tmp_path / "seen").read_text()
    assert "SRUN_CPUS_PER_TASK" not in BatchScript(program=("a",)).text


def test_each_job_has_a_secret_of_its_own(tmp_path: Path) -> None:
    secrets = set()
    for env in (JOB, JOB, JOB | {"TFMULTI_SECRET": "given"}):
        run(tmp_path, BatchScript(program=("a",)), env)
        secrets |= set(re.findall("^TFMULTI_SECRET=(.*)$", (tmp_path / "seen").read_text(), re.M))
    assert len(secrets) == 3
    assert sorted(map(len, secrets)) == [len("given"), 64, 64]


@pytest.mark.parametrize("word", ["it's", 'two "words"', "$HOME", "a;b", "*", "", "%", "100%", "é"])
def test_arguments_reach_the_program_unchanged(tmp_path: Path, word: str) -> None:
    script = BatchScript(program=("train.py", word, "last"), python="/opt/my python")
    done = run(tmp_path, script, JOB)
    assert done.returncode == 0, done.stderr
    words = ["--label", "--wait=120", "/opt/my python", "train.py", word, "last"]
    assert done.stdout == "\n".join(words) + "\n"


def test_numbers_of_the_job_in_arguments(tmp_path: Path) -> None:
    script = BatchScript(program=("a", "x-%j", "%A/%a b"), array="1-2")
    assert run(tmp_path, script, ELEMENT).stdout.splitlines()[-2:] == ["x-9", "8/2 b"]


@pytest.mark.parametrize(
    ("array", "words", "expected"),
    [
        (None, (), ["--run_dir", "runs/tfmulti-7"]),
        ("1-2", (), ["--run_dir", "runs/tfmulti-8_2"]),
        (None, ("--run_dir=mine",), ["--run_dir=mine"]),
        (None, ("-run_dir", "mine"), ["-run_dir", "mine"]),
    ],
)
def test_a_run_directory_is_added_that_stays_the_same(
    tmp_path: Path, array: str | None, words: tuple[str, ...], expected: list[str]
) -> None:
    script = BatchScript(program=(*FIT, *words), array=array)
    done = run(tmp_path, script, ELEMENT if array else JOB)
    assert done.stdout.splitlines()[5:] == expected


@pytest.mark.parametrize(("env", "job"), [(JOB, "7"), (ELEMENT, "8_2")])
@pytest.mark.parametrize("code", [143, 138, 140])
def test_a_job_that_has_saved_is_requeued(
    tmp_path: Path, env: dict[str, str], job: str, code: int
) -> None:
    done = run(tmp_path, BatchScript(program=("a",)), env, code)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"scontrol requeue {job}")


@pytest.mark.parametrize(("env", "job"), [(JOB, "7"), (ELEMENT, "8_2")])
def test_a_job_without_scontrol_says_what_to_run(
    tmp_path: Path, env: dict[str, str], job: str
) -> None:
    done = run(tmp_path, BatchScript(program=("a",)), env, 143, scontrol=False)
    words = "tfmulti: this job has saved, but cannot be requeued from here. Run: scontrol requeue "
    assert (done.returncode, done.stderr) == (143, f"{words}{job}\n")


@pytest.mark.parametrize("code", [0, 1, 2, 130])
def test_no_other_end_is_requeued(tmp_path: Path, code: int) -> None:
    done = run(tmp_path, BatchScript(program=("a",)), JOB, code)
    assert done.returncode == code
    assert "scontrol" not in done.stdout


def test_a_job_that_must_not_be_requeued(tmp_path: Path) -> None:
    script = BatchScript(program=("a",), requeue=False)
    assert {"no-requeue"} == {"requeue", "no-requeue"} & set(options_of(script.text))
    done = run(tmp_path, script, JOB, 143)
    assert done.returncode == 143
    assert "scontrol" not in done.stdout


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"program": ()}, "no program was given. Write it after --"),
        ({"program": ("-m",)}, "no program was given"),
        ({"program": (*FIT, "--epoch", "3")}, "no flag --epoch; did you mean --epochs?"),
        ({"program": (*FIT, "--seed", "%a", "--epochs", "0")}, "--epochs is 0, but it must be at"),
        ({"program": (*FIT, "--config", "a.json", "more")}, "the argument 'more' belongs to no fl"),
        ({"nodes": 0}, "--nodes is 0, but it must be at least 1"),
        ({"tasks_per_node": 0}, "--tasks-per-node is 0, but it must be at least 1"),
        ({"gpus_per_node": -1}, "--gpus-per-node is -1, but it must be at least 0"),
        ({"cpus_per_task": 0}, "--cpus-per-task is 0, but it must be at least 1"),
        ({"signal_s": 9}, "--signal-s is 9, but it must be at least 10"),
        ({"gpus_per_node": 4, "tasks_per_node": 3}, "--tasks-per-node 3 does not divide"),
        ({"signal": "KILL"}, "--signal is 'KILL', but it must be one of"),
        ({"time": "soon"}, "--time is 'soon', but it must look like 04:00:00, 1-12:00:00 or"),
        ({"time": "1:2:3:4"}, "--time is '1:2:3:4', but it must look like"),
        ({"time": "٣٠"}, "--time is '٣٠', but it must look like"),
        (
            {"time": "2"},
            "--time is '2', which is 120 s, but Slurm may send the signal 150 s before",
        ),
        ({"time": "2:30"}, "--time is '2:30', which is 150 s"),
        ({"time": "0:1:40", "signal_s": 40}, "--time is '0:1:40', which is 100 s"),
        ({"array": "5-2"}, "--array is '5-2', but the range 5-2 falls. Write 2-5."),
        ({"array": "1,9-8"}, "the range 9-8 falls"),
        ({"array": "1-"}, "--array is '1-', but it must look like"),
        ({"array": "0-4:0"}, "--array is '0-4:0', but it must look like"),
        ({"array": "0-4%"}, "--array is '0-4%', but it must look like"),
        ({"array": "٣"}, "--array is '٣', but it must look like"),
        ({"name": "two words"}, "--name is 'two words', but it must look like"),
        ({"name": "ñ"}, "--name is 'ñ', but"),
        ({"options": ("--partition=gpu",)}, "--option is '--partition=gpu', but it must look like"),
        ({"options": ("a=b\nc",)}, "but it must look like partition=gpu"),
        ({"options": ("signal=USR1@9",)}, "but this command sets signal itself"),
        ({"options": ("sig=USR1@9",)}, "but this command sets signal itself"),
        ({"options": ("nodes=3",)}, "but this command sets nodes itself"),
        ({"options": ("ntasks=3",)}, "but this command sets ntasks-per-node itself"),
        ({"options": ("no-requeue",)}, "but this command sets no-requeue itself"),
        ({"options": ("time=1",)}, "but this command sets time itself"),
    ],
)
def test_mistakes_are_one_line(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as error:
        BatchScript(**{"program": ("a",), **values})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "time", ["UNLIMITED", "infinite", "0", "3", "02:31", "0:2:31", "1-0", "0-1"]
)
def test_times_that_leave_enough(time: str) -> None:
    assert options_of(BatchScript(program=("a",), time=time).text)["time"] == time


@pytest.mark.parametrize("option", ["nodelist=n1", "time-min=60", "array-inx", "ntasks-per-gpu=1"])
def test_options_that_only_begin_like_a_flag(option: str) -> None:
    assert f"#SBATCH --{option}\n" in BatchScript(program=("a",), options=(option,)).text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--node", "2", "--", "a"], "no flag --node; did you mean --nodes? Known: --array, "),
        (["--nodes", "２", "--", "a"], "--nodes: '２' is not a whole number. See tfmulti sbatch"),
        (["--nodes", "-1", "--", "a"], "--nodes: '-1' is not a whole number"),
        (["--nodes", "--", "a"], "--nodes: expected one argument"),
        (
            ["train.py"],
            "unexpected argument 'train.py'. Write the program after --: tfmulti sbatch",
        ),
        (
            ["--nodes", "2", "-m", "a"],
            "unexpected argument '-m'. Write the program after --: tfmul",
        ),
        ([], "no program was given"),
        (["--submit", "--", "a"], "--submit: there is no sbatch on this machine"),
    ],
)
def test_mistakes_of_the_command(tmp_path: Path, argv: list[str], words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tfmulti", "sbatch", *argv],
        env=clean_env() | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"tfmulti: {words}")
    assert done.stderr.count("\n") == 1


def test_the_command_prints_a_script_that_bash_reads(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "--nodes",
        "2",
        "--option",
        "partition=gpu",
        "--",
        "train.py",
        "--",
        "--submit",
    ]
    assert sbatch.main(argv) == 0
    text = capsys.readouterr().out
    assert "train.py -- --submit\n" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, env=os.environ).returncode == 0
