import pytest

from train.tiny import make_chats, make_target, recipe_for


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def tiny_chats(tmp_path_factory):
    return make_chats(tmp_path_factory.mktemp("data") / "chats.jsonl")


@pytest.fixture
def recipe(tiny_target, tiny_chats, tmp_path):
    def make(*overrides, run="run"):
        return recipe_for(tiny_target, tiny_chats, tmp_path / run, *overrides)

    return make
