"""The engine-agnostic target, "a pluggable runner", used as its specification describes.

Each test quotes the sentence of the specification that it checks.
"""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from fledge import (
    Eagle3TargetBackend,
    HFEagle3TargetModel,
    LlamaEagle3DraftModel,
    RunnerEagle3TargetModel,
    TargetRunner,
)
from fledge.methods.shared.config import derive_draft_config
from target.contract import padded_rows
from target.hf_runner import LogitsRunner
from target.tiny_models import tiny_model


@pytest.fixture
def runner():
    return LogitsRunner(tiny_model("llama"))


def test_a_runner_needs_four_members(runner):
    """`forward_eagle3` / `set_aux_layers` / `input_embedding_weight` and a `model` exposing
    `.config` + `.parameters()`."""
    assert isinstance(runner, TargetRunner)
    names = ("forward_eagle3", "set_aux_layers", "input_embedding_weight", "model")
    for missing in names:
        partial = SimpleNamespace(**{name: print for name in names if name != missing})
        assert not isinstance(partial, TargetRunner)


@pytest.mark.parametrize(
    "names",
    [
        "fledge import RunnerEagle3TargetModel, SGLangTargetRunner, TargetRunner",
        "fledge.target_runner import RunnerEagle3TargetModel, TargetRunner",
        "fledge.sglang_runner import SGLangTargetRunner",
    ],
)
def test_importing_the_interface_imports_no_engine(names):
    """ "importing this module never pulls in SGLang or vLLM" """
    code = f"import sys; from {names}; sys.exit(bool({{'sglang', 'vllm'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_aux_layers_default_to_the_shared_recipe_and_can_be_chosen(runner):
    """ "When None the shared EAGLE-3 default recipe is used, matching every other backend." """
    target = RunnerEagle3TargetModel(runner)
    assert isinstance(target, Eagle3TargetBackend)
    assert target.aux_layer_ids == HFEagle3TargetModel(tiny_model("llama")).aux_layer_ids
    assert runner.aux_layers == target.aux_layer_ids == [1, 3, 4]  # low / mid / high of 8 layers
    assert RunnerEagle3TargetModel(runner=runner, aux_layer_ids=[5, 0, 2]).aux_layer_ids == [
        5,
        0,
        2,
    ]
    assert runner.aux_layers == [
        5,
        0,
        2,
    ]  # "Tell the underlying model which 3 decoder layers to capture."
    for wrong in ([1, 2], [1, 1, 2], [1, 2, 8]):
        with pytest.raises(ValueError, match="aux"):
            RunnerEagle3TargetModel(runner, aux_layer_ids=wrong)


def test_a_batch_equals_that_of_the_co_located_target_byte_for_byte(runner):
    """ "an Eagle3TargetBatch byte-for-byte compatible with HFEagle3TargetModel.generate_batch: the
    logits, input_ids and loss_mask are shifted left by one (next-token alignment) while the aux
    hidden states are kept position-aligned" """
    rows = padded_rows()  # "sequences are assumed right-padded"
    batch = RunnerEagle3TargetModel(runner).generate_batch(*rows)
    expected = HFEagle3TargetModel(tiny_model("llama")).generate_batch(*rows)
    assert dict(batch.tensors()).keys() == dict(expected.tensors()).keys()
    for name, tensor in expected.tensors():
        assert torch.equal(getattr(batch, name), tensor), name
    logits, aux = runner.forward_eagle3(*rows[:2])  # "full vocab, unshifted"
    assert torch.equal(batch.logits[:, :-1], logits[:, 1:])
    assert not batch.logits[:, -1].any()
    assert torch.equal(batch.input_ids[:, :-1], rows[0][:, 1:])
    assert torch.equal(batch.loss_mask[:, :-1], rows[2][:, 1:])
    assert torch.equal(batch.aux_hidden_states, aux)
    assert aux.shape == (*rows[0].shape, 3 * runner.model.config.hidden_size)


def test_the_model_and_its_embeddings_are_exposed(runner):
    """ "Return an object exposing .weight (the target input embeddings)": "the draft's
    copy_embeddings_from_target only reads .weight"."""
    target = RunnerEagle3TargetModel(runner)
    assert target.model is runner.model
    embedding = target.get_input_embeddings()
    assert torch.equal(embedding.weight, runner.model.get_input_embeddings().weight)
    draft = LlamaEagle3DraftModel(derive_draft_config(target.model.config))
    draft.copy_embeddings_from_target(embedding)
    assert torch.equal(draft.embed_tokens.weight, embedding.weight)


def test_engines_can_subclass_it_and_closing_releases_the_runner(runner):
    """ "Concrete engines subclass this to add their own from_pretrained (which builds the runner);
    everything else is inherited." "Release the runner (frees GPU memory / engine handles)." """
    released = []

    class Engine(RunnerEagle3TargetModel):
        @classmethod
        def from_pretrained(cls, model):
            return cls(LogitsRunner(model))

    target = Engine.from_pretrained(tiny_model("llama"))
    target.runner.close = lambda: released.append(1)
    batch = target.generate_batch(*padded_rows())
    assert torch.equal(
        batch.logits, RunnerEagle3TargetModel(runner).generate_batch(*padded_rows()).logits
    )
    target.close()
    target.close()
    assert released == [1]
    with pytest.raises(RuntimeError, match="closed"):
        target.generate_batch(*padded_rows())
    RunnerEagle3TargetModel(runner).close()  # a runner with nothing to release is fine
