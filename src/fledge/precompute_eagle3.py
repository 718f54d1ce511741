"""`python -m fledge.precompute_eagle3`: the command lives in `compat`, its parts are named here."""

import sys

from fledge.compat.precompute_eagle3 import (  # noqa: F401  (what other programs call of it)
    _build_parser,
    _compute_batch_cache,
    _ensure_resume_compatible,
    _run,
    _validate_args,
    logger,
    main,
)

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
