"""Puts the help of the commands and CONTRIBUTING.md into the pages when mkdocs builds the site."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

COMMANDS = ("fit", "launch", "data", "bench", "doctor", "sbatch", "kubernetes", "env")
FLAGS, CONTRIBUTING = "<!-- flags -->", "<!-- CONTRIBUTING.md -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Returns the page with the generated text in place of its mark."""
    if FLAGS in markdown:
        return markdown.replace(FLAGS, "\n".join(map(section, COMMANDS)))
    if CONTRIBUTING in markdown:
        page = Path(__file__).resolve().parents[1] / "CONTRIBUTING.md"
        # The links of the file are relative to the root of the repository.
        return page.read_text().replace("](docs/", "](")
    return markdown


def section(name: str) -> str:
    """Returns the section of a command, with the text of its `--help`."""
    argv = [sys.executable, "-m", "tfmulti", name, "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return f"## tfmulti {name}\n\n```text\n{done.stdout.rstrip()}\n```\n"
