"""Training under a real Slurm: the numbers of one device, and jobs that go on after any stop."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.comparing import assert_the_same_losses
from tests.support.processes import ROOT
from tests.support.slurm import NODES, Slurm
from tfmulti.cluster.host_lists import parse_hosts
from tfmulti.launch.sbatch import BatchScript

pytestmark = pytest.mark.slurm

LIMIT_S = 240
FIT = ("-m", "tfmulti.fit", "--steps_per_execution", "1", "--verbose", "2")


def report_of(slurm: Slurm, run_dir: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((slurm.folder / run_dir / "report.json").read_text())
    return found


@pytest.fixture(scope="module")
def one_device(slurm: Slurm) -> dict[str, Any]:
    """Returns the report of the run on one device, without Slurm."""
    done = slurm.run(sys.executable, *FIT, "--epochs", "2", "--run_dir", "one", limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return report_of(slurm, "one")


@pytest.mark.parametrize("tasks", [["-n", "2"], ["-N", "2", "-n", "4"]])
def test_a_step_trains_with_the_numbers_of_one_device(
    slurm: Slurm, one_device: dict[str, Any], tasks: list[str]
) -> None:
    run_dir = f"step-{len(tasks)}"
    argv = ["srun", *tasks, sys.executable, *FIT, "--epochs", "2", "--run_dir", run_dir]
    done = slurm.run(*argv, limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr + slurm.logs()
    assert_the_same_losses(report_of(slurm, run_dir), one_device, int(tasks[-1]))


EPOCHS = 20


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


def test_a_job_that_is_stopped_in_each_way_changes_no_number(
    slurm: Slurm, whole: dict[str, Any]
) -> None:
    """It ends equal to the bit to the job that was never stopped."""
    # Slurm counts limits in minutes: the signal comes after 65 s or a little earlier.
    options = {"signal": "USR1", "time": "2", "signal_s": 55, "cpus_per_task": 4}
    job = slurm.submit(script("stopped", "wait", **options))
    _wait_for_restarts(slurm, job, 1)
    for stop in (_preempt, _requeue, _lose_a_node):
        before = _epochs(slurm, "stopped")
        _wait_for_epochs(slurm, "stopped", before + 1)
        restarts = int(slurm.about(job)["Restarts"])
        stop(slurm, job)
        _wait_for_restarts(slurm, job, restarts + 1)
    (slurm.folder / "stopped" / "go").touch()
    about = slurm.wait(job, 2 * LIMIT_S)
    assert about["JobState"] == "COMPLETED", slurm.logs()
    assert result_of(slurm, "stopped") == whole
    output = (slurm.folder / f"stopped-{job}.out").read_text()
    assert len(re.findall("^0: resumed +after step", output, re.M)) == int(about["Restarts"])
    # At a time limit and at a preemption it has saved after the signal. Then no epoch is trained
    # twice.
    assert EPOCHS <= _epochs(slurm, "stopped") <= EPOCHS + 2


def _preempt(slurm: Slurm, job: str) -> None:
    """Lets a job of a partition with a higher priority take the nodes of a job."""
    options = ("-p", "high", "-N", "2", "-c", "4", "-o", "high.out")
    other = slurm.submit("#!/bin/sh\ntrue\n", *options)
    assert slurm.wait(other, LIMIT_S)["JobState"] == "COMPLETED", slurm.logs()


def _requeue(slurm: Slurm, job: str) -> None:
    assert slurm.run("scontrol", "requeue", job).returncode == 0


def _lose_a_node(slurm: Slurm, job: str) -> None:
    node = ["scontrol", "update", f"NodeName={NODES[1]}"]
    try:
        slurm.run(*node, "State=DOWN", "Reason=test")
        slurm.wait(job, LIMIT_S, "PENDING", "REQUEUED", "CONFIGURING")
    finally:
        slurm.run(*node, "State=RESUME")


def test_a_cancelled_job_saves_and_is_not_requeued(slurm: Slurm) -> None:
    job = slurm.submit(script("cancelled"))
    _wait_for_epochs(slurm, "cancelled", 2)
    assert slurm.run("scancel", job).returncode == 0
    about = slurm.wait(job, 60)
    assert (about["JobState"], about["Restarts"]) == ("CANCELLED", "0")
    time.sleep(3)
    assert slurm.about(job)["JobState"] == "CANCELLED"
    assert list((slurm.folder / "cancelled" / "checkpoints").glob("*"))


def test_a_failed_program_is_not_requeued(slurm: Slurm) -> None:
    program = (*FIT, "--environment", "kubernetes")
    job = slurm.submit(BatchScript(program=program, name="wrong").text)
    about = slurm.wait(job, 60)
    assert (about["JobState"], about["Restarts"], about["ExitCode"]) == ("FAILED", "0", "2:0")
    output = (slurm.folder / f"wrong-{job}.out").read_text()
    assert "tfmulti: --environment kubernetes was asked for, but it has not started" in output


# A program that ends as a run does that has saved, and that succeeds when it starts again.
SAVES = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *of: sys.exit(143))
Path("started-" + sys.argv[1]).touch()
while not ("SLURM_RESTART_COUNT" in os.environ or Path("go-" + sys.argv[1]).exists()):
    time.sleep(0.1)
"""


