"""Tells how much memory a training step needs on each device, before it runs.

`memory_of_step` traces the model's step twice, for two numbers of rows, and runs nothing. Each
trace is a graph whose tensors have fixed shapes. The graph is walked in the order of the trace,
with the tensors that are alive at each operation. So each operation gives a line: the bytes that
are alive there, over the rows. The step needs the highest of these lines.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import keras
import pynvml
import tensorflow as tf

from tfmulti.cluster.gpus import is_listed
from tfmulti.config.console import number
from tfmulti.distribution.bucket_sizes import BUCKET_BYTES
from tfmulti.distribution.strategies import placement_of
from tfmulti.errors import DeviceError, ModelError
from tfmulti.keras_patches.logs import errors_only
from tfmulti.training.graph_memory import LOOPS, memory_of_graph
from tfmulti.training.input.worker_batch import PREFETCH_STEPS
from tfmulti.training.state import model_checks, model_search, relocation
from tfmulti.training.state.trainer_state import state_of
from tfmulti.training.step.step import step_of

GB = 1e9


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory of one training step on each device, in bytes.

    Attributes:
        rows: the rows of one replica in one step.
        microbatches: the number of passes in which a replica computes its rows.
        weights: the model's variables; those of its metrics are small and not counted.
        optimizer: the optimizers' variables.
        gradients: the gradients of all trainable weights.
        buckets: the messages in which workers sum gradients; 0 with one worker.
        batch_per_row: what one row adds as input, with the batches that wait.
        lines: pairs `(fixed, per_row)`. One pass of `n` rows needs the largest of
            `fixed + per_row * n`, for activations and the gradients that are there with them.
        checkpoint: the size of a checkpoint on the disk.
        device: the memory of one device, or None if it is not known.
        unseen: a reason for each part of the step whose memory the trace does not tell, such as a
            loop with an unknown number of passes. The real need is then larger.
    """

    rows: int
    microbatches: int
    weights: int
    optimizer: int
    gradients: int
    buckets: int
    batch_per_row: int
    lines: tuple[tuple[float, float], ...]
    checkpoint: int
    device: int | None = None
    unseen: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """The bytes that a device needs for the step."""
        return self.at(self.rows, self.microbatches)

    @property
    def activations_per_row(self) -> float:
        """The bytes that one row more adds to the activations of a pass of many rows.

        In a pass of few rows, a row may add nothing. The gradients are then the larger part of the
        step, and their size does not depend on the rows.
        """
        return max(per_row for _, per_row in self.lines)

    @property
    def fits(self) -> bool | None:
        """Whether a device has so much memory.

        None: its memory is not known, or operations that are not seen may need what is left of it.
        """
        if self.device is None:
            return None
        if self.total > self.device:
            return False
        return None if self.unseen else True

    @property
    def largest_batch(self) -> int | None:
        """The most rows of one replica that fit in one pass; None if that is not known."""
        if self.device is None or self.unseen:
            return None
        room = self.device - self._steady(1)
        most = (
            (room - fixed) // (per_row + self.batch_per_row)
            for fixed, per_row in self.lines
            if per_row + self.batch_per_row > 0
        )
        return max(0, int(min(most, default=0)))

    @property
    def fitting_microbatches(self) -> int | None:
        """The fewest passes with which `rows` fit; None if none is enough, or it is not known."""
        if self.device is None or self.unseen:
            return None
        counts = (passes for passes in range(1, self.rows + 1))
        return next((n for n in counts if self.at(self.rows, n) <= self.device), None)

    def at(self, rows: int, microbatches: int) -> float:
        """Returns the bytes that a device needs for another number of rows or passes.

        Args:
            rows: the rows of one replica in one step.
            microbatches: the number of passes.
        """
        of_pass = self._of_pass(self._rows_of_pass(rows, microbatches))
        return self._steady(microbatches) + of_pass + self.batch_per_row * rows

    def _steady(self, microbatches: int) -> int:
        """Returns what is there all the time: variables, messages, and sums over the passes."""
        sums = self.gradients if microbatches > 1 else 0
        return self.weights + self.optimizer + self.buckets + sums

    def _of_pass(self, rows: int) -> float:
        """Returns the bytes of the activations and gradients of a pass of so many rows."""
        return max(fixed + per_row * rows for fixed, per_row in self.lines)

    def _rows_of_pass(self, rows: int, microbatches: int) -> int:
        return math.ceil(rows / microbatches)

    def advice(self) -> str:
        """Returns in one sentence what fits the memory of a device, and how.

        >>> few = MemoryEstimate(64, 1, 10**9, 0, 10**9, 0, 0, ((10**9, 1e8),), 10**9, 8 * 10**9)
        >>> few.advice()
        'Give --microbatches 2, or at most 60 rows per replica.'
        """
        if self.device is None:
            return "Give --device_memory_gb to learn what fits."
        largest, passes = self.largest_batch, self.fitting_microbatches
        if largest is None:
            if self.fits is None:
                return "Whether it fits is not known: try some steps."
            return (
                "It does not fit: give more --microbatches, or a smaller batch, and try some steps."
            )
        if self.fits:
            return f"It fits; up to {largest:,} rows per replica do."
        if largest == 0 and passes is None:
            return (
                "Not even one row fits: take a smaller model, or a device with more memory, or "
                "--precision mixed_bfloat16."
            )
        rows = f"at most {largest:,} row{'s' if largest != 1 else ''} per replica"
        if passes is None:
            return f"Give {rows}."
        return f"Give --microbatches {passes}" + (f", or {rows}." if largest else ".")

    def describe(self) -> list[str]:
        """Returns the estimate in lines of text."""
        of_pass = self._of_pass(self._rows_of_pass(self.rows, self.microbatches))
        parts = {
            "weights": self.weights,
            "optimizer": self.optimizer,
            "activations and gradients": of_pass,
            "sums over the passes": self.gradients if self.microbatches > 1 else 0,
            "buckets": self.buckets,
            "batches": self.batch_per_row * self.rows,
        }
        passes = f" in {self.microbatches} passes" if self.microbatches > 1 else ""
        lines = [
            f"about {size(self.total)} on each device for {self.rows:,} rows{passes}: "
            + ", ".join(f"{name} {size(value)}" for name, value in parts.items() if value),
            f"a row adds {size(self.activations_per_row)} of activations; all gradients take "
            f"{size(self.gradients)}, and a checkpoint {size(self.checkpoint)}",
        ]
        if self.unseen:
            first, *others = self.unseen
            more = f" ({len(others)} more such places)" if others else ""
            lines.append(f"more than that, because {first}{more}")
        if self.device is not None:
            verb = "has only" if self.fits is False else "has"
            lines.append(f"a device {verb} {size(self.device)}. {self.advice()}")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Returns the estimate for JSON, with the totals and what fits."""
        return asdict(self) | {
            "total": self.total,
            "activations_per_row": self.activations_per_row,
            "fits": self.fits,
            "largest_batch": self.largest_batch,
            "fitting_microbatches": self.fitting_microbatches,
        }


def size(of: float) -> str:
    """Returns a number of bytes in words.

    >>> size(1_234_000_000)
    '1.234 GB'
    """
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if of >= unit:
            return f"{number(of / unit)} {name}"
    return f"{number(of)} bytes"


def memory_of_step(
    model: keras.Model, specs: Any, rows: int, device: int | None = None
) -> MemoryEstimate:
    """Returns how much memory one training step of a built model needs on each device.

    It runs nothing and has no collectives. The traces use copies of the variables on the CPU.

    Args:
        model: a prepared and compiled model, whose optimizers are built.
        specs: the form of one batch, a nest whose leaves have a `shape` and a `dtype`.
        rows: the rows of one replica in one step.
        device: the memory of one device in bytes. None asks the GPUs of the strategy.
    """
    placement = placement_of(model.distribute_strategy)
    passes = state_of(model).options.microbatches
    rows_of_pass = math.ceil(rows / passes)
    graph, of_twice = _traced(model, [with_rows(specs, n * rows_of_pass) for n in (1, 2)])
    lines, unseen = _lines(graph, of_twice, rows_of_pass)
    loops = [op.name for op in graph.get_operations() if op.type in LOOPS]
    if passes > 1 and loops:
        # The divisors of the losses are traced first (`microbatches`), and a loop that reads
        # variables has effects, so TensorFlow does not drop it from that trace.
        unseen.add(f"with microbatches TensorFlow runs the loop {loops[0]} once more")
    gradients = sum(_bytes_of(v) for v in model.trainable_variables)
    weights = sum(_bytes_of(v) for v in model.variables)
    optimizers = model_checks.optimizers_of(model)
    slots = sum(_bytes_of(v) for each in optimizers for v in each.variables)
    batch = sum(_bytes_of_row(leaf) for leaf in tf.nest.flatten(specs) if leaf is not None)
    return MemoryEstimate(
        rows=rows,
        microbatches=passes,
        weights=weights,
        optimizer=slots,
        gradients=gradients,
        buckets=min(2 * BUCKET_BYTES, gradients) if placement.workers > 1 else 0,
        batch_per_row=batch * (2 if placement.gpus else PREFETCH_STEPS + 1),
        lines=_highest(lines),
        checkpoint=weights + slots,
        device=_memory_of_gpus(len(placement.gpus)) if device is None else device,
        unseen=tuple(sorted(unseen)),
    )


@contextlib.contextmanager
def out_of_memory_explained(model: keras.Model) -> Iterator[None]:
    """Raises a DeviceError with advice in place of TensorFlow's error that memory is used up.

    What the failed device could give is taken as its memory. There are no collectives. The
    allocator's own report, which has some hundred lines, is not logged.
    """
    try:
        with errors_only():
            yield
    except tf.errors.ResourceExhaustedError as error:
        # Other things can be exhausted, too, such as the size of a message between workers.
        if "OOM when" not in error.message and "out of memory" not in error.message.lower():
            raise
        placement = placement_of(model.distribute_strategy)
        device = placement.gpus[0] if placement.gpus else "CPU:0"
        sentences = [f"the memory of {device} is used up by a training step."]
        # The advice must not hide the error.
        with contextlib.suppress(Exception):
            peak = tf.config.experimental.get_memory_info(device)["peak"]
            sentences = [f"the memory of {device} ({size(peak)}) is used up by a training step."]
            specs = state_of(model).specs
            rows = math.ceil(tf.nest.flatten(specs)[0].shape[0] / placement.replicas)
            # Logical CPU devices share the memory of the host.
            memory = peak if placement.gpus else peak // placement.local_replicas
            estimate = memory_of_step(model, specs, rows, memory)
            sentences += [
                f"It needs {estimate.describe()[0]}.",
                estimate.advice() if estimate.fits is False else "",
            ]
        if len(sentences) == 1 or not sentences[-1]:
            sentences = [*sentences[:2], "Give more --microbatches, or a smaller batch."]
        raise DeviceError(" ".join([*sentences, "See docs/memory.md."])) from None


def _bytes_of(variable: Any) -> int:
    """Returns the bytes of a Keras variable."""
    return int(math.prod(variable.shape) * tf.as_dtype(variable.dtype).size)


def _bytes_of_row(leaf: Any) -> int:
    """Returns the bytes of one row of a leaf of a batch."""
    return int(math.prod(n or 1 for n in leaf.shape[1:]) * max(tf.as_dtype(leaf.dtype).size, 1))


def form_of(model: keras.Model) -> Any:
    """Returns `(x, y)` of a model whose inputs and outputs are known, as `tf.TensorSpec`.

    The targets have the form of the outputs. A loss over class numbers has one number for each
    output vector.

    Raises:
        ModelError: the model's inputs are not known.
    """
    if not getattr(model, "inputs", None):
        raise ModelError(
            f"the inputs of {type(model).__name__} are not known before it is called. Give "
            "estimate(specs=(x, y)), with arrays or tf.TensorSpec of one batch."
        )
    # A Sequential that no other model calls has no `input`.
    inputs = getattr(model, "input", model.inputs)
    x = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), inputs)
    if isinstance(x, list) and len(x) == 1:
        x = x[0]
    is_sparse = "sparse" in str(getattr(model.loss, "name", model.loss)).lower()

    def target(output: Any) -> tf.TensorSpec:
        if is_sparse:
            return tf.TensorSpec(output.shape[:-1], tf.int64)
        return tf.TensorSpec(output.shape, output.dtype)

    outputs = [target(output) for output in model.outputs]
    return x, outputs[0] if len(outputs) == 1 else outputs


def with_rows(specs: Any, rows: int) -> Any:
    """Returns the form of a batch with another number of rows, as a nest of `tf.TensorSpec`."""
    return tf.nest.map_structure(
        lambda leaf: (
            None
            if leaf is None
            else tf.TensorSpec([rows, *leaf.shape[1:]], tf.as_dtype(leaf.dtype))
        ),
        specs,
    )


def _traced(model: keras.Model, forms: Sequence[Any]) -> list[tf.Graph]:
    """Returns graphs of the step as plain Keras takes it on one device, with its update.

    Raises:
        ModelError: the model cannot compute such a batch.
    """
    state = model_search.find(model)
    with model_checks.as_made(model), relocation.on_one_device(state, "CPU:0") as copies:
        try:
            step = tf.function(step_of(model, "train_step"), autograph=False)
            return [step.get_concrete_function(form).graph for form in forms]
        except Exception as error:
            model_checks.explain(model, forms[0], error)
            raise
        finally:
            # TensorFlow keeps the copies as long as the function, which is longer than needed.
            for copy in copies.values():
                nothing = tf.zeros((), copy.dtype)
                tf.raw_ops.AssignVariableOp(resource=copy.handle, value=nothing)


def _lines(
    graph: tf.Graph, of_twice: tf.Graph, rows: int
) -> tuple[list[tuple[float, float]], set[str]]:
    """Returns for each operation `(fixed, per_row)` of the bytes that are alive there.

    If the graphs differ in their operations, the result is the line of their largest bytes. The
    second result has the reasons why there may be more bytes.

    Args:
        graph: the graph of a step of `rows` rows.
        of_twice: the graph of a step of twice as many rows.
        rows: the number of rows.
    """
    of_graph, of_graph_twice = memory_of_graph(graph), memory_of_graph(of_twice)
    at, at_twice = of_graph.needed, of_graph_twice.needed
    kinds, kinds_of_twice = (
        [op.type for op in each.get_operations()] for each in (graph, of_twice)
    )
    if kinds != kinds_of_twice:
        at, at_twice = [max(at)], [max(at_twice)]
    slopes = ((high - low) / rows for low, high in zip(at, at_twice, strict=True))
    lines = [(low - slope * rows, slope) for low, slope in zip(at, slopes, strict=True)]
    return lines, of_graph.unknown


def _highest(lines: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Returns the lines of which no other line is higher for every number of rows.

    >>> _highest([(1, 1), (2, 1), (1, 2), (0, 2), (5, 0)])
    ((1, 2), (2, 1), (5, 0))
    """
    highest: list[tuple[float, float]] = []
    for line in sorted(lines, key=lambda line: (line[1], line[0]), reverse=True):
        if not highest or line[0] > max(fixed for fixed, _ in highest):
            highest.append(line)
    return tuple(highest)


def _memory_of_gpus(count: int, env: Mapping[str, str] = os.environ) -> int | None:
    """Returns the bytes of the smallest GPU that this process may use; None if it uses none.

    A MIG device has only a part of its GPU, of which NVML does not tell which one it is. Give
    `device_memory_gb` there.
    """
    if not count:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        gpus = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        sizes = [
            int(pynvml.nvmlDeviceGetMemoryInfo(gpu).total)
            for index, gpu in enumerate(gpus)
            if is_listed(index, pynvml.nvmlDeviceGetUUID(gpu), env)
        ]
        return min(sizes, default=None)
    finally:
        pynvml.nvmlShutdown()
