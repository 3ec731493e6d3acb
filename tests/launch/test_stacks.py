"""Tests that SIGUSR1 writes the stack of a process that goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

BUSY = """
import sys, threading
from tfmulti.launch.stacks import show_at_sigusr1

def calls(depth):
    return 0 if depth == 0 else 1 + calls(depth - 1)

def work():
    while True:
        calls(300)

for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
show_at_sigusr1()
print("ready", flush=True)
sys.stdin.readline()
"""
SIGNALS = 5000


def test_signals_end_no_process_whose_threads_run() -> None:
    """Reading the stacks of running threads would end it after some hundred signals."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        sent = 0
        while sent < SIGNALS and process.poll() is None:
            os.kill(process.pid, signal.SIGUSR1)
            sent += 1
        _, errors = process.communicate("end\n", timeout=60)
    assert process.returncode == 0
    assert "Stack (most recent call first):\n" in errors
    assert 'File "<string>"' in errors
