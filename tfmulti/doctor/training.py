"""Sums over all devices, and trains for some seconds on one device and on all of them.

Every worker runs this code. At the end a collective sends the findings of all workers to the chief.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from ipaddress import ip_address
from typing import Any

import keras
import numpy as np
import psutil
import tensorflow as tf

from tfmulti.bench.all_reduces import all_reduce_times
from tfmulti.bench.cost import NetworkModel, fit_network
from tfmulti.bench.limits import Situation, limits
from tfmulti.bench.measure import agreed, compiled, in_turns, trained, without_peers
from tfmulti.bench.parts import Phase, TimeParts
from tfmulti.cluster.cluster import Cluster
from tfmulti.cluster.gpus import visible_gpus
from tfmulti.cluster.selection import BatchSizes
from tfmulti.config import json_values
from tfmulti.config.fit_config import FitConfig
from tfmulti.config.registry import MODELS
from tfmulti.distribution.agreement import gather_bytes
from tfmulti.distribution.strategies import Placement
from tfmulti.doctor.cuda import cuda_findings, installed_wheels, needs_of_tensorflow
from tfmulti.doctor.finding import FAILED, OK, WARNING, Finding, findings_of
from tfmulti.doctor.gpus import Utilization, chosen_models, driver, slowed_finding
from tfmulti.doctor.trust import open_ports_finding, own_open_ports
from tfmulti.errors import VerificationError
from tfmulti.run import validation
from tfmulti.run.setup import Setup, set_up
from tfmulti.training.verification.verification import verify

DIGITS_EPOCHS, DIGITS_BATCH = 3, 64
# Float32 sums over other parts of a batch round differently; the losses of a few epochs differ by
# far less than this.
_ROUNDING = 1e-3
_MEASURED_S, _BATCH = 2.0, 64
# Fewer steps may be too few for a loss to fall.
_LEARNING_STEPS = 50
_SUM_SIZES = (4_096, 524_288, 8_388_608)  # bytes
# A worker whose step takes so much longer than the median worker's is a straggler. Shorter
# differences are noise.
_STRAGGLER, _STRAGGLER_MS = 1.5, 2.0
_UNEVEN, _IDLE_PERCENT = 1.25, 10.0
# The work by which devices are compared.
_PRODUCT_SIZE, _PRODUCTS = 2048, 20
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
    times = all_reduce_times(setup.strategy, _SUM_SIZES) if setup.placement.replicas > 1 else ()
    network = fit_network([(setup.placement.replicas, size, s) for size, s in times])
    findings = [
        Finding("strategy", OK, f"{setup.selection.strategy}: {setup.selection.why}"),
        *_open_ports(setup),
        *_seen_gpus(env),
        *convolutions(setup.placement.gpus),
        *_sums(setup, links, times),
        *_learns(setup),
        *_speed(set_up(validation.check(_measured(config, setup), cluster, env)), network),
    ]
    return _findings_of_all(setup, findings)


def _measured(config: FitConfig, setup: Setup) -> FitConfig:
    """Returns the run whose speed is measured: the given model, with synthetic data of its form."""
    batch = config.global_batch_size or _BATCH * setup.placement.replicas
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


def _findings_of_all(setup: Setup, own_findings: list[Finding]) -> list[Finding]:
    """Returns the findings of this worker, and the problems that the other workers have found."""
    data = json.dumps([asdict(finding) for finding in own_findings]).encode()
    findings: list[Finding] = []
    for rank, sent in enumerate(gather_bytes(setup.strategy, data)):
        if rank == setup.placement.rank:
            findings += own_findings
            continue
        findings += [
            finding
            for finding in findings_of(json_values.parse(sent or b"[]"), rank)
            # Every worker measures these for the whole job, and the chief reports them.
            if finding.status != OK and finding.check not in ("loss", "throughput")
        ]
    return findings


def _open_ports(setup: Setup) -> list[Finding]:
    """Returns on the chief at which addresses the workers listen, and nothing on the others."""
    if setup.placement.workers == 1:
        return []
    sent_by_rank = gather_bytes(setup.strategy, json.dumps(own_open_ports()).encode())
    if setup.placement.rank:
        return []
    open_ports = [
        # The report shows what another machine has sent, so it must be an address.
        [(str(ip_address(ip)), int(port)) for ip, port in json_values.parse(sent or b"[]")]
        for sent in sent_by_rank
    ]
    grpc_ports = [int(address.rpartition(":")[2]) for address in setup.placement.addresses]
    return [open_ports_finding(open_ports, grpc_ports)]


def _seen_gpus(env: Mapping[str, str]) -> list[Finding]:
    """Returns whether TensorFlow sees the GPUs of this process, and whether CUDA fits."""
    devices = tf.config.list_physical_devices("GPU")
    details = map(tf.config.experimental.get_device_details, devices)
    seen = [str(each.get("device_name", "")) for each in details]
    # Without NVIDIA's library only the number of the device files is known.
    expected = chosen_models(env) or ["" for _ in visible_gpus(env)]
    if not expected and not seen:
        return []
    build, installed_driver = tf.sysconfig.get_build_info(), driver()
    newest_cuda = installed_driver[1] if installed_driver else None
    return [
        seen_gpus_finding(expected, seen, build),
        *cuda_findings(build, newest_cuda, needs_of_tensorflow(), installed_wheels()),
    ]


def seen_gpus_finding(
    expected: Sequence[str], seen: Sequence[str], build: Mapping[str, object]
) -> Finding:
    """Returns whether TensorFlow sees the GPUs that the driver shows.

    Args:
        expected: the models of the GPUs that the driver shows to this process.
        seen: the models of the GPUs that TensorFlow sees.
        build: what `tf.sysconfig.get_build_info` returns.
    """
    about = f"CUDA {build.get('cuda_version', 'none')}, cuDNN {build.get('cudnn_version', 'none')}"
    rule = "TensorFlow sees the GPUs that the driver shows"
    if len(seen) < len(expected):
        return Finding(
            "TensorFlow",
            FAILED,
            f"it sees {len(seen)} of {len(expected)} GPUs; it was built for {about}",
            rule,
            "Install its CUDA libraries: pip install 'tfmulti[gpu]', and look at the driver's "
            "version above.",
        )
    # The name of a MIG device begins with that of its GPU.
    if all(expected) and not all(name.startswith(tuple(expected)) for name in seen):
        return Finding(
            "TensorFlow",
            WARNING,
            f"it sees {', '.join(seen)}; the driver shows {', '.join(expected)}",
            rule,
            "Set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name the GPUs by UUID in CUDA_VISIBLE_DEVICES.",
        )
    gpus = f"{len(seen)} GPU{'s' if len(seen) > 1 else ''}"
    return Finding("TensorFlow", OK, f"it sees {gpus}; it was built for {about}")


def convolutions(devices: Sequence[str]) -> list[Finding]:
    """Returns whether cuDNN computes a convolution and its gradient on each GPU, by XLA and not.

    Args:
        devices: the GPUs.
    """

    def gradient(images: tf.Tensor, kernel: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(kernel)
            loss = tf.reduce_sum(tf.nn.relu(tf.nn.conv2d(images, kernel, 1, "SAME")))
        return tape.gradient(loss, kernel)

    for device in devices:
        for by_xla in (False, True):
            compute = tf.function(gradient, jit_compile=by_xla, autograph=False)
            try:
                with tf.device(device):
                    compute(tf.ones((8, 32, 32, 16)), tf.ones((3, 3, 16, 32))).numpy()
            except tf.errors.OpError as error:
                lines = [line.strip() for line in error.message.splitlines() if line.strip()]
                cause = next((line for line in lines if "Autotuner" in line), lines[0])
                return [
                    Finding(
                        "cuDNN",
                        FAILED,
                        f"{device}{', by XLA' if by_xla else ''}: {cause[:200]}",
                        "a convolution and its gradient can be computed on each GPU",
                        "Run: pip install --upgrade 'tfmulti[gpu]'"
                        + ("; until then, train with --nojit_compile." if by_xla else "."),
                    )
                ]
    return [Finding("cuDNN", OK, "it computes a convolution on each GPU")] if devices else []


def _sums(
    setup: Setup, links: list[dict[str, float]], times: Sequence[tuple[int, float]]
) -> list[Finding]:
    """Returns whether an all-reduce over all devices is right, and as fast as the links allow."""
    placement, strategy = setup.placement, setup.strategy
    if placement.replicas == 1:
        return [Finding("all-reduce", OK, "not needed with one device")]

    def total() -> Any:
        def on_replica() -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            number = tf.cast(context.replica_id_in_sync_group, tf.float32) + 1.0
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.fill([1000], number))

        return strategy.experimental_local_results(strategy.run(on_replica))

    sums = [values.numpy() for values in tf.function(total, autograph=False)()]
    wrong = wrong_sum(sums, placement.replicas)
    return [wrong or all_reduce_finding(times[-1], placement.replicas, placement.workers, links)]


def wrong_sum(sums: Sequence[np.ndarray], replicas: int) -> Finding | None:
    """Returns the finding about a device that has a wrong sum, or None.

    Args:
        sums: for each local device the sum of 1, 2, …, `replicas` in each element.
        replicas: the number of all devices.
    """
    expected = replicas * (replicas + 1) / 2
    for index, values in enumerate(sums):
        wrong = values[values != np.float32(expected)]
        if wrong.size:
            return Finding(
                "all-reduce",
                FAILED,
                f"device {index} has the sum {wrong[0]:g}",
                f"the sum over {replicas} devices is {expected:g}",
                "Look at this device; on GPUs try NCCL_P2P_DISABLE=1.",
            )
    return None


def all_reduce_finding(
    measured: tuple[int, float],
    replicas: int,
    workers: int,
    links: Sequence[Mapping[str, float]],
) -> Finding:
    """Returns whether an all-reduce is as fast as the links allow.

    Args:
        measured: the bytes and the seconds of an all-reduce.
        replicas: the number of all devices.
        workers: the number of workers.
        links: the measured links between the workers.
    """
    size, seconds = measured
    speed = f"{size / 1e6:.3g} MB over {replicas} devices in {1000 * seconds:.3g} ms"
    slowest = min((link["mb_s"] for link in links), default=math.inf)
    if workers == 1 or not links:
        return Finding("all-reduce", OK, speed)
    # Each worker sends its part to all others at least once.
    expected_ms = size / 1e3 / slowest * 2 * (workers - 1) / workers
    limit_ms = _OVERHEAD * expected_ms + _OVERHEAD_MS
    return Finding(
        "all-reduce",
        OK if 1000 * seconds <= limit_ms else WARNING,
        f"{speed}; the slowest link needs {expected_ms:.3g} ms for its bytes",
        f"at most {limit_ms:.3g} ms",
        "Look for other programs on the machines and on the network.",
    )


def _learns(setup: Setup) -> list[Finding]:
    """Returns whether the loss on the digits falls, and equals that of one device."""
    losses = _losses(setup)
    alone = replace(
        setup,
        strategy=tf.distribute.OneDeviceStrategy("GPU:0" if setup.placement.gpus else "CPU:0"),
        placement=Placement(0, 1, 1, setup.placement.gpus[:1]),
        batch=BatchSizes(DIGITS_BATCH, DIGITS_BATCH, True),
    )
    if setup.placement.replicas == 1:
        return [digits_finding(losses)]
    return [
        digits_finding(losses),
        numbers_finding(losses, _losses(alone), setup.placement.replicas),
    ]


def digits_finding(losses: Sequence[float]) -> Finding:
    """Returns whether the loss on the digits falls.

    Args:
        losses: the loss of each epoch.
    """
    shown = " → ".join(f"{loss:.3f}" for loss in losses)
    return Finding(
        "digits",
        OK if losses[-1] < 0.7 * losses[0] else FAILED,
        f"the loss of {len(losses)} epochs: {shown}",
        "the loss falls to less than 0.7 of the first epoch's",
        "Run: python -m tfmulti.fit --dataset digits --verify",
    )


def numbers_finding(losses: Sequence[float], expected: Sequence[float], replicas: int) -> Finding:
    """Returns whether the losses equal those of one device.

    Args:
        losses: the loss of each epoch on all devices.
        expected: the loss of each epoch on one device.
        replicas: the number of all devices.
    """
    # NumPy's greatest number is NaN if one of them is.
    apart = float(np.max([abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]))
    return Finding(
        "numbers",
        OK if apart <= _ROUNDING else FAILED,
        f"the losses of one device and of {replicas} differ by {apart:.1e}",
        f"at most {_ROUNDING:g}, which is rounding",
        "Run: python -m tfmulti.fit --dataset digits --verify, which names the variable.",
    )


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
    placement, rows = setup.placement, setup.batch.per_replica_batch_size
    model = compiled(setup)
    warm, _ = trained(setup, model, 3)
    first_loss = _last_loss(model)
    if placement.replicas == 1:
        executions = agreed(setup, model, warm, None, _MEASURED_S)
        with Utilization(os.environ) as used:
            phase, _ = trained(setup, model, executions)
        speed = phase.examples / phase.seconds
        measured = f"{setup.config.model}: {speed:,.0f} examples/s on one device"
        losses = loss_findings(str(setup.config.model), first_loss, _last_loss(model), phase.steps)
        return [*losses, Finding("throughput", OK, measured), *_busy(setup, used)]
    findings = [first_step_finding(setup, model)]
    alone_model = without_peers(setup, rows)
    executions = agreed(setup, model, warm, None, _MEASURED_S)
    with Utilization(os.environ) as used:
        together, _, alone = in_turns(setup, model, alone_model, executions)
    assert alone is not None
    findings += loss_findings(
        str(setup.config.model), first_loss, _last_loss(model), together.steps
    )
    findings += [_throughput(setup, model, network, together, alone), *_busy(setup, used)]
    return findings + _stragglers(setup, alone) + _memory(setup)


def _last_loss(model: keras.Model) -> float | None:
    """Returns the mean loss of the last `fit`; None if the model's own step logs no loss."""
    losses = model.history.history.get("loss")
    return None if losses is None else float(np.mean(losses[-1]))


