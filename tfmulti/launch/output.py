"""Writes the workers' output to the terminal, each line with its rank, and to files as it is."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO

from tfmulti.config.troubleshooting import docs_path_of, documented
from tfmulti.launch.config import LaunchConfig
from tfmulti.launch.heartbeat import WorkerFailure

# Lines that TensorFlow's C++ code writes about itself. They do not explain a failure. Without GPUs
# it reports an error of CUDA at each start.
_CHATTER = re.compile(
    rb"[IW]\d{4,} |E\d{4,} .*(cuInit|Unable to register cu)|WARNING: All log messages before"
    rb"|To enable the following instr|/job:\w+/replica:\d+/task:\d+\s*$"
)

# A message that a worker prints before it ends. Several workers find the same mistake.
_MESSAGE, _MOST_MESSAGES = b"tfmulti: ", 1000

# How many last lines of a worker are kept for the report of a failure, and the bytes of each.
_LAST_LINES, _LONGEST_LINE = 10, 300


class Output:
    """Takes the lines of all workers of an attempt. `line` may be called from any thread.

    Args:
        config: names the streams that go to the terminal, and those that go to files.
        terminals: where the lines are shown, by stream. None: the launcher's standard output and
            standard error.
    """

    def __init__(
        self, config: LaunchConfig, terminals: Mapping[str, IO[str]] | None = None
    ) -> None:
        self._config = config
        self._terminals = terminals or {"stdout": sys.stdout, "stderr": sys.stderr}
        self._lock = threading.Lock()
        self._files: dict[tuple[int, str], IO[bytes]] = {}
        self._last: dict[tuple[int, str], deque[bytes]] = {}
        self._folder: Path | None = None
        self._width = 1
        # Which worker has printed a message first.
        self._told_by: dict[bytes, int] = {}
        # The paths in the docs that were named already.
        self._paths_shown = {""}

    def say(self, message: str) -> None:
        """Shows the user a line of the launcher, and adds each path in the docs only once."""
        path = docs_path_of(message)
        (quote if path in self._paths_shown else say)(message)
        self._paths_shown.add(path)

    def begin(self, folder: Path, workers: int) -> None:
        """Begins an attempt: closes the files of the last one.

        Args:
            folder: the folder of the attempt, with one folder inside for each worker.
            workers: the number of workers.
        """
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()
            self._last.clear()
            self._told_by.clear()
            self._folder, self._width = folder, len(str(workers - 1))

    def folder_of(self, rank: int) -> Path:
        """Returns the absolute path of the folder of a worker's files."""
        assert self._folder is not None
        return (self._folder / f"worker_{rank}").absolute()

    def line(self, rank: int, stream: str, line: bytes) -> None:
        """Shows a line and writes it to its file, as the configuration says.

        A message of tfmulti that several workers print is shown once.

        Args:
            rank: the rank of the worker.
            stream: `stdout` or `stderr`.
            line: the line, with its line end.
        """
        with self._lock:
            if line.strip() and not _CHATTER.match(line):
                last = self._last.setdefault((rank, stream), deque(maxlen=_LAST_LINES))
                last.append(line[:_LONGEST_LINE])
            if stream in self._config.files and self._folder is not None:
                # A full disk does not end the run.
                with contextlib.suppress(OSError):
                    self._file(rank, stream).write(line)
            if stream in self._config.terminal and not self._is_told(rank, line):
                text = line.decode(errors="replace").replace("\b", "").rstrip("\r\n")
                # A terminal that is gone does not end the run.
                with contextlib.suppress(OSError, ValueError):
                    terminal = self._terminals[stream]
                    # A progress bar writes several states in one line. The last one is shown.
                    shown = text.rpartition("\r")[2]
                    coding = getattr(terminal, "encoding", None) or "utf-8"
                    shown = shown.encode(coding, "backslashreplace").decode(coding)
                    terminal.write(f"[worker {rank:>{self._width}}] {shown}\n")
                    terminal.flush()

    def _is_told(self, rank: int, line: bytes) -> bool:
        """Returns whether a line is a message of tfmulti that another worker has printed before."""
        if not line.startswith(_MESSAGE):
            return False
        if len(self._told_by) == _MOST_MESSAGES:
            self._told_by.clear()
        return self._told_by.setdefault(line[:_LONGEST_LINE], rank) != rank

    def last_lines(self, rank: int) -> list[str]:
        """Returns the last lines that a worker wrote, preferably to standard error.

        Empty lines and the log lines of TensorFlow's C++ code (`I0000 …`) do not count. The result
        is empty if there is no other line.
        """
        with self._lock:
            for stream in ("stderr", "stdout"):
                if lines := self._last.get((rank, stream)):
                    return [line.decode(errors="replace").rstrip() for line in lines]
        return []

    def keep_error(self, rank: int, error: WorkerFailure) -> None:
        """Writes error.json into a worker's folder, unless it is there already.

        A worker on another machine writes its own error.json there.
        """
        path = self.folder_of(rank) / "error.json"
        with contextlib.suppress(OSError):
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(asdict(error), indent=2))

    def _file(self, rank: int, stream: str) -> IO[bytes]:
        """Returns the open log file of a worker's stream; makes it at the first line."""
        if (rank, stream) not in self._files:
            folder = self.folder_of(rank)
            folder.mkdir(parents=True, exist_ok=True)
            self._files[rank, stream] = open(folder / f"{stream}.log", "ab", buffering=0)  # noqa: SIM115
        return self._files[rank, stream]


def say(message: str) -> None:
    """Shows the user a line of the launcher itself, on standard error."""
    quote(documented(message))


def quote(message: str) -> None:
    """Shows the user words of a worker as they are, which may resemble a line of the launcher."""
    # A terminal that is gone does not end the run.
    with contextlib.suppress(OSError):
        print(f"[launch] {message}", file=sys.stderr, flush=True)
