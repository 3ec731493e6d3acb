"""Shows which launcher or scheduler has started this process, and the cluster that it describes.

    tfmulti env            in words
    tfmulti env --json     for programs: environment, variables, rank, size, tf_config

Run it as the training would be run, such as `srun -n 2 tfmulti env`. It waits for no other process.
Where a scheduler tells no ports, it shows the planned ones; the processes of a training agree on
others if one is taken.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tfmulti.cluster.cluster import Cluster
from tfmulti.cluster.environments import CHOICES, Described, described
from tfmulti.config.console import speaker
from tfmulti.errors import EXIT_DONE, TfmultiError
from tfmulti.troubleshooting import print_error


def main(argv: Sequence[str] | None = None, env: Mapping[str, str] = os.environ) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(
        "tfmulti env", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--environment", default="auto", help=f"one of {', '.join(CHOICES)}")
    given = parser.parse_args(argv)
    try:
        found = described(env, given.environment)
    except TfmultiError as error:
        print_error(error)
        return int(error.exit_code)
    about = _about(found)
    if given.json:
        print(json.dumps(about))
        return EXIT_DONE
    say = speaker(True)
    if found is None:
        say("found", "no job: this process trains alone")
        return EXIT_DONE
    say("found", f"{found.name}: process {about['rank']} of {about['size']}")
    say("by", ", ".join(found.variables))
    tf_config = about["tf_config"]
    say("TF_CONFIG", json.dumps(tf_config) if tf_config else "known when all have started")
    if tf_config and not about["is_final"]:
        say("ports", "planned; the processes agree on others if one is taken")
    return EXIT_DONE


def _about(found: Described | None) -> dict[str, Any]:
    """Returns what is known of the environment, as a JSON object."""
    if found is None:
        alone: dict[str, Any] = {"environment": None, "variables": [], "rank": 0, "size": 1}
        return alone | {"tf_config": None, "is_final": True}
    is_final = isinstance(found.job, Cluster)
    cluster = found.job if isinstance(found.job, Cluster) else found.job.planned
    return {
        "environment": found.name,
        "variables": list(found.variables),
        "rank": None if getattr(found.job, "is_evaluator", False) else found.job.rank,
        "size": found.job.size,
        "tf_config": None if cluster is None else json.loads(cluster.to_tf_config()),
        "is_final": is_final,
    }


if __name__ == "__main__":
    sys.exit(main())
