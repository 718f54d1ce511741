"""The runner seam: any engine behind four methods equals the co-located target, bit for bit."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contract import assert_same, draft_vocabulary, packed_rows, padded_rows, some_documents
from hf_runner import HFTargetRunner, LogitsRunner
from tiny_models import ARCHITECTURES, tiny_model

import fledge
from fledge.core.rows import TokenBatch
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.runner import RunnerEagle3TargetModel, TargetRunner

# MiniCPM3 scales the output of transformers' base model before its head
BASE_MODEL_IS_ALL = [name for name in ARCHITECTURES if name != "minicpm3"]

# This runner uses the mask of a group that it is passed; the co-located target does not. States of
# padding then differ and are routed to other experts, which changes the sizes of the grouped matrix
# products: the results are equal up to rounding.
EXPERTS = ("gpt-oss", "qwen3-moe")


@pytest.mark.parametrize("architecture", BASE_MODEL_IS_ALL)
@pytest.mark.parametrize("supervision", ["logits", "probs", "hidden"])
def test_runner_equals_hf_bitwise(architecture: str, supervision: Any) -> None:
    model = tiny_model(architecture)
    local = HFEagle3TargetModel(model, supervision=supervision)
    runner_target = RunnerEagle3TargetModel(HFTargetRunner(model), supervision=supervision)
    for backend in (local, runner_target):
        backend.set_vocab_mapping(*draft_vocabulary(model))
    assert_same(runner_target.generate_batch(*padded_rows()), local.generate_batch(*padded_rows()))
    packed = packed_rows(some_documents(), 14)
    actual, expected = runner_target.generate_batch(*packed), local.generate_batch(*packed)
    if architecture in EXPERTS:
        torch.testing.assert_close(actual.aux_hidden_states, expected.aux_hidden_states)
    else:
        assert_same(actual, expected)


def test_a_runner_may_inherit_from_the_protocol() -> None:
    class Inheriting(LogitsRunner, TargetRunner):
        pass

    model = tiny_model("llama")
    target = RunnerEagle3TargetModel(Inheriting(model))
    assert_same(
        target.generate_batch(*padded_rows()),
        HFEagle3TargetModel(model).generate_batch(*padded_rows()),
    )


class TwoMethods(fledge.Eagle3TargetBackend):
    """A third-party backend that answers with logits and implements nothing else."""

    def __init__(self, model: Any) -> None:  # does not call super().__init__
        self.inner = HFEagle3TargetModel(model)

    def generate_batch(self, *rows: Any, **more: Any) -> fledge.Eagle3TargetBatch:
        self._check_open()
        return self.inner.generate_batch(*rows, **more)

    def get_input_embeddings(self) -> Any:
        return self.inner.get_input_embeddings()


def test_two_methods_are_enough_for_a_backend() -> None:
    with TwoMethods(tiny_model("llama")) as backend:
        assert backend.supervision == backend.generate_batch(*padded_rows()).supervision == "logits"
        assert backend.generate_batch_async(*padded_rows()).result().logits is not None
        rows = TokenBatch(*padded_rows())  # as a trainer calls it
        assert_same(backend.answer(rows), backend.inner.answer(rows))
        assert_same(backend.answer_async(rows).result(), backend.inner.answer(rows))
        with pytest.raises(fledge.BadInput, match=r"TwoMethods.*head"):
            backend.info()
    with pytest.raises(RuntimeError, match="closed"):
        backend.generate_batch(*padded_rows())
    with pytest.raises(TypeError, match="abstract"):
        fledge.Eagle3TargetBackend()


class NoMethod(fledge.Eagle3TargetBackend):
    def get_input_embeddings(self) -> Any:
        raise NotImplementedError


def test_a_backend_that_cannot_answer_is_refused_when_it_is_built() -> None:
    with pytest.raises(TypeError, match=r"NoMethod cannot answer.*answer\(rows\).*generate_batch"):
        NoMethod()


def test_the_model_of_a_runner_need_not_be_a_module() -> None:
    """Only `config` and `parameters()` are read; the parameters may be any iterable."""
    runner = LogitsRunner(tiny_model("llama"))
    expected = RunnerEagle3TargetModel(runner).generate_batch(*padded_rows())
    config = SimpleNamespace(num_hidden_layers=8)
    runner.model = SimpleNamespace(config=config, parameters=list)
    assert_same(RunnerEagle3TargetModel(runner).generate_batch(*padded_rows()), expected)


def test_probs_come_from_logits_when_the_runner_has_nothing_else() -> None:
    model = tiny_model("gemma2")
    target = RunnerEagle3TargetModel(LogitsRunner(model), supervision="probs")
    target.set_vocab_mapping(*draft_vocabulary(model))
    expected = HFEagle3TargetModel(model).generate_batch(*padded_rows())
    assert_same(
        target.generate_batch(*padded_rows()),
        expected.with_probs(None, *draft_vocabulary(model)),
    )


def test_hidden_supervision_needs_a_runner_that_supports_it() -> None:
    with pytest.raises(fledge.BadInput, match="forward_eagle3_hidden"):
        RunnerEagle3TargetModel(LogitsRunner(tiny_model("llama")), supervision="hidden")


def test_an_engine_that_drops_a_layer_is_detected() -> None:
    class Forgetful(LogitsRunner):
        def forward_eagle3(self, *rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
            logits, aux = super().forward_eagle3(*rows)
            return logits, aux[..., :64]

    with pytest.raises(RuntimeError, match=r"64 wide.*32 are 96"):
        RunnerEagle3TargetModel(Forgetful(tiny_model("llama"))).generate_batch(*padded_rows())


def test_rows_of_a_runner_are_padded_on_the_right() -> None:
    """A runner that ignores the mask would answer about other positions."""
    runner = LogitsRunner(tiny_model("llama"))
    target = RunnerEagle3TargetModel(runner)
    ids, mask, loss = padded_rows()
    for wrong in (mask.flip(1), mask.flip(1).bool(), torch.where(torch.arange(11) == 4, 0, mask)):
        with pytest.raises(fledge.BadInput, match=r"attention_mask.*padded on the right"):
            target.generate_batch(ids, wrong, loss)
    assert runner.masks == []
    target.generate_batch(ids, mask.bool(), loss)


def test_packed_documents_reach_the_engine_with_their_lengths() -> None:
    runner = LogitsRunner(tiny_model("llama"))
    target = RunnerEagle3TargetModel(runner)
    target.overhead_tokens = 0
    target.generate_batch(*packed_rows(some_documents(), 14))
    lengths = sorted(n for mask in runner.masks for n in mask.sum(1).tolist())
    assert lengths == [1, 2, 3, 4, 5, 6, 12]
