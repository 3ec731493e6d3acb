"""Training under real mpirun programs: the numbers of one device, and the end of all with one rank.

Open MPI 4.1 is Debian's. `.ci/run` installs the others from PyPI, each into a virtual environment
in the folder that TFMULTI_TEST_MPI names: they would hide each other's mpirun in one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support import networks
from tests.support.comparing import assert_the_same_losses
from tests.support.networks import Hosts
from tests.support.processes import ROOT, Finished, clean_env, processes

pytestmark = pytest.mark.mpi

LIMIT_S = 200
FIT = ["-m", "tfmulti.fit", "--epochs", "1"]
DEBIAN = "debian"
# Open MPI 5, which starts processes by PRRTE; MPICH and Intel MPI, which start them by Hydra.
HYDRAS = ("mpich", "impi-rt")
ENGINES = (DEBIAN, "openmpi", *HYDRAS)
_OPEN_MPI = ["--allow-run-as-root"] if os.getuid() == 0 else []


def program(engine: str) -> str:
    """Returns the path of an mpirun, or skips the test if it is not installed."""
    where = os.environ.get("TFMULTI_TEST_MPI", "/nowhere")
    path = "/usr/bin" if engine == DEBIAN else f"{where}/{engine}/bin"
    found = shutil.which("mpiexec", path=path)
    if found is None:
        pytest.skip(f"mpiexec is not in {path} (TFMULTI_TEST_MPI)")
    return found


def command(engine: str, count: int) -> list[str]:
    """Returns the command that starts processes on this machine."""
    more = [] if engine in HYDRAS else [*_OPEN_MPI, "--oversubscribe"]
    return [program(engine), *more, "-n", str(count)]


def on_two_hosts(hosts: Hosts, engine: str, each: int) -> tuple[list[str], dict[str, str]]:
    """Returns the command that starts `each` processes on h1 and as many on h2, and its variables.

    Their mpi4py has the MPI library of this mpirun.
    """
    # Open MPI 5 puts all processes on one host if that may have more of them than slots.
    where = [*_OPEN_MPI, "--host", f"h1:{each},h2:{each}", "-x", "LD_LIBRARY_PATH"]
    if engine in HYDRAS:
        where = ["-hosts", "h1,h2", "-ppn", str(each)]
    library = Path(program(engine)).parents[1] / "lib"
    env = {"PATH": hosts.search_path, "LD_LIBRARY_PATH": str(library)}
    return [*hosts.inside(1), program(engine), *where, "-n", str(2 * each)], env


def mpirun(
    folder: Path, words: list[str], *argv: str, env: Mapping[str, str] | None = None
) -> Finished:
    """Runs Python in processes of one mpirun, and returns what it printed."""
    with processes(folder / "logs") as group:
        group.start(argv, env, folder, words)
        return group.wait(LIMIT_S)[0]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Gives two hosts, h1 and h2, which reach each other by SSH."""
    if (reason := networks.why_not()) is not None:
        pytest.skip(reason)
    with networks.hosts(2, tmp_path_factory.mktemp("network")) as made:
        yield made


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


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_processes_of_two_hosts_train_with_one_devices_numbers(
    tmp_path: Path, hosts: Hosts, one_device: dict[str, Any], engine: str
) -> None:
    """The commands of the page do the same with Debian's Open MPI."""
    words, env = on_two_hosts(hosts, engine, 1)
    done = mpirun(tmp_path, words, *FIT, "--run_dir", "all", env=env)
    assert done.returncode == 0, done.stderr
    assert_the_same_losses(report_of(tmp_path / "all"), one_device, 2)


# Each rank writes the cluster that it has found.
FINDS = """
import json, os, sys
from pathlib import Path
from tfmulti.cluster.environments import find_cluster
cluster, name = find_cluster(os.environ)
found = json.dumps([name, cluster.rank, *cluster.addresses])
Path(f"{sys.argv[1]}_{cluster.rank}.json").write_text(found)
"""


