"""Entry point of `python -m hvdtrain.cli`."""

import sys

from hvdtrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
