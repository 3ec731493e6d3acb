"""Runs a worker's program inside its process, and writes down what goes wrong in it.

    python -m tfmulti.launch.shim MODULE_OR_SCRIPT [ARGUMENTS…]

with `-m` first for a module. SIGUSR1 makes it write the stack of each of its threads.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import sys
from pathlib import Path

from tfmulti.launched import ERROR_FILE, write_error

STACKS_FILE = "TFMULTI_STACKS_FILE"


def main() -> None:
    """Runs the program that the command line names, as Python would."""
    stacks = os.environ.get(STACKS_FILE)
    if stacks:
        # The handler is C's own: it runs also while the main thread waits inside TensorFlow.
        faulthandler.register(signal.SIGUSR1, file=open(stacks, "w"), all_threads=True)  # noqa: SIM115
    argv = sys.argv[1:]
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            sys.path[0] = os.getcwd()
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            sys.path[0] = str(Path(argv[0]).resolve().parent)
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit:
        raise
    except BaseException as error:
        path = os.environ.get(ERROR_FILE)
        if path and not isinstance(error, KeyboardInterrupt):
            write_error(Path(path), error, int(os.environ.get("RANK", "0")))
        raise


if __name__ == "__main__":
    main()
