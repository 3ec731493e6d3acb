"""Writes a batch script for Slurm that trains, saves at the time limit, and goes on.

    tfmulti sbatch --nodes 2 --gpus-per-node 4 --time 04:00:00 -- -m tfmulti.fit --epochs 90
    tfmulti sbatch --nodes 2 --tasks-per-node 1 --submit -- train.py
    tfmulti sbatch --array 0-3 -- -m tfmulti.fit --run_dir runs/seed-%a --seed 7

It prints the script, with a comment for each decision, or submits it with --submit. One task is
started for each GPU. Some time before the time limit Slurm sends a signal to all tasks. The run
then writes a checkpoint after the step and ends with exit code 143. The script puts the job back
into the queue. The requeued job has the same number and the same run directory, so it resumes.

In the arguments of the program, %j is the number of the job, %A that of the array and %a that of
the array's task, as in sbatch's own file names.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from tfmulti.config.command_line import Parser, exit_code_of, whole_number
from tfmulti.errors import ConfigError
from tfmulti.launch.scheduled_program import check_program, with_run_dir
from tfmulti.launch.signals import PREEMPTION_SIGNALS

_EXAMPLE = "tfmulti sbatch --nodes 2 -- -m tfmulti.fit …, or a script of your own"

# Slurm's forms of a time: minutes, minutes:seconds, hours:minutes:seconds, and with days before:
# days-hours, days-hours:minutes, days-hours:minutes:seconds.
_TIME = re.compile(r"(?:([0-9]{1,9})-)?([0-9]{1,9})(?::([0-9]{1,9}))?(?::([0-9]{1,9}))?")
_UNLIMITED = ("UNLIMITED", "INFINITE")
_NUMBERS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([1-9][0-9]{0,8}))?)?")
# The program's own time before Slurm's signal is followed by SIGKILL.
_MARGIN_S = 5
# Slurm may send the signal this much earlier than --signal says (`man sbatch`).
_EARLY_S = 60
# The options that the flags of this command set.
_OWN_OPTIONS = (
    *("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "array"),
    *("output", "open-mode", "signal", "requeue", "no-requeue"),
)
_RANDOM = 'od -An -N32 -tx1 /dev/urandom | tr -d "[:space:]"'
_SECRET = f'export TFMULTI_SECRET="${{TFMULTI_SECRET:-$({_RANDOM})}}"'
_PATTERNS = {"%j": "SLURM_JOB_ID", "%A": "SLURM_ARRAY_JOB_ID", "%a": "SLURM_ARRAY_TASK_ID"}


@dataclass(frozen=True, kw_only=True)
class BatchScript:
    """A batch script of Slurm.

    Attributes:
        program: what each task runs: `-m` and a module, or a script, with its arguments.
        nodes: the number of nodes.
        tasks_per_node: the tasks of each node. None: one for each GPU, or one.
        gpus_per_node: the GPUs of each node.
        cpus_per_task: the cores of each task. None leaves it to Slurm.
        time: the time limit, such as 04:00:00. None is the partition's.
        signal: the signal before the time limit: TERM, USR1 or USR2.
        signal_s: how many seconds before the time limit it is sent.
        requeue: whether the job is put back into the queue when it has saved.
        array: the numbers of a job array, such as 0-3.
        name: the name of the job.
        options: further options of sbatch, such as partition=gpu.
        python: the interpreter of each task.

    Raises:
        ConfigError: a value breaks a rule of Slurm or of this command.
    """

    program: tuple[str, ...]
    nodes: int = 1
    tasks_per_node: int | None = None
    gpus_per_node: int = 0
    cpus_per_task: int | None = None
    time: str | None = None
    signal: str = "TERM"
    signal_s: int = 90
    requeue: bool = True
    array: str | None = None
    name: str = "tfmulti"
    options: tuple[str, ...] = ()
    python: str = field(default_factory=lambda: sys.executable)

    def __post_init__(self) -> None:
        check_program(self.program, _EXAMPLE)
        for flag, value, low in (
            ("nodes", self.nodes, 1),
            ("gpus-per-node", self.gpus_per_node, 0),
            ("tasks-per-node", self.tasks, 1),
            ("cpus-per-task", 1 if self.cpus_per_task is None else self.cpus_per_task, 1),
            ("signal-s", self.signal_s, 2 * _MARGIN_S),
        ):
            if value < low:
                raise ConfigError(f"--{flag} is {value}, but it must be at least {low}.")
        if self.gpus_per_node and self.gpus_per_node % self.tasks:
            raise ConfigError(
                f"--tasks-per-node {self.tasks} does not divide --gpus-per-node "
                f"{self.gpus_per_node}. Each task takes as many GPUs; leave --tasks-per-node out "
                "for one task a GPU."
            )
        if self.signal not in PREEMPTION_SIGNALS:
            raise ConfigError(
                f"--signal is {self.signal!r}, but it must be one of "
                f"{', '.join(PREEMPTION_SIGNALS)}."
            )
        if not re.fullmatch(r"[\w.-]+", self.name, re.ASCII):
            raise ConfigError(f"--name is {self.name!r}, but it must look like digits-1.")
        if self.array is not None:
            _check_array(self.array)
        limit_s = None if self.time is None else _seconds(self.time)
        if limit_s is not None and limit_s <= self.signal_s + _EARLY_S:
            # The job would be stopped at its start, requeued, stopped again, and so on.
            raise ConfigError(
                f"--time is {self.time!r}, which is {limit_s} s, but Slurm may send the signal "
                f"{self.signal_s + _EARLY_S} s before the limit: --signal-s {self.signal_s}, and "
                f"up to {_EARLY_S} s earlier. Give the job more time."
            )
        for option in self.options:
            _check_option(option)

    @property
    def tasks(self) -> int:
        """The tasks of each node."""
        return (self.gpus_per_node or 1) if self.tasks_per_node is None else self.tasks_per_node

    @property
    def text(self) -> str:
        """The script."""
        return "\n".join((*self._head(), "", *self._environment(), "", *self._body())) + "\n"

    def _head(self) -> list[str]:
        """Returns the options that sbatch reads."""
        output = "%x-%A_%a.out" if self.array else "%x-%j.out"
        lines = [
            "#!/bin/bash",
            f"#SBATCH --job-name={self.name}",
            f"#SBATCH --nodes={self.nodes}",
            "# One task is one worker.",
            f"#SBATCH --ntasks-per-node={self.tasks}",
        ]
        if self.gpus_per_node:
            lines += [
                "# Each task sees all GPUs of its node, as NCCL needs, and takes its part of them.",
                f"#SBATCH --gpus-per-node={self.gpus_per_node}",
            ]
        if self.cpus_per_task is not None:
            lines.append(f"#SBATCH --cpus-per-task={self.cpus_per_task}")
        if self.time is not None:
            lines.append(f"#SBATCH --time={self.time}")
        if self.array is not None:
            lines.append(f"#SBATCH --array={self.array}")
        lines += [
            f"#SBATCH --output={output}",
            "# A requeued job adds to its output, and does not begin the file anew.",
            "#SBATCH --open-mode=append",
            f"# {self.signal_s} s before the time limit each task gets this signal, and saves.",
            f"#SBATCH --signal={self.signal}@{self.signal_s}",
            "# The job may be put back into the queue, also by Slurm when a node is lost."
            if self.requeue
            else "# The job ends when it has saved: submit it again to go on.",
            "#SBATCH --requeue" if self.requeue else "#SBATCH --no-requeue",
        ]
        return lines + [f"#SBATCH --{option}" for option in self.options]

    def _environment(self) -> list[str]:
        """Returns the lines that set the environment of the tasks."""
        lines = [
            "# How long a task has after the signal until it must have saved.",
            f"export TFMULTI_GRACE_S={self.signal_s - _MARGIN_S}",
            "# The tasks prove to each other that they belong to this job.",
            _SECRET,
        ]
        if self.cpus_per_task is not None:
            lines += [
                "# From 22.05 on srun does not take the cores of a task from sbatch.",
                'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
            ]
        if self.signal != "TERM":
            lines += [
                f"# SIG{self.signal} means the same as SIGTERM.",
                f"export TFMULTI_PREEMPTION_SIGNAL={self.signal}",
            ]
        return lines

    def _body(self) -> list[str]:
        """Returns the commands."""
        lines = [
            "# The tasks end together. --wait ends what is left two minutes after the first one.",
            f"srun --label --wait=120 {self._command()}",
            "code=$?",
        ]
        if self.requeue:
            lines += [
                "",
                "# 143: everything is saved, start me again. 138 and 140: SIGUSR1 or SIGUSR2 came",
                "# before training began. Any other code is an error, which is not tried again.",
                'case "$code" in',
                "    143 | 138 | 140)",
                '        job="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}}"',
                "        if command -v scontrol > /dev/null; then",
                '            scontrol requeue "${job:-$SLURM_JOB_ID}" && exit 0',
                "        fi",
                '        echo "tfmulti: this job has saved, but cannot be requeued from here. Run: '
                'scontrol requeue ${job:-$SLURM_JOB_ID}" >&2',
                "        ;;",
                "esac",
            ]
        return [*lines, 'exit "$code"']

    def _command(self) -> str:
        """Returns the command of a task, with a run directory that stays the same."""
        run_dir = f"runs/{self.name}-{'%A_%a' if self.array else '%j'}"
        arguments = with_run_dir(self.program, run_dir)
        return " ".join(_quoted(word) for word in [self.python, *arguments])


def _seconds(time: str) -> int | None:
    """Returns the seconds of a time limit as Slurm reads it, or None if there is no limit.

    Raises:
        ConfigError: the time has none of Slurm's forms.

    >>> _seconds("30"), _seconds("30:00"), _seconds("04:00:00"), _seconds("1-12"), _seconds("0")
    (1800, 1800, 14400, 129600, None)
    """
    if time.upper() in _UNLIMITED:
        return None
    match = _TIME.fullmatch(time)
    if match is None:
        raise ConfigError(
            f"--time is {time!r}, but it must look like 04:00:00, 1-12:00:00 or UNLIMITED."
        )
    days, *parts = [int(part) for part in match.groups() if part is not None]
    if match[1] is None:
        # One part is minutes, two are minutes:seconds.
        parts = [days, *parts] if match[4] else [0, days, *parts]
        days = 0
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds or None


def _check_array(array: str) -> None:
    """Checks the numbers of a job array, such as `0-3`, `1,5,7` or `0-20:4%2`.

    Raises:
        ConfigError: they do not parse, or a range falls.
    """
    numbers, percent, tasks_at_once = array.partition("%")
    matches = [_NUMBERS.fullmatch(part) for part in numbers.split(",")]
    if not all(matches) or (percent and not re.fullmatch("[1-9][0-9]{0,8}", tasks_at_once)):
        raise ConfigError(f"--array is {array!r}, but it must look like 0-3, 1,5,7 or 0-20:4%2.")
    for match in matches:
        if match and match[2] and int(match[2]) < int(match[1]):
            raise ConfigError(
                f"--array is {array!r}, but the range {match[1]}-{match[2]} falls. Write "
                f"{match[2]}-{match[1]}."
            )


def _check_option(option: str) -> None:
    """Checks a further option of sbatch.

    Raises:
        ConfigError: it has another form, or would override a flag of this command.
    """
    if not re.fullmatch(r"[a-z][a-z-]*(=[^\s]+)?", option):
        raise ConfigError(
            f"--option is {option!r}, but it must look like partition=gpu, an option of sbatch "
            "without its dashes."
        )
    name = option.partition("=")[0]
    # sbatch accepts the beginning of a name, too.
    overridden = next((own for own in _OWN_OPTIONS if own.startswith(name)), None)
    if overridden is not None:
        raise ConfigError(
            f"--option is {option!r}, but this command sets {overridden} itself. Use its own "
            "flags; tfmulti sbatch --help lists them."
        )


def _quoted(word: str) -> str:
    """Returns a word as the shell reads it, with sbatch's patterns as variables.

    >>> _quoted("runs/%A_%a")
    'runs/"$SLURM_ARRAY_JOB_ID"_"$SLURM_ARRAY_TASK_ID"'
    """
    parts = re.split("(%[jAa])", word)
    quoted_parts = [
        f'"${_PATTERNS[part]}"' if part in _PATTERNS else shlex.quote(part) if part else ""
        for part in parts
    ]
    return "".join(quoted_parts) or "''"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return exit_code_of(lambda: write(sys.argv[1:] if argv is None else argv))


def write(arguments: Sequence[str]) -> None:
    """Prints the script that a command line describes, or submits it.

    Raises:
        ConfigError: a value breaks a rule, or sbatch is not there or refuses the script.
    """
    script = parsed(arguments)
    submits = "--submit" in arguments[: list(arguments).index("--")]
    print(_submitted(script.text) if submits else script.text, end="")


def parsed(arguments: Sequence[str]) -> BatchScript:
    """Returns the script that a command line describes.

    Raises:
        ConfigError: a value breaks a rule, or no program is given.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    values = vars(_parser().parsed(arguments[:end]))
    values.pop("submit", None)
    options = tuple(values.pop("option", ()))
    return BatchScript(program=tuple(arguments[end + 1 :]), options=options, **values)


