"""Answers "will it train here, and if not, what do I do?" in under a minute.

    python -m tfmulti.doctor                      this machine, with --strategy auto
    python -m tfmulti.doctor --strategy mirrored --replicas 2
    python -m tfmulti.launch --nproc 2 -m tfmulti.doctor
    srun python -m tfmulti.doctor --model resnet20 --run_dir /shared/runs/a

It looks at versions, GPUs, cores, memory, files and proxies. Of several workers, started by any
launcher or scheduler, it compares these, and measures every link between two workers. Then it sums
over all devices, trains on the digits and compares the numbers with those of one device, and
measures the model of --model on one device and on all.

It takes the flags of python -m tfmulti.fit that say where and what is trained. The report has no
secrets and no values of the environment but the hosts of proxies. The exit code is 0 if it will
train, with or without warnings, 1 if a check has failed, and 2 for a mistake in the flags.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from tfmulti.cluster.cluster import Cluster
from tfmulti.cluster.environments import check_trains, find_cluster
from tfmulti.cluster.gpus import gpus_of_task
from tfmulti.cluster.selection import select
from tfmulti.config.command_line import exit_code_of
from tfmulti.config.console import quiet_stderr
from tfmulti.config.fit_config import FitConfig
from tfmulti.config.flags import config_of, help_text, make_flags, parse_flags
from tfmulti.config.limited_reading import read_small
from tfmulti.doctor import job, machine
from tfmulti.doctor.finding import FAILED, OK, Finding, Report, has_failed
from tfmulti.doctor.network import Network, holder_of
from tfmulti.doctor.result import Result
from tfmulti.doctor.trust import check_trust, own_addresses
from tfmulti.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    ChecksFailed,
    ConfigError,
    DeviceError,
    TfmultiError,
)
from tfmulti.launch.heartbeat import note_error

_OWN_FLAGS = ("json", "training", "wait_s")
_USED_FLAGS = (
    *("strategy", "replicas", "environment", "ignore_cluster", "dataset", "model", "run_dir"),
    *("shared_run_dir", "global_batch_size", "precision", "optimizer", "seed"),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of the doctor's command line.

    Attributes:
        config: the run that is tried.
        json: whether the report is one JSON object.
        training: whether the devices are tried by training.
        wait_s: how long to wait for the other workers.
    """

    config: FitConfig
    json: bool
    training: bool
    wait_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""

    def command() -> int:
        options = parse(sys.argv if argv is None else argv)
        if options is None:
            return EXIT_DONE
        with contextlib.ExitStack() as until_printed, _naming_a_lack_of_files():
            code = examine(options, os.environ, until_printed)
        if code == EXIT_FAILED:
            note_error(ChecksFailed("its report says what to do"))
        return code

    return exit_code_of(command)


