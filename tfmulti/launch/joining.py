"""Says which workers are missing while a worker waits in TensorFlow for the others to join.

TensorFlow holds Python's global lock while it waits, so no thread of the worker can look. A process
of its own does it, which `watching_join` starts and ends. It reads a `Join` from standard input.

This process tries the address of every other worker when the worker has waited for five seconds,
for a minute, and when it gets SIGUSR1. It prints a line with the addresses at which nobody listens.
Except after five seconds, it also writes hang_worker_K.json with these workers and with the stack
of the waiting worker. It ends when its standard input does, so it does not outlive the worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tfmulti.config.run_directory import write_text
from tfmulti.config.troubleshooting import documented
from tfmulti.launch.addresses import NO_NAME, why_silent
from tfmulti.launch.stacks import STACKS_FILE, file_of_stacks, own_stderr

# Workers that are started together join within the first time. A wrong address shows soon.
EARLY_S, LATE_S = 5.0, 60.0
_LOOK_S, _CALL_S, _END_S = 0.5, 2.0, 2.0
_CALLS_AT_ONCE = 32
_SHOWN = 3
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.M)


@dataclass(frozen=True)
class Join:
    """A worker that waits for the others to join.

    Attributes:
        rank: its rank.
        addresses: the `host:port` of each worker.
        folder: the folder of hang_worker_K.json. Without one only the line is printed.
        pid: the id of its process.
        stacks: the descriptor of the file to which SIGUSR1 adds its stack, or None.
        size: the bytes of that file when the worker began to wait. The signal may come before the
            process that watches has started.
    """

    rank: int
    addresses: tuple[str, ...]
    folder: str | None
    pid: int
    stacks: int | None
    size: int = 0


def hang_file(rank: int | str) -> str:
    """Returns the name of the file in which a worker says what it waits for."""
    return f"hang_worker_{rank}.json"


@contextlib.contextmanager
def watching_join(rank: int, addresses: Sequence[str], folder: str | None) -> Iterator[None]:
    """A context in which a process of its own watches how long this one waits for the others.

    Args:
        rank: the rank of this worker.
        addresses: the `host:port` of each worker.
        folder: the folder of hang_worker_K.json, or None.
    """
    with file_of_stacks() as stacks:
        size = 0 if stacks is None else os.fstat(stacks).st_size
        join = Join(rank, tuple(addresses), folder, os.getpid(), stacks, size)
        try:
            process = _started(join)
        except OSError:
            # The worker can join without it.
            yield
            return
        try:
            yield
        finally:
            _end(process)


def _started(join: Join) -> subprocess.Popen[str]:
    """Starts the process that watches a worker.

    Raises:
        OSError: the system has no resources for it.
    """
    # With -P no module of the current folder takes the place of one of Python's own. The folder of
    # this package comes last, because others may be installed there.
    code = "import sys; sys.path.append(sys.argv[1]); from tfmulti.launch import joining; "
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", f"{code}joining.main()", str(Path(__file__).parents[2])],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=own_stderr(),
        pass_fds=() if join.stacks is None else (join.stacks,),
        # Ctrl-C is for the worker.
        start_new_session=True,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(asdict(join)) + "\n")
    process.stdin.flush()
    return process


def _end(process: subprocess.Popen[str]) -> None:
    """Ends the process that watches a worker."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        # It may be writing to a file server that is gone.
        process.kill()
        process.wait()


def watch(join: Join, early_s: float = EARLY_S, late_s: float = LATE_S) -> None:
    """Watches a worker until the standard input of this process ends.

    Args:
        join: the worker.
        early_s: after how many seconds a line names the workers that do not listen.
        late_s: after how many seconds the worker has waited too long.
    """
    began, size, due_s = time.monotonic(), join.size, [early_s, late_s]
    while not select.select([sys.stdin], [], [], _LOOK_S)[0]:
        before, size = size, _size(join)
        asked, waited_s = size > before, time.monotonic() - began
        if not asked and (not due_s or waited_s < due_s[0]):
            continue
        if not asked:
            due_s.pop(0)
            if due_s:
                if silent := not_listening(join):
                    tell(join, waited_s, silent)
                continue
            if join.stacks is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(join.pid, signal.SIGUSR1)
        # The stacks may not be written completely yet.
        time.sleep(_LOOK_S)
        size = _size(join)
        report(join, asked, waited_s, _stacks_since(join, before))


def report(join: Join, asked: bool, waited_s: float, stacks: str) -> None:
    """Writes hang_worker_K.json, and prints for which workers the worker waits.

    Args:
        join: the worker.
        asked: whether SIGUSR1 has asked for it.
        waited_s: how long the worker has waited.
        stacks: the stacks of its main thread, as faulthandler writes them.
    """
    silent = not_listening(join)
    path = None if join.folder is None else Path(join.folder) / hang_file(join.rank)
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(
                path, json.dumps(content(join, waited_s, list(silent), stacks), indent=1) + "\n"
            )
        except OSError:
            path = None
    elif asked:
        # Without a folder the stacks go to standard error, as usual at SIGUSR1.
        print(stacks, end="", file=sys.stderr)
    tell(join, waited_s, silent, asked, f". See {path}" if path else "")


