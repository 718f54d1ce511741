"""Caches of target outputs: NeMo AutoModel's loader reads ours, and we read what it precomputes."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from fledge.cli.main import run
from fledge.data.pack import collate, one_per_row
from fledge.precompute_eagle3 import main as precompute
from fledge.target.cache.backend import CachedEagle3TargetModel

pytestmark = pytest.mark.engine

LAYERS, WIDTH, WORDS = [0, 1, 2], 64, 128


@pytest.fixture(scope="module")
def automodel():
    """Their precompute; it can load a target only onto a GPU, so transformers loads it here."""
    pytest.importorskip("nemo_automodel", reason="make test-trainers installs it")
    from nemo_automodel.components.speculative import precompute_eagle3

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precompute_eagle3, "NeMoAutoModelForCausalLM", AutoModelForCausalLM)
        yield precompute_eagle3


@pytest.fixture
def flags(tiny_target, tiny_chats, tmp_path, monkeypatch):
    """Arguments that both commands take."""
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "rows"))
    return [
        "--target-model", str(tiny_target), "--input-data", str(tiny_chats), "--device", "cpu",
        "--seq-length", str(WIDTH), "--draft-vocab-size", str(WORDS), "--batch-size", "2",
        "--shard-size", "16", "--dtype", "fp32", "--output-dir", str(tmp_path / "cache"),
    ]  # fmt: skip


def selected(directory):
    """The draft vocabulary of a cache in their layout."""
    return json.loads((directory / "manifest.json").read_text())["selected_token_ids"]


def test_their_loader_reads_our_cache(automodel, flags, tiny_target, tmp_path):
    """Every sample is what they compute from the same row."""
    from nemo_automodel.components.datasets.llm.eagle3_cache import CachedEagle3Dataset
    from nemo_automodel.components.speculative.eagle.target import HFEagle3TargetModel

    assert precompute([*flags, "--encoding", "probs", "--aux-layer-ids", "0,1,2"]) == 0
    arguments = [
        "cache",
        "convert",
        tmp_path / "cache",
        "-o",
        tmp_path / "out",
        "--layout",
        "automodel",
    ]
    with pytest.raises(SystemExit) as stop:
        run([str(word) for word in (*arguments, "--shard-size", 16)])
    assert not stop.value.code
    samples = CachedEagle3Dataset(str(tmp_path / "out"))
    ids = torch.tensor(
        json.loads((tmp_path / "out/manifest.json").read_text())["selected_token_ids"]
    )
    mask = torch.zeros(400, dtype=torch.bool).index_fill(0, ids, True)
    target = HFEagle3TargetModel(AutoModelForCausalLM.from_pretrained(tiny_target), LAYERS)
    rows = CachedEagle3TargetModel(tmp_path / "cache").rows()
    assert len(samples) == len(rows) == 60
    for row, sample in zip(rows, samples, strict=True):
        batch = collate([row], one_per_row([len(row.input_ids)], WIDTH), WIDTH, 0)
        answer = target.generate_batch(batch.input_ids, batch.attention_mask, batch.loss_mask)
        expected = automodel._compute_batch_cache(answer, ids, mask, torch.float32, 0)
        real, charged = sample["attention_mask"].bool(), sample["loss_mask"].bool()
        assert charged.any()
        for name in ("input_ids", "attention_mask", "loss_mask", "position_mask"):
            assert torch.equal(sample[name], expected[name][0]), name
        for name, kept in (("aux_hidden_states", real), ("target_probs", charged)):
            torch.testing.assert_close(sample[name][kept], expected[name][0][kept])


def test_we_read_what_they_precompute(automodel, flags, tmp_path):
    from nemo_automodel.components.datasets.llm.eagle3_cache import CachedEagle3Dataset

    assert automodel.main([*flags, "--aux-layer-ids", "0", "1", "2"]) == 0
    samples = CachedEagle3Dataset(str(tmp_path / "cache"))
    cached = CachedEagle3TargetModel(tmp_path / "cache")
    ids, member = (
        torch.from_numpy(getattr(cached.vocabulary, name)) for name in ("selected_token_ids", "t2d")
    )
    cached.set_vocab_mapping(ids, member)
    stored = json.loads((tmp_path / "cache/manifest.json").read_text())["selected_token_ids"]
    assert sorted(stored) == ids.tolist()  # ours are in the order that engines need
    column = torch.tensor(stored).argsort()
    rows = cached.rows()
    assert len(rows) == len(samples) == 60
    for row, sample in zip(rows, samples, strict=True):
        width = len(row.input_ids)
        answer = cached.answer(collate([row], one_per_row([width], WIDTH), WIDTH, 0))
        charged = answer.loss_mask[0].bool()
        assert torch.equal(charged, sample["loss_mask"].bool())
        assert torch.equal(answer.input_ids[0], sample["input_ids"])
        states = answer.aux_hidden_states[0, :width], sample["aux_hidden_states"][:width]
        torch.testing.assert_close(*states, rtol=0, atol=0)
        probs = answer.target_probs[0][charged], sample["target_probs"][:, column][charged]
        torch.testing.assert_close(*probs, rtol=0, atol=0)
        assert torch.equal(answer.position_mask[0], sample["position_mask"])