@contextlib.contextmanager
def _naming_a_lack_of_files() -> Iterator[None]:
    """Raises TfmultiError if no more files can be opened in the context, which any check may do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise TfmultiError(
            f"the doctor cannot go on: {error.strerror}. Raise the limit (ulimit -n), or end "
            "programs that hold many files."
        ) from None


def parse(argv: Sequence[str]) -> Options | None:
    """Returns the options of a command line, or None if it asks for help, which is then printed.

    Raises:
        ConfigError: a flag is unknown or wrong.
    """
    values = make_flags()
    values.set_default("dataset", "synthetic")
    values["dataset"].help = "The data whose speed is measured. Default: of the model's form."
    values.set_default("model", "mlp")
    values["model"].help += " Its speed is measured."
    flags.DEFINE_boolean("json", False, "Print one JSON object.", flag_values=values)
    flags.DEFINE_boolean("training", True, "Try the devices by training, too.", flag_values=values)
    flags.DEFINE_string(
        "wait_s", "30", "Seconds within which all workers must connect.", flag_values=values
    )
    unused = tuple(f.name for f in dataclasses.fields(FitConfig) if f.name not in _USED_FLAGS)
    if not parse_flags(values, argv, unused, "the doctor"):
        print(help_text(__doc__ or "", values, _OWN_FLAGS, unused))
        return None
    try:
        wait_s = float(values.wait_s)
    except ValueError:
        wait_s = -1.0
    if not 0 < wait_s < 86400:
        raise ConfigError(f"--wait_s is {values.wait_s!r}, but it must be seconds above 0.")
    changed: dict[str, Any] = {"dataset": values.dataset, "model": values.model}
    if not values["global_batch_size"].present:
        changed["global_batch_size"] = None
        changed["per_replica_batch_size"] = 64
    # A dry run writes nothing.
    config = config_of(values, **changed, dry_run=True, verbose="0", epochs=1)
    return Options(config, values.json, values.training, wait_s)


def examine(options: Options, env: Mapping[str, str], until_printed: contextlib.ExitStack) -> int:
    """Does all checks, prints the report on the chief, and returns the exit code.

    Args:
        options: the options of the command line.
        env: the environment variables.
        until_printed: takes the connections to the other workers after a check has failed. While
            the chief holds them open, the other workers wait for its report.

    Raises:
        UserError: a flag does not fit the environment.
    """
    began, config = time.monotonic(), options.config
    cluster, _ = find_cluster(env, config.environment)
    check_trains(cluster)
    if config.ignore_cluster:
        cluster = None
    local = (0, 1) if cluster is None else (cluster.local_rank, cluster.local_size)
    gpus = len(gpus_of_task(env, *local))
    try:
        selection = select(config.strategy, replicas=config.replicas, cluster=cluster, gpus=gpus)
    except DeviceError as error:
        raise ConfigError(str(error)) from None
    findings = machine.check_machine(env, cluster, config.run_dir)
    links: list[dict[str, float]] = []
    passed = not has_failed(findings)
    if cluster is not None and cluster.size > 1:
        compared = check_job(options, cluster, env, findings, until_printed)
        if compared is None:
            return _report_alone(cluster, findings)
        machine_findings, (findings, links, passed) = findings, compared
        if not cluster.is_chief and has_failed(machine_findings):
            # The log of its own machine must name the fault, too.
            return _report_alone(cluster, machine_findings)
    if passed and options.training:
        findings += _check_by_training(options, cluster, env, links)
    else:
        # With training, the strategy is made, and this finding stands among those of training.
        findings.append(Finding("strategy", OK, f"{selection.strategy}: {selection.why}"))
    if cluster is not None and not cluster.is_chief:
        return EXIT_DONE if passed and not has_failed(findings) else EXIT_FAILED
    workers = 1 if cluster is None else cluster.size
    report = Report(findings, workers, links, time.monotonic() - began)
    print(report.to_json() if options.json else "\n".join(report.lines()), flush=True)
    return EXIT_FAILED if report.has_failed else EXIT_DONE


def check_job(
    options: Options,
    cluster: Cluster,
    env: Mapping[str, str],
    findings: list[Finding],
    until_printed: contextlib.ExitStack,
) -> tuple[list[Finding], list[dict[str, float]], bool] | None:
    """Compares the workers and measures the links between them.

    Args:
        options: the options of the command line.
        cluster: the cluster.
        env: the environment variables.
        findings: the findings about this worker's machine.
        until_printed: takes the connections to the other workers if a check has failed.

    Returns:
        The findings, the links, and whether nothing has failed. The findings and the links are
        empty on workers other than the chief. None: the chief could not be reached.
    """
    run_dir = options.config.run_dir if options.config.shared_run_dir else None
    with run_directory_mark(cluster, run_dir):
        try:
            network = Network(cluster, env, options.wait_s)
        except OSError as error:
            findings.append(_no_port(cluster, error))
            return None
        with contextlib.ExitStack() as measuring:
            measuring.enter_context(network)
            result = network.measure()
            findings += network.check_free_ports()
            result.findings = [dataclasses.asdict(finding) for finding in findings]
            gpus = len(gpus_of_task(env, cluster.local_rank, cluster.local_size))
            result.facts = {"versions": machine.versions(), "GPUs": gpus}
            result.facts["seen"] = _read_mark(run_dir)
            job_findings: list[Finding] = []
            links: list[dict[str, float]] = []

            def decide(results: Mapping[int, Result]) -> bool:
                job_findings.extend(job.compare(cluster, results, network.duplicate_ranks))
                job_findings.extend(check_trust(cluster, env, own_addresses()))
                links.extend(job.links_of(results))
                return not has_failed(job_findings)

            verdict = network.exchange(result, decide if cluster.is_chief else None)
            if verdict is not True:
                until_printed.push(measuring.pop_all())
                if not cluster.is_chief:
                    network.wait_for_chief()
    return None if verdict is None else (job_findings, links, verdict is True)


@contextlib.contextmanager
def run_directory_mark(cluster: Cluster, run_dir: str | None) -> Iterator[None]:
    """A context in which a file with random content, the chief's mark, is in the run directory.

    The other workers read the mark, which shows whether they see the same folder.
    """
    if run_dir is None or not cluster.is_chief:
        yield
        return
    path = Path(run_dir) / machine.MARK_FILE
    is_new_folder = False
    # `machine` reports a run directory that cannot be written.
    with contextlib.suppress(OSError):
        is_new_folder = not path.parent.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        # The file of a doctor that was killed may be left, or a link of another user.
        path.unlink(missing_ok=True)
        with path.open("x") as file:
            file.write(os.urandom(16).hex())
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            if is_new_folder and not any(path.parent.iterdir()):
                path.parent.rmdir()


def _read_mark(run_dir: str | None) -> str | None:
    """Returns the chief's mark in the run directory as this worker sees it, or None."""
    if run_dir is None:
        return None
    try:
        return read_small(Path(run_dir) / machine.MARK_FILE, 64).decode()
    except (OSError, UnicodeDecodeError):
        return None


