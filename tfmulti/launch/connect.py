"""How machines come to each other: over SSH, or by a connection to the first one of them."""

from __future__ import annotations

import contextlib
import hmac
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from tfmulti.cluster.job_secret import (
    NONCE_BYTES,
    SECRET,
    MessageAuthenticator,
    is_proof,
    nonce,
    proof,
)
from tfmulti.cluster.listening import keep_alive, listen
from tfmulti.errors import EXIT_USER, ConfigError, TfmultiError
from tfmulti.launch.agent import forwarded, sent_config, serve
from tfmulti.launch.config import LaunchConfig
from tfmulti.launch.guard import STOPPING
from tfmulti.launch.hosts import Host
from tfmulti.launch.machine import Unreachable
from tfmulti.launch.output import say
from tfmulti.launch.remote_machine import MOST_BYTES, AgentConnection, RemoteMachine
from tfmulti.launch.workers import Sink

CONNECT_S = 10
RETRY_S = 1.0
# Of who comes to the door: the time and bytes of the first line, and how many at once.
GREETING_S = 5.0
GREETING_BYTES = 65_536
GREETED_AT_ONCE = 64
ACCEPT_AGAIN_S = 0.2
LONGEST_NAME = 255  # of a host, as DNS has it
_FIRST, _OTHER = b"the first machine", b"another machine"  # who proves
_NO_PROOF = f"who answers there does not know this job's secret ({SECRET} or --secret-file)"
# Of the process that serves: the connection was lost, unused, or goes to somebody else.
_GONE, _NOT_BEGUN, _STRANGE = 75, 76, 77
# What SSH says of things that no waiting heals.
_HOPELESS = ("Permission denied", "Host key verification failed", "Could not resolve hostname")


def begin_of(
    config: LaunchConfig, env: Mapping[str, str], name: str, run_id: str
) -> dict[str, Any]:
    """Returns the first message to an agent: the job, and where it runs.

    Over SSH the job's secret is among what it forwards. One that was started by hand has it, and
    its environment and configuration are its own.
    """
    begin: dict[str, Any] = {"name": name, "run_id": run_id}
    if not config.by_hand:
        begin |= {"folder": os.getcwd(), "env": forwarded(env), "config": sent_config(config)}
    return begin


def ssh_command(config: LaunchConfig, name: str) -> list[str]:
    """Returns the command that starts an agent on a machine, with this Python, in this folder."""
    options = ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}"]
    options += ["-o", "ServerAliveInterval=3", "-o", "ServerAliveCountMax=3"]
    path = os.environ.get("PYTHONPATH")
    env = f"env PYTHONPATH={shlex.quote(path)} " if path else ""
    there = (
        f"cd {shlex.quote(os.getcwd())} && exec {env}{shlex.quote(sys.executable)} "
        "-m tfmulti.launch.agent"
    )
    return [*shlex.split(config.ssh), *options, "--", name.strip("[]"), there]


def over_ssh(
    config: LaunchConfig, env: Mapping[str, str], host: Host, run_id: str, sink: Sink
) -> RemoteMachine:
    """Starts an agent on a machine.

    Raises:
        ConfigError: SSH is not allowed in, or what the job needs is not there.
        Unreachable: the machine does not answer.
    """
    try:
        ssh = subprocess.Popen(
            ssh_command(config, host.name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the launcher, which ends it
        )
    except (FileNotFoundError, PermissionError) as error:
        raise ConfigError(f"--ssh {config.ssh}: {error.strerror}. Install OpenSSH.") from None
    except OSError as error:  # no memory, processes or descriptors now
        raise Unreachable(f"{config.ssh} does not start: {error.strerror}") from None
    assert ssh.stdin is not None
    assert ssh.stdout is not None
    assert ssh.stderr is not None
    words: list[str] = []
    listener = threading.Thread(target=_keep, args=(ssh.stderr, words), daemon=True)
    listener.start()

    def why() -> str:
        listener.join(1.0)
        return words[-1] if words else ""

    def close() -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            ssh.wait(2.0)  # the agent ends by itself
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ssh.pid, signal.SIGKILL)
        ssh.wait()

    link = AgentConnection(ssh.stdout, ssh.stdin, close)
    try:
        return RemoteMachine(host.name, link, begin_of(config, env, host.name, run_id), sink, why)
    except Unreachable as error:
        close()
        said = why()
        if any(word in said for word in _HOPELESS):
            raise ConfigError(
                f"{host.name} does not let SSH in: {said}. Make `{config.ssh} {host.name} true` "
                "work without a question."
            ) from None
        if ssh.returncode not in (255, -signal.SIGKILL):  # what was to be run there has failed
            raise ConfigError(
                f"{host.name}: {said or error}. The folder, Python and tfmulti must be at the same "
                "paths on each machine."
            ) from None
        raise Unreachable(said or str(error)) from None


