"""Keeps a job's own connections past the proxies that a machine's environment names."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping

_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
EXEMPT, _USUAL = "no_grpc_proxy", "no_proxy"


def go_past_proxies(hosts: Iterable[str], env: MutableMapping[str, str]) -> None:
    """Exempts hosts from the proxies of gRPC, by which TensorFlow's workers reach each other.

    Through a proxy they wait for each other without a word, on 127.0.0.1 too. Call it before
    TensorFlow starts its server.

    Source: https://github.com/grpc/grpc/blob/master/doc/environment_variables.md

    >>> env = {"http_proxy": "http://proxy:3128", "no_proxy": "intranet"}
    >>> go_past_proxies(["h1", "h2", "h1"], env)
    >>> env["no_grpc_proxy"]
    'intranet,h1,h2'
    """
    if not any(env.get(name) for name in _PROXIES):
        return
    known = env.get(EXEMPT, env.get(_USUAL, ""))
    names = [name.strip() for name in known.split(",") if name.strip()]
    env[EXEMPT] = ",".join(dict.fromkeys([*names, *hosts]))
