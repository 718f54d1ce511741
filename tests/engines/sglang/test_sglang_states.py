"""SGLang computes what transformers computes: logits, aux states, last hidden states."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fledge
from fledge.target.sglang.engine import SGLangEngine
from target.contract import packed_rows, padded_rows, some_documents
from target.tiny_models import tiny_model

CLOSE = {"rtol": 1e-3, "atol": 1e-3}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {}
    for name in ("llama", "qwen3", "qwen3-moe", "cohere"):
        paths[name] = tmp_path_factory.mktemp(name)
        tiny_model(name).save_pretrained(paths[name])
    return paths


@pytest.fixture
def directory(request: pytest.FixtureRequest, directories: dict[str, Path]) -> Path:
    name = request.param
    return request.getfixturevalue("smollm2") if name == "smollm2" else directories[name]


def engine(directory: Path, *aux_layer_ids: int, **options: Any) -> fledge.SGLangEagle3TargetModel:
    options = {"dtype": torch.float32, "device": "cpu", "max_total_tokens": 512} | options
    return fledge.SGLangEagle3TargetModel.from_pretrained(
        directory, aux_layer_ids=aux_layer_ids or None, **options
    )


def transformers_batch(
    directory: Path, supervision: Any, aux_layer_ids: list[int], rows: Any
) -> fledge.Eagle3TargetBatch:
    with fledge.HFEagle3TargetModel.from_pretrained(
        directory, aux_layer_ids=aux_layer_ids, supervision=supervision, dtype="float32"
    ) as target:
        return target.generate_batch(*rows)


def assert_same_aux(batch: fledge.Eagle3TargetBatch, expected: fledge.Eagle3TargetBatch) -> None:
    real = batch.attention_mask.bool()
    torch.testing.assert_close(
        batch.aux_hidden_states[real], expected.aux_hidden_states[real], **CLOSE
    )


def answer(batch: fledge.Eagle3TargetBatch) -> torch.Tensor:
    """The supervision at every slot that holds a real token and is followed by one."""
    values = batch.logits if batch.logits is not None else batch.last_hidden_states
    assert values is not None
    if batch.doc_remaining is not None:
        return values[batch.doc_remaining > 0]
    return values[:, :-1][batch.attention_mask[:, 1:].bool()]


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("supervision", ["logits", "hidden"])
@pytest.mark.parametrize("directory", ["llama", "qwen3", "smollm2"], indirect=True)
def test_states_equal_those_of_transformers(
    directory: Path, supervision: Any, packed: bool
) -> None:
    rows = packed_rows(some_documents(), 14) if packed else padded_rows()
    with engine(directory, supervision=supervision) as target:
        batch = target.generate_batch(*rows)
        aux_layer_ids = target.aux_layer_ids
    expected = transformers_batch(directory, supervision, aux_layer_ids, rows)
    assert_same_aux(batch, expected)
    torch.testing.assert_close(answer(batch), answer(expected), **CLOSE)
    # negative control: the states of neighboring layers must not pass
    real = batch.attention_mask.bool()
    neighbours = [i + 1 for i in aux_layer_ids]
    wrong = transformers_batch(directory, supervision, neighbours, rows).aux_hidden_states[real]
    for batch_ND, wrong_ND in zip(
        batch.aux_hidden_states[real].chunk(3, -1), wrong.chunk(3, -1), strict=True
    ):
        assert (batch_ND - wrong_ND).abs().max() > 0.1


@pytest.mark.parametrize("directory", ["llama"], indirect=True)
def test_layers_come_in_the_requested_order(directory: Path) -> None:
    rows = padded_rows()
    with engine(directory, 6, 0, 3) as target:
        batch = target.generate_batch(*rows)
    expected = transformers_batch(directory, "hidden", [6, 0, 3], rows)
    assert_same_aux(batch, expected)


@pytest.fixture
def extends(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The row lengths of every extend that runs."""
    lengths: list[list[int]] = []
    run = SGLangEngine.extend

    def recorded(self: SGLangEngine, rows: Any, logits: bool) -> Any:
        lengths.append([len(row) for row in rows])
        return run(self, rows, logits)

    monkeypatch.setattr(SGLangEngine, "extend", recorded)
    return lengths


@pytest.mark.parametrize("directory", ["llama"], indirect=True)
def test_a_batch_is_one_extend_without_padding_and_its_memory_is_freed(
    directory: Path, extends: list[list[int]]
) -> None:
    with engine(directory, supervision="hidden") as target:
        limits = target.runner._limits
        for _ in range(30):  # 30 x 20 tokens in a pool of 512
            target.generate_batch(*padded_rows())
        target.generate_batch(*packed_rows(some_documents(), 14))
        assert target.runner._ranks.engine.limits() == limits
    assert extends == [[11, 7, 2]] * 30 + [[3, 2, 6, 12, 5, 1, 4]]


