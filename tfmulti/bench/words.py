"""Says in words what limits scaling at a place, and which flag to try."""

from __future__ import annotations

from dataclasses import dataclass

from tfmulti.bench.cost import NetworkModel
from tfmulti.bench.parts import TimeParts
from tfmulti.config.fit_config import FitConfig
from tfmulti.data.advice import HIGH_SHARE, advice


@dataclass(frozen=True)
class Situation:
    """A place, and the values from which its limits follow.

    Attributes:
        name: the name of the place.
        kind: `one`, `replicas` or `workers`.
        devices: the number of all replicas.
        parts: the parts of the time of a step.
        run: the run that was measured.
        weak: whether each replica keeps its batch size.
        gradient_bytes: as in `MeasureResult`.
        collectives: as in `MeasureResult`.
        synchronized: as in `MeasureResult`.
        link: the model of the measured all-reduces. None: there are no peers.
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
    link: NetworkModel | None = None
    computing_alone: float | None = None
    reader_threads: int | None = None
    cores: int = 1
    shares_cores: bool = False
    gpus: bool = False


def limits(at: Situation) -> list[str]:
    """Returns a line for each thing that limits a place, with the largest part of the step first.

    If nothing limits it, the line says that the place is compute-bound.
    """
    shares = {name: getattr(at.parts, name) / at.parts.step_ms for name in at.parts.as_dict()}
    say = {"communication": _communication, "input": _input, "host": _host}
    found = [
        f"{at.name}: {say[name](at, share)}"
        for name, share in sorted(shares.items(), key=lambda item: -item[1])
        if name in say and share > HIGH_SHARE
    ]
    slower = _slower(at)
    if slower:
        found.append(f"{at.name}: {slower}")
    if at.shares_cores:
        found.append(
            f"{at.name}: they share {at.cores} core{'s' * (at.cores > 1)}, so this efficiency "
            "shows the limit of the machine. Measure where each worker has its own cores"
        )
    return found or [
        f"{at.name}: compute-bound: {_percent(shares['compute'])} of the step is computing; faster "
        "or more devices help"
    ]


def _percent(share: float) -> str:
    """Returns a share as a percentage."""
    return f"{100 * share:.0f} %"


def _communication(at: Situation, share: float) -> str:
    """Returns what takes most of the communication, and which flags to try."""
    words = f"communication-bound: {_percent(share)} of the step is communication; "
    latency_s, bytes_s = (
        at.link.parts_s(at.devices, at.gradient_bytes, at.collectives) if at.link else (0.0, 0.0)
    )
    waiting_s = at.parts.communication / 1000 - latency_s - bytes_s
    tries = []
    if bytes_s >= max(latency_s, waiting_s):
        words += f"mostly the {at.gradient_bytes / 1e6:.3g} MB of gradients; "
        if at.kind == "workers" and at.run.gradient_compression == "none":
            tries.append("--gradient_compression bfloat16 (half the bytes, rounded)")
    else:
        if latency_s >= waiting_s:
            words += f"mostly the latency of {at.collectives} collectives; "
        else:
            words += (
                f"mostly waiting for the slowest replica in {at.collectives} collectives, which "
                f"alone would take {1000 * (latency_s + bytes_s):.3g} ms; look for what else runs "
                "there; "
            )
        if at.synchronized:
            tries.append(f"--nosync_batch_norm ({2 * at.synchronized} collectives fewer)")
    larger = "--per_replica_batch_size" if at.weak else "--global_batch_size"
    tries.append(f"a larger {larger} (fewer all-reduces an example)")
    return words + "try " + ", or ".join(tries)


def _input(at: Situation, share: float) -> str:
    """Returns the advice for steps that wait for data."""
    cached = at.run.cache != "none"
    return advice(share, at.reader_threads, cached=cached, cores=at.cores)


def _host(at: Situation, share: float) -> str:
    """Returns what to do about the time between two calls of the compiled step."""
    given = at.run.steps_per_execution
    words = (
        f"host-bound: {_percent(share)} of the step is Python between two calls; try "
        f"--steps_per_execution {max(8, 4 * (given or 1))}"
    )
    # A run without the flag finds the number by itself. A measurement takes 1 instead, because a
    # number that changes cannot be measured.
    return words if given or at.gpus else words + ", which a run without that flag finds by itself"


def _slower(at: Situation) -> str | None:
    """Returns a line if computing takes longer than it should by `computing_alone`; else None."""
    if at.computing_alone is None or at.parts.compute < (1 + HIGH_SHARE) * at.computing_alone:
        return None
    times = at.parts.compute / at.computing_alone
    if at.weak:
        return (
            f"computing takes {times:.2f} × as long as on one device with the same share: the "
            "processes slow each other down (memory, caches, heat); try fewer on a machine"
        )
    return (
        f"computing takes {times:.2f} × its part of one device's time: shares of so few rows keep "
        "a device less busy; try a larger --global_batch_size, or --weak"
    )
