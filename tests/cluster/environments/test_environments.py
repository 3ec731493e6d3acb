"""Tests that each environment is recognised and read as documented, or refused if it is wrong."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from tfmulti.cluster.cluster import Cluster
from tfmulti.cluster.environments import ENVIRONMENTS, described, find_cluster, why_alone
from tfmulti.cluster.environments.mpi import names_of
from tfmulti.cluster.layout import Layout
from tfmulti.config import fit_config
from tfmulti.errors import ClusterError, ConfigError

# A TFJob with enableDynamicWorker: SparseClusterSpec in
# https://github.com/kubeflow/training-operator/blob/v1.9.0/pkg/controller.v1/tensorflow/tensorflow.go
SPARSE = {
    "sparseCluster": {"worker": {"0": "a:1"}, "ps": []},
    "task": {"type": "worker", "index": 0},
}
TF_CONFIG = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
# https://slurm.schedmd.com/srun.html, as 22.05 sets them for `srun -N 2 -n 3` (task 2).
SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NAME": "train",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_JOB_NODELIST": "n[1-4]",
}
# https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "77",
}
# https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md.
# MPICH 5 and Intel MPI 2021 set them so (tests/clusters/test_mpi.py).
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "4"}
# https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/
INDEXED_JOB = {
    "JOB_COMPLETION_INDEX": "3",
    "HOSTNAME": "train-3",
    "TFMULTI_WORKERS": "4",
    "TFMULTI_SUBDOMAIN": "train",
}
# What the torch runtime of Trainer v2 sets, and JOB_COMPLETION_INDEX of the JobSet's Job:
# https://github.com/kubeflow/trainer/blob/master/pkg/runtime/framework/plugins/torch/torch.go
TRAIN_JOB = {
    "JOB_COMPLETION_INDEX": "1",
    "HOSTNAME": "fit-node-0-1",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "fit-node-0-0.fit",
    "PET_MASTER_PORT": "29500",
}
# https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/tensorflow/
TF_JOB = {
    "cluster": {
        "chief": ["j-chief-0.ns.svc:2222"],
        "worker": ["j-worker-0.ns.svc:2222", "j-worker-1.ns.svc:2222"],
        "ps": [],
    },
    "task": {"type": "worker", "index": 1},
    "environment": "cloud",
}
# https://volcano.sh/en/docs/v1-8-2/user-guide/how_to_use_job_plugins
VOLCANO = {
    "VC_TASK_INDEX": "1",
    "VK_TASK_INDEX": "1",
    "VC_WORKER_HOSTS": "j-worker-0.j,j-worker-1.j",
    "VC_WORKER_NUM": "2",
}
# https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md
SAGEMAKER = {
    "SM_HOSTS": '["algo-10","algo-2","algo-1"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_NUM_GPUS": "1",
}
# https://cloud.google.com/vertex-ai/docs/training/distributed-training#cluster-variables
CLUSTER_SPEC = {
    "cluster": {
        "workerpool0": ["cmle-training-workerpool0-ab-0:2222"],
        "workerpool1": [f"cmle-training-workerpool1-ab-{i}:2222" for i in range(2)],
    },
    "environment": "cloud",
    "task": {"type": "workerpool1", "index": 1, "trial": ""},
}
# https://cloud.google.com/vertex-ai/docs/training/distributed-training#tf-config: there are keys
# that TensorFlow's own format does not have.
VERTEX_TF_CONFIG = {
    "cluster": {
        "chief": ["cmle-training-workerpool0-ab-0:2222"],
        "worker": [f"cmle-training-workerpool1-ab-{i}:2222" for i in range(2)],
    },
    "environment": "cloud",
    "job": {"python_module": "", "job_args": [], "region": "", "worker_count": ""},
    "task": {"type": "worker", "index": 0, "trial": "", "cloud": "a1b2-ml"},
}
# https://learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu: rank 3 of two
# nodes with process_count_per_instance 2.
AZUREML = {
    "AZUREML_RUN_ID": "calm_cat",
    "AZUREML_NODE_COUNT": "2",
    "MASTER_ADDR": "10.0.0.4",
    "MASTER_PORT": "6105",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "NODE_RANK": "1",
}


def lsf(folder: Path, rank: str = "2") -> dict[str, str]:
    """https://www.ibm.com/docs/en/spectrum-lsf/10.1.0: the launch node comes first."""
    ranks = folder / "ranks"
    ranks.write_text("login1\nc1\nc1\nc2\nc2\n")
    return {
        "LSB_JOBID": "9",
        "LSB_DJOB_RANKFILE": str(ranks),
        "JSM_NAMESPACE_RANK": rank,
        "JSM_NAMESPACE_SIZE": "4",
        "JSM_NAMESPACE_LOCAL_RANK": "0",
        "JSM_NAMESPACE_LOCAL_SIZE": "2",
    }


