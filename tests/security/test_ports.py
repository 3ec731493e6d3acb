"""Tests which ports a job opens and who reaches them, and that connections avoid proxies."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launching import launch, wait_for
from tests.support.processes import processes, run_workers
from tfmulti.cluster.listening import listen, names_loopback
from tfmulti.cluster.proxies import go_past_proxies
from tfmulti.distribution import connections
from tfmulti.distribution.strategies import Placement
from tfmulti.errors import ConfigError
from tfmulti.launch import isolation
from tfmulti.launch.addresses import why_silent
from tfmulti.launch.flags import parse

pytestmark = pytest.mark.processes

LIMIT_S = 120
# No program listens at this port.
DEAD_PROXY = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("own", "hosts", "bound"),
    [
        ("127.0.0.1", ["127.0.0.1", "127.0.0.1"], "127.0.0.1"),
        ("127.0.0.2", ["127.0.0.2"], "127.0.0.2"),
        ("127.0.0.2", ["127.0.0.1", "127.0.0.2"], "127.0.0.2"),
        ("localhost", ["localhost", "127.0.0.1"], "127.0.0.1"),
        # On Debian a machine's own name means 127.0.1.1, at which no other machine can reach it.
        ("127.0.1.1", ["127.0.1.1", "192.0.2.1"], None),
        # The machine is behind network address translation.
        ("192.0.2.1", ["192.0.2.1", "192.0.2.2"], None),
        ("no.such.name.invalid", ["no.such.name.invalid"], None),
    ],
)
def test_a_job_listens_where_its_workers_call(
    own: str, hosts: list[str], bound: str | None
) -> None:
    with listen(own, hosts) as server:
        assert server.getsockname()[0] == bound or (
            bound is None and server.getsockname()[0] in ("::", "0.0.0.0")
        )


def test_workers_of_this_machine_connect_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers with another machine's name do not use loopback."""
    asked: list[list[str]] = []
    monkeypatch.setattr(connections, "listen", lambda own, hosts: asked.append([own, *hosts]))
    here, there = socket.gethostname(), "192.0.2.1"
    for hosts in ([here, here], [there, there], [here, there], ["localhost", here]):
        addresses = tuple(f"{host}:{port}" for port, host in enumerate(hosts, 1))
        placement = Placement(0, 2, 1, addresses=addresses)
        # The stand-in for `listen` returns None, which is not a listener.
        with pytest.raises(AttributeError):
            connections._connect(placement)
    loopback = ["127.0.0.1"] * 3
    assert asked == [loopback, [there] * 3, [here, here, there], loopback]


def test_a_port_in_use_is_reported() -> None:
    with listen("127.0.0.1", ["127.0.0.1"]) as first, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", ["127.0.0.1"], first.getsockname()[1])


# A worker that listens on all interfaces at its port of TF_CONFIG, as TensorFlow's server does.
LISTENS = """
import json, os, pathlib, socket, sys, time
config = json.loads(os.environ["TF_CONFIG"])
port = int(config["cluster"]["worker"][config["task"]["index"]].rpartition(":")[2])
server = socket.create_server(("0.0.0.0", port))
with socket.create_connection(("127.0.0.1", port), 5):
    pathlib.Path(sys.argv[1]).write_text(str(port))
while not os.path.exists(sys.argv[1] + ".seen"):
    time.sleep(0.05)
"""


def why_not() -> str | None:
    """Returns why this machine does not allow `--isolate`, or None."""
    words = "from tfmulti.launch.isolation import isolate; isolate()"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)
    return (done.stderr.strip().splitlines() or ["?"])[-1] if done.returncode else None


@pytest.mark.parametrize("isolated", [False, True])
def test_isolated_workers_reach_each_other_and_nobody_reaches_them(
    tmp_path: Path, isolated: bool
) -> None:
    if isolated and (reason := why_not()):
        pytest.skip(reason)
    script, told = tmp_path / "listens.py", tmp_path / "port"
    script.write_text(LISTENS)
    flags = ["--isolate"] if isolated else []
    flags += ["--log-dir", str(tmp_path / "logs"), str(script), str(told)]
    with processes(tmp_path / "launcher") as group:
        group.start(["-m", "tfmulti.launch", *flags])
        wait_for(lambda: told.exists() and told.read_text() != "")
        assert bool(why_silent(f"127.0.0.1:{told.read_text()}")) is isolated
        Path(f"{told}.seen").touch()
        [done] = group.wait(LIMIT_S)
    assert done.returncode == 0, done.stderr


def test_isolation_that_is_not_allowed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(flags: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(isolation, "_unshare", refused)
    with pytest.raises(ConfigError, match=r"allow a separate network \(Operation not"):
        isolation.isolate()
    with pytest.raises(ConfigError, match="--isolate takes the network away, but --hosts names"):
        parse(["--isolate", "--hosts", "a:1,b:1", "-m", "x"], "", {})


MEETS = """
import json, sys
from tfmulti import make_strategy
import tensorflow as tf
strategy = make_strategy()
total = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.ones(())))
print(json.dumps(float(strategy.experimental_local_results(total)[0])))
"""


@pytest.mark.parametrize(
    "proxies",
    [
        {"http_proxy": DEAD_PROXY, "no_proxy": "example.org"},
        {"grpc_proxy": DEAD_PROXY, "no_grpc_proxy": "example.org"},
    ],
)
def test_workers_connect_without_the_proxy(tmp_path: Path, proxies: dict[str, str]) -> None:
    """The workers have TF_CONFIG and no launcher. Through the proxy they would wait for ever."""
    script = tmp_path / "meets.py"
    script.write_text(MEETS)
    for done in run_workers([str(script)], 2, tmp_path / "logs", limit_s=LIMIT_S, env=proxies):
        assert json.loads(done.stdout.splitlines()[-1]) == 2.0


# The program listens, like a worker that waits in TensorFlow for a worker behind a proxy.
WAITS = """
import json, os, socket, time
config = json.loads(os.environ["TF_CONFIG"])
port = int(config["cluster"]["worker"][config["task"]["index"]].rpartition(":")[2])
server = socket.create_server(("127.0.0.1", port))
time.sleep(1e6)
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_waits_for_ever_before_the_first_step_is_named(
    tmp_path: Path, workers: int
) -> None:
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    flags = ["--nproc-per-node", str(workers), "--start-timeout", "3", "--max-restarts", "0"]
    done = launch(tmp_path, *flags, str(script))
    assert done.returncode == 1
    assert re.search(r"worker \d has done nothing for 3 s \(--start-timeout\)", done.stderr)
    assert done.stderr.count("the main thread of worker ") == workers
    assert 'waits.py", line 6 in <module>' in done.stderr


def test_hosts_are_names_or_addresses() -> None:
    assert [names_loopback(host) for host in ("localhost", "127.0.0.2", "::1")] == [True] * 3
    assert not names_loopback("no-such-host.invalid")


def test_the_environment_is_left_alone_without_a_proxy() -> None:
    env = {"http_proxy": "", "no_proxy": "intranet"}
    go_past_proxies(["a"], env)
    assert env == {"http_proxy": "", "no_proxy": "intranet"}
