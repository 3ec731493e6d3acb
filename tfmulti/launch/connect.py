"""Connects the machines of a job: over SSH or Slurm's srun, or by TCP to the first machine.

With SSH or srun, the launcher starts an agent on each other machine. It talks to the agent through
the standard input and output of that command.

If the user starts the command by hand on each machine, the first machine runs the launcher and
listens at the master port. Every other machine connects to that port and serves as an agent. Both
sides prove that they know the secret of the job, and sign their messages (`cluster.handshake`). The
other machine sends the command of its workers, which must be that of the first machine. The
protocol of `remote_machine` follows.
"""

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
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from tfmulti.cluster.handshake import HandshakeError, HandshakeServer, authenticate
from tfmulti.cluster.job_secret import SECRET
from tfmulti.cluster.listening import listen
from tfmulti.cluster.messages import MessageConnection, TcpMessageConnection
from tfmulti.config.troubleshooting import print_error
from tfmulti.errors import EXIT_USER, ConfigError, TfmultiError
from tfmulti.launch.agent import forwarded, sent_config, serve
from tfmulti.launch.config import SRUN, LaunchConfig
from tfmulti.launch.guard import STOPPING
from tfmulti.launch.hosts import Host
from tfmulti.launch.machine import Unreachable
from tfmulti.launch.output import say
from tfmulti.launch.remote_machine import RemoteMachine
from tfmulti.launch.workers import Sink

# The time limit for a connection, in whole seconds for SSH.
CONNECT_S = 10

# The time between two attempts to connect to the first machine.
RETRY_S = 1.0

_NO_PROOF = (
    f"the program that answers there does not know this job's secret ({SECRET} or --secret-file)"
)

# Exit codes of the process that serves the first machine: the connection was lost, it ended before
# the job began, or the other side does not know the secret.
_LOST, _NOT_BEGUN, _WRONG_PROOF = 75, 76, 77

# SSH's messages about errors that another try does not remove.
_PERMANENT_ERRORS = (
    "Permission denied",
    "Host key verification failed",
    "Could not resolve hostname",
)


def begin_of(
    config: LaunchConfig, env: Mapping[str, str], name: str, run_id: str
) -> dict[str, Any]:
    """Returns the content of the first message to an agent: the job, and where it runs.

    Over SSH the message also holds the configuration, and the forwarded part of the environment
    with the secret of the job. A machine that was started by hand has these already.

    Args:
        config: the job.
        env: the launcher's environment.
        name: the host name of the agent's machine.
        run_id: names the job, the same on all machines.
    """
    begin: dict[str, Any] = {"name": name, "run_id": run_id}
    if not config.by_hand:
        begin |= {"folder": os.getcwd(), "env": forwarded(env), "config": sent_config(config)}
    return begin


def remote_command(config: LaunchConfig, name: str) -> list[str]:
    """Returns the command that starts an agent on a machine, by SSH or by Slurm's srun.

    The agent runs with the same Python, in the same folder and with the same PYTHONPATH as here.
    In an allocation of Slurm srun needs no key, and what it starts ends with the allocation.

    Args:
        config: has the command for SSH.
        name: the host name of the machine.
    """
    path = os.environ.get("PYTHONPATH")
    env = f"env PYTHONPATH={shlex.quote(path)} " if path else ""
    agent_command = (
        f"cd {shlex.quote(os.getcwd())} && exec {env}{shlex.quote(sys.executable)} "
        "-m tfmulti.launch.agent"
    )
    if config.ssh == SRUN:
        # The workers share the nodes with the launcher, and with each other.
        options = ["--overlap", "--nodes=1", "--ntasks=1", "--unbuffered", "--quiet"]
        return [SRUN, *options, f"--nodelist={name}", "/bin/sh", "-c", agent_command]
    options = ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}"]
    options += ["-o", "ServerAliveInterval=3", "-o", "ServerAliveCountMax=3"]
    return [*shlex.split(config.ssh), *options, "--", name.strip("[]"), agent_command]


