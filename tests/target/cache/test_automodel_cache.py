"""AutoModel's cache layout: caches are converted to it and back, and training reads it."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fledge.core.errors import BadInput
from fledge.data.pack import collate, one_per_row
from fledge.precompute_eagle3 import _compute_batch_cache
from fledge.recipe.schema import Recipe
from fledge.target.cache.automodel import PaddedShard
from fledge.target.cache.backend import CachedEagle3TargetModel, CacheStore
from fledge.target.cache.format import CacheShape, decode_states
from fledge.target.hf.model import HFEagle3TargetModel
from target.cache.caches import opened, rewrite_manifest, verb
from target.cache.test_cached_training import cache_recipe, losses, train
from train.test_fit import comparable, differing, final_weights

WIDTH = 64


@pytest.fixture(scope="module")
def cache_pair(caches, tmp_path_factory):
    """encoding -> (a cache of fledge, the same in AutoModel's layout)."""
    root = tmp_path_factory.mktemp("automodel")

    def make(encoding, dtype="fp32"):
        more = ("--target-probs-topk", "16") if encoding == "topk" else ()
        source, automodel = caches(encoding, dtype, *more), root / f"{encoding}-{dtype}"
        if not automodel.exists():
            flags = ["--draft-vocab-size", 128, "--shard-size", 16]
            assert (
                verb("cache", "convert", source, "-o", automodel, "--layout", "automodel", *flags)
                == 0
            )
        return source, automodel

    return make


def automodel_samples(directory):
    """Samples as AutoModel's dataset reads them: by the manifest and its field names."""
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest["format_version"] == 2
    compressed = 0 < manifest["target_probs_topk"] < manifest["draft_vocab_size"]
    probs = ["target_probs_values", "target_probs_indices"] if compressed else ["target_probs"]
    names = ["input_ids", "attention_mask", "loss_mask", "aux_hidden_states", "position_mask"]
    for index in range(manifest["num_samples"]):
        number, offset = divmod(index, manifest["shard_size"])
        path = directory / f"shard-{number:06d}.safetensors"
        with safe_open(path, framework="pt") as shard:
            yield manifest, {name: shard.get_slice(name)[offset] for name in [*names, *probs]}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_round_trip_through_automodels_layout_is_exact(cache_pair, tmp_path, dtype):
    """Every shard, to the byte: tokens (also the first), masks, states, probabilities, places."""
    source, automodel = cache_pair("probs", dtype)
    assert verb("cache", "convert", automodel, "-o", tmp_path / "back", "--shard-size", 16) == 0
    original, restored = CacheStore(source), CacheStore(tmp_path / "back")
    for a, b in zip(original.shards, restored.shards, strict=True):
        assert a.bytes.tobytes() == b.bytes.tobytes()
    for name in ("target.safetensors", "vocabulary.safetensors", "target/tokenizer.json"):
        assert (source / name).read_bytes() == (tmp_path / "back" / name).read_bytes()
    assert "layout" not in restored.manifest


def test_top_k_probabilities_survive_a_round_trip(cache_pair, tmp_path):
    """They are renormalized in each conversion, which rounds."""
    source, automodel = cache_pair("topk")
    assert verb("cache", "convert", automodel, "-o", tmp_path / "back") == 0
    original, restored = opened(source), opened(tmp_path / "back")
    rows = original.rows()[:8]
    batch = collate(rows, one_per_row([len(row.input_ids) for row in rows], WIDTH), WIDTH, 0)
    first, last = original.answer(batch), restored.answer(batch)
    assert torch.equal(first.aux_hidden_states, last.aux_hidden_states)
    assert torch.equal(first.position_mask, last.position_mask)
    torch.testing.assert_close(first.target_probs, last.target_probs, rtol=1e-6, atol=1e-7)


def test_automodel_reads_what_a_trainer_is_passed(cache_pair, tiny_target):
    """Shifted and padded; zero where nothing is supervised; the columns by `selected_token_ids`."""
    source, automodel = cache_pair("probs")
    cached = opened(source)
    selected, rows = cached.vocabulary.selected_token_ids, cached.rows()
    for number, (manifest, sample) in enumerate(automodel_samples(automodel)):
        row = rows[number]
        batch = cached.answer(collate([row], one_per_row([len(row.input_ids)], WIDTH), WIDTH, 0))
        assert manifest["selected_token_ids"] == selected.tolist()
        assert manifest["aux_hidden_dim"] == sample["aux_hidden_states"].shape[-1] == 96
        assert sample["input_ids"].dtype == sample["loss_mask"].dtype == torch.int64
        assert sample["position_mask"].dtype == torch.bool
        for name in sample:
            assert torch.equal(sample[name], getattr(batch, name)[0].to(sample[name].dtype)), name
    embedding = load_file(automodel / "target_embeddings.safetensors")["weight"]
    assert embedding.dtype == torch.float32
    model = HFEagle3TargetModel.from_pretrained(tiny_target, aux_layer_ids=[0, 1, 2], device="cpu")
    assert torch.equal(embedding, model.get_input_embeddings().weight)


@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_are_ordered_by_token_id(tmp_path, top_k, dtype):
    """Probabilities come by ascending token id, whatever the order of `selected_token_ids`."""
    random = np.random.default_rng(top_k)
    selected, slots = random.permutation(20)[:8], 5
    dense_SW = torch.rand(slots, 8).to(dtype)
    tensors = {
        "input_ids": torch.arange(1, 1 + slots)[None],
        "attention_mask": torch.ones(1, slots, dtype=torch.int64),
        "loss_mask": torch.tensor([[1, 0, 1, 1, 0]]),
        "aux_hidden_states": torch.rand(1, slots, 6).to(dtype),
        "position_mask": torch.ones(1, slots, 1, dtype=torch.bool),
    }
    if top_k:
        values, ids = dense_SW.topk(top_k)
        tensors |= {"target_probs_values": values[None], "target_probs_indices": ids.int()[None]}
        dense_SW = torch.zeros_like(dense_SW).scatter(1, ids, values)
    else:
        tensors["target_probs"] = dense_SW[None]
    path = tmp_path / "shard-000000.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    shape = CacheShape("topk" if top_k else "probs", dtype, 2, 3, 8, top_k)
    shard = PaddedShard(path, shape, np.argsort(selected))
    stored = {
        field.name: torch.from_numpy(shard.payload(field.name, 0).copy()).view(field.dtype)
        for field in shape.slot_fields()
    }
    stored = {name: tensor.view(3, -1) for name, tensor in stored.items()}
    aux = {"aux_hidden_states": torch.empty(3, 6, dtype=dtype)}
    decoded = decode_states(stored | aux, shape, dtype)["target_probs"]
    expected = dense_SW[[0, 2, 3]][:, torch.from_numpy(np.argsort(selected))]
    assert torch.equal(decoded, expected.float())


def test_training_is_the_same_from_both_layouts(cache_pair, recipe, tmp_path):
    """Bit for bit: the float32 numbers are the same, only their places on disk differ."""
    for name, cache in zip(("ours", "theirs"), cache_pair("probs"), strict=True):
        train(cache_recipe(recipe, cache, "training.steps=4", run=name))
    assert differing(final_weights(tmp_path / "ours"), final_weights(tmp_path / "theirs")) == []
    assert comparable(tmp_path / "ours") == comparable(tmp_path / "theirs")


@pytest.fixture(scope="module")
def foreign(cache_pair, tiny_target, tmp_path_factory):
    """A directory as AutoModel itself writes it, from the live target: the draft vocabulary by
    frequency, a distribution at every slot, no files of fledge, first tokens missing."""
    source, _ = cache_pair("probs")
    cached = CachedEagle3TargetModel(source)
    selected = np.random.default_rng(0).permutation(cached.vocabulary.selected_token_ids)
    rows, directory = cached.rows(), tmp_path_factory.mktemp("foreign")
    model = HFEagle3TargetModel.from_pretrained(tiny_target, aux_layer_ids=[0, 1, 2], device="cpu")
    maps = torch.from_numpy(selected), torch.from_numpy(cached.vocabulary.t2d)
    for number in range(0, len(rows), 16):
        part = rows[number : number + 16]
        lengths = [len(row.input_ids) for row in part]
        answer = model.answer(collate(part, one_per_row(lengths, WIDTH), WIDTH, 0))
        head = model.info().head
        tensors = _compute_batch_cache(answer, *maps, torch.float32, head=head)
        names = ("input_ids", "attention_mask", "loss_mask")
        tensors |= {name: tensors[name].long() for name in names}
        tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
        save_file(tensors, directory / f"shard-{number // 16:06d}.safetensors")
    weight = model.get_input_embeddings().weight.detach().clone()
    save_file({"weight": weight}, directory / "target_embeddings.safetensors")
    manifest = {
        "format_version": 2, "target_model": str(tiny_target), "target_vocab_size": 400,
        "draft_vocab_size": 128, "seq_length": WIDTH, "dtype": "fp32", "num_samples": len(rows),
        "shard_size": 16, "target_probs_topk": 0, "aux_hidden_dim": 96, "aux_layer_ids": [0, 1, 2],
        "selected_token_ids": selected.tolist(), "input_data": "chats", "split": None,
        "shuffle_seed": 42,
    }  # fmt: skip
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory


def test_training_from_a_directory_written_by_automodel(cache_pair, foreign, recipe, tmp_path):
    """To 1e-4: the target ran on different batches and its softmax summed columns in another order.
    The draft vocabulary is from the manifest; config, tokenizer and head are from its model."""
    short = ("data.valid_rows=0", "training.steps=6")
    without_size = cache_recipe(recipe, foreign, *short, run="foreign").model_dump()
    del without_size["draft"]["draft_vocab_size"]
    train(cache_recipe(recipe, cache_pair("probs")[0], *short, run="ours"))
    train(Recipe.model_validate(without_size))
    np.testing.assert_allclose(losses(tmp_path / "foreign"), losses(tmp_path / "ours"), rtol=1e-4)
    first, second = final_weights(tmp_path / "ours"), final_weights(tmp_path / "foreign")
    assert torch.equal(first["d2t"], second["d2t"])
    for name in first:
        torch.testing.assert_close(second[name], first[name], rtol=1e-3, atol=1e-4, equal_nan=True)


def test_a_directory_written_by_automodel_can_be_converted(cache_pair, foreign, tmp_path):
    moved = shutil.copytree(foreign, tmp_path / "moved")  # from a machine with other paths
    manifest = json.loads((moved / "manifest.json").read_text())
    rewrite_manifest(moved, target_model="/elsewhere")
    arguments = ["cache", "convert", moved, "-o", tmp_path / "made", "--shard-size", 16]
    assert verb(*arguments) == 2
    assert verb(*arguments, "--target", manifest["target_model"]) == 0
    expected, converted = (
        CachedEagle3TargetModel(p) for p in (cache_pair("probs")[0], tmp_path / "made")
    )
    assert converted.vocabulary.digest() == expected.vocabulary.digest()
    assert converted.vocabulary.coverage == pytest.approx(expected.vocabulary.coverage)
    assert (tmp_path / "made" / "target" / "tokenizer.json").exists()
    torch.testing.assert_close(converted.info().head.weight_VD, expected.info().head.weight_VD)
    for a, b in zip(converted.store.shards, expected.store.shards, strict=True):
        for row in range(len(a)):
            ids, mask = a.tokens(row)
            assert ids[0] == mask[0] == 0  # not stored in AutoModel's layout
            np.testing.assert_array_equal(ids[1:], b.tokens(row)[0][1:])
            np.testing.assert_array_equal(mask[1:], b.tokens(row)[1][1:])
            for name in ("aux_hidden_states", "target_probs"):
                first, second = (s.payload(name, row).view(np.float32) for s in (a, b))
                np.testing.assert_allclose(first, second, rtol=1e-3, atol=1e-5)


def test_info_and_verify_read_automodels_layout(foreign, capsys):
    assert verb("cache", "info", foreign, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["layout"], facts["encoding"], facts["rows"]) == ("automodel", "probs", 60)
    assert facts["draft_vocabulary"] == 128
    assert verb("cache", "verify", foreign) == 0


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("format_version", 3, "AutoModel's cache format 3"),
        ("dtype", "int8", "manifest is damaged"),
        ("selected_token_ids", [1, 2], "sizes contradict"),
        ("selected_token_ids", [*range(127), 400], "sizes contradict"),
        ("aux_hidden_dim", 97, "sizes contradict"),
        ("draft_vocab_size", 64, "sizes contradict"),
        ("num_samples", 99, "3 of 7 shards are missing|rows in the shards"),
        ("target_probs_topk", 5, "target_probs_values"),
        ("target_vocab_size", 500, "made from another model"),
    ],
)
def test_a_contradictory_manifest_is_refused(foreign, tmp_path, field, value, said):
    broken = shutil.copytree(foreign, tmp_path / "broken")
    rewrite_manifest(broken, **{field: value})
    with pytest.raises(BadInput, match=said):
        CachedEagle3TargetModel(broken)


def test_a_different_model_is_refused(foreign, tmp_path):
    other = json.loads((foreign / "manifest.json").read_text())["target_model"]
    other = shutil.copytree(other, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.embed_tokens.weight"] *= 2
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadInput, match="made from another model"):
        CachedEagle3TargetModel(foreign, model=str(other))


def test_only_probabilities_can_be_stored_in_automodels_layout(cache_pair, tmp_path, capsys):
    args = [
        cache_pair("probs")[0],
        "-o",
        tmp_path / "x",
        "--layout",
        "automodel",
        "--encoding",
        "hidden",
    ]
    assert verb("cache", "convert", *args) == 2
    assert verb("cache", "convert", *args[:4], "automodle") == 2
    assert "did you mean 'automodel'" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
