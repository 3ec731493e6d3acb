"""The command `tfmulti`, whose first argument names what it does.

    tfmulti fit         train a model on one device, many devices or many machines
    tfmulti launch      start the workers of a job, here or on several machines
    tfmulti data        show a data set, its split over replicas, and how fast it is read
    tfmulti bench       measure how a model's training scales, and what limits it
    tfmulti sbatch      write a batch script for Slurm that saves in time and goes on
    tfmulti kubernetes  print a manifest for Kubernetes that starts lost pods again
    tfmulti doctor      check that training works here, on these devices and workers
    tfmulti env         show which launcher or scheduler started this process, and its cluster

`tfmulti COMMAND --help` lists the flags of a command. `fit`, `launch`, `data`, `bench` and `doctor`
are also `python -m tfmulti.fit` and so on.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

from tfmulti.config.command_line import exit_code_of
from tfmulti.config.troubleshooting import print_error
from tfmulti.errors import EXIT_DONE, EXIT_USER, ConfigError, did_you_mean

# The commands, and their modules.
COMMANDS = {
    "fit": "tfmulti.fit",
    "launch": "tfmulti.launch",
    "data": "tfmulti.data",
    "bench": "tfmulti.bench",
    "doctor": "tfmulti.doctor",
    "sbatch": "tfmulti.launch.sbatch",
    "kubernetes": "tfmulti.launch.kubernetes",
    "env": "tfmulti.cluster",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that the first argument names, and returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    name, *arguments = words or ["--help"]
    if name in ("-h", "--help", "help"):
        return exit_code_of(lambda: print(__doc__))
    if name not in COMMANDS:
        print_error(ConfigError(f"no command {name!r}; {did_you_mean(name, COMMANDS)}"))
        return EXIT_USER
    sys.argv = [f"tfmulti {name}", *arguments]
    # `python -m` finds the user's modules in this folder. The script `tfmulti` must find them, too.
    if not sys.flags.safe_path and "" not in sys.path:
        sys.path.insert(0, "")
    runpy.run_module(COMMANDS[name], run_name="__main__", alter_sys=True)
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
