"""What a run did, as a value: returned by `fit` and written as report.json."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field

from tfmulti.training.verification.result import Verification


@dataclass(frozen=True, kw_only=True)
class FitReport:
    """The result of `fit`.

    `history` holds one list per metric, an entry an epoch. `metrics` are the final ones:
    the last epoch's, and `test_…` where the data has a test part. `examples` counts each
    training example that an optimizer step saw, and `steps` those steps; `examples_before` and
    `steps_before` of them are from before the run was resumed. `seconds` is the time of the
    training loop since then, tracing and validation included, without start-up;
    `examples_per_second` counts the steps alone, without those that were traced, so it is more than
    the examples by these seconds, and 0 where nothing was left to train. `waiting_share` of the
    steps' time went by without data, and `examples_lost` examples could not be read, counted in
    each pass; rows of tables, which are
    read once, count once. `inexact` are the flags by which the numbers are not those of one device.
    `epochs_asked` is what the run was to train, of which a callback may have spared some.
    `throughput` has what `--log_throughput` measured, by the names of `callbacks.throughput`. On
    workers other than the chief `run_dir` is None.
    """

    strategy: str
    why: str
    devices: tuple[str, ...]
    workers: int
    replicas: int
    global_batch_size: int
    per_replica_batch_size: int
    epochs: int
    steps: int
    examples: int
    parameters: int
    metrics: dict[str, float]
    history: dict[str, list[float]] = field(repr=False)
    seconds: float
    examples_per_second: float
    waiting_share: float
    weights_sha256: str
    examples_lost: int = 0
    inexact: tuple[str, ...] = ()
    steps_before: int = 0
    examples_before: int = 0
    epochs_asked: int = 0
    stopped_by: str | None = None
    throughput: dict[str, float] | None = None
    verification: Verification | None = None
    run_dir: str | None = None
    versions: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> FitReport:
        """Returns the report that a report.json holds.

        Raises:
            ValueError, TypeError: it is none of this version's.
        """
        values = json.loads(text)
        for name in ("devices", "inexact"):
            values[name] = tuple(values.get(name, ()))
        if values.get("verification"):
            values["verification"] = Verification(**values["verification"])
        return cls(**values)
