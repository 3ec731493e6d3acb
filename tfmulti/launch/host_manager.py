"""The machines of a job: those that answer, and those that are looked for."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping

from tfmulti.cluster.job_secret import SECRET
from tfmulti.errors import ConfigError, TfmultiError
from tfmulti.launch.addresses import LOOPBACK
from tfmulti.launch.config import LaunchConfig, check_devices
from tfmulti.launch.connect import JoinListener, over_ssh
from tfmulti.launch.hosts import LOOPBACK_NAMES, Host, HostSources, is_here, slots_of
from tfmulti.launch.machine import LocalMachine, Machine, Unreachable
from tfmulti.launch.membership import Limits, Placement, Standing, choose
from tfmulti.launch.workers import Sink

RETRY_S = 3.0  # between two tries to reach a machine
REREAD_S, REFRESH_S = 1.0, 5.0  # between two looks at a host file, and at what a script says
JOIN_S = 30.0  # for machines of a range that are started by hand, before it begins without
CLOSING_S = 3.0  # for connections of machines that were lost, at the end
EVERY = 10**6  # more machines than there are


class TooFew(TfmultiError):
    """Not enough machines answer."""


class HostManager:
    """Looks for the machines that the configuration names, in the background.

    Make it before any thread is started. `poll` never waits; it is to be called often.

    Args:
        say: shows a line to the user.

    Raises:
        ConfigError: the machines are named in a way that cannot be.
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
        self._sources = sources_of(config)
        self.hosts = self._sources.now()
        self._here_name = name_here(config, self.hosts)
        self._here = LocalMachine(config, env, self._here_name or LOOPBACK, sink)
        self._door = None
        if config.by_hand:
            names = [host.name for host in self.hosts]
            self._door = JoinListener(config, self._here_name or LOOPBACK, names)
        self.machines: dict[str, Machine] = {}
        self.reasons: dict[str, str] = {}
        self._tried: set[str] = set()
        self._has_begun = False
        self._closing: list[threading.Thread] = []
        self._said: set[str] = set()
        self._next_try: dict[str, float] = {}
        self._found: queue.Queue[tuple[str, Machine | Exception]] = queue.Queue()
        self._sources_found: queue.Queue[tuple[tuple[Host, ...], ConfigError | None]] = (
            queue.Queue()
        )
        self._refresh_s = REFRESH_S if config.discovery else REREAD_S
        self._next_refresh_s = time.monotonic() + self._refresh_s
        self._begun_s = time.monotonic()
        self.limits = limits_of(config, self.hosts, self._here.gpus)

    def assemble(self, standing: Standing) -> Placement:
        """Waits until enough machines answer, and returns who takes part.

        Before the first attempt each machine is given its chance; later those that answer go on.

        Raises:
            ConfigError: a machine cannot be used at all.
            TooFew: not enough answered within the start's time limit.
        """
        deadline = time.monotonic() + self._config.start_timeout_s
        shown: dict[str, str] = {}
        while True:
            self.poll()
            placement = self.choice(standing)
            if placement and self._all_had_their_chance():
                self._check_devices(placement)
                self._has_begun = True
                return placement
            for name, why in self.reasons.items():
                if shown.get(name) != why:
                    self._say(f"waiting for {name}: {why}")
                    shown[name] = why
            if time.monotonic() > deadline:
                waited = f"{self._config.start_timeout_s:g} s (--start-timeout)"
                why = "; ".join(f"{n}: {w}" for n, w in self.reasons.items()) or "none is named"
                raise TooFew(f"too few machines for {waited}: {why}. Start them, or open the way.")
            time.sleep(0.02)

    def choice(self, standing: Standing) -> Placement | None:
        """Returns who would take part in an attempt that began now."""
        answering = [
            (host.name, self._slots(host, machine))
            for host in self.hosts
            if (machine := self.machines.get(host.name)) is not None
        ]
        return choose(answering, standing, self.limits, time.monotonic())

    def poll(self, taking_part: Placement = ()) -> None:
        """Takes in what has changed, and looks for what is missing.

        The machines that take part are their crew's to look at.
        """
        self._take_hosts()
        self._look_at_the_others({name for name, _ in taking_part})
        now = time.monotonic()
        for host in self.hosts:
            if host.name in self.machines or now < self._next_try.get(host.name, 0.0):
                continue
            self._next_try[host.name] = float("inf")
            if host.name == self._here_name:
                self._found.put((host.name, self._here))
            else:
                threading.Thread(target=self._seek, args=(host,), daemon=True).start()
        while not self._found.empty():
            self._take(*self._found.get())

    def lost(self, name: str, why: str) -> None:
        """Says that a machine does not answer any more. It is looked for again."""
        machine = self.machines.pop(name, None)
        if machine is not None and machine is not self._here:
            closing = threading.Thread(target=machine.close, daemon=True)  # it may take its time
            closing.start()
            self._closing.append(closing)
        self.reasons[name] = why
        self._next_try[name] = time.monotonic() + RETRY_S

    def close(self, code: int) -> None:
        """Ends everything on all machines."""
        for machine in self.machines.values():
            if machine is not self._here:
                machine.close(code)
        self._here.close()
        if self._door is not None:
            self._door.close(code)
        for thread in self._closing:
            thread.join(CLOSING_S)

    def _look_at_the_others(self, busy: set[str]) -> None:
        named = {host.name for host in self.hosts}
        for name, machine in list(self.machines.items()):
            if name in busy:
                continue
            if name not in named:
                self.lost(name, "it is not named any more")
                continue
            try:
                machine.look()
            except Unreachable as error:
                self.lost(name, str(error))

    def _slots(self, host: Host, machine: Machine) -> int:
        slots = host.slots or slots_of(self._config.per_node, machine.gpus, machine.cores)
        return min(slots, machine.gpus) if machine.gpus and self._is_elastic else slots

    @property
    def _is_elastic(self) -> bool:
        config, limits = self._config, self.limits
        return bool(config.min_workers) or limits.min_nodes < limits.max_nodes

    def _check_devices(self, placement: Placement) -> None:
        if not self._is_elastic:
            for name, workers in placement:
                check_devices(workers, self.machines[name].gpus, name)

    def _all_had_their_chance(self) -> bool:
        if self._has_begun:
            return True
        if self._door is not None and time.monotonic() - self._begun_s < JOIN_S:
            return all(host.name in self.machines for host in self.hosts)
        return all(host.name in self._tried for host in self.hosts)

    def _take_hosts(self) -> None:
        while not self._sources_found.empty():
            self.hosts, error = self._sources_found.get()
            if error is not None and str(error) not in self._said:
                self._said.add(str(error))
                self._say(f"{error} The machines stay as they were.")
            self._next_refresh_s = time.monotonic() + self._refresh_s
        if self._sources.may_change and time.monotonic() > self._next_refresh_s:
            self._next_refresh_s = float("inf")
            threading.Thread(target=self._refresh, daemon=True).start()

    def _refresh(self) -> None:
        try:
            self._sources_found.put((self._sources.now(), None))
        except ConfigError as error:
            self._sources_found.put((self.hosts, error))

    def _seek(self, host: Host) -> None:
        try:
            if self._door is not None:
                there = self._door.accept_machine(host, self._env, self._run_id, self._sink)
            else:
                there = over_ssh(self._config, self._env, host, self._run_id, self._sink)
            self._found.put((host.name, there))
        except (ConfigError, Unreachable) as error:
            self._found.put((host.name, error))
        except Exception as error:  # it is looked for again, whatever it was
            self._found.put((host.name, Unreachable(f"{type(error).__name__}: {error}")))

    def _take(self, name: str, found: Machine | Exception) -> None:
        first = name not in self._tried
        self._tried.add(name)
        if not isinstance(found, Exception):
            self.machines[name] = found
            self.reasons.pop(name, None)
            return
        if isinstance(found, ConfigError) and first and not self._has_begun:
            raise found
        self.reasons[name] = str(found)
        wait_s = RETRY_S if self._door is None else 0.1
        self._next_try[name] = time.monotonic() + wait_s