def over_ssh(
    config: LaunchConfig, env: Mapping[str, str], host: Host, run_id: str, sink: Sink
) -> RemoteMachine:
    """Starts an agent on a machine over SSH, and returns that machine.

    Args:
        config: the job.
        env: the launcher's environment.
        host: the machine.
        run_id: names the job, the same on all machines.
        sink: takes each line that a worker there writes.

    Raises:
        ConfigError: SSH cannot be run, the machine refuses SSH, or the agent does not run there.
        Unreachable: the machine does not answer.
    """
    try:
        ssh = subprocess.Popen(
            remote_command(config, host.name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C must reach the launcher alone, which ends SSH itself.
            start_new_session=True,
        )
    except (FileNotFoundError, PermissionError) as error:
        raise ConfigError(f"--ssh {config.ssh}: {error.strerror}. Install OpenSSH.") from None
    except OSError as error:
        # The system has no memory, processes or file descriptors left. That may change.
        raise Unreachable(f"{config.ssh} does not start: {error.strerror}") from None
    assert ssh.stdin is not None
    assert ssh.stdout is not None
    assert ssh.stderr is not None
    lines: list[str] = []
    stderr_reader = threading.Thread(target=_collect_lines, args=(ssh.stderr, lines), daemon=True)
    stderr_reader.start()

    def reason() -> str:
        # The last line that the agent has written to standard error, or else SSH or srun.
        stderr_reader.join(1.0)
        by_agent = [line for line in lines if not line.startswith("srun:")]
        return (by_agent or lines or [""])[-1]

    def close() -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            # The agent ends by itself when the connection ends.
            ssh.wait(2.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ssh.pid, signal.SIGKILL)
        ssh.wait()

    connection = MessageConnection(ssh.stdout, ssh.stdin, close)
    try:
        return RemoteMachine(
            host.name, connection, begin_of(config, env, host.name, run_id), sink, reason
        )
    except Unreachable as error:
        close()
        message = reason().rstrip(".")
        if any(text in message for text in _PERMANENT_ERRORS):
            raise ConfigError(
                f"{host.name} does not let SSH in: {message}. Make `{config.ssh} {host.name} true` "
                "work without a prompt."
            ) from None
        if _has_run(config, lines, ssh.returncode):
            raise ConfigError(
                f"{host.name}: {message or error}. The folder, Python and tfmulti must be at the "
                "same paths on each machine."
            ) from None
        raise Unreachable(message or str(error)) from None


def _has_run(config: LaunchConfig, lines: Sequence[str], returncode: int) -> bool:
    """Returns whether a failed command has run on the other machine, and failed there.

    The lines are what SSH or srun has written to standard error, and the return code is theirs.
    """
    if config.ssh == SRUN:
        # srun's exit codes do not tell its own errors from those of the command, but it says so.
        return any("Exited with exit code" in line for line in lines)
    # SSH exits with 255 for an error of its own, and `close` kills it if it hangs.
    return returncode not in (255, -signal.SIGKILL)


def _collect_lines(source: IO[bytes], lines: list[str]) -> None:
    """Appends each line of a stream that is not empty to `lines`, until the stream ends."""
    with source:
        for line in iter(source.readline, b""):
            if text := line.decode(errors="replace").strip():
                lines.append(text)


class JoinListener:
    """Listens at the master port for the machines on which the command was started by hand.

    A machine that has proven that it knows the secret waits here until `accept_machine` takes it.

    Args:
        config: the job.
        own_name: the name under which the other machines reach this one.
        names: the names of all machines.
        is_known: returns whether the job has a machine of this name now.

    Raises:
        ConfigError: the port is not free.
    """

    def __init__(
        self,
        config: LaunchConfig,
        own_name: str,
        names: Sequence[str],
        is_known: Callable[[str], bool],
    ) -> None:
        self._config, self._is_known = config, is_known
        self._waiting: dict[str, TcpMessageConnection] = {}
        # Why each machine that `accept_machine` was asked for was refused; empty if it was not.
        self._refused: dict[str, str] = {}
        self._lock = threading.Lock()
        try:
            hosts = [name.strip("[]") for name in names]
            self._server = HandshakeServer(
                listen(own_name.strip("[]"), hosts, config.master_port),
                config.secret.encode(),
                self._add,
                on_wrong_proof=self._refuse_wrong_proof,
            )
        except OSError as error:
            raise ConfigError(
                f"--master-port {config.master_port}: {error.strerror}. Give another port, the "
                "same on each machine."
            ) from None

    def accept_machine(
        self, host: Host, env: Mapping[str, str], run_id: str, sink: Sink
    ) -> RemoteMachine:
        """Returns the machine of a host that has connected.

        Args:
            host: the host.
            env: the launcher's environment.
            run_id: names the job, the same on all machines.
            sink: takes each line that a worker there writes.

        Raises:
            ConfigError: the agent says that the job cannot run there.
            Unreachable: the host has not connected yet, or was refused.
        """
        with self._lock:
            connection = self._waiting.pop(host.name, None)
            refused = self._refused.setdefault(host.name, "")
        if connection is None:
            raise Unreachable(refused or "the command has not been started there")
        begin = begin_of(self._config, env, host.name, run_id)
        return RemoteMachine(host.name, connection, begin, sink, lambda: "")

    def close(self, code: int) -> None:
        """Closes the port, and tells the waiting machines that the job has ended.

        Args:
            code: the exit code of the job.
        """
        self._server.close()
        with self._lock:
            for connection in self._waiting.values():
                with contextlib.suppress(OSError):
                    connection.send({"ended": code})
                connection.close()

    def _add(self, name: str, first: dict[str, Any], connection: TcpMessageConnection) -> None:
        """Keeps a connection for `accept_machine` if its machine runs the same program.

        A new connection of a machine replaces the one that waits under the same name. Others are
        closed, so no more connections wait than the job has machines. A machine that is not named
        yet calls again.
        """
        if not self._is_known(name):
            connection.close()
            return
        program = first.get("program")
        expected = "\0".join(self._config.program).encode()
        if not hmac.compare_digest(str(program).encode(), expected):
            with contextlib.suppress(OSError):
                connection.send(
                    {"fails": "the first machine runs another program, or has other flags"}
                )
            connection.close()
            self._refuse(name, "it runs another program, or has other flags")
            return
        with self._lock:
            before = self._waiting.get(name)
            self._waiting[name] = connection
            self._refused.pop(name, None)
        if before is not None:
            before.close()

    def _refuse_wrong_proof(self, name: str) -> None:
        """Notes that a caller has used the name of a machine without knowing the secret."""
        reason = (
            f"a program that claims to be this machine does not know the job's secret ({SECRET})"
        )
        self._refuse(name, reason)

    def _refuse(self, name: str, reason: str) -> None:
        """Notes why a machine was refused. Names that do not belong to the job are not kept."""
        with self._lock:
            if name in self._refused:
                self._refused[name] = reason


def join_job(config: LaunchConfig, first: Host, name: str, env: Mapping[str, str]) -> int:
    """Serves the first machine as an agent until the job is done, and returns its exit code.

    If the connection is lost, the workers here end and this machine connects again. The job may
    then go on with it.

    Args:
        config: the job.
        first: the first machine.
        name: the name of this machine.
        env: the environment of the workers on this machine.

    Raises:
        TfmultiError: the first machine cannot be reached, or does not start the job, for
            `start_timeout_s`.
    """
    deadline, reason = time.monotonic() + config.start_timeout_s, "it does not start the job"
    while True:
        try:
            address = (first.name.strip("[]"), config.master_port)
            sock = socket.create_connection(address, CONNECT_S)
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            sock.settimeout(None)
            code = _serve_in_child(sock, config, name, env)
            if code not in (None, _LOST, _WRONG_PROOF):
                return code
            if code == _WRONG_PROOF and reason != _NO_PROOF:
                reason = _NO_PROOF
                say(f"{first.name}:{config.master_port}: {reason}; it is tried again")
            if code == _LOST:
                say(f"lost {first.name}: all workers here are ended, and it is tried again")
                deadline = time.monotonic() + config.start_timeout_s
        if time.monotonic() > deadline:
            raise TfmultiError(
                f"{first.name}:{config.master_port} has not answered for "
                f"{config.start_timeout_s:g} s ({reason}). Start the command with --node-rank 0 "
                "there, or open the port."
            )
        time.sleep(RETRY_S)


def _serve_in_child(
    sock: socket.socket, config: LaunchConfig, name: str, env: Mapping[str, str]
) -> int | None:
    """Serves the first machine over one connection, in a process of its own.

    When that process ends, its guard ends all workers. The result is the exit code of the job, or
    None if the job did not begin. It is _LOST if the connection was lost, and _WRONG_PROOF if the
    other side does not know the secret.
    """
    received: list[int] = []
    old_handlers = {
        number: signal.signal(number, lambda n, _: received.append(n)) for number in STOPPING
    }
    child = os.fork()
    if child == 0:
        # The terminal sends Ctrl-C to the parent alone, which passes it on as SIGTERM.
        os.setsid()
        for number in STOPPING:
            signal.signal(number, signal.SIG_DFL)
        try:
            os._exit(_serve_once(sock, config, name, env))
        finally:
            os._exit(_LOST)
    sock.close()
    try:
        status = _wait(child, received)
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
    if received:
        return 128 + received[0]
    code = os.waitstatus_to_exitcode(status)
    return None if code == _NOT_BEGUN else _LOST if code < 0 else code


def _wait(child: int, received: list[int]) -> int:
    """Waits for a child process and returns its status; sends it SIGTERM if a signal arrives here.

    The signal handlers append to `received`.
    """
    is_told = False
    while True:
        if received and not is_told:
            os.kill(child, signal.SIGTERM)
            is_told = True
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.05)


def _serve_once(
    sock: socket.socket, config: LaunchConfig, name: str, env: Mapping[str, str]
) -> int:
    """Serves the first machine over one connection, and returns the exit code for this process."""
    connection = TcpMessageConnection(sock)
    try:
        authenticate(connection, config.secret.encode(), name)
    except HandshakeError:
        return _WRONG_PROOF
    except OSError:
        return _NOT_BEGUN
    connection.send({"program": "\0".join(config.program)})
    try:
        first = connection.receive()
        if first is None:
            return _NOT_BEGUN
        if "begin" in first:
            say(f"this machine is {name} of the job")
        code = serve(connection, config, env, first)
    except ConfigError as error:
        print_error(error)
        return EXIT_USER
    return _LOST if code is None else code
