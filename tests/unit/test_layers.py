"""Imports point up the layer list only, and the first layers stay light."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import tfmulti

PACKAGE = Path(tfmulti.__file__).parent

# The order of BUILD.md's layer map: a module imports only from lines above its own.
LAYERS = [
    ["errors"],
    ["json_values"],
    [
        "advice",
        "cluster",
        "console",
        "gpus",
        "job_secret",
        "launched",
        "listening",
        "memory",
        "pace",
        "proxies",
        "reading",
        "rundir",
        "sharding",
        "peaks",
        "step_times",
        "verification_result",
        "synchronisation",
    ],
    ["environments", "report", "owner", "registry", "signals", "stopping"],
    ["config"],
    ["selection"],
    [
        "launch.policy",
        "launch.addresses",
        "launch.guard",
        "launch.idle",
        "launch.isolation",
        "launch.shim",
    ],
    ["launch.members", "launch.hosts"],
    ["launch.config"],
    ["launch.flags", "launch.output", "launch.workers"],
    ["launch.machine"],
    ["launch.remote", "launch.crew"],
    ["launch.agent", "launch.watch"],
    ["launch.connect"],
    ["launch.pool"],
    ["launch.supervisor"],
    ["launch.__main__"],
    ["npy_format"],
    [
        "comparison",
        "hashing",
        "links",
        "sources.arrow",
        "sources.lost",
        "sources.source",
        "sources.files",
        "plain",
    ],
    ["sources.csv_tables", "sources.open_files", "sources.parquet_tables", "sources.pixels"],
    ["meeting", "permutation", "sources.arrays", "sources.columns", "sources.folders"],
    [
        "plan",
        "sources.augmentation",
        "sources.data",
        "sources.encoding",
        "sources.options",
        "sources.record_index",
        "sources.unpacked",
        "backup",
    ],
    ["reader", "sources.features", "sources.named_arrays", "sources.records", "sources.targets"],
    ["sources.encoded", "sources.examples"],
    [
        "sources.cache",
        "sources.class_weights",
        "sources.gzip_faults",
        "sources.labels",
        "sources.record_stream",
        "sources.splits",
    ],
    ["sources.stages"],
    [
        "sources.digits",
        "sources.images",
        "sources.keras_datasets",
        "sources.npy",
        "sources.npz",
        "sources.regression",
        "sources.synthetic",
        "sources.tables",
        "sources.text",
        "sources.tfds",
        "sources.tfrecord",
    ],
    ["preflight", "command_line"],
    ["bench.parts", "bench.cost", "bench.config"],
    ["bench.order", "bench.flags", "bench.words"],
    ["bench.matrix", "bench.results"],
    ["bench.report"],
    ["bench.picture"],
    ["bench.__main__"],
    ["row_rules", "share", "strategies"],
    ["connections", "recording", "row_labels", "updates"],
    ["collectives", "lookup_gradients", "siblings"],
    ["replicas", "shards", "callbacks.backup", "flops"],
    ["broadcast"],
    ["kernels", "losses", "normalization", "randomness"],
    ["global_values", "mixing", "own_steps"],
    ["keras_compat", "step_logs"],
    ["relocation"],
    ["microbatches", "model_checks"],
    ["ownership", "plain_run", "xla"],
    ["variable_names"],
    ["run_state", "callback_states"],
    ["local_steps", "pipeline"],
    ["outcomes"],
    ["steps", "votes"],
    ["execution", "prediction"],
    ["positions", "streams"],
    ["dataset_feed"],
    ["feed", "callbacks.worker_safe"],
    ["resuming", "clock", "data_faults", "replay"],
    ["epochs"],
    ["step_comparison"],
    ["verification"],
    ["trainer", "optimizers", "sources.user", "models.building"],
    ["models.convolutional", "models.dense", "models.resnet", "models.transformer", "models.user"],
    [
        "artifacts",
        "callbacks.history_file",
        "callbacks.tensorboard",
        "callbacks.throughput",
        "callbacks.waiting",
    ],
    ["callbacks.model_file"],
    ["assembly"],
    ["summary"],
    ["data_speed", "bench.all_reduces"],
    ["inspection", "loop", "bench.measure"],
    ["fit", "data", "bench.worker"],
]
NUMPY_FROM, TENSORFLOW_FROM = (
    next(depth for depth, layer in enumerate(LAYERS) if name in layer)
    for name in ("npy_format", "share")
)
STANDARD_LIBRARY_ALONE = [name for layer in LAYERS[:NUMPY_FROM] for name in layer]
WITHOUT_TENSORFLOW = [name for layer in LAYERS[:TENSORFLOW_FROM] for name in layer]


def modules() -> dict[str, Path]:
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }


def imported(path: Path) -> set[str]:
    """Returns the modules of this package that a file imports, anywhere in it."""
    known = set(modules())
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tfmulti"):
            base = (node.module or "").removeprefix("tfmulti").lstrip(".")
            for name in [base, *(f"{base}.{a.name}".lstrip(".") for a in node.names)]:
                if name in known:
                    found.add(name)
    return found


def test_every_module_has_a_layer() -> None:
    assert sorted(name for layer in LAYERS for name in layer) == sorted(modules())


def test_imports_point_up() -> None:
    depth = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    wrong = [
        f"{name} imports {other}"
        for name, path in modules().items()
        for other in imported(path)
        if depth[other] >= depth[name]
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("names", "forbidden"),
    [
        (STANDARD_LIBRARY_ALONE, ["numpy", "absl", "keras", "tensorflow", "matplotlib"]),
        (WITHOUT_TENSORFLOW, ["keras", "tensorflow", "matplotlib"]),
    ],
)
def test_light_modules_stay_light(names: list[str], forbidden: list[str]) -> None:
    code = (
        f"import sys, json\nfor n in {names!r}: __import__('tfmulti.' + n)\n"
        f"print(json.dumps([m for m in {forbidden!r} if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_private_names_are_touched_in_one_place() -> None:
    words = (
        "keras.src",
        "tensorflow.python",
        "_distribute_strategy",
        "_compile_loss",
        "_loss_tracker",
        "_symbolic_build",
        "_all_reduce_sum",
    )
    guilty = [
        (name, word)
        for name, path in modules().items()
        for word in words
        if word in path.read_text() and name != "keras_compat"
    ]
    assert not guilty


def test_public_names_are_lazy_and_all_there() -> None:
    code = "import sys, tfmulti; dir(tfmulti); print('tensorflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert set(tfmulti.__all__) <= set(dir(tfmulti))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tfmulti.nothing
