"""Tests that the port agreement and the doctor end with the right numbers while strangers attack.

The attacks are those of `test_attacked_job`. They begin before the second process is started. Other
tests take all file descriptors from the process that waits for the second one.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.security.test_attacked_job import ATTACKS, Place, listening, without_end
from tests.support.launching import wait_for
from tests.support.processes import processes, run, tf_config
from tfmulti.launch.addresses import reserved

LIMIT_S = 240
SECRET = {"TFMULTI_SECRET": "known to all processes"}
FIT = ["--epochs", "1", "--verbose", "2"]

# Rank 1 waits until the port of rank 0 is under attack.
RANK = """
import os, runpy, sys, time
from pathlib import Path
rank = os.environ["OMPI_COMM_WORLD_RANK"]
Path(f"rank_{rank}").write_text(str(os.getpid()))
while rank == "1" and not Path("go").exists():
    time.sleep(0.05)
runpy.run_module("tfmulti.fit", run_name="__main__", alter_sys=True)
"""


def attacked(places: set[Place], at_end: contextlib.ExitStack) -> list[list[float]]:
    """Begins all attacks on these addresses, and returns the times of their attempts."""
    return [
        at_end.enter_context(without_end(attack, place))
        for place in sorted(places)
        for attack in ATTACKS
    ]


@pytest.mark.mpi
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed")
def test_a_job_of_mpirun_whose_agreement_is_attacked_has_one_devices_numbers(
    tmp_path: Path,
) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    mpirun = ["mpirun", "--oversubscribe", "-np", "2"]
    mpirun += ["--allow-run-as-root"] if os.getuid() == 0 else []
    with processes(tmp_path / "logs") as group, contextlib.ExitStack() as at_end:
        group.start(["rank.py", *FIT, "--run_dir", "all"], SECRET, tmp_path, mpirun)
        found = set[Place]()

        def is_open() -> bool:
            with contextlib.suppress(OSError, ValueError):
                found.update(listening(int((tmp_path / "rank_0").read_text())))
            return bool(found)

        wait_for(is_open)
        tries = attacked(found, at_end)
        wait_for(lambda: min(map(len, tries)) >= 3)
        (tmp_path / "go").touch()
        (done,) = group.wait(LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    # One host has all processes, so the port was open to this machine alone.
    assert {host for host, _ in found} == {"127.0.0.1"}
    one = run(
        ["-m", "tfmulti.fit", *FIT, "--run_dir", "one"],
        tmp_path / "one_logs",
        limit_s=LIMIT_S,
        cwd=tmp_path,
    )
    assert one.returncode == 0, one.stderr
    reports = [json.loads((tmp_path / name / "report.json").read_text()) for name in ("all", "one")]
    assert [report["replicas"] for report in reports] == [2, 1]
    for name, values in reports[1]["history"].items():
        assert reports[0]["history"][name] == pytest.approx(values, rel=1e-4)


@pytest.mark.processes
def test_a_doctor_that_is_attacked_finds_the_numbers_of_one_device(tmp_path: Path) -> None:
    argv = ["-m", "tfmulti.doctor", "--json", "--wait_s=60"]
    with (
        reserved(2) as addresses,
        processes(tmp_path / "logs") as group,
        contextlib.ExitStack() as at_end,
    ):
        places = {(host, int(port)) for host, _, port in (a.rpartition(":") for a in addresses)}
        first = group.start(argv, SECRET | {"TF_CONFIG": tf_config(addresses, 0)}, tmp_path)
        wait_for(lambda: bool(listening(first.pid) & places))
        tries = attacked(places, at_end)
        wait_for(lambda: min(map(len, tries)) >= 3)
        group.start(argv, SECRET | {"TF_CONFIG": tf_config(addresses, 1)}, tmp_path)
        done = group.wait(LIMIT_S)
    assert [each.returncode for each in done] == [0, 0], [each.stderr for each in done]
    report: dict[str, Any] = json.loads(done[0].stdout)
    found = {each["check"]: each for each in report["findings"]}
    assert {found[name]["status"] for name in ("connections", "digits", "numbers")} == {"ok"}
    assert "differ by" in found["numbers"]["measured"]
    assert {(link["from"], link["to"]) for link in report["links"]} == {(0, 1), (1, 0)}


AGREES = """
import os, sys
from tfmulti.cluster.environments import described
from tfmulti.cluster.port_agreement import agree
from tfmulti.config.command_line import exit_code_of
job = described(os.environ, "mpi").job
sys.exit(exit_code_of(lambda: print(agree(job, os.environ, timeout_s=2))))
"""
OF_MPI = {f"OMPI_COMM_WORLD_{key}": "2" for key in ("SIZE", "LOCAL_SIZE")}
OF_MPI |= {f"OMPI_COMM_WORLD_{key}": "0" for key in ("RANK", "LOCAL_RANK")}
OF_MPI |= {"PMIX_NAMESPACE": "job"}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("argv", "words", "code"),
    [
        (["agrees.py"], "tfmulti: mpi: 1 of 2 processes have not connected within 2 s", 2),
        (
            ["-m", "tfmulti.doctor", "--wait_s=2"],
            "tfmulti: the doctor cannot go on: Too many op",
            1,
        ),
    ],
)
def test_a_process_that_can_open_no_file_ends_with_one_line(
    argv: list[str], words: str, code: int, tmp_path: Path
) -> None:
    (tmp_path / "agrees.py").write_text(AGREES)
    with reserved(2) as addresses, processes(tmp_path / "logs") as group:
        is_doctor = argv[0] == "-m"
        env = {"TF_CONFIG": tf_config(addresses, 0)} if is_doctor else OF_MPI
        first = group.start(argv, SECRET | env, tmp_path)
        wait_for(lambda: bool(listening(first.pid)))
        resource.prlimit(first.pid, resource.RLIMIT_NOFILE, (3, 3))
        (done,) = group.wait(LIMIT_S)
    (line,) = done.stderr.splitlines()
    assert line.startswith(words)
    assert done.returncode == code
