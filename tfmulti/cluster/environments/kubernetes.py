"""Reads what pods of an Indexed Job, a JobSet or a TrainJob know of each other.

Kubernetes gives each pod of an Indexed Job its index (JOB_COMPLETION_INDEX) and the hostname
JOB-INDEX, and a headless Service makes `JOB-INDEX.SUBDOMAIN` its address. See
https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/. A JobSet names its pods
SET-JOB-NUMBER-INDEX, with the name of the set as the subdomain (https://jobset.sigs.k8s.io), and
Trainer v2's TrainJob is a JobSet with the job `node`. Kubernetes tells neither how many pods there
are nor their subdomain, so the manifest must: TFMULTI_WORKERS and TFMULTI_SUBDOMAIN. In their place
Trainer's torch runtime sets PET_NNODES, and PET_MASTER_ADDR to the first pod's address. See
https://github.com/kubeflow/trainer/blob/master/pkg/runtime/framework/plugins/torch/torch.go.
"""

from __future__ import annotations

from tfmulti.cluster.cluster import Cluster, Task
from tfmulti.cluster.layout import Env, address_of, number_of
from tfmulti.errors import ClusterError

NAME = "kubernetes"
INDEX, WORKERS, SUBDOMAIN = "JOB_COMPLETION_INDEX", "TFMULTI_WORKERS", "TFMULTI_SUBDOMAIN"
VARIABLES = (INDEX, "HOSTNAME", WORKERS, "PET_NNODES", SUBDOMAIN, "PET_MASTER_ADDR")
# The port that Kubeflow's TFJob uses, too.
PORT = 2222


def is_here(env: Env) -> bool:
    """Returns whether this process runs in a pod of an Indexed Job with several pods."""
    return INDEX in env and (env.get(WORKERS) or env.get("PET_NNODES", "")) not in ("", "1")


def read(env: Env) -> Cluster:
    """Returns the cluster of all pods of the job.

    Raises:
        ClusterError: a variable is missing or wrong, or they contradict each other.
    """
    size = number_of(env, WORKERS if env.get(WORKERS) else "PET_NNODES", NAME, 1)
    rank = number_of(env, INDEX, NAME)
    if rank >= size:
        raise ClusterError(
            f"kubernetes: {INDEX} is {rank}, but the job has {size} pods ({WORKERS}). Set "
            f"{WORKERS} to the job's completions."
        )
    name, ending = env.get("HOSTNAME", ""), f"-{rank}"
    if not name.endswith(ending):
        raise ClusterError(
            f"kubernetes: the hostname of pod {rank} is {name!r}, but it must end in {ending!r}, "
            "as in a Job with completionMode: Indexed and a subdomain."
        )
    subdomain = env.get(SUBDOMAIN) or env.get("PET_MASTER_ADDR", "").partition(".")[2]
    if not subdomain:
        raise ClusterError(
            f"kubernetes: {SUBDOMAIN} is not set, but without it the other pods have no names. Set "
            "it to the pods' subdomain, which is the name of their headless Service."
        )
    prefix = name.removesuffix(ending)
    addresses = tuple(address_of(f"{prefix}-{pod}.{subdomain}", PORT) for pod in range(size))
    return Cluster(addresses, Task("worker", rank))
