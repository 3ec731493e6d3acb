"""Tests `Cluster`: every rule of TF_CONFIG, and the conversion in both directions."""

from __future__ import annotations

import json

import pytest

from tfmulti.cluster.cluster import Cluster, Task
from tfmulti.cluster.environments import check_trains, find_cluster
from tfmulti.errors import ClusterError


def config(cluster: object, task: object = None) -> str:
    return json.dumps({"cluster": cluster, "task": task or {"type": "worker", "index": 0}})


def test_ranks_put_the_chief_first() -> None:
    text = config({"chief": ["c:1"], "worker": ["a:1", "b:1"]}, {"type": "worker", "index": 1})
    cluster = Cluster.from_tf_config(text)
    assert cluster.addresses == ("c:1", "a:1", "b:1")
    assert (cluster.size, cluster.rank, cluster.is_chief) == (3, 2, False)
    assert cluster.for_rank(0).is_chief
    assert cluster.for_rank(1).task == Task("worker", 0)


def test_worker_zero_is_the_chief_if_none_is_named() -> None:
    assert Cluster.from_tf_config(config({"worker": ["a:1", "b:1"]})).is_chief


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_tf_config_round_trip(rank: int) -> None:
    text = config({"chief": ["c:1"], "worker": ["a:1", "[::1]:2"], "evaluator": ["e:1"]})
    cluster = Cluster.from_tf_config(text).for_rank(rank)
    assert Cluster.from_tf_config(cluster.to_tf_config()) == cluster


def test_accepts_master_extra_keys_and_a_text_index() -> None:
    text = json.dumps(
        {
            "cluster": {"master": ["m:1"], "worker": ["a:1"]},
            "environment": "cloud",
            "job": {},
            "task": {"type": "master", "index": "0", "cloud": "x"},
        }
    )
    cluster = Cluster.from_tf_config(text)
    assert (cluster.chief, cluster.task.type, cluster.size) == ("m:1", "chief", 2)


def test_an_evaluator_is_outside_of_the_cluster() -> None:
    text = config({"worker": ["a:1", "b:1"]}, {"type": "evaluator", "index": 0})
    cluster = Cluster.from_tf_config(text)
    assert cluster.is_evaluator
    assert not cluster.is_chief
    with pytest.raises(ClusterError, match="no rank"):
        _ = cluster.rank
    with pytest.raises(ClusterError, match="the workers evaluate"):
        check_trains(cluster)


TWO = ["a:1", "b:2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON .* character 1"),
        ("[]", "must be a JSON object"),
        ("{}", r"\['cluster'\] is None"),
        (config({}), r"\['cluster'\] is {}"),
        (config({"evaluator": ["e:1"]}), "no worker"),
        (json.dumps({"cluster": {"worker": TWO}}), r"\['task'\] is None"),
        (
            config({"worker": TWO}, {"type": "worker", "index": 2}),
            r"index is 2.*the indices 0 to 1",
        ),
        (config({"worker": TWO}, {"type": "worker", "index": -1}), "index is -1"),
        (config({"worker": TWO}, {"type": "worker", "index": True}), "index is True"),
        (
            config({"worker": TWO}, {"type": "wroker", "index": 0}),
            "'wroker'.*did you mean 'worker'",
        ),
        (config({"worker": TWO}, {"type": "chief", "index": 0}), "no 'chief' job"),
        (config({"worker": TWO, "ps": ["p:1"]}), "'ps'.*Parameter servers"),
        (config({"worker": "a:1"}), "must be a list"),
        (config({"worker": ["a:1", "a:1"]}), r"\[1\] is 'a:1', which .*\[0\] has already"),
        (config({"chief": ["a:1"], "worker": ["a:1"]}), "has already"),
        (config({"worker": ["a"]}), "'a', but an address must be 'host:port'"),
        (config({"worker": ["grpc://a:1"]}), "must be 'host:port'"),
        (config({"worker": [3]}), "is 3, but an address"),
        (config({"worker": ["a:0"]}), "port 0 is outside 1..65535"),
        (config({"worker": ["a:65536"]}), "port 65536 is outside"),
        (config({"worker": ["a:" + "9" * 5000]}), r"port 9{80} is outside 1\.\.65535"),
        (config({"worker": ["a:１"]}), "must be 'host:port'"),
        (config({"worker": ["a\0b:1"]}), "must be 'host:port'"),
        (config({"worker": ["a\\b:1"]}), "must be 'host:port'"),
        (config({"worker": TWO}, {"type": "worker", "index": "²"}), "task.index is '²', but it"),
        (config({"worker": TWO}, {"type": "worker", "index": "1" * 5000}), "task.index is '11"),
        (config({"chief": TWO}, {"type": "chief", "index": 0}), "2 addresses .*one chief"),
        (config({"chief": ["a:1"], "master": ["b:1"]}), "both 'chief' and 'master'"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message) as caught:
        Cluster.from_tf_config(text)
    assert "\n" not in str(caught.value)


def test_for_rank_outside() -> None:
    with pytest.raises(ClusterError, match="rank is 2, but the cluster has 2"):
        Cluster(("a:1", "b:1"), Task("worker", 0)).for_rank(2)


def test_the_environment_is_read_and_not_written() -> None:
    env = {"TF_CONFIG": config({"worker": TWO})}
    before = dict(env)
    cluster, name = find_cluster(env)
    assert cluster is not None
    assert (cluster.size, name, env) == (2, "tf_config", before)


@pytest.mark.parametrize("text", [None, " ", "{}", '{"cluster": {}}'])
def test_no_cluster(text: str | None) -> None:
    env = {} if text is None else {"TF_CONFIG": text}
    assert find_cluster(env) == (None, "")
    check_trains(None)
