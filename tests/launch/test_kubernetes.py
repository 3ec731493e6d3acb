"""Tests that the manifests for Kubernetes are valid, and that their pods train.

No Kubernetes runs here. The commands of the pods run as processes in network namespaces, with the
hostnames, the environment and the privileges of the manifest, and are restarted by its policy.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch.test_init_process import BLOCKED
from tests.support import networks
from tests.support.kubernetes import check, check_object
from tests.support.networks import Hosts
from tests.support.pods import LIMIT_S, Pods, expanded, pod_of, why_not
from tests.support.processes import ROOT, clean_env, listening_in, processes
from tfmulti.cluster.cluster import Cluster
from tfmulti.cluster.environments import check_trains, described
from tfmulti.cluster.environments.kubernetes import PORT
from tfmulti.errors import EXIT_PEER_LOST, ClusterError, ConfigError
from tfmulti.launch.kubernetes import Manifest, main

WHY_NOT = why_not()
EPOCHS = 12
FIT = ("-m", "tfmulti.fit")
IMAGE = "example/tfmulti:1"


def parts_of(**options: Any) -> dict[str, Any]:
    """Returns the objects of a manifest by their kinds."""
    wanted = {"program": FIT, "image": IMAGE, **options}
    found = list(yaml.safe_load_all(Manifest(**wanted).text))
    return {part["kind"]: part for part in found}


MANIFESTS: list[dict[str, Any]] = [
    {},
    {"gpus": 8, "workers": 16},
    {"claim": "data.claim-1"},
    {"kind": "jobset", "workers": 3},
    {"workers": 100_000, "max_restarts": 10_000, "start_s": 604_800, "grace_s": 604_800},
]


@pytest.mark.parametrize("options", MANIFESTS)
def test_the_objects_are_valid(options: dict[str, Any]) -> None:
    """They fit the schemas of the oldest and the newest supported Kubernetes, and its rules."""
    parts = parts_of(**options)
    is_set = options.get("kind") == "jobset"
    assert set(parts) >= ({"NetworkPolicy", "JobSet"} if is_set else {"Service", "Job"})
    assert ("PersistentVolumeClaim" in parts) == ("claim" not in options)
    check(list(parts.values()))


def test_the_pods_of_a_job_set_find_each_other() -> None:
    """Each pod has the name that JobSet gives it (https://jobset.sigs.k8s.io/docs/concepts/)."""
    job_set = parts_of(kind="jobset", workers=3)["JobSet"]
    spec, name = job_set["spec"], job_set["metadata"]["name"]
    [job] = spec["replicatedJobs"]
    assert job["template"]["spec"]["completions"] == 3
    assert spec["network"]["enableDNSHostnames"] is True
    subdomain = spec["network"]["subdomain"]
    [container] = job["template"]["spec"]["template"]["spec"]["containers"]
    given = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    names = [f"{name}-{job['name']}-0-{index}" for index in range(3)]
    for index, hostname in enumerate(names):
        found = described(given | {"HOSTNAME": hostname, "JOB_COMPLETION_INDEX": str(index)})
        assert found is not None
        assert isinstance(found.job, Cluster)
        assert found.job.rank == index
        assert found.job.addresses == tuple(f"{each}.{subdomain}:{PORT}" for each in names)


# A path to a field, the value that it gets, and what Kubernetes says. None removes the field.
JOB, SET = ("Job", "spec"), ("JobSet", "spec")
POD = (*JOB, "template", "spec")
WORKER = (*POD, "containers", 0)
RULE = (*JOB, "podFailurePolicy", "rules", 0)
SET_JOB = (*SET, "replicatedJobs", 0, "template", "spec")
SET_RULE = (*SET, "failurePolicy", "rules", 0)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((*RULE, "action"), "FailJobb", "action 'FailJobb'"),
        ((*RULE, "onExitCode"), 1, "onExitCode"),
        ((*RULE, "onExitCodes", "containerName"), "nope", "containerName"),
        ((*RULE, "onExitCodes", "operator"), "in", "operator 'in'"),
        ((*RULE, "onExitCodes", "values"), [2, 1], "values"),
        ((*RULE, "onExitCodes", "values"), [0, 1], "values"),
        ((*JOB, "completionMode"), "indexed", "completionMode 'indexed'"),
        ((*JOB, "completions"), None, "completions"),
        ((*JOB, "completions"), 100_001, "completions"),
        ((*JOB, "parallelism"), 100_001, "parallelism"),
        ((*JOB, "backoffLimit"), 10**12, "backoffLimit 1000000000000"),
        ((*JOB, "template", "metadata", "labels"), {"a": "b"}, "selector"),
        ((*POD, "restartPolicy"), "never", "restartPolicy 'never'"),
        ((*POD, "restartPolicy"), "OnFailure", "restartPolicy of a Job"),
        ((*POD, "restartPolicy"), None, "restartPolicy is missing"),
        ((*POD, "subdomain"), "other", "subdomain"),
        ((*POD, "volumes", 0, "name"), "other", "volume 'runs'"),
        ((*POD, "volumes", 1, "name"), "runs", "volumes"),
        ((*POD, "volumes", 0, "persistentVolumeClaim", "claimName"), "x", "claimName 'x'"),
        ((*WORKER, "volumeMounts", 1, "mountPath"), "/runs", "mountPath"),
        ((*WORKER, "resources", "limits", "memory"), "x", "quantity 'x'"),
        ((*WORKER, "env", 1, "value"), 4, "4 is not"),
        ((*WORKER, "env", 1, "name"), "TFMULTI_SECRET", "env"),
        ((*WORKER, "startupProbe", "failureThreshold"), 0, "startupProbe"),
        (("PersistentVolumeClaim", "spec", "accessModes"), ["RWX"], "accessModes 'RWX'"),
        (("NetworkPolicy", "spec", "policyTypes"), ["ingress"], "policyTypes 'ingress'"),
        (("NetworkPolicy", "spec", "podSelector", "matchLabels"), {"a": "b"}, "selector"),
        (("Service", "spec", "selector"), {"a": "b"}, "selector"),
        (("Service", "metadata", "name"), "A", "name"),
        ((*SET_RULE, "action"), "FailJobSett", "action 'FailJobSett'"),
        ((*SET_RULE, "name"), "a-b", "name 'a-b'"),
        ((*SET_RULE, "onJobFailureReasons"), ["X"], "onJobFailureReasons 'X'"),
        ((*SET, "failurePolicy", "maxRestarts"), "3", "should be a valid integer"),
        ((*SET, "replicatedJobs"), None, "replicatedJobs"),
        ((*SET, "foo"), 1, "spec.foo: 1"),
        ((*SET_JOB, "completionMode"), "indexed", "completionMode\n"),
        ((*SET_JOB, "template", "spec", "restartPolicy"), None, "restartPolicy is missing"),
    ],
)
def test_a_wrong_manifest_is_not_valid(
    path: tuple[str | int, ...], value: object, message: str
) -> None:
    """The checks of these tests see a fault in each place."""
    parts: Any = parts_of(kind="jobset" if path[0] == "JobSet" else "job")
    *folder, last = path
    inner = functools.reduce(lambda found, key: found[key], folder, parts)
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    with pytest.raises(ValueError, match=re.escape(message)):
        check(list(parts.values()))


