import pytest


@pytest.fixture(autouse=True, scope="session")
def own_rows(tmp_path_factory):
    """Tokenised rows of these tests stay with these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEDGE_CACHE", str(tmp_path_factory.mktemp("fledge")))
        yield
