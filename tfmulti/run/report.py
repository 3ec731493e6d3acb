"""`FitReport`: the result of a run, which `train` returns and report.json holds."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from tfmulti.config import json_values
from tfmulti.run.report_page import fragment
from tfmulti.run.straggler import Straggler
from tfmulti.training.verification.result import Verification


@dataclass(frozen=True, kw_only=True)
class FitReport:
    """The result of a run.

    Attributes:
        strategy: the strategy.
        why: the reason for the strategy, in words.
        devices: the names of the devices.
        workers: the number of workers.
        replicas: the number of replicas of all workers.
        global_batch_size: the rows of the global batch.
        per_replica_batch_size: the rows of the largest replica slice.
        epochs: the number of epochs in `history`.
        steps: the optimizer steps, with those from before the run was resumed.
        examples: the training examples of these steps, with repetitions.
        parameters: the number of the model's parameters.
        metrics: the final metrics: those of the last epoch, and `test_…` if there is a test part.
        history: one list for each metric, with an entry for each epoch.
        seconds: the time of the training loop since the start or the last resume, with tracing and
            validation, but without start-up.
        examples_per_second: the training examples per second of the steps since then that were not
            traced. It does not include validation, so it is larger than `examples` divided by
            `seconds`. If all steps were traced, it is that quotient. 0: nothing was left to train.
        waiting_share: the share of the time of the steps in which they waited for data.
        addresses: the `host:port` of each worker, by rank. Empty with one worker.
        places: the host name and the devices of each worker in words, by rank.
        others_share: the share of the time of the steps in which the chief waited for messages of
            other workers. None: one worker, or workers that NCCL connects.
        weights_sha256: the SHA-256 of all weights.
        examples_lost: the examples that could not be read, counted in each pass over the data.
            Rows of tables count once, because tables are read once.
        inexact: the flags by which the numbers differ from those of one device.
        steps_before: the part of `steps` from before the run was resumed.
        examples_before: the part of `examples` from before the run was resumed.
        epochs_asked: the epochs that the run was to train. A callback may end it earlier.
        stopped_by: the name of the signal that stopped the run, or None.
        throughput: the figures of `--log_throughput` by the names of `callbacks.throughput`, or
            None.
        verification: the comparison with one device, or None.
        straggler: the worker for which the others waited in the last epoch, or that all waited for
            the network; the fields of `straggler.Straggler`, or None.
        run_dir: the run directory. None on workers other than the chief.
        versions: the versions of TensorFlow and Keras.
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
    addresses: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    others_share: float | None = None
    examples_lost: int = 0
    inexact: tuple[str, ...] = ()
    steps_before: int = 0
    examples_before: int = 0
    epochs_asked: int = 0
    stopped_by: str | None = None
    throughput: dict[str, float] | None = None
    verification: Verification | None = None
    straggler: dict[str, Any] | None = None
    run_dir: str | None = None
    versions: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Returns the report as the text of report.json."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    def _repr_html_(self) -> str:
        """Returns the report as HTML, which a notebook shows."""
        return fragment(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> FitReport:
        """Returns the report from `text`, the content of report.json.

        Raises:
            ValueError: the text is not JSON, or its fields are not those of this version.
        """
        report = json_values.build(cls, json_values.parse(text))
        if report.straggler is not None:
            json_values.build(Straggler, report.straggler)
        return report