def _keep(source: IO[bytes], words: list[str]) -> None:
    with source:
        for line in iter(source.readline, b""):
            if text := line.decode(errors="replace").strip():
                words.append(text)


class JoinListener:
    """Where the machines on which the command was started by hand come in.

    Both sides prove that they know the job's secret, and sign what they say from then on.

    Args:
        own: the name of this machine, under which the others reach it.
        names: those of all machines.

    Raises:
        ConfigError: the port is not free.
    """

    def __init__(self, config: LaunchConfig, own: str, names: Sequence[str]) -> None:
        self._config = config
        self._key = config.secret.encode()
        try:
            hosts = [name.strip("[]") for name in names]
            self._server = listen(own.strip("[]"), hosts, config.master_port)
        except OSError as error:
            raise ConfigError(
                f"--master-port {config.master_port}: {error.strerror}. Give another port, the "
                "same on each machine."
            ) from None
        self._closed = False
        self._greeted = threading.BoundedSemaphore(GREETED_AT_ONCE)
        self._waiting: dict[str, AgentConnection] = {}
        self._refused: dict[str, str] = {}  # of those that were looked for
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def accept_machine(
        self, host: Host, env: Mapping[str, str], run_id: str, sink: Sink
    ) -> RemoteMachine:
        """Returns the machine of that name.

        Raises:
            Unreachable: it has not come yet.
        """
        with self._lock:
            link = self._waiting.pop(host.name, None)
            refused = self._refused.setdefault(host.name, "")
        if link is None:
            raise Unreachable(refused or "the command has not been started there")
        begin = begin_of(self._config, env, host.name, run_id)
        return RemoteMachine(host.name, link, begin, sink, lambda: "")

    def close(self, code: int) -> None:
        """Lets nobody in any more; who waits is told that the job has ended, and how."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes who waits in it
        self._server.close()
        with self._lock:
            for link in self._waiting.values():
                with contextlib.suppress(OSError):
                    link.send({"ended": code})
                link.close()

    def _listen(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._server.accept()
            except OSError:  # too many files are open, or who knocked is gone
                time.sleep(ACCEPT_AGAIN_S)
                continue
            if not self._greeted.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._greet, args=(connection,), daemon=True).start()
            except RuntimeError:  # the system has no more threads
                self._greeted.release()
                connection.close()
                time.sleep(ACCEPT_AGAIN_S)

    def _greet(self, connection: socket.socket) -> None:
        try:
            self._let_in(connection)
        except Exception:  # whatever was said, it costs the job nothing
            connection.close()
        finally:
            self._greeted.release()

    def _let_in(self, connection: socket.socket) -> None:
        link = link_of(connection, most_bytes=GREETING_BYTES)
        late = threading.Timer(GREETING_S, link.close)
        late.daemon = True
        late.start()
        name = self._proven(link)
        program = (link.receive() or {}).get("program") if name is not None else None
        late.cancel()
        if name is None or program is None:
            link.close()
            return
        link.most_bytes = MOST_BYTES
        expected = "\0".join(self._config.program).encode()
        if not hmac.compare_digest(str(program).encode(), expected):
            with contextlib.suppress(OSError):
                link.send({"fails": "the first machine runs another program or other flags of it"})
            link.close()
            self._refuse(name, "it runs another program, or other flags of it")
            return
        with self._lock:
            before = self._waiting.get(name)
            self._waiting[name] = link
            self._refused.pop(name, None)
        if before is not None:
            before.close()

    def _proven(self, link: AgentConnection) -> str | None:
        """Returns the name of who comes, once it has proven that it knows the secret."""
        greeting = link.receive() or {}
        name, theirs = greeting.get("name"), _bytes_of(greeting, "nonce")
        if not isinstance(name, str) or len(theirs) != NONCE_BYTES:
            return None  # somebody else knocks
        if len(name) > LONGEST_NAME or not name.isprintable():
            return None  # no host has such a name
        ours = nonce()
        said = (name.encode(), theirs, ours)
        link.send({"nonce": ours.hex(), "proof": proof(self._key, _FIRST, *said).hex()})
        if not is_proof(_bytes_of(link.receive() or {}, "proof"), self._key, _OTHER, *said):
            self._refuse(name, f"who came in its name does not know the job's secret ({SECRET})")
            return None
        link.seal = MessageAuthenticator(
            *(proof(self._key, b"seal", side, *said) for side in (_FIRST, _OTHER))
        )
        return name

    def _refuse(self, name: str, why: str) -> None:
        with self._lock:
            if name in self._refused:  # it is one of the job's
                self._refused[name] = why


def _bytes_of(message: dict[str, Any], name: str) -> bytes:
    """Returns bytes that a message has in hexadecimal; none, where they are something else."""
    try:
        return bytes.fromhex(message[name])
    except (KeyError, TypeError, ValueError):
        return b""


def link_of(connection: socket.socket, most_bytes: int = MOST_BYTES) -> AgentConnection:
    """Returns the lines of a connection, of so many bytes at most."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(connection)

    def close() -> None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()

    return AgentConnection(connection.makefile("rb"), connection.makefile("wb"), close, most_bytes)


