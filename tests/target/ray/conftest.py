import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The target of the contract suite, saved to files."""
    from target.tiny_models import tiny_model

    directory = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(directory)
    return directory
