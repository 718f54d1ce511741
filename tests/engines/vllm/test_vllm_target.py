"""A real vLLM as the target: the contract, equality with transformers, nothing left behind."""

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import fledge
from engines.cases import assert_same_answers, engine_target, make_draft, saved, train
from fledge.core.batch import Supervision
from fledge.core.rows import TokenBatch
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.vllm.runner import VLLMEagle3TargetModel, VLLMTargetRunner
from target.contract import CHECKS, Case, packed_rows, padded_rows, some_documents

pytestmark = pytest.mark.engine
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("supervision", get_args(Supervision))
def test_contract(check: Any, supervision: Supervision, engines: Any) -> None:
    def make(supervision: Supervision) -> VLLMEagle3TargetModel:
        return VLLMEagle3TargetModel(engines.runner("llama"), supervision=supervision)

    check(Case("vllm", engine_target("llama"), make, supervision, **CLOSE))


def test_nothing_is_kept_between_batches(engines: Any) -> None:
    runner = engines.runner("llama")
    target = VLLMEagle3TargetModel(runner, supervision="hidden")
    target.generate_batch(*padded_rows())
    free = free_pages(runner)
    for seed in range(20):
        target.generate_batch(*padded_rows(seed))
        assert list(runner._place.make().glob("*.safetensors*")) == []  # every file was consumed
    assert free_pages(runner) == free


def test_rows_are_checked_before_the_engine_sees_them(engines: Any) -> None:
    runner = engines.runner("llama")
    target = VLLMEagle3TargetModel(runner, supervision="hidden")
    long = torch.ones((1, 256), dtype=torch.long)
    with pytest.raises(fledge.BadInput, match=r"256 tokens is longer.*\(255\).*max_model_len"):
        target.generate_batch(long, long, long)
    left = torch.tensor([[0, 1, 1]])
    with pytest.raises(ValueError, match="padded on the right"):
        target.generate_batch(left, left, left)
    with pytest.raises(ValueError, match="no token"):
        target.generate_batch(left, 0 * left, left)
    empty = torch.tensor([[1, 1, 1], [0, 0, 0]])
    batch = target.generate_batch(empty + 4, empty, empty)
    assert batch.aux_hidden_states[0].abs().sum() > 0
    assert batch.aux_hidden_states[1].abs().sum() == 0


@pytest.mark.parametrize(
    ("name", "aux"),
    [
        *(("llama", aux) for aux in ([6, 0, 7], [5, 2, 4, 1, 0], [8])),
        *((name, [2, 7, 5]) for name in ("llama-tied", "granite", "qwen3")),
    ],
    ids=str,
)
def test_states_and_logits_equal_transformers(name: str, aux: list[int], engines: Any) -> None:
    """Any number of ids in any order, the last layer and the last state among them; heads tied,
    scaled, with norms in front."""
    options: dict[str, Any] = {"num_aux_layers": len(aux), "supervision": "hidden"}
    model = engine_target(name)
    local = HFEagle3TargetModel(model, aux, **options)
    through = VLLMEagle3TargetModel(engines.runner(name), aux, **options)
    rows = padded_rows(), packed_rows(some_documents(), 14)
    assert_same_answers(through, local, *rows, tolerance=1e-3)
    if aux == [6, 0, 7]:  # negative control: a layer too early is noticed
        early = HFEagle3TargetModel(model, [5, 1, 6], supervision="hidden")
        with pytest.raises(AssertionError):
            assert_same_answers(through, early, *rows, tolerance=1e-3)
    ids, mask, _ = padded_rows()
    logits, _ = through.runner.forward_eagle3(ids, mask)
    expected = model(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], rtol=1e-3, atol=1e-3)


def test_the_loss_curve_equals_that_of_transformers(engines: Any) -> None:
    model = engine_target("qwen3")
    batches = [padded_rows(0), packed_rows(some_documents(1), 14), padded_rows(2)] * 8

    def curve(target: Any) -> list[float]:
        return train(make_draft(model, target.aux_layer_ids), target, batches)

    def through(*aux: int) -> VLLMEagle3TargetModel:
        ids = list(aux) or None
        return VLLMEagle3TargetModel(engines.runner("qwen3"), ids, supervision="hidden")

    expected = curve(HFEagle3TargetModel(model, supervision="hidden"))
    assert expected[-1] < expected[2] - 0.2
    assert curve(through()) == pytest.approx(expected, abs=1e-3)
    assert curve(through(0, 2, 3)) != pytest.approx(expected, abs=1e-3)  # a layer too early


def test_a_recipe_trains_through_vllm(engines: Any, tiny_chats: Any, tmp_path: Any) -> None:
    from fledge.training.fit import fit
    from fledge.training.setup import set_up
    from train.tiny import Notes, make_target, recipe_for

    engines.close()
    directory = make_target(tmp_path / "target")  # for its tokenizer and template
    saved(engine_target(vocab_size=400, num_hidden_layers=4), directory)
    curves = []
    for backend in ("hf", "vllm"):
        overrides = [f"target.backend={backend}", "training.epochs=1", "tracking.every_steps=1"]
        training = set_up(recipe_for(directory, tiny_chats, tmp_path / backend, *overrides))
        notes = Notes()
        with training.parts.target:
            assert fit(training, notes).finished
        curves.append([line["loss"] for line in notes.lines])
    assert len(curves[0]) >= 5
    assert curves[1] == pytest.approx(curves[0], abs=1e-3)