def saving(slurm: Slurm, name: str, number: str = "", **options: Any) -> str:
    """Submits a job of `SAVES`, and returns its number when it has started."""
    words = ("-c", SAVES, f"{name}{'-%a' if number else ''}")
    job = slurm.submit(BatchScript(program=words, name=name, **options).text)
    started = slurm.folder / f"started-{name}{number and f'-{number}'}"
    deadline = time.monotonic() + 60
    while not started.exists():
        assert time.monotonic() < deadline, slurm.logs()
        time.sleep(0.1)
    return job


def test_one_task_of_an_array_is_requeued(slurm: Slurm) -> None:
    job = saving(slurm, "one-of-two", "2", array="1-2")
    assert slurm.run("scancel", "--signal=TERM", f"{job}_2").returncode == 0
    about = slurm.wait(f"{job}_2", LIMIT_S)
    assert (about["JobState"], about["Restarts"]) == ("COMPLETED", "1"), slurm.logs()
    assert slurm.about(f"{job}_1")["JobState"] == "RUNNING"
    (slurm.folder / "go-one-of-two-1").touch()
    about = slurm.wait(f"{job}_1", 60)
    assert (about["JobState"], about["Restarts"]) == ("COMPLETED", "0"), slurm.logs()


def test_an_array_of_two_jobs_trains_and_one_is_requeued(
    slurm: Slurm, whole: dict[str, Any]
) -> None:
    """Both run on the same nodes, and end equal to the bit to a job that runs alone."""
    program = ("-m", "tests.support.slow_training", "array-%a", str(EPOCHS), "wait")
    job = slurm.submit(BatchScript(program=program, nodes=2, name="array", array="1-2").text)
    for number in (1, 2):
        _wait_for_epochs(slurm, f"array-{number}", 2)
    assert slurm.about(f"{job}_1")["JobState"] == "RUNNING"
    assert slurm.run("scancel", "--signal=TERM", f"{job}_2").returncode == 0
    for number in (1, 2):
        (slurm.folder / f"array-{number}" / "go").touch()
    for number, restarts in ((1, "0"), (2, "1")):
        about = slurm.wait(f"{job}_{number}", LIMIT_S)
        assert (about["JobState"], about["Restarts"]) == ("COMPLETED", restarts), slurm.logs()
        assert result_of(slurm, f"array-{number}") == whole


def test_a_job_that_must_not_be_requeued_ends(slurm: Slurm) -> None:
    job = saving(slurm, "ends", requeue=False)
    assert slurm.run("scancel", "--signal=TERM", job).returncode == 0
    about = slurm.wait(job, 60)
    found = (about["JobState"], about["Restarts"], about["Requeue"], about["ExitCode"])
    assert found == ("FAILED", "0", "0", "143:0")


def test_a_job_without_scontrol_says_what_to_run(slurm: Slurm) -> None:
    text = BatchScript(program=("-c", "raise SystemExit(143)"), name="contained").text
    # As in a container, which has no programs of Slurm.
    job = slurm.submit(text.replace("\ncase ", "\nPATH=/nowhere\ncase "))
    about = slurm.wait(job, 60)
    assert (about["JobState"], about["Restarts"], about["ExitCode"]) == ("FAILED", "0", "143:0")
    words = "this job has saved, but cannot be requeued from here. Run: scontrol requeue"
    assert f"{words} {job}\n" in (slurm.folder / f"contained-{job}.out").read_text()