def loss_findings(model: str, first: float | None, last: float | None, steps: int) -> list[Finding]:
    """Returns whether the loss of the model falls while its speed is measured.

    Args:
        model: the name of the model.
        first: the mean loss of the first steps; None if there is no loss.
        last: the mean loss of the last steps.
        steps: the number of steps between them.
    """
    if first is None or last is None:
        return []
    measured = f"{model}: the loss of the first steps and of those {steps} steps later: "
    measured += f"{first:.3f} → {last:.3f}"
    rule = f"the loss is finite, and falls within {_LEARNING_STEPS} steps"
    advice = "Try a lower --learning_rate, and look at the data."
    if not math.isfinite(last):
        return [Finding("loss", FAILED, measured, rule, advice)]
    if last >= first and steps >= _LEARNING_STEPS:
        return [Finding("loss", WARNING, measured, rule, advice)]
    return [Finding("loss", OK, measured)]


def first_step_finding(setup: Setup, model: keras.Model) -> Finding:
    """Returns whether the first step of the model has one device's numbers. All workers call it."""
    name, replicas = f"{setup.config.model}: the first step", setup.placement.replicas
    try:
        result = verify(model, setup.data.train, batch_size=setup.batch.global_batch_size)
    except VerificationError as error:
        return Finding(
            "first step",
            FAILED,
            f"{name}: {error}",
            f"{replicas} devices give one device's numbers",
            "See the page on verify.",
        )
    if result.verdict == "skipped":
        return Finding("first step", OK, f"{name} is not compared: {result.reason}")
    return Finding(
        "first step",
        OK,
        f"{name} on {replicas} devices gave one device's numbers ({result.quantities} compared)",
    )