def cluster_of(env: dict[str, str]) -> Cluster:
    found = described(env)
    assert found is not None
    assert isinstance(found.job, Cluster)
    return found.job


def layout_of(env: dict[str, str]) -> Layout:
    found = described(env)
    assert found is not None
    assert isinstance(found.job, Layout)
    return found.job


def test_the_flag_knows_each_environment() -> None:
    assert ("auto", "none", *ENVIRONMENTS) == fit_config.ENVIRONMENTS


def test_no_environment_is_recognised_without_variables() -> None:
    assert described({"PATH": "/bin", "HOSTNAME": "laptop"}) is None


def test_a_slurm_step() -> None:
    found = layout_of(SLURM)
    assert (found.rank, found.size, found.local_rank, found.local_size) == (2, 3, 0, 1)
    assert (found.host, found.chief_hosts, found.hosts) == ("n2", ("n1",), ("n1", "n1", "n2"))
    planned = found.planned
    assert planned is not None
    hosts = [address.rpartition(":")[0] for address in planned.addresses]
    assert hosts == ["n1", "n1", "n2"]
    assert len(set(planned.addresses)) == 3


@pytest.mark.parametrize(
    ("changed", "hosts", "chief_hosts"),
    [
        ({"SLURM_DISTRIBUTION": "cyclic", "SLURM_PROCID": "1"}, ("n1", "n2", "n1"), ("n1",)),
        ({"SLURM_DISTRIBUTION": "plane=4"}, (), ("n1",)),
        ({"SLURM_DISTRIBUTION": "arbitrary"}, (), ("n1", "n2")),
        # The distribution contradicts the ranks, so the processes find their hosts themselves.
        ({"SLURM_PROCID": "1"}, (), ("n1",)),
    ],
)
def test_other_distributions_of_slurm(
    changed: dict[str, str], hosts: tuple[str, ...], chief_hosts: tuple[str, ...]
) -> None:
    found = layout_of(SLURM | changed)
    assert (found.hosts, found.chief_hosts) == (hosts, chief_hosts)


@pytest.mark.parametrize(
    "changed",
    [
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_STEP_NUM_TASKS": ""},
        *(
            {"SLURM_JOB_NAME": name, "SLURM_PTY_PORT": "1"}
            for name in ("interactive", "bash", "sh", "zsh", "fish", "tcsh")
        ),
    ],
)
def test_a_batch_script_or_a_shell_trains_alone(changed: dict[str, str]) -> None:
    assert described(SLURM | changed) is None


