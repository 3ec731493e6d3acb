"""Tests how a job of mpirun gets a name that no other job has."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from tfmulti.cluster.environments import described, find_cluster, mpi
from tfmulti.cluster.layout import Layout
from tfmulti.errors import ClusterError

# What `mpiexec -n 4` of MPICH 5 sets: nothing that differs between two jobs.
HYDRA = {
    "PMI_FD": "9",
    "PMI_RANK": "1",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "4",
}
# The second of two hosts with two processes each.
SEVERAL = HYDRA | {"MPI_LOCALNRANKS": "2", "TFMULTI_CHIEF_HOST": "h1"}
# Slurm's variables in a batch script, and in the step by which Hydra starts its proxies.
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "n[1-2]"}
PROXY = BATCH | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0"}


def read(env: Mapping[str, str]) -> Layout:
    found = described(env)
    assert found is not None
    assert found.name == "mpi"
    assert isinstance(found.job, Layout)
    return found.job


def process(folder: Path, pid: int, name: str, parent: int, started: int) -> None:
    """Writes the file by which Linux describes a process."""
    after = ["S", str(parent), *["0"] * 17, str(started), "0"]
    (folder / str(pid)).mkdir(parents=True)
    (folder / str(pid) / "stat").write_text(f"{pid} ({name}) {' '.join(after)}\n")


def processes(folder: Path, proxy: str, pid: int = 70, started: int = 500) -> Path:
    """Returns a folder in which mpirun has started this process by a shell."""
    process(folder, os.getpid(), "python", 80, 900)
    process(folder, 80, "a) shell (b", pid, 800)
    process(folder, pid, proxy, 60, started)
    process(folder, 60, "mpiexec", 1, 400)
    return folder


def test_the_job_is_named_by_the_process_of_mpirun(tmp_path: Path) -> None:
    layout = read(HYDRA)
    assert (layout.job, layout.planned) == ("", None)
    found = mpi.completed(layout, HYDRA, processes(tmp_path / "a", "hydra_pmi_proxy"))
    assert (found.job, found.hosts) == ("mpi 70 500", layout.hosts)
    for name, values in (("b", (71, 500)), ("c", (70, 501))):
        other = processes(tmp_path / name, "hydra_pmi_proxy", *values)
        assert mpi.completed(layout, HYDRA, other).job != found.job
    # MPICH's other program has no proxy.
    forked = processes(tmp_path / "d", "mpiexec.gforker")
    assert mpi.completed(layout, HYDRA, forked).job == "mpi 70 500"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PMIX_NAMESPACE", "prterun-h-14889@1"),
        ("I_MPI_HYDRA_UUID", "f7390000-dad2-2f1d-0c61-060028370a02"),
        ("PMI_PORT", "h:41234"),
    ],
)
def test_a_variable_that_names_the_job_is_enough(name: str, value: str) -> None:
    assert read(HYDRA | {name: value}).job == f"mpi {value}"


def test_a_process_of_mpirun_that_is_not_visible(tmp_path: Path) -> None:
    words = f"cannot be told from others .* the process of mpirun is not visible.*{mpi.SECRET}="
    hidden = tmp_path / "in a container"
    process(hidden, os.getpid(), "python", 1, 9)
    for folder in (tmp_path / "no Linux", hidden):
        with pytest.raises(ClusterError, match=words):
            mpi.completed(read(HYDRA), HYDRA, folder)
    secret = {mpi.SECRET: "of this job alone"}
    assert mpi.completed(read(HYDRA), secret, hidden).job == "mpi"


def test_several_hosts_need_mpi4py_or_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ClusterError, match=f"mpi4py is not installed.*{mpi.SECRET}=") as caught:
        find_cluster(SEVERAL)
    assert (caught.value.exit_code, "\n" in str(caught.value)) == (2, False)
    found = mpi.completed(read(SEVERAL), {mpi.SECRET: "of this job alone"})
    assert (found.job, found.chief_hosts) == ("mpi", ("h1",))


def test_the_number_that_intel_mpi_gives_holds_on_several_hosts() -> None:
    layout = read(SEVERAL | {"I_MPI_HYDRA_UUID": "f739"})
    assert mpi.completed(layout, {}) == layout


@pytest.mark.parametrize(
    "env",
    [
        # `mpiexec` in a batch script, whose SLURM_PROCID is 0.
        BATCH | HYDRA,
        # Hydra's proxies are the tasks of a step, one on each node.
        PROXY | SEVERAL,
        # As many proxies as processes, and the same rank.
        PROXY | HYDRA | {"MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"},
        # A PMI that does not count the processes of a host.
        BATCH | {"PMI_RANK": "0", "PMI_SIZE": "4", "SLURM_JOB_NODELIST": "n1"},
    ],
)
def test_mpiexec_counts_inside_slurm(env: dict[str, str]) -> None:
    found = read(env)
    assert (found.rank, found.size) == (int(env["PMI_RANK"]), 4)


def test_mpi4py_of_another_mpi_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its world has one process, so each rank would be a job of its own."""
    world = SimpleNamespace(Get_size=lambda: 1)
    library = SimpleNamespace(
        COMM_WORLD=world, Get_library_version=lambda: "Open MPI v4.1.4, Debian"
    )
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=library))
    words = r"has started 4 processes, but mpi4py sees 1, .* MPI library \(Open MPI v4\.1\.4\)\."
    with pytest.raises(ClusterError, match=words):
        find_cluster(SEVERAL)
