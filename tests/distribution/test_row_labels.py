"""Tests that the labels of a graph's tensors are true for the numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmulti.distribution import row_labels, row_rules, row_sequences
from tfmulti.distribution.custom_gradients import mark_formula
from tfmulti.distribution.row_rules import Kind
from tfmulti.keras_patches.tracing import nodes_of

pytestmark = pytest.mark.mirrored

X = np.random.default_rng(0).uniform(0.1, 1.0, (6, 4)).astype(np.float32)
TABLE = tf.constant(np.arange(20, dtype=np.float32).reshape(5, 4))
IMAGES = (2, 2, 1)


def _cropped(x: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    """Returns a crop of each image, by boxes that depend on the rows."""
    return tf.image.crop_and_resize(tf.reshape(x, [-1, *IMAGES]), x / 2.0, numbers, (2, 2))


def _given_out(first: Any, given: Any) -> Any:
    """Returns a tensor that existed before the call, as a layer may do."""
    row_labels.mark_call(given, first)
    return first


WEIGHT = tf.Variable(np.linspace(-1.0, 1.0, 16, dtype=np.float32).reshape(4, 4))


def _steps(x: tf.Tensor) -> tf.Tensor:
    """Returns two time steps of two features for each row: `[time, rows, features]`."""
    return tf.transpose(tf.reshape(x, [-1, 2, 2]), [1, 0, 2])


def _repeated(
    change: Callable[..., Any], *values: Any, again: Callable[..., Any] | None = None
) -> Any:
    """Returns the values after three passes of a loop, or as long as `again` says."""
    again = again or (lambda step, *_: step < 3)
    loop = tf.while_loop(again, lambda i, *now: (i + 1, *change(i, *now)), (0, *values))
    return loop[1:]


def _recurrent(x: tf.Tensor, items: Callable[[tf.Tensor], tf.Tensor] = _steps) -> tf.Tensor:
    """Returns the states after each time step, as a list that a loop fills and a tensor of it."""
    steps = items(x)
    count = tf.shape(steps)[0]
    given = tf.TensorArray(tf.float32, count).unstack(steps)
    states = tf.TensorArray(tf.float32, count)

    def change(i: tf.Tensor, state: tf.Tensor, states: tf.TensorArray) -> Any:
        state = tf.tanh(given.read(i) + state @ WEIGHT[: state.shape[-1], : state.shape[-1]])
        return state, states.write(i, state)

    first = tf.zeros_like(steps[0])
    return _repeated(change, first, states, again=lambda i, *_: i < count)[1].stack()


BY_ROWS: dict[str, Callable[[Any], Any]] = {
    "layer that gives out what it is given": lambda x: (lambda y: _given_out(y, y))(x * 2.0),
    "layer that gives out what was before": lambda x: (lambda y: _given_out(y, y + 1.0))(x * 2.0),
    "elementwise": lambda x: tf.exp(x) * 2.0 + tf.constant([1.0, 2.0, 3.0, 4.0]),
    "compared": lambda x: tf.where(x > 0.5, x, tf.zeros_like(x)),
    "mean of features": lambda x: tf.reduce_mean(x, -1),
    "kept axis": lambda x: x / tf.reduce_sum(x, 1, keepdims=True),
    "softmax": lambda x: tf.nn.softmax(x),
    "weights": lambda x: tf.matmul(x, tf.transpose(TABLE)),
    "product of each row": lambda x: tf.matmul(x[:, :, None], x[:, None, :]),
    "product with a matrix": lambda x: tf.matmul(x[:, :, None], tf.ones([1, 3])),
    "column": lambda x: x[:, 1],
    "columns": lambda x: x[..., 1:3],
    "slice": lambda x: tf.slice(x, [0, 1], [-1, 2]),
    "expanded": lambda x: tf.expand_dims(x, -1),
    "squeezed": lambda x: tf.squeeze(x[:, :1], 1),
    "transposed": lambda x: tf.transpose(x[:, :, None], [0, 2, 1]),
    "joined features": lambda x: tf.concat([x, x * 2.0], -1),
    "stacked": lambda x: tf.stack([x, x], 1),
    "unstacked": lambda x: tf.unstack(x, axis=1)[2],
    "split": lambda x: tf.split(x, 2, -1)[1],
    "flattened": lambda x: tf.reshape(x, [-1]),
    "images": lambda x: tf.reshape(x, [-1, *IMAGES]),
    "images of unknown number": lambda x: tf.reshape(x, [tf.shape(x)[0], *IMAGES]),
    "pairs of unknown number": lambda x: tf.reshape(x, [tf.shape(x)[0], -1, 2]),
    "images joined again": lambda x: tf.reshape(tf.reshape(x, [-1, 2]), tf.shape(x)),
    "ones": lambda x: tf.ones((tf.shape(x)[0], 3)) * 0.9,
    "a value for each row": lambda x: tf.fill([tf.shape(x)[0]], 7.0),
    "token broadcast": lambda x: tf.broadcast_to(TABLE[:1], tf.shape(x)),
    "token tiled": lambda x: tf.tile(TABLE[None, :2], [tf.shape(x)[0], 1, 1]),
    "token tiled by joined amounts": lambda x: tf.tile(
        TABLE[None, :2], tf.concat([tf.expand_dims(tf.shape(x)[0], -1), [1, 1]], 0)
    ),
    "token repeated": lambda x: tf.repeat(TABLE[None, :1], tf.shape(x)[0], axis=0),
    "token before": lambda x: tf.concat([tf.ones((tf.shape(x)[0], 1)), x], 1),
    "lookup": lambda x: tf.gather(TABLE, tf.argmax(x, -1)),
    "columns by number": lambda x: tf.gather(x, [2, 0], axis=1),
    "one hot": lambda x: tf.one_hot(tf.argmax(x, -1), 4),
    "convolution": lambda x: tf.nn.conv2d(
        tf.reshape(x, [-1, 2, 2, 1]), tf.ones([2, 2, 1, 3]), 1, "SAME"
    ),
    "crops": lambda x: _cropped(x, tf.range(tf.shape(x)[0])),
    "padded": lambda x: tf.pad(x, [[0, 0], [1, 1]]),
    "repeated features": lambda x: tf.tile(x, [1, 3]),
    "repeated rows": lambda x: tf.repeat(x, 2, 0),
    "cumulated features": lambda x: tf.cumsum(x, axis=1),
    "reversed features": lambda x: tf.reverse(x, [1]),
    "rolled features": lambda x: tf.roll(x, 1, -1),
    "spectrum": lambda x: tf.math.real(tf.signal.fft(tf.complex(x, x))),
    "spectrum of two axes": lambda x: tf.abs(tf.signal.rfft2d(tf.reshape(x, [-1, 2, 2]))),
    "matrices": lambda x: tf.linalg.band_part(x[:, :, None] * x[:, None, :], 1, 0),
    "inverse": lambda x: tf.linalg.inv(tf.linalg.diag(x + 3.0)),
    "equation": lambda x: tf.einsum("bi,ji->bj", x, TABLE),
    "equation of each row": lambda x: tf.einsum("bi,bj->bij", x, x),
    "cross entropy": lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(tf.argmax(x, -1), x),
    "cast": lambda x: tf.cast(x > 0.5, tf.int32),
    "bits": lambda x: tf.bitcast(x, tf.int32),
    "largest features": lambda x: tf.math.top_k(x, 2).values,
    "time step": lambda x: _steps(x)[1],
    "time steps, transposed back": lambda x: tf.transpose(_steps(x), [1, 0, 2]),
    "time steps, unstacked": lambda x: tf.unstack(_steps(x))[0],
    "time steps, stacked": lambda x: tf.transpose(tf.stack([x, x * 2.0]), [1, 0, 2]),
    "time steps, reversed": lambda x: tf.reverse(_steps(x), [0])[0],
    "time steps, added": lambda x: tf.reduce_sum(_steps(x), 0),
    "states of a loop": lambda x: tf.transpose(_recurrent(x), [1, 0, 2]),
    "last state of a loop": lambda x: _recurrent(x)[-1],
    "loop that reads a variable": lambda x: _repeated(lambda i, z: [tf.tanh(z @ WEIGHT) + x], x)[0],
    "loop without variables": lambda x: _repeated(lambda i, z: [tf.tanh(z) + x], x)[0],
    "accuracy": lambda x: keras.metrics.sparse_categorical_accuracy(x[:, 0], x),
}
NOT_BY_ROWS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: tf.reduce_sum(x),
    "mean of rows": lambda x: tf.reduce_mean(x, 0),
    "largest of rows": lambda x: tf.reduce_max(x, 0),
    "likeness": lambda x: tf.matmul(x, x, transpose_b=True),
    "of the first axis": lambda x: tf.matmul(x, x, transpose_a=True),
    "centered": lambda x: x - tf.reduce_mean(x, 0),
    "softmax of rows": lambda x: tf.nn.softmax(x[:, 0]),
    "softmax of the first axis": lambda x: tf.nn.softmax(x, 0),
    "transposed": lambda x: tf.transpose(x),
    "first rows": lambda x: x[:2],
    "every other row": lambda x: x[::2],
    "reversed rows": lambda x: x[::-1],
    "rows by number": lambda x: tf.gather(x, [1, 0]),
    "halves": lambda x: tf.split(x, 2)[0],
    "stacked first": lambda x: tf.stack([x, x], 0),
    "one row": lambda x: x[0],
    "groups of rows": lambda x: tf.reshape(x, [-1, 8]),
    "pairs of rows of two": lambda x: tf.reshape(tf.reshape(x, [-1, 2]), [-1, 8]),
    "numbers of rows": lambda x: tf.range(tf.shape(x)[0]),
    "number of rows for each": lambda x: tf.fill([tf.shape(x)[0]], tf.shape(x)[0]),
    "table repeated": lambda x: tf.tile(TABLE, [tf.shape(x)[0], 1]),
    "column for each row": lambda x: tf.tile(TABLE[:, :1], [1, tf.shape(x)[0]]),
    "repeated along another axis": lambda x: tf.repeat(TABLE[:, :1], tf.shape(x)[0], axis=1),
    "feature first": lambda x: tf.reshape(x, [4, -1]),
    "cumulated": lambda x: tf.cumsum(x, axis=0),
    "sorted": lambda x: tf.sort(x, axis=0),
    "rolled": lambda x: tf.roll(x, 1, 0),
    "rolled, and its features, too": lambda x: tf.roll(x, [1, 1], [0, 1]),
    "spectrum of the rows": lambda x: tf.abs(tf.signal.rfft2d(x)),
    "determinant of all rows": lambda x: tf.linalg.band_part(x, 1, 0),
    "rows counted by another axis": lambda x: tf.reshape(x, [4, tf.shape(x)[0]]),
    "shifted": lambda x: tf.pad(x, [[1, 0], [0, 0]]),
    "broadcast against itself": lambda x: x[:, 0] - x[:, :1],
    "equation over rows": lambda x: tf.einsum("bi,bj->ij", x, x),
    "all pairs": lambda x: tf.einsum("bi,ci->bc", x, x),
    "largest": lambda x: tf.argmax(x, 0),
    "largest rows": lambda x: tf.math.top_k(x[:, 0], 2).values,
    "products by all rows": lambda x: tf.reshape(tf.matmul(x, x, transpose_b=True), [-1]),
    "crops of one image": lambda x: _cropped(x, tf.fill([tf.shape(x)[0]], 1)),
    "crops at given numbers": lambda x: _cropped(x, tf.range(6)),
    "crops in another order": lambda x: _cropped(x, tf.range(tf.shape(x)[0] - 1, -1, -1)),
    "row of the time steps": lambda x: _steps(x)[:, 0],
    "time steps added, with an axis for them": lambda x: tf.reduce_sum(_steps(x), 0, keepdims=True),
    "time steps added over the rows": lambda x: tf.reduce_sum(_steps(x), 1),
    "time steps of reversed rows": lambda x: tf.reverse(_steps(x), [1])[0],
    "time step of a row's choice": lambda x: _steps(x)[tf.cast(tf.argmax(x[0]) % 2, tf.int32)],
    "item of a list by a row's choice": lambda x: (
        tf.TensorArray(tf.float32, 2)
        .unstack(_steps(x))
        .read(tf.cast(tf.argmax(x[0]) % 2, tf.int32))
    ),
    "list of as many zeros as rows": lambda x: tf.TensorArray(
        tf.float32, tf.shape(x)[0], element_shape=[2]
    ).stack(),
    "first rows of a time step": lambda x: _steps(x)[1, :2],
    "sum over time steps and rows": lambda x: tf.reduce_sum(_steps(x) @ WEIGHT[:2, :2], 1),
    "rows as the steps of a loop": lambda x: _recurrent(x, lambda x: x[:, None])[:, 0],
    "loop that mixes rows": lambda x: _repeated(
        lambda i, z: [tf.tanh(z @ WEIGHT) - tf.reduce_mean(z, 0)], x
    )[0],
    "loop that mixes rows in its second pass": lambda x: _repeated(
        lambda i, a, b: [b, tf.tanh(a @ WEIGHT) - tf.reduce_mean(a, 0)], x, x
    )[0],
    "loop until all rows are small": lambda x: _repeated(
        lambda i, z: [0.5 * tf.tanh(z @ WEIGHT)], x, again=lambda i, z: tf.reduce_max(z) > 0.1
    )[0],
    "loop without variables until all rows are small": lambda x: _repeated(
        lambda i, z: [0.5 * z], x, again=lambda i, z: tf.reduce_max(z) > 0.1
    )[0],
    "loop with a pass for each row": lambda x: _repeated(
        lambda i, z: [tf.tanh(z @ WEIGHT)], x, again=lambda i, z: i < tf.shape(x)[0]
    )[0],
    "rank of squeezed rows": lambda x: tf.rank(tf.squeeze(x)),
    "numbered": lambda x: x * tf.range(tf.cast(tf.shape(x)[0], tf.float32))[:, None],
}


def _traced(function: Callable[[Any], Any]) -> tuple[tf.types.experimental.ConcreteFunction, Any]:
    found = []

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        row_labels.begin(x, [])
        result = function(x)
        found.append(row_labels.label_of(result))
        return result

    concrete = step.get_concrete_function(tf.TensorSpec([None, 4], tf.float32))
    return concrete, found[0]


@pytest.mark.parametrize("name", BY_ROWS)
def test_values_labelled_as_rows_depend_only_on_their_own_row(name: str) -> None:
    compute, label = _traced(BY_ROWS[name])
    assert label.kind is Kind.ROWS
    (entries,) = label.parts
    whole = compute(tf.constant(X)).numpy()
    assert len(whole) == entries * len(X)
    parts = [compute(tf.constant(rows)).numpy() for rows in (X[:1], X[1:5], X[5:])]
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-6)


@pytest.mark.parametrize("name", NOT_BY_ROWS)
def test_values_that_depend_on_other_rows_are_not_labelled_as_rows(name: str) -> None:
    _, label = _traced(NOT_BY_ROWS[name])
    assert label.kind not in (Kind.ROWS, Kind.ALIKE)


def test_every_rule_is_tried() -> None:
    used: set[str] = set()
    for function in (*BY_ROWS.values(), *NOT_BY_ROWS.values()):
        compute, _ = _traced(function)
        # This includes the operations inside loops.
        used |= {node.op for node in nodes_of(compute.graph)}
    # One rule may serve several operations.
    of_sequences = row_sequences._OF_SEQUENCES | row_sequences._OF_OTHERS
    for rules_of in (row_rules._RULES, of_sequences):
        tried = {rules_of[kind] for kind in used if kind in rules_of}
        left = {rule.__name__ for rule in {*rules_of.values()} - tried}
        assert left <= {"_each_of_its_input"}


KINDS: dict[str, tuple[Kind, Callable[[Any], Any]]] = {
    "a mean": (Kind.MEAN, lambda x: tf.reduce_mean(x)),
    "means, weighed": (Kind.MEAN, lambda x: 0.5 * tf.reduce_mean(x) + tf.reduce_mean(x**2) / 3.0),
    "a sum": (Kind.SUM, lambda x: tf.reduce_sum(x)),
    "a sum by the rows": (
        Kind.SUM,
        lambda x: tf.reduce_sum(x) / tf.cast(tf.shape(x)[0], tf.float32),
    ),
    "a root": (Kind.GLOBAL, lambda x: tf.sqrt(tf.reduce_mean(x))),
    "a ratio": (Kind.GLOBAL, lambda x: tf.reduce_sum(x) / tf.reduce_sum(x**2)),
    "a product": (Kind.GLOBAL, lambda x: tf.reduce_mean(x) * tf.reduce_mean(x)),
    "the rows": (Kind.COUNT, lambda x: tf.shape(x)[0] * 2),
    "the features": (Kind.ALIKE, lambda x: tf.shape(x)[1] * 2),
    "weights": (Kind.ALIKE, lambda x: tf.reduce_sum(TABLE)),
    "a random number": (Kind.LOCAL, lambda x: tf.random.normal([]) + tf.reduce_mean(x)),
    "centered rows": (Kind.MIXED, lambda x: x - tf.reduce_mean(x, 0)),
    "attention over the rows": (Kind.MIXED, lambda x: tf.nn.softmax(x @ tf.transpose(x)) @ x),
    "rows in an order": (Kind.MIXED, lambda x: tf.gather(x, tf.argsort(x[:, 0]))),
    "their neighbours": (Kind.MIXED, lambda x: tf.gather(x, tf.argmax(x @ tf.transpose(x), 1))),
    "some rows": (Kind.GLOBAL, lambda x: tf.gather(x, tf.where(x[:, 0] > 0)[:, 0])),
    "products of all columns": (Kind.GLOBAL, lambda x: tf.matmul(x, x, transpose_a=True)),
    "their spread": (Kind.GLOBAL, lambda x: tf.reduce_mean((x - tf.reduce_mean(x, 0)) ** 2)),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_label_describes_how_a_value_depends_on_the_rows(name: str) -> None:
    kind, function = KINDS[name]
    _, label = _traced(function)
    assert label.kind is kind


WITHOUT_RULE: dict[str, Callable[[Any], Any]] = {
    "Betainc": lambda x: tf.math.betainc(x, x, x),
    "MatrixSolve": lambda x: tf.linalg.solve(tf.linalg.diag(x + 3.0), x[:, :, None]),
    "ScatterNd": lambda x: tf.scatter_nd([[0]], x[:1], tf.shape(x)),
    "UnsortedSegmentSum": lambda x: tf.math.unsorted_segment_sum(x[:, 0], tf.argmax(x, -1), 4),
}


@pytest.mark.parametrize("name", WITHOUT_RULE)
def test_an_operation_without_a_rule_may_depend_on_all_rows(name: str) -> None:
    """Its value is computed from the rows of all replicas, also if each row has its own value."""
    assert name not in row_rules._RULES
    compute, label = _traced(WITHOUT_RULE[name])
    assert name in {op.type for op in compute.graph.get_operations()}
    assert label.kind is Kind.GLOBAL


@pytest.mark.parametrize(
    ("size", "parts"),
    [
        (lambda x: tf.shape(x)[0], (1,)),
        (lambda x: 3 * tf.shape(x)[0], (3,)),
        (lambda x: (tf.shape(x) * [2, 1])[0], (2,)),
        (lambda x: tf.shape(x)[0] + tf.shape(2 * x)[0], (2,)),
        (lambda x: tf.shape(x[:, 0])[-1], (1,)),
        (lambda x: tf.concat([tf.shape(x)[:1], [2, 2]], 0), (1,)),
        (lambda x: tf.concat([tf.shape(x)[:0], [2 * tf.shape(x)[0], 2]], 0), (2,)),
        (lambda x: tf.concat([tf.shape(x)[:0], [2, tf.shape(x)[0]]], 0), None),
        (lambda x: tf.shape(x)[0] + 1, None),
        (lambda x: tf.cast(1.5 * tf.cast(tf.shape(x)[0], tf.float32), tf.int32), None),
        (lambda x: -tf.shape(x)[0] * -1, None),
        (lambda x: tf.shape(x)[1], None),
    ],
)
def test_a_size_counts_whole_multiples_of_the_rows(
    size: Callable[[Any], Any], parts: tuple[int, ...] | None
) -> None:
    found = []

    def function(x: Any) -> Any:
        found.append(row_labels.parts_counted(size(x)))
        return x

    _traced(function)
    assert found == [parts]


@pytest.mark.parametrize(
    ("size", "may_count"),
    [
        (lambda x: tf.shape(x)[0], True),
        (lambda x: tf.shape(x)[0] // 2 + 1, True),
        (lambda x: tf.shape(x)[1] * 2, False),
        (lambda x: tf.unstack(tf.shape(x))[1], False),
        (lambda x: tf.unstack(tf.shape(x))[0], True),
        (lambda x: tf.shape(tf.transpose(x))[0] * tf.shape(x)[0], True),
    ],
)
def test_a_size_that_may_count_the_rows_is_found(
    size: Callable[[Any], Any], may_count: bool
) -> None:
    found = []

    def function(x: Any) -> Any:
        found.append(row_labels.may_count_rows(size(x)))
        return x

    _traced(function)
    assert found == [may_count]


def test_parts_that_were_concatenated_are_kept_apart() -> None:
    _, label = _traced(lambda x: tf.nn.relu(tf.concat([x, tf.reshape(x, [-1, 2, 2])[:, 0]], -1)))
    assert label.parts == (1,)
    _, label = _traced(lambda x: tf.concat([x, x * 2.0], 0) + 1.0)
    assert label.parts == (1, 1)


@tf.custom_gradient  # type: ignore[untyped-decorator]
def doubled(x: Any) -> Any:
    return 2.0 * x, lambda upstream: -upstream


def test_a_custom_gradient_is_not_mistaken_for_that_of_the_operations() -> None:
    """It depends on the replica's tensors, so it cannot be computed for the global batch."""
    assert _traced(doubled)[1].kind is Kind.ROWS
    _, label = _traced(lambda x: doubled(x - tf.reduce_mean(x, 0)))
    assert label.kind is Kind.LOCAL
    assert "custom gradient" in label.reason


def test_a_value_marked_as_a_formula_is_labelled_by_its_operations() -> None:
    def known(x: Any) -> Any:
        found = doubled(x - tf.reduce_mean(x, 0))
        mark_formula(found)
        return found

    assert _traced(known)[1].kind is Kind.MIXED
