"""Runs the example of docs/cloud.md in processes with the variables that its files lead to."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import networks
from tests.support.forked import Forks, run
from tests.support.processes import ROOT, processes
from tfmulti.launch.addresses import reserved

pytestmark = pytest.mark.processes

LIMIT_S = 120
PAGE = (ROOT / "docs" / "cloud.md").read_text()
# The example runs where the test runs, and not in a container of the platform.
HERE = {"RUN_DIR": "run"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


@pytest.fixture(scope="module")
def loss_of_one(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Returns the loss of the example on one device."""
    folder = tmp_path_factory.mktemp("one")
    done = run(["-c", blocks("python")[0]], folder / "logs", limit_s=LIMIT_S, cwd=folder)
    assert done.returncode == 0, done.stderr
    return said(done.stdout, replicas=1)


def said(stdout: str, replicas: int) -> float:
    """Returns the loss that the chief has printed."""
    match = re.search(rf"^{replicas} replicas, loss (\S+)$", stdout, re.M)
    assert match is not None, stdout
    return float(match[1])


def train(
    folder: Path, envs: Sequence[Mapping[str, str]], before: Sequence[Sequence[str]] = ((), ())
) -> float:
    """Runs the example in a process for each environment, and returns the chief's loss."""
    (folder / "train.py").write_text(blocks("python")[0])
    with processes(folder / "logs", None if any(before) else Forks) as group:
        for env, words in zip(envs, before, strict=True):
            group.start(["train.py"], env={**env, **HERE}, cwd=folder, before=words)
        done = group.wait(LIMIT_S)
        assert all(each.returncode == 0 for each in done), group.logs()
    assert (folder / "run" / "model.weights.h5").is_file()
    return said("".join(each.stdout for each in done), replicas=len(envs))


@pytest.mark.hosts
def test_sagemaker(tmp_path: Path, loss_of_one: float) -> None:
    """Each machine has the same port, so each process has a network of its own."""
    if (reason := networks.why_not()) is not None:
        pytest.skip(reason)
    job = json.loads(blocks("json")[0])
    assert job["HyperParameters"]["sagemaker_program"] == "train.py"
    count = job["ResourceConfig"]["InstanceCount"]
    (tmp_path / "network").mkdir()
    with networks.hosts(count, tmp_path / "network") as hosts:
        names = [hosts.address(host) for host in range(1, count + 1)]
        envs = [
            job["Environment"] | {"SM_HOSTS": json.dumps(names[::-1]), "SM_CURRENT_HOST": name}
            for name in names
        ]
        before = [hosts.inside(host) for host in range(1, count + 1)]
        assert train(tmp_path, envs, before) == pytest.approx(loss_of_one, rel=1e-4)


def test_vertex(tmp_path: Path, loss_of_one: float) -> None:
    pools: list[dict[str, Any]] = yaml.safe_load(blocks("yaml")[0])["workerPoolSpecs"]
    counts = [pool["replicaCount"] for pool in pools]
    env = {each["name"]: each["value"] for each in pools[0]["containerSpec"]["env"]}
    assert pools[0]["containerSpec"]["command"] == ["python", "train.py"]
    with reserved(sum(counts)) as addresses:
        left = iter(addresses)
        cluster = {
            f"workerpool{pool}": [next(left) for _ in range(count)]
            for pool, count in enumerate(counts)
        }
        envs = [
            env | {"CLUSTER_SPEC": json.dumps({"cluster": cluster, "task": task})}
            for pool, count in enumerate(counts)
            for task in ({"type": f"workerpool{pool}", "index": i} for i in range(count))
        ]
        assert train(tmp_path, envs) == pytest.approx(loss_of_one, rel=1e-4)


def test_azureml(tmp_path: Path, loss_of_one: float) -> None:
    job = yaml.safe_load(blocks("yaml")[1])
    assert job["command"].endswith(" python train.py")
    nodes, each = job["resources"]["instance_count"], job["distribution"]
    assert each == {"type": "pytorch", "process_count_per_instance": 1}
    assert job["environment_variables"]["LOCAL_WORLD_SIZE"] == "1"
    envs = [
        job["environment_variables"]
        | {"AZUREML_RUN_ID": tmp_path.name, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "6105"}
        | {"RANK": f"{node}", "WORLD_SIZE": f"{nodes}", "LOCAL_RANK": "0", "NODE_RANK": f"{node}"}
        for node in range(nodes)
    ]
    assert train(tmp_path, envs) == pytest.approx(loss_of_one, rel=1e-4)


def test_lsf(tmp_path: Path, loss_of_one: float) -> None:
    (script,) = blocks("bash")
    words = shlex.split(script.splitlines()[-1])
    assert (words[0], words[-2:]) == ("jsrun", ["python", "train.py"])
    flags = dict(zip(words[1:-2:2], words[2:-2:2], strict=True))
    size = int(flags["-n"]) * int(flags["-a"])
    # The launch node comes first. Both compute nodes are this machine.
    (tmp_path / "ranks").write_text("login1\n" + "127.0.0.1\n" * size)
    envs = [
        {
            "LSB_JOBID": tmp_path.name,
            "LSB_JOBINDEX": "0",
            "LSB_DJOB_RANKFILE": str(tmp_path / "ranks"),
            "JSM_NAMESPACE_RANK": f"{rank}",
            "JSM_NAMESPACE_SIZE": f"{size}",
            "JSM_NAMESPACE_LOCAL_RANK": f"{rank}",
            "TFMULTI_SECRET": "a secret of this job alone",
        }
        for rank in range(size)
    ]
    assert train(tmp_path, envs) == pytest.approx(loss_of_one, rel=1e-4)
