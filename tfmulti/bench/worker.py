"""Runs one measured process, which takes its cores, measures and writes its result.

    python -m tfmulti.bench.worker REQUEST.json

The launcher starts it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tfmulti.bench.request import MeasureRequest
from tfmulti.cluster.environments import find_cluster
from tfmulti.config.run_directory import write_text
from tfmulti.config.troubleshooting import print_error
from tfmulti.errors import EXIT_DONE, TfmultiError
from tfmulti.launch import garbage_collection
from tfmulti.launch.workers import THREADS


def main(argv: Sequence[str]) -> int:
    """Measures what the file of a request asks for, and returns the exit code."""
    request = MeasureRequest.from_json(Path(argv[0]).read_text())
    cluster, _ = find_cluster(os.environ)
    rank = 0 if cluster is None else cluster.rank
    take_cores(request.cores[rank])
    try:
        with garbage_collection.importing():
            # TensorFlow counts its threads when it is imported, which must be after `take_cores`.
            from tfmulti.bench import measure

        result = measure.measure_process(request, None if request.run.ignore_cluster else cluster)
    except TfmultiError as error:
        print_error(error)
        return int(error.exit_code)
    write_text(request.result_file(rank), result.to_json())
    return EXIT_DONE


def take_cores(cores: Sequence[int]) -> None:
    """Restricts this process to the given cores, and TensorFlow to one thread for each of them."""
    os.sched_setaffinity(0, cores)
    for name in THREADS:
        os.environ[name] = str(len(cores))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
