"""The tables in docs/export.md name what the code says: versions, and what engines cannot serve."""

from pathlib import Path

from fledge.formats.engines import ENGINES, SPECULATORS_PEAGLE_LIMITS
from fledge.methods.registry import METHODS

PAGE = (Path(__file__).parents[2] / "docs" / "export.md").read_text()


def table(name):
    begin, end = f"<!-- {name}: begin -->\n", f"\n<!-- {name}: end -->"
    return PAGE.split(begin)[1].split(end)[0]


def test_the_page_lists_every_limit():
    rows = ["| engine | cannot serve | since | instead |", "|---|---|---|---|"]
    limits = [(engine.title, limit) for engine in ENGINES.values() for limit in engine.limits]
    limits += [("speculators, P-EAGLE", limit) for limit in SPECULATORS_PEAGLE_LIMITS]
    rows += [
        f"| {title} | {limit.feature} | {limit.since or 'never'} | {limit.instead} |"
        for title, limit in limits
    ]
    assert table("limits") == "\n".join(rows)


def test_the_page_lists_every_tested_version():
    for engine in ENGINES.values():
        assert f"{engine.title} {', '.join(engine.tested)}" in table("tested")
    formats = {layout.name for method in METHODS.values() for layout in method.formats.values()}
    assert not [name for name in formats if name not in table("tested")]
