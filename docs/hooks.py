"""What mkdocs generates when it builds the site: the flags of the commands, from their help."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

COMMANDS = ("fit", "launch", "data", "bench", "doctor", "sbatch", "kubernetes", "env")
FLAGS, CONTRIBUTING = "<!-- flags -->", "<!-- CONTRIBUTING.md -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Returns the page with what is generated in place of its marks."""
    if FLAGS in markdown:
        return markdown.replace(FLAGS, "\n".join(map(section, COMMANDS)))
    if CONTRIBUTING in markdown:
        page = Path(__file__).resolve().parents[1] / "CONTRIBUTING.md"
        # The file's links are those of the repository's first folder.
        return page.read_text().replace("](docs/", "](")
    return markdown


def section(name: str) -> str:
    """Returns the section of a command: its help, as it prints it."""
    argv = [sys.executable, "-m", "tfmulti", name, "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return f"## tfmulti {name}\n\n```text\n{done.stdout.rstrip()}\n```\n"
