"""Hides packages that Keras imports if they are installed, for its wrappers and its pictures.

Their import takes a quarter of the 7 s of a core that the import of TensorFlow and Keras takes in
each process that a test starts. Python runs this module when it starts, because its folder is on
PYTHONPATH (`tests/conftest.py`). The tests' own process imports these packages.
"""

import sys

# An import of a name that is None here raises ModuleNotFoundError.
for name in ("sklearn", "pandas", "matplotlib.pyplot"):
    sys.modules[name] = None  # type: ignore[assignment]
