"""Another name of `fledge.compat.peagle_draft`, for other programs; `draft_llama` has the hosts."""

import sys

from fledge.compat import peagle_draft

sys.modules[__name__] = peagle_draft  # the same module: what is replaced in one is in the other
