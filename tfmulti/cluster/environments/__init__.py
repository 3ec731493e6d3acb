"""Finds out which launcher or scheduler has started this process, and which cluster it describes.

Each module here reads the variables of one environment, by pure functions of a mapping. It has a
`NAME`, the `VARIABLES` that it reads, `is_here(env)`, and `read(env)`. `read` returns a `Cluster`
if the environment tells the address of each worker, and a `Layout` if the processes must agree on
ports first. To support another environment, write such a module and add it to `ENVIRONMENTS`.

`described(env)` finds the environment without talking to anybody. `find_cluster(env)` also lets the
processes agree on ports (`tfmulti.cluster.port_agreement`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

from tfmulti.cluster import port_agreement
from tfmulti.cluster.cluster import Cluster
from tfmulti.cluster.environments import (
    azureml,
    kubernetes,
    lsf,
    mpi,
    sagemaker,
    slurm,
    tf_config,
    vertex,
    volcano,
)
from tfmulti.cluster.gpus import gpus_of_task
from tfmulti.cluster.layout import Env, Layout
from tfmulti.errors import ClusterError, ConfigError, did_you_mean

# What the user wrote comes first. A program that starts processes inside an allocation, as mpirun
# does in one of Slurm, stands before the schedulers.
ENVIRONMENTS: dict[str, ModuleType] = {
    module.NAME: module
    for module in (
        tf_config,
        mpi,
        slurm,
        lsf,
        volcano,
        kubernetes,
        sagemaker,
        vertex,
        azureml,
    )
}
AUTO, NONE = "auto", "none"
CHOICES = (AUTO, NONE, *ENVIRONMENTS)
# mpirun starts its own processes inside the allocation or the pods of these.
_ALLOCATIONS = {mpi.NAME: (slurm.NAME, lsf.NAME, kubernetes.NAME, azureml.NAME, sagemaker.NAME)}


@dataclass(frozen=True)
class Described:
    """The environment that describes the job of this process.

    Attributes:
        name: its name, one of `ENVIRONMENTS`.
        variables: those of its variables that are set.
        job: the cluster, or the layout whose processes must agree on ports.
    """

    name: str
    variables: tuple[str, ...]
    job: Cluster | Layout


def described(env: Env, name: str = AUTO) -> Described | None:
    """Returns the environment that describes this process' job, or None if it is alone.

    Args:
        env: the environment variables.
        name: the environment to read. `auto` takes the one that is recognised, and `none` ignores
            all.

    Raises:
        ClusterError: the description is wrong, two environments contradict each other, or the
            environment that was asked for is not there.
        ConfigError: there is no environment of that name.
    """
    if name not in CHOICES:
        raise ConfigError(f"no environment {name!r}; {did_you_mean(name, CHOICES)}")
    if name == NONE:
        return None
    if name != AUTO:
        module = ENVIRONMENTS[name]
        if not module.is_here(env):
            raise ClusterError(
                f"--environment {name} was asked for, but it has not started this process as one "
                f"of several. It would have set {', '.join(module.VARIABLES)}."
            )
        return _read(module, env)
    recognised = recognised_in(env)
    if not recognised:
        return None
    first = _read(recognised[0], env)
    if recognised[0] is not tf_config:
        for other in recognised[1:]:
            if other.NAME not in _ALLOCATIONS.get(first.name, ()):
                _check_same(first, _read(other, env))
    return first


def recognised_in(env: Env) -> list[ModuleType]:
    """Returns the environments that have started this process as one of several."""
    in_shell = slurm.is_shell(env)
    modules = [module for module in ENVIRONMENTS.values() if module is not slurm or not in_shell]
    return [module for module in modules if module.is_here(env)]


def find_cluster(env: Env, name: str = AUTO) -> tuple[Cluster | None, str]:
    """Returns the cluster of the environment, and the environment's name.

    Under a scheduler that tells no ports, every process of the job calls it, and it waits for all
    of them. A process asks once; later calls return the same cluster.

    Args:
        env: the environment variables.
        name: the environment to read; see `described`.

    Returns:
        The cluster and the name, or None and an empty name if this process is alone.

    Raises:
        ClusterError: the description is wrong, or the processes do not find each other.
        ConfigError: there is no environment of that name.
    """
    environment = described(env, name)
    if environment is None:
        if name == AUTO and (hint := why_alone(env)) and hint not in _hints:
            _hints.add(hint)
            print(f"tfmulti: {hint}", file=sys.stderr, flush=True)
        return None, ""
    if isinstance(environment.job, Cluster):
        return environment.job, environment.name
    if environment.job not in _agreed:
        gpus = len(gpus_of_task(env, environment.job.local_rank, environment.job.local_size))
        is_complete = environment.job.chief_hosts and environment.job.job
        job = environment.job if is_complete else mpi.completed(environment.job, env)
        _agreed[environment.job] = port_agreement.agree(job, env, gpus=gpus)
    return _agreed[environment.job], environment.name


# TensorFlow joins a cluster once in a process, and so do the processes agree once.
_agreed: dict[Layout, Cluster] = {}


_hints: set[str] = set()


def why_alone(env: Env) -> str:
    """Returns what a process that trains alone lacks to be one of several, or an empty text.

    Args:
        env: the environment variables, in which no environment was recognised.
    """
    if slurm.is_here(env) and slurm.is_shell(env):
        return (
            f"slurm: the step has {env['SLURM_STEP_NUM_TASKS'][:9]} tasks, but it is an "
            f"interactive shell ({env['SLURM_JOB_NAME']}) or was started from one, so this process "
            "trains alone. If srun has started all of them as one job, give --environment slurm."
        )
    if kubernetes.INDEX in env and not (env.get(kubernetes.WORKERS) or env.get("PET_NNODES")):
        return (
            f"kubernetes: {kubernetes.INDEX} is set, but {kubernetes.WORKERS} is not, so this pod "
            f"trains alone. Set {kubernetes.WORKERS} to the job's completions, or to 1."
        )
    if "VC_TASK_INDEX" in env and not env.get("VC_WORKER_HOSTS"):
        return (
            "volcano: VC_TASK_INDEX is set, but VC_WORKER_HOSTS is not, so this pod trains alone. "
            "Name the task worker, and use the plugins env and svc."
        )
    return ""


def check_trains(cluster: Cluster | None) -> None:
    """Checks that this process is a worker, and not an evaluator task.

    Raises:
        ClusterError: this process is an evaluator task, which does not train.
    """
    if cluster is not None and cluster.is_evaluator:
        raise ClusterError(
            "this process is an evaluator task of TF_CONFIG, which does not train: the workers "
            "evaluate. Do not start it, or make it a worker."
        )


def _read(module: ModuleType, env: Mapping[str, str]) -> Described:
    """Returns what an environment describes.

    Raises:
        ClusterError: the environment breaks a rule. The message begins with its name.
    """
    variables = tuple(name for name in module.VARIABLES if name in env)
    try:
        return Described(module.NAME, variables, module.read(env))
    except ClusterError as error:
        if str(error).startswith((f"{module.NAME}: ", "TF_CONFIG")):
            raise
        raise ClusterError(f"{module.NAME}: {error}") from None


def _check_same(first: Described, other: Described) -> None:
    """Checks that two environments describe a job of the same size, and the same rank in it.

    Raises:
        ClusterError: they do not.
    """
    if _place(first.job) != _place(other.job):
        raise ClusterError(
            f"{first.name} says that this is {_place(first.job)}, and {other.name} that it is "
            f"{_place(other.job)}. Say which one counts: --environment {first.name} or "
            f"--environment {other.name}."
        )


def _place(job: Cluster | Layout) -> str:
    """Returns what a process is among those of its job, in words."""
    if isinstance(job, Cluster) and job.is_evaluator:
        return f"an evaluator beside {job.size} processes"
    return f"process {job.rank} of {job.size}"
