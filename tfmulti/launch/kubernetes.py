"""Prints what Kubernetes needs to run a job: a manifest with a comment for each decision.

    tfmulti kubernetes manifest --workers 4 --gpus 1 --image … -- -m tfmulti.fit --epochs 90
    tfmulti kubernetes manifest --workers 4 --image … -- train.py | kubectl apply -f -
    tfmulti kubernetes manifest --kind jobset --workers 4 --image … -- train.py

`job` is an Indexed Job with a headless Service, which every Kubernetes since 1.31 has. If a pod is
lost, the others end too, each is started again with its index, and they resume from the newest
checkpoint. `jobset` is for clusters with JobSet, which starts all pods again together. The run
directory is on a volume that all pods share: /runs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfmulti.cluster.environments.kubernetes import PORT, SUBDOMAIN, WORKERS
from tfmulti.config.command_line import Parser, exit_code_of, whole_number
from tfmulti.errors import EXIT_FAILED, EXIT_USER, ConfigError, did_you_mean
from tfmulti.launch.heartbeat import PROGRESS_FILE
from tfmulti.launch.scheduled_program import check_program, with_run_dir
from tfmulti.launch.signals import GRACE

_EXAMPLE = (
    "tfmulti kubernetes manifest --workers 2 --image IMAGE -- -m tfmulti.fit …, or a script in the "
    "image"
)
KINDS = ("job", "jobset")
_DOCUMENTS = ("manifest",)
# https://kubernetes.io/docs/concepts/overview/working-with-objects/names/#dns-label-names. Pods
# append their numbers to the name, and the whole may have 63 characters.
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_LABEL_FORM = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_CLAIM = re.compile(rf"(?!.{{254}}){_LABEL_FORM}(\.{_LABEL_FORM})*")
# https://github.com/distribution/reference: a host, a path, and a tag or a digest.
_HOST = r"[a-zA-Z0-9]([a-zA-Z0-9.-]*[a-zA-Z0-9])?(:[0-9]+)?"
_PART = r"[a-z0-9]+((\.|__?|-+)[a-z0-9]+)*"
_TAG = r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?"
_IMAGE = re.compile(rf"(?!.{{256}})({_HOST}/)?{_PART}(/{_PART})*{_TAG}")
# https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
_CORES = re.compile(r"[0-9]{1,7}m|[0-9]{1,4}(\.[0-9]{1,3})?")
_BYTES = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([MGTP]i?)")
# A container with less memory than this cannot start TensorFlow.
_LEAST_BYTES = 2**26
# An Indexed Job has at most this many pods at a time.
_MOST_PODS = 100_000
# The counters of failures have 32 bits.
_MOST_RESTARTS = 10_000
_WEEK_S = 7 * 24 * 3600
_MOUNT, _SCRATCH = "/runs", "/tmp"
_HEARTBEAT = f"{_SCRATCH}/heartbeat"
# A pod has this much less time than Kubernetes gives it until SIGKILL.
_MARGIN_S = 10
_LABEL = "tfmulti.dev/job"
# The time between two probes.
_PROBE_S = 30

# A mapping in a manifest. An entry whose key begins with # is a comment, and its value is None.
_Mapping = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What Kubernetes needs to run a job.

    Attributes:
        program: what each pod runs: `-m` and a module, or a script, with its arguments.
        workers: the number of pods.
        image: the container image, which holds Python, tfmulti and the program.
        gpus: the GPUs of each pod.
        cpus: the cores of each pod, such as 8 or 500m.
        memory: the memory of each pod, such as 32Gi.
        name: the name of the job.
        kind: `job` or `jobset`.
        claim: the name of an existing PersistentVolumeClaim that all pods may write. None makes
            one.
        storage: the size of the claim that is made.
        grace_s: how many seconds a pod has after SIGTERM to save.
        max_restarts: how often the pods are started again.
        start_s: the seconds within which training must begin: loading data and tracing may take
            long. 0 is without a limit, for a program that sends no heartbeats.

    Raises:
        ConfigError: a value breaks a rule of Kubernetes or of this command.
    """

    program: tuple[str, ...]
    workers: int = 2
    image: str = ""
    gpus: int = 0
    cpus: str = "2"
    memory: str = "4Gi"
    name: str = "tfmulti"
    kind: str = "job"
    claim: str | None = None
    storage: str = "20Gi"
    grace_s: int = 120
    max_restarts: int = 10
    start_s: int = 3600

    def __post_init__(self) -> None:
        check_program(self.program, _EXAMPLE)
        if not _IMAGE.fullmatch(self.image):
            raise ConfigError(
                f"--image is {self.image!r}, but it must name a container image with tfmulti, such "
                "as registry.example/tfmulti:1. The Dockerfile of tfmulti makes one."
            )
        for flag, value, low, high in (
            ("workers", self.workers, 1, _MOST_PODS),
            ("gpus", self.gpus, 0, 1000),
            ("grace-s", self.grace_s, 2 * _MARGIN_S, _WEEK_S),
            ("max-restarts", self.max_restarts, 0, _MOST_RESTARTS),
            ("start-s", self.start_s, 0, _WEEK_S),
        ):
            if not low <= value <= high:
                raise ConfigError(
                    f"--{flag} is {value}, but it must be at least {low} and at most {high}."
                )
        for flag, is_right, text, example in (
            ("name", _NAME.fullmatch, self.name, "digits-1, at most 40 of a-z, 0-9 and -"),
            ("claim", _CLAIM.fullmatch, "x" if self.claim is None else self.claim, "runs"),
            ("cpus", _are_cores, self.cpus, "8 or 500m"),
            ("memory", _are_bytes, self.memory, "32Gi, at least 64Mi"),
            ("storage", _are_bytes, self.storage, "100Gi, at least 64Mi"),
        ):
            if not is_right(text):
                raise ConfigError(f"--{flag} is {text!r}, but it must look like {example}.")
        if self.kind not in KINDS:
            raise ConfigError(f"no kind {self.kind!r}; {did_you_mean(self.kind, KINDS)}")

    @property
    def text(self) -> str:
        """The manifest, as YAML."""
        secret = f"kubectl create secret generic {self.name} "
        head = [
            "# Once, before the first start: the pods prove to each other that they know a secret.",
            f'#   {secret}--from-literal=secret="$(openssl rand -hex 32)"',
        ]
        documents = ["\n".join([*head, *_yaml(self._parts[0])])]
        documents += ["\n".join(_yaml(part)) for part in self._parts[1:]]
        return "\n---\n".join(documents) + "\n"

    @property
    def _parts(self) -> list[_Mapping]:
        """The objects of the manifest."""
        claims = [self._volume_claim()] if self.claim is None else []
        if self.kind == "jobset":
            # A JobSet makes its own headless Service.
            return [*claims, self._network_policy(), self._job_set()]
        return [*claims, self._service(), self._network_policy(), self._job()]

    def _header(self, kind: str, api: str = "v1", name: str | None = None) -> _Mapping:
        """Returns the first entries of an object."""
        labels = {"app.kubernetes.io/name": "tfmulti", _LABEL: self.name}
        return {
            "apiVersion": api,
            "kind": kind,
            "metadata": {"name": name or self.name, "labels": labels},
        }

    def _volume_claim(self) -> _Mapping:
        return self._header("PersistentVolumeClaim", name=f"{self.name}-runs") | {
            "spec": {
                "# All pods must see the run directory: any may be the chief.": None,
                "accessModes": ["ReadWriteMany"],
                "resources": {"requests": {"storage": self.storage}},
            }
        }

    def _service(self) -> _Mapping:
        return self._header("Service") | {
            "spec": {
                "# A headless Service gives each pod the name POD.SERVICE.": None,
                "clusterIP": "None",
                "# The pods look for each other before any of them is ready.": None,
                "publishNotReadyAddresses": True,
                "selector": {_LABEL: self.name},
                "ports": [{"name": "tensorflow", "port": PORT}],
            }
        }

    def _network_policy(self) -> _Mapping:
        selector = {"podSelector": {"matchLabels": {_LABEL: self.name}}}
        return self._header("NetworkPolicy", "networking.k8s.io/v1") | {
            "spec": {
                "# TensorFlow's port lets anyone in, so only pods of this job may reach it.": None,
                "# The cluster's network must support policies.": None,
                **selector,
                "policyTypes": ["Ingress"],
                "ingress": [{"from": [selector]}],
            }
        }

    def _job(self) -> _Mapping:
        failures = self.max_restarts * self.workers
        return self._header("Job", "batch/v1") | {
            "spec": self._job_spec(failures, "A restart of the job is a failure of each pod.")
        }

    def _job_set(self) -> _Mapping:
        spec = self._job_spec(0, "The JobSet starts all pods again, so the Job itself does not.")
        return self._header("JobSet", "jobset.x-k8s.io/v1alpha2") | {
            "spec": {
                "failurePolicy": {
                    "maxRestarts": self.max_restarts,
                    "rules": [
                        {
                            "# Exit codes 1 and 2 end the job: another try would fail, too.": None,
                            "name": "errors",
                            "action": "FailJobSet",
                            "onJobFailureReasons": ["PodFailurePolicy"],
                        }
                    ],
                },
                "network": {"enableDNSHostnames": True, "subdomain": self.name},
                "replicatedJobs": [{"name": "worker", "replicas": 1, "template": {"spec": spec}}],
            }
        }

    def _job_spec(self, failures: int, why: str) -> _Mapping:
        """Returns the specification of an Indexed Job."""
        return {
            "# Each pod has an index, its rank, and the hostname JOB-INDEX.": None,
            "completionMode": "Indexed",
            "completions": self.workers,
            "parallelism": self.workers,
            f"# {why}": None,
            "backoffLimit": failures,
            "podFailurePolicy": {
                "rules": [
                    {
                        "# 1: the program failed. 2: a mistake of the user. Neither passes.": None,
                        "action": "FailJob",
                        "onExitCodes": {
                            "containerName": "worker",
                            "operator": "In",
                            "values": [EXIT_FAILED, EXIT_USER],
                        },
                    },
                    {
                        "# The node is drained or lost: this does not count as a failure.": None,
                        "action": "Ignore",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    },
                    # Any other code makes a new pod with the same index. 143: everything is saved.
                    # 138: another pod was lost.
                ]
            },
            "template": {
                "metadata": {"labels": {_LABEL: self.name}},
                "spec": self._pod(),
            },
        }

    def _pod(self) -> _Mapping:
        """Returns the specification of a pod."""
        volumes: list[_Mapping] = [
            {
                "name": "runs",
                "persistentVolumeClaim": {"claimName": self.claim or f"{self.name}-runs"},
            },
            {"name": "scratch", "emptyDir": {}},
        ]
        if self.gpus > 1:
            volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory"}})
        return {
            "# The Job makes a new pod, by its policy above.": None,
            "restartPolicy": "Never",
            "subdomain": self.name,
            "# After SIGTERM a worker saves a checkpoint after the step, and ends with 143.": None,
            "terminationGracePeriodSeconds": self.grace_s,
            "# Linux drops SIGTERM to PID 1 until Python runs, so PID 1 is the pod's own.": None,
            "shareProcessNamespace": True,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "runAsGroup": 1000,
                "# The group may write to the volume.": None,
                "fsGroup": 1000,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "automountServiceAccountToken": False,
            "containers": [self._container()],
            "volumes": volumes,
        }

    def _container(self) -> _Mapping:
        """Returns the container of a worker."""
        amounts: _Mapping = {"cpu": self.cpus, "memory": self.memory}
        if self.gpus:
            amounts["nvidia.com/gpu"] = self.gpus
        mounts = [
            {"name": "runs", "mountPath": _MOUNT},
            {"name": "scratch", "mountPath": _SCRATCH},
        ]
        if self.gpus > 1:
            # NCCL's channels between the GPUs of one machine need more than the usual 64 MB.
            mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
        return {
            "name": "worker",
            "image": self.image,
            "# The shim ends with 138 if another pod is lost: this one starts again, too.": None,
            "command": ["python", "-m", "tfmulti.launch.shim", *self._program()],
            "env": self._env(),
            "ports": [{"name": "tensorflow", "containerPort": PORT, "protocol": "TCP"}],
            "resources": {"requests": dict(amounts), "limits": amounts},
            "volumeMounts": mounts,
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            **self._startup_probe(),
            "# A step may take ten minutes, or five times as long as the longest before.": None,
            "livenessProbe": _probe("alive", 3),
        }

    def _startup_probe(self) -> _Mapping:
        """Returns the entry of the startup probe, or nothing if training may begin at any time."""
        if not self.start_s:
            return {}
        return {
            f"# Training must begin within {self.start_s} s: see --start-s.": None,
            "startupProbe": _probe("started", -(-self.start_s // _PROBE_S)),
        }

    def _env(self) -> list[_Mapping]:
        """Returns the environment variables of a worker."""
        secret = {"secretKeyRef": {"name": self.name, "key": "secret"}}
        values = {
            WORKERS: str(self.workers),
            SUBDOMAIN: self.name,
            PROGRESS_FILE: _HEARTBEAT,
            GRACE: str(self.grace_s - _MARGIN_S),
            "HOME": _SCRATCH,
            "PYTHONUNBUFFERED": "1",
        }
        return [
            {"name": "TFMULTI_SECRET", "valueFrom": secret},
            *({"name": name, "value": value} for name, value in values.items()),
        ]

    def _program(self) -> list[str]:
        """Returns the program's words, with a run directory on the shared volume."""
        arguments = with_run_dir(self.program, f"{_MOUNT}/{self.name}")
        # Kubernetes replaces $(NAME) in a command, and makes one $ of two.
        return [word.replace("$", "$$") for word in arguments]


def _are_cores(text: str) -> bool:
    """Returns whether a text is an amount of cores for Kubernetes: whole thousandths, not 0.

    >>> [_are_cores(text) for text in ("8", "0.5", "500m", "0", "0.5m", "2Gi")]
    [True, True, True, False, False, False]
    """
    return bool(_CORES.fullmatch(text)) and float(text.removesuffix("m")) > 0


def _are_bytes(text: str) -> bool:
    """Returns whether a text is an amount of memory or storage that a worker can use.

    >>> [_are_bytes(text) for text in ("32Gi", "1.5T", "4m", "4", "0Gi", "4Mi", "٤Gi")]
    [True, True, False, False, False, False, False]
    """
    match = _BYTES.fullmatch(text)
    if not match:
        return False
    base = 1024 if "i" in match[2] else 1000
    amount: float = float(match[1]) * base ** ("MGTP".index(match[2][0]) + 2)
    # Kubernetes counts bytes in 64 bits.
    return _LEAST_BYTES <= amount < 2**63


def _probe(condition: str, failures: int) -> _Mapping:
    """Returns a probe that looks at the heartbeat file."""
    return {
        "exec": {"command": ["python", "-m", "tfmulti.launch.probe", condition]},
        "periodSeconds": _PROBE_S,
        "timeoutSeconds": 10,
        "failureThreshold": failures,
    }


# What YAML reads as a text without quotes, unless it is one of its words.
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9._/-]*")
_RESERVED = ("true", "false", "yes", "no", "on", "off", "y", "n", "null")


def _yaml(value: Mapping[str, Any], indent: str = "") -> list[str]:
    r"""Returns the lines of a mapping as YAML.

    >>> print("\n".join(_yaml({"# why": None, "a": ["x", {"b": 1}], "c": {"d": "y: z"}})))
    # why
    a:
      - x
      - b: 1
    c:
      d: "y: z"
    """
    lines = []
    for key, entry in value.items():
        if key.startswith("#"):
            lines.append(f"{indent}{key}")
        elif isinstance(entry, dict) and entry:
            lines += [f"{indent}{key}:", *_yaml(entry, f"{indent}  ")]
        elif isinstance(entry, list):
            lines += [f"{indent}{key}:", *_items(entry, f"{indent}  ")]
        else:
            lines.append(f"{indent}{key}: {_scalar(entry)}")
    return lines


def _items(values: list[Any], indent: str) -> list[str]:
    """Returns the lines of a list as YAML."""
    lines = []
    for entry in values:
        if isinstance(entry, dict):
            inner = _yaml(entry, f"{indent}  ")
            first = next(at for at, line in enumerate(inner) if not line.lstrip().startswith("#"))
            lines += [line[2:] for line in inner[:first]]
            lines += [f"{indent}- {inner[first].lstrip()}", *inner[first + 1 :]]
        else:
            lines.append(f"{indent}- {_scalar(entry)}")
    return lines


def _scalar(value: Any) -> str:
    """Returns a value as YAML. A text that could be read as anything else is a JSON string."""
    is_plain = isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _RESERVED
    return str(value) if is_plain else json.dumps(value)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    return exit_code_of(lambda: print(parsed(arguments).text, end=""))


def parsed(arguments: Sequence[str]) -> Manifest:
    """Returns the manifest that a command line describes.

    Raises:
        ConfigError: a value breaks a rule, or no program is given.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    values = vars(_parser().parsed(arguments[:end]))
    document = values.pop("document")
    if document not in _DOCUMENTS:
        raise ConfigError(
            f"no document {document!r}; {did_you_mean(document, _DOCUMENTS)} Write tfmulti "
            "kubernetes manifest, and then the flags."
        )
    return Manifest(program=tuple(arguments[end + 1 :]), **values)


def _parser() -> Parser:
    """Returns the parser of the flags before `--`."""
    parser = Parser("tfmulti kubernetes", __doc__ or "", program=_EXAMPLE)
    # The defaults are those of `Manifest`.
    parser.argument_default = argparse.SUPPRESS
    add = parser.add_argument
    add("document", nargs="?", default="", help="what is printed: manifest")
    add("--workers", type=whole_number, help="pods, each one worker (default 2)")
    add("--image", help="container image with Python, tfmulti and the program")
    add("--gpus", type=whole_number, help="GPUs of each pod (default 0)")
    add("--cpus", help="cores of each pod (default 2)")
    add("--memory", help="memory of each pod (default 4Gi)")
    add("--name", help="name of the job (default tfmulti)")
    add("--kind", help="job or jobset (default job)")
    add("--claim", help="existing volume claim that all pods may write (default: one is made)")
    add("--storage", help="size of the volume that is made (default 20Gi)")
    add("--grace-s", type=whole_number, help="seconds to save after SIGTERM (default 120)")
    add("--max-restarts", type=whole_number, help="restarts of the job (default 10)")
    add("--start-s", type=whole_number, help="seconds until training begins; 0: no limit")
    return parser


if __name__ == "__main__":
    sys.exit(main())
