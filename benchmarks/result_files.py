"""Reads and writes the result files, benchmarks/results/NAME.json."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(__file__).parent / "results"
MACHINE = f"{os.cpu_count()} cores, no GPU, {platform.machine()}"


def read(name: str) -> dict[str, Any]:
    """Returns the results of `benchmarks.NAME`; empty if there are none."""
    path = FOLDER / f"{name}.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return results


def write(name: str, results: dict[str, Any]) -> None:
    """Writes the results of `benchmarks.NAME`."""
    text = json.dumps(results, indent=1, ensure_ascii=False)
    (FOLDER / f"{name}.json").write_text(f"{text}\n")


def versions() -> str:
    """Returns the versions of TensorFlow and Keras in words."""
    import keras
    import tensorflow as tf

    return f"TensorFlow {tf.__version__}, Keras {keras.__version__}"
