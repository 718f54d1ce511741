"""The SGLang runner, as far as its specification can be checked without SGLang.

"This forward path requires a GPU and SGLang, so it is validated on the training server, not in CPU
unit tests": `tests/engines/sglang/test_seed_002_sglang_runner.py` runs the rest in real SGLang.
Each test quotes the sentence of the specification that it checks.
"""

import inspect
from pathlib import Path

import pytest
import torch

from fledge import (
    Eagle3TrainerModule,
    LlamaEagle3DraftModel,
    SGLangEagle3TargetModel,
    SGLangTargetRunner,
    VLLMEagle3TargetModel,
)
from fledge.methods.shared.config import derive_draft_config
from fledge.target.runner import RunnerEagle3TargetModel
from fledge.target.sglang import runner as module
from fledge.target.sglang.engine import VERSIONS
from fledge.target.sglang.runner import server_options, sglang_dtype
from target.contract import padded_rows
from target.hf_runner import HFTargetRunner
from target.tiny_models import tiny_model


def test_it_is_the_runner_of_its_target_and_supports_the_stated_version():
    """ "the calls here track sglang==0.5.9". (That it is "imported lazily" is checked in
    `test_000_target_runner.py`.)"""
    assert issubclass(SGLangEagle3TargetModel, RunnerEagle3TargetModel)
    assert SGLangEagle3TargetModel.runner_type is SGLangTargetRunner
    assert "0.5.9" in VERSIONS


def test_its_batch_needs_no_head_to_train_on(monkeypatch):
    """`SGLangEagle3TargetModel.from_pretrained`, then `generate_batch` and the trainer, as with
    every other target: "the draft-vocab projection happens trainer-side"."""
    model = tiny_model("llama")
    monkeypatch.setattr(SGLangTargetRunner, "build", lambda *_, **__: HFTargetRunner(model))
    monkeypatch.setattr("fledge.models.resolve.local_model", Path)
    monkeypatch.setattr("fledge.target.runner.tokenizer_in", lambda *_, **__: None)
    target = SGLangEagle3TargetModel.from_pretrained("org/model")
    batch = target.generate_batch(*padded_rows())
    ids = torch.arange(model.config.vocab_size)
    trainer = Eagle3TrainerModule(
        LlamaEagle3DraftModel(derive_draft_config(model.config)), ttt_steps=2,
        selected_token_ids=ids, selected_token_mask=torch.ones_like(ids).bool(),
    )  # fmt: skip
    assert trainer(**batch.to_trainer_inputs()).loss > 0
    assert VLLMEagle3TargetModel.from_pretrained.__func__ is (
        SGLangEagle3TargetModel.from_pretrained.__func__
    )


def test_it_has_the_documented_surface():
    """ "Built via build; consumed through the engine-agnostic TargetRunner surface (model /
    set_aux_layers / forward_eagle3 / input_embedding_weight)" """
    surface = ("model", "set_aux_layers", "forward_eagle3", "input_embedding_weight", "close")
    assert all(hasattr(SGLangTargetRunner, name) for name in surface)
    assert isinstance(SGLangTargetRunner.model, property)
    build = inspect.signature(SGLangTargetRunner.build).parameters
    assert [*build][:2] == ["model_path", "dtype"]
    assert build["dtype"].default is None
    assert build["sglang_kwargs"].kind is inspect.Parameter.VAR_KEYWORD
    assert callable(SGLangEagle3TargetModel.from_pretrained)


@pytest.mark.parametrize(
    ("dtype", "word"),
    [(None, "auto"), (torch.bfloat16, "bfloat16"), (torch.float32, "float32"), ("auto", "auto"),
     ("bfloat16", "bfloat16")],
)  # fmt: skip
def test_dtypes_are_mapped_to_the_strings_that_sglang_expects(dtype, word):
    """ "Map a torch dtype to the string form SGLang's ServerArgs.dtype expects." "None means 'let
    SGLang pick' ('auto')." """
    assert sglang_dtype(dtype) == word


def test_arguments_are_forwarded_to_server_args():
    """ "sglang_kwargs are forwarded to ServerArgs (e.g. page_size, mem_fraction_static,
    attention_backend)"; "Build a SGLang ModelRunner with enable_return_hidden_states=True." """
    requested = {"page_size": 16, "mem_fraction_static": 0.3, "attention_backend": "triton"}
    options = server_options(requested, [*requested, "device"], device="cuda")
    assert requested.items() <= options.items()
    assert options["enable_return_hidden_states"] is True
    assert options["tp_size"] == 1


class PretendRanks:
    """The engine interface that the runner uses."""

    def __init__(self, options):
        self.options, self.calls = options, []
        self.engine = self
        self.model = torch.nn.Linear(2, 2)

    def limits(self):
        return None

    def call(self, method, *args):
        self.calls.append((method, args))

    def close(self):
        self.calls.append(("close", ()))


@pytest.fixture
def pretend_sglang(monkeypatch, tmp_path):
    """Pretends that SGLang 0.5.9 is installed and loads any model."""
    engine = type("Engine", (), {"option_names": staticmethod(lambda: ["page_size", "device"])})
    monkeypatch.setattr(module, "installed_version", lambda: "0.5.9")
    monkeypatch.setattr(module, "engine_class", lambda device: engine)
    monkeypatch.setattr(module, "SGLangRanks", PretendRanks)
    monkeypatch.setattr("fledge.models.resolve.local_model", lambda name: name)
    return tmp_path


def test_build_forwards_the_path_and_all_options(pretend_sglang):
    """ "Construct the SGLang ModelRunner for a standalone target server." """
    runner = SGLangTargetRunner.build(
        model_path=str(pretend_sglang), dtype=torch.bfloat16, device="cpu", page_size=4
    )
    ranks = runner._ranks
    assert ranks.options["model_path"] == str(pretend_sglang)
    assert ranks.options["dtype"] == "bfloat16"
    assert ranks.options["page_size"] == 4
    assert [*runner.model.parameters()]
    default = SGLangTargetRunner.build(str(pretend_sglang), device="cpu")
    assert default._ranks.options["dtype"] == "auto"
    runner.close()  # "Release the SGLang model runner (best effort)."
    runner.close()
    assert ranks.calls == [("close", ())]
    with pytest.raises(RuntimeError, match="closed"):
        _ = runner.model
