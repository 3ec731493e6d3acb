"""Tests that a mistake on a command line is one line, and that a closed output is no mistake."""

from __future__ import annotations

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
        (["--out-fil", "x"], "no flag --out-fil; did you mean 'out-file'? Known: count, kind, ou"),
        (["--out", "x"], "no flag --out; "),
        (["--cuont=3"], "no flag --cuont; did you mean 'count'"),
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


def test_a_reader_that_ends_first_is_no_error() -> None:
    code = (
        "import sys\n"
        "from tfmulti.config.command_line import exit_code_of\n"
        "sys.exit(exit_code_of(lambda: print('line\\n' * 100_000)))"
    )
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == (b"", 0)