def test_the_parts_belong_together() -> None:
    parts = parts_of(name="digits", workers=3, grace_s=60)
    spec, pod = parts["Job"]["spec"], pod_of(parts["Job"])
    assert parts["Service"]["spec"]["publishNotReadyAddresses"] is True
    rules = parts["NetworkPolicy"]["spec"]
    assert rules["podSelector"] == rules["ingress"][0]["from"][0]["podSelector"]
    assert pod["subdomain"] == "digits"
    assert spec["completions"] == spec["parallelism"] == 3
    # The worker must have saved before Kubernetes kills it.
    grace = next(e for e in pod["containers"][0]["env"] if e["name"] == "TFMULTI_GRACE_S")
    assert int(grace["value"]) < pod["terminationGracePeriodSeconds"] == 60
    assert pod["containers"][0]["command"][-2:] == ["--run_dir", "/runs/digits"]


def tf_job(**replicas: int) -> dict[str, Any]:
    """Returns the TFJob of the page of docs, with other replicas."""
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    found: dict[str, Any] = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    specs = found["spec"]["tfReplicaSpecs"]
    if replicas:
        specs |= {name: specs["Worker"] | {"replicas": n} for name, n in replicas.items()}
    return found


def tf_configs(job: dict[str, Any]) -> list[str]:
    """Returns the TF_CONFIG of each pod that trains or evaluates, as the operator sets it.

    A job of one replica gets none, and an evaluator does not belong to the cluster. See
    pkg/controller.v1/tensorflow/tensorflow.go of Kubeflow's training operator v1.
    """
    spec, name = job["spec"], job["metadata"]["name"]
    counts = {kind.lower(): one["replicas"] for kind, one in spec["tfReplicaSpecs"].items()}
    if sum(counts.values()) == 1:
        return []
    cluster = {
        kind: [f"{name}-{kind}-{index}.default.svc:2222" for index in range(count)]
        for kind, count in counts.items()
        if kind != "evaluator"
    }
    found = []
    for kind, count in counts.items():
        for index in range(count) if kind != "ps" else ():
            task = {"type": kind, "index": index}
            config = {"cluster": cluster, "task": task, "environment": "cloud"}
            if spec.get("enableDynamicWorker"):
                sparse = {"worker": {str(index): cluster[kind][index]}, "ps": []}
                config = {"sparseCluster": sparse, "task": task}
            found.append(json.dumps(config))
    return found


