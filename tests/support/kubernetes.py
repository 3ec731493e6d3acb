"""Checks objects as Kubernetes would: by their schemas, and by rules that stand in no schema.

The schemas of Kubernetes give types alone, so its API server checks values, and names that belong
together, by rules of its own: https://kubernetes.io/docs/reference/kubernetes-api. The schemas of
a JobSet and of a TFJob are classes, which Kubeflow generates from them and publishes on PyPI.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import kubernetes_validate
from kubeflow.training import ApiClient
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

Object = dict[str, Any]
VERSIONS = ("1.31", "1.35")
_INT32 = 2**31
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_RULE = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?")
# The values that a field of a name may have, wherever it stands.
_CHOICES: dict[str, tuple[str, ...]] = {
    "accessModes": ("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"),
    "action": ("FailJob", "FailIndex", "Ignore", "Count"),
    "completionMode": ("Indexed", "NonIndexed"),
    "medium": ("", "Memory"),
    "operator": ("In", "NotIn"),
    "policyTypes": ("Ingress", "Egress"),
    "protocol": ("TCP", "UDP", "SCTP"),
    # Pods of a Job may not have Always.
    "restartPolicy": ("Never", "OnFailure"),
    "status": ("True", "False", "Unknown"),
}
# https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/ and JobSet's webhook.
_CHOICES_OF_JOB_SET: dict[str, tuple[str, ...]] = {
    "action": (
        *("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
        *("RestartJob", "RestartJobAndIgnoreMaxRestarts"),
    ),
    "onJobFailureReasons": (
        *("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes"),
        *("MaxFailedIndexesExceeded", "PodFailurePolicy"),
    ),
    "operator": ("All", "Any"),
    "restartStrategy": ("Recreate", "BlockingRecreate", "InPlaceRestart"),
}
# https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/tensorflow/
_CHOICES_OF_TF_JOB: dict[str, tuple[str, ...]] = {
    "cleanPodPolicy": ("All", "Running", "None"),
    "restartPolicy": ("Always", "ExitCode", "Never", "OnFailure"),
    "successPolicy": ("", "AllWorkers"),
}
_REPLICAS = ("Chief", "Evaluator", "Master", "PS", "Worker")


def check(parts: Sequence[Object]) -> None:
    """Checks the objects of a manifest.

    Raises:
        ValueError: Kubernetes would refuse an object, or two of them do not belong together.
    """
    for part in parts:
        check_object(part)
    jobs = [job for part in parts for job in _jobs(part)]
    labels = [job["spec"]["template"]["metadata"]["labels"] for job in jobs]
    claims = [part["metadata"]["name"] for part in parts if part["kind"] == _CLAIM]
    for part in parts:
        if part["kind"] == "Service":
            _expect(all(_selects(part["spec"]["selector"], each) for each in labels), "selector")
            for job in jobs:
                pod = job["spec"]["template"]["spec"]
                _expect(pod["subdomain"] == part["metadata"]["name"], "subdomain")
        if part["kind"] == "NetworkPolicy":
            selectors = [part["spec"]["podSelector"]]
            selectors += [
                one["podSelector"] for rule in part["spec"]["ingress"] for one in rule["from"]
            ]
            for selector in selectors:
                _expect(all(_selects(selector["matchLabels"], each) for each in labels), "selector")
    for job in jobs:
        for volume in job["spec"]["template"]["spec"]["volumes"]:
            name = volume.get("persistentVolumeClaim", {}).get("claimName")
            _expect(name is None or not claims or name in claims, f"claimName {name!r}")


def check_object(part: Object) -> None:
    """Checks one object by its schema and by the rules of the API server.

    Raises:
        ValueError: Kubernetes would refuse the object.
    """
    if part["kind"] == "JobSet":
        _check_job_set(part)
    if part["kind"] == "TFJob":
        _check_tf_job(part)
    for one in [*_jobs(part), *_pods(part)] if part["kind"] in ("JobSet", "TFJob") else [part]:
        for version in VERSIONS:
            try:
                kubernetes_validate.validate(one, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                raise ValueError(error.message) from None
        _check_fields(one)
    for job in _jobs(part):
        _check_job(job["spec"])
    for pod in _pods(part):
        _check_pod(pod["spec"])


_CLAIM = "PersistentVolumeClaim"


def _jobs(part: Object) -> list[Object]:
    """Returns the Jobs that an object is or makes."""
    templates = [part] if part["kind"] == "Job" else []
    if part["kind"] == "JobSet":
        templates = [one["template"] for one in part["spec"]["replicatedJobs"]]
    about = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}}
    return [about | template for template in templates]


def _pods(part: Object) -> list[Object]:
    """Returns the Pods that an object makes, one for each template."""
    templates = [job["spec"]["template"] for job in _jobs(part)]
    if part["kind"] == "TFJob":
        templates = [one["template"] for one in part["spec"]["tfReplicaSpecs"].values()]
    about = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
    return [about | {"spec": template["spec"]} for template in templates]


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    """Gives all fields of an object and of the objects inside."""
    for key, entry in value.items() if isinstance(value, dict) else ():
        yield key, entry
    for entry in value.values() if isinstance(value, dict) else value:
        if isinstance(entry, dict | list):
            yield from _fields(entry)


def _check_fields(part: Object) -> None:
    """Checks the values of fields by their names alone."""
    _expect(_NAME.fullmatch(part["metadata"]["name"]) is not None, "name")
    _check_choices(part, _CHOICES)
    for key, entry in _fields(part):
        if key in ("requests", "limits"):
            for amount in entry.values():
                _expect(_QUANTITY.fullmatch(str(amount)) is not None, f"quantity {amount!r}")
        if type(entry) is int and key != "port" and key != "containerPort":
            _expect(0 <= entry < _INT32, f"{key} {entry}")


def _check_job_set(part: Object) -> None:
    _check_no_other_fields(part, JobsetV1alpha2JobSet.from_dict(part).to_dict())
    spec = part["spec"]
    _expect(bool(spec.get("replicatedJobs")), "replicatedJobs")
    for rule in spec.get("failurePolicy", {}).get("rules", ()):
        _expect(_RULE.fullmatch(rule["name"]) is not None, f"name {rule['name']!r}")
    _check_choices({**spec, "replicatedJobs": []}, _CHOICES_OF_JOB_SET)


def _check_tf_job(part: Object) -> None:
    with ApiClient() as client:
        response = SimpleNamespace(data=json.dumps(part))
        read = client.deserialize(response, "KubeflowOrgV1TFJob")
        _check_no_other_fields(part, client.sanitize_for_serialization(read))
    spec = part["spec"]
    replicas = {name: {**one, "template": {}} for name, one in spec["tfReplicaSpecs"].items()}
    _check_choices({**spec, "tfReplicaSpecs": replicas}, _CHOICES_OF_TF_JOB)
    # https://github.com/kubeflow/trainer/blob/release-1.9/pkg/webhooks/tensorflow/tfjob_webhook.go
    _expect(not {"Chief", "Master"} <= set(replicas), "Chief and Master")
    for name, one in spec["tfReplicaSpecs"].items():
        _expect(name in _REPLICAS, f"replicas {name!r}")
        containers = one["template"]["spec"]["containers"]
        # The operator adds TF_CONFIG to this one.
        _expect(any(each["name"] == "tensorflow" for each in containers), "container tensorflow")


def _check_no_other_fields(part: Object, read: Object) -> None:
    """Checks that a class has read all of an object. It drops unknown fields, and converts types.

    Raises:
        ValueError: it has not. The message has the first field that differs.
    """
    for path, value in _leaves(part):
        found: Any = read
        for key in path:
            found = found.get(key) if isinstance(found, dict) else found[key]
        is_same = type(found) is type(value) and found == value
        _expect(is_same, f"{'.'.join(map(str, path))}: {value!r}")


def _leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Gives the path and the value of each field that has no fields."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, entry in entries:
        if isinstance(entry, dict | list) and entry:
            yield from _leaves(entry, (*path, key))
        else:
            yield (*path, key), entry


def _check_choices(part: Object, choices: Mapping[str, Sequence[str]]) -> None:
    """Checks the values of fields that have a few possible values."""
    for key, entry in _fields(part):
        for value in entry if isinstance(entry, list) else [entry]:
            _expect(key not in choices or value in choices[key], f"{key} {value!r}")


def _check_job(spec: Object) -> None:
    pod = spec["template"]["spec"]
    if spec.get("completionMode") == "Indexed":
        _expect(0 < spec.get("completions", 0) <= 100_000, "completions")
        _expect(spec.get("parallelism", 1) <= 100_000, "parallelism")
    _expect("restartPolicy" in pod, "restartPolicy is missing")
    if "podFailurePolicy" in spec:
        _expect(pod["restartPolicy"] == "Never", "restartPolicy of a Job with podFailurePolicy")
        names = [container["name"] for container in pod["containers"]]
        for rule in spec["podFailurePolicy"]["rules"]:
            _expect(("onExitCodes" in rule) != ("onPodConditions" in rule), "rule")
            codes = rule.get("onExitCodes", {"values": [1]})
            _expect(codes.get("containerName", names[0]) in names, "containerName")
            _expect(codes["values"] == sorted(set(codes["values"])) != [], "values")
            _expect(codes.get("operator") != "In" or 0 not in codes["values"], "values")


def _check_pod(spec: Object) -> None:
    volumes = [volume["name"] for volume in spec.get("volumes", [])]
    _expect(len(volumes) == len(set(volumes)), "volumes")
    for container in spec["containers"]:
        mounts = container.get("volumeMounts", [])
        for mount in mounts:
            _expect(mount["name"] in volumes, f"volume {mount['name']!r}")
        paths = [mount["mountPath"] for mount in mounts]
        _expect(len(paths) == len(set(paths)), "mountPath")
        names = [entry["name"] for entry in container.get("env", [])]
        _expect(len(names) == len(set(names)), "env")
        for probe in ("startupProbe", "livenessProbe"):
            _expect(container.get(probe, {}).get("failureThreshold", 1) >= 1, probe)


def _selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return bool(selector) and selector.items() <= labels.items()


def _expect(is_right: bool, what: str) -> None:
    if not is_right:
        raise ValueError(f"Kubernetes refuses: {what}")
