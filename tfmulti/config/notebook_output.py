"""Shows HTML in the cell of a notebook that runs this process, or that has started this worker."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

# `notebook_launcher` sets this variable for its workers to a folder, and shows the file in it.
FOLDER_VARIABLE, FILE = "TFMULTI_NOTEBOOK", "shown.html"


def in_notebook() -> bool:
    """Returns whether this process is a notebook's kernel, or a worker that a notebook started."""
    return FOLDER_VARIABLE in os.environ or _is_kernel()


def _is_kernel() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class NotebookOutput:
    """A place in the output of the running cell, whose content can be replaced.

    It needs no extension of the notebook, because it is updated by `display_data` messages.

    Source: Jupyter client's manual, "Messaging in Jupyter", `update_display_data`.
    """

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, data: str) -> None:
        """Shows HTML in this place. It does nothing outside of a notebook.

        Args:
            data: the HTML.
        """
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder is not None:
            path = Path(folder, FILE)
            partial = path.with_suffix(".partial")
            partial.write_text(data)
            partial.replace(path)
        elif self._handle is not None:
            self._handle.update(_html(data))
        elif _is_kernel():
            from IPython.display import display

            self._handle = display(_html(data), display_id=True)


def _html(data: str) -> Any:
    from IPython.display import HTML

    return HTML(data)
