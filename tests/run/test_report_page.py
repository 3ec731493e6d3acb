"""Tests report.html and the report as a notebook shows it."""

from __future__ import annotations

import dataclasses
import shlex
from html.parser import HTMLParser
from typing import Any

import pytest

from tfmulti.config import flags
from tfmulti.launch.flags import parse
from tfmulti.run import report_page
from tfmulti.run.report import FitReport
from tfmulti.run.summary import speed_words

pytestmark = pytest.mark.unit

REPORT = FitReport(
    strategy="mirrored",
    why="two devices",
    devices=("CPU:0", "CPU:1"),
    workers=1,
    replicas=2,
    global_batch_size=64,
    per_replica_batch_size=32,
    epochs=2,
    steps=40,
    examples=2560,
    parameters=12,
    metrics={"loss": 0.25},
    history={"loss": [0.5, 0.25], "val_loss": [0.6, 0.3]},
    seconds=4.0,
    examples_per_second=1000.0,
    waiting_share=0.02,
    weights_sha256="0" * 64,
    run_dir="runs/a",
)
STRAGGLER = {"cause": "data", "worker": 1, "address": "b:1", "slowdown": 2.0, "share": 0.5}


class Page(HTMLParser):
    """The tags and the texts of a page; fails if tags do not close in order."""

    # Elements without an end.
    VOID = frozenset(("meta", "br", "use"))

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def page_of(**changed: Any) -> Page:
    report = dataclasses.replace(REPORT, **changed)
    return Page(report_page.page(report, "digits, cnn, 2 replicas"))


def test_a_page_has_curves_and_loads_nothing() -> None:
    page = page_of()
    assert page.tags.count("svg") == 1
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    loads = [value for name, value in page.attributes if name in ("src", "href", "xlink:href")]
    assert all(value is not None and value.startswith("#") for value in loads)


def test_the_places_of_all_workers_are_shown() -> None:
    texts = page_of(
        workers=2,
        addresses=("a:1", "b:2"),
        places=("node1: GPU:0 (NVIDIA H100)", "node2: GPU:0 (NVIDIA H200)"),
    ).texts
    assert texts[texts.index("worker 0") + 1] == "node1: GPU:0 (NVIDIA H100) (at a:1)"
    assert texts[texts.index("worker 1") + 1] == "node2: GPU:0 (NVIDIA H200) (at b:2)"
    # A report from before has no places.
    texts = page_of().texts
    assert texts[texts.index("worker 0") + 1] == "CPU:0, CPU:1"


def test_names_are_texts() -> None:
    """Names of metrics, folders and devices come from users."""
    evil = "<script>alert(1)</script>"
    page = page_of(metrics={evil: 1.0}, history={evil: [1.0], "loss": [1.0]}, run_dir=f"a/{evil}")
    assert "script" not in page.tags
    assert any(evil in text for text in page.texts)
    assert "script" not in Page(dataclasses.replace(REPORT, why=evil)._repr_html_()).tags


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"stopped_by": "SIGTERM"}, "stopped by SIGTERM after step 40"),
        ({"inexact": ("--nosync_batch_norm",)}, "not the numbers of one device"),
        ({"examples_lost": 3}, "3 examples could not be read"),
        ({"waiting_share": 0.4}, "waited for data for 40 %"),
        ({"straggler": STRAGGLER}, "worker 1 (b:1) takes 2.0 × as long"),
    ],
)
def test_warnings_come_first(changed: dict[str, Any], words: str) -> None:
    assert not report_page.warnings(REPORT)
    texts = page_of(**changed).texts
    [found] = [number for number, text in enumerate(texts) if words in text]
    assert found < texts.index("Result")


def test_the_speed_says_what_it_counts() -> None:
    """It is not the quotient of the examples and the seconds, which have tracing in them."""
    texts = page_of(examples=17955, seconds=2.903, examples_per_second=12181.0).texts
    assert "2.903 s, with tracing and validation" in texts
    assert any(
        text.startswith("12,181 examples/s, ")
        and text.endswith(", in the steps alone, without tracing")
        for text in texts
    )
    words = "285 steps, 17,955 examples in 2.903 s; 12,181 examples/s in the steps alone, "
    speed = {"steps": 285, "examples": 17955, "seconds": 2.903, "examples_per_second": 12181.0}
    assert speed_words(dataclasses.replace(REPORT, **speed)) == f"{words}without tracing"


def test_the_time_of_a_step_adds_up() -> None:
    shares = report_page.time_shares(dataclasses.replace(REPORT, others_share=0.3))
    assert shares == pytest.approx(
        {"computing": 0.68, "waiting for data": 0.02, "waiting for other workers": 0.3}
    )
    assert list(report_page.time_shares(REPORT)) == ["computing", "waiting for data"]
    # Nothing was left to train after a resume.
    assert not report_page.time_shares(dataclasses.replace(REPORT, steps_before=40))


def test_the_command_of_a_page_is_one_that_the_parser_takes(tmp_path: Any) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    (folder / "config.json").write_text('{"epochs": 7}')
    words = shlex.split(report_page.command(dataclasses.replace(REPORT, run_dir=str(folder))))
    assert words[:3] == ["python", "-m", "tfmulti.fit"]
    config = flags.parse(words[2:])
    assert config is not None
    assert config.epochs == 7


@pytest.mark.parametrize(
    ("addresses", "flag", "value", "hosts"),
    [
        (("127.0.0.1:1", "127.0.0.1:2"), "--nproc-per-node", "2", {"127.0.0.1": 2}),
        (("a:1", "a:2", "[::1]:9"), "--hosts", "a:2,[::1]:1", {"a": 2, "[::1]": 1}),
    ],
)
def test_the_command_of_a_job_starts_its_workers_where_they_were(
    addresses: tuple[str, ...], flag: str, value: str, hosts: dict[str, int]
) -> None:
    job = dataclasses.replace(REPORT, workers=len(addresses), addresses=addresses, run_dir="r")
    words = shlex.split(report_page.command(job))
    assert words[:4] == ["tfmulti", "launch", flag, value]
    found = parse(words[2:], "")
    assert {host.name: host.slots for host in found.hosts} == hosts or flag != "--hosts"
    assert found.program[:3] == ("tfmulti.fit", "--config", "r/config.json")
