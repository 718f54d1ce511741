"""The loop, the step, batches, checkpoints; called (`fledge.train(recipe)`), `fledge.api.train`."""

from fledge.core.callable import make_callable

make_callable(__name__, "fledge.api:train")
