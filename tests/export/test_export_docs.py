"""The tables in docs/export.md are up to date."""

from export.tested_table import PAGE, TESTED, with_tables


def test_the_page_has_the_current_tables():
    page = PAGE.read_text()
    assert page == with_tables(page), "run: python tests/export/tested_table.py"
    assert len(TESTED) > 5