def _parser() -> Parser:
    """Returns the parser of the flags before `--`."""
    parser = Parser("tfmulti sbatch", __doc__ or "", program=_EXAMPLE)
    # The defaults are those of `BatchScript`.
    parser.argument_default = argparse.SUPPRESS
    add = parser.add_argument
    add("--nodes", type=whole_number, help="nodes of the job (default 1)")
    add("--tasks-per-node", type=whole_number, help="workers of each node (default: one a GPU)")
    add("--gpus-per-node", type=whole_number, help="GPUs of each node (default 0)")
    add("--cpus-per-task", type=whole_number, help="cores of each worker (default: Slurm's)")
    add("--time", help="time limit, such as 04:00:00 (default: the partition's)")
    add("--signal", help="signal before the limit: TERM, USR1, USR2")
    add("--signal-s", type=whole_number, help="seconds before the limit (default 90)")
    add("--no-requeue", dest="requeue", action="store_false", help="end when it has saved")
    add("--array", help="numbers of a job array, such as 0-3")
    add("--name", help="name of the job")
    add("--option", action="append", help="option of sbatch, such as partition=gpu")
    add("--submit", action="store_true", help="submit the script, and print what sbatch says")
    return parser


def _submitted(text: str) -> str:
    """Returns what sbatch says of a script that it has taken.

    Raises:
        ConfigError: sbatch is not there, or refuses the script.
    """
    program = shutil.which("sbatch")
    if program is None:
        raise ConfigError(
            "--submit: there is no sbatch on this machine. Leave --submit out, and submit the "
            "script where Slurm is."
        )
    submission = subprocess.run([program], input=text, capture_output=True, text=True)
    if submission.returncode:
        raise ConfigError(f"--submit: {' '.join(submission.stderr.split())}")
    return submission.stdout


if __name__ == "__main__":
    sys.exit(main())
