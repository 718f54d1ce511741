"""Ranks that split a target's rows (context parallelism) get the batch of a single process."""

from typing import Any

import pytest
import torch
from contract import CHECKS, Case, answer, packed_rows, padded_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model
from torch.distributed.device_mesh import init_device_mesh

from fledge.core.batch import SUPERVISIONS, Supervision
from fledge.core.errors import BadInput
from fledge.core.rows import TokenBatch
from fledge.target.hf.model import HFEagle3TargetModel
from ranks import run_ranks

pytestmark = pytest.mark.ranks

# plain, sliding windows, experts, learned positions
ARCHITECTURES = ("llama", "gemma3-text", "qwen3-moe", "gpt2", "cohere")
Rows = tuple[torch.Tensor, ...]


def _assert_equal(model: Any, mesh: Any, supervision: Supervision, rows: list[Rows]) -> None:
    alone = HFEagle3TargetModel(model, supervision=supervision)
    shared = HFEagle3TargetModel(model, cp_mesh=mesh, supervision=supervision)
    for target in (alone, shared):
        target.set_vocab_mapping(torch.arange(0, model.config.vocab_size, 3))
    for tensors in rows:
        expected, actual = (target.answer(TokenBatch(*tensors)) for target in (alone, shared))
        real = expected.attention_mask.bool()
        expected_tensors = dict(expected.tensors())
        assert dict(actual.tensors()).keys() == expected_tensors.keys()
        for name, tensor in actual.tensors():
            if name == "aux_hidden_states":
                pair = tensor[real], expected_tensors[name][real]
                torch.testing.assert_close(*pair, rtol=1e-10, atol=1e-10)
            elif not tensor.is_floating_point():
                assert torch.equal(tensor, expected_tensors[name]), name
        torch.testing.assert_close(answer(actual), answer(expected), rtol=1e-10, atol=1e-10)


def _row(lengths: list[int], width: int, seed: int = 0) -> Rows:
    """One packed row of random documents with these lengths."""
    generator = torch.Generator().manual_seed(seed)
    documents = [torch.randint(3, 90, (n,), generator=generator).tolist() for n in lengths]
    return packed_rows([documents], width)


def _padded(lengths: list[int], *, left: bool) -> Rows:
    width = max(lengths)
    slot = torch.arange(width)
    length = torch.tensor(lengths)[:, None]
    mask = (slot >= width - length if left else slot < length).long()
    ids = torch.randint(3, 90, mask.shape, generator=torch.Generator().manual_seed(1))
    return ids, mask, mask.clone()


def _every_architecture() -> None:
    mesh = init_device_mesh("cpu", (int(torch.distributed.get_world_size()),))
    rows = [
        padded_rows(),
        _padded([13, 5, 1], left=True),
        _row([3, 9, 1, 6], 23),
        _row([31], 31),
    ]
    for architecture in ARCHITECTURES:
        model = tiny_model(architecture, dtype=torch.float64)
        for supervision in SUPERVISIONS:
            _assert_equal(model, mesh, supervision, rows)


def _in_process_group(function: Any, *args: Any) -> Any:
    torch.distributed.init_process_group("gloo")
    return function(*args)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_architecture_and_encoding(ranks: int) -> None:
    run_ranks(ranks, _in_process_group, _every_architecture)


def _cases(cases: list[tuple[str, list[int], int]]) -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = tiny_model("gemma3-text", dtype=torch.float64)
    rows = []
    for kind, lengths, padding in cases:
        if kind == "packed":
            rows.append(_row(lengths, sum(lengths) + padding))
        else:
            rows.append(_padded(lengths, left=kind == "left"))
    _assert_equal(model, mesh, "hidden", rows)


_lengths = st.lists(st.integers(1, 17), min_size=1, max_size=5)
_kinds = st.sampled_from(["packed", "left", "right"])


@pytest.mark.parametrize("ranks", [2, 4])
@settings(max_examples=6, deadline=None, derandomize=True)
@given(cases=st.lists(st.tuples(_kinds, _lengths, st.integers(0, 9)), min_size=4, max_size=8))
def test_any_lengths_and_documents(ranks: int, cases: list[tuple[str, list[int], int]]) -> None:
    run_ranks(ranks, _in_process_group, _cases, cases)


def _contract() -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = tiny_model("llama")
    for supervision in SUPERVISIONS:
        case = Case(
            "context",
            model,
            lambda encoding: HFEagle3TargetModel(model, cp_mesh=mesh, supervision=encoding),
            supervision,
            rtol=1e-4,
            atol=1e-4,
        )
        for check in CHECKS:
            check(case)


def test_contract() -> None:
    run_ranks(2, _in_process_group, _contract)


def _attention_work() -> int:
    """The number of query-key pairs that this rank's attention computes for one row."""
    from fledge.target.hf.parallel import rank_slots

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    own = rank_slots(mesh, 4096, None)
    return sum((chunk + 1) * own.chunk**2 for chunk in own.chunks)


def test_every_rank_has_the_same_work() -> None:
    assert len(set(run_ranks(4, _in_process_group, _attention_work))) == 1


def _different_rows() -> None:
    """Data-parallel ranks ask about different rows; rank 0 has none."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh, model = init_device_mesh("cpu", (size,)), tiny_model("llama")
    shared = HFEagle3TargetModel(model, cp_mesh=mesh, supervision="hidden")
    assert shared.joins
    if rank == 0:
        shared.join()
        return
    rows = TokenBatch(*_row([rank, 7, 5 + rank], 20, seed=rank))
    alone = HFEagle3TargetModel(model, supervision="hidden").answer(rows)
    real = rows.attention_mask.bool()
    batch = shared.answer(rows)
    torch.testing.assert_close(
        batch.aux_hidden_states[real], alone.aux_hidden_states[real], rtol=1e-4, atol=1e-4
    )


def test_ranks_may_ask_about_different_rows() -> None:
    run_ranks(4, _in_process_group, _different_rows)


def _others_are_refused() -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = tiny_model("llama")
    model.config.layer_types = ["linear_attention"] * 8
    for unfit in (model, tiny_model("gpt-oss")):
        with pytest.raises(BadInput, match="cannot share rows"):
            HFEagle3TargetModel(unfit, cp_mesh=mesh)


def test_layers_that_carry_a_state_or_have_sinks_are_refused() -> None:
    run_ranks(2, _in_process_group, _others_are_refused)