def _throughput(
    setup: Setup,
    model: keras.Model,
    network: NetworkModel | None,
    together: Phase,
    alone: Phase,
) -> Finding:
    """Returns the examples a second of one and of all devices, with advice if more are slower."""
    placement = setup.placement
    situation = Situation(
        name=f"{placement.replicas} devices",
        kind="workers" if placement.workers > 1 else "replicas",
        devices=placement.replicas,
        parts=TimeParts.of(together, alone),
        run=setup.config,
        weak=True,
        gradient_bytes=sum(4 * math.prod(v.shape) for v in model.trainable_variables),
        network=network,
        cores=psutil.cpu_count() or 1,
        gpus=bool(placement.gpus),
    )
    return throughput_finding(
        situation, alone.examples / alone.seconds, together.examples / together.seconds
    )


def throughput_finding(situation: Situation, one_device: float, all_devices: float) -> Finding:
    """Returns whether all devices train faster than one, with advice if they do not.

    Args:
        situation: the measurement with all devices.
        one_device: the examples that one device trains in a second.
        all_devices: the examples that all devices together train in a second.
    """
    count = situation.devices
    measured = (
        f"{situation.run.model}: {one_device:,.0f} examples/s on one device, "
        f"{all_devices:,.0f} on {count} ({all_devices / one_device / count:.0%} of {count} ×)"
    ).replace("%", " %")
    if all_devices >= one_device:
        return Finding("throughput", OK, measured)
    advice = "; ".join(limits(situation)) + "."
    return Finding("throughput", WARNING, measured, "more devices are faster", advice)


