"""Where the workers' output goes: to the terminal with their numbers, and to files as it is."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO

from tfmulti.launch.config import LaunchConfig
from tfmulti.launch.heartbeat import WorkerFailure

_CHATTER = re.compile(
    rb"[IW]\d{4,} |WARNING: All log messages before|To enable the following instr"
)


class Output:
    """Takes the lines of all workers of an attempt, from whatever thread.

    Args:
        terminals: the launcher's own standard output and error.
    """

    def __init__(
        self, config: LaunchConfig, terminals: Mapping[str, IO[str]] | None = None
    ) -> None:
        self._config = config
        self._terminals = terminals or {"stdout": sys.stdout, "stderr": sys.stderr}
        self._lock = threading.Lock()
        self._files: dict[tuple[int, str], IO[bytes]] = {}
        self._last: dict[tuple[int, str], bytes] = {}
        self._folder: Path | None = None
        self._width = 1

    def begin(self, folder: Path, workers: int) -> None:
        """Begins an attempt whose files go into a folder for each worker."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()
            self._last.clear()
            self._folder, self._width = folder, len(str(workers - 1))

    def folder_of(self, rank: int) -> Path:
        """Returns the folder of a worker's files."""
        assert self._folder is not None
        return (self._folder / f"worker_{rank}").absolute()

    def line(self, rank: int, stream: str, line: bytes) -> None:
        """Takes a line of a worker."""
        with self._lock:
            if line.strip() and not _CHATTER.match(line):
                self._last[rank, stream] = line
            if stream in self._config.files and self._folder is not None:
                with contextlib.suppress(OSError):  # a full disk does not end the run
                    self._file(rank, stream).write(line)
            if stream in self._config.terminal:
                text = line.decode(errors="replace").replace("\b", "").rstrip("\r\n")
                with contextlib.suppress(OSError, ValueError):  # a terminal that is gone
                    terminal = self._terminals[stream]
                    shown = text.rpartition("\r")[2]  # of a progress bar, its last state
                    coding = getattr(terminal, "encoding", None) or "utf-8"
                    shown = shown.encode(coding, "backslashreplace").decode(coding)
                    terminal.write(f"[worker {rank:>{self._width}}] {shown}\n")
                    terminal.flush()

    def last_line(self, rank: int) -> str:
        """Returns the last line that a worker wrote, to standard error if it wrote there.

        What TensorFlow's C++ says of itself (`I0000 …`) tells nothing of a failure.
        """
        with self._lock:
            for stream in ("stderr", "stdout"):
                if line := self._last.get((rank, stream)):
                    return line.decode(errors="replace").strip()
        return ""

    def keep_error(self, rank: int, error: WorkerFailure) -> None:
        """Writes a worker's error.json, if it stands on another machine."""
        path = self.folder_of(rank) / "error.json"
        with contextlib.suppress(OSError):
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(asdict(error), indent=2))

    def _file(self, rank: int, stream: str) -> IO[bytes]:
        if (rank, stream) not in self._files:
            folder = self.folder_of(rank)
            folder.mkdir(parents=True, exist_ok=True)
            self._files[rank, stream] = open(folder / f"{stream}.log", "ab", buffering=0)  # noqa: SIM115
        return self._files[rank, stream]


def say(words: str) -> None:
    """Shows the user a line of the launcher itself."""
    with contextlib.suppress(OSError):  # a terminal that is gone
        print(f"[launch] {words}", file=sys.stderr, flush=True)
