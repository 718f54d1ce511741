"""`python -m fledge.precompute_eagle3`: the command lives in `compat`."""

import sys

from fledge.compat.precompute_eagle3 import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
