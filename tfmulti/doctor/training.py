"""Sums over all devices, and trains for some seconds on one device and on all of them.

Every worker runs this code. What it finds goes to the chief at the end, by a collective.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import keras
import numpy as np
import psutil
import tensorflow as tf

from tfmulti.bench.all_reduces import all_reduce_times
from tfmulti.bench.cost import NetworkModel, fit_network
from tfmulti.bench.measure import agreed, compiled, in_turns, trained, without_peers
from tfmulti.bench.parts import Phase, TimeParts
from tfmulti.bench.words import Situation, limits
from tfmulti.cluster.cluster import Cluster
from tfmulti.cluster.gpus import visible_gpus
from tfmulti.cluster.selection import BatchSizes
from tfmulti.config import json_values
from tfmulti.config.fit_config import FitConfig
from tfmulti.config.registry import MODELS
from tfmulti.distribution.agreement import gather_bytes
from tfmulti.distribution.strategies import Placement
from tfmulti.doctor.finding import FAILED, OK, WARNING, Finding, findings_of
from tfmulti.doctor.gpus import Utilization
from tfmulti.run import validation
from tfmulti.run.setup import Setup, set_up

DIGITS_EPOCHS, DIGITS_BATCH = 3, 64
# Float32 sums over other parts of a batch round differently; the losses of a few epochs differ by
# far less than this.
_ROUNDING = 1e-3
_MEASURED_S, _BATCH = 2.0, 64
_SUM_SIZES = (4_096, 524_288, 8_388_608)  # bytes
# A worker whose step takes so much longer than the median worker's is a straggler. Shorter
# differences are noise.
_STRAGGLER, _STRAGGLER_MS = 1.5, 2.0
_UNEVEN, _IDLE_PERCENT = 1.25, 10.0
# How much longer an all-reduce may take than its bytes take on the slowest link.
_OVERHEAD, _OVERHEAD_MS = 5.0, 50.0


def check_training(
    config: FitConfig,
    cluster: Cluster | None,
    env: Mapping[str, str],
    links: list[dict[str, float]],
) -> list[Finding]:
    """Returns the findings about training on the devices that a configuration asks for.

    Every worker calls this function. The chief's result has the findings of all workers.

    Args:
        config: the configuration, which names the strategy, the model and the data.
        cluster: the cluster of this process, or None.
        env: the environment variables.
        links: the measured links between the workers.

    Raises:
        UserError: the model, the data or the devices cannot be used.
    """
    digits = replace(
        config,
        dataset="digits",
        model="mlp",
        epochs=DIGITS_EPOCHS,
        global_batch_size=DIGITS_BATCH,
        per_replica_batch_size=None,
        steps_per_execution=None,
    )
    setup = set_up(validation.check(digits, cluster, env))
    times = all_reduce_times(setup.strategy, _SUM_SIZES) if setup.place.replicas > 1 else ()
    network = fit_network([(setup.place.replicas, *each) for each in times])
    findings = [
        Finding("strategy", OK, f"{setup.selection.strategy}: {setup.selection.why}"),
        *_seen_gpus(env),
        *_sums(setup, links, times),
        *_learns(setup),
        *_speed(set_up(validation.check(_measured(config, setup), cluster, env)), network),
    ]
    return _of_all(setup, findings)


def _measured(config: FitConfig, setup: Setup) -> FitConfig:
    """Returns the run whose speed is measured: the given model, with synthetic data of its form."""
    batch = config.global_batch_size or _BATCH * setup.place.replicas
    dataset = config.dataset
    if dataset == "synthetic" and str(config.model) in MODELS:
        dataset = f"synthetic:{MODELS[str(config.model)].example_data},examples={4 * batch}"
    return replace(
        config,
        dataset=dataset,
        global_batch_size=batch,
        per_replica_batch_size=None,
        steps_per_execution=config.steps_per_execution or 1,
    )


def _of_all(setup: Setup, findings: list[Finding]) -> list[Finding]:
    """Returns the findings of all workers, without those that say the same about several."""
    place = setup.place
    data = json.dumps([asdict(each) for each in findings]).encode()
    found: list[Finding] = []
    for rank, sent in enumerate(gather_bytes(setup.strategy, data)):
        if rank == place.rank:
            found += findings
        else:
            # What is measured over all workers is told by the chief.
            others = findings_of(json_values.parse(sent or b"[]"), rank)
            found += [each for each in others if each.status != OK and each.check != "throughput"]
    return found


def _seen_gpus(env: Mapping[str, str]) -> list[Finding]:
    """Returns whether TensorFlow sees the GPUs of this process."""
    expected, seen = len(visible_gpus(env)), len(tf.config.list_physical_devices("GPU"))
    if not expected and not seen:
        return []
    about = tf.sysconfig.get_build_info()
    build = f"CUDA {about.get('cuda_version', 'none')}, cuDNN {about.get('cudnn_version', 'none')}"
    if seen < expected:
        return [
            Finding(
                "TensorFlow",
                FAILED,
                f"it sees {seen} of {expected} GPUs; it was built for {build}",
                "TensorFlow sees the GPUs that the driver shows",
                "Install its CUDA libraries: pip install 'tfmulti[gpu]', and look at the driver's "
                "version above.",
            )
        ]
    return [Finding("TensorFlow", OK, f"it sees {seen} GPUs; it was built for {build}")]


def _sums(
    setup: Setup, links: list[dict[str, float]], times: Sequence[tuple[int, float]]
) -> list[Finding]:
    """Returns whether an all-reduce over all devices is right, and as fast as the links allow."""
    place, strategy = setup.place, setup.strategy
    if place.replicas == 1:
        return [Finding("all-reduce", OK, "not needed with one device")]

    def total() -> Any:
        def on_replica() -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            own = tf.cast(context.replica_id_in_sync_group, tf.float32) + 1.0
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.fill([1000], own))

        return strategy.experimental_local_results(strategy.run(on_replica))

    expected = place.replicas * (place.replicas + 1) / 2
    for index, values in enumerate(tf.function(total, autograph=False)()):
        if not np.array_equal(values.numpy(), np.full(1000, expected, np.float32)):
            return [
                Finding(
                    "all-reduce",
                    FAILED,
                    f"device {index} has the sum {values.numpy().min():g}",
                    f"the sum over {place.replicas} devices is {expected:g}",
                    "Look at this device; on GPUs try NCCL_P2P_DISABLE=1.",
                )
            ]
    size, seconds = times[-1]
    words = f"{size / 1e6:.3g} MB over {place.replicas} devices in {1000 * seconds:.3g} ms"
    slowest = min((each["mb_s"] for each in links), default=math.inf)
    if place.workers == 1 or not links:
        return [Finding("all-reduce", OK, words)]
    # Each worker sends its part to all others at least once.
    expected_ms = size / 1e3 / slowest * 2 * (place.workers - 1) / place.workers
    limit_ms = _OVERHEAD * expected_ms + _OVERHEAD_MS
    return [
        Finding(
            "all-reduce",
            OK if 1000 * seconds <= limit_ms else WARNING,
            f"{words}; the slowest link needs {expected_ms:.3g} ms for its bytes",
            f"at most {limit_ms:.3g} ms",
            "Look for other programs on the machines and on the network.",
        )
    ]


def _learns(setup: Setup) -> list[Finding]:
    """Returns whether the loss on the digits falls, and equals that of one device."""
    losses = _losses(setup)
    alone = replace(
        setup,
        strategy=tf.distribute.OneDeviceStrategy("GPU:0" if setup.place.gpus else "CPU:0"),
        place=Placement(0, 1, 1, setup.place.gpus[:1]),
        batch=BatchSizes(DIGITS_BATCH, DIGITS_BATCH, True),
    )
    shown = " → ".join(f"{loss:.3f}" for loss in losses)
    falls = losses[-1] < 0.7 * losses[0]
    findings = [
        Finding(
            "digits",
            OK if falls else FAILED,
            f"the loss of {len(losses)} epochs: {shown}",
            "the loss falls to less than 0.7 of the first epoch's",
            "Run: python -m tfmulti.fit --dataset digits --verify",
        )
    ]
    if setup.place.replicas == 1:
        return findings
    expected = _losses(alone)
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    return [
        *findings,
        Finding(
            "numbers",
            OK if apart <= _ROUNDING else FAILED,
            f"the losses of one device and of {setup.place.replicas} differ by {apart:.1e}",
            f"at most {_ROUNDING:g}, which is rounding",
            "Run: python -m tfmulti.fit --dataset digits --verify, which names the variable.",
        ),
    ]


def _losses(setup: Setup) -> list[float]:
    """Returns the loss of each epoch of a new training on the digits."""
    keras.utils.set_random_seed(setup.config.seed)
    history = compiled(setup).fit(
        setup.data.train,
        batch_size=setup.batch.global_batch_size,
        epochs=setup.epochs,
        verbose=0,
    )
    losses: list[float] = history.history["loss"]
    return losses


def _speed(setup: Setup, network: NetworkModel | None) -> list[Finding]:
    """Returns how fast one device and all devices train, and what is uneven between them."""
    place, rows = setup.place, setup.batch.per_replica_batch_size
    model = compiled(setup)
    warm, _ = trained(setup, model, 3)
    if place.replicas == 1:
        executions = agreed(setup, model, warm, None, _MEASURED_S)
        with Utilization() as used:
            phase, _ = trained(setup, model, executions)
        speed = phase.examples / phase.seconds
        words = f"{setup.config.model}: {speed:,.0f} examples/s on one device"
        return [Finding("throughput", OK, words), *_idle(used.mean)]
    one = without_peers(setup, rows)
    executions = agreed(setup, model, warm, None, _MEASURED_S)
    with Utilization() as used:
        together, _, alone = in_turns(setup, model, one, executions)
    assert alone is not None
    findings = [_throughput(setup, model, network, together, alone), *_idle(used.mean)]
    return findings + _stragglers(setup, alone) + _memory(setup)


def _throughput(
    setup: Setup,
    model: keras.Model,
    network: NetworkModel | None,
    together: Phase,
    alone: Phase,
) -> Finding:
    """Returns the examples a second of one and of all devices, with advice if more are slower."""
    place = setup.place
    one, every = alone.examples / alone.seconds, together.examples / together.seconds
    words = (
        f"{setup.config.model}: {one:,.0f} examples/s on one device, {every:,.0f} on "
        f"{place.replicas} ({every / one / place.replicas:.0%} of {place.replicas} ×)"
    ).replace("%", " %")
    parts = TimeParts.of(together, alone)
    at = Situation(
        name=f"{place.replicas} devices",
        kind="workers" if place.workers > 1 else "replicas",
        devices=place.replicas,
        parts=parts,
        run=setup.config,
        weak=True,
        gradient_bytes=sum(4 * math.prod(v.shape) for v in model.trainable_variables),
        link=network,
        cores=psutil.cpu_count() or 1,
        gpus=bool(place.gpus),
    )
    if every >= one:
        return Finding("throughput", OK, words)
    return Finding(
        "throughput", WARNING, words, "more devices are faster", "; ".join(limits(at)) + "."
    )


def _idle(used: Mapping[int, float]) -> list[Finding]:
    """Returns the GPUs that did nothing while the model trained."""
    seen = set(map(str, visible_gpus({})))
    return [
        Finding(
            f"GPU {index}",
            WARNING,
            f"it was busy for {percent:.0f} % of the time",
            f"more than {_IDLE_PERCENT:g} % while a model trains",
            "Give --replicas so many as there are GPUs, and a larger --global_batch_size.",
        )
        for index, percent in used.items()
        if str(index) in seen and percent < _IDLE_PERCENT
    ]


def _stragglers(setup: Setup, alone: Phase) -> list[Finding]:
    """Returns the workers that compute much slower than the others, on the chief."""
    if setup.place.workers == 1:
        return []
    own = np.float64(alone.working_ms).tobytes()
    times = [
        float(np.frombuffer(each or b"", np.float64)[0])
        for each in gather_bytes(setup.strategy, own)
    ]
    if setup.place.rank:
        return []
    # With two workers the median would be between them.
    usual = statistics.median_low(times)
    found = [
        Finding(
            "straggler",
            WARNING,
            f"{setup.place.addresses[rank]} computes a step in {time:.3g} ms, the "
            f"median worker in {usual:.3g} ms",
            f"less than {_STRAGGLER:g} × the median: every step waits for the slowest worker",
            "Look for other programs, heat and fewer cores there, or leave the machine out.",
            rank,
        )
        for rank, time in enumerate(times)
        if time > max(_STRAGGLER * usual, usual + _STRAGGLER_MS)
    ]
    words = ", ".join(f"{time:.3g}" for time in times)
    return found or [Finding("computing", OK, f"a step takes the workers {words} ms")]


def _memory(setup: Setup) -> list[Finding]:
    """Returns whether all devices use about as much memory."""
    place = setup.place
    if place.gpus:
        used = [
            tf.config.experimental.get_memory_info(f"GPU:{i}")["peak"]
            for i in range(place.local_replicas)
        ]
        what = "devices"
    elif place.workers > 1:
        used, what = [psutil.Process().memory_info().rss], "processes"
    else:
        return [Finding("device memory", OK, "logical CPU devices share that of the process")]
    every = [
        int(each)
        for sent in gather_bytes(setup.strategy, np.array(used, np.int64).tobytes())
        for each in np.frombuffer(sent or b"", np.int64)
    ]
    is_even = max(every) <= _UNEVEN * min(every)
    shown = ", ".join(f"{each / 2**20:,.0f}" for each in every)
    return [
        Finding(
            "device memory",
            OK if is_even else WARNING,
            f"the {what} use {shown} MiB",
            f"at most {_UNEVEN:g} × the least: all replicas hold the same",
            "Look for other models and data on the device that uses the most.",
        )
    ]
