"""Says what limits scaling at a measured point, and which flag to try."""

from __future__ import annotations

from dataclasses import dataclass

from tfmulti.bench.cost import NetworkModel
from tfmulti.bench.parts import TimeParts
from tfmulti.config.fit_config import FitConfig
from tfmulti.data.advice import HIGH_SHARE, advice


@dataclass(frozen=True)
class Situation:
    """A measured point, and the values from which its limits follow.

    Attributes:
        name: the name of the point.
        kind: `one`, `replicas` or `workers`.
        devices: the number of all replicas.
        parts: the parts of the time of a step.
        run: the run that was measured.
        weak: whether each replica keeps its batch size.
        gradient_bytes: as in `MeasureResult`.
        collectives: as in `MeasureResult`.
        synchronized: as in `MeasureResult`.
        network: the model of the measured all-reduces. None: there are no peers.
        computing_alone: the milliseconds that computing would take if it scaled as it should. It
            would stay the same (weak), or shrink with the replica slice (strong). None: it is not
            known.
        reader_threads: the number of threads that read the data.
        cores: the cores that are used.
        shares_cores: whether there are more replicas or workers than cores.
        gpus: whether the devices are GPUs.
    """

    name: str
    kind: str
    devices: int
    parts: TimeParts
    run: FitConfig
    weak: bool
    gradient_bytes: int
    collectives: int = 1
    synchronized: int = 0
    network: NetworkModel | None = None
    computing_alone: float | None = None
    reader_threads: int | None = None
    cores: int = 1
    shares_cores: bool = False
    gpus: bool = False


def limits(point: Situation) -> list[str]:
    """Returns a line for each thing that limits a point, with the largest part of the step first.

    If nothing limits it, the line says that the point is compute-bound.
    """
    fractions = {name: ms / point.parts.step_ms for name, ms in point.parts.as_dict().items()}
    describe = {"communication": _communication, "input": _input, "host": _host}
    lines = [
        describe[name](point, fraction)
        for name, fraction in sorted(fractions.items(), key=lambda item: -item[1])
        if name in describe and fraction > HIGH_SHARE
    ]
    if slower := _slower(point):
        lines.append(slower)
    if point.shares_cores:
        lines.append(
            f"they share {point.cores} core{'s' * (point.cores > 1)}, so this efficiency shows the "
            "limit of the machine. Measure where each worker has its own cores"
        )
    if not lines:
        lines = [
            f"compute-bound: {_percent(fractions['compute'])} of the step is computing; faster or "
            "more devices help"
        ]
    return [f"{point.name}: {line}" for line in lines]


def _percent(fraction: float) -> str:
    """Returns a share as a percentage."""
    return f"{100 * fraction:.0f} %"


def _communication(point: Situation, fraction: float) -> str:
    """Returns what takes most of the communication, and which flags to try."""
    text = f"communication-bound: {_percent(fraction)} of the step is communication; "
    latency_s, bytes_s = 0.0, 0.0
    if point.network:
        latency_s, bytes_s = point.network.parts_s(
            point.devices, point.gradient_bytes, point.collectives
        )
    waiting_s = point.parts.communication / 1000 - latency_s - bytes_s
    tries = []
    if bytes_s >= max(latency_s, waiting_s):
        text += f"mostly the {point.gradient_bytes / 1e6:.3g} MB of gradients; "
        if point.kind == "workers" and point.run.gradient_compression == "none":
            tries.append("--gradient_compression bfloat16 (half the bytes, rounded)")
    else:
        if latency_s >= waiting_s:
            text += f"mostly the latency of {point.collectives} collectives; "
        else:
            text += (
                f"mostly waiting for the slowest replica in {point.collectives} collectives, which "
                f"alone would take {1000 * (latency_s + bytes_s):.3g} ms; look for other "
                "programs there; "
            )
        if point.synchronized:
            tries.append(f"--nosync_batch_norm ({2 * point.synchronized} collectives fewer)")
    larger = "--per_replica_batch_size" if point.weak else "--global_batch_size"
    tries.append(f"a larger {larger} (fewer all-reduces an example)")
    return text + "try " + ", or ".join(tries)


def _input(point: Situation, fraction: float) -> str:
    """Returns the advice for steps that wait for data."""
    cached = point.run.cache != "none"
    return advice(fraction, point.reader_threads, cached=cached, cores=point.cores)


def _host(point: Situation, fraction: float) -> str:
    """Returns what to do about the time between two calls of the compiled step."""
    steps = point.run.steps_per_execution
    text = (
        f"host-bound: {_percent(fraction)} of the step is Python between two calls; try "
        f"--steps_per_execution {max(8, 4 * (steps or 1))}"
    )
    # A run without the flag finds the number by itself. A measurement takes 1 instead, because a
    # number that changes cannot be measured.
    if not (steps or point.gpus):
        text += ", which a run without that flag finds by itself"
    return text


def _slower(point: Situation) -> str | None:
    """Returns a line if computing takes longer than it should by `computing_alone`; else None."""
    if point.computing_alone is None:
        return None
    factor = point.parts.compute / point.computing_alone
    if factor < 1 + HIGH_SHARE:
        return None
    if point.weak:
        return (
            f"computing takes {factor:.2f} × as long as on one device with the same share: the "
            "processes slow each other down (memory, caches, heat); try fewer on a machine"
        )
    return (
        f"computing takes {factor:.2f} × its part of one device's time: shares of so few rows keep "
        "a device less busy; try a larger --global_batch_size, or --weak"
    )
