"""Tests that a mistake on a command line is one line, and that a closed output is no mistake."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tfmulti.config.command_line import Parser, exit_code_of, whole_number
from tfmulti.errors import ConfigError, DeviceError


def parser() -> Parser:
    made = Parser("tfmulti it", "What it does.")
    made.add_argument("--out-file", "--out_file")
    made.add_argument("--count", type=whole_number)
    made.add_argument("--kind", choices=("a", "b"))
    return made


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--out-fil", "x"], "no flag --out-fil; did you mean --out-file? Known: --count, "),
        (["--out", "x"], "no flag --out; "),
        (["--cuont=3"], "no flag --cuont; did you mean --count"),
        (["file"], "unexpected argument 'file'. See tfmulti it --help."),
        (["--count"], "--count: expected one argument. See tfmulti it --help."),
        (["--count", "1.5"], "--count: '1.5' is not a whole number. See tfmulti it --help."),
        (["--count", "9" * 10], f"--count: '{'9' * 10}' is not a whole number"),
        (["--kind", "c"], "--kind: invalid choice: 'c' (choose from "),
    ],
)
def test_mistakes(argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        parser().parsed(argv)
    assert str(error.value).startswith(words)


def test_values() -> None:
    found = parser().parsed(["--out_file", "x", "--count", "7"])
    assert (found.out_file, found.count, found.kind) == ("x", 7, None)


def test_an_error_is_a_line_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise DeviceError("no GPU\nhere")

    assert exit_code_of(fails) == 2
    assert capsys.readouterr().err == "tfmulti: no GPU here (docs: troubleshooting#devices)\n"
    assert exit_code_of(lambda: None) == 0


@pytest.mark.parametrize(
    ("lines", "code"),
    [(100_000, 128 + signal.SIGPIPE), (1, 0)],
    ids=["while it prints", "when all is printed"],
)
def test_a_reader_that_ends_first_is_no_error(lines: int, code: int) -> None:
    program = (
        "import sys\n"
        "from tfmulti.config.command_line import exit_code_of\n"
        f"sys.exit(exit_code_of(lambda: print('line\\n' * {lines})))"
    )
    reader, writer = os.pipe()
    os.close(reader)
    # Without a buffer Python writes at once, and not only at the end.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, stdout=writer, stderr=subprocess.PIPE, env=env, timeout=60)
    os.close(writer)
    assert (done.stderr, done.returncode) == (b"", code)


@pytest.mark.usefixtures("capfd")
def test_a_connection_that_ends_is_an_error() -> None:
    def fails() -> None:
        raise BrokenPipeError("a connection to another worker")

    with pytest.raises(BrokenPipeError, match="another worker"):
        exit_code_of(fails)


@pytest.mark.parametrize("code", [None, 0, 3, "why"])
def test_a_program_that_exits_keeps_its_code(code: object) -> None:
    def exits() -> None:
        sys.exit(code)  # type: ignore[arg-type]

    if not code:
        assert exit_code_of(exits) == 0
        return
    with pytest.raises(SystemExit) as ended:
        exit_code_of(exits)
    assert ended.value.code == code