def test_srun_gets_the_cores_of_a_task(slurm: Slurm) -> None:
    options = {"nodes": 2, "tasks_per_node": 1, "cpus_per_task": 3}
    text = BatchScript(program=("-c", "1"), name="cores", **options).text
    job = slurm.submit(text.replace("\nsrun ", "\nsrun -v "))
    assert slurm.wait(job, 60)["JobState"] == "COMPLETED"
    output = (slurm.folder / f"cores-{job}.out").read_text()
    assert re.search("^srun: cpus-per-task +: 3$", output, re.M)


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


FINDS = """
import json, os
from tfmulti.cluster.environments import find_cluster
cluster, name = find_cluster(os.environ)
print(json.dumps([name, cluster.rank, [a.partition(":")[0] for a in cluster.addresses]]))
"""


def clusters_in(text: str) -> list[Any]:
    """Returns what the tasks have printed, by rank. The lines of two tasks may come as one."""
    found = map(json.loads, re.findall(r"\[[^\[\]]*\[[^\[\]]*\]\]", text))
    return sorted(found, key=lambda about: int(about[1]))


@pytest.mark.parametrize(
    ("options", "hosts"),
    [
        (["-n", "3", "-m", "arbitrary"], [1, 0, 1]),
        (["-N", "2", "-n", "6", "-m", "plane=2"], [0, 0, 1, 1, 0, 0]),
    ],
)
def test_tasks_of_other_distributions_find_each_other(
    slurm: Slurm, options: list[str], hosts: list[int]
) -> None:
    (slurm.folder / "hosts").write_text(f"{NODES[1]}\n{NODES[0]}\n{NODES[1]}\n")
    env = ["env", f"SLURM_HOSTFILE={slurm.folder / 'hosts'}"] if "arbitrary" in options else []
    done = slurm.run(*env, "srun", *options, sys.executable, "-c", FINDS)
    assert done.returncode == 0, done.stderr
    found = clusters_in(done.stdout)
    names = [NODES[host] for host in hosts]
    assert found == [["slurm", rank, names] for rank in range(len(hosts))]


# As root, and with a secret, because MPICH gives no name to a job on several nodes.
ON_NODES = """#!/bin/sh
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export TFMULTI_SECRET=0123456789abcdef
exec {mpiexec} -n 2 {python} finds.py
"""


@pytest.mark.parametrize("engine", ["debian", "mpich", "impi-rt"])
def test_mpiexec_in_a_batch_script(slurm: Slurm, engine: str) -> None:
    """It starts a process on each node, and the processes find each other by the allocation.

    A batch script has a SLURM_PROCID, which is not the rank of each process of mpiexec.
    """
    path = f"{os.environ.get('TFMULTI_TEST_MPI', '/nowhere')}/{engine}/bin"
    mpiexec = shutil.which("mpiexec", path="/usr/bin" if engine == "debian" else path)
    if mpiexec is None:
        pytest.skip(f"mpiexec is not in {path} (TFMULTI_TEST_MPI)")
    (slurm.folder / "finds.py").write_text(FINDS)
    text = ON_NODES.format(mpiexec=mpiexec, python=sys.executable)
    job = slurm.submit(text, "-N", "2", "-n", "2", "-o", f"{engine}.out")
    assert slurm.wait(job, 60)["JobState"] == "COMPLETED", slurm.logs()
    found = clusters_in((slurm.folder / f"{engine}.out").read_text())
    assert found == [["mpi", rank, list(NODES)] for rank in (0, 1)]


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_program_of_an_interactive_shell_trains_alone(slurm: Slurm, shell: str) -> None:
    main, end = pty.openpty()
    argv = ["srun", "-n", "2", "--pty", shell]
    with subprocess.Popen(
        argv, stdin=end, stdout=end, stderr=end, cwd=slurm.folder, env=slurm.env()
    ) as srun:
        os.close(end)
        words = f"{sys.executable} -m tfmulti env --json > {shell}.json; exit\n"
        os.write(main, words.encode())
        try:
            srun.wait(60)
        finally:
            srun.kill()
            os.close(main)
    found = json.loads((slurm.folder / f"{shell}.json").read_text())
    assert (found["environment"], found["size"]) == (None, 1)


