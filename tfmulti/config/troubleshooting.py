"""Says where the page docs/troubleshooting.md explains a message.

The commands print the path of the explanation at the end of the line, such as
`(docs: troubleshooting#secret)`. A frequent message has a heading of its own there. Any other error
has the heading of its class.
"""

from __future__ import annotations

import re
import sys

from tfmulti.errors import TfmultiError

# The anchors of the page, and the words of their messages. `…` stands for any words.
MESSAGES = {
    "no-module": "no module …. It must be importable from this folder",
    "devices-started": "logical CPU devices are needed, but TensorFlow has started with",
    "second-strategy": "but this process made another strategy before",
    "cannot-listen": "this worker cannot listen at",
    "no-port": "does not listen at",
    "idle": "has done nothing for",
    "outside-of-step": "is idle, and has been outside of a step",
    "no-progress": "has shown no progress for",
    "no-step": "has ended no step",
    "late-step": "no step has ended for",
    "failed-step": "the step has failed",
    "ssh": "does not let SSH in",
    "needs-secret": "--node-rank over … needs a secret",
    "secret": "does not know this job's secret",
    "isolate": "--isolate: this system does not allow a separate network",
    "shared-folder": "cannot see worker 0's folder of checkpoints",
    "folder-in-use": "is in use by another run",
    "scope": "was not made inside the strategy's scope",
    "not-compiled": "the model is not compiled",
    "overrides": "overrides …, which is what prepare() replaces",
    "optimizer": "applies gradients with a … that is not part of the model",
    "stateful": "is stateful: it keeps a state for each row",
    "loop": "normalizes by the rows of all replicas, but it stands in a loop",
    "different-batches": "the workers read different batches",
    "different-rows": "the parts of a batch have different numbers of rows",
    "no-regular-file": "is not a regular file",
    "pixels": "the image has more than … pixels",
    "file-limit": "is the limit (by default the memory)",
    "feature-class": "features.json names the class",
    "changed-setting": "saved …=…, this run …=…",
    "damaged-checkpoint": "the newest checkpoint does not have the format of this version",
    "damaged-position": "TensorFlow cannot restore the position in the data",
    "cut-off": "ends without saving",
    "memory": "is used up by a training step",
    "worker-lost": "worker … is lost: ",
    "starting-again": "starting all workers again",
    # Warnings.
    "straggler": "× as long as the median worker",
    "slow-network": "all workers wait for messages for",
    "input-bound": "input-bound: ",
    "tested-versions": "tfmulti is tested with",
    "proxy": "the environment names a proxy",
    "no-secret": "the processes run on several hosts without",
    "no-owner-file": "Until there is room for it",
    "slow-gradients": "gradients travel by gRPC, which is slower",
    "no-xla": "XLA does not compile this step",
    "xla-error": "XLA cannot compile this step",
    "data-ended": "the data ended after",
}
# A finding of the doctor names its own rule and the next step, so all findings share one anchor.
DOCTOR = "doctor"
_PATTERNS = {
    anchor: re.compile(".*?".join(map(re.escape, words.split("…"))))
    for anchor, words in MESSAGES.items()
}
_PAGE = "troubleshooting#"


def docs_path_of(words: str, otherwise: str = "") -> str:
    """Returns the page and the anchor that explain a message, or an empty text.

    Args:
        words: the message.
        otherwise: the anchor of a message that has none of its own.

    >>> docs_path_of("h2 does not know this job's secret")
    'troubleshooting#secret'
    """
    matching = (anchor for anchor, pattern in _PATTERNS.items() if pattern.search(words))
    anchor = next(matching, otherwise)
    return f"{_PAGE}{anchor}" if anchor else ""


def documented(words: str, otherwise: str = "") -> str:
    """Returns a message with the path of its explanation, unless it names one already.

    Args:
        words: the message.
        otherwise: the anchor of a message that has none of its own.
    """
    path = docs_path_of(words, otherwise)
    return f"{words} (docs: {path})" if path and _PAGE not in words else words


def print_error(error: TfmultiError) -> None:
    """Prints the one line of an error to standard error."""
    words = escaped(documented(str(error), error.anchor))
    print(f"tfmulti: {words}", file=sys.stderr, flush=True)


def escaped(words: str) -> str:
    r"""Returns a message with escaped control characters, which the name of a file may have.

    >>> print(escaped("a\x1b[2J.png"))
    a\x1b[2J.png
    """
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in words)
