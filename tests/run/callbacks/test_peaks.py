"""Tests the percentiles of step times, and the peaks of GPUs by their names."""

from __future__ import annotations

import random
import re

import pytest

from tfmulti.config.fit_config import FitConfig
from tfmulti.errors import ConfigError
from tfmulti.run.callbacks.peaks import PEAKS, peak_tflops
from tfmulti.run.callbacks.step_times import StepTimes


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


def test_two_sets_of_times_are_merged() -> None:
    made = times(5, 1)
    made.merge(times(3, 9))
    assert [made.percentile(p) for p in (25, 50, 75, 100)] == [1, 3, 5, 9]


# The names that the driver reports, with the peaks for float32, TF32, float16 and bfloat16.
KNOWN = {
    "NVIDIA GB200": (80, 1250, 2500, 2500),
    "NVIDIA B200": (75, 1100, 2250, 2250),
    "NVIDIA GH200 480GB": (67, 494, 990, 990),
    "NVIDIA H200": (67, 494.5, 989, 989),
    "NVIDIA H200 NVL": (60, 417.5, 835.5, 835.5),
    "NVIDIA H100 80GB HBM3": (67, 494.5, 989, 989),
    "NVIDIA H100 PCIe": (51, 378, 756, 756),
    "NVIDIA H100 80GB HBM2e": (51, 378, 756, 756),
    "NVIDIA H100 NVL": (60, 417.5, 835.5, 835.5),
    "NVIDIA A100-SXM4-80GB": (19.5, 156, 312, 312),
    "NVIDIA A100-PCIE-40GB": (19.5, 156, 312, 312),
    "NVIDIA A40": (37.4, 74.8, 149.7, 149.7),
    "NVIDIA A30": (10.3, 82, 165, 165),
    "NVIDIA A10": (31.2, 62.5, 125, 125),
    "NVIDIA A10G": (35, 35, 70, 70),
    "NVIDIA L40S": (91.6, 183, 362.05, 362.05),
    "NVIDIA L40": (90.5, 90.5, 181.05, 181.05),
    "NVIDIA L4": (30.3, 60, 121, 121),
    "Tesla T4": (8.1, 8.1, 65, None),
    "Tesla V100S-PCIE-32GB": (16.4, 16.4, 130, None),
    "Tesla V100-SXM2-16GB": (15.7, 15.7, 125, None),
    "Tesla V100-PCIE-16GB": (14, 14, 112, None),
    "Tesla P100-SXM2-16GB": (10.6, 10.6, None, None),
    "Tesla P100-PCIE-16GB": (9.3, 9.3, None, None),
    "NVIDIA RTX A6000": (38.7, 77.4, 154.8, 154.8),
    "NVIDIA GeForce RTX 4090": (82.6, 82.6, 165.2, 165.2),
    "NVIDIA GeForce RTX 3090": (35.6, 35.6, 71, 71),
}


@pytest.mark.parametrize("name", KNOWN)
def test_peaks(name: str) -> None:
    assert (
        peak_tflops(name, "float32", tf32=False),
        peak_tflops(name, "float32", tf32=True),
        peak_tflops(name, "float16", tf32=True),
        peak_tflops(name, "bfloat16", tf32=False),
    ) == KNOWN[name]
    assert peak_tflops(name, "float64", tf32=True) is None


def test_every_peak_is_of_some_name() -> None:
    first = [next(p for p, _ in PEAKS if re.search(p, name)) for name in KNOWN]
    assert set(first) == {pattern for pattern, _ in PEAKS}


def test_all_peaks_are_dense() -> None:
    """A type with half the bits is twice as fast. With sparsity it would be four times as fast."""
    for pattern, peak in PEAKS:
        assert peak.bfloat16 in (peak.half, None), pattern
        if peak.tf32 is not None:
            assert peak.half == pytest.approx(2 * peak.tf32, rel=0.025), pattern
            assert peak.tf32 >= peak.float32, pattern


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"),
        *("NVIDIA A10-4Q", "NVIDIA A100-1-5C", "GRID T4-16C", "NVIDIA L40S-48Q", "GRID V100D-32Q"),
        *("NVIDIA A100-SXM-64GB", "Tesla V100-SXM3-32GB", "Tesla V100-FHHL-16GB", "NVIDIA H100"),
        *("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D"),
        *("NVIDIA GeForce RTX 3090 Ti", "NVIDIA H20", "NVIDIA A16", "NVIDIA T400", ""),
    ],
)
def test_parts_and_other_variants_have_no_peak(name: str) -> None:
    for dtype in ("float32", "float16", "bfloat16"):
        assert peak_tflops(name, dtype, tf32=True) is None


def test_a_peak_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 has an effect only with --log_throughput"):
        FitConfig(peak_tflops=3.0)
    with pytest.raises(ConfigError, match="above 0"):
        FitConfig(peak_tflops=0.0, log_throughput=True)
    assert FitConfig(peak_tflops=3.0, log_throughput=True).peak_tflops == 3.0
