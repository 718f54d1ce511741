"""Cluster sizing: measured shapes give their measured times, and the figures are consistent."""

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from fledge.bench.train_step import DRAFT_VOCAB, SHAPE_FIELDS, SHAPES
from fledge.cli.console import out
from fledge.cli.plan import plan
from fledge.core.errors import BadInput
from fledge.models.shapes import SIZES
from fledge.recipe.schema import load_recipe
from fledge.training.planning import sizing
from fledge.training.planning.shape_plan import TargetShape, draft_without_memory
from fledge.training.planning.sizing import Given, Load, Pipeline, gpu_of, seconds_for, size_cluster
from fledge.training.planning.step_cost import StepMemory, typical_rows

ROOT = Path(__file__).parents[2]
DATA = ROOT / "benchmarks" / "results" / "data"
RECIPE = "llama31_8b_8gpu"


def benched(shape, *overrides):
    """(the target's config, the recipe, its draft) of one of the benchmark's shapes."""
    fields = dict(zip(SHAPE_FIELDS, SHAPES[shape], strict=True))
    config = LlamaConfig(**fields, max_position_embeddings=65_536, tie_word_embeddings=False)
    recipe = load_recipe(RECIPE, [f"draft.draft_vocab_size={DRAFT_VOCAB[shape]}", *overrides])
    return config, recipe, draft_without_memory(recipe, config)


def measured(name):
    cases = json.loads((DATA / "train_step.json").read_text())["cases"]
    [case] = [case for case in cases if case["name"] == name]
    return case["phases_ms"]["target"] / 1e3, case["step_ms"] / 1e3


@pytest.mark.parametrize(
    ("shape", "at", "tokens", "seen"),
    [("135m", 0, 16_384, 125), ("1b", 1, 16_384, 1024), ("8b", 2, 8192, 1024)],
)
def test_measured_shapes_give_their_measured_times(shape, at, tokens, seen):
    """Operations are those of the benchmark's shapes, and seconds those of its results."""
    target_s, whole_s = 0.015, 0.089  # the 135M step, with the digits its results page gives
    if shape != "135m":
        target_s, whole_s = measured(f"EAGLE-3\n{shape.upper()}")
    config, recipe, draft = benched(shape)
    attended = 4 * config.num_attention_heads * config.head_dim * seen * config.num_hidden_layers
    operations = 2 * TargetShape.of(config).active + attended
    rows = typical_rows(1, tokens, document=2 * seen, supervised=0.6)
    step_operations = StepMemory.of(draft, [rows], recipe).cost.operations / tokens
    assert sizing.TARGETS[at][0] == pytest.approx(operations, rel=1e-3)
    assert sizing.STEPS[at][0] == pytest.approx(step_operations, rel=1e-3)
    assert seconds_for(operations, sizing.TARGETS) == pytest.approx(target_s / tokens, rel=1e-3)
    rest_s = (whole_s - target_s) / tokens
    assert seconds_for(step_operations, sizing.STEPS) == pytest.approx(rest_s, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "shape", "packs", "tokens", "options"),
    [
        ("EAGLE-3\n8B", "8b", 4, 2048, []),
        ("EAGLE-3 8B\nfp8, keep 0.7", "8b", 4, 2048, ["objective.depth_keep=0.7"]),
        ("EAGLE-3\n1B", "1b", 8, 2048, []),
        ("EAGLE-3 8B\n32,768", "8b", 1, 32_768, []),
        ("P-EAGLE\n8B", "8b", 2, 2048, ["objective.kind=peagle", "draft.layers=4"]),
    ],
)
def test_predicted_memory_is_close_to_what_steps_took_on_a_gpu(name, shape, packs, tokens, options):
    """Within 15 % of the benchmark's peak beyond weights and moments. The gradients of P-EAGLE's
    layers, which run once, appear only when their activations are gone."""
    cases = json.loads((DATA / "train_step.json").read_text())["cases"]
    [above] = [case["above_gib"] for case in cases if case["name"] == name]
    _, recipe, draft = benched(shape, *options)
    rows = typical_rows(packs, tokens, document=tokens, supervised=0.6)
    predicted = StepMemory.of(draft, [rows], recipe).bytes()
    if recipe.method.name == "eagle3":
        predicted += 4 * sum(p.numel() for p in draft.parameters() if p.requires_grad)
    assert predicted / 2**30 == pytest.approx(above, rel=0.15)


