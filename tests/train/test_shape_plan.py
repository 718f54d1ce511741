"""What a recipe would cost on GPUs that are not available: computed from shapes alone, and equal to
the figures in its header."""

import json
import re
from pathlib import Path

import pytest
from transformers import LlamaConfig, Qwen2Config

from fledge.bench.train_step import DRAFT_VOCAB, SHAPE_FIELDS, SHAPES
from fledge.cli.console import out
from fledge.cli.plan import plan
from fledge.core.errors import BadInput
from fledge.recipe.schema import load_recipe, recipe_file
from fledge.training.planning.prediction import predict, sampled_rows, step_memory
from fledge.training.planning.shape_plan import ShapePlan, TargetShape, draft_without_memory
from fledge.training.planning.step_cost import DraftMemory, StepMemory, typical_rows
from fledge.training.setup import set_up

GIB = 2**30
MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "data" / "train_step.json"
NOT_RUN = {"llama33_70b_8gpu": 8, "qwen3_235b_2x8gpu": 16, "llama31_8b_128k_8gpu": 8}
BLOCKS = {f"qwen3_8b_{kind}_{n}gpu": n for kind in ("dflash", "dspark") for n in (1, 8)}


def planned(name, *overrides):
    return ShapePlan.of(load_recipe(name, overrides), NOT_RUN[name])


@pytest.mark.parametrize(("name", "ranks"), [*NOT_RUN.items(), *BLOCKS.items()])
def test_recipe_headers_match_the_plan(name, ranks):
    text = recipe_file(name).read_text()
    [memory] = re.findall(
        r"memory +([\d.]+) GiB a GPU: target ([\d.]+), draft and optimizer ([\d.]+), one step "
        r"(\d+\.\d)", text,
    )  # fmt: skip
    overrides = ["training.steps=10"] if name in BLOCKS else []
    predicted = ShapePlan.of(load_recipe(name, overrides), ranks).predict()
    sizes = (predicted.target_bytes, predicted.draft_bytes, predicted.step_bytes)
    assert [float(n) for n in memory] == pytest.approx(
        [predicted.peak_bytes / GIB, *(size / GIB for size in sizes)], abs=0.051
    )
    if name in BLOCKS:  # their number of steps depends on the data
        return
    hours, tokens = re.search(r"time +([\d.]+) h for (\d+) million tokens", text).groups()
    assert float(hours) == pytest.approx(predicted.seconds / 3600, abs=0.051)
    assert float(tokens) == pytest.approx(predicted.tokens / 1e6, abs=0.51)
    assert predicted.peak_bytes < 0.92 * 80 * GIB
    assert "NOT RUN" in text


def test_weight_counts_match_the_published_models():
    """Published sizes: 70.55, 235.09 (22.2 active, with embedding and head) and 8.03 billion."""
    big, moe, small = (planned(name).target for name in NOT_RUN)
    assert [round(x.weights / 1e9, 2) for x in (big, moe, small)] == [70.55, 235.09, 8.03]
    assert (moe.active + 2 * moe.head) / 1e9 == pytest.approx(22.2, abs=0.1)


def test_a_config_without_a_head_size_can_be_planned():
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
    config = Qwen2Config(vocab_size=100, intermediate_size=96, num_key_value_heads=2, **sizes)
    target = TargetShape.of(config)
    assert not hasattr(config, "head_dim")
    assert target.operations(10) == 2 * target.active + 4 * 64 * 10 * 3


def test_sharding_a_target_reduces_its_bytes():
    whole = planned("llama33_70b_8gpu", "target.parallel={fsdp: 1}").target_bytes()
    for cut in ("{tp: 8, fsdp: 1}", "{fsdp: 8}", "{fsdp: 4, tp: 2}"):
        part = planned("llama33_70b_8gpu", f"target.parallel={cut}").target_bytes()
        assert whole / 8 < part < whole / 4
    rows = [
        planned("llama31_8b_128k_8gpu", f"target.parallel={{cp: {n}}}").target_bytes()
        for n in (1, 2, 4, 8)
    ]
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] > 8.03e9 * 2  # with cp, ranks split rows, not weights


def test_splitting_rows_reduces_a_step_to_what_every_rank_needs():
    step = planned("llama31_8b_128k_8gpu").step
    sizes = [step.bytes(n) for n in (1, 2, 4, 8, 16)]
    assert sizes == sorted(sizes, reverse=True)
    answer = 2 * step.rows.tokens * 4 * 4096 * 2  # briefly whole on every rank
    for n in (2, 4, 8):
        assert step.bytes(n) - answer < 1.25 * (sizes[0] - answer) / n + 2 * GIB
    assert step.context_needed(sizes[0]) == 1
    assert step.context_needed(sizes[2]) == 4
    assert step.context_needed(sizes[2] - 1) == 8
    assert step.context_needed(1e9) is None


def test_sharded_weights_are_still_gathered_whole_in_a_step():
    assert DraftMemory(1000, 10, 8000).bytes() == 16_040
    assert DraftMemory(1000, 10, 8000).bytes(shard=4, width=2) == 3000 + 6000 + 40


