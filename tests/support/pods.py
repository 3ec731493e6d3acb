"""Runs the pods of a Job's manifest as processes, each in a container of namespaces.

A container has the network and the hostname of its pod, volumes, and what the security context of
the manifest asks for: its user, a read-only root, and no capabilities. Its command has a PID
namespace in which another process is the first one, as with `shareProcessNamespace`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.support import networks
from tests.support.networks import Hosts
from tests.support.processes import ROOT, Processes, children_of, clean_env, program_of

LIMIT_S = 120
SECRET = "a secret that only the pods of this job know"
# The root of a container: programs of this machine, the virtual environment, the sources, and the
# volumes. $1 is the root, and $2 the file of hosts; then come a folder, its place and ro or rw for
# each mount.
_CONTAINER = """
set -eu
sleep infinity &
pause=$!
root=$1; hosts=$2; shift 2
mount -t tmpfs root "$root"
for name in usr bin sbin lib lib64 etc dev sys; do
    if [ -L "/$name" ]; then
        cp -P "/$name" "$root/$name"
    elif [ -d "/$name" ]; then
        mkdir "$root/$name"
        mount --rbind "/$name" "$root/$name"
    fi
done
for name in usr etc; do mount -o remount,ro,bind "$root/$name"; done
mount --bind "$hosts" "$root/etc/hosts"
mkdir "$root/proc"
mount -t proc proc "$root/proc"
while [ "$1" != -- ]; do
    mkdir -p "$root$2"
    mount --bind "$1" "$root$2"
    mount -o "remount,$3,bind" "$root$2"
    shift 3
done
shift
mount -o remount,ro "$root"
code=0
chroot "$root" "$@" || code=$?
kill -KILL "$pause"
exit "$code"
"""
_VENV, _SOURCES = "/venv", "/src"
_PYTHON = f"{_VENV}/bin/python"


def why_not() -> str | None:
    """Returns why no pods can run here, or None."""
    for name in ("unshare", "setpriv", "nsenter"):
        if shutil.which(name) is None:
            return f"{name} is not installed (apt-get install util-linux)"
    return networks.why_not()


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    """Returns the specification of the pods of a Job."""
    pod: dict[str, Any] = job["spec"]["template"]["spec"]
    return pod


def expanded(word: str) -> str:
    """Returns a word of a command as Kubernetes passes it to a container.

    https://kubernetes.io/docs/tasks/inject-data-application/define-command-argument-container/
    """
    assert not re.search(r"(?<!\$)(\$\$)*\$\(", word), f"{word} names a variable"
    return word.replace("$$", "$")


class Pods:
    """The pods of a Job, which this class starts and restarts as Kubernetes would."""

    def __init__(self, job: dict[str, Any], folder: Path, hosts: Hosts, group: Processes) -> None:
        self._job, self._folder, self._hosts, self._group = job, folder, hosts, group
        self._container = pod_of(job)["containers"][0]
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.count = 0
        # The files of the volume `runs`.
        self.runs = self._made("runs")
        pods = range(job["spec"]["completions"])
        names = [f"{self.hostname(i)}.{pod_of(job)['subdomain']}" for i in pods]
        lines = [f"{hosts.address(i + 1)} {names[i]}\n" for i in pods]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))

    def hostname(self, index: int) -> str:
        return f"{self._job['metadata']['name']}-{index}"

    def start(self, *indices: int) -> None:
        """Starts a pod with each index, as the Job's controller does."""
        for index in indices:
            self._start(index)

    def _start(self, index: int) -> None:
        root = self._folder / f"root-{self.count}"
        root.mkdir()
        own = {"scratch": self._made(f"scratch-{self.count}"), "runs": self.runs}
        self.count += 1
        mounts = [sys.base_prefix, sys.base_prefix, "ro", sys.prefix, _VENV, "ro"]
        mounts += [str(ROOT), _SOURCES, "ro"]
        for mount in self._container["volumeMounts"]:
            mounts += [str(own[mount["name"]]), mount["mountPath"], "rw"]
        env = {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": self.hostname(index)}
        for entry in self._container["env"]:
            env[entry["name"]] = entry.get("value", SECRET)
        python, *argv = map(expanded, self._container["command"])
        assert python == "python"
        assert pod_of(self._job)["shareProcessNamespace"] is True
        # The first process that the shell starts is PID 1, and the shell stays outside.
        first = ["unshare", "--mount", "--pid"]
        before = [*self._hosts.inside(index + 1), *first, "sh", "-c", _CONTAINER, "-", str(root)]
        before += [str(self._folder / "hosts"), *mounts, "--"]
        self.env = clean_env(env | {"PYTHONPATH": _SOURCES})
        self.running[index] = self._group.start(
            argv, self.env, before=[*before, *self._privileges()], python=_PYTHON
        )

    def _privileges(self) -> list[str]:
        """Returns the words before a command that has the privileges of the manifest."""
        context, own = pod_of(self._job)["securityContext"], self._container["securityContext"]
        assert own["readOnlyRootFilesystem"] is True
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert own["allowPrivilegeEscalation"] is False
        user, group = (str(context[key]) for key in ("runAsUser", "runAsGroup"))
        words = ["setpriv", "--reuid", user, "--regid", group, "--clear-groups"]
        return [*words, "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]

    def _made(self, name: str) -> Path:
        """Returns a new folder that the group of the pods may write."""
        folder = self._folder / name
        folder.mkdir()
        os.chown(folder, 0, pod_of(self._job)["securityContext"]["fsGroup"])
        folder.chmod(0o2775)
        return folder

    def processes(self, index: int) -> list[int]:
        """Returns the shim of a pod and its program, as far as they have started."""
        found = [self.running[index].pid]
        while children := children_of(found[-1]):
            found.append(children[-1])
        return [process for process in found[1:3] if program_of(process).startswith("python")]

    def wait_for_program(self, index: int) -> int:
        """Waits until the shim of a pod has started its program, and returns the program's id."""
        deadline = time.monotonic() + LIMIT_S
        while len(found := self.processes(index)) < 2:
            assert self.running[index].poll() is None, self._group.logs()
            assert time.monotonic() < deadline, self._group.logs()
            time.sleep(0.01)
        return found[1]

    def end(self, index: int) -> None:
        """Sends SIGTERM to the first process of a pod, as Kubernetes does when it ends a pod."""
        os.kill(self.processes(index)[0], signal.SIGTERM)

    def probe(self, name: str, index: int) -> int:
        """Returns the exit code of a probe, which runs in the container of a pod."""
        _, *argv = self._container[name]["exec"]["command"]
        target = str(self.wait_for_program(index))
        inside = ["nsenter", "--target", target, "--mount", "--pid", "--root", "--wd=/"]
        return subprocess.run(
            [*inside, *self._privileges(), _PYTHON, *argv], env=self.env
        ).returncode

    def action(self, code: int) -> str:
        """Returns the action of the Job's policy for an exit code."""
        for rule in self._job["spec"]["podFailurePolicy"]["rules"]:
            if code in rule.get("onExitCodes", {}).get("values", []):
                return str(rule["action"])
        return "Count"

    def wait(self) -> dict[int, int]:
        """Waits for all pods, and returns their exit codes."""
        codes = {}
        deadline = time.monotonic() + LIMIT_S
        for index, process in self.running.items():
            try:
                code = process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(self._group.logs()) from None
            codes[index] = 128 - code if code < 0 else code
        return codes