def _busy(setup: Setup, used: Utilization) -> list[Finding]:
    """Returns the GPUs of this worker that did nothing, or that are slower than the others."""
    slowed = [slowed_finding(f"GPU {index}", reasons) for index, reasons in used.slowed.items()]
    if used.mean or not setup.placement.gpus:
        return idle_findings(used.mean) + slowed
    # NVIDIA's library does not tell the use of some devices, such as MIG devices.
    return device_findings(device_times_ms(setup.placement.gpus)) + slowed


def idle_findings(used: Mapping[int, float]) -> list[Finding]:
    """Returns the GPUs that did nothing while the model trained.

    Args:
        used: for how many percent of the time each GPU was busy, by its index.
    """
    return [
        Finding(
            f"GPU {index}",
            WARNING,
            f"it was busy for {percent:.0f} % of the time",
            f"more than {_IDLE_PERCENT:g} % while a model trains",
            "Set --replicas to the number of GPUs, and give a larger --global_batch_size.",
        )
        for index, percent in used.items()
        if percent < _IDLE_PERCENT
    ]


def device_times_ms(devices: Sequence[str]) -> list[float]:
    """Returns how long each of some devices takes for the same product of two matrices.

    Args:
        devices: TensorFlow's names of the devices.
    """

    def product(values: tf.Tensor) -> tf.Tensor:
        for _ in range(_PRODUCTS):
            values = tf.linalg.matmul(values, values) / _PRODUCT_SIZE
        return tf.reduce_sum(values)

    times = []
    for device in devices:
        with tf.device(device):
            values, compiled_product = tf.ones((_PRODUCT_SIZE,) * 2), tf.function(product)
            compiled_product(values).numpy()
            began = time.perf_counter()
            compiled_product(values).numpy()
            times.append(1000 * (time.perf_counter() - began))
    return times