def test_time_depends_on_ranks_and_rows():
    one = planned("llama31_8b_128k_8gpu", "training.context=1", "target.parallel={cp: 1}")
    four = planned("llama31_8b_128k_8gpu")
    ratio = four.predict().seconds_by_part["steps"] / one.predict().seconds_by_part["steps"]
    assert ratio == pytest.approx(1 / 4, rel=0.1)  # a quarter of the rows per step
    redundant = planned("llama31_8b_128k_8gpu", "target.parallel={fsdp: 8, cp: 1}").predict()
    assert redundant.seconds > 2 * four.predict().seconds  # every rank asks about the whole row


def test_plan_from_shapes(capsys, monkeypatch):
    monkeypatch.setattr(out, "_width", 200)
    long = "llama31_8b_128k_8gpu"
    plan([long, "training.context=1", "target.parallel={cp: 1}"], ranks=8, as_json=True)
    figures = json.loads(capsys.readouterr().out)
    assert figures["context_needed"] == 4
    assert figures["tokens"] == 1200 * 8 * 131_072
    plan([long], ranks=8, gpu_gib=20)
    shown = capsys.readouterr().out
    assert "1,200 steps on 8 ranks" in shown
    assert "fits no number of ranks beside target and draft; see target.parallel" in shown


@pytest.mark.parametrize(
    ("overrides", "ranks", "line"),
    [
        (["training.steps=null"], 8, "the number of steps must be given"),
        ([], 6, "6 ranks cannot be cut into 4"),
        (["target.parallel={cp: 1}", "training.context=3"], 8, "cannot be cut into 3"),
        (["target.backend=remote", "target.urls=[http://x:1]"], 8, "the target runs elsewhere"),
        (["target.model=nobody/nothing"], 8, "the config of 'nobody/nothing' is not here"),
    ],
)
def test_a_recipe_that_cannot_be_predicted_is_refused_with_a_reason(overrides, ranks, line):
    recipe = load_recipe("llama31_8b_128k_8gpu", overrides)
    with pytest.raises(BadInput, match=line):
        ShapePlan.of(recipe, ranks)


def test_a_run_that_is_set_up_has_the_same_figures(recipe):
    """The same shapes give the same bytes, whether or not the run is set up."""
    training = set_up(recipe())
    predicted, step = predict(training), step_memory(training)
    assert predicted.step_bytes == step.bytes(1)
    trained = sum(p.numel() for p in training.parts.parameters)
    frozen = sum(p.numel() for p in training.draft.parameters()) - trained
    assert predicted.draft_bytes == 16 * trained + 4 * frozen
    assert step.rows.tokens == 2 * 96
    states = 2 * (2 * 96 * 4 * 32 * 4)
    assert step.bytes(1) == step.cost.bytes + states
    costs = [step.step.training(rows).bytes for rows in sampled_rows(training)]
    assert step.cost.bytes == max(costs)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (["objective.kind=peagle", "objective.down_sample_ratio={}"], (0.2, 0.4, 0.7, 1.0)),
        (["objective.kind=eagle3", "objective.depth_keep={}"], (0.3, 0.6, 1.0)),
        (
            ["objective.kind=dflash", "draft.draft_vocab_size=null", "objective.anchors={}"],
            (64, 512),
        ),
    ],
)
def test_what_is_sampled_is_what_is_predicted(options, steps):
    """Time and memory rise with the share that is trained on."""
    predicted = [
        planned("llama33_70b_8gpu", *(option.format(value) for option in options)).predict()
        for value in steps
    ]
    for values in (
        [p.seconds_by_part["steps"] for p in predicted],
        [p.step_bytes for p in predicted],
    ):
        assert values == sorted(set(values))


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
    cases = json.loads(MEASURED.read_text())["cases"]
    [above] = [case["above_gib"] for case in cases if case["name"] == name]
    fields = dict(zip(SHAPE_FIELDS, SHAPES[shape], strict=True))
    config = LlamaConfig(**fields, max_position_embeddings=65_536, tie_word_embeddings=False)
    vocab = f"draft.draft_vocab_size={DRAFT_VOCAB[shape]}"
    recipe = load_recipe("llama31_8b_8gpu", [vocab, *options])
    draft = draft_without_memory(recipe, config)
    rows = typical_rows(packs, tokens, document=tokens, supervised=0.6)
    predicted = StepMemory.of(draft, [rows], recipe).bytes()
    if recipe.method.name == "peagle":  # was measured with bfloat16 copies of the layers, kept
        predicted += 2 * sum(p.numel() for p in draft.layers.parameters())
    if recipe.method.name == "eagle3":
        predicted += 4 * sum(p.numel() for p in draft.parameters() if p.requires_grad)
    assert predicted / GIB == pytest.approx(above, rel=0.15)


def test_typical_rows_have_the_given_share():
    rows = typical_rows(3, 1000, document=300, supervised=0.6)
    assert rows.seq_lens.tolist() == 3 * [[300, 300, 300, 100]]
    assert rows.loss_mask.sum(1).tolist() == 3 * [3 * 180 + 60]
    assert rows.attention_mask.all()
    assert typical_rows(1, 50, document=300).seq_lens.tolist() == [[50]]