def test_a_launcher_in_each_task_is_refused(slurm: Slurm) -> None:
    argv = ["srun", "-N", "2", "-n", "2", sys.executable, "-m", "tfmulti", "launch"]
    done = slurm.run(*argv, "-m", "tfmulti.fit", "--run_dir", "two-jobs")
    lines = [line for line in done.stderr.splitlines() if line.startswith("tfmulti: ")]
    assert done.returncode == 2
    assert len(lines) == 2
    assert all(line.startswith("tfmulti: srun has started several launchers") for line in lines)
    assert not (slurm.folder / "two-jobs").exists()


def blocks() -> list[str]:
    page = (ROOT / "docs" / "slurm.md").read_text()
    return re.findall(r"^```bash\n(.*?)^```", page, re.M | re.S)


# These nodes have no GPUs, and an epoch shows enough.
CHANGED = {
    "--gpus-per-node 4": "--tasks-per-node 1",
    "--epochs 90": "--epochs 1",
    "tfmulti.fit --run_dir": "tfmulti.fit --epochs 1 --run_dir",
}


def as_user(slurm: Slurm, commands: str) -> str:
    """Returns what commands of the page print."""
    for before, after in CHANGED.items():
        commands = commands.replace(before, after)
    path = f"PATH={Path(sys.executable).parent}:{slurm.env()['PATH']}"
    done = slurm.run("env", path, "bash", "-euc", commands, limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr + slurm.logs()
    return done.stdout


def test_the_commands_of_the_page_run(slurm: Slurm) -> None:
    step, shows, batch = blocks()
    assert all(before in step + batch for before in CHANGED)
    as_user(slurm, step)
    assert report_of(slurm, "runs/digits")["replicas"] == 2
    assert "found      slurm: process 1 of 2" in as_user(slurm, shows).splitlines()
    job = re.fullmatch(r"Submitted batch job (\d+)\n", as_user(slurm, batch))
    assert job is not None
    assert slurm.wait(job[1], LIMIT_S)["JobState"] == "COMPLETED", slurm.logs()
    assert report_of(slurm, f"runs/digits-{job[1]}")["replicas"] == 2


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


def _wait_for_restarts(slurm: Slurm, job: str, count: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while int((about := slurm.about(job))["Restarts"]) < count or about["JobState"] != "RUNNING":
        assert time.monotonic() < deadline, slurm.logs()
        time.sleep(0.3)


LAUNCHED = """#!/bin/sh
#SBATCH --nodes=2 --ntasks-per-node=1 --output=%x.out --no-requeue
exec {python} -m tfmulti launch {flags} -m {program}
"""


def test_the_launcher_takes_the_nodes_of_its_allocation(
    slurm: Slurm, one_device: dict[str, Any]
) -> None:
    """It starts the workers of the other node by srun."""
    program = "tfmulti.fit --epochs 2 --steps_per_execution 1 --run_dir launched"
    flags = "--nproc-per-node 1"
    text = LAUNCHED.format(python=sys.executable, flags=flags, program=program)
    job = slurm.submit(text, "--job-name=launched")
    assert slurm.wait(job, LIMIT_S)["JobState"] == "COMPLETED", slurm.logs()
    assert_the_same_losses(report_of(slurm, "launched"), one_device, 2)
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


def test_the_doctor_examines_the_nodes_of_a_step(slurm: Slurm) -> None:
    argv = ["srun", "-N", "2", sys.executable, "-m", "tfmulti.doctor", "--run_dir", "examined"]
    done = slurm.run(*argv, "--json", limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr + slurm.logs()
    report = json.loads(done.stdout)
    found = {each["check"]: each for each in report["findings"]}
    assert report["workers"] == 2
    assert "over 2 devices in" in found["all-reduce"]["measured"]
    for name in ("connections", "run folder", "digits", "numbers"):
        assert found[name]["status"] == "ok"
    assert (found["secret"]["status"], found["gRPC ports"]["status"]) == ("warning", "warning")
    assert done.stderr.count("waiting") == 1
    assert not (slurm.folder / "examined").exists()