def device_findings(times_ms: Sequence[float]) -> list[Finding]:
    """Returns the devices of a worker that compute slower than its others.

    Args:
        times_ms: the time of the same work on each device.
    """
    median_ms, slow = _slow_ones(times_ms)
    return [
        Finding(
            f"device {index}",
            WARNING,
            f"the same work takes it {time_ms:.3g} ms, and the median device {median_ms:.3g} ms",
            f"less than {_STRAGGLER:g} × the median: every step waits for the slowest device",
            "Look for other programs on it and for heat, or leave it out: CUDA_VISIBLE_DEVICES.",
        )
        for index, time_ms in slow.items()
    ] or [Finding("devices", OK, f"the same work takes the devices {_in_words(times_ms)} ms")]


def _slow_ones(times_ms: Sequence[float]) -> tuple[float, dict[int, float]]:
    """Returns the median of some times, and those that are much longer, by index."""
    # The usual median of two times is between them, and so hides a slow one.
    median_ms = statistics.median_low(times_ms)
    limit_ms = max(_STRAGGLER * median_ms, median_ms + _STRAGGLER_MS)
    return median_ms, {i: time_ms for i, time_ms in enumerate(times_ms) if time_ms > limit_ms}


def _in_words(times_ms: Sequence[float]) -> str:
    """Returns times as a list in words."""
    return ", ".join(f"{time_ms:.3g}" for time_ms in times_ms)


