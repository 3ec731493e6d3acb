"""Shows which launcher or scheduler has started this process, and the cluster that it describes.

    tfmulti env            in words
    tfmulti env --json     for programs: environment, variables, rank, size, tf_config

Run it as the training would be run, such as `srun -n 2 tfmulti env`. It waits for no other process.
Where a scheduler tells no ports, it shows the planned ones; the processes of a training agree on
others if one is taken.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tfmulti.cluster.cluster import Cluster
from tfmulti.cluster.environments import AUTO, CHOICES, Described, described, why_alone
from tfmulti.config.command_line import Parser, exit_code_of
from tfmulti.config.console import speaker


def main(argv: Sequence[str] | None = None, env: Mapping[str, str] = os.environ) -> int:
    """Runs the command and returns its exit code."""
    return exit_code_of(lambda: show(sys.argv[1:] if argv is None else argv, env))


def show(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Prints what the environment describes.

    Raises:
        ClusterError: the description is wrong.
        ConfigError: an argument is wrong.
    """
    parser = Parser("tfmulti env", __doc__ or "")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--environment", default="auto", help=f"one of {', '.join(CHOICES)}")
    arguments = parser.parsed(argv)
    environment = described(env, arguments.environment)
    facts = _facts(environment)
    if arguments.json:
        print(json.dumps(facts))
        return
    say = speaker(True)
    if environment is None:
        say("found", "no job: this process trains alone")
        if arguments.environment == AUTO and (hint := why_alone(env)):
            say("but", hint)
        return
    is_evaluator = facts["rank"] is None
    position = f"process {facts['rank']} of {facts['size']}"
    say(
        "found",
        f"{environment.name}: {'an evaluator, which does not train' if is_evaluator else position}",
    )
    say("by", ", ".join(environment.variables))
    tf_config = facts["tf_config"]
    say("TF_CONFIG", json.dumps(tf_config) if tf_config else "known when all have started")
    if tf_config and not facts["is_final"]:
        say("ports", "planned; the processes agree on others if one is taken")


def _facts(environment: Described | None) -> dict[str, Any]:
    """Returns what is known of the environment, as a JSON object."""
    if environment is None:
        alone: dict[str, Any] = {"environment": None, "variables": [], "rank": 0, "size": 1}
        return alone | {"tf_config": None, "is_final": True}
    is_final = isinstance(environment.job, Cluster)
    cluster = environment.job if isinstance(environment.job, Cluster) else environment.job.planned
    return {
        "environment": environment.name,
        "variables": list(environment.variables),
        "rank": None if getattr(environment.job, "is_evaluator", False) else environment.job.rank,
        "size": environment.job.size,
        "tf_config": None if cluster is None else json.loads(cluster.to_tf_config()),
        "is_final": is_final,
    }


if __name__ == "__main__":
    sys.exit(main())
