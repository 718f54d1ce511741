"""`python -m fledge.precompute_eagle3`: re-exports the command, implemented in `compat`."""

import sys

from fledge.compat.precompute_eagle3 import (  # noqa: F401  (used by other programs)
    _build_parser,
    _compute_batch_cache,
    _compute_target_distribution,
    _ensure_resume_compatible,
    _run,
    _validate_args,
    logger,
    main,
)

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