def join_job(config: LaunchConfig, first: Host, name: str, env: Mapping[str, str]) -> int:
    """Serves the first machine until the job is done; returns the job's exit code.

    When the connection is lost the workers here are ended, and it is tried again: the job may
    go on with this machine when it can be reached once more. `name` is that of this machine.
    """
    deadline, why = time.monotonic() + config.start_timeout_s, "it does not begin"
    while True:
        try:
            address = (first.name.strip("[]"), config.master_port)
            connection = socket.create_connection(address, CONNECT_S)
        except OSError as error:
            why = error.strerror or str(error)
        else:
            connection.settimeout(None)
            code = _served(connection, config, name, env)
            if code not in (None, _GONE, _STRANGE):
                return code
            if code == _STRANGE and why != _NO_PROOF:
                why = _NO_PROOF
                say(f"{first.name}:{config.master_port}: {why}; it is tried again")
            if code == _GONE:
                say(f"lost {first.name}: all workers here are ended, and it is tried again")
                deadline = time.monotonic() + config.start_timeout_s
        if time.monotonic() > deadline:
            raise TfmultiError(
                f"{first.name}:{config.master_port} has not answered for "
                f"{config.start_timeout_s:g} s ({why}). Start the command with --node-rank 0 "
                "there, or open the port."
            )
        time.sleep(RETRY_S)


def _served(
    connection: socket.socket, config: LaunchConfig, name: str, env: Mapping[str, str]
) -> int | None:
    """Returns the job's exit code, _GONE where it was lost, or None where it had not begun.

    In a process of its own, with whose end all workers end.
    """
    asked: list[int] = []
    before = {number: signal.signal(number, lambda n, _: asked.append(n)) for number in STOPPING}
    child = os.fork()
    if child == 0:
        os.setsid()  # Ctrl-C is for this process' parent, which passes it on
        for number in STOPPING:
            signal.signal(number, signal.SIG_DFL)
        try:
            os._exit(_serve_once(connection, config, name, env))
        finally:
            os._exit(_GONE)
    connection.close()
    try:
        status = _wait(child, asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if asked:
        return 128 + asked[0]
    code = os.waitstatus_to_exitcode(status)
    return None if code == _NOT_BEGUN else _GONE if code < 0 else code


def _wait(child: int, asked: list[int]) -> int:
    """Returns the status with which a child ended; what this process is asked, it is asked."""
    passed_on = False
    while True:
        if asked and not passed_on:
            os.kill(child, signal.SIGTERM)
            passed_on = True
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.05)


def _prove(link: AgentConnection, key: bytes, name: str) -> bool:
    """Proves to the first machine that this one knows the secret; returns whether it does, too.

    Raises:
        OSError: it has ended the connection.
    """
    ours = nonce()
    link.send({"name": name, "nonce": ours.hex()})
    answer = link.receive()
    if answer is None:
        raise ConnectionResetError("it says nothing")
    said = (name.encode(), ours, _bytes_of(answer, "nonce"))
    if not is_proof(_bytes_of(answer, "proof"), key, _FIRST, *said):
        return False
    link.send({"proof": proof(key, _OTHER, *said).hex()})
    link.seal = MessageAuthenticator(
        *(proof(key, b"seal", side, *said) for side in (_OTHER, _FIRST))
    )
    return True


def _serve_once(
    connection: socket.socket, config: LaunchConfig, name: str, env: Mapping[str, str]
) -> int:
    link = link_of(connection)
    connection.settimeout(GREETING_S)  # somebody may answer there who says nothing
    try:
        if not _prove(link, config.secret.encode(), name):
            return _STRANGE
    except OSError:
        return _NOT_BEGUN
    connection.settimeout(None)
    link.send({"program": "\0".join(config.program)})
    try:
        first = link.receive()
        if first is None:
            return _NOT_BEGUN
        if "begin" in first:
            say(f"this machine is {name} of the job")
        code = serve(link, config, env, first)
    except ConfigError as error:
        print(f"tfmulti: {error}", file=sys.stderr, flush=True)
        return EXIT_USER
    return _GONE if code is None else code
