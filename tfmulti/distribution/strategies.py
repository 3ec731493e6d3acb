"""Makes the `tf.distribute` strategy of a run, and tells the rank of this process in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfmulti.cluster.cluster import Cluster
from tfmulti.cluster.environments import check_trains, find_cluster
from tfmulti.cluster.gpus import own_part
from tfmulti.cluster.proxies import go_past_proxies
from tfmulti.cluster.selection import Selection, select
from tfmulti.errors import ClusterError, DeviceError
from tfmulti.launch.joining import watching_join
from tfmulti.launch.signals import default_signals
from tfmulti.launch.stacks import show_at_sigusr1

# TensorFlow's environment variables for the threads of one operation, and for operations at a time.
INTRA_OP, INTER_OP = "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"


def make_strategy(
    name: str = "auto",
    *,
    replicas: int | None = None,
    cluster: Cluster | None = None,
    ignore_cluster: bool = False,
    environment: str = "auto",
    env: Mapping[str, str] | None = None,
) -> tf.distribute.Strategy:
    """Returns a strategy over the devices of this machine or the workers of the cluster.

    Call it before any other TensorFlow operation, since devices cannot change after that
    (https://www.tensorflow.org/api_docs/python/tf/config/set_logical_device_configuration). In a
    cluster every worker calls it, and it waits for the others.

    Without GPUs, workers whose addresses have the same host share its cores. Each worker computes
    with its part of them, unless the process may run on some of the cores only. Numbers of threads
    that are set by `tf.config.threading`, TF_NUM_INTRAOP_THREADS or TF_NUM_INTEROP_THREADS stay as
    they are.

    Args:
        name: `auto`, `one_device`, `mirrored` or `multi_worker_mirrored`.
        replicas: the number of local devices. Without GPUs, that many logical CPU devices are made.
        cluster: the workers; None reads them from the environment: TF_CONFIG, or the variables of
            a scheduler (`tfmulti env` shows which).
        ignore_cluster: whether to train on this machine alone although there is a cluster.
        environment: the launcher or scheduler that describes the cluster, such as `slurm`. `auto`
            takes the one that it recognises, and `none` ignores all.
        env: the environment to read; None means `os.environ`.

    Raises:
        ClusterError: the description of the cluster is wrong, the workers do not find each other,
            or this worker cannot listen at its address.
        ConfigError: the strategy does not fit the cluster.
        DeviceError: the machine lacks the devices, TensorFlow has started already, or this process
            has made another strategy of several devices.
    """
    if cluster is None:
        cluster, _ = find_cluster(os.environ if env is None else env, environment)
    check_trains(cluster)
    gpus = own_gpus(cluster)
    selection = select(
        name, replicas=replicas, cluster=cluster, gpus=gpus, ignore_cluster=ignore_cluster
    )
    return build_strategy(selection, cluster)


def own_gpus(cluster: Cluster | None) -> int:
    """Returns the number of this process' GPUs, and hides those of other processes.

    A scheduler may show each process of a machine the GPUs of all its processes. Then each process
    takes its part, by its local rank (`tfmulti.cluster.gpus.own_part`).

    Args:
        cluster: the cluster that this process belongs to, or None.

    Raises:
        DeviceError: the GPUs cannot be divided evenly among the processes.
    """
    all_gpus = tf.config.list_physical_devices("GPU")
    if cluster is not None and cluster.local_size > 1 and len(all_gpus) > 1:
        own = own_part(all_gpus, cluster.local_rank, cluster.local_size)
        tf.config.set_visible_devices(own, "GPU")
    return len(tf.config.get_visible_devices("GPU"))


def build_strategy(
    selection: Selection, cluster: Cluster | None, folder: str | None = None
) -> tf.distribute.Strategy:
    """Returns the strategy that was selected. Every worker calls it, and it waits for the others.

    Args:
        selection: what was selected.
        cluster: the cluster that this process belongs to, or None.
        folder: the folder of hang_worker_K.json, which is written if the others do not come.

    Raises:
        ClusterError: this worker cannot listen at its address.
        DeviceError: TensorFlow has started already with other devices, or this process has made
            another strategy of several devices.
    """
    show_at_sigusr1()
    _use_gpus_without_taking_all_memory()
    if selection.strategy == "multi_worker_mirrored":
        assert cluster is not None
        return _once(
            (cluster, selection.local_replicas),
            f"a strategy over {cluster.size} workers",
            lambda: _multi_worker(cluster, selection.local_replicas, folder),
        )
    devices = _local_devices(selection.device_type, selection.local_replicas)
    if selection.strategy == "one_device":
        _alone.add("one_device")
        return tf.distribute.OneDeviceStrategy(devices[0])
    return _once(
        tuple(devices),
        f"a mirrored strategy over {len(devices)} devices",
        lambda: tf.distribute.MirroredStrategy(devices),
    )


@dataclass(frozen=True)
class Placement:
    """The rank of this process among the workers, and its replicas.

    Attributes:
        rank: the worker's rank; 0 is the chief.
        workers: the number of workers.
        local_replicas: the number of replicas on this worker.
        gpus: the devices of the local replicas if these are GPUs; else empty.
        addresses: the workers' `host:port` in the order of their ranks; empty without a cluster.
    """

    rank: int
    workers: int
    local_replicas: int
    gpus: tuple[str, ...] = field(default=(), repr=False)
    addresses: tuple[str, ...] = field(default=(), repr=False)

    @property
    def is_chief(self) -> bool:
        """Whether this worker is the chief."""
        return self.rank == 0

    @property
    def replicas(self) -> int:
        """The number of replicas of all workers."""
        return self.workers * self.local_replicas

    @property
    def first_replica(self) -> int:
        """The index of this worker's first replica among those of all workers."""
        return self.rank * self.local_replicas


def _gpus_of(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """Returns the devices of a strategy's local replicas if these are GPUs; else none."""
    try:
        devices = tuple(strategy.extended.worker_devices)
    except RuntimeError:
        # TensorFlow's default strategy has no devices: TensorFlow places each operation itself.
        return ()
    return devices if all("GPU" in device.upper() for device in devices) else ()


def placement_of(strategy: tf.distribute.Strategy) -> Placement:
    """Returns the placement of this process in any strategy, also of the user's own."""
    total = strategy.num_replicas_in_sync
    gpus = _gpus_of(strategy)
    resolver = strategy.cluster_resolver
    if resolver is None or not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return Placement(0, 1, total, gpus)
    jobs = resolver.cluster_spec().as_dict()
    chiefs = jobs.get("chief", [])
    addresses = (*chiefs, *jobs.get("worker", ()))
    if not addresses:
        return Placement(0, 1, total, gpus)
    rank = resolver.task_id + (len(chiefs) if resolver.task_type == "worker" else 0)
    return Placement(rank, len(addresses), total // len(addresses), gpus, addresses)


def run_on_replicas(strategy: tf.distribute.Strategy, compute: Callable[[], Any]) -> Any:
    """Returns what `strategy.run` returns, for a function that runs a model's code.

    MirroredStrategy traces each replica in a thread. There a nested `tf.function`, such as one that
    XLA compiles, cannot call `merge_call`, which optimizers need. A single replica waits for no
    other one, so it runs in this thread, where that is possible.
    """
    mirrored = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)
    if strategy.num_replicas_in_sync > 1 or not isinstance(strategy, mirrored):
        return strategy.run(compute)
    device = tf.device(strategy.extended.worker_devices[0])
    with strategy.scope(), _OnlyReplica(strategy, 0), device:
        return compute()


class _OnlyReplica(tf.distribute.ReplicaContext):  # type: ignore[misc]
    """The context of a replica without others, in which a sum or a gather needs no collective.

    XLA does not compile TensorFlow's collectives.
    """

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        return value

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        return value


def device_names(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """Returns this process' devices in short form, such as `GPU:0`."""
    return tuple(
        f"{spec.device_type}:{spec.device_index}"
        for spec in map(tf.DeviceSpec.from_string, strategy.extended.worker_devices)
    )


def _use_gpus_without_taking_all_memory() -> None:
    """Lets TensorFlow allocate memory of the GPUs only when it needs it."""
    for gpu in tf.config.list_physical_devices("GPU"):
        try:
            tf.config.experimental.set_memory_growth(gpu, True)
        except RuntimeError:
            # TensorFlow has started, so the user's setting stays.
            return


def _local_devices(device_type: str, count: int) -> list[str]:
    """Returns the names of `count` devices of this machine, and makes logical CPUs if needed."""
    if device_type == "CPU" and count > 1:
        _split_cpu(count)
    return [f"{device_type}:{index}" for index in range(count)]


def _split_cpu(count: int) -> None:
    """Makes `count` logical CPU devices, unless TensorFlow has started with enough."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * count
        )
    except RuntimeError:
        have = len(tf.config.list_logical_devices("CPU"))
        if have < count:
            raise DeviceError(
                f"{count} logical CPU devices are needed, but TensorFlow has started with {have}. "
                "Call make_strategy before any other TensorFlow operation. In a notebook, restart "
                "the kernel first (menu Kernel, Restart Kernel)."
            ) from None


# For each strategy object, TensorFlow numbers the collectives of the process from the same start.
# So two strategies clash ("Shape mismatch in the collective instance"), and a second one of another
# size fails, too. A process makes one strategy, and later calls return it again.
_made: dict[Hashable, tf.distribute.Strategy] = {}

# Has an entry once a strategy of one device was made. Such a process waits for no other worker.
_alone: set[str] = set()


def made() -> tf.distribute.Strategy | None:
    """Returns the strategy of several devices or workers that this process made, or None."""
    return next(iter(_made.values()), None)


def is_alone() -> bool:
    """Returns whether this process made a strategy of one device."""
    return bool(_alone)


def _once(key: Hashable, description: str, make: Callable[[], tf.distribute.Strategy]) -> Any:
    """Returns the one strategy of this process, and makes it at the first call."""
    if key not in _made:
        if _made:
            raise DeviceError(
                f"{description} was asked for, but this process made another strategy before, and "
                "TensorFlow supports one of several devices a process. Start a new process (in a "
                "notebook: restart the kernel)."
            )
        _made[key] = make()
    return _made[key]


def threads_of(cluster: Cluster, allowed: int, cores: int) -> int | None:
    """Returns how many threads this worker shall compute with; None means TensorFlow's own number.

    Workers on the same machine share its cores equally, unless each was given its own cores.

    Args:
        cluster: the cluster, with this worker's task.
        allowed: the number of cores that this process may run on.
        cores: the number of cores of the machine.
    """
    sharing = cluster.hosts.count(cluster.hosts[cluster.rank])
    return max(1, cores // sharing) if sharing > 1 and allowed == cores else None


def _share_cores(cluster: Cluster) -> None:
    """Gives TensorFlow this worker's part of the cores, unless the user has set threads."""
    threads = threads_of(cluster, len(os.sched_getaffinity(0)), os.cpu_count() or 1)
    threading = tf.config.threading
    if threads is None:
        return
    if not (threading.get_intra_op_parallelism_threads() or os.environ.get(INTRA_OP)):
        threading.set_intra_op_parallelism_threads(threads)
    if not (threading.get_inter_op_parallelism_threads() or os.environ.get(INTER_OP)):
        threading.set_inter_op_parallelism_threads(threads)


def _multi_worker(
    cluster: Cluster, local_replicas: int, folder: str | None
) -> tf.distribute.Strategy:
    """Returns a MultiWorkerMirroredStrategy on the first `local_replicas` GPUs, or on CPUs."""
    jobs: dict[str, list[str]] = {"worker": list(cluster.workers)}
    if cluster.chief:
        jobs["chief"] = [cluster.chief]
    gpus = tf.config.get_visible_devices("GPU")
    if len(gpus) > local_replicas:
        tf.config.set_visible_devices(gpus[:local_replicas], "GPU")
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({name: hosts for name, hosts in jobs.items() if hosts}),
        task_type=cluster.task.type,
        task_id=cluster.task.index,
        num_accelerators={"GPU": local_replicas} if gpus else {},
        rpc_layer="grpc",
    )
    go_past_proxies(cluster.hosts, os.environ)
    try:
        if not gpus:
            _share_cores(cluster)
        # TensorFlow installs a handler of SIGTERM that does nothing. Without `default_signals` a
        # signal between here and the training would be lost.
        with watching_join(cluster.rank, cluster.addresses, folder), default_signals():
            return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
    except tf.errors.UnknownError as error:
        raise ClusterError(
            f"this worker cannot listen at {cluster.addresses[cluster.rank]}: {error.message}. Is "
            "the port in use, or the address another machine's? End the program that uses it, or "
            "correct the address in what describes the cluster (tfmulti env)."
        ) from None
    except RuntimeError as error:
        raise DeviceError(
            f"multi_worker_mirrored cannot start: {error} Call make_strategy before any other "
            "TensorFlow operation (in a notebook: restart the kernel first)."
        ) from error
