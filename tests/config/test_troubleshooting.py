"""Tests that the page on troubleshooting and the messages of the code name each other."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tfmulti
from tests.support.processes import ROOT
from tfmulti import errors
from tfmulti.config.console import left_out, speaker
from tfmulti.config.troubleshooting import DOCTOR, MESSAGES, documented, print_error
from tfmulti.doctor.finding import FAILED, Finding
from tfmulti.launch import output

PACKAGE = Path(tfmulti.__file__).parent
HEADINGS = dict(
    (anchor, title)
    for title, anchor in re.findall(
        r"^### (.+) \{#([a-z-]+)\}$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M
    )
)


def kinds() -> list[type[errors.TfmultiError]]:
    """Returns all classes of errors of `tfmulti.errors`."""
    return [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.TfmultiError)
    ]


def texts() -> set[str]:
    """Returns the texts of the code that are no docstrings, with `…` for each value."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if path.name == "troubleshooting.py":
            continue
        tree = ast.parse(path.read_text())
        docs = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                found.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and id(node) not in docs:
                found.add(str(node.value))
    return found


def test_every_anchor_of_the_code_is_on_the_page_and_the_reverse() -> None:
    of_classes = {kind.anchor for kind in kinds()}
    assert set(HEADINGS) == {*MESSAGES, *of_classes, DOCTOR}
    assert not set(MESSAGES) & of_classes
    for anchor, words in MESSAGES.items():
        assert HEADINGS[anchor] == f"`{words.strip()}`"


def test_every_message_of_the_page_is_one_of_the_code() -> None:
    known = texts()

    def is_there(words: str) -> bool:
        # One `…` of the table may stand for words and values.
        pattern = re.compile(".*?".join(map(re.escape, words.split("…"))))
        return any(pattern.search(text) for text in known)

    assert [words for words in MESSAGES.values() if not is_there(words)] == []


PAGES = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"]


def test_each_place_that_a_message_or_a_page_names_is_in_the_docs() -> None:
    all_texts = [*texts(), *(path.read_text() for path in PAGES)]
    anchors = {anchor for text in all_texts for anchor in re.findall(r"shooting#([\w-]+)", text)}
    assert anchors - {"other"} <= set(HEADINGS)
    named = {name for text in all_texts for name in re.findall(r"docs/([\w-]+\.md)\b", text)}
    assert {"memory.md", "tuning.md"} <= named <= {path.name for path in PAGES}


WARNINGS = [
    "input-bound: 61 % of the step is waiting for data",
    "the environment names a proxy: http_proxy (h)",
    "mpi: the processes run on several hosts without TFMULTI_SECRET, so",
]


@pytest.mark.parametrize("words", WARNINGS)
def test_what_the_chief_prints_names_its_place(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    speaker(True)("warning", words)
    assert re.search(r" \(docs: troubleshooting#[a-z-]+\)\n$", capsys.readouterr().out)


@pytest.mark.parametrize("kind", kinds())
def test_an_error_without_an_anchor_of_its_own_has_that_of_its_class(
    kind: type[errors.TfmultiError], capsys: pytest.CaptureFixture[str]
) -> None:
    print_error(kind("--epochs is 0."))
    assert capsys.readouterr().err == (
        f"tfmulti: --epochs is 0. (docs: troubleshooting#{kind.anchor})\n"
    )


def test_a_frequent_message_has_an_anchor_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(errors.ModelError("the model is not compiled. Call model.compile(...) first."))
    assert capsys.readouterr().err.endswith("first. (docs: troubleshooting#not-compiled)\n")


def test_the_name_of_a_file_cannot_change_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(errors.DataError("a\x1b[2J.png: it is damaged."))
    left_out("a\x1b[2J\n\udcff.png: it is damaged.")
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(r"tfmulti: a\x1b[2J.png: it is damaged.")
    assert second == r"tfmulti: left out a\x1b[2J\n\udcff.png: it is damaged."


def test_lines_of_the_launcher_name_their_place_once(capsys: pytest.CaptureFixture[str]) -> None:
    output.say("h2 does not know this job's secret")
    output.say("its last line: tfmulti: the model is not compiled (docs: troubleshooting#other)")
    output.say("all output: logs")
    assert capsys.readouterr().err.splitlines() == [
        "[launch] h2 does not know this job's secret (docs: troubleshooting#secret)",
        "[launch] its last line: tfmulti: the model is not compiled (docs: troubleshooting#other)",
        "[launch] all output: logs",
    ]
    assert documented("nothing") == "nothing"


def test_a_finding_of_the_doctor_names_its_place() -> None:
    lines = list(Finding("disk", FAILED, "1 MB is free", "1 GiB", "make room").lines())
    assert lines[-1].split() == ["docs", "troubleshooting#doctor"]


@pytest.mark.parametrize(
    ("argv", "anchor"),
    [
        (["fit", "--model", "no_such_module_here:build"], "no-module"),
        (["fit", "--epochs", "0"], "configuration"),
        (["launch", "--node-rank", "0", "--hosts", "h1,h2", "-m", "x"], "needs-secret"),
        (["bench", "--rounds", "0"], "configuration"),
        (["data", "--dataset", "nonsense"], "configuration"),
        (["sbatch"], "configuration"),
        (
            ["kubernetes", "manifest", "--image", "x:1", "--workers", "0", "--", "-m", "x"],
            "configuration",
        ),
        (["lunch"], "configuration"),
    ],
)
def test_the_commands_print_one_line_with_the_place(argv: list[str], anchor: str) -> None:
    words = [sys.executable, "-m", "tfmulti", *argv]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == errors.EXIT_USER
    [line] = done.stderr.splitlines()
    assert line.startswith("tfmulti: ")
    assert line.endswith(f" (docs: troubleshooting#{anchor})")
