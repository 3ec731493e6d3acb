"""Tests the pages of the docs: their Python runs, their commands work, and they are short."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support import forked
from tests.support.processes import ROOT, run
from tfmulti import __main__ as tfmulti_command
from tfmulti.bench import flags as bench_flags
from tfmulti.config import flags as fit_flags
from tfmulti.doctor import __main__ as doctor
from tfmulti.launch import flags as launch_flags
from tfmulti.launch import kubernetes, sbatch
from tfmulti.run import data_command

pytestmark = pytest.mark.processes

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LIMIT_S = 180
# The code that the blocks of a page need before them.
MODEL = """
import os
import keras, numpy as np
import tfmulti
x = np.ones((16, 3), "float32"); y = x[:, :1]
model = tfmulti.prepare(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
model.compile("adam", "mse")
"""
BEFORE = {
    "faults.md": MODEL,
    # MLflow writes to a folder, which needs no further package.
    "trackers.md": f"""{MODEL}
os.environ |= {{"MLFLOW_TRACKING_URI": "file:mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}}
""",
    "verify.md": """
import keras, numpy as np
import tfmulti
from tfmulti import prepare
strategy = tfmulti.make_strategy("mirrored", replicas=2)
x = np.ones((16, 3), "float32"); y = x[:, :1]
with strategy.scope():
    model = prepare(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
    model.compile("adam", "mse")
""",
}


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """Yields (page:number, text) of each block of a language."""
    for page in PAGES:
        found = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)
        for number, text in enumerate(found, 1):
            yield f"{page.name}:{number}", text


def commands() -> Iterator[tuple[str, str]]:
    """Yields (page:line, command) of each command of tfmulti in the shell blocks."""
    for place, text in blocks("bash"):
        for number, line in enumerate(text.replace("\\\n", " ").splitlines(), 1):
            command = re.split(r"  #| > | \| ", line)[0].strip()
            command = re.sub(r"^(srun|mpirun) .*?(?=python )", "", command)
            command = re.sub(r"^tfmulti ", "python -m tfmulti ", command)
            if command.startswith("python -m tfmulti"):
                yield f"{place}:{number}", command


# Files of schedulers and platforms are yaml or json.
LANGUAGES = ("bash", "python", "text", "mermaid", "yaml", "json", "")

# tests/clusters/test_ray.py runs the examples that start Ray.
PYTHON = {place: code for place, code in blocks("python") if not place.startswith("ray.md")}
COMMANDS = dict(commands())


def test_there_are_blocks_and_commands() -> None:
    assert len(PYTHON) >= 15
    assert len(COMMANDS) >= 30
    assert "kubernetes.md:2:2" in COMMANDS


def test_each_block_has_a_language_that_these_tests_know() -> None:
    """A block of `sh` would be skipped. A `text` is output, and no script."""
    for page in PAGES:
        found = re.findall(r"^```(\S*)\n(.*?)^```", page.read_text(), re.M | re.S)
        for language, text in found:
            assert language in LANGUAGES, f"{page.name}: {language}"
            if language == "text":
                assert not re.search(r"^(import |from \S+ import|model\.|\w+ = )", text, re.M), page


@pytest.mark.parametrize("place", PYTHON)
def test_python_of_a_page_runs(tmp_path: Path, place: str) -> None:
    code = BEFORE.get(place.partition(":")[0], "") + PYTHON[place]
    done = forked.run(["-c", code], tmp_path / "logs", limit_s=LIMIT_S, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("place", COMMANDS)
def test_a_command_of_a_page_has_flags_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    things(tmp_path)
    monkeypatch.chdir(tmp_path)
    _, _, module, *argv = shlex.split(COMMANDS[place])
    if module == "tfmulti":
        module = tfmulti_command.COMMANDS[argv.pop(0)]
    if module == "tfmulti.launch":
        config = launch_flags.parse(argv, "", {"TFMULTI_SECRET": "known to all machines"})
        if config.module and config.program[0] == "tfmulti.fit":
            fit_flags.parse(["fit", *config.program[1:]])
        if config.module and config.program[0] == "tfmulti.doctor":
            assert doctor.parse(["doctor", *config.program[1:]]) is not None
    elif module == "tfmulti.bench":
        assert bench_flags.parse(["bench", *argv], "", datetime(2030, 1, 1)) is not None
    elif module == "tfmulti.doctor":
        assert doctor.parse(["doctor", *argv]) is not None
    elif module == "tfmulti.cluster":
        assert not argv
    elif module == "tfmulti.launch.sbatch":
        assert sbatch.parsed(argv).program[:2] == ("-m", "tfmulti.fit")
    elif module == "tfmulti.launch.kubernetes":
        assert kubernetes.parsed(argv).program[:2] == ("-m", "tfmulti.fit")
    elif module == "tfmulti.data":
        assert data_command.parse(["data", *argv]) is not None
    else:
        assert module == "tfmulti.fit"
        assert fit_flags.parse(["fit", *argv]) is not None


# The commands that this test runs, with the flags that make them run in seconds.
RUN = {
    "quickstart.md:3:1": [],
    "quickstart.md:4:1": ["--epochs", "1"],
    "own-model.md:1:1": ["--epochs", "1"],
    "checkpoints.md:1:1": ["--epochs", "1"],
    "data.md:1:2": ["--nomeasure"],
    "launching.md:1:1": ["--epochs", "1"],
    "launching.md:1:2": [],
    "kubernetes.md:1:1": [],
}


def things(folder: Path) -> None:
    """Makes the files that the commands name: a model, data, a script, images."""
    package = folder / "my_package"
    package.mkdir()
    (package / "models.py").write_text(
        "import keras\n"
        "def build():\n"
        "    layers = [keras.Input((4,)), keras.layers.Dense(2, 'softmax')]\n"
        "    return keras.Sequential(layers)\n"
    )
    (package / "data.py").write_text(
        "import numpy as np\n"
        "def load():\n"
        "    return np.ones((64, 4), 'float32'), np.arange(64) % 2\n"
    )
    (folder / "train.py").write_text("import sys; assert sys.argv[1:] == ['--its-own-flags']\n")
    (folder / "search.py").touch()
    for label in ("cat", "dog"):
        (folder / "photos" / label).mkdir(parents=True)
        for number in range(30):
            pixels = np.full((8, 8, 3), number, np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / label / f"{number}.png")


@pytest.mark.parametrize("place", RUN)
def test_a_command_of_a_page_runs(tmp_path: Path, place: str) -> None:
    things(tmp_path)
    _, *argv = shlex.split(COMMANDS[place])
    done = run([*argv, *RUN[place]], tmp_path / "log", limit_s=LIMIT_S, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def messages() -> Iterator[list[str]]:
    """Yields the words of each text in the code; a null character stands for a value."""
    for path in sorted((ROOT / "tfmulti").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = [node.value for node in nodes if isinstance(node, ast.Expr)]
        for node in nodes:
            if node in docstrings:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else "\0" for v in node.values)
                yield "".join(map(str, parts)).split()
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value.replace("{}", "\0").split()


def stand_in(words: list[str], message: list[str]) -> bool:
    """Returns whether a message has these words in this order. Values may be any words."""
    for start in range(len(message) - len(words) + 1):
        found = message[start : start + len(words)]
        pairs = [(a.strip(".,:;"), b.strip(".,:;")) for a, b in zip(words, found, strict=True)]
        equal = sum(a == b for a, b in pairs)
        if 2 * equal >= len(words) and all(a == b or "\0" in b for a, b in pairs):
            return True
    return False


def test_the_messages_on_the_page_of_limits_are_those_of_the_code() -> None:
    text = (ROOT / "docs/limits.md").read_text()
    tables = text[text.index("| what | what happens") : text.index("| trap")]
    last = [line.split(" | ")[-1] for line in tables.splitlines() if line.startswith("|")]
    quoted = [words for cell in last for words in re.findall('[`"]([^`"]+)[`"]', cell)]
    known = list(messages())
    of_libraries = {
        "Unable to lift tensor",
        "is not in the list of allowed values",
        "You cannot add new elements of state",
        "only supports singleton tf.Variables",
        "'NoneType' object has no attribute",
        "… You are attempting to create a variable",
    }
    others = {*of_libraries, "(n, 3, d)", "self.steps += 1"}
    quotes = {quote for quote in quoted if len(quote.split()) > 2} - others
    assert len(quotes) > 40
    for quote in sorted(quotes):
        parts = [part.split() for part in quote.removeprefix("verify: ").split("…")]
        assert all(
            any(stand_in(part, message) for message in known) for part in parts if len(part) > 1
        ), quote


def test_links_lead_somewhere() -> None:
    """Mkdocs checks links between pages. This also checks links to files outside of docs/."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_pages_begin_with_what_the_reader_can_do_after_them() -> None:
    lacking = [
        page.name
        for page in PAGES
        if page.name not in ("README.md", "contributing.md")
        and not re.search(r"After\s+this\s+page\s+you", page.read_text()[:600])
    ]
    assert not lacking


@pytest.mark.parametrize(("name", "most"), [("README.md", 150), ("BUILD.md", 60)])
def test_the_first_pages_are_short(name: str, most: int) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= most
