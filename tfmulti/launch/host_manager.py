"""Finds the machines of a job, keeps those that answer, and looks again for the others.

Each search for a machine runs in a thread of its own. `HostManager.poll` takes in the results. So a
machine that does not answer never delays the watch of the workers.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping

from tfmulti.cluster.job_secret import SECRET
from tfmulti.cluster.listening import LOOPBACK
from tfmulti.errors import ConfigError, TfmultiError
from tfmulti.launch.config import LaunchConfig, check_devices
from tfmulti.launch.connect import JoinListener, over_ssh
from tfmulti.launch.hosts import (
    LOOPBACK_NAMES,
    Host,
    discover,
    is_here,
    read_hostfile,
    slots_of,
)
from tfmulti.launch.machine import LocalMachine, Machine, Unreachable
from tfmulti.launch.membership import Limits, Placement, Standing, choose
from tfmulti.launch.workers import Sink

# The time between two attempts to reach a machine.
RETRY_S = 3.0

# The time between two readings of a host file, and between two runs of a discovery script.
REREAD_S, REFRESH_S = 1.0, 5.0

# If the number of machines may vary and they are started by hand, the job waits this long for all
# of them. Then it begins without the missing ones.
JOIN_S = 30.0

# At the end, the time limit for closing the connection of each lost machine.
CLOSING_S = 3.0

# A number of machines that is larger than in any job.
UNLIMITED = 10**6


class TooFewMachines(TfmultiError):
    """Raised when not enough machines answer within the start timeout."""


class HostManager:
    """Looks in the background for the machines that the configuration names.

    Make it before any thread is started, because it makes a LocalMachine. Call `poll` often.

    Attributes:
        hosts: the hosts that are named at this time.
        machines: the machines that answer, by host name.
        reasons: for each host that does not answer, why.
        limits: how many machines and workers the job may have.

    Args:
        config: the job.
        env: the environment that the workers inherit.
        run_id: names the job, the same on all machines.
        sink: takes each line that a worker writes.
        say: shows a line to the user.

    Raises:
        ConfigError: the machines that are named cannot form the job.
    """

    def __init__(
        self,
        config: LaunchConfig,
        env: Mapping[str, str],
        run_id: str,
        sink: Sink,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._env, self._run_id = config, env, run_id
        self._sink, self._say = sink, say
        self.hosts = named_hosts(config)
        self._own_name = own_host_name(config, self.hosts)
        self._local_machine = LocalMachine(config, env, self._own_name or LOOPBACK, sink)
        self._join_listener = None
        if config.by_hand and may_have_several(config, self.hosts):
            names = [host.name for host in self.hosts]
            self._join_listener = JoinListener(
                config, self._own_name or LOOPBACK, names, self._is_host
            )
        self.machines: dict[str, Machine] = {}
        self.reasons: dict[str, str] = {}
        self._tried: set[str] = set()
        self._has_begun = False
        self._closing: list[threading.Thread] = []
        self._shown_errors: set[str] = set()
        self._next_try: dict[str, float] = {}
        self._results: queue.Queue[tuple[str, Machine | Exception]] = queue.Queue()
        self._named: queue.Queue[tuple[Host, ...] | ConfigError] = queue.Queue()
        self._refresh_s = REFRESH_S if config.discovery else REREAD_S
        self._next_refresh_s = time.monotonic() + self._refresh_s
        self._begun_s = time.monotonic()
        self.limits = limits_of(config, self.hosts, self._local_machine.gpus)

    def assemble(self, standing: Standing) -> Placement:
        """Waits until enough machines answer, and returns the placement of the next attempt.

        Before the first attempt it waits until every machine has been tried. Before later attempts
        it goes on as soon as enough machines answer.

        Args:
            standing: the absences of the hosts.

        Raises:
            ConfigError: a machine cannot be used at all.
            TooFewMachines: not enough machines have answered within the start timeout.
        """
        deadline = time.monotonic() + self._config.start_timeout_s
        shown_reasons: dict[str, str] = {}
        while True:
            self.poll()
            placement = self.choice(standing)
            if placement and self._may_begin():
                self._check_devices(placement)
                self._has_begun = True
                return placement
            for name, reason in self.reasons.items():
                if shown_reasons.get(name) != reason:
                    self._say(f"waiting for {name}: {reason}")
                    shown_reasons[name] = reason
            if time.monotonic() > deadline:
                limit = f"{self._config.start_timeout_s:g} s (--start-timeout)"
                reasons = [f"{name}: {reason}" for name, reason in self.reasons.items()]
                raise TooFewMachines(
                    f"too few machines for {limit}: {'; '.join(reasons) or 'none is named'}. "
                    "Start them, or open the port."
                )
            time.sleep(0.02)

    def choice(self, standing: Standing) -> Placement | None:
        """Returns the placement of an attempt that began now, or None if too few machines answer.

        Args:
            standing: the absences of the hosts.
        """
        answering = [
            (host.name, self._slots(host, machine))
            for host in self.hosts
            if (machine := self.machines.get(host.name)) is not None
        ]
        return choose(answering, standing, self.limits, time.monotonic())

    def poll(self, taking_part: Placement = ()) -> None:
        """Takes in the results of the searches, and starts searches for missing machines.

        Args:
            taking_part: the placement of the current attempt, whose `WorkerGroup` checks these
                machines. This method checks all others.
        """
        self._take_hosts()
        self._check_unused_machines({name for name, _ in taking_part})
        now = time.monotonic()
        for host in self.hosts:
            if host.name in self.machines or now < self._next_try.get(host.name, 0.0):
                continue
            # `_take_result` and `lost` set the time of the next attempt.
            self._next_try[host.name] = float("inf")
            if host.name == self._own_name:
                self._results.put((host.name, self._local_machine))
            else:
                threading.Thread(target=self._search, args=(host,), daemon=True).start()
        while not self._results.empty():
            self._take_result(*self._results.get())

    def lost(self, name: str, reason: str) -> None:
        """Drops a machine that has stopped answering. It is looked for again.

        Args:
            name: the host name.
            reason: the reason, in words.
        """
        machine = self.machines.pop(name, None)
        if machine is not None and machine is not self._local_machine:
            # The end of a connection may take some seconds.
            closing = threading.Thread(target=machine.close, daemon=True)
            closing.start()
            self._closing.append(closing)
        self.reasons[name] = reason
        self._next_try[name] = time.monotonic() + RETRY_S

    def close(self, code: int) -> None:
        """Ends every process of the job on all machines, and closes all connections.

        Args:
            code: the exit code of the job.
        """
        for machine in self.machines.values():
            if machine is not self._local_machine:
                machine.close(code)
        self._local_machine.close()
        if self._join_listener is not None:
            self._join_listener.close(code)
        for thread in self._closing:
            thread.join(CLOSING_S)

    def _check_unused_machines(self, used: set[str]) -> None:
        """Drops the machines that do not answer or are not named, except those in `used`."""
        named = {host.name for host in self.hosts}
        for name, machine in list(self.machines.items()):
            if name in used:
                continue
            if name not in named:
                self.lost(name, "it is not named any more")
                continue
            try:
                machine.statuses()
            except Unreachable as error:
                self.lost(name, str(error))

    def _slots(self, host: Host, machine: Machine) -> int:
        """Returns how many workers a machine can take: in an elastic job at most one a GPU."""
        slots = host.slots or slots_of(self._config.per_node, machine.gpus, machine.cores)
        return min(slots, machine.gpus) if machine.gpus and self._is_elastic else slots

    @property
    def _is_elastic(self) -> bool:
        """Whether the number of machines or workers may vary."""
        config, limits = self._config, self.limits
        return bool(config.min_workers) or limits.min_nodes < limits.max_nodes

    def _check_devices(self, placement: Placement) -> None:
        """Raises ConfigError if workers cannot share a machine's GPUs; not in an elastic job."""
        if not self._is_elastic:
            for name, workers in placement:
                check_devices(workers, self.machines[name].gpus, name)

    def _is_host(self, name: str) -> bool:
        """Returns whether the job has a host of this name now."""
        return any(host.name == name for host in self.hosts)

    def _may_begin(self) -> bool:
        """Returns whether the first attempt may begin without the machines that are missing."""
        if self._has_begun:
            return True
        if self._join_listener is not None and time.monotonic() - self._begun_s < JOIN_S:
            return all(host.name in self.machines for host in self.hosts)
        return all(host.name in self._tried for host in self.hosts)

    def _take_hosts(self) -> None:
        """Takes in a new list of hosts, and has the file or the script read again when it is time.

        An error leaves the list as it is. Each error is shown once.
        """
        while not self._named.empty():
            named = self._named.get()
            if isinstance(named, tuple):
                self.hosts = named
            elif str(named) not in self._shown_errors:
                self._shown_errors.add(str(named))
                self._say(f"{named} The job keeps its present machines.")
            self._next_refresh_s = time.monotonic() + self._refresh_s
        if self._config.hosts_may_change and time.monotonic() > self._next_refresh_s:
            self._next_refresh_s = float("inf")
            threading.Thread(target=self._refresh, daemon=True).start()

    def _refresh(self) -> None:
        """Reads the list of hosts again, in a thread of its own."""
        try:
            self._named.put(named_hosts(self._config))
        except ConfigError as error:
            self._named.put(error)

    def _search(self, host: Host) -> None:
        """Tries to reach a machine, in a thread of its own, and queues the machine or the error."""
        try:
            if self._join_listener is not None:
                machine = self._join_listener.accept_machine(
                    host, self._env, self._run_id, self._sink
                )
            else:
                machine = over_ssh(self._config, self._env, host, self._run_id, self._sink)
            self._results.put((host.name, machine))
        except (ConfigError, Unreachable) as error:
            self._results.put((host.name, error))
        except Exception as error:
            # Without a result in the queue the machine would never be looked for again.
            self._results.put((host.name, Unreachable(f"{type(error).__name__}: {error}")))

    def _take_result(self, name: str, result: Machine | Exception) -> None:
        """Takes in the result of a search.

        A ConfigError from the first search for a machine is raised if no attempt has begun. Later
        it must not end a job that runs.
        """
        is_first_search = name not in self._tried
        self._tried.add(name)
        if not isinstance(result, Exception):
            self.machines[name] = result
            self.reasons.pop(name, None)
            return
        if isinstance(result, ConfigError) and is_first_search and not self._has_begun:
            raise result
        self.reasons[name] = str(result)
        wait_s = RETRY_S if self._join_listener is None else 0.1
        self._next_try[name] = time.monotonic() + wait_s


