"""Reads the variables that `srun` gives each task of a step (https://slurm.schedmd.com/srun.html).

TensorFlow's own resolver takes SLURM_JOB_NODELIST and writes CUDA_VISIBLE_DEVICES (tensorflow
issues 36094, 56894, 59573). A step may use a part of the job's nodes, so the step's variables count
here.
SLURM_STEP_GPUS holds numbers of the whole node, which need not be those that the task sees. So a
task takes its part of the GPUs that it sees, by its local rank.
"""

from __future__ import annotations

from tfmulti.cluster.cluster import Cluster
from tfmulti.cluster.host_lists import HostListError, expand_counts, expand_hosts
from tfmulti.cluster.layout import Env, Layout, number_of
from tfmulti.errors import ClusterError

NAME = "slurm"
VARIABLES = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"),
)
# `salloc` names a job `interactive`.
_SHELLS = ("interactive", "bash", "sh", "zsh", "fish", "dash", "ksh", "csh", "tcsh")


def is_here(env: Env) -> bool:
    """Returns whether this process has the variables of a step with several tasks.

    A batch script has a rank but no step.
    """
    return "SLURM_PROCID" in env and env.get("SLURM_STEP_NUM_TASKS", "") not in ("", "1")


def is_shell(env: Env) -> bool:
    """Returns whether the step is an interactive shell, or was started from one.

    In such a shell the user starts programs by hand, and each is alone. `srun --pty bash` names the
    step after the shell and opens a terminal; `srun -n 2 bash -c …` has the name without the
    terminal. An `srun` inside the shell passes the name and the terminal's variable on to its own
    tasks, so these look alike. `--environment slurm` says that they are one job.
    """
    return env.get("SLURM_JOB_NAME") in _SHELLS and "SLURM_PTY_PORT" in env


def read(env: Env) -> Layout | Cluster:
    """Returns the layout of a step.

    Raises:
        ClusterError: a variable is missing or wrong, or the variables contradict each other.
    """
    size = number_of(env, "SLURM_STEP_NUM_TASKS", NAME, 1)
    rank = number_of(env, "SLURM_PROCID", NAME)
    node = number_of(env, "SLURM_NODEID", NAME)
    local_rank = number_of(env, "SLURM_LOCALID", NAME)
    nodes, counts = _nodes_of(env, size)
    if node >= len(nodes):
        raise ClusterError(
            f"slurm: SLURM_NODEID is {node}, but SLURM_STEP_NODELIST has {len(nodes)} nodes "
            f"({', '.join(nodes)}). Start the processes by one srun."
        )
    nodes_by_rank = _nodes_by_rank(env, nodes, counts)
    if nodes_by_rank and rank < size and nodes_by_rank[rank] != node:
        # The tasks are distributed in another way than Slurm's variables say. The
        # processes still agree on who is where.
        nodes_by_rank = ()
    return Layout(
        NAME,
        rank,
        size,
        local_rank,
        counts[node],
        host=nodes[node],
        chief_hosts=_chief_hosts(env, nodes),
        job=f"slurm {env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}",
        hosts=tuple(nodes[number] for number in nodes_by_rank),
    )


def _nodes_of(env: Env, size: int) -> tuple[list[str], list[int]]:
    """Returns the nodes of the step, and the number of tasks of each."""
    try:
        nodes = expand_hosts(env.get("SLURM_STEP_NODELIST", ""))
        counts = expand_counts(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    except HostListError as error:
        raise ClusterError(f"slurm: {error} Start the processes by srun.") from None
    if len(counts) != len(nodes) or sum(counts) != size:
        raise ClusterError(
            f"slurm: SLURM_STEP_TASKS_PER_NODE has {sum(counts)} tasks on {len(counts)} nodes, but "
            f"the step has {size} tasks (SLURM_STEP_NUM_TASKS) on {len(nodes)} nodes "
            "(SLURM_STEP_NODELIST). Start all processes by one srun."
        )
    return nodes, counts


def _nodes_by_rank(env: Env, nodes: list[str], counts: list[int]) -> tuple[int, ...]:
    """Returns the number of the node of each rank; empty for a distribution that is not known.

    See `--distribution` in srun's manual: `block` fills one node after the other, `cyclic` gives
    each node one task in turn.
    """
    kind = env.get("SLURM_DISTRIBUTION", "block").partition(":")[0].partition(",")[0]
    if kind == "block":
        return tuple(node for node, count in enumerate(counts) for _ in range(count))
    if kind == "cyclic":
        turns = range(max(counts, default=0))
        return tuple(node for turn in turns for node, count in enumerate(counts) if turn < count)
    return ()


def _chief_hosts(env: Env, nodes: list[str]) -> tuple[str, ...]:
    """Returns the nodes on which rank 0 may be: the first one, except in an arbitrary order."""
    arbitrary = env.get("SLURM_DISTRIBUTION", "").startswith("arbitrary")
    return tuple(nodes) if arbitrary else (nodes[0],)
