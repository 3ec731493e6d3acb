"""Percentiles of steps' times, and the peaks of GPUs by their names."""

from __future__ import annotations

import random

import pytest

from tfmulti.config import FitConfig
from tfmulti.errors import ConfigError
from tfmulti.peaks import peak_tflops
from tfmulti.step_times import StepTimes


def times(*seconds: float) -> StepTimes:
    made = StepTimes()
    for each in seconds:
        made.add(each, 1)
    return made


def test_percentiles_are_steps_own_times() -> None:
    hundred = [float(i) for i in range(1, 101)]
    random.Random(1).shuffle(hundred)
    made = times(*hundred)
    assert [made.percentile(p) for p in (1, 50, 90, 99, 100)] == [1, 50, 90, 99, 100]
    assert made.percentiles_ms() == {"p50": 50_000, "p90": 90_000, "p99": 99_000}
    assert times(7.0).percentile(1) == times(7.0).percentile(99) == 7.0
    assert times(3, 1, 2).percentile(50) == 2
    assert times(1, 2).percentile(50) == 1
    assert StepTimes().percentile(50) == 0


def test_steps_of_an_execution_share_its_time() -> None:
    made = StepTimes()
    made.add(8.0, steps=8)
    made.add(5.0, steps=1)
    made.add(6.0, steps=1)
    assert len(made) == 10
    assert [made.percentile(p) for p in (50, 80, 90, 99)] == [1, 1, 5, 6]


def test_two_merge() -> None:
    made = times(5, 1)
    made.merge(times(3, 9))
    assert [made.percentile(p) for p in (25, 50, 75, 100)] == [1, 3, 5, 9]


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "peak"),
    [
        ("NVIDIA H200", "bfloat16", True, 989),
        ("NVIDIA H200", "float32", True, 494.5),
        ("NVIDIA H200", "float32", False, 67),
        ("NVIDIA H100 PCIe", "float16", True, 756),
        ("NVIDIA H100 80GB HBM3", "float16", True, 989),
        ("NVIDIA A100-SXM4-80GB", "float32", True, 156),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "float32", True, None),
        ("Tesla V100-SXM2-16GB", "float16", True, 125),
        ("Tesla V100-PCIE-16GB", "float16", True, 112),
        ("Tesla V100-SXM2-16GB", "bfloat16", True, None),
        ("Tesla T4", "float32", True, 8.1),
        ("NVIDIA L40S", "bfloat16", True, 362),
        ("NVIDIA A10G", "bfloat16", True, None),
        ("NVIDIA L4", "bfloat16", True, 121),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "float32", True, None),
        ("NVIDIA Something New", "float32", True, None),
        ("NVIDIA A100-SXM4-80GB", "float64", True, None),
    ],
)
def test_peaks(name: str, dtype: str, tf32: bool, peak: float | None) -> None:
    assert peak_tflops(name, dtype, tf32=tf32) == peak


def test_a_peak_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--peak_tflops 3 is for what --log_throughput shows"):
        FitConfig(peak_tflops=3.0)
    with pytest.raises(ConfigError, match="above 0"):
        FitConfig(peak_tflops=0.0, log_throughput=True)
    assert FitConfig(peak_tflops=3.0, log_throughput=True).peak_tflops == 3.0
