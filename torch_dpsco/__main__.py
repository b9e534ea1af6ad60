"""Runs the command line: python -m torch_dpsco."""

import sys

from torch_dpsco.show.cli import main

if __name__ == "__main__":
    sys.exit(main())
