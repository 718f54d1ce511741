"""Drafts as engines read them; called (`fledge.export(draft, ...)`), `fledge.api.export`."""

from fledge.core.callable import make_callable

make_callable(__name__, "fledge.api:export")
