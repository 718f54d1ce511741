import subprocess

import pytest


@pytest.fixture(scope="session")
def server():
    """One server for all tests that only send it requests."""
    from target.remote.servers import running

    with running() as started:
        yield started


@pytest.fixture(scope="session")
def nursery():
    """Starts servers in separate processes, quickly."""
    from target.remote.chaos import Nursery

    started = Nursery()
    yield started
    started.close()


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Keep tokenized rows and fetched tokenizers of these tests out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEDGE_CACHE", str(tmp_path_factory.mktemp("fledge")))
        yield


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-keyout", "key.pem", "-out", "cert.pem", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run(command, cwd=directory, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return directory / "cert.pem", directory / "key.pem"
