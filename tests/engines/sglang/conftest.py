"""Real SGLang on a CPU. `make test-sglang` creates the environments and runs these in each."""

import importlib.metadata
import importlib.util

import pytest

HERE = __file__.rpartition("/")[0]


def pytest_collection_modifyitems(items):
    """Everything here needs SGLang."""
    engine_items = [item for item in items if str(item.path).startswith(HERE)]
    for item in engine_items:
        item.add_marker(pytest.mark.engine)
        if importlib.util.find_spec("sglang") is None:
            item.add_marker(pytest.mark.skip(reason="SGLang is not installed: make test-sglang"))


@pytest.fixture(scope="session")
def sglang_version() -> str:
    return importlib.metadata.version("sglang")
