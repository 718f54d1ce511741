"""Another name of `fledge.target.sglang.runner`, for other programs."""

import sys

from fledge.target.sglang import runner

sys.modules[__name__] = runner  # the same module: what is replaced in one is in the other
