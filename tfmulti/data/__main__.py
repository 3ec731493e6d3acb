"""`python -m tfmulti.data`: shows a data set, how it is shared out, and how fast it comes."""

import sys

from tfmulti.run.data_command import main

if __name__ == "__main__":
    sys.exit(main())
