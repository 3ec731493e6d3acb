"""The cost model: what an all-reduce and a step cost on any number of workers.

A ring all-reduce of S bytes on n workers takes 2 (n - 1) messages one after the other, each of
S / n bytes (Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication
Operations in MPICH"; Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for
clusters of workstations"):

    seconds = 2 (n - 1) latency + 2 (n - 1) / n × S / bandwidth

So the collectives of a step take as many times the first term, and the second one for the bytes of
the gradients; others (metrics, synchronized batch statistics) have few.

tfmulti's workers on CPUs give what is short, or of two, to all others at once, and of what is large
its pieces and then the sums: one round or two, of n - 1 messages that follow each other at what one
takes of a core:

    seconds = rounds × (latency + (n - 1) message) + 2 (n - 1) / n × S / bandwidth

The rows of an embedding go whole to each other worker, (n - 1) / bandwidth for a worker's own.

A step takes computing + exposed × collectives + waiting + input + host, where `exposed` is what
measured communication was of the modelled one, where computing hides some of it or collectives run
beside each other. What is measured beyond the modelled is waiting for the slowest, which is taken
to stay as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tfmulti.distribution.bucket_sizes import GATHER_BYTES, PACK_BYTES


@dataclass(frozen=True)
class NetworkModel:
    """What joins the workers: the latency of a message (or round), and seconds a byte.

    `message_s` is what one more message of a round takes; None: they go round a ring.
    """

    latency_s: float
    byte_s: float
    message_s: float | None = None

    def rounds(self, workers: int, size: float, collectives: int = 1) -> int:
        """Returns how many times all-reduces of `size` bytes in all take the latency."""
        if self.message_s is None or workers == 1:
            return collectives * 2 * (workers - 1)
        if workers == 2 or size <= GATHER_BYTES:
            return collectives
        return collectives + min(collectives, math.ceil(size / PACK_BYTES))

    def parts_s(self, workers: int, size: float, collectives: int = 1) -> tuple[float, float]:
        """Returns the seconds of all-reduces of `size` bytes in all: of latency, and of bytes."""
        others = workers - 1
        round_s = self.latency_s + others * (self.message_s or 0.0)
        rounds = self.rounds(workers, size, collectives)
        return rounds * round_s, 2 * others / workers * size * self.byte_s

    def all_reduce_s(self, workers: int, size: float, collectives: int = 1) -> float:
        """Returns the seconds of all-reduces of `size` bytes in all."""
        return sum(self.parts_s(workers, size, collectives))


def fit_network(
    points: Sequence[tuple[int, int, float]], message_s: float | None = None
) -> NetworkModel | None:
    """Returns the link that all-reduces were measured on, or None without any.

    Least squares of the relative errors, so that small sizes tell the latency and large ones the
    bandwidth; neither is below 0.

    Args:
        points: workers (from 2), bytes and seconds of each.
        message_s: see `NetworkModel`.
    """
    rows, rest = [], []
    messages = NetworkModel(0.0, 0.0, message_s)
    for n, size, seconds in points:
        if n > 1 and seconds > 0:
            rounds = messages.rounds(n, size)
            rows.append((rounds / seconds, 2 * (n - 1) / n * size / seconds))
            rest.append(max(0.0, 1 - messages.all_reduce_s(n, size) / seconds))
    if not rows:
        return None
    return NetworkModel(*_least_squares(rows, rest), message_s)


@dataclass(frozen=True)
class Computing:
    """Milliseconds that computing a share of some rows takes: `fixed` + `row` × rows."""

    fixed_ms: float
    row_ms: float

    def ms(self, rows: float) -> float:
        return self.fixed_ms + self.row_ms * rows


def fit_computing(points: Sequence[tuple[int, float]]) -> Computing:
    """Returns what computing takes, of measured (rows, milliseconds); neither part is below 0.

    Where all have as many rows, only their mean is known: all of it is taken as the rows'.
    """
    if len({rows for rows, _ in points}) == 1:
        return Computing(0.0, sum(ms / rows for rows, ms in points) / len(points))
    return Computing(
        *_least_squares([(1 / ms, rows / ms) for rows, ms in points], [1.0] * len(points))
    )


@dataclass(frozen=True)
class CostModel:
    """What a step costs on any number of workers, each on cores or a device of its own.

    `gradient_bytes` are summed, and `example_bytes` of rows given to each other worker, for each
    example of a share.
    """

    link: NetworkModel
    computing: Computing
    exposed: float
    gradient_bytes: int
    collectives: int
    other_ms: float
    waiting_ms: float = 0.0
    example_bytes: float = 0.0

    def told_ms(self, workers: int, share: float) -> float:
        """Returns the milliseconds that what workers tell each other takes, hidden or not."""
        rows_s = (workers - 1) * share * self.example_bytes * self.link.byte_s
        summed_s = self.link.all_reduce_s(workers, self.gradient_bytes, self.collectives)
        return 1000 * (summed_s + rows_s)

    def communication_ms(self, workers: int, share: float) -> float:
        if workers == 1:
            return 0.0
        return self.exposed * self.told_ms(workers, share) + self.waiting_ms

    def step_ms(self, workers: int, share: float) -> float:
        """Returns the milliseconds of a step of `share` rows on each worker."""
        return self.computing.ms(share) + self.communication_ms(workers, share) + self.other_ms


def fit_exposed(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns what measured communication is of the modelled one, up to 1, and ms of waiting.

    Args:
        pairs: modelled and measured milliseconds, of several workers.
    """
    square = sum(model * model for model, _ in pairs)
    part = sum(model * ms for model, ms in pairs) / square if square else 0.0
    if part <= 1:
        return part, 0.0
    return 1.0, max(0.0, sum(ms - model for model, ms in pairs) / len(pairs))


def _least_squares(
    rows: Sequence[tuple[float, float]], values: Sequence[float]
) -> tuple[float, float]:
    """Returns the a, b >= 0 that bring a × row[0] + b × row[1] nearest to the values."""
    aa, ab, bb = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    av, bv = (sum(r[i] * v for r, v in zip(rows, values, strict=True)) for i in (0, 1))
    only_a, only_b = (av / aa if aa else 0.0, 0.0), (0.0, bv / bb if bb else 0.0)
    found = [only_a, only_b]
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        both = (av * bb - bv * ab) / determinant, (bv * aa - av * ab) / determinant
        if min(both) >= 0:
            return both

    def error(pair: tuple[float, float]) -> float:
        return sum(
            (pair[0] * r[0] + pair[1] * r[1] - v) ** 2 for r, v in zip(rows, values, strict=True)
        )

    return min(found, key=error)
