"""The command `tfmulti`: `tfmulti fit|launch|data|bench`, each the same as `python -m tfmulti.…`.

    tfmulti fit       train a model on one device, many devices or many machines
    tfmulti launch    start a job's workers, here or on several machines
    tfmulti data      show a data set, how it is shared out, and how fast it comes
    tfmulti bench     measure how a model's training scales, and what limits it

`tfmulti COMMAND --help` lists the flags of a command.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

from tfmulti.errors import EXIT_DONE, EXIT_USER, did_you_mean

COMMANDS = ("fit", "launch", "data", "bench")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command, whose arguments follow its name, and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    name, *arguments = words or ["--help"]
    if name in ("-h", "--help", "help"):
        print(__doc__)
        return EXIT_DONE
    if name not in COMMANDS:
        print(f"tfmulti: no command {name!r}; {did_you_mean(name, COMMANDS)}", file=sys.stderr)
        return EXIT_USER
    sys.argv = [f"tfmulti {name}", *arguments]
    runpy.run_module(f"tfmulti.{name}", run_name="__main__", alter_sys=True)
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
