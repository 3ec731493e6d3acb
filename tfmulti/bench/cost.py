"""The cost model: the time of an all-reduce and of a step on any number of workers.

A ring all-reduce of S bytes on n workers sends 2 (n - 1) messages one after the other. Each message
has S / n bytes:

    seconds = 2 (n - 1) latency + 2 (n - 1) / n × S / bandwidth

A step with several collectives pays the first term once for each of them. It pays the second term
once, for the bytes of the gradients. The other collectives (metrics, synchronized batch statistics)
move few bytes.

tfmulti's workers on CPUs do not use a ring. If a value is short or there are two workers, each
worker sends it to all others in one round. A large value takes two rounds: the workers first send
the pieces, and then the sums. A round has n - 1 messages, and each takes some time of a core:

    seconds = rounds × (latency + (n - 1) message) + 2 (n - 1) / n × S / bandwidth

The gradient rows of an embedding go whole to each other worker. The rows of one worker therefore
take (n - 1) × bytes / bandwidth.

A step takes

    computing + exposed × (collectives + rows) + waiting + input + host

Here `exposed` is the measured communication divided by the modelled one. It is below 1 if computing
hides a part of the communication, or if collectives run at the same time. If more is measured than
modelled, the rest is the time of waiting for the slowest worker. The model assumes that this time
stays the same for more workers.

Sources: Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations
in MPICH"; Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tfmulti.distribution.bucket_sizes import BUCKET_BYTES, GATHER_BYTES


@dataclass(frozen=True)
class NetworkModel:
    """The cost of messages between workers.

    The methods take the number of workers, the bytes of all all-reduces together, and how many
    all-reduces these are.

    Attributes:
        latency_s: the seconds of latency of a message, or of a round.
        s_per_byte: the seconds for a byte.
        s_per_message: the seconds that each message of a round takes. None: a ring all-reduce.
    """

    latency_s: float
    s_per_byte: float
    s_per_message: float | None = None

    def rounds(self, workers: int, size: float, collectives: int = 1) -> int:
        """Returns the number of latencies that these all-reduces take one after the other."""
        if self.s_per_message is None or workers == 1:
            return collectives * 2 * (workers - 1)
        if workers == 2 or size <= GATHER_BYTES:
            return collectives
        return collectives + min(collectives, math.ceil(size / BUCKET_BYTES))

    def parts_s(self, workers: int, size: float, collectives: int = 1) -> tuple[float, float]:
        """Returns the seconds that some all-reduces take for the latency, and for the bytes."""
        others = workers - 1
        round_s = self.latency_s + others * (self.s_per_message or 0.0)
        rounds = self.rounds(workers, size, collectives)
        return rounds * round_s, 2 * others / workers * size * self.s_per_byte

    def all_reduce_s(self, workers: int, size: float, collectives: int = 1) -> float:
        """Returns the seconds of some all-reduces."""
        return sum(self.parts_s(workers, size, collectives))


def fit_network(
    points: Sequence[tuple[int, int, float]], s_per_message: float | None = None
) -> NetworkModel | None:
    """Returns the network model that fits the measured all-reduces, or None without any.

    The fit minimizes the squares of the relative errors. So small sizes determine the latency, and
    large sizes determine the bandwidth. Neither becomes negative.

    Args:
        points: the workers, the bytes and the seconds of each measured all-reduce. Those of one
            worker are ignored.
        s_per_message: as in `NetworkModel`.
    """
    equations, unexplained = [], []
    messages = NetworkModel(0.0, 0.0, s_per_message)
    for n, size, seconds in points:
        if n > 1 and seconds > 0:
            rounds = messages.rounds(n, size)
            equations.append((rounds / seconds, 2 * (n - 1) / n * size / seconds))
            unexplained.append(max(0.0, 1 - messages.all_reduce_s(n, size) / seconds))
    if not equations:
        return None
    return NetworkModel(*_least_squares(equations, unexplained), s_per_message)


@dataclass(frozen=True)
class Computing:
    """The time of computing a replica slice: `fixed_ms` + `row_ms` × rows.

    Attributes:
        fixed_ms: the milliseconds that do not depend on the rows.
        row_ms: the milliseconds for each row.
    """

    fixed_ms: float
    row_ms: float

    def ms(self, rows: float) -> float:
        """Returns the milliseconds of computing some rows."""
        return self.fixed_ms + self.row_ms * rows


def fit_computing(points: Sequence[tuple[int, float]]) -> Computing:
    """Returns the model that fits measured pairs of rows and milliseconds.

    Neither part of the model is negative. If all pairs have the same number of rows, the fixed part
    cannot be known, and is set to 0.
    """
    if len({rows for rows, _ in points}) == 1:
        return Computing(0.0, sum(ms / rows for rows, ms in points) / len(points))
    return Computing(
        *_least_squares([(1 / ms, rows / ms) for rows, ms in points], [1.0] * len(points))
    )


@dataclass(frozen=True)
class CostModel:
    """The cost of a step on any number of workers with cores or a device of their own.

    The methods take the number of workers and the rows of each worker.

    Attributes:
        network: the cost of messages between workers.
        computing: the cost of computing a replica slice.
        exposed: the share of the modelled communication that a step shows, from 0 to 1.
        gradient_bytes: the bytes that all-reduces of a step sum.
        collectives: the number of collectives of a step.
        other_ms: the milliseconds of input and host in a step.
        waiting_ms: the milliseconds of waiting for the slowest worker in a step.
        example_bytes: for each example of a replica slice, the bytes of embedding rows that a
            worker sends to each other worker.
    """

    network: NetworkModel
    computing: Computing
    exposed: float
    gradient_bytes: int
    collectives: int
    other_ms: float
    waiting_ms: float = 0.0
    example_bytes: float = 0.0

    def messages_ms(self, workers: int, rows: float) -> float:
        """Returns the milliseconds of a step's messages, also of those that computing hides."""
        embedding_s = (workers - 1) * rows * self.example_bytes * self.network.s_per_byte
        summed_s = self.network.all_reduce_s(workers, self.gradient_bytes, self.collectives)
        return 1000 * (summed_s + embedding_s)

    def communication_ms(self, workers: int, rows: float) -> float:
        """Returns the milliseconds of communication that a step shows, with waiting."""
        if workers == 1:
            return 0.0
        return self.exposed * self.messages_ms(workers, rows) + self.waiting_ms

    def step_ms(self, workers: int, rows: float) -> float:
        """Returns the milliseconds of a step."""
        return self.computing.ms(rows) + self.communication_ms(workers, rows) + self.other_ms

    def as_dict(self) -> dict[str, float | None]:
        """Returns the costs as they stand in bench.json."""
        s_per_byte, s_per_message = self.network.s_per_byte, self.network.s_per_message
        return {
            "latency_us": 1e6 * self.network.latency_s,
            "bandwidth_mb_per_s": 1e-6 / s_per_byte if s_per_byte else None,
            "collectives_a_step": self.collectives,
            "summed_bytes": self.gradient_bytes,
            "row_bytes_an_example": self.example_bytes,
            "compute_fixed_ms": self.computing.fixed_ms,
            "compute_row_ms": self.computing.row_ms,
            "message_us": None if s_per_message is None else 1e6 * s_per_message,
            "exposed": self.exposed,
            "waiting_ms": self.waiting_ms,
            "other_ms": self.other_ms,
        }


