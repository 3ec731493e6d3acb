"""Tests which operations count as recorded by a tape."""

from __future__ import annotations

import tensorflow as tf

from tfmulti.distribution.tape_records import TapeRecord


def test_only_operations_within_the_blocks_of_a_tape_count_as_recorded() -> None:
    with tf.Graph().as_default() as graph:
        record = TapeRecord(graph, 0)
        before = tf.constant(1.0) * 2.0
        record.begin()
        first = before * 3.0
        record.end()
        between = first * 4.0
        record.end()
        assert not record.is_recording
        record.begin()
        record.begin()
        assert record.is_recording
        second = between * 5.0
        assert [record.has_recorded(t) for t in (before, first, between, second)] == [
            False,
            True,
            False,
            True,
        ]
        record.end()
        assert not record.has_recorded(second * 6.0)
    with tf.Graph().as_default():
        assert record.has_recorded(tf.constant(1.0))


def test_a_tensor_counts_from_the_time_when_it_is_watched() -> None:
    with tf.Graph().as_default() as graph:
        inputs, others = (tf.compat.v1.placeholder("float32", [2]) for _ in range(2))
        record = TapeRecord(graph, 0)
        record.begin()
        early, with_others = tf.reduce_max(inputs), inputs + others
        assert not record.follows(inputs)
        record.watch(inputs, is_followed=False)
        late = tf.reduce_max(inputs)
        assert record.follows(inputs)
        assert [record.has_recorded(t) for t in (early, with_others, late)] == [False, True, True]
        record.watch(with_others, is_followed=True)
        assert record.has_recorded(early + with_others)