def test_srun_inside_of_a_shell_says_how_to_make_its_tasks_one_job(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The tasks of the inner srun have the variables of the shell's terminal."""
    env = SLURM | {"SLURM_JOB_NAME": "bash", "SLURM_PTY_PORT": "1"}
    assert find_cluster(env) == (None, "")
    line = capsys.readouterr().err
    assert line.startswith("tfmulti: slurm: the step has 3 tasks, but it is an interactive shell")
    assert line.endswith("give --environment slurm.\n")
    found = described(env, "slurm")
    assert found is not None
    assert (found.job.rank, found.job.size) == (2, 3)


def test_a_step_that_is_named_after_a_shell_is_a_step() -> None:
    """`srun -n 3 bash -c …` is named bash, but has no terminal."""
    assert layout_of(SLURM | {"SLURM_JOB_NAME": "bash"}).rank == 2


def test_open_mpi_and_hydra_on_one_host() -> None:
    for env, rank, size in ((OPEN_MPI, 1, 2), (HYDRA, 0, 4)):
        found = layout_of(env)
        assert (found.rank, found.size, found.local_size) == (rank, size, size)
        assert set(found.hosts) == {"127.0.0.1"}


def test_the_hosts_that_mpi_tells_are_names() -> None:
    names = [b"n1".ljust(256, b"\0"), b"n-2.example".ljust(256, b"\0")]
    assert names_of(names) == ("n1", "n-2.example")
    for wrong in (b"", b"-F", b"a b", b"\x80\x04", b"n1\0n2"):
        with pytest.raises(ClusterError, match="the host of process 1 calls itself"):
            names_of([names[0], wrong.ljust(256, b"\0")])


def test_mpi_on_several_hosts_looks_for_rank_0_in_the_allocation() -> None:
    several = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    found = layout_of(several | {"SLURM_JOB_NODELIST": "n[3-4]"})
    assert found.chief_hosts == ("n3", "n4")
    assert layout_of(several | {"TFMULTI_CHIEF_HOST": "h"}).chief_hosts == ("h",)
    # Azure's documents: https://learn.microsoft.com/azure/batch/batch-compute-node-environment-variables
    azure = {"AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}
    assert layout_of(several | azure).chief_hosts == ("10.0.0.4",)


def test_pmi_without_the_ranks_of_a_host_is_refused_on_several() -> None:
    """Each host would take itself for the only one."""
    env = {"PMI_RANK": "1", "PMI_SIZE": "2"}
    assert layout_of(env).local_size == 2
    with pytest.raises(ClusterError, match="PMI_RANK is set, but MPI_LOCALRANKID is not, so"):
        described(env | {"SLURM_JOB_NODELIST": "n[1-2]"})
    assert layout_of(env | {"SLURM_JOB_NODELIST": "n1"}).local_size == 2


def test_mpi_on_several_hosts_without_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    several = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    words = "2 processes run on several hosts, whose names mpirun does not tell.*TFMULTI_CHIEF_HOST"
    with pytest.raises(ClusterError, match=words):
        find_cluster(several)


def test_mpirun_counts_inside_an_allocation_of_slurm() -> None:
    """Mpirun's own daemons run in a step of Slurm, whose ranks are not the processes' ranks."""
    assert layout_of(SLURM | OPEN_MPI).environment == "mpi"


def test_srun_with_pmi_is_slurm() -> None:
    assert layout_of(SLURM | {"PMI_RANK": "2", "PMI_SIZE": "3"}).environment == "slurm"


def test_lsf(tmp_path: Path) -> None:
    found = layout_of(lsf(tmp_path))
    assert (found.rank, found.size, found.local_rank, found.local_size) == (2, 4, 0, 2)
    assert found.chief_hosts == ("c1", "c2")


def test_a_rank_file_of_lsf_without_a_launch_node(tmp_path: Path) -> None:
    """Of four processes two run on each host, so the first host computes, too."""
    file = tmp_path / "without_launch"
    file.write_text("c1\nc1\nc2\nc2\n")
    found = layout_of(lsf(tmp_path) | {"LSB_DJOB_RANKFILE": str(file)})
    assert found.chief_hosts == ("c1", "c2")
    assert found.hosts == ()
    one = lsf(tmp_path) | {"LSB_DJOB_RANKFILE": str(file), "JSM_NAMESPACE_LOCAL_SIZE": "4"}
    assert layout_of(one).host == "c2"


@pytest.mark.parametrize("name", ["LSB_JOBID", "LSB_JOBINDEX", "PMIX_NAMESPACE"])
def test_jobs_of_lsf_have_different_names(tmp_path: Path, name: str) -> None:
    """Elements of an array share their number, and so do two jsrun of one job."""
    env = lsf(tmp_path) | {"LSB_JOBINDEX": "1", "PMIX_NAMESPACE": "5"}
    assert layout_of(env).job != layout_of(env | {name: "2"}).job


@pytest.mark.parametrize(
    ("env", "rank", "addresses"),
    [
        (INDEXED_JOB, 3, [f"train-{i}.train:2222" for i in range(4)]),
        (TRAIN_JOB, 1, [f"fit-node-0-{i}.fit:2222" for i in range(2)]),
        (VOLCANO, 1, ["j-worker-0.j:2222", "j-worker-1.j:2222"]),
        (SAGEMAKER, 1, ["algo-1:2222", "algo-2:2222", "algo-10:2222"]),
        (
            {"CLUSTER_SPEC": json.dumps(CLUSTER_SPEC)},
            2,
            [f"cmle-training-workerpool{i}-ab-{j}:2222" for i, j in ((0, 0), (1, 0), (1, 1))],
        ),
        (
            {"TF_CONFIG": json.dumps(VERTEX_TF_CONFIG)},
            1,
            [f"cmle-training-workerpool{i}-ab-{j}:2222" for i, j in ((0, 0), (1, 0), (1, 1))],
        ),
        (
            {"TF_CONFIG": json.dumps(TF_JOB)},
            2,
            [f"j-{name}.ns.svc:2222" for name in ("chief-0", "worker-0", "worker-1")],
        ),
    ],
)
def test_environments_with_addresses(env: dict[str, str], rank: int, addresses: list[str]) -> None:
    found = cluster_of(env)
    assert (found.rank, list(found.addresses)) == (rank, addresses)


@pytest.mark.parametrize("rank", range(4))
def test_azureml(rank: int) -> None:
    """Each process takes its part of its node's GPUs, also on node 0."""
    node, local_rank = divmod(rank, 2)
    ranks = {"RANK": f"{rank}", "LOCAL_RANK": f"{local_rank}", "NODE_RANK": f"{node}"}
    per_node = changed(AZUREML, AZUREML_NODE_COUNT=None, LOCAL_WORLD_SIZE="2")
    for env in (AZUREML | ranks, per_node | ranks):
        found = layout_of(env)
        assert (found.rank, found.size) == (rank, 4)
        assert (found.local_rank, found.local_size) == (local_rank, 2)
        assert found.host == (socket.gethostname() if node else "10.0.0.4")
        assert (found.chief_hosts, found.hosts) == (("10.0.0.4",), ())


def test_azureml_on_one_node_knows_all_hosts() -> None:
    found = layout_of(AZUREML | {"AZUREML_NODE_COUNT": "1", "NODE_RANK": "0", "LOCAL_RANK": "3"})
    assert (found.local_rank, found.local_size, found.hosts) == (3, 4, ("10.0.0.4",) * 4)


@pytest.mark.parametrize(
    "env",
    [
        OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"},
        INDEXED_JOB | {"TFMULTI_WORKERS": "1"},
        {"JOB_COMPLETION_INDEX": "0"},
        {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
        {"SM_HOSTS": "", "SM_CURRENT_HOST": "algo-1"},
        {"VC_TASK_INDEX": "0", "VC_WORKER_HOSTS": "j-worker-0.j", "VC_WORKER_NUM": "1"},
        {"CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a:1"]}}'},
        {"CLUSTER_SPEC": ""},
        AZUREML | {"WORLD_SIZE": "1"},
    ],
)
def test_a_job_of_one_process_has_no_cluster(env: dict[str, str]) -> None:
    assert described(env) is None


def test_a_pod_that_trains_alone_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    for env in ({"JOB_COMPLETION_INDEX": "0"}, {"VC_TASK_INDEX": "0"}) * 2:
        assert find_cluster(env) == (None, "")
    assert find_cluster({"VK_TASK_INDEX": "0", "JOB_COMPLETION_INDEX": "0"}, "none") == (None, "")
    for empty in ({"TFMULTI_WORKERS": ""}, {"TFMULTI_WORKERS": "", "PET_NNODES": ""}):
        assert why_alone({"JOB_COMPLETION_INDEX": "0"} | empty).startswith("kubernetes: ")
    assert why_alone({"VC_TASK_INDEX": "0", "VC_WORKER_HOSTS": ""}).startswith("volcano: ")
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("tfmulti: kubernetes: JOB_COMPLETION_INDEX is set, but TFMULTI_WORKERS")
    assert second.startswith("tfmulti: volcano: VC_TASK_INDEX is set, but VC_WORKER_HOSTS is not")


def test_an_explicit_tf_config_wins() -> None:
    found = described({**SLURM, **OPEN_MPI, "TF_CONFIG": json.dumps(TF_CONFIG)})
    assert found is not None
    assert (found.name, found.variables) == ("tf_config", ("TF_CONFIG",))


def test_two_environments_that_contradict_each_other() -> None:
    words = r"slurm says that this is process 2 of 3, and sagemaker that it is process 1 of 3\."
    with pytest.raises(ClusterError, match=words):
        described(SLURM | SAGEMAKER)
    assert layout_of(SLURM | SAGEMAKER | {"SM_CURRENT_HOST": "algo-10"}).environment == "slurm"
    vertex = {"cluster": {"workerpool0": ["a:1"], "workerpool1": ["b:1"], "workerpool3": ["e:1"]}}
    spec = json.dumps(vertex | {"task": {"type": "workerpool3", "index": 0}})
    with pytest.raises(ClusterError, match=r"slurm says .* and vertex that it is an evaluator"):
        described(SLURM | {"CLUSTER_SPEC": spec})


def test_one_environment_is_forced_or_all_are_ignored() -> None:
    found = described(SLURM | SAGEMAKER, "sagemaker")
    assert found is not None
    assert found.name == "sagemaker"
    assert described({**SLURM, "TF_CONFIG": json.dumps(TF_CONFIG)}, "none") is None
    with pytest.raises(ClusterError, match="--environment mpi was asked for, but"):
        described(SLURM, "mpi")
    with pytest.raises(ConfigError, match="no environment 'slurn'; did you mean 'slurm'"):
        described(SLURM, "slurn")


def changed(env: dict[str, str], **values: str | None) -> dict[str, str]:
    merged: dict[str, Any] = {**env, **values}
    return {name: value for name, value in merged.items() if value is not None}


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (changed(SLURM, SLURM_PROCID="3"), r"the rank is 3, but there are 3 processes \(0\.\.2\)"),
        (changed(SLURM, SLURM_PROCID="x"), "SLURM_PROCID is 'x', but it must be a whole number"),
        (changed(SLURM, SLURM_LOCALID="1"), "the local rank is 1, but there are 1 processes"),
        (changed(SLURM, SLURM_NODEID="2"), r"SLURM_NODEID is 2, but .* has 2 nodes \(n1, n2\)"),
        (changed(SLURM, SLURM_NODEID=None), "SLURM_NODEID is not set"),
        (changed(SLURM, SLURM_STEP_NODELIST="n[1-"), "the host list .* does not parse at char"),
        (changed(SLURM, SLURM_STEP_NODELIST="n[2-1]"), "has the wrong range '2-1'"),
        (changed(SLURM, SLURM_STEP_NODELIST="n[1-99999999]"), "wrong range"),
        (changed(SLURM, SLURM_STEP_NODELIST=None), "the host list '' does not parse"),
        (changed(SLURM, SLURM_STEP_TASKS_PER_NODE="2(x2)"), "has 4 tasks on 2 nodes, but"),
        (changed(SLURM, SLURM_STEP_TASKS_PER_NODE="two"), "the list of tasks 'two' does not"),
        (
            changed(
                OPEN_MPI,
                OMPI_COMM_WORLD_LOCAL_SIZE="1",
                OMPI_COMM_WORLD_LOCAL_RANK="0",
                SLURM_JOB_NODELIST="[",
            ),
            "SLURM_JOB_NODELIST: the host list .* does not parse",
        ),
        (
            changed(
                OPEN_MPI,
                OMPI_COMM_WORLD_LOCAL_SIZE="1",
                OMPI_COMM_WORLD_LOCAL_RANK="0",
                PBS_NODEFILE="/nowhere",
            ),
            "PBS_NODEFILE is '/nowhere': No such file",
        ),
        (changed(INDEXED_JOB, JOB_COMPLETION_INDEX="4"), "is 4, but the job has 4 pods"),
        (changed(INDEXED_JOB, HOSTNAME="train-2"), "of pod 3 is 'train-2', but it must end in"),
        (changed(INDEXED_JOB, TFMULTI_SUBDOMAIN=None), "TFMULTI_SUBDOMAIN is not set, but"),
        (changed(TRAIN_JOB, PET_MASTER_ADDR="fit-node-0-0"), "TFMULTI_SUBDOMAIN is not set, but"),
        (changed(VOLCANO, VC_TASK_INDEX="2"), "VC_TASK_INDEX is 2, but VC_WORKER_HOSTS has 2"),
        (
            changed(VOLCANO, VC_WORKER_HOSTS="j-0.j j-1.j"),
            "names with commas between them, 2 in all",
        ),
        (changed(VOLCANO, VC_WORKER_HOSTS="j-0.j"), "is 'j-0.j', but it must be host names"),
        (
            changed(VOLCANO, VC_WORKER_HOSTS="j-0.j;j-1.j", VC_WORKER_NUM=None, VC_TASK_INDEX="0"),
            r"is 'j-0.j;j-1.j', but it must be host names with commas between them\.",
        ),
        (
            changed(VOLCANO, VC_WORKER_HOSTS="j-0.j", VC_WORKER_NUM=None),
            "VC_TASK_INDEX is 1, but VC_WORKER_HOSTS has 1",
        ),
        (changed(VOLCANO, VC_WORKER_NUM="two"), "VC_WORKER_NUM is 'two', but it must be"),
        (changed(SAGEMAKER, SM_HOSTS="algo-1 algo-2"), "but it must be a JSON list"),
        (changed(SAGEMAKER, SM_HOSTS='"algo-2"'), "but it must be a JSON list"),
        (changed(SAGEMAKER, SM_HOSTS='["algo-1"]'), "SM_CURRENT_HOST is 'algo-2', but SM_HOSTS"),
        (changed(SAGEMAKER, SM_HOSTS="[]"), "SM_CURRENT_HOST is 'algo-2', but SM_HOSTS is '..'"),
        (changed(SAGEMAKER, SM_HOSTS="a,b"), "SM_HOSTS is 'a,b', but it must be a JSON list"),
        (changed(SAGEMAKER, SM_HOSTS="[1,2]"), "SM_HOSTS is"),
        (changed(SAGEMAKER, SM_CURRENT_HOST="algo-3"), "SM_CURRENT_HOST is 'algo-3', but"),
        (
            {"CLUSTER_SPEC": json.dumps(CLUSTER_SPEC | {"task": {"type": "workerpool2"}})},
            "only replicas of workerpool0 and workerpool1 train",
        ),
        (
            {"CLUSTER_SPEC": json.dumps(CLUSTER_SPEC).replace('"workerpool0"', '"other"')},
            "workerpool0 has 0 replicas, but it must have one",
        ),
        (
            {"CLUSTER_SPEC": json.dumps(CLUSTER_SPEC | {"cluster": {"workerpool0": "a", "x": 1}})},
            "must be a list of addresses",
        ),
        (
            {"TF_CONFIG": json.dumps(SPARSE)},
            "a sparseCluster, which lists this worker alone",
        ),
        (changed(AZUREML, RANK=None), "azureml: RANK is not set"),
        (changed(AZUREML, MASTER_ADDR="a\nb"), r"azureml: 'a\\nb' is not the name of a host"),
        (
            changed(INDEXED_JOB, TFMULTI_WORKERS="99999999"),
            "TFMULTI_WORKERS is '99999999', but it must be a whole number from 1 to 65,536",
        ),
        (changed(OPEN_MPI, OMPI_COMM_WORLD_SIZE="999999999"), "from 0 to 65,536"),
        (changed(SLURM, SLURM_STEP_TASKS_PER_NODE="2(x65536)"), "has more than 65536"),
        (
            changed(SAGEMAKER, SM_HOSTS=f'["a","b{"9" * 5000}"]'),
            "SM_CURRENT_HOST is 'algo-2', but SM_HOSTS is",
        ),
        (
            {"CLUSTER_SPEC": json.dumps(CLUSTER_SPEC | {"task": {"type": ["x"], "index": 0}})},
            "only replicas of workerpool0 and workerpool1 train",
        ),
        ({"CLUSTER_SPEC": "no JSON"}, "CLUSTER_SPEC is 'no JSON', but it must be a JSON object"),
        ({"CLUSTER_SPEC": '{"cluster": []}'}, "with the object 'cluster'"),
        (
            {"CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a:1", "b:1"]}}'},
            r"CLUSTER_SPEC\['task'\] is None",
        ),
        (changed(AZUREML, AZUREML_NODE_COUNT=None), "neither AZUREML_NODE_COUNT nor LOCAL_WORLD"),
        (changed(AZUREML, AZUREML_NODE_COUNT="3"), "WORLD_SIZE is 4, .* divided by the 3 nodes"),
        (changed(AZUREML, AZUREML_NODE_COUNT="0"), "AZUREML_NODE_COUNT is '0', but it must be"),
        (changed(AZUREML, AZUREML_NODE_COUNT="8"), "WORLD_SIZE is 4, .* divided by the 8 nodes"),
        (changed(AZUREML, LOCAL_WORLD_SIZE="0"), "LOCAL_WORLD_SIZE is '0', but it must be"),
        (
            changed(AZUREML, RANK="1", LOCAL_RANK="1", NODE_RANK="7"),
            "RANK 1, LOCAL_RANK 1 and NODE_RANK 7 contradict each other with 2 processes",
        ),
        (changed(AZUREML, RANK="2", NODE_RANK=None), "NODE_RANK not set contradict each other"),
        (changed(AZUREML, RANK="5", NODE_RANK="2"), "the rank is 5, but there are 4 processes"),
        (changed(AZUREML, LOCAL_RANK="3", NODE_RANK="0"), "the local rank is 3, but there are 2"),
    ],
)
def test_mistakes_are_one_line(env: dict[str, str], words: str) -> None:
    with pytest.raises(ClusterError, match=words) as caught:
        described(env)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_mistake_in_the_addresses_of_a_platform_names_the_platform() -> None:
    twice = {"SM_HOSTS": '["algo-1", "algo-1"]', "SM_CURRENT_HOST": "algo-1"}
    with pytest.raises(ClusterError, match=r"^sagemaker: cluster\['worker'\]\[1\] is 'algo-1:"):
        described(twice)
    spec = {**CLUSTER_SPEC, "task": {"type": "workerpool1", "index": 7}}
    with pytest.raises(ClusterError, match=r"^vertex: task.index is 7, but job 'worker' has"):
        described({"CLUSTER_SPEC": json.dumps(spec)})
    given = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 7}}
    with pytest.raises(ClusterError, match=r"^TF_CONFIG: task.index is 7, but job 'worker' has"):
        described({"TF_CONFIG": json.dumps(given)})


def test_an_lsf_job_without_its_rank_file(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="LSB_DJOB_RANKFILE is not set"):
        described(changed(lsf(tmp_path), LSB_DJOB_RANKFILE=None))
    path = tmp_path / "empty"
    path.touch()
    with pytest.raises(ClusterError, match="which is not a list of hosts"):
        described(changed(lsf(tmp_path), LSB_DJOB_RANKFILE=str(path)))
