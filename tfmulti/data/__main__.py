"""Command `python -m tfmulti.data`: shows a data set, its batch plan and its reading speed."""

import sys

from tfmulti.run.data_command import main

if __name__ == "__main__":
    sys.exit(main())