def test_the_sizes_match_the_published_models():
    loads = {size: Load.of([load_recipe(RECIPE)], Given(), size) for size in SIZES}
    weights = [round(load.target.weights / 1e9) for load in loads.values()]
    active = [round((load.target.active + load.target.head) / 1e9) for load in loads.values()]
    assert weights == [8, 71, 235, 1026]
    assert active == [8, 70, 22, 32]
    assert [load.worker_gpus for load in loads.values()] == [1, 2, 4, 8]
    assert [load.token_bytes for load in loads.values()] == [32_768, 65_536, 32_768, 57_344]
    default = Load.of([load_recipe(RECIPE)], Given())
    assert default == loads["8b"]  # nothing is fetched for either


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ranks", [0, 3])
def test_the_figures_of_a_plan_are_consistent(size, ranks):
    given = Given(ranks=ranks)
    figures = size_cluster([load_recipe(RECIPE)], given, size).to_json()
    capture = figures["target_workers"] * figures["worker_tokens_per_s"]
    training = figures["train_gpus"] * figures["rank_tokens_per_s"]
    speed, size = figures["tokens_per_s"], figures["bytes_per_token"]
    assert speed <= min(capture, training) * (1 + 1e-9)
    assert figures["waiting_share"] == pytest.approx(1 - speed / training)
    assert figures["train_gpus"] == ranks or not ranks
    if not ranks:  # balanced: both sides are busy
        assert figures["waiting_share"] < 0.1
        assert speed / capture > 0.9
    received = figures["bytes_per_s_to_rank"]
    assert received == pytest.approx(speed / figures["train_gpus"] * size)
    assert received <= given.link_bytes * (1 + 1e-9)
    gpus = figures["target_workers"] * figures["gpus_per_worker"] + figures["train_gpus"]
    for row, samples in zip(figures["samples"], (1e6, 1e8), strict=True):
        assert row["hours"] == pytest.approx(samples * 1024 / speed / 3600)
        assert row["cost"] == pytest.approx(row["hours"] * gpus * 3.0)
        assert row["cache_bytes"] == samples * 1024 * size


def test_a_slow_link_is_the_bottleneck():
    fast, slow = (
        size_cluster([load_recipe(RECIPE)], Given(link_bytes=rate, ranks=2)).to_json()
        for rate in (3e9, 0.3e9)
    )
    assert fast["bytes_per_s_to_rank"] > 3 * 0.3e9
    assert slow["bytes_per_s_to_rank"] == pytest.approx(0.3e9, rel=0.02)
    assert slow["waiting_share"] > 0.5


def test_the_slowest_part_sets_the_pace():
    """Two workers that take 4 s, transfers and steps of 1 s."""
    assert Pipeline(4.0, 1.0, 1.0, workers=2).period_s == 2.0  # the workers
    assert Pipeline(4.0, 1.0, 1.0, workers=2, ranks=2).period_s == 4.0
    assert Pipeline(4.0, 3.0, 1.0, workers=2).waiting_share == 0.0
    assert Pipeline(1.0, 1.0, 3.0, workers=2).waiting_share == pytest.approx(2 / 3)  # the link


def test_given_speeds_override_the_measured_ones():
    given = Given(target_tokens_s=1000.0, train_tokens_s=3000.0, ranks=1)
    figures = size_cluster([load_recipe(RECIPE)], given).to_json()
    assert (figures["target_workers"], figures["train_gpus"]) == (3, 1)
    assert figures["tokens_per_s"] == pytest.approx(3000, rel=0.01)
    assert figures["worker_operations"] is None


def test_plan_cluster_matches_the_documentation(capsys, monkeypatch):
    monkeypatch.setattr(out, "_width", 80)
    plan([RECIPE], cluster=True, target_shape=[*SIZES])
    shown = capsys.readouterr().out
    table = shown.partition("samples of")[0].splitlines()
    page = (ROOT / "docs" / "cluster.md").read_text()
    assert len(table) > 15
    assert [line for line in table if line.rstrip() not in page] == []
    assert "measured: targets and EAGLE-3 steps" in shown
    assert "x 9.53" in shown  # by how much the 70B target is extrapolated
    assert "does not fit" not in shown
    plan([RECIPE], cluster=True, target_shape=["1t-moe"], as_json=True)
    [figures] = json.loads(capsys.readouterr().out)
    assert figures["model"] == SIZES["1t-moe"]
    [speeds] = [line for line in table if "tokens/s of all" in line]
    assert speeds.split()[-1] == f"{figures['tokens_per_s']:,.0f}"
    plan([RECIPE], cluster=True, gpu="h100", gpu_gib=12, ranks=1)
    shown = capsys.readouterr().out
    assert "the draft of Llama-3.1-8B-Instruct does not fit a GPU that trains" in shown


def test_a_tensor_parallel_target_stays_split():
    overrides = ["target.backend=ray", "target.worker={backend: vllm, tp_size: 2}"]
    recipe = load_recipe(RECIPE, overrides)
    assert Load.of([recipe], Given()).worker_gpus == 2
    assert Load.of([recipe], Given(gpu=gpu_of("h100", 24)), "70b").worker_gpus == 8


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"cluster": True, "target_shape": ["80b"]}, "no target of size '80b'"),
        ({"cluster": True, "gpu": "h2000"}, "no GPU 'h2000'"),
        ({"target_shape": ["8b"]}, "add --cluster"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(options, line):
    with pytest.raises(BadInput, match=line):
        plan([RECIPE], **options)