@pytest.mark.parametrize(
    ("replicas", "chief"),
    [
        ({}, "digits-worker-0"),
        ({"Chief": 1, "Worker": 3}, "digits-chief-0"),
        ({"Master": 1, "Worker": 3}, "digits-master-0"),
        ({"PS": 0}, "digits-worker-0"),
        ({"Evaluator": 1}, "digits-worker-0"),
    ],
)
def test_the_pods_of_a_tfjob_form_a_cluster(replicas: dict[str, int], chief: str) -> None:
    job = tf_job(**replicas)
    check_object(job)
    read = [described({"TF_CONFIG": config}) for config in tf_configs(job)]
    clusters = [found.job for found in read if found and isinstance(found.job, Cluster)]
    workers = [cluster for cluster in clusters if not cluster.is_evaluator]
    assert sorted(cluster.rank for cluster in workers) == [0, 1, 2, 3]
    assert len({cluster.addresses for cluster in workers}) == 1
    assert workers[0].addresses[0] == f"{chief}.default.svc:2222"
    assert len(clusters) - len(workers) == replicas.get("Evaluator", 0)
    for cluster in clusters:
        with pytest.raises(ClusterError) if cluster.is_evaluator else contextlib.nullcontext():
            check_trains(cluster)


def test_a_tfjob_of_one_pod_trains_alone() -> None:
    job = tf_job(Worker=1)
    check_object(job)
    assert tf_configs(job) == []
    assert described({"HOSTNAME": "digits-worker-0"}) is None


def test_a_tfjob_with_dynamic_workers_is_refused() -> None:
    job = tf_job()
    job["spec"]["enableDynamicWorker"] = True
    check_object(job)
    for config in tf_configs(job):
        with pytest.raises(ClusterError, match="sparseCluster, which lists this worker alone"):
            described({"TF_CONFIG": config})