def _stragglers(setup: Setup, alone: Phase) -> list[Finding]:
    """Returns on the chief the workers that compute much slower than the others."""
    if setup.placement.workers == 1:
        return []
    sent_by_rank = gather_bytes(setup.strategy, np.float64(alone.working_ms).tobytes())
    if setup.placement.rank:
        return []
    times_ms = [float(np.frombuffer(sent or b"", np.float64)[0]) for sent in sent_by_rank]
    median_ms, slow = _slow_ones(times_ms)
    return [
        Finding(
            "straggler",
            WARNING,
            f"{setup.placement.addresses[rank]} computes a step in {time_ms:.3g} ms, the "
            f"median worker in {median_ms:.3g} ms",
            f"less than {_STRAGGLER:g} × the median: every step waits for the slowest worker",
            "Look for other programs, heat and fewer cores there, or leave the machine out.",
            rank,
        )
        for rank, time_ms in slow.items()
    ] or [Finding("computing", OK, f"a step takes the workers {_in_words(times_ms)} ms")]


def _memory(setup: Setup) -> list[Finding]:
    """Returns whether all devices use about as much memory."""
    placement = setup.placement
    if placement.gpus:
        used = [
            tf.config.experimental.get_memory_info(f"GPU:{i}")["peak"]
            for i in range(placement.local_replicas)
        ]
        what = "devices"
    elif placement.workers > 1:
        used, what = [psutil.Process().memory_info().rss], "processes"
    else:
        return [Finding("device memory", OK, "logical CPU devices share that of the process")]
    sent_by_rank = gather_bytes(setup.strategy, np.array(used, np.int64).tobytes())
    used_by_all = np.frombuffer(b"".join(sent or b"" for sent in sent_by_rank), np.int64)
    return [memory_finding(used_by_all.tolist(), what)]


def memory_finding(used: Sequence[int], what: str) -> Finding:
    """Returns whether all devices use about as much memory.

    Args:
        used: the bytes that each device or process uses.
        what: `devices` or `processes`.
    """
    shown = ", ".join(f"{size / 2**20:,.0f}" for size in used)
    return Finding(
        "device memory",
        OK if max(used) <= _UNEVEN * min(used) else WARNING,
        f"the {what} use {shown} MiB",
        f"at most {_UNEVEN:g} × the least: all replicas hold the same",
        "Look for other models and data on the device that uses the most.",
    )
