"""Keeps the connections between workers away from the proxies that the environment names."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping

PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
EXEMPT, _USUAL = "no_grpc_proxy", "no_proxy"


def go_past_proxies(hosts: Iterable[str], env: MutableMapping[str, str]) -> None:
    """Adds hosts to the list of those that gRPC reaches without a proxy.

    TensorFlow's workers reach each other by gRPC. Through a proxy they would wait for each other
    without any message, even on 127.0.0.1. Call this function before TensorFlow starts its server.

    Args:
        hosts: the hosts of the workers.
        env: the environment to change. Nothing changes if it names no proxy.

    Source: https://github.com/grpc/grpc/blob/master/doc/environment_variables.md

    >>> env = {"http_proxy": "http://proxy:3128", "no_proxy": "intranet"}
    >>> go_past_proxies(["h1", "h2", "h1"], env)
    >>> env["no_grpc_proxy"]
    'intranet,h1,h2'
    """
    if not any(env.get(name) for name in PROXIES):
        return
    known = env.get(EXEMPT, env.get(_USUAL, ""))
    names = [name.strip() for name in known.split(",") if name.strip()]
    env[EXEMPT] = ",".join(dict.fromkeys([*names, *hosts]))
