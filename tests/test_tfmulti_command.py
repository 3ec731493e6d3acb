"""Tests the command `tfmulti`, and the public names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import tfmulti
from tfmulti.__main__ import COMMANDS, main
from tfmulti.errors import EXIT_DONE, EXIT_USER


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "tfmulti", *argv]
    return subprocess.run(words, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_runs_by_its_name(name: str) -> None:
    done = run(name, "--help")
    same = subprocess.run(
        [sys.executable, "-m", COMMANDS[name], "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stdout == same.stdout
    assert f"tfmulti.{name}" in done.stdout or f"tfmulti {name}" in done.stdout


@pytest.mark.parametrize("argv", [("--help",), *((name, "--help") for name in COMMANDS)])
def test_a_reader_of_the_help_may_end_first(argv: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "tfmulti", *argv]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert done.stderr == b""
    assert done.returncode in (0, 128 + signal.SIGPIPE)


def test_a_mistake_keeps_the_exit_code_and_the_line_of_its_command() -> None:
    done = run("fit", "--epochs", "0")
    assert done.returncode == EXIT_USER
    assert done.stderr == (
        "tfmulti: --epochs is 0, but it must be at least 1. (docs: troubleshooting#configuration)\n"
    )


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_the_commands_are_listed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tfmulti", *argv][1:]) == EXIT_DONE
    listed = capsys.readouterr().out
    assert all(f"tfmulti {name} " in listed for name in COMMANDS)


def test_a_misspelled_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lunch"]) == EXIT_USER
    words = "tfmulti: no command 'lunch'; did you mean 'launch'? Known: bench, data, "
    assert capsys.readouterr().err.startswith(words)


def test_the_console_script_is_this_command() -> None:
    (script,) = entry_points(group="console_scripts", name="tfmulti")
    assert script.value == "tfmulti.__main__:main"


def test_the_console_script_finds_modules_of_this_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import keras, numpy as np\n"
        "def build():\n"
        "    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])\n"
        "def data():\n"
        "    return np.ones((64, 4), np.float32), np.arange(64) % 2\n"
    )
    script = str(Path(sys.executable).parent / "tfmulti")
    words = [script, "fit", "--model", "mine:build", "--dataset", "mine:data"]
    words += ["--global_batch_size", "16", "--dry_run"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Nothing was written." in done.stdout


def test_fit_is_a_module_and_train_the_function() -> None:
    code = "import tfmulti.fit; from tfmulti import fit, train; print(fit.__name__, train.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["tfmulti.fit", "train"]
    assert "fit" not in tfmulti.__all__


def test_a_program_launches_a_job(tmp_path: Path) -> None:
    """`tfmulti.launch` is a package, so the function that starts a job is `tfmulti.launch.run`."""
    program = tmp_path / "worker.py"
    program.write_text("import os; print('rank', os.environ['RANK'])")
    code = (
        "import tfmulti, tfmulti.launch\n"
        f"config = tfmulti.LaunchConfig(program=({str(program)!r},), per_node='2')\n"
        "raise SystemExit(tfmulti.launch.run(config))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert {"[worker 0] rank 0", "[worker 1] rank 1"} <= set(done.stdout.splitlines())
