"""Training under a real Slurm: the numbers of one device, and jobs that go on after any stop."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.slurm import NODES, Slurm
from tfmulti.cluster.host_lists import parse_hosts
from tfmulti.launch.sbatch import BatchScript

pytestmark = pytest.mark.slurm

LIMIT_S = 240
FIT = ("-m", "tfmulti.fit", "--steps_per_execution", "1", "--verbose", "2")


def report_of(slurm: Slurm, run_dir: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((slurm.folder / run_dir / "report.json").read_text())
    return found


def one_device(slurm: Slurm, run_dir: str, epochs: int) -> dict[str, Any]:
    """Returns the report of the same run on one device, without Slurm."""
    argv = [sys.executable, *FIT, "--epochs", str(epochs), "--run_dir", run_dir]
    done = slurm.run(*argv, limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return report_of(slurm, run_dir)


@pytest.mark.parametrize("tasks", [["-n", "2"], ["-N", "2", "-n", "4"]])
def test_a_step_trains_with_the_numbers_of_one_device(slurm: Slurm, tasks: list[str]) -> None:
    run_dir = f"step-{len(tasks)}"
    argv = ["srun", *tasks, sys.executable, *FIT, "--epochs", "2", "--run_dir", run_dir]
    done = slurm.run(*argv, limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr + slurm.logs()
    found, one = report_of(slurm, run_dir), one_device(slurm, f"one-{len(tasks)}", 2)
    assert found["replicas"] == int(tasks[-1])
    for name, values in one["history"].items():
        assert found["history"][name] == pytest.approx(values, rel=1e-4)


EPOCHS = 30


def script(folder: str, *words: str, **options: Any) -> str:
    program = ("-m", "tests.support.slow_training", folder, str(EPOCHS), *words)
    return BatchScript(program=program, nodes=2, name=folder, **options).text


def result_of(slurm: Slurm, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((slurm.folder / folder / "result.json").read_text())
    return found


@pytest.fixture(scope="module")
def whole(slurm: Slurm) -> dict[str, Any]:
    """Returns what a job leaves that was never stopped."""
    job = slurm.submit(script("whole"))
    assert slurm.wait(job, LIMIT_S)["JobState"] == "COMPLETED", slurm.logs()
    return result_of(slurm, "whole")


def test_a_job_saves_at_its_time_limit_and_goes_on(slurm: Slurm, whole: dict[str, Any]) -> None:
    """It ends equal to the bit to the job that was never stopped."""
    # Slurm counts limits in minutes: the signal comes after 65 s or a little earlier.
    job = slurm.submit(script("limited", "wait", time="2", signal_s=55))
    about = slurm.wait(job, 2 * LIMIT_S)
    assert about["JobState"] == "COMPLETED", slurm.logs()
    assert int(about["Restarts"]) >= 1
    assert result_of(slurm, "limited") == whole


def test_a_further_signal_means_the_same(slurm: Slurm, whole: dict[str, Any]) -> None:
    job = slurm.submit(script("signalled", signal="USR1"))
    _wait_for_epochs(slurm, "signalled", 10)
    assert slurm.run("scancel", "--signal=USR1", job).returncode == 0
    about = slurm.wait(job, LIMIT_S)
    assert (about["JobState"], about["Restarts"]) == ("COMPLETED", "1"), slurm.logs()
    assert result_of(slurm, "signalled") == whole


def test_requeue_and_a_lost_node_change_no_number(slurm: Slurm, whole: dict[str, Any]) -> None:
    job = slurm.submit(script("requeued"))
    _wait_for_epochs(slurm, "requeued", 5)
    assert slurm.run("scontrol", "requeue", job).returncode == 0
    slurm.wait(job, LIMIT_S, "PENDING")
    slurm.wait(job, LIMIT_S, "RUNNING")
    _wait_for_epochs(slurm, "requeued", _epochs(slurm, "requeued") + 5)
    node = ["scontrol", "update", f"NodeName={NODES[1]}"]
    try:
        slurm.run(*node, "State=DOWN", "Reason=test")
        slurm.wait(job, LIMIT_S, "PENDING", "REQUEUED", "CONFIGURING")
    finally:
        slurm.run(*node, "State=RESUME")
    assert slurm.wait(job, LIMIT_S)["JobState"] == "COMPLETED", slurm.logs()
    assert result_of(slurm, "requeued") == whole


def test_a_cancelled_job_saves_and_is_not_requeued(slurm: Slurm) -> None:
    job = slurm.submit(script("cancelled"))
    _wait_for_epochs(slurm, "cancelled", 2)
    assert slurm.run("scancel", job).returncode == 0
    about = slurm.wait(job, 60)
    assert (about["JobState"], about["Restarts"]) == ("CANCELLED", "0")
    time.sleep(3)
    assert slurm.about(job)["JobState"] == "CANCELLED"
    assert list((slurm.folder / "cancelled" / "checkpoints").glob("*"))


def test_an_array_of_jobs(slurm: Slurm) -> None:
    program = (*FIT, "--epochs", "1", "--seed", "%a", "--run_dir", "array-%a")
    text = BatchScript(program=program, array="1-2", name="array").text
    job = slurm.submit(text)
    for number in (1, 2):
        assert slurm.wait(f"{job}_{number}", LIMIT_S)["JobState"] == "COMPLETED", slurm.logs()
    weights = {report_of(slurm, f"array-{number}")["weights_sha256"] for number in (1, 2)}
    assert len(weights) == 2


def test_a_failed_program_is_not_requeued(slurm: Slurm) -> None:
    job = slurm.submit(BatchScript(program=(*FIT, "--epochs", "0"), name="wrong").text)
    about = slurm.wait(job, 60)
    assert (about["JobState"], about["Restarts"], about["ExitCode"]) == ("FAILED", "0", "2:0")
    output = (slurm.folder / f"wrong-{job}.out").read_text()
    assert "tfmulti: --epochs is 0, but it must be at least 1." in output


def test_the_command_submits(slurm: Slurm) -> None:
    argv = [sys.executable, "-m", "tfmulti", "sbatch", "--submit"]
    done = slurm.run(*argv, "--name", "sent", "--", "-c", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Submitted batch job ")
    refused = slurm.run(*argv, "--option", "partition=none", "--", "-c", "1")
    assert refused.returncode == 2
    assert refused.stderr.startswith("tfmulti: --submit: sbatch: error: invalid partition")
    assert refused.stderr.count("\n") == 1


def test_the_environment_is_shown(slurm: Slurm) -> None:
    argv = ["srun", "-N", "2", "-n", "3", "-m", "cyclic", sys.executable, "-m", "tfmulti", "env"]
    done = slurm.run(*argv, "--json")
    found = sorted(map(json.loads, done.stdout.splitlines()), key=lambda about: about["rank"])
    hosts = [address.partition(":")[0] for address in found[0]["tf_config"]["cluster"]["worker"]]
    assert hosts == [NODES[0], NODES[1], NODES[0]]
    assert [about["rank"] for about in found] == [0, 1, 2]
    assert all(about["environment"] == "slurm" for about in found)


@pytest.mark.parametrize("text", ["n[1-3,07],login", "r[1-2]n[08-10]", "a[3,1-2],b"])
def test_host_lists_are_those_of_scontrol(slurm: Slurm, text: str) -> None:
    assert slurm.run("scontrol", "show", "hostnames", text).stdout.split() == parse_hosts(text)


def _epochs(slurm: Slurm, folder: str) -> int:
    """Returns how many epochs a job has trained, over all of its starts."""
    path: Path = slurm.folder / folder / "progress.txt"
    return len(path.read_text().splitlines()) if path.exists() else 0


def _wait_for_epochs(slurm: Slurm, folder: str, count: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while _epochs(slurm, folder) < count:
        assert time.monotonic() < deadline, slurm.logs()
        time.sleep(0.2)


LAUNCHED = """#!/bin/sh
#SBATCH --nodes=2 --ntasks-per-node=1 --output=%x.out --no-requeue
exec {python} -m tfmulti launch {flags} -m {program}
"""


def test_the_launcher_takes_the_nodes_of_its_allocation(slurm: Slurm) -> None:
    """It starts the workers of the other node by srun."""
    program = "tfmulti.fit --epochs 2 --steps_per_execution 1 --run_dir launched"
    flags = "--nproc-per-node 1"
    text = LAUNCHED.format(python=sys.executable, flags=flags, program=program)
    job = slurm.submit(text, "--job-name=launched")
    assert slurm.wait(job, LIMIT_S)["JobState"] == "COMPLETED", slurm.logs()
    found, one = report_of(slurm, "launched"), one_device(slurm, "one-launched", 2)
    assert found["replicas"] == 2
    for name, values in one["history"].items():
        assert found["history"][name] == pytest.approx(values, rel=1e-4)
    output = (slurm.folder / "launched.out").read_text()
    assert NODES[1] in output


def test_the_launcher_goes_on_when_a_node_leaves_its_allocation(
    slurm: Slurm, whole: dict[str, Any]
) -> None:
    """The step on that node is killed. Its workers start again, and no number changes."""
    program = f"tests.support.slow_training elastic {EPOCHS}"
    flags = "--nproc-per-node 1 --min-workers 1"
    text = LAUNCHED.format(python=sys.executable, flags=flags, program=program)
    job = slurm.submit(text, "--job-name=elastic")
    _wait_for_epochs(slurm, "elastic", 5)
    assert slurm.run("scancel", "--signal=KILL", f"{job}.0").returncode == 0
    assert slurm.wait(job, LIMIT_S)["JobState"] == "COMPLETED", slurm.logs()
    assert result_of(slurm, "elastic")["loss"] == pytest.approx(whole["loss"], rel=1e-4)
    assert "starting all workers again" in (slurm.folder / "elastic.out").read_text()
