import pytest


@pytest.fixture(scope="session")
def server():
    """One server for all tests that only send it requests."""
    from target.remote.servers import running

    with running() as started:
        yield started


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Keep tokenized rows and fetched tokenizers of these tests out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEDGE_CACHE", str(tmp_path_factory.mktemp("fledge")))
        yield
