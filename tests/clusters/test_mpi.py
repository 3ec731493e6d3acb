"""Training under real mpirun programs: the numbers of one device, and the end of all with one rank.

Open MPI 4.1 is Debian's. `.ci/run` installs the others from PyPI, each into a virtual environment
in the folder that TFMULTI_TEST_MPI names: they would hide each other's mpirun in one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT, clean_env

pytestmark = pytest.mark.mpi

LIMIT_S = 200
FIT = ["-m", "tfmulti.fit", "--epochs", "1", "--verbose", "2"]
DEBIAN = "debian"
# Open MPI 5, which starts processes by PRRTE; MPICH and Intel MPI, which start them by Hydra.
HYDRAS = ("mpich", "impi-rt")
ENGINES = (DEBIAN, "openmpi", *HYDRAS)
_OPEN_MPI = ("--oversubscribe", *(["--allow-run-as-root"] if os.getuid() == 0 else []))


def command(engine: str, count: int) -> list[str]:
    """Returns the command of an mpirun, or skips the test if it is not installed."""
    where = os.environ.get("TFMULTI_TEST_MPI", "/nowhere")
    path = "/usr/bin" if engine == DEBIAN else f"{where}/{engine}/bin"
    program = shutil.which("mpiexec", path=path)
    if program is None:
        pytest.skip(f"mpiexec is not in {path} (TFMULTI_TEST_MPI)")
    return [program, *(_OPEN_MPI if engine not in HYDRAS else ()), "-n", str(count)]


def mpirun(
    folder: Path, count: int, *argv: str, engine: str = DEBIAN
) -> subprocess.CompletedProcess[str]:
    """Runs Python in processes of one mpirun, and returns what it printed."""
    return subprocess.run(
        [*command(engine, count), sys.executable, *argv],
        cwd=folder,
        env=clean_env(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the report of the run on one device."""
    folder = tmp_path_factory.mktemp("one")
    argv = [sys.executable, *FIT, "--run_dir", "one"]
    options: dict[str, Any] = {"capture_output": True, "timeout": LIMIT_S}
    subprocess.run(argv, cwd=folder, env=clean_env(), check=True, **options)
    return report_of(folder / "one")


def report_of(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "report.json").read_text())
    return found


@pytest.mark.parametrize(
    ("engine", "count"), [(engine, 3 if engine == DEBIAN else 2) for engine in ENGINES]
)
def test_processes_of_mpirun_train_with_one_devices_numbers(
    tmp_path: Path, one_device: dict[str, Any], engine: str, count: int
) -> None:
    done = mpirun(tmp_path, count, *FIT, "--run_dir", "all", engine=engine)
    assert done.returncode == 0, done.stderr
    found = report_of(tmp_path / "all")
    assert found["replicas"] == count
    for name, values in one_device["history"].items():
        assert found["history"][name] == pytest.approx(values, rel=1e-4)


# Each rank writes the cluster that it has found.
FINDS = """
import json, os, sys
from pathlib import Path
from tfmulti.cluster.environments import find_cluster
cluster, name = find_cluster({**os.environ, **json.loads(sys.argv[2])})
found = json.dumps([name, cluster.rank, *cluster.addresses])
Path(f"{sys.argv[1]}_{cluster.rank}.json").write_text(found)
"""


