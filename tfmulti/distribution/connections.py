"""This process' connections to the other workers (`channel`), and what their errors become.

While an exchange waits TensorFlow is asked each second whether all workers live, so one that dies
or freezes ends the step with TensorFlow's own error, within its own time.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfmulti.cluster.cluster import host_of
from tfmulti.cluster.job_secret import proof, secret_of
from tfmulti.cluster.listening import LOOPBACK, is_here, listen
from tfmulti.distribution.strategies import Placement
from tfmulti.distribution.transport.channel import Channel, ChannelError
from tfmulti.distribution.transport.rendezvous import connect_workers

_GROUP_KEY = 0x7466_6D75  # TensorFlow counts its own from 1

_connected: dict[tuple[str, ...], Channel | None] = {}
_ended: set[tuple[str, ...]] = set()  # by an error: to be connected anew
_raised: list[BaseException] = []  # in an operation, since `own_errors` was entered


def channel_of(placement: Placement) -> Channel | None:
    """Returns connections to all other workers; None where one cannot reach another.

    And where TensorFlow's collectives serve: in a process by itself, for several replicas each and
    on GPUs. All workers call it; the first time they connect.
    """
    if placement.workers == 1 or placement.local_replicas > 1 or placement.gpus:
        return None
    if placement.addresses not in _connected:
        with tf.init_scope():
            _connected[placement.addresses] = _connect(placement)
    return _connected[placement.addresses]


def channel_now(placement: Placement) -> Channel:
    """Returns the connections that there are, for what runs in a step.

    Raises:
        LinkError: there are none any more.
    """
    links = _connected.get(placement.addresses)
    if links is None:
        raise ChannelError(
            "the connections to the other workers have ended, and cannot be had again"
        )
    return links


def _connect(placement: Placement) -> Channel | None:
    """Returns connections to all other workers; None where one cannot reach another."""
    hosts = [host_of(address) for address in placement.addresses]
    if len(set(hosts)) == 1 and is_here(hosts[0]):
        hosts = [LOOPBACK] * len(hosts)  # no other machine has a part in the job
    listener = listen(hosts[placement.rank], hosts)
    port, token = listener.getsockname()[1], np.frombuffer(secrets.token_bytes(16), np.int32)
    told = _tell(placement, "where", [placement.rank, port, *token])
    told = told[np.argsort(told[:, 0])]  # TensorFlow's order is that of words: 1, 10, 2
    where = list(zip(hosts, told[:, 1].tolist(), strict=True))
    # TensorFlow's collectives can be listened to: without a secret this keeps out other jobs only.
    key = proof(secret_of(os.environ).encode(), b"workers", told[0, 2:].tobytes())
    try:
        found = connect_workers(listener, placement.rank, where, key)
    except ChannelError as error:
        logging.warning("gradients travel by gRPC, which is slower: %s", error)
        found = None
    if not _tell(placement, "reached", [found is not None]).all() or found is None:
        for link in (found or {}).values():
            link.close()
        return None
    return Channel(found, lambda: _check(placement))


def _check(placement: Placement) -> None:
    """Raises TensorFlow's error where it has found a worker dead or frozen."""
    _tell(placement, "alive", [1], alone=True)


def _tell(
    placement: Placement, what: str, values: Sequence[int], *, alone: bool = False
) -> np.ndarray:
    """Returns what each worker tells, in rows of any order, by TensorFlow's own collective.

    Args:
        alone: to itself. Like every collective, it fails once a worker is lost.
    """
    with tf.device("CPU:0"):
        found = tf.raw_ops.CollectiveGatherV2(
            input=tf.constant([values], tf.int32),
            group_size=1 if alone else placement.workers,
            group_key=_GROUP_KEY + (1 + placement.rank if alone else 0),
            instance_key=zlib.crc32(what.encode()) & 0x7FFF_FFFF,
            ordering_token=[],
        )
    return found.numpy()  # type: ignore[no-any-return]


def noting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of which TensorFlow may lose the type of what it raises."""

    def noting(*values: Any) -> Any:
        try:
            return function(*values)
        except BaseException as error:
            _raised.append(error)
            raise

    return noting


@contextlib.contextmanager
def call_of_all(placement: Placement, name: str) -> Iterator[None]:
    """Inside is a call that all workers must make: where one did not, the error says so.

    Raises:
        tf.errors.OpError: of the same type, with what to do.
    """
    try:
        yield
    except tf.errors.OpError as error:
        advice = "on all workers alike, not only on the chief"
        aborted = "Collective ops is aborted" in error.message
        if placement.workers == 1 or not aborted or advice in error.message:
            raise
        words = error.message[error.message.index("Collective ops is aborted") :].splitlines()[0]
        raise type(error)(
            error.node_def,
            error.op,
            f"another worker has ended, or did not come to {name}(). Call {name}() {advice}; if a "
            f"worker has failed, its own log says why. TensorFlow says: {words}",
        ) from None


@contextlib.contextmanager
def own_errors(placement: Placement) -> Iterator[None]:
    """Inside, a call into TensorFlow raises what an operation of this module has raised.

    A call that fails while it runs ends the connections: others that wait for what it would have
    sent hear of it. The next call, to which all workers come, connects anew.

    Raises:
        tf.errors.UnavailableError: another worker has ended, or such a call of its has failed.
    """
    if placement.addresses in _ended:
        channel_of(placement)
        _ended.discard(placement.addresses)
    try:
        yield
    except (tf.errors.OpError, KeyboardInterrupt):
        for addresses, links in list(_connected.items()):
            if links is not None:
                links.close()
                _ended.add(addresses)
                del _connected[addresses]
        if not _raised:
            raise
        first = _raised[0]
        if isinstance(first, ChannelError):
            raise tf.errors.UnavailableError(None, None, str(first)) from None
        raise first from None
    finally:
        _raised.clear()
