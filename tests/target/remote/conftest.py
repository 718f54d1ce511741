import pytest


@pytest.fixture(scope="session")
def server():
    """One server for all tests that only ask questions."""
    from target.remote.servers import running

    with running() as started:
        yield started


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Tokenised rows and fetched tokenizers of these tests stay with these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEDGE_CACHE", str(tmp_path_factory.mktemp("fledge")))
        yield