def test_a_command_predicts_its_time_and_keeps_stdout_clean(tiny_chats: Any, tmp_path: Any) -> None:
    """As a user runs it: only results on stdout, no log of vLLM's, and a predicted time that
    includes vLLM's start-up and speed."""
    from train.tiny import make_target, recipe_for

    directory = make_target(tmp_path / "target")
    saved(engine_target(vocab_size=400, num_hidden_layers=4), directory)
    overrides = ["target.backend=vllm", "training.steps=8"]
    recipe = recipe_for(directory, tiny_chats, tmp_path / "run", *overrides)
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    environment |= {"FLEDGE_CACHE": str(tmp_path / "cache"), "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"PYTHONPATH": str(Path(fledge.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", "fledge", "train", str(tmp_path / "recipe.yaml"), "--json"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert "INFO" not in done.stderr
    assert "safetensors checkpoint shards" not in done.stderr
    predicted, measured = outcome["predicted"], outcome["measured"]
    assert predicted["seconds_by_part"]["start_up"] > 2  # vLLM's
    # the machine may be busy; without start-up and speed the prediction was a twentieth
    assert measured["seconds"] / 3 < predicted["seconds"] < 3 * measured["seconds"]


def test_smollm2(smollm2: Any, engines: Any) -> None:
    """A real model; a few channels of its states reach 27,000, hence the relative tolerance."""
    generator = torch.Generator().manual_seed(5)
    mask = (torch.arange(40) < torch.tensor([[40], [23], [9]])).long()
    rows = torch.randint(3, 49_000, mask.shape, generator=generator) * mask, mask, mask
    model = fledge.load_model(str(smollm2), dtype=torch.float32)
    for aux in ([1, 14, 26], [29, 14, 0]):  # the default, and the last layer
        local = HFEagle3TargetModel(model, aux, supervision="hidden")
        runner = engines.runner(smollm2, max_model_len=512)
        through = VLLMEagle3TargetModel(runner, aux, supervision="hidden")
        assert_same_answers(through, local, rows, tolerance=1e-3)


def test_little_memory_limits_row_length_with_an_explanation(engines: Any) -> None:
    runner = engines.runner("llama", kv_cache_memory_bytes=5 * 2**18)
    target = VLLMEagle3TargetModel(runner, supervision="hidden")
    ids = torch.full((1, 255), 5)
    with pytest.raises(fledge.BadInput, match=r"255 tokens is longer.*\(127\).*more memory"):
        target.generate_batch(ids, torch.ones_like(ids), torch.ones_like(ids))
    ids = ids[:, :127]
    target.generate_batch(ids, torch.ones_like(ids), torch.ones_like(ids))


# vLLM splits prompts over several steps, and only some rows run at once
PIECES = {"max_num_batched_tokens": 64, "max_num_seqs": 2, "kv_cache_memory_bytes": 2**23}


def test_long_rows_run_in_pieces(engines: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    mask = (torch.arange(200) < torch.tensor([[200], [7], [90], [33], [1]])).long()
    ids = torch.randint(3, 90, mask.shape, generator=generator) * mask
    local = HFEagle3TargetModel(engine_target("llama"), supervision="hidden")
    through = VLLMEagle3TargetModel(engines.runner("llama", **PIECES), supervision="hidden")
    assert_same_answers(through, local, (ids, mask, mask))


def test_an_interrupted_batch_does_not_affect_later_ones(engines: Any) -> None:
    runner = engines.runner("llama", **PIECES)
    target = VLLMEagle3TargetModel(runner, supervision="hidden")
    before, free = target.generate_batch(*padded_rows()), free_pages(runner)
    answers = runner._capture([[5, 6, 7], [8] * 200, [9] * 20])
    next(answers)
    answers.close()  # before the longer and the last row are done
    assert not runner._engine.has_unfinished_requests()
    after = target.generate_batch(*padded_rows())
    assert torch.equal(before.aux_hidden_states, after.aux_hidden_states)
    assert torch.equal(before.last_hidden_states, after.last_hidden_states)
    assert free_pages(runner) == free


def long_rows() -> Any:
    """Three equal prompts, and two that share all but their last tokens with them."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 90, (1, 200), generator=generator).repeat(5, 1)
    ids[3, 150:] = 7
    ids[4, 199] = 7
    return ids, torch.ones_like(ids), torch.ones_like(ids)


PREFIXES = {"enable_prefix_caching": True, "max_num_batched_tokens": 64, "max_num_seqs": 2}


def test_prefix_caching_does_not_shorten_states(engines: Any) -> None:
    """Repeated and shared prompts, in pieces of 64 tokens, on an engine that caches prefixes."""
    runner = engines.runner("llama", **PREFIXES)
    through = VLLMEagle3TargetModel(runner, supervision="hidden")
    local = HFEagle3TargetModel(engine_target("llama"), supervision="hidden")
    assert_same_answers(through, local, long_rows(), padded_rows(), long_rows(), tolerance=1e-3)
    rows = TokenBatch(*long_rows())
    first, again = through.answer(rows), through.answer(rows)
    assert torch.equal(first.aux_hidden_states, again.aux_hidden_states)
    assert cached_tokens(runner, salted=True) == [0, 0, 0]
    assert max(cached_tokens(runner, salted=False)) >= 128  # control: the cache is on


def cached_tokens(runner: VLLMTargetRunner, *, salted: bool) -> list[int]:
    """How many tokens of a prompt vLLM finds in its cache, in each of three requests."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    counts = []
    for number in range(3):
        salt = f"another {number}" if salted else None
        prompt = tokens_input(long_rows()[0][0].tolist(), cache_salt=salt)
        runner._engine.add_request(f"{salted} {number}", prompt, SamplingParams(max_tokens=1))
        outputs: list[Any] = []
        while runner._engine.has_unfinished_requests():
            outputs += runner._engine.step()
        counts.append(outputs[-1].num_cached_tokens)
    return counts


def test_from_pretrained_and_close(engines: Any, smollm2: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # vLLM's default, not ours
    set_num_threads = torch.set_num_threads
    engines.close()
    directory = engines.saved("qwen3")
    load = VLLMEagle3TargetModel.from_pretrained
    with load(str(directory), dtype=torch.bfloat16) as target:
        info = target.info()
        assert (info.depth, info.hidden_size, info.vocab_size) == (8, 64, 97)
        assert (info.dtype, info.tokenizer_fingerprint) == (torch.bfloat16, None)
        place = target.runner._place.make()
        with pytest.raises(fledge.BadInput, match=r"open in this process already.*close\(\)"):
            VLLMTargetRunner.build(directory)
    assert not place.exists()
    assert torch.set_num_threads is set_num_threads
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    assert not torch.distributed.is_initialized()
    with load(smollm2, aux_layer_ids=[3, 2, 1]) as target:
        assert target.aux_layer_ids == [3, 2, 1]
        assert target.info().weights_fingerprint != info.weights_fingerprint
        assert target.info().tokenizer_fingerprint is not None


def test_a_target_split_over_two_ranks(engines: Any, monkeypatch: Any) -> None:
    """Workers in separate processes; 97 rows of embedding and head are split into 64 and 33."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    model = engine_target("llama")
    local = HFEagle3TargetModel(model, [6, 0, 3], supervision="hidden")
    runner = engines.runner("llama", tensor_parallel_size=2)
    through = VLLMEagle3TargetModel(runner, [6, 0, 3], supervision="hidden")
    assert_same_answers(through, local, padded_rows(), packed_rows(some_documents(), 14))
    ids, mask, _ = padded_rows()
    logits, _ = runner.forward_eagle3(ids, mask)
    expected = model(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], **CLOSE)
    info = through.info()
    assert torch.equal(info.head.weight_VD, model.lm_head.weight)
    assert torch.equal(runner.input_embedding_weight(), model.model.embed_tokens.weight)
    assert info.final_norm is not None
    assert torch.equal(info.final_norm.weight_D, model.model.norm.weight)
    assert (info.depth, info.weight_dtypes) == (8, "float32 100.0%")
    engines.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"no_such_option": 1}, "no_such_option"),
        ({"max_model_len": 10**6}, "max_model_len"),
        ({"kv_cache_memory_bytes": 4096}, "not enough GPU memory"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_impossible_engine_arguments_are_refused(options: Any, message: str, engines: Any) -> None:
    engines.close()
    with pytest.raises(fledge.BadInput, match=message):
        VLLMEagle3TargetModel.from_pretrained(engines.saved("llama"), dtype="float32", **options)
    assert not torch.distributed.is_initialized()


def test_one_of_several_ranks_is_told_to_use_a_server(tmp_path: Any, engines: Any) -> None:
    engines.close()
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        with pytest.raises(fledge.BadInput, match=r"several ranks.*serve-target --engine vllm"):
            VLLMTargetRunner.build(engines.saved("llama"))
    finally:
        torch.distributed.destroy_process_group()


def test_an_architecture_without_aux_states_is_refused(tmp_path: Any, engines: Any) -> None:
    import transformers

    engines.close()
    config = transformers.GPT2Config(vocab_size=97, n_embd=64, n_layer=8, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(fledge.BadInput, match="EAGLE3"):
        VLLMTargetRunner.build(tmp_path / "gpt2", dtype="float32").set_aux_layers([1, 3, 4])
    assert VLLMEagle3TargetModel(engines.runner("llama")).aux_layer_ids == [1, 3, 4]


def free_pages(runner: VLLMTargetRunner) -> int:
    scheduler = runner._engine.engine_core.engine_core.scheduler
    free: int = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return free