def fit_exposed(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the exposed share of the modelled communication, and the milliseconds of waiting.

    The pairs are the modelled and the measured milliseconds of points with several workers. The
    share is the slope that fits the pairs by least squares. If it is above 1, the share is 1,
    and the waiting is the mean of what was measured beyond the model.
    """
    square = sum(model * model for model, _ in pairs)
    part = sum(model * ms for model, ms in pairs) / square if square else 0.0
    if part <= 1:
        return part, 0.0
    return 1.0, max(0.0, sum(ms - model for model, ms in pairs) / len(pairs))


def _least_squares(
    equations: Sequence[tuple[float, float]], values: Sequence[float]
) -> tuple[float, float]:
    """Returns a, b >= 0 that solve a × e[0] + b × e[1] = value best, by least squares."""
    aa, ab, bb = (sum(e[i] * e[j] for e in equations) for i, j in ((0, 0), (0, 1), (1, 1)))
    av, bv = (sum(e[i] * v for e, v in zip(equations, values, strict=True)) for i in (0, 1))
    only_a, only_b = (av / aa if aa else 0.0, 0.0), (0.0, bv / bb if bb else 0.0)
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        both = (av * bb - bv * ab) / determinant, (bv * aa - av * ab) / determinant
        if min(both) >= 0:
            return both

    def error(pair: tuple[float, float]) -> float:
        """Returns the sum of the squared errors."""
        return sum(
            (pair[0] * e[0] + pair[1] * e[1] - v) ** 2
            for e, v in zip(equations, values, strict=True)
        )

    return min(only_a, only_b, key=error)
