"""Tests of `python -m tfmulti.doctor` on one machine, as a user runs it."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.processes import processes, run
from tfmulti.cluster.cluster import Cluster, Task
from tfmulti.doctor import __main__ as command
from tfmulti.doctor import machine
from tfmulti.doctor.finding import FAILED, WARNING, Finding
from tfmulti.doctor.trust import check_trust

pytestmark = pytest.mark.processes

LIMIT_S = 240
TWO_WORKERS = ["-m", "tfmulti.launch", "--nproc-per-node", "2", "-m", "tfmulti.doctor"]


def test_two_replicas_are_tried_by_training(tmp_path: Path) -> None:
    flags = ["--strategy", "mirrored", "--replicas", "2", "--json"]
    done = run(["-m", "tfmulti.doctor", *flags], tmp_path / "logs", limit_s=LIMIT_S, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["status"] in ("ok", "warning")
    found = {each["check"]: each for each in report["findings"]}
    assert found["strategy"]["measured"].startswith("mirrored: ")
    assert "over 2 devices in" in found["all-reduce"]["measured"]
    assert "differ by" in found["numbers"]["measured"]
    names = ("all-reduce", "digits", "numbers", "first step", "loss")
    assert {found[name]["status"] for name in names} == {"ok"}
    first = r"mlp: the first step on 2 devices gave one device's numbers \(\d+ compared\)"
    assert re.fullmatch(first, found["first step"]["measured"])
    assert "examples/s on one device" in found["throughput"]["measured"]
    losses = re.search(r"steps later: ([0-9.]+) → ([0-9.]+)$", found["loss"]["measured"])
    assert losses is not None
    assert float(losses[2]) < float(losses[1])
    assert not list(tmp_path.glob("runs*"))


def test_two_workers_of_the_launcher_are_tried_by_training(tmp_path: Path) -> None:
    done = run(TWO_WORKERS, tmp_path / "logs", limit_s=LIMIT_S, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "multi_worker_mirrored: auto chose" in done.stdout
    assert "every worker reaches every other one" in done.stdout
    assert "8.39 MB over 2 devices" in done.stdout
    assert "WARNING  gRPC ports    TensorFlow will listen on all interfaces" in done.stdout
    assert re.search(
        r"open ports +worker 0 listens at .*:\d+ \(gRPC\); worker 1 listens", done.stdout
    )
    assert "It will train here" in done.stdout


def test_isolated_workers_have_no_open_port(tmp_path: Path) -> None:
    doctor = ["-m", "tfmulti.doctor", "--training=false", "--json"]
    argv = ["-m", "tfmulti.launch", "--isolate", "--nproc-per-node", "2", *doctor]
    done = run(argv, tmp_path / "logs", limit_s=LIMIT_S, cwd=tmp_path)
    if "--isolate: this system does not allow" in done.stderr:
        pytest.skip("network namespaces are not allowed")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing outside of this network reaches them" in done.stdout


def test_the_launcher_shows_a_failed_check_once(tmp_path: Path) -> None:
    """A restart cannot help, and no worker ends before the chief has printed the report."""
    few = ["sh", "-c", 'ulimit -n 200 && exec "$@"', "-"]
    with processes(tmp_path / "logs") as group:
        group.start([*TWO_WORKERS, "--training=false"], cwd=tmp_path, before=few)
        (done,) = group.wait(LIMIT_S)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("It will not train here as it is") == 1, done.stdout
    assert "worker 1: 200 may be open at a time" in done.stdout
    assert "The hard limit is 200. Raise it" in done.stdout
    assert "starting all workers again" not in done.stderr
    assert "ending with exit code 1: a restart cannot help" in done.stderr


def test_the_launcher_keeps_the_report_as_json(tmp_path: Path) -> None:
    flags = ["--json", "--training=false"]
    done = run([*TWO_WORKERS, *flags], tmp_path / "launcher", limit_s=LIMIT_S, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "logs/attempt_0/worker_0/stdout.log").read_text())
    assert (report["workers"], report["status"] in ("ok", "warning")) == (2, True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--modl", "x"], "no flag --modl; did you mean --model?"),
        (["--model", "x"], "no model 'x' for --model; "),
        (["--epochs", "3"], "--epochs has no effect on the doctor. Leave it out."),
        (["--wait_s", "soon"], "--wait_s is 'soon', but it must be seconds above 0."),
        (["--wait_s", "0"], "--wait_s is '0', but it must be seconds above 0."),
        (["now"], "the argument 'now' belongs to no flag."),
        (["--strategy", "one_device", "--replicas", "2"], "--replicas is 2, but --strategy one_d"),
        (["--strategy", "multi_worker_mirrored"], "--strategy multi_worker_mirrored needs a clus"),
    ],
)
def test_mistakes_are_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["doctor", *flags]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"tfmulti: {message}")
    assert err.count("\n") == 1
    assert not out
    # A flag without effect is no advice.
    assert "warmup_steps" not in err


def test_help_lists_the_flags_that_are_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["doctor", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--wait_s" in out
    assert "--run_dir" in out
    assert "--epochs" not in out


def machine_findings(env: dict[str, str] | None = None) -> dict[str, Any]:
    found = machine.check_machine(env or {}, None, None)
    return {each.check: each for each in found}


def test_another_backend_of_keras_is_a_fault() -> None:
    finding = machine_findings({"KERAS_BACKEND": "jax"})["versions"]
    assert (finding.status, finding.measured) == (FAILED, "KERAS_BACKEND is 'jax'")


def test_a_version_that_does_not_fit_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["keras>=99", "nothing-like-this", "torch; extra == 'benchmarks'"]
    monkeypatch.setattr(machine.importlib.metadata, "requires", lambda name: needs)
    finding = machine_findings()["versions"]
    assert finding.status == FAILED
    assert "and >=99 is needed; nothing-like-this is not installed" in finding.measured
    assert "torch" not in finding.measured


def test_a_busy_machine_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    assert machine_findings()["cores"].status == WARNING


@pytest.mark.parametrize(("soft", "status"), [(100, FAILED), (1024, WARNING), (65536, "ok")])
def test_few_open_files_are_named(monkeypatch: pytest.MonkeyPatch, soft: int, status: str) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda what: (soft, 1 << 20))
    finding = machine_findings()["open files"]
    assert (finding.status, finding.advice) == (status, "Run: ulimit -n 65536")


def test_small_shared_memory_and_little_memory_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(total=64 << 20, free=100 << 30)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(machine, "visible_gpus", lambda env: ("0", "1"))
    memory = SimpleNamespace(total=8 << 30, available=1 << 30)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: memory)
    found = machine_findings()
    assert (found["/dev/shm"].status, found["/dev/shm"].measured) == (WARNING, "64 MiB")
    assert found["memory"].status == WARNING
    assert found["memory"].measured == "1.0 of 8.0 GiB are free"


def test_a_file_system_whose_renames_do_nothing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(self: Path, target: Path) -> None:
        target.write_bytes(self.read_bytes())

    monkeypatch.setattr(Path, "replace", replace)
    [finding] = machine._disk(tmp_path, True)
    assert finding.status == FAILED
    assert "a renamed file did not take its new name" in finding.measured


@pytest.mark.parametrize(
    ("proxy", "host"),
    [
        ("http://p.example:3128", "p.example"),
        ("p.example:3128", "p.example"),
        ("http://me:pass/wo#rd@p.example:1", "p.example"),
        ("http://me:p@ss@[::1]:1", "::1"),
        ("http://[::1", "no valid host"),
    ],
)
def test_of_a_proxy_only_the_host_is_shown(proxy: str, host: str) -> None:
    finding = machine_findings({"http_proxy": proxy})["proxies"]
    assert finding.measured == f"the environment names a proxy: http_proxy ({host})"


def test_the_strategy_is_told_without_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--training=false", "--json", "--run_dir", str(tmp_path / "run"), "--replicas", "2"]
    assert command.main(["doctor", *argv]) == 0
    found = {each["check"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert found["strategy"]["measured"] == (
        "mirrored: auto chose mirrored: --replicas 2 means several devices"
    )


ONE_MACHINE = Cluster(("127.0.0.1:2222", "127.0.0.2:2223"), Task("worker", 0))
SEVERAL = Cluster(("10.0.0.1:2222", "10.0.0.2:2222", "10.0.0.3:2222"), Task("worker", 0))
LAN = ["127.0.0.1", "::1", "10.0.0.1", "fe80::1%eth0"]
SECRET = {"TFMULTI_SECRET": "x" * 32}


def trust(cluster: Cluster, env: dict[str, str], addresses: list[str]) -> dict[str, Finding]:
    return {each.check: each for each in check_trust(cluster, env, addresses)}


@pytest.mark.parametrize(
    ("cluster", "advice"),
    [(ONE_MACHINE, "tfmulti launch --isolate"), (SEVERAL, "NetworkPolicy")],
)
def test_open_ports_of_tensorflow_are_named(cluster: Cluster, advice: str) -> None:
    finding = trust(cluster, SECRET, LAN)["gRPC ports"]
    assert finding.status == WARNING
    assert cluster.addresses[1] in finding.measured
    assert "serves anyone who reaches a port" in finding.measured
    assert advice in finding.advice


def test_ports_in_a_network_with_loopback_alone_are_fine() -> None:
    assert trust(ONE_MACHINE, {}, ["127.0.0.1", "::1"])["gRPC ports"].status == "ok"


def test_several_machines_without_a_secret_are_named() -> None:
    finding = trust(SEVERAL, {}, LAN)["secret"]
    assert (finding.status, finding.measured[:26]) == (WARNING, "there is no TFMULTI_SECRET")
    assert "secrets.token_hex()" in finding.advice
    assert trust(SEVERAL, SECRET, LAN)["secret"].status == "ok"
    assert "secret" not in trust(ONE_MACHINE, {}, LAN)


def test_a_hard_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda what: (200, 200))
    advice = machine_findings()["open files"].advice
    assert advice.startswith("The hard limit is 200. Raise it: LimitNOFILE")
    monkeypatch.setattr(machine.resource, "getrlimit", lambda what: (200, 5000))
    assert machine_findings()["open files"].advice == "Run: ulimit -n 5000"


def test_the_holder_of_a_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        assert f"(process {os.getpid()})" in command.holder_of(port)