def clusters(folder: Path, name: str, ranks: int) -> list[list[str]]:
    """Returns what the ranks of a job have written."""
    # mpirun may print the lines of two ranks as one, so each rank writes its own file.
    return [json.loads((folder / f"{name}_{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("has_two_hosts", [False, True], ids=["one host", "two hosts"])
def test_jobs_at_the_same_time_do_not_mix(
    tmp_path: Path, request: pytest.FixtureRequest, engine: str, has_two_hosts: bool
) -> None:
    names, words, env = ("a", "b"), command(engine, 4), {}
    if has_two_hosts:
        words, env = on_two_hosts(request.getfixturevalue("hosts"), engine, 2)
    with processes(tmp_path / "logs") as group:
        for name in names:
            group.start(["-c", FINDS, name], env, tmp_path, words)
        for done in group.wait(LIMIT_S):
            assert done.returncode == 0, done.stderr
    on = ["h1", "h1", "h2", "h2"] if has_two_hosts else ["127.0.0.1"] * 4
    seen: set[str] = set()
    for name in names:
        found = clusters(tmp_path, name, 4)
        assert [about[:2] for about in found] == [["mpi", rank] for rank in range(4)]
        assert all(about[2:] == found[0][2:] for about in found)
        assert [address.partition(":")[0] for address in found[0][2:]] == on
        assert not seen & set(found[0][2:])
        seen |= set(found[0][2:])


# Each rank writes the seconds of a core that it has used.
LATE = """
import os, time
from pathlib import Path
from mpi4py import MPI
from tfmulti.cluster.environments import find_cluster
rank = MPI.COMM_WORLD.rank
if rank:
    time.sleep(3)
before = time.process_time()
find_cluster(os.environ)
Path(f"used_{rank}").write_text(str(time.process_time() - before))
"""


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_a_process_that_waits_for_a_late_one_leaves_it_the_core(
    tmp_path: Path, hosts: Hosts, engine: str
) -> None:
    words, env = on_two_hosts(hosts, engine, 1)
    done = mpirun(tmp_path, words, "-c", LATE, env=env)
    assert done.returncode == 0, done.stderr
    assert max(float((tmp_path / f"used_{rank}").read_text()) for rank in (0, 1)) < 1


# Rank 1 knows where rank 0 is, so it asks nobody.
DIFFERS = """
import os, sys, time
from pathlib import Path
from mpi4py import MPI
from tfmulti.cluster.environments import mpi
from tfmulti.errors import ClusterError
rank = MPI.COMM_WORLD.rank
if rank:
    os.environ["TFMULTI_CHIEF_HOST"] = "h1"
    os.environ[mpi.SECRET] = "of rank 1 alone"
try:
    found = mpi.completed(mpi.read(os.environ), os.environ, timeout_s=2)
    Path(f"found_{rank}").write_text(found.chief_hosts[0])
except ClusterError as error:
    Path(f"found_{rank}").write_text(str(error))
if rank:
    time.sleep(200)
sys.exit(2)
"""


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_a_process_with_other_variables_ends_the_wait_of_the_others(
    tmp_path: Path, hosts: Hosts, engine: str
) -> None:
    """It ends the job, too: leaving MPI in the usual way would wait for rank 1 once more."""
    words, env = on_two_hosts(hosts, engine, 1)
    done = mpirun(tmp_path, words, "-c", DIFFERS, env=env)
    assert (done.returncode, done.seconds < 100) == (2, True)
    assert (tmp_path / "found_1").read_text() == "h1"
    message = (tmp_path / "found_0").read_text()
    assert message.startswith("mpi: not all of the 2 processes have come within 2 s.")
    assert "TFMULTI_SECRET" in message


def test_mistakes_on_two_hosts_are_one_line(tmp_path: Path, hosts: Hosts) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "mpi4py.py").write_text("raise ImportError\n")
    words, env = on_two_hosts(hosts, DEBIAN, 1)
    env["PYTHONPATH"] = f"{tmp_path / 'first'}:{ROOT}"
    done = mpirun(tmp_path, [*words, "-x", "PYTHONPATH"], *FIT, env=env)
    line = "tfmulti: mpi: 2 processes run on several hosts, whose names mpirun does not tell. Inst"
    check_mistake(done, line)
    words, env = on_two_hosts(hosts, "mpich", 1)
    # mpi4py loads the library of Debian's Open MPI.
    del env["LD_LIBRARY_PATH"]
    done = mpirun(tmp_path, words, *FIT, env=env)
    line = "tfmulti: mpi: mpirun has started 2 processes, but mpi4py sees 1, since it uses anot"
    check_mistake(done, line)


def check_mistake(done: Finished, line: str) -> None:
    """Checks that each process has printed one line, unless mpirun ended it before."""
    assert done.returncode == 2, done.stderr
    assert done.stderr.count(line) in (1, 2)
    assert "Traceback" not in done.stderr


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
    done = mpirun(tmp_path, command(DEBIAN, 2), "dies.py")
    assert done.returncode != 0
    assert "rank 1 is killed" in done.stdout
    assert "all is trained" not in done.stdout
    assert "signal 9 (Killed)" in done.stdout + done.stderr


@pytest.mark.parametrize("engine", ENGINES)
def test_the_environment_is_shown(tmp_path: Path, engine: str) -> None:
    done = mpirun(tmp_path, command(engine, 2), "-m", "tfmulti", "env", "--json")
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
BLOCKS = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs" / "mpi.md").read_text(), re.M | re.S)
# This machine has few cores, and an epoch shows enough.
CHANGED = {"h1:2,h2:2": "h1:1,h2:1", "/shared/": "", "tfmulti.fit": "tfmulti.fit --epochs 1"}


@pytest.mark.parametrize(
    ("number", "run_dir", "count"),
    [(0, "runs/digits", 2), (0, "runs/digits", 3), (1, "a", 2), (2, "a", 2)],
)
def test_the_commands_of_the_page_run(
    tmp_path: Path, hosts: Hosts, one_device: dict[str, Any], number: int, run_dir: str, count: int
) -> None:
    program(DEBIAN)
    commands = BLOCKS[number].replace("-np 4", f"-np {count}")
    for before, after in CHANGED.items():
        commands = commands.replace(before, after)
    (tmp_path / "train.py").write_text(TRAIN)
    env = dict.fromkeys(["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"], "1")
    env |= {"OMPI_MCA_rmaps_base_oversubscribe": "1", "PATH": hosts.search_path}
    done = subprocess.run(
        [*hosts.inside(1), "bash", "-euc", commands],
        cwd=tmp_path,
        env=clean_env(env),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert_the_same_losses(report_of(tmp_path / run_dir), one_device, count)
    # mpirun may print the lines of two ranks as one.
    found = done.stdout.count(f"the script has {count} replicas")
    assert found == commands.count("train.py") * count
    # The second command names the hosts, but no secret.
    assert done.stderr.count("run on several hosts without TFMULTI_SECRET") == (number == 1)


def test_each_block_of_the_page_is_run() -> None:
    assert len(BLOCKS) == 3
    assert all(any(before in block for block in BLOCKS) for before in CHANGED)