def named_hosts(config: LaunchConfig) -> tuple[Host, ...]:
    """Returns the hosts that a configuration names now, or this machine if it names none.

    Raises:
        ConfigError: the file cannot be read, the program fails, or a line has a wrong form.
    """
    if config.discovery:
        return discover(config.discovery)
    if config.hostfile:
        return read_hostfile(config.hostfile)
    return config.hosts or (Host(LOOPBACK),)


def may_have_several(config: LaunchConfig, hosts: tuple[Host, ...]) -> bool:
    """Returns whether a job has several machines, or may get them later."""
    return len(hosts) > 1 or config.hosts_may_change


def check_secret(config: LaunchConfig, hosts: tuple[Host, ...]) -> None:
    """Checks that machines on which the command is started by hand have a secret.

    Args:
        config: the job.
        hosts: the machines that are named.

    Raises:
        ConfigError: there is no secret, and the job may have several machines.
    """
    if not config.by_hand or config.secret or config.insecure:
        return
    if may_have_several(config, hosts):
        machines = f"{len(hosts)} machines" + (" or more" if config.hosts_may_change else "")
        raise ConfigError(
            f"--node-rank over {machines} needs a secret, else whoever reaches port "
            f"{config.master_port} could take part. Give the same {SECRET} or --secret-file on "
            "each machine, or --insecure in a network of your own."
        )