def _no_port(cluster: Cluster, error: OSError) -> Finding:
    """Returns the finding about a port at which this worker cannot listen."""
    address = cluster.addresses[cluster.rank]
    port = int(address.rpartition(":")[2])
    return Finding(
        "port",
        FAILED,
        f"cannot listen at {address}: {error.strerror}; {holder_of(port)} has it",
        "the port of each worker is free",
        "End that program, or give TF_CONFIG another port.",
    )


def _report_alone(cluster: Cluster, findings: Sequence[Finding]) -> int:
    """Prints what is wrong on a worker other than the chief, and returns the exit code."""
    problems = [finding for finding in findings if finding.status != OK]
    if not has_failed(problems):
        problems.append(
            Finding(
                "chief",
                FAILED,
                f"worker 0 ({cluster.addresses[0]}) has not answered",
                "every worker runs the doctor at the same time, and reaches worker 0",
                "Read what worker 0 prints; look at the firewalls between the two.",
            )
        )
    for finding in problems:
        for line in dataclasses.replace(finding, worker=cluster.rank).lines():
            print(line, file=sys.stderr, flush=True)
    return EXIT_FAILED


def _check_by_training(
    options: Options, cluster: Cluster | None, env: Mapping[str, str], links: list[dict[str, float]]
) -> list[Finding]:
    """Returns the findings of training. An error of training is a finding as well."""
    try:
        # TensorFlow is imported only when nothing before has failed.
        with quiet_stderr():
            from tfmulti.doctor.training import check_training

        # The lines that a run prints while it is set up do not belong to the report.
        with contextlib.redirect_stdout(sys.stderr):
            return check_training(options.config, cluster, env, links)
    except ConfigError:
        raise
    except (TfmultiError, ImportError) as error:
        return [
            Finding(
                "training",
                FAILED,
                " ".join(str(error).split()),
                "training begins and ends without an error",
                "Follow the message; python -m tfmulti.fit --epochs 1 with the same flags shows "
                "all lines of such a run.",
            )
        ]


if __name__ == "__main__":
    sys.exit(main())
