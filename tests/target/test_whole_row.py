"""Whole packs in one row, on the rollout's attention kernel (interpreted where there is no GPU)."""

import copy

import pytest
import torch
from contract import packed_rows, some_documents
from tiny_models import ARCHITECTURES, tiny_model

import interpreted_triton  # noqa: F401  (chooses the interpreter before kernels are imported)
from fledge.core import graphs
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.hf.one_row import CAUSAL, attends_plainly, needs_no_mask

pytestmark = pytest.mark.slow
PLAIN = [
    "cohere",
    "gemma3-text",
    "granite",
    "llama",
    "mistral",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3-moe",
]


def in_whole_rows(model):
    target = HFEagle3TargetModel(model, supervision="hidden")
    target.try_one_row, target.overhead_tokens = True, 1000
    return target


@pytest.mark.parametrize("architecture", PLAIN)
def test_whole_rows_are_answered_like_separate_documents(architecture):
    model = tiny_model(architecture)
    rows = packed_rows(some_documents(), 14)
    want = HFEagle3TargetModel(copy.deepcopy(model), supervision="hidden").generate_batch(*rows)
    target = in_whole_rows(model)
    got = target.generate_batch(*rows)
    for name in ("aux_hidden_states", "last_hidden_states"):
        actual, expected = getattr(got, name), getattr(want, name)
        assert (actual - expected).norm() < 1e-4 * expected.norm()
        assert torch.equal(actual == 0, expected == 0)  # padding stays empty


def test_only_known_architectures_of_transformers_run_whole_rows():
    class Own(type(tiny_model("llama"))):
        """A user's own layers under a known name."""

    known = {name for name in ARCHITECTURES if attends_plainly(tiny_model(name))}
    others = {"gpt-oss", "gemma2", "gemma3-conditional", "minicpm3"}  # sinks, caps, images, MLA
    assert known == set(ARCHITECTURES) - others
    assert not attends_plainly(Own(tiny_model("llama").config))


@pytest.fixture
def recorded_sizes(monkeypatch):
    """Sizes for which a pass was recorded; a plain call replaces the CUDA graph."""
    sizes = []

    class Recorded:
        def __init__(self, run, inputs, *, common):
            assert common is None  # each has its own memory
            self.run = run
            sizes.append(inputs["ids"].numel())

        def __call__(self, inputs):
            return self.run(**inputs)

    monkeypatch.setattr(graphs, "RecordedPass", Recorded)
    return sizes


def test_a_pass_is_recorded_when_its_size_recurs(recorded_sizes):
    rows = packed_rows(some_documents(), 14)
    target = in_whole_rows(tiny_model("llama"))
    target.record_passes = True
    first = target.generate_batch(*rows)
    assert recorded_sizes == []
    again = target.generate_batch(*rows)
    assert recorded_sizes == target._recorded[False].sizes == [rows[0].numel()]
    assert torch.equal(again.aux_hidden_states, first.aux_hidden_states)
    assert torch.equal(again.last_hidden_states, first.last_hidden_states)


def test_the_number_of_recorded_passes_is_limited(recorded_sizes):
    """Each holds memory on the GPU, and a server may be asked for any number of sizes."""
    passes, sizes = graphs.RecordedSizes(most=8), list(range(1, 13))
    assert [passes.worth_it(size) for size in (3, 3, 4, 3)] == [False, True, False, True]

    def ask(size):
        return passes(size, lambda ids: ids + 1, {"ids": torch.full((size,), size)})

    for size in sizes:
        assert ask(size).tolist() == [size + 1] * size
    assert recorded_sizes == sizes
    assert passes.sizes == sizes[-8:]
    ask(sizes[-2])
    assert recorded_sizes == sizes  # still recorded
    assert passes.sizes[-1] == sizes[-2]
    ask(sizes[0])
    assert recorded_sizes == [*sizes, sizes[0]]  # evicted, and recorded again
    passes.forget()
    assert passes.sizes == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_that_need_no_mask_give_the_same_answer_without(architecture):
    model = tiny_model(architecture)
    masked = architecture in ("mistral", "gpt-oss", "minicpm3") or "gemma" in architecture
    assert needs_no_mask(model) == (not masked)
    if masked:
        return
    rows = packed_rows(some_documents(), 14)
    want = HFEagle3TargetModel(copy.deepcopy(model)).generate_batch(*rows)
    target = HFEagle3TargetModel(model)
    assert not target.skip_masks  # only useful on a GPU
    target.skip_masks = True
    seen = set()
    target._layers[0].register_forward_hook(lambda *_: seen.add(model.config._attn_implementation))
    got = target.generate_batch(*rows)
    assert seen == {CAUSAL}
    assert torch.equal(got.aux_hidden_states, want.aux_hidden_states)
    assert torch.equal(got.logits, want.logits)
    assert model.config._attn_implementation == "sdpa"  # restored afterwards