def own_host_name(config: LaunchConfig, hosts: tuple[Host, ...]) -> str | None:
    """Returns this machine's name among the hosts, or None if it is none of them.

    Args:
        config: the job, which may give the index of this machine.
        hosts: the machines that are named.

    Raises:
        ConfigError: the index is too large, or the name is a loopback name that other machines
            cannot use.
    """
    if config.by_hand:
        assert config.node_rank is not None
        if config.node_rank >= len(hosts):
            raise ConfigError(
                f"--node-rank is {config.node_rank}, but {len(hosts)} machines are named: count "
                "from 0."
            )
        return hosts[config.node_rank].name
    own_names = [host.name for host in hosts if is_here(host.name)]
    if len(hosts) > 1 and any(name in LOOPBACK_NAMES for name in own_names):
        raise ConfigError(
            f"{own_names[0]} is a name that no other machine can use. Give the name or address "
            "under which the other machines reach it."
        )
    return own_names[0] if own_names else None


def limits_of(config: LaunchConfig, hosts: tuple[Host, ...], gpus: int) -> Limits:
    """Returns how many machines and workers the job may have.

    Args:
        config: the job.
        hosts: the machines that are named.
        gpus: the number of GPUs of this machine. Machines without a number of workers are assumed
            to have as many.

    Raises:
        ConfigError: fewer machines or workers are named than the job needs.
    """
    if config.nodes is not None:
        low, high = config.nodes
    elif config.discovery or config.min_workers:
        low, high = 1, UNLIMITED
    else:
        low = high = len(hosts)
    if low > len(hosts) and not config.discovery:
        raise ConfigError(
            f"--nnodes asks for {low} machines, but --hosts names {len(hosts)}. Name more."
        )
    all_workers = sum(host.slots or slots_of(config.per_node, gpus) for host in hosts[:high])
    min_workers = config.min_workers or (all_workers if low == high else 1)
    if min_workers > all_workers and not config.discovery:
        raise ConfigError(
            f"--min-workers {min_workers} is more than the {all_workers} workers of the job."
        )
    unknown = config.per_node in ("auto", "gpu", "cpu") and any(h.slots is None for h in hosts)
    if unknown and len(hosts) > 1 and config.min_workers is None:
        # Each machine tells its devices only when it answers. Until then only `low` bounds the job.
        min_workers = 1
    return Limits(low, high, min_workers)
