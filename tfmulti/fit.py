"""Trains a Keras model on one device, many devices or many machines.

    python -m tfmulti.fit                                     digits, one device
    python -m tfmulti.fit --strategy mirrored --replicas 2    two local devices
    python -m tfmulti.fit --dataset mnist --model lenet --global_batch_size 128
    python -m tfmulti.fit --config runs/NAME/config.json      the same run again

On several machines, `tfmulti launch` or a scheduler starts the same command on each of them. Ranks
and addresses come from the scheduler's variables, or from TF_CONFIG: see `tfmulti env`.

Exit codes: 0 done; 1 the program failed; 2 a mistake of the user, with one line on standard error;
130 stopped by Ctrl-C and 143 stopped by SIGTERM, both with the progress saved.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

from tfmulti import errors
from tfmulti.cluster.environments import find_cluster
from tfmulti.config.command_line import exit_code_of
from tfmulti.config.console import quiet_stderr
from tfmulti.config.flags import help_text, make_flags, parse
from tfmulti.errors import TfmultiError
from tfmulti.launch import garbage_collection
from tfmulti.launch.heartbeat import note_error
from tfmulti.launch.stacks import show_at_sigusr1
from tfmulti.run import validation


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""

    def command() -> int:
        try:
            return fit(sys.argv if argv is None else argv)
        except TfmultiError as error:
            note_error(error)
            raise
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            full = TfmultiError(
                "the disk is full. Free some space, and start again with the same --run_dir: the "
                "run continues from its newest checkpoint."
            )
            note_error(full)
            raise full from error
        except KeyboardInterrupt:
            print("tfmulti: stopped by Ctrl-C before training began.", file=sys.stderr)
            return errors.EXIT_INTERRUPTED

    return exit_code_of(command)


def fit(argv: Sequence[str]) -> int:
    """Trains as a command line asks, and returns the exit code.

    Raises:
        TfmultiError: training has failed.
        UserError: the run cannot be as the command line asks.
    """
    show_at_sigusr1()
    config = parse(argv)
    if config is None:
        print(help_text(__doc__ or "", make_flags()))
        return errors.EXIT_DONE
    cluster, _ = find_cluster(os.environ, config.environment)
    if cluster is not None and cluster.is_evaluator:
        print("tfmulti: the workers evaluate; this evaluator task has nothing to do.")
        return errors.EXIT_DONE
    # TensorFlow reads this variable when it is imported, which `check` does to look for data at
    # gs://….
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    job = validation.check(config, cluster)
    if job.done is not None:
        print(
            f"{'done':<10} {config.run_dir} has all {job.done.epochs} epochs; nothing is left "
            "to do. Give more --epochs, or a new --run_dir."
        )
        return errors.EXIT_DONE
    with quiet_stderr(), garbage_collection.importing():
        # The import of TensorFlow takes 4 s, so mistakes of the user are reported before it.
        from tfmulti.run import train
    stopped_by = train.run(job).stopped_by
    return {"SIGINT": errors.EXIT_INTERRUPTED, "SIGTERM": errors.EXIT_TERMINATED}.get(
        stopped_by or "", errors.EXIT_DONE
    )


if __name__ == "__main__":
    sys.exit(main())
