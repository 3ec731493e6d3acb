"""Training under a real mpirun: the numbers of one device, and the end of all with a lost rank."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import clean_env

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI is not installed"),
]

LIMIT_S = 200
FIT = ["-m", "tfmulti.fit", "--epochs", "1", "--verbose", "2"]


def mpirun(folder: Path, count: int, *argv: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in processes of one mpirun, and returns what it printed."""
    words = ["mpirun", "--oversubscribe", "-np", str(count)]
    if os.getuid() == 0:
        words.append("--allow-run-as-root")
    return subprocess.run(
        [*words, sys.executable, *argv],
        cwd=folder,
        env=clean_env(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.mark.parametrize("count", [2, 3])
def test_processes_of_mpirun_train_with_one_devices_numbers(tmp_path: Path, count: int) -> None:
    done = mpirun(tmp_path, count, *FIT, "--run_dir", "all")
    assert done.returncode == 0, done.stderr
    subprocess.run(
        [sys.executable, *FIT, "--run_dir", "one"],
        cwd=tmp_path,
        env=clean_env(),
        check=True,
        capture_output=True,
        timeout=LIMIT_S,
    )
    found, one = (
        json.loads((tmp_path / name / "report.json").read_text()) for name in ("all", "one")
    )
    assert found["replicas"] == count
    for name, values in one["history"].items():
        assert found["history"][name] == pytest.approx(values, rel=1e-4)


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
SEVERAL_HOSTS = """
import json, os
from pathlib import Path
from tfmulti.cluster.environments import find_cluster
alone = {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
cluster, name = find_cluster({**os.environ, **alone})
found = json.dumps([name, cluster.rank, *cluster.addresses])
Path(f"rank_{cluster.rank}.json").write_text(found)
"""


def test_mpi4py_tells_the_hosts(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="the extra mpi is not installed")
    done = mpirun(tmp_path, 2, "-c", SEVERAL_HOSTS)
    assert done.returncode == 0, done.stderr
    # mpirun may print the lines of two ranks as one, so each rank writes its own file.
    first, second = (json.loads((tmp_path / f"rank_{i}.json").read_text()) for i in range(2))
    assert [first[:2], second[:2]] == [["mpi", 0], ["mpi", 1]]
    assert first[2:] == second[2:]
    assert all(address.startswith(f"{socket.gethostname()}:") for address in first[2:])


def test_the_environment_is_shown(tmp_path: Path) -> None:
    done = mpirun(tmp_path, 2, "-m", "tfmulti", "env", "--json")
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
