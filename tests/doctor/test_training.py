"""Tests of the findings about training, with made measurements."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfmulti.bench.limits import Situation
from tfmulti.bench.parts import TimeParts
from tfmulti.cluster.cluster import Cluster, Task
from tfmulti.config.fit_config import FitConfig
from tfmulti.distribution.strategies import Placement
from tfmulti.doctor import job, training
from tfmulti.doctor.cuda import cuda_findings
from tfmulti.doctor.finding import FAILED, OK, WARNING
from tfmulti.doctor.result import Result
from tfmulti.doctor.trust import open_ports_finding
from tfmulti.errors import VerificationError
from tfmulti.training.verification.result import Verification

BUILD = {"is_cuda_build": True, "cuda_version": "12.5.1", "cudnn_version": "9"}
NEEDS = [
    'nvidia-cudnn-cu12<10.0,>=9.3.0.75; extra == "and-cuda"',
    'nvidia-nccl-cu12<3.0,>=2.27.7; extra == "and-cuda"',
    "numpy>=1",
    'other; extra == "tests"',
]
WHEELS = {"nvidia-cudnn-cu12": "9.10.2.21", "nvidia-nccl-cu12": "2.27.7"}


@pytest.mark.parametrize(
    ("losses", "status"), [([2.0, 1.0, 0.5], OK), ([2.0, 2.0, 1.5], FAILED), ([1.0, 9.0], FAILED)]
)
def test_a_loss_must_fall(losses: list[float], status: str) -> None:
    assert training.digits_finding(losses).status == status
    # NaN is no loss that has fallen.
    assert training.digits_finding([*losses, float("nan")]).status == FAILED


@pytest.mark.parametrize(
    ("first", "last", "steps", "status"),
    [
        (2.0, 1.9, 5, OK),
        (2.0, 2.1, 5, OK),  # so few steps tell nothing
        (2.0, 2.1, 50, WARNING),
        (2.0, float("nan"), 5, FAILED),
        (2.0, float("inf"), 500, FAILED),
    ],
)
def test_the_loss_of_the_named_model_must_fall(
    first: float, last: float, steps: int, status: str
) -> None:
    (finding,) = training.loss_findings("mine:model", first, last, steps)
    assert finding.status == status
    assert f"{first:.3f} → {last:.3f}" in finding.measured
    assert training.loss_findings("mine:model", None, None, steps) == []


@pytest.mark.parametrize(
    ("losses", "status"),
    [([2.0, 1.0], OK), ([2.0001, 1.0], OK), ([2.0, 1.01], FAILED), ([2.0, np.nan], FAILED)],
)
def test_numbers_of_other_devices_are_a_fault(losses: list[float], status: str) -> None:
    finding = training.numbers_finding(losses, [2.0, 1.0], 4)
    assert finding.status == status
    assert "one device and of 4 differ by" in finding.measured


def test_a_wrong_sum_names_its_device() -> None:
    right, wrong = np.full(5, 6.0, np.float32), np.array([6, 6, 7, 6, 6], np.float32)
    assert training.wrong_sum([right, right], 3) is None
    finding = training.wrong_sum([right, wrong], 3)
    assert finding is not None
    assert (finding.status, finding.measured) == (FAILED, "device 1 has the sum 7")
    assert finding.rule == "the sum over 3 devices is 6"


@pytest.mark.parametrize(("seconds", "status"), [(0.4, OK), (0.5, WARNING)])
def test_an_all_reduce_is_compared_with_the_slowest_link(seconds: float, status: str) -> None:
    links = [{"mb_s": 100.0}, {"mb_s": 900.0}]
    finding = training.all_reduce_finding((8_000_000, seconds), 2, 2, links)
    assert finding.status == status
    assert "the slowest link needs 80 ms for its bytes" in finding.measured
    assert training.all_reduce_finding((8_000_000, 99.0), 2, 1, links).status == OK


def test_uneven_memory_is_a_warning() -> None:
    assert training.memory_finding([100, 124], "devices").status == OK
    finding = training.memory_finding([100 << 20, 200 << 20], "devices")
    assert (finding.status, finding.measured) == (WARNING, "the devices use 100, 200 MiB")


def test_a_first_step_with_other_numbers_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    setup: Any = SimpleNamespace(
        config=FitConfig(model="cnn"),
        placement=Placement(0, 1, 2),
        data=SimpleNamespace(train=None),
        batch=SimpleNamespace(global_batch_size=8),
    )
    result: list[Any] = []

    def verify(model: Any, data: Any, batch_size: int) -> Verification:
        if not result:
            raise VerificationError("verify: the gradient of w differs")
        return Verification(verdict=result[0], reason="why", quantities=7)

    monkeypatch.setattr(training, "verify", verify)
    finding = training.first_step_finding(setup, None)
    assert finding.status == FAILED
    assert finding.measured == "cnn: the first step: verify: the gradient of w differs"
    result.append("skipped")
    finding = training.first_step_finding(setup, None)
    assert (finding.status, finding.measured) == (OK, "cnn: the first step is not compared: why")
    result[0] = "same"
    assert "7 compared" in training.first_step_finding(setup, None).measured


def test_an_idle_gpu_is_named() -> None:
    found = training.idle_findings({0: 90.0, 1: 3.0})
    assert [(each.check, each.status) for each in found] == [("GPU 1", WARNING)]
    assert found[0].measured == "it was busy for 3 % of the time"


def test_a_slow_device_is_named_where_the_driver_does_not_tell_its_use() -> None:
    assert [each.status for each in training.device_findings([10.0, 11.0])] == [OK]
    (found,) = training.device_findings([10.0, 30.0])
    assert (found.check, found.status) == ("device 1", WARNING)
    assert "the same work takes it 30 ms" in found.measured


def test_devices_are_timed_by_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_PRODUCT_SIZE", 8)
    times = training.device_times_ms(["CPU:0", "CPU:0"])
    assert len(times) == 2
    assert all(took > 0 for took in times)


def test_gpus_that_tensorflow_does_not_see_are_a_fault() -> None:
    assert training.seen_gpus_finding(["A", "A"], ["A", "A"], BUILD).status == OK
    assert training.seen_gpus_finding([""], ["A"], BUILD).status == OK
    assert training.seen_gpus_finding(["A"], ["A MIG 1g.5gb"] * 2, BUILD).status == OK
    finding = training.seen_gpus_finding(["A", "A"], ["A"], BUILD)
    assert finding.status == FAILED
    assert finding.measured == "it sees 1 of 2 GPUs; it was built for CUDA 12.5.1, cuDNN 9"
    finding = training.seen_gpus_finding(["A"], ["B"], BUILD)
    assert (finding.status, finding.measured) == (WARNING, "it sees B; the driver shows A")


def test_more_devices_that_are_slower_get_advice() -> None:
    parts = TimeParts(compute=1.0, communication=9.0, input=0.0, host=0.0)
    at = Situation("2 devices", "workers", 2, parts, FitConfig(), True, gradient_bytes=1000)
    assert training.throughput_finding(at, 100.0, 150.0).status == OK
    finding = training.throughput_finding(at, 100.0, 50.0)
    assert finding.status == WARNING
    assert "100 examples/s on one device, 50 on 2 (25 % of 2 ×)" in finding.measured
    assert "communication-bound: 90 % of the step is communication" in finding.advice


def test_unequal_numbers_of_gpus_are_a_fault() -> None:
    cluster = Cluster(("a:1", "b:1"), Task("worker", 0))
    results = {0: Result(facts={"GPUs": 4}), 1: Result(facts={"GPUs": 2})}
    found = {each.check: each for each in job.compare(cluster, results)}
    assert (found["GPUs"].status, found["GPUs"].worker) == (FAILED, 1)
    assert found["GPUs"].measured == "2, but worker 0 has 4"


@pytest.mark.parametrize(
    ("driver", "status"),
    [(12050, OK), (12080, OK), (13000, OK), (12020, WARNING), (11080, WARNING), (None, None)],
)
def test_the_driver_must_fit_cuda(driver: int | None, status: str | None) -> None:
    found = {each.check: each.status for each in cuda_findings(BUILD, driver, NEEDS, WHEELS)}
    assert found.get("CUDA") == status
    assert found["CUDA wheels"] == OK


@pytest.mark.parametrize(
    ("installed", "status", "measured"),
    [
        ({}, OK, "none; TensorFlow looks for the libraries of the system"),
        (WHEELS, OK, "nvidia-cudnn-cu12 9.10.2.21, nvidia-nccl-cu12 2.27.7"),
        (
            WHEELS | {"nvidia-cudnn-cu12": "8.9.7.29"},
            WARNING,
            "nvidia-cudnn-cu12 is 8.9.7.29, and <10.0,>=9.3.0.75 is needed",
        ),
        (
            {"nvidia-cudnn-cu13": "9.13.0.50", "nvidia-nccl-cu12": "2.27.7"},
            WARNING,
            "nvidia-cudnn-cu13 9.13.0.50 is for another CUDA than 12",
        ),
        (
            WHEELS | {"nvidia-nccl-cu12": "2.21.5"},
            WARNING,
            "nvidia-nccl-cu12 is 2.21.5, and <3.0,>=2.27.7 is needed",
        ),
    ],
)
def test_wheels_must_fit_tensorflow(installed: Any, status: str, measured: str) -> None:
    (finding,) = cuda_findings(BUILD, None, NEEDS, installed)
    assert (finding.status, finding.measured) == (status, measured)


def test_one_missing_wheel_of_many_is_named() -> None:
    needs = [*NEEDS, 'nvidia-cuda-nvrtc-cu12<13.0,>=12.5.82; extra == "and-cuda"']
    (finding,) = cuda_findings(BUILD, None, needs, WHEELS)
    assert (finding.status, finding.measured) == (WARNING, "nvidia-cuda-nvrtc-cu12 is missing")
    # A wheel of NCCL may belong to another package. CUDA may then be that of the system.
    for of_system in ({}, {"nvidia-nccl-cu12": "2.27.7"}):
        (finding,) = cuda_findings(BUILD, None, needs, of_system)
        assert finding.status == OK


def test_a_convolution_is_tried_on_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert training.convolutions(()) == []
    # A CPU stands for a GPU.
    assert [each.status for each in training.convolutions(["CPU:0"])] == [OK]

    def without_cudnn(*args: Any, **kwargs: Any) -> Any:
        raise tf.errors.UnknownError(None, None, "Failed to get convolution algorithm.\nstack")

    monkeypatch.setattr(tf.nn, "conv2d", without_cudnn)
    (finding,) = training.convolutions(["CPU:0"])
    assert (finding.status, finding.check) == (FAILED, "cuDNN")
    assert finding.measured == "CPU:0: Failed to get convolution algorithm."


def test_a_tensorflow_without_cuda_is_a_fault() -> None:
    (finding,) = cuda_findings({"is_cuda_build": False}, 12050, NEEDS, WHEELS)
    assert (finding.status, finding.check) == (FAILED, "CUDA")


def test_a_port_that_is_open_to_all_interfaces_is_named() -> None:
    open_ports = [[("0.0.0.0", 29400)], [("10.0.0.2", 40000), ("::", 29400), ("::", 6006)]]
    assert open_ports_finding(open_ports[:1], [29400]).status == OK
    finding = open_ports_finding(open_ports, [29400, 29400])
    assert finding.status == WARNING
    assert "worker 0 listens at 0.0.0.0:29400 (gRPC)" in finding.measured
    assert "worker 1 listens at 10.0.0.2:40000, [::]:29400 (gRPC), [::]:6006" in finding.measured
    assert finding.measured.endswith("port 6006 of worker 1 is open to all interfaces")
