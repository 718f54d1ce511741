"""docs/export.md says what the tests and the tables say."""

from export.tested_table import PAGE, TESTED, with_tables


def test_the_page_is_what_the_tests_say():
    page = PAGE.read_text()
    assert page == with_tables(page), "run: python tests/export/tested_table.py"
    assert len(TESTED) > 5
