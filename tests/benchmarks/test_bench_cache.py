"""The benchmarks of caches and of ranks that share rows run; here on tiny models."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch

import bench_cache
import bench_context
import cache_training

RECIPE = Path(__file__).parents[2] / "recipes" / "smollm2_cpu.yaml"
TINY = ("target.aux_layer_ids=[0,1,2]", "draft.draft_vocab_size=64", "packing.tokens=128",
        "data.max_length=128", "data.workers=1", "training.device=cpu")  # fmt: skip


@pytest.fixture(autouse=True)
def own_rows(tmp_path, monkeypatch):
    """Keep the tokenized rows out of the user's cache."""
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "fledge"))


def test_rates_are_measured_of_every_encoding(tiny_target, tiny_chats, tmp_path, capsys):
    bench_cache.rates(
        Namespace(
            data=str(tiny_chats), model=str(tiny_target), rows=8, hidden_size=16, repeat=1,
            directory=str(tmp_path),
        )
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert "| hidden |" in printed
    assert "| hidden-fp8 |" in printed


def test_waiting_is_measured_with_a_recipe_of_the_repository(
    tiny_target, tiny_chats, tmp_path, capsys
):
    cache_training.waiting(
        Namespace(
            data=str(tiny_chats), model=str(tiny_target), rows=8, steps=1, batch_size=4,
            directory=str(tmp_path), recipe=str(RECIPE), overrides=list(TINY),
        )
    )  # fmt: skip
    assert "waiting for the target" in capsys.readouterr().out


def test_memory_is_counted_on_one_rank():
    torch.manual_seed(0)
    figures = bench_context.measure("eagle3", 64, 1)
    assert min(figures.values()) > 0
