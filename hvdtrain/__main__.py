"""Entry point of `python -m hvdtrain`."""

import sys

from hvdtrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