def tell(
    join: Join, waited_s: float, silent: Mapping[int, str], asked: bool = False, end: str = ""
) -> None:
    """Prints for which workers the worker waits, and why. Of several late ones, the first prints.

    Args:
        join: the worker.
        waited_s: how long it has waited.
        silent: why nothing listens at the address of a worker, by the ranks of these workers.
        asked: whether SIGUSR1 has asked for it.
        end: the end of the line.
    """
    if not asked and not all(rank in silent for rank in range(join.rank)):
        return
    named = [
        f"worker {rank} does not listen at {join.addresses[rank]} "
        f"({'the name does not resolve' if why == NO_NAME else why})"
        for rank, why in silent.items()
    ]
    words = ", ".join(named[:_SHOWN]) + (", …" if len(named) > _SHOWN else "")
    if named:
        them, their = ("it", "its address") if len(named) == 1 else ("them", "their addresses")
        words += f". Start {them}, or correct {their}{source(join, os.environ)}"
    line = (
        f"tfmulti: worker {join.rank}: it has waited for {waited_s:.0f} s for the others to join; "
        f"{words or 'all others listen'}{end}"
    )
    print(documented(line), file=sys.stderr, flush=True)


def source(join: Join, env: Mapping[str, str]) -> str:
    """Returns who has set TF_CONFIG, as the end of a sentence. Empty: it has no such addresses.

    Args:
        join: the worker.
        env: the environment of the worker when it began to wait.
    """
    text = env.get("TF_CONFIG", "")
    if not all(f'"{address}"' in text for address in join.addresses):
        return ""
    if STACKS_FILE in env:
        return " in TF_CONFIG, which the launcher has set"
    try:
        at_start = Path(f"/proc/{join.pid}/environ").read_bytes().split(b"\0")
    except OSError:
        at_start = []
    if os.fsencode(f"TF_CONFIG={text}") in at_start:
        return " in TF_CONFIG, which this process has got from the shell or program that started it"
    return " in TF_CONFIG, which the script itself has set"


def content(join: Join, waited_s: float, missing: Sequence[int], stacks: str) -> dict[str, object]:
    """Returns what hang_worker_K.json holds, in the form that the watchdog of `fit` gives it.

    Args:
        join: the worker.
        waited_s: how long it has waited.
        missing: the ranks of the workers that do not listen.
        stacks: the stacks of its main thread, as faulthandler writes them.
    """
    waits = {"what": "the rendezvous", "missing": list(missing), "seconds": round(waited_s, 3)}
    return {
        "worker": join.rank,
        "host": os.uname().nodename,
        "pid": join.pid,
        "time": time.time(),
        "step": 0,
        "phase": "joining",
        "seconds": round(waited_s, 3),
        "usual_step_s": 0.0,
        "at": "",
        "reads": "",
        "waits": [waits] if missing else [],
        "last_collectives": [],
        "stacks": {"MainThread": last_stack(stacks)} if stacks else {},
    }


def last_stack(text: str) -> list[str]:
    r"""Returns the last stack that faulthandler has written, the innermost call last.

    >>> last_stack('Stack (most recent call first):\n  File "a.py", line 3 in f\n')
    ['a.py:3 f']
    """
    frames = _FRAME.findall(text.rpartition("Stack (")[2])
    return [f"{file}:{line} {name}" for file, line, name in reversed(frames)]


def not_listening(join: Join) -> dict[int, str]:
    """Returns why nothing listens at the address of another worker, by the ranks of these."""

    def why(rank: int) -> str:
        return why_silent(join.addresses[rank], _CALL_S)

    others = [rank for rank in range(len(join.addresses)) if rank != join.rank]
    with ThreadPoolExecutor(_CALLS_AT_ONCE) as pool:
        return {
            rank: words for rank, words in zip(others, pool.map(why, others), strict=True) if words
        }


def _size(join: Join) -> int:
    """Returns the size of the file to which SIGUSR1 adds the stacks."""
    return 0 if join.stacks is None else os.fstat(join.stacks).st_size


def _stacks_since(join: Join, begin: int) -> str:
    """Returns the stacks that were added to the file since it had so many bytes."""
    if join.stacks is None:
        return ""
    return os.pread(join.stacks, _size(join) - begin, begin).decode(errors="replace")


def main() -> None:
    """Watches the worker that the first line of standard input describes."""
    values = json.loads(sys.stdin.readline())
    watch(Join(**values | {"addresses": tuple(values["addresses"])}))
