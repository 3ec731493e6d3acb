"""Tests sums and gathers between the replicas of a process: all get the same values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.forked import run

pytestmark = pytest.mark.mirrored

CODE = """
import json
import tensorflow as tf
from tfmulti import make_strategy
from tfmulti.distribution import replica_threads

strategy = make_strategy("mirrored", replicas=3, env={})
constant = tf.constant(2.0)  # one tensor, on all replicas
computed = []

def doubled(value):
    computed.append(value)
    return 2 * value

def on_replica():
    n = tf.distribute.get_replica_context().replica_id_in_sync_group
    number = tf.cast(n, tf.float32)
    row = tf.stack([n // 2])
    slices = tf.IndexedSlices(tf.fill([1, 2], 1.0 + number), row, tf.constant([2, 2]))
    halves = tf.constant([4096, 4100, 513], tf.float16)
    given = [10.0**number, n, halves[n], constant, slices]
    total, count, half, same, rows = replica_threads.totals(given)
    all_get = {
        "total": total,
        "doubled": replica_threads.computed_once(lambda: doubled(total)),
        "count": count,
        "half": half,
        "same": same,
        "slices": tf.convert_to_tensor(rows),
        "gathered": replica_threads.gather(tf.stack([n, 7])),
        "gathered constants": replica_threads.gather(constant),
        "rows": replica_threads.gather_rows(tf.fill([n], n)),
    }
    return tf.nest.map_structure(tf.identity, all_get)  # each its own, lest one come out for all

found = tf.function(lambda: strategy.run(on_replica), autograph=False)()
assert len(computed) == 1
parts = {name: strategy.experimental_local_results(value) for name, value in found.items()}
for i in range(3):
    print(json.dumps({name: of_each[i].numpy().tolist() for name, of_each in parts.items()}))
"""


def test_all_replicas_get_the_same(tmp_path: Path) -> None:
    done = run(["-c", CODE], tmp_path, limit_s=60)
    expected = {
        "total": 111.0,
        "doubled": 222.0,
        "count": 3,
        # The values are added in float32 and rounded once. Sums in float16 give 8704 in any order.
        "half": 8712.0,
        "same": 6.0,
        "slices": [[3.0, 3.0], [3.0, 3.0]],
        "gathered": [[0, 7], [1, 7], [2, 7]],
        "gathered constants": [2.0] * 3,
        "rows": [1, 2, 2],
    }
    lines = [json.loads(line) for line in done.stdout.splitlines()[-3:]]
    assert lines == [expected] * 3, done.stderr
