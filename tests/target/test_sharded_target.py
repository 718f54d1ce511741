"""Targets sharded over several ranks keep the contract and answer as in one process."""

import math
import os
from functools import cache, partial
from typing import Any, get_args
from unittest import mock

import pytest
import torch
from contract import CHECKS, Case, answer, packed_rows, padded_rows, some_documents
from tiny_models import tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fledge.core.batch import SUPERVISIONS, Supervision
from fledge.core.distributed import join_world
from fledge.core.errors import BadInput
from fledge.core.rows import TokenBatch
from fledge.target.hf import model as hf_model
from fledge.target.hf.loading import load_hf_model
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.hf.parallel import target_mesh
from fledge.target.weights import local_part, weights_fingerprint
from live_bytes import LiveBytes
from ranks import run_ranks

pytestmark = pytest.mark.ranks

ARCHITECTURES = ("llama", "qwen3-moe", "gemma3-text")
EVEN = {"vocab_size": 96, "num_key_value_heads": 4}  # vocabulary and heads are divisible by four
CPU = torch.device("cpu")
Layout = dict[str, int]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("models")
    for architecture in ARCHITECTURES:
        tiny_model(architecture, **EVEN).save_pretrained(directory / architecture)
    return directory


def layouts(*wanted: Layout) -> Any:
    def name(layout: Layout) -> str:
        return "x".join(f"{kind}{size}" for kind, size in layout.items())

    return pytest.mark.parametrize("layout", wanted, ids=name)


def mesh_of(layout: Layout) -> Any:
    join_world(CPU)
    return target_mesh(CPU, **{"fsdp": 1, "cp": 1, "tp": 1, **layout})


def ranks_of(layout: Layout) -> int:
    return math.prod(layout.values())


