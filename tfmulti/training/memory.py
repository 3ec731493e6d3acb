"""Tells how much memory a training step needs on each device, before it runs.

`estimate` traces the model's step twice, for two numbers of rows, and runs nothing. Each trace is a
graph whose tensors have fixed shapes. The graph is walked in the order of its operations, with the
tensors that are alive at each of them. The largest sum is what the step needs at once. It grows
linearly with the rows, so two traces tell the need of any number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import keras
import tensorflow as tf

from tfmulti.config.console import number
from tfmulti.config.training_options import TrainingOptions
from tfmulti.distribution.bucket_sizes import PACK_BYTES
from tfmulti.distribution.strategies import placement_of
from tfmulti.errors import ConfigError, ModelError
from tfmulti.keras_patches.optimizers import take_reduced_gradients
from tfmulti.training.distributed_model import DistributedModel, prepare
from tfmulti.training.input.worker_batch import PREFETCH_STEPS
from tfmulti.training.state import model_checks, relocation
from tfmulti.training.state.trainer_state import state_of
from tfmulti.training.step.step import step_of

GB = 1e9

# The rows of the two traces. A first trace of few rows would hide what grows with them.
_TRACED_ROWS = (8, 16)

# The result of these operations is their input under another name or shape.
_SAME_MEMORY = frozenset(
    ["Identity", "IdentityN", "Reshape", "ExpandDims", "Squeeze", "StopGradient", "PreventGradient", "EnsureShape", "ReadVariableOp", "PlaceholderWithDefault", "CheckNumerics"]
)
# The result of these operations may take the memory of an input that nothing else needs.
_IN_PLACE = frozenset(
    ["Add", "AddV2", "AddN", "Sub", "Mul", "RealDiv", "Div", "Relu", "ReluGrad", "Relu6", "Relu6Grad", "Elu", "EluGrad", "Selu", "Gelu", "Tanh", "TanhGrad", "Sigmoid", "SigmoidGrad", "Rsqrt", "Sqrt", "Square", "Neg", "Exp", "Log", "Erf", "Maximum", "Minimum", "BiasAdd", "Softmax", "LogSoftmax", "SelectV2", "Pow", "DivNoNan", "MulNoNan", "SquaredDifference", "RsqrtGrad", "SqrtGrad", "Abs", "Softplus", "SoftplusGrad"]
)
# These operations run other graphs, whose tensors are not seen here.
_HIDING = frozenset(("While", "StatelessWhile", "If", "StatelessIf", "Case"))


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory of one training step on each device, in bytes.

    Attributes:
        rows: the rows of one replica in one step.
        microbatches: the number of passes in which a replica computes its rows.
        weights: the model's variables, those of its metrics included.
        optimizer: the optimizers' variables.
        gradients: the gradients of all trainable weights, and with several passes their sums.
        buckets: the messages in which workers sum gradients; 0 with one worker.
        activations_per_row: what one row adds while the step runs.
        batch_per_row: what one row adds as input, with the batches that wait.
        fixed: what else the step needs, whatever the rows.
        checkpoint: the size of a checkpoint on the disk.
        device: the memory of one device, or None if it is not known.
        unseen: the kinds of operations whose memory the trace does not show, such as the loops of
            recurrent layers. The real need is then larger.
    """

    rows: int
    microbatches: int
    weights: int
    optimizer: int
    gradients: int
    buckets: int
    activations_per_row: float
    batch_per_row: int
    fixed: int
    checkpoint: int
    device: int | None = None
    unseen: tuple[str, ...] = ()

    @property
    def activations(self) -> float:
        """The bytes of all activations at once: those of the rows of one pass."""
        return self.activations_per_row * math.ceil(self.rows / self.microbatches)

    @property
    def total(self) -> float:
        """The bytes that a device needs for the step."""
        return self.at(self.rows, self.microbatches)

    @property
    def fits(self) -> bool | None:
        """Whether a device has so much memory; None if its memory is not known."""
        return None if self.device is None else self.total <= self.device

    @property
    def largest_batch(self) -> int | None:
        """The most rows of one replica in one pass that fit; None if no memory is known."""
        if self.device is None:
            return None
        room = self.device - self.at(0, 1)
        return max(0, int(room // (self.activations_per_row + self.batch_per_row)))

    def at(self, rows: int, microbatches: int) -> float:
        """Returns the bytes that a device needs for another number of rows or passes.

        Args:
            rows: the rows of one replica in one step.
            microbatches: the number of passes.
        """
        sums = self.gradients if microbatches > 1 and self.microbatches == 1 else 0
        in_a_pass = math.ceil(rows / microbatches)
        steady = self.weights + self.optimizer + self.gradients + self.buckets + self.fixed + sums
        return steady + self.activations_per_row * in_a_pass + self.batch_per_row * rows

    @property
    def fitting_microbatches(self) -> int | None:
        """The fewest passes with which `rows` fit; None if no number of passes is enough."""
        if self.device is None:
            return None
        sizes = (passes for passes in range(1, self.rows + 1))
        return next((p for p in sizes if self.at(self.rows, p) <= self.device), None)

    def advice(self) -> str:
        """Returns in one sentence what fits the memory of a device, and how.

        >>> few = MemoryEstimate(64, 1, 10**9, 0, 10**9, 0, 1e8, 0, 0, 10**9, 8 * 10**9)
        >>> few.advice()
        'Give --microbatches 2, or at most 60 rows per replica.'
        """
        largest, passes = self.largest_batch, self.fitting_microbatches
        if largest is None:
            return "Give --device_memory_gb to learn what fits."
        if self.fits:
            return f"It fits; up to {largest:,} rows per replica do."
        if largest == 0 and passes is None:
            return (
                "Not even one row fits: take a smaller model, a device with more memory, or "
                "--mixed_precision."
            )
        rows = f"at most {largest:,} row{'s' if largest != 1 else ''} per replica"
        if passes is None:
            return f"Give {rows}."
        return f"Give --microbatches {passes}" + (f", or {rows}." if largest else ".")

    def describe(self) -> list[str]:
        """Returns the estimate in lines of text."""
        parts = {
            "weights": self.weights,
            "optimizer": self.optimizer,
            "gradients": self.gradients,
            "buckets": self.buckets,
            "activations": self.activations,
            "batches": self.batch_per_row * self.rows,
            "other": self.fixed,
        }
        passes = f" in {self.microbatches} passes" if self.microbatches > 1 else ""
        lines = [
            f"about {size(self.total)} on each device for {self.rows:,} rows{passes}: "
            + ", ".join(f"{name} {size(value)}" for name, value in parts.items() if value),
            f"a row takes {size(self.activations_per_row)} of activations; "
            f"a checkpoint takes {size(self.checkpoint)}",
        ]
        if self.unseen:
            lines.append(
                f"more than that, because the memory of {', '.join(self.unseen)} is not seen"
            )
        if self.device is not None:
            verb = "has" if self.fits else "has only"
            lines.append(f"a device {verb} {size(self.device)}. {self.advice()}")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Returns the estimate for JSON, with the totals and what fits."""
        return asdict(self) | {
            "total": self.total,
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


def estimate(
    model: keras.Model,
    options: TrainingOptions | None = None,
    *,
    rows: int = 32,
    specs: Any = None,
    device_memory_gb: float | None = None,
) -> MemoryEstimate:
    """Returns how much memory one training step needs on each device.

    The step is traced and not run, so nothing is computed on a device. The variables of the model
    and of its optimizer are made where its strategy says. On GPUs without XLA the figures agree
    with TensorFlow's allocator to about 15 %; XLA needs less, because it joins operations.

    Args:
        model: a compiled model. It becomes a prepared one, as by `prepare`.
        options: how the model trains; None leaves those of a prepared model as they are.
        rows: the rows of one replica in one step.
        specs: the form of one batch: `(x, y)` or `(x, y, sample_weight)`, whose leaves have a
            `shape` and a `dtype`, such as arrays. None takes the inputs and outputs of the model.
        device_memory_gb: the memory of one device in GB of 10^9 bytes. None asks the GPUs of the
            strategy; on CPUs it is not known.

    Returns:
        The parts of the need, its sum, and what fits.

    Raises:
        ModelError: the model is not compiled, or its inputs are not known and `specs` is None.
        ConfigError: a value is out of its range.
    """
    if rows < 1:
        raise ConfigError(f"rows is {rows}, but it must be at least 1.")
    if device_memory_gb is not None and not device_memory_gb > 0:
        raise ConfigError(f"device_memory_gb is {device_memory_gb}, but it must be above 0.")
    model_checks.check_compiled(model)
    if options is not None or not isinstance(model, DistributedModel):
        prepare(model, options)
    specs = _forms(model) if specs is None else specs
    relocation.enter(model)
    model_checks.build(model, _with_rows(specs, _TRACED_ROWS[0]), optimizers=True)
    optimizers = model_checks.optimizers_of(model)
    place = placement_of(model.distribute_strategy)
    passes = state_of(model).options.microbatches
    peaks, unseen = [], set[str]()
    gradients = sum(_bytes_of(v) for v in model.trainable_variables)
    for each in _TRACED_ROWS:
        graph, kept = _traced(model, _with_rows(specs, each))
        peaks.append(_peak(graph, kept))
        unseen |= {op.type for op in graph.get_operations() if op.type in _HIDING}
    low, high = _TRACED_ROWS
    per_row = (peaks[1] - peaks[0]) / (high - low)
    # At the peak, some gradients are there already, or all of them after the backward pass.
    fixed = max(0, round(peaks[0] - per_row * low) - gradients)
    weights = sum(_bytes_of(v) for v in model.variables)
    slots = sum(_bytes_of(v) for each in optimizers for v in each.variables)
    batch = sum(_size_of_row(leaf) for leaf in tf.nest.flatten(specs) if leaf is not None)
    return MemoryEstimate(
        rows=rows,
        microbatches=passes,
        weights=weights,
        optimizer=slots,
        gradients=gradients * (2 if passes > 1 else 1),
        buckets=min(2 * PACK_BYTES, gradients) + gradients if place.workers > 1 else 0,
        activations_per_row=per_row,
        batch_per_row=batch * (2 if place.gpus else PREFETCH_STEPS + 1),
        fixed=fixed,
        checkpoint=weights + slots,
        device=_memory_of(place.gpus) if device_memory_gb is None else int(device_memory_gb * GB),
        unseen=tuple(sorted(unseen)),
    )


def _bytes_of(variable: Any) -> int:
    """Returns the bytes of a Keras variable."""
    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size


def _size_of_row(leaf: Any) -> int:
    """Returns the bytes of one row of a leaf of a batch."""
    return math.prod(n or 1 for n in leaf.shape[1:]) * max(tf.as_dtype(leaf.dtype).size, 1)


def _forms(model: keras.Model) -> Any:
    """Returns `(x, y)` of a model whose inputs and outputs are known, as `tf.TensorSpec`.

    The targets have the form of the outputs. A loss over class numbers has one number for each
    output vector.

    Raises:
        ModelError: the model's inputs are not known.
    """
    if not (isinstance(model, keras.Model) and getattr(model, "inputs", None)):
        raise ModelError(
            f"the inputs of {type(model).__name__} are not known before it is called. Give "
            "estimate(specs=(x, y)), with arrays or tf.TensorSpec of one batch."
        )
    struct = getattr(model, "_inputs_struct", None)
    inputs = model.inputs if struct is None else struct
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


def _with_rows(specs: Any, rows: int) -> Any:
    """Returns the forms of a batch with another number of rows."""
    return tf.nest.map_structure(
        lambda leaf: (
            None
            if leaf is None
            else tf.TensorSpec([rows, *leaf.shape[1:]], tf.as_dtype(leaf.dtype))
        ),
        specs,
    )


def _traced(model: keras.Model, specs: Any) -> tuple[tf.Graph, list[tf.Tensor]]:
    """Traces one replica's step without side effects.

    Returns:
        The graph, and the tensors that are needed at its end: the gradients and the logs.
    """
    found: list[Any] = []

    def keep(optimizer: Any, gradients: Sequence[Any], variables: Any) -> bool:
        found.extend(g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients)
        return True

    for optimizer in model_checks.optimizers_of(model):
        take_reduced_gradients(optimizer, lambda gradients, _: list(gradients), keep)
    step = step_of(model, "train_step")

    def compute(batch: Any) -> Any:
        logs = step(batch)
        return [g for g in found if g is not None], tf.nest.flatten(logs)

    # The next `fit` makes its own hooks of the optimizers.
    model.train_function = None
    with relocation.without_strategy(None), keras.StatelessScope():
        concrete = tf.function(compute, autograph=False).get_concrete_function(specs)
    return concrete.graph, [t for t in concrete.outputs if t is not None]


def _peak(graph: tf.Graph, kept: Sequence[tf.Tensor]) -> int:
    """Returns the most bytes that the tensors of a graph need at once.

    An operation runs when its inputs are there, in the order of the trace. A tensor's memory is
    free after the last operation that reads it. Variables and the batch are not counted.

    Args:
        graph: a graph whose tensors have fixed shapes.
        kept: the tensors that are needed at the end.
    """
    operations = _needed(graph, kept)
    memory: dict[Any, Any] = {}  # the tensor whose memory a tensor has
    readers: dict[Any, int] = {}
    sizes: dict[Any, int] = {}
    for op in operations:
        for output in op.outputs:
            shared = op.type in _SAME_MEMORY and op.inputs
            source = op.inputs[list(op.outputs).index(output)] if shared else None
            memory[output.ref()] = output.ref() if source is None else memory[source.ref()]
            if source is None:
                sizes[output.ref()] = _size(output)
        for given in op.inputs:
            place = memory[given.ref()]
            readers[place] = readers.get(place, 0) + 1
    for tensor in kept:
        if tensor.ref() in memory:
            readers[memory[tensor.ref()]] = readers.get(memory[tensor.ref()], 0) + 1
    alive = peak = 0
    for op in operations:
        inputs = [memory[given.ref()] for given in op.inputs]
        own = [output.ref() for output in op.outputs if memory[output.ref()] == output.ref()]
        needs = sum(sizes[output] for output in own)
        last = {place for place in inputs if readers[place] == inputs.count(place)}
        taken = 0
        if op.type in _IN_PLACE:
            taken = next((sizes[p] for p in last if sizes[p] == needs), 0)
        alive += needs
        peak = max(peak, alive - taken)
        for place in inputs:
            readers[place] -= 1
        free = {place for place in [*inputs, *own] if not readers.get(place)}
        # A tensor that is only another name of its input is read later.
        alive -= sum(sizes[place] for place in free)
        for place in free:
            sizes[place] = 0
    return peak


def _needed(graph: tf.Graph, kept: Sequence[tf.Tensor]) -> list[Any]:
    """Returns the operations on which the kept tensors depend, in the order of the trace."""
    needed, waiting = set[Any](), [tensor.op for tensor in kept]
    while waiting:
        op = waiting.pop()
        if op.name not in needed:
            needed.add(op.name)
            waiting += [given.op for given in op.inputs] + list(op.control_inputs)
    return [op for op in graph.get_operations() if op.name in needed]


def _size(tensor: tf.Tensor) -> int:
    """Returns the bytes of a tensor that an operation makes; 0 for the batch and for handles."""
    if tensor.op.type in ("Placeholder", "Const", "ReadVariableOp"):
        return 0
    if tensor.dtype in (tf.resource, tf.variant) or not tensor.shape.is_fully_defined():
        return 0
    return math.prod(tensor.shape.as_list()) * int(tensor.dtype.size)


def _memory_of(gpus: Sequence[str]) -> int | None:
    """Returns the memory of the smallest GPU of this process in bytes, or None without GPUs."""
    if not gpus:
        return None
    found: list[Mapping[str, Any]] = [
        tf.config.experimental.get_device_details(device)
        for device in tf.config.list_physical_devices("GPU")
    ]
    sizes = [int(each["memory_limit"]) for each in found if "memory_limit" in each]
    return min(sizes, default=None)