TF_WORKER = ("tfReplicaSpecs", "Worker")
TF_CONTAINER = (*TF_WORKER, "template", "spec", "containers", 0)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((*TF_WORKER, "restartPolicy"), "Exitcode", "restartPolicy 'Exitcode'"),
        ((*TF_WORKER, "replicas"), "4", "spec.tfReplicaSpecs.Worker.replicas: '4'"),
        ((*TF_WORKER, "template", "spec", "container"), [], "spec.container: []"),
        ((*TF_CONTAINER, "name"), "worker", "container tensorflow"),
        ((*TF_CONTAINER, "volumeMounts", 0, "name"), "x", "'x'"),
        (("tfReplicaSpecs", "Workers"), {"template": {"spec": {"containers": []}}}, "'Workers'"),
        (("runPolicy", "cleanPodPolicy"), "none", "cleanPodPolicy 'none'"),
        (("runPolicy", "backofLimit"), 3, "spec.runPolicy.backofLimit: 3"),
        (("enableDynamicWorkers",), True, "spec.enableDynamicWorkers: True"),
    ],
)
def test_a_wrong_tfjob_is_not_valid(
    path: tuple[str | int, ...], value: object, message: str
) -> None:
    job = tf_job()
    *folder, last = path
    inner: Any = job["spec"]
    functools.reduce(lambda found, key: found[key], folder, inner)[last] = value
    with pytest.raises(ValueError, match=re.escape(message)):
        check_object(job)


def test_no_secret_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFMULTI_SECRET", "hidden")
    assert "hidden" not in Manifest(program=FIT, image="i").text


ODD = ["train.py", 'a: "b"\n- c', "yes", "null", "'", "1", "#", "%", "\u2028", "&x", "-"]
ODD += ["$", "$(HOME)", "$$(HOME)", "a$$b"]