def near(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether the relative error to the single process is at most 1e-5."""
    return bool((actual - expected).norm() <= 1e-5 * expected.norm())


def assert_same_answers(target: Any, model: Any, supervision: Supervision) -> None:
    alone = HFEagle3TargetModel(model, supervision=supervision)
    for backend in (target, alone):
        backend.set_vocab_mapping(torch.arange(0, 96, 3))
    for rows in (padded_rows(), packed_rows(some_documents(), 14)):
        actual, expected = (backend.answer(TokenBatch(*rows)) for backend in (target, alone))
        real = rows[1].bool()
        assert near(actual.aux_hidden_states[real], expected.aux_hidden_states[real])
        assert near(answer(actual), answer(expected))


def _contract(architecture: str, directory: str, layout: Layout) -> None:
    mesh, reference = mesh_of(layout), tiny_model(architecture, **EVEN)
    loaded = HFEagle3TargetModel.from_pretrained(directory, supervision="logits", mesh=mesh)
    make = partial(HFEagle3TargetModel, loaded.model, None, loaded.cp_mesh)
    cached_fingerprint = cache(weights_fingerprint)  # gathers all weights: once is enough
    with mock.patch.object(hf_model, "weights_fingerprint", cached_fingerprint):
        for supervision in get_args(Supervision):
            assert_same_answers(make(supervision=supervision), reference, supervision)
            if supervision != "hidden" and ranks_of(layout) > 2:
                continue  # one encoding is enough for four processes on two cores
            case = Case(
                architecture,
                reference,
                lambda encoding: make(supervision=encoding),
                supervision,
                rtol=1e-4,
                atol=1e-4,
            )
            for check in CHECKS:
                check(case)
    info = make(supervision="hidden").info()
    assert info.weights_fingerprint == weights_fingerprint(reference)
    assert torch.equal(info.head.weight_VD, reference.get_output_embeddings().weight)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@layouts({"fsdp": 2}, {"tp": 2}, {"cp": 2}, {"tp": 4}, {"fsdp": 2, "tp": 2})
def test_contract(saved: Any, architecture: str, layout: Layout) -> None:
    run_ranks(ranks_of(layout), _contract, architecture, str(saved / architecture), layout)


def _every_dimension(directory: str, layout: Layout, changes: dict[str, int]) -> None:
    model = tiny_model("llama", **{**EVEN, **changes})
    mesh = mesh_of(layout)
    target = HFEagle3TargetModel.from_pretrained(directory, mesh=mesh)
    assert target.joins
    assert target.info().weights_fingerprint == weights_fingerprint(model)
    real = packed_rows(some_documents(), 14)[1].bool()
    rows = TokenBatch(*packed_rows(some_documents(), 14))
    alone = HFEagle3TargetModel(model, supervision="hidden").answer(rows)
    assert near(target.answer(rows).aux_hidden_states[real], alone.aux_hidden_states[real])


@layouts({"cp": 2, "tp": 2}, {"fsdp": 2, "cp": 2}, {"tp": 2})
def test_all_dimensions_work_together(saved: Any, layout: Layout) -> None:
    run_ranks(4, _every_dimension, str(saved / "llama"), layout, {})  # tp2 alone: two copies


def test_a_vocabulary_that_does_not_divide_stays_whole(tmp_path: Any) -> None:
    tiny_model("llama", **{**EVEN, "vocab_size": 97}).save_pretrained(tmp_path)
    run_ranks(2, _every_dimension, str(tmp_path), {"tp": 2}, {"vocab_size": 97})


def _sharded_by_the_user(how: str, directory: str) -> None:
    """A model that the user has already sharded."""
    import transformers

    join_world(CPU)
    reference = tiny_model("llama", **EVEN)
    if how == "tp_plan":
        options = {"tp_plan": "auto", "dtype": torch.float32}
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, **options)
    elif how == "parallelize":  # its head returns logits of which each rank holds some columns
        model = tiny_model("llama", **EVEN)
        columns = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        mlp = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel()}
        plan = {f"model.layers.*.mlp.{name}": style for name, style in mlp.items()}
        plan |= {"model.layers.*.mlp.down_proj": RowwiseParallel(), "lm_head": columns}
        parallelize_module(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan)
        assert isinstance(model(torch.ones(1, 2, dtype=torch.long)).logits, DTensor)
    else:
        model = tiny_model("llama", **EVEN)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    for supervision in SUPERVISIONS:
        target = HFEagle3TargetModel(model, supervision=supervision)
        assert target.joins
        assert_same_answers(target, reference, supervision)
        assert target.info().weights_fingerprint == weights_fingerprint(reference)
        embedding = target.get_input_embeddings().weight
        assert torch.equal(embedding, reference.get_input_embeddings().weight)


@pytest.mark.parametrize("how", ["tp_plan", "fully_shard", "parallelize"])
def test_a_model_that_the_user_has_sharded(saved: Any, how: str) -> None:
    run_ranks(2, _sharded_by_the_user, how, str(saved / "llama"))


def _uneven(directory: str, layout: Layout) -> int:
    """Each rank asks about its own rows in a different number of passes; one rank has no rows."""
    mesh, model = mesh_of(layout), tiny_model("llama", **EVEN)
    target = HFEagle3TargetModel.from_pretrained(directory, mesh=mesh)
    target.overhead_tokens = 0  # a pass for every document length
    alone = HFEagle3TargetModel(model, supervision="hidden")
    rank, passes = torch.distributed.get_rank(), []
    model_of_target = target.model
    model_of_target.register_forward_hook(lambda *_: passes.append(1))
    for turn in range(3):
        if (rank + turn) % 4 == 3:
            target.join()
            continue
        lengths = list(range(2, 3 + (rank + turn) % 4))
        generator = torch.Generator().manual_seed(rank)
        documents = [torch.randint(3, 90, (n,), generator=generator).tolist() for n in lengths]
        rows = TokenBatch(*packed_rows([documents], 20))
        actual, expected = target.answer(rows), alone.answer(rows)
        real = rows.attention_mask.bool()
        assert near(actual.aux_hidden_states[real], expected.aux_hidden_states[real])
        assert near(answer(actual)[:-1], answer(expected)[:-1])
    return len(passes)


@layouts({"fsdp": 4}, {"tp": 4}, {"cp": 4}, {"fsdp": 2, "tp": 2})
def test_ranks_ask_about_different_rows_and_some_about_none(saved: Any, layout: Layout) -> None:
    passes = run_ranks(4, _uneven, str(saved / "llama"), layout)
    assert len(set(passes)) == 1
    if layout == {"fsdp": 4}:  # as many as the busiest rank needs, not the sum over ranks
        assert passes[0] == 3 * 3


def _bytes_while_loading(directory: str, layout: Layout) -> tuple[int, int, int, int]:
    mesh = mesh_of(layout)
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # one thread, so that the counter sees it
    with LiveBytes() as live_bytes:
        model = load_hf_model(directory, dtype=torch.float32, device=CPU, mesh=mesh).model
    shard_sizes = [local_part(p).nbytes for p in model.parameters()]
    return live_bytes.largest, max(shard_sizes), live_bytes.peak, sum(shard_sizes)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nothing_larger_than_a_shard_is_ever_loaded(tmp_path: Any, architecture: str) -> None:
    whole = tiny_model(architecture, **EVEN)
    # stored in another precision: tensors are copied out of the mapped files, and so counted
    tiny_model(architecture, **EVEN).bfloat16().save_pretrained(tmp_path)
    bytes_of_all = sum(p.nbytes for p in whole.parameters())
    for layout in ({"fsdp": 4}, {"tp": 4}, {"fsdp": 2, "tp": 2}):
        ranks = ranks_of(layout)
        for largest, shard, peak, total in run_ranks(
            ranks, _bytes_while_loading, str(tmp_path), layout
        ):
            assert largest <= shard, layout
            assert shard <= max(p.nbytes for p in whole.parameters()) / ranks + 1
            # norms stay whole under tensor parallelism
            assert total < 1.15 * bytes_of_all / ranks
            assert peak < total + 4 * shard


def _refusals(directory: str) -> None:
    mesh = mesh_of({"tp": 2})
    with pytest.raises(BadInput, match="does not divide its 1 num_key_value_heads"):
        HFEagle3TargetModel.from_pretrained(directory, mesh=mesh)


def test_indivisible_heads_and_missing_ranks_are_refused(tmp_path: Any) -> None:
    tiny_model("llama", num_key_value_heads=1).save_pretrained(tmp_path)
    run_ranks(2, _refusals, str(tmp_path))
    with pytest.raises(BadInput, match="torchrun --nproc-per-node 4"):
        target_mesh(CPU, fsdp=2, cp=1, tp=2)
