"""Training: the loop, the step, batches, checkpoints.

The package is also callable: `fledge.train(recipe)` is `fledge.api.train`.
"""

from fledge.core.callable import make_callable

make_callable(__name__, "fledge.api:train")
