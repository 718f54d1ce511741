"""Ranks that split a target's rows (context parallelism) get the batch of a single process."""

from typing import Any

import pytest
import torch
from contract import answer, packed_rows, padded_rows
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


def _others_are_refused() -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    with pytest.raises(BadInput, match="cannot share rows"):
        HFEagle3TargetModel(tiny_model("gpt-oss"), cp_mesh=mesh)


def test_layers_with_sinks_are_refused() -> None:
    run_ranks(2, _in_process_group, _others_are_refused)