def sources_of(config: LaunchConfig) -> HostSources:
    """Returns where the machines of a configuration are named; without, this one."""
    hosts = config.hosts
    if not (hosts or config.hostfile or config.discovery):
        hosts = (Host(LOOPBACK),)
    return HostSources(hosts, config.hostfile, config.discovery)


def check_secret(config: LaunchConfig, hosts: tuple[Host, ...]) -> None:
    """Checks that machines on which the command is started by hand can know each other.

    Raises:
        ConfigError: there is no secret.
    """
    may_grow = bool(config.hostfile or config.discovery)
    if not config.by_hand or config.secret or config.insecure:
        return
    if len(hosts) > 1 or may_grow:
        machines = f"{len(hosts)} machines or more" if may_grow else f"{len(hosts)} machines"
        raise ConfigError(
            f"--node-rank over {machines} needs a secret, else whoever reaches port "
            f"{config.master_port} could take part. Give the same {SECRET} or --secret-file on "
            "each machine, or --insecure in a network of your own."
        )


def name_here(config: LaunchConfig, hosts: tuple[Host, ...]) -> str | None:
    """Returns this machine's name among the hosts, or None where it is none of them.

    Raises:
        ConfigError: it has a name that the others cannot use, or its place is another's.
    """
    if config.by_hand:
        assert config.node_rank is not None
        if config.node_rank >= len(hosts):
            raise ConfigError(
                f"--node-rank is {config.node_rank}, but {len(hosts)} machines are named: count "
                "from 0."
            )
        return hosts[config.node_rank].name
    here = [host.name for host in hosts if is_here(host.name)]
    if len(hosts) > 1 and any(name in LOOPBACK_NAMES for name in here):
        raise ConfigError(
            f"{here[0]} is a machine's name for itself alone. Give the name or address under which "
            "the other machines reach it."
        )
    return here[0] if here else None


def limits_of(config: LaunchConfig, hosts: tuple[Host, ...], gpus: int) -> Limits:
    """Returns how many machines and workers the job may have.

    Raises:
        ConfigError: fewer are named than it needs.
    """
    if config.nodes is not None:
        low, high = config.nodes
    elif config.discovery or config.min_workers:
        low, high = 1, EVERY
    else:
        low = high = len(hosts)
    if low > len(hosts) and not config.discovery:
        raise ConfigError(
            f"{low} machines are wanted (--nnodes), but {len(hosts)} are named. Name more."
        )
    every = sum(host.slots or slots_of(config.per_node, gpus) for host in hosts[:high])
    least = config.min_workers or (every if low == high else 1)
    if least > every and not config.discovery:
        raise ConfigError(f"--min-workers {least} is more than the {every} workers of the job.")
    unknown = config.per_node in ("auto", "gpu", "cpu") and any(h.slots is None for h in hosts)
    if unknown and len(hosts) > 1 and config.min_workers is None:
        least = 1  # each machine says it when it answers; `low` holds the job together
    return Limits(low, high, least)