def test_the_programs_arguments_are_not_changed() -> None:
    command = pod_of(parts_of(program=tuple(ODD))["Job"])["containers"][0]["command"]
    assert [expanded(word) for word in command[3:]] == ODD


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--image i", "no program was given. Write it after --"),
        ("--image i -- -m", "no program was given"),
        ("-- a.py", "--image is '', but it must name a container image"),
        ("--image 'i j' -- a.py", "--image is 'i j'"),
        ("--image i --workers 0 -- a.py", "--workers is 0, but it must be at least 1"),
        ("--image i --workers 100001 -- a.py", "--workers is 100001, but it must be at least 1"),
        ("--image i --workers x -- a.py", "--workers: 'x' is not a whole number. See tfmulti "),
        ("--image i --gpus -1 -- a.py", "--gpus: '-1' is not a whole number"),
        ("--image i --gpus 1001 -- a.py", "--gpus is 1001, but it must be at least 0"),
        ("--image i --grace-s 5 -- a.py", "--grace-s is 5, but it must be at least 20"),
        ("--image i --max-restarts 10001 -- a.py", "--max-restarts is 10001, but it must be at"),
        ("--image i --max-restarts 1000000000000 -- a.py", "--max-restarts: '1000000000000' is "),
        ("--image i --start-s 604801 -- a.py", "--start-s is 604801, but it must be at least 0"),
        ("--image i --name Digits -- a.py", "--name is 'Digits', but it must look like digits-1"),
        ("--image i --claim /x -- a.py", "--claim is '/x', but it must look like runs"),
        ("--image i --claim a..b -- a.py", "--claim is 'a..b', but it must look like runs"),
        ("--image i --claim '' -- a.py", "--claim is '', but it must look like runs"),
        (
            "--image i --kind jobs -- a.py",
            "no kind 'jobs'; did you mean 'job'? Known: job, jobset.",
        ),
        ("--image i --wrokers 3 -- a.py", "no flag --wrokers; did you mean --workers? Known: "),
        ("--image i --work 3 -- a.py", "no flag --work; did you mean --workers? Known: "),
        ("--image i train.py", "unexpected argument 'train.py'. Write the program after --: tfm"),
        ("--image i -m a", "unexpected argument '-m'. Write the program after --: tfmulti kuber"),
        ("--image i -- -m tfmulti.fit --epoch 3", "no flag --epoch; did you mean --epochs?"),
        ("--image i -- -m tfmulti.fit --epochs 0", "--epochs is 0, but it must be at least 1."),
        ("--image", "--image: expected one argument. See tfmulti kubernetes --help."),
        *(
            (f"--image i --{flag} {value} -- a.py", f"--{flag} is '{value}', but it must look like")
            for flag, values in (
                ("memory", ("4GB", "4m", "4", "0", "0Gi", "4Mi", "٤Gi", "1e3Gi", "9999999999Gi")),
                ("cpus", ("0", "0m", "0.0", "2Gi", "1.5m", "٢", "0.0001", "x")),
                ("storage", ("0", "0Gi", "20", "20GB", "5m", "9000000Pi")),
            )
            for value in values
        ),
        *(
            (f"--image '{image}' -- a.py", f"--image is '{image}', but it must name a container")
            for image in (
                "I",
                "I/UPPER:x:y",
                "a:b:c",
                "a//b",
                "a/",
                "a:",
                "é",
                "a@sha256:1",
                "a" * 256,
            )
        ),
    ],
)
def test_a_mistake_is_one_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_mistake(["manifest", *shlex.split(words)], message, capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no document ''; known: manifest. Write tfmulti kubernetes manifest, and then"),
        (["manifst", "--image", "i"], "no document 'manifst'; did you mean 'manifest'?"),
    ],
)
def test_what_to_print_must_be_given(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_mistake(words, message, capsys)


def check_mistake(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"tfmulti: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "options",
    [
        {"cpus": "500m", "memory": "512Mi", "storage": "1.5T"},
        {"cpus": "0.5", "memory": "64Mi", "claim": "a.b-1"},
        {"image": "registry.example:5000/a_b/c--d/tfmulti:1.2-x"},
        {"image": f"localhost/a@sha256:{'0' * 64}"},
        {"workers": 100_000, "max_restarts": 10_000},
    ],
)
def test_values_that_kubernetes_takes(options: dict[str, Any]) -> None:
    spec = parts_of(**options)["Job"]["spec"]
    assert spec["backoffLimit"] < 2**31
    assert pod_of({"spec": spec})["containers"][0]["image"] == options.get("image", IMAGE)


@pytest.mark.parametrize(("start_s", "failures"), [(3600, 120), (31, 2), (0, None)])
def test_the_time_until_training_begins(start_s: int, failures: int | None) -> None:
    """Without a limit there is no startup probe: a program may send no heartbeats."""
    container = pod_of(parts_of(start_s=start_s)["Job"])["containers"][0]
    assert container.get("startupProbe", {}).get("failureThreshold") == failures
    assert "livenessProbe" in container


def test_a_name_that_fits_gives_hostnames_that_fit() -> None:
    """A JobSet's pod is NAME-worker-0-INDEX, and a hostname has at most 63 characters."""
    Manifest(program=FIT, image="i", name="a" * 40)
    assert len("a" * 40 + "-worker-0-9999999") <= 63
    with pytest.raises(ConfigError, match="--name"):
        Manifest(program=FIT, image="i", name="a" * 41)


def test_the_steps_of_the_dockerfile(tmp_path: Path) -> None:
    """The copied files are enough to build the package. No other step of the file runs here."""
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    allowed = (ROOT / ".dockerignore").read_text().split()
    source = tmp_path / "src"
    source.mkdir()
    for word, text in steps:
        if word == "COPY":
            *names, target = text.split()
            assert all(f"!{name.removeprefix('./')}" in allowed for name in names)
            subprocess.run(["cp", "-r", *names, str(source / target)], cwd=ROOT, check=True)
    first, second = [text for word, text in steps if word == "RUN"]
    pip = f"{shlex.quote(sys.executable)} -m pip install --dry-run --no-deps --quiet"
    install = first.replace("pip install", pip)
    [default] = [text for word, text in steps if word == "ARG" and text.startswith("EXTRAS=")]
    [of_gpus] = re.findall(r"--build-arg (EXTRAS=\S+)", (ROOT / "Dockerfile").read_text())
    known = importlib.metadata.metadata("tfmulti").get_all("Provides-Extra") or []
    for extras in (default.partition("=")[2], of_gpus.partition("=")[2]):
        # pip would only warn of an extra that it does not know.
        assert set(extras.split(",")) <= set(known)
        env = clean_env({"EXTRAS": extras})
        subprocess.run(["sh", "-euc", install], cwd=source, env=env, check=True)
    subprocess.run(["sh", "-nc", second], check=True)
    (command,) = [json.loads(text) for word, text in steps if word == "CMD"]
    of_pod = pod_of(parts_of()["Job"])["containers"][0]["command"]
    assert command[2:] == of_pod[: len(command) - 2]
    # tests/launch/test_init_process.py runs these words before the shim.
    assert command[:2] == BLOCKED
    users = [text for word, text in steps if word == "USER"]
    uid = pod_of(parts_of()["Job"])["securityContext"]["runAsUser"]
    assert users == [str(uid)]


def _listens(process: int) -> bool:
    """Returns whether TensorFlow's port is open in the network of a process."""
    tables = [Path(f"/proc/{process}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    return any(port == PORT for table in tables for _, port, _ in listening_in(table))


def in_networks(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test of pods in network namespaces, and skips it if they are not allowed."""
    return pytest.mark.hosts(pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))(test))


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Hosts]:
    folder = tmp_path / "network"
    folder.mkdir()
    with networks.hosts(2, folder) as made:
        yield made


@in_networks
def test_pods_that_are_killed_and_drained_end_with_one_devices_numbers(
    two: Hosts, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    program = ("-m", "tests.support.slow_training", "/runs/job", str(EPOCHS))
    job = parts_of(program=program, name="job")["Job"]
    progress = runs / "job" / "progress.txt"

    def epochs() -> int:
        return progress.read_text().count("\n") if progress.exists() else 0

    with processes(tmp_path / "logs") as group:
        pods = Pods(job, tmp_path, two, group)

        def wait_for_epochs(count: int) -> None:
            deadline = time.monotonic() + LIMIT_S
            while epochs() < count:
                assert time.monotonic() < deadline, group.logs()
                time.sleep(0.1)

        pods.start(0, 1)
        assert pods.probe("startupProbe", 1) == 1
        assert pods.probe("livenessProbe", 1) == 0
        wait_for_epochs(3)
        assert (pods.probe("startupProbe", 1), pods.probe("livenessProbe", 1)) == (0, 0)
        # The system's memory is used up, for example: it kills the program, and not the shim.
        os.kill(pods.wait_for_program(1), signal.SIGKILL)
        killed = pods.wait()
        assert killed == {0: EXIT_PEER_LOST, 1: 128 + signal.SIGKILL}, group.logs()
        assert [pods.action(code) for code in killed.values()] == ["Count", "Count"]

        pods.start(0, 1)
        wait_for_epochs(epochs() + 3)
        # A node is drained: its pod gets SIGTERM.
        pods.end(0)
        drained = pods.wait()
        assert drained == {0: 143, 1: 143}, group.logs()
        assert pods.action(143) == "Count"

        pods.start(0, 1)
        assert pods.wait() == {0: 0, 1: 0}, group.logs()

        argv = ["-m", "tests.support.slow_training", str(tmp_path / "one"), str(EPOCHS)]
        pods.running = {0: group.start(argv)}
        assert pods.wait() == {0: 0}, group.logs()
    found = json.loads((runs / "job" / "result.json").read_text())
    one = json.loads((tmp_path / "one" / "result.json").read_text())
    assert found["loss"] == pytest.approx(one["loss"], rel=1e-4)


PRIVILEGES = """
import os, pathlib, socket
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status"))
assert (os.getuid(), os.getgid(), os.getppid() > 1) == (1000, 1000, True)
assert [int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd")] == [0, 0, 0]
assert status["NoNewPrivs"].strip() == "1"
for folder in ("/", "/usr", "/etc", "/venv", "/src"):
    assert os.statvfs(folder).f_flag & os.ST_RDONLY, folder
for folder in ("/runs", os.environ["HOME"]):
    (pathlib.Path(folder) / "new").touch()
assert socket.gethostbyname("job-1.job").startswith("10.")
"""


@in_networks
def test_a_pod_has_the_privileges_of_the_manifest(two: Hosts, tmp_path: Path) -> None:
    """So the other tests of pods show what a container of Kubernetes could do."""
    job = parts_of(program=("/runs/own.py",), name="job")["Job"]
    with processes(tmp_path / "logs") as group:
        pods = Pods(job, tmp_path, two, group)
        (pods.runs / "own.py").write_text(PRIVILEGES)
        pods.start(0)
        assert pods.wait() == {0: 0}, group.logs()


@in_networks
def test_the_pods_of_the_pages_command_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text().replace("\\\n", "")
    (line,) = re.findall(r"^python -m tfmulti kubernetes (manifest .*)$", page, re.MULTILINE)
    assert main(shlex.split(line.replace("--epochs 90", "--epochs 2"))) == 0
    parts = list(yaml.safe_load_all(capsys.readouterr().out))
    check(parts)
    job = parts[-1]
    pods_count = job["spec"]["completions"]
    (tmp_path / "network").mkdir()
    with (
        networks.hosts(pods_count, tmp_path / "network") as made,
        processes(tmp_path / "logs") as group,
    ):
        pods = Pods(job, tmp_path, made, group)
        pods.start(*range(pods_count))
        assert set(pods.wait().values()) == {0}, group.logs()
    report = json.loads((tmp_path / "runs" / "digits" / "report.json").read_text())
    assert (report["workers"], report["epochs"]) == (4, 2)


@in_networks
@pytest.mark.parametrize("waits", [False, True], ids=["imports", "waits"])
def test_sigterm_ends_a_pod_that_has_not_begun(two: Hosts, tmp_path: Path, waits: bool) -> None:
    """Linux drops SIGTERM to the first process of a container unless the process handles it."""
    job = parts_of(program=("/runs/own.py",), name="job")["Job"]
    with processes(tmp_path / "logs") as group:
        pods = Pods(job, tmp_path, two, group)
        (pods.runs / "own.py").write_text("import tfmulti\ntfmulti.make_strategy()\n")
        pods.start(0)
        pods.wait_for_program(0)
        if waits:
            deadline = time.monotonic() + LIMIT_S
            # The worker listens, but the other pod does not come.
            while not _listens(pods.wait_for_program(0)):
                assert time.monotonic() < deadline, group.logs()
                time.sleep(0.1)
        began = time.monotonic()
        pods.end(0)
        assert pods.wait() == {0: 143}, group.logs()
        assert time.monotonic() - began < 5


@in_networks
def test_a_mistake_ends_the_job(two: Hosts, tmp_path: Path) -> None:
    job = parts_of(program=(*FIT, "--environment", "slurm"), name="job")["Job"]
    with processes(tmp_path / "logs") as group:
        pods = Pods(job, tmp_path, two, group)
        pods.start(0, 1)
        assert pods.wait() == {0: 2, 1: 2}, group.logs()
    assert pods.action(2) == pods.action(1) == "FailJob"