@pytest.mark.parametrize("directory", ["llama"], indirect=True)
def test_a_batch_larger_than_the_pool_runs_in_parts(
    directory: Path, extends: list[list[int]]
) -> None:
    rows = packed_rows(some_documents(), 14)
    with engine(directory, supervision="logits", max_total_tokens=13) as target:
        batch = target.generate_batch(*rows)
        too_long = torch.ones((1, 14), dtype=torch.long)
        with pytest.raises(fledge.BadInput, match="14 tokens does not fit"):
            target.generate_batch(too_long, too_long, too_long)
    assert extends == [[3, 2, 6], [12], [5, 1, 4]]
    expected = transformers_batch(directory, "logits", default_ids := [1, 3, 4], rows)
    assert target.aux_layer_ids == default_ids
    torch.testing.assert_close(answer(batch), answer(expected), **CLOSE)


@pytest.mark.parametrize("directory", ["llama"], indirect=True)
def test_hidden_supervision_never_runs_the_head(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.layers.logits_processor import LogitsProcessor

    calls: list[tuple[int, ...]] = []
    run = LogitsProcessor._get_logits

    def counted(self: Any, hidden: torch.Tensor, *rest: Any, **options: Any) -> Any:
        calls.append(tuple(hidden.shape))
        return run(self, hidden, *rest, **options)

    monkeypatch.setattr(LogitsProcessor, "_get_logits", counted)
    with engine(directory, supervision="hidden") as target:
        target.generate_batch(*padded_rows())
        assert calls == []
        target.runner.forward_eagle3(*padded_rows()[:2])
        assert calls == [(20, 32)]  # logits need it at every position


def test_another_model_can_follow_a_mixture_of_experts(directories: dict[str, Path]) -> None:
    """SGLang keeps metadata of experts in a global that it sets only once."""
    rows = padded_rows()
    for name in ("qwen3-moe", "llama"):
        with engine(directories[name], 1, 3, 4) as target:
            batch = target.generate_batch(*rows)
        expected = transformers_batch(directories[name], "hidden", [1, 3, 4], rows)
        assert_same_aux(batch, expected)


@pytest.mark.parametrize("directory", ["cohere"], indirect=True)
def test_a_model_without_access_to_its_layers_is_refused(directory: Path) -> None:
    with pytest.raises(fledge.BadInput, match="cannot show the inner layers of CohereForCausalLM"):
        engine(directory)


@pytest.mark.parametrize("directory", ["llama"], indirect=True)
def test_two_ranks_answer_as_one(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")  # SGLang needs a core per rank
    rows = padded_rows()
    with engine(directory, supervision="logits", tp_size=2) as target:
        batch = target.generate_batch(*rows)
        head, embedding = target.info().head, target.get_input_embeddings().weight
        ((_, peer),) = target.runner._ranks._peers
        assert peer.is_alive()
    assert not peer.is_alive()
    expected = transformers_batch(directory, "logits", target.aux_layer_ids, rows)
    assert_same_aux(batch, expected)
    torch.testing.assert_close(answer(batch), answer(expected), **CLOSE)
    model = tiny_model("llama")
    assert torch.equal(embedding, model.get_input_embeddings().weight)
    assert torch.equal(head.weight_VD, model.lm_head.weight)


@pytest.mark.parametrize("directory", ["llama"], indirect=True)
def test_unsupported_options_are_refused(directory: Path, sglang_version: str) -> None:
    with pytest.raises(fledge.BadInput, match="layer 7 is the last"):
        engine(directory, 1, 3, 7)
    with pytest.raises(
        fledge.BadInput, match=f"SGLang {sglang_version} has no argument 'page_siz'"
    ):
        engine(directory, page_siz=1)
    with pytest.raises(fledge.BadInput, match="disable_radix_cache=False does not go with"):
        engine(directory, disable_radix_cache=False)
    with pytest.raises(fledge.BadInput, match=r"SGLang .* could not load the target"):
        engine(directory, attention_backend="nonsense")
    with engine(directory) as target:  # and a refusal leaves nothing behind
        with pytest.raises(fledge.BadInput, match="holds an SGLang target already"):
            engine(directory)
        target.generate_batch(*padded_rows())
    with pytest.raises(RuntimeError, match="closed"):
        target.get_input_embeddings()


@pytest.mark.parametrize("directory", ["llama"], indirect=True)
def test_a_process_group_of_the_caller_is_refused(directory: Path) -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(fledge.BadInput, match=r"several ranks.*serve-target --engine sglang"):
            engine(directory)
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()
