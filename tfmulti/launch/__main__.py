"""Starts a job's workers, watches them, and starts them again when one fails.

    python -m tfmulti.launch --nproc-per-node 2 -m tfmulti.fit --run_dir runs/a
    python -m tfmulti.launch --nproc-per-node 2 train.py --its-own-flags
    python -m tfmulti.launch --hosts h1:2,h2:2 -m tfmulti.fit --run_dir /shared/a
    python -m tfmulti.launch --hosts h1:2,h2:2 --node-rank 0 -m tfmulti.fit …  (1 on h2)

Each worker gets TF_CONFIG with an address of its own, RANK, LOCAL_RANK, WORLD_SIZE,
LOCAL_WORLD_SIZE, TFMULTI_RUN_ID, TFMULTI_ATTEMPT, and its part of the GPUs or cores. Each line
that it writes is shown with its number, and kept under logs/attempt_N/worker_K/.

With --hosts the workers run on several machines, started over SSH, or by this command on each of
them with --node-rank. With --nnodes MIN:MAX or --min-workers the job goes on with those that are
left, and grows at a checkpoint when others can take part.

When a worker is killed, exits, freezes or ends no step any more, or its machine does not answer,
all are ended and started again, since TensorFlow's workers cannot come back one by one; tfmulti.fit
with a --run_dir, and Checkpoint in a script of your own, go on from the newest checkpoint. A
mistake in what was asked for (exit code 2) is not tried again. SIGINT, SIGTERM and SIGHUP end all
workers, which first save what they have reached; and none outlives the launcher, whatever ends it.

The exit code is 0, that of the worker that failed first, or 128 + the signal's number.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tfmulti.errors import EXIT_INTERRUPTED, TfmultiError
from tfmulti.launch import flags, supervisor


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    try:
        job = flags.parse(sys.argv[1:] if argv is None else argv, __doc__ or "")
        return supervisor.run(job)
    except TfmultiError as error:
        print(f"tfmulti: {error}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:  # before anything was started
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
