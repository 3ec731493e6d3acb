"""Starts the workers of a job, watches them, and starts them again when one fails.

    python -m tfmulti.launch --nproc-per-node 2 -m tfmulti.fit --run_dir runs/a
    python -m tfmulti.launch --nproc-per-node 2 train.py --its-own-flags
    python -m tfmulti.launch --hosts h1:2,h2:2 -m tfmulti.fit --run_dir /shared/a
    python -m tfmulti.launch --hosts h1:2,h2:2 --node-rank 0 -m tfmulti.fit …  (1 on h2)

Each worker gets TF_CONFIG with an address of its own, RANK, LOCAL_RANK, WORLD_SIZE,
LOCAL_WORLD_SIZE, TFMULTI_RUN_ID, TFMULTI_ATTEMPT, and its part of the GPUs or cores. The launcher
shows each line of a worker's output with the rank of the worker, and keeps it in
logs/attempt_N/worker_K/.

With --hosts the workers run on several machines. The launcher starts them over SSH. Without it, in
an allocation of Slurm, PBS or LSF, the launcher takes the hosts of the allocation, and starts the
workers of other hosts by srun under Slurm. Run it once there, not by srun or mpirun. With
--node-rank it does not use SSH: start this command by hand on each machine. With --nnodes MIN:MAX
or --min-workers the job goes on with the machines that are left. It grows again at a checkpoint,
when other machines can take part.

The launcher ends all workers and starts them again if a worker is killed, exits, freezes or ends no
step any more, or if its machine does not answer. TensorFlow cannot take back a single worker.
tfmulti.fit with a --run_dir resumes from the newest checkpoint, and so does a script of your own
that uses Checkpoint. A user's mistake (exit code 2) does not lead to a restart.

SIGINT, SIGTERM and SIGHUP end all workers, which first save a checkpoint. No worker outlives the
launcher, even if the launcher is killed.

The exit code is 0, that of the worker that failed first, or 128 + the number of the signal.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tfmulti.config.command_line import exit_code_of
from tfmulti.launch import flags, supervisor


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code.

    Args:
        argv: the arguments of the command line. None: those of this process.
    """
    arguments = sys.argv[1:] if argv is None else argv
    return exit_code_of(
        lambda: supervisor.run(flags.parse(arguments, __doc__ or ""), command=arguments)
    )


if __name__ == "__main__":
    sys.exit(main())