def clusters(folder: Path, name: str, ranks: int) -> list[list[str]]:
    """Returns what the ranks of a job have written."""
    # mpirun may print the lines of two ranks as one, so each rank writes its own file.
    return [json.loads((folder / f"{name}_{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("engine", ENGINES)
def test_jobs_at_the_same_time_do_not_mix(tmp_path: Path, engine: str) -> None:
    names = ("a", "b", "c")
    jobs = [
        subprocess.Popen(
            [*command(engine, 3), sys.executable, "-c", FINDS, name, "{}"],
            cwd=tmp_path,
            env=clean_env(),
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    try:
        for job in jobs:
            _, errors = job.communicate(timeout=LIMIT_S)
            assert job.returncode == 0, errors
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    seen: set[str] = set()
    for name in names:
        found = clusters(tmp_path, name, 3)
        assert [about[:2] for about in found] == [["mpi", rank] for rank in range(3)]
        assert all(about[2:] == found[0][2:] for about in found)
        assert not seen & set(found[0][2:])
        seen |= set(found[0][2:])


DIES = """
import os, signal, sys
import keras
import numpy as np
import tfmulti

strategy = tfmulti.make_strategy()
with strategy.scope():
    model = tfmulti.prepare(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
    model.compile("sgd", "mse")

class Dies(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and strategy.cluster_resolver.task_id == 1:
            print("rank 1 is killed", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

x = np.ones((64, 4), np.float32)
model.fit(x, x[:, :1], batch_size=4, epochs=100, verbose=0, callbacks=[Dies()])
print("all is trained")
"""


def test_a_killed_rank_ends_all(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(DIES)
    done = mpirun(tmp_path, 2, "dies.py")
    assert done.returncode != 0
    assert "rank 1 is killed" in done.stdout
    assert "all is trained" not in done.stdout
    assert "signal 9 (Killed)" in done.stdout + done.stderr


# As on two hosts, of which mpirun does not tell the names: mpi4py does.
ALONE = {
    DEBIAN: {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
    "mpich": {"MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"},
}


@pytest.mark.parametrize("engine", ALONE)
def test_mpi4py_tells_the_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    pytest.importorskip("mpi4py", reason="the extra mpi is not installed")
    if engine != DEBIAN:
        # mpi4py loads the MPI library that the system finds first.
        library = Path(command(engine, 2)[0]).parents[1] / "lib"
        monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    done = mpirun(tmp_path, 2, "-c", FINDS, "all", json.dumps(ALONE[engine]), engine=engine)
    assert done.returncode == 0, done.stderr
    first, second = clusters(tmp_path, "all", 2)
    assert [first[:2], second[:2]] == [["mpi", 0], ["mpi", 1]]
    assert first[2:] == second[2:]
    assert all(address.startswith(f"{socket.gethostname()}:") for address in first[2:])


@pytest.mark.parametrize("engine", ENGINES)
def test_the_environment_is_shown(tmp_path: Path, engine: str) -> None:
    done = mpirun(tmp_path, 2, "-m", "tfmulti", "env", "--json", engine=engine)
    decoder, text, found = json.JSONDecoder(), done.stdout.strip(), []
    while text:
        # mpirun may print the lines of two ranks as one.
        about, end = decoder.raw_decode(text)
        found.append(about)
        text = text[end:].strip()
    found.sort(key=lambda about: about["rank"])
    assert [(about["environment"], about["rank"], about["size"]) for about in found] == [
        ("mpi", 0, 2),
        ("mpi", 1, 2),
    ]


TRAIN = """
import tfmulti

strategy = tfmulti.make_strategy()
print(f"the script has {strategy.num_replicas_in_sync} replicas", flush=True)
"""
# The hosts of the page are all this machine, whose cores are few.
CHANGED = {
    "-np 4": "-np 2",
    "h1:2,h2:2": "localhost:2",
    "CHIEF_HOST=h1": "CHIEF_HOST=localhost",
    "/shared/a": "shared",
}
BLOCKS = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs" / "mpi.md").read_text(), re.M | re.S)


@pytest.mark.parametrize(("number", "run_dir"), [(0, "runs/digits"), (1, "shared"), (2, "shared")])
def test_the_commands_of_the_page_run(tmp_path: Path, number: int, run_dir: str) -> None:
    program = command(DEBIAN, 2)[0]
    commands = BLOCKS[number]
    for before, after in CHANGED.items():
        commands = commands.replace(before, after)
    (tmp_path / "train.py").write_text(TRAIN)
    allowed = dict.fromkeys(["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"], "1") | {
        "OMPI_MCA_rmaps_base_oversubscribe": "1"
    }
    # `python` is that of the tests.
    path = [str(Path(sys.executable).parent), str(Path(program).parent), os.environ["PATH"]]
    done = subprocess.run(
        ["bash", "-euc", commands],
        cwd=tmp_path,
        env=clean_env({**allowed, "PATH": os.pathsep.join(path)}),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert report_of(tmp_path / run_dir)["replicas"] == 2
    # mpirun may print the lines of two ranks as one.
    assert done.stdout.count("the script has 2 replicas") == commands.count("train.py") * 2


def test_each_block_of_the_page_is_run() -> None:
    assert len(BLOCKS) == 3
    assert all(any(before in block for block in BLOCKS) for before in CHANGED)
