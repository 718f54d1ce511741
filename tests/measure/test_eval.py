"""`fledge eval` from prompts to tables: figures checked by hand, cached answers, several drafts."""

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from decode.tiny_decode import AUX, make_draft, make_target
from export.drafts import make_tokenizer
from fledge.cli import eval as eval_verb
from fledge.cli.main import app
from fledge.core.errors import BadInput
from fledge.decode.accept import Round, walk_rounds
from fledge.decode.speculative import SpeculativeDecoder
from fledge.decode.stops import eos_token_ids
from fledge.measure.answers import SETS, cached_answers, read_prompts
from fledge.measure.evaluation import check_fits
from fledge.measure.figures import (
    Sample,
    acceptance,
    by_context,
    by_label,
    every_slot_length,
    failures,
)
from fledge.methods.eagle3.draft import LlamaEagle3DraftModel
from fledge.recipe.schema import load_recipe
from fledge.target.hf.model import HFEagle3TargetModel


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a target that has a byte-level tokenizer, three drafts, and prompts."""
    root = tmp_path_factory.mktemp("eval")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(root / "target")
    model = make_target(vocab=len(tokenizer), eos_token_id=1, bos_token_id=None)
    model.save_pretrained(root / "target")
    make_draft(model, fit=15).save_pretrained(root / "trained")
    make_draft(model, width=20).save_pretrained(root / "random")
    make_draft(model, parallel=True, layers=2, fit=15).save_pretrained(root / "parallel")
    rows = [
        {"id": "a", "category": "one", "messages": [{"role": "user", "content": "hello"}],
         "followups": ["and then?"]},
        {"id": "b", "category": "two", "messages": [{"role": "user", "content": "why"},
                                                    {"role": "assistant", "content": "gone"}]},
        {"prompt": "plain words"},
    ]  # fmt: skip
    (root / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path))
    return tmp_path


def cached_names(cache):
    """The names of the answer files in a cache, without lock files."""
    return [path.name for path in (cache / "answers").iterdir() if path.suffix != ".lock"]


def run(place, *arguments):
    return CliRunner().invoke(
        app,
        [
            "eval", *arguments, "--target", str(place / "target"), "--aux-layers", "0,1,2",
            "--prompts", str(place / "asked.jsonl"), "--max-new-tokens", "24", "--device", "cpu",
            "--draft-tokens", "3",
        ],
    )  # fmt: skip


def test_several_drafts_as_json(place, own_cache, monkeypatch):
    loaded, load = [], LlamaEagle3DraftModel.from_pretrained

    def from_pretrained(directory, **options):
        loaded.append(directory.name)
        return load(directory, **options)

    monkeypatch.setattr(LlamaEagle3DraftModel, "from_pretrained", from_pretrained)
    result = run(place, str(place / "trained"), str(place / "random"), "--json")
    assert result.exit_code == 0, result.output
    assert loaded == ["trained", "random"]  # each draft once
    printed = json.loads(result.stdout)
    assert printed["answers"] == 4  # three prompts and one follow-up
    assert printed["target"]["dtype"] == "float64"
    assert [draft["method"] for draft in printed["drafts"]] == ["chain", "chain"]
    for figures in printed["drafts"]:
        live = figures["live"]
        assert live["same_texts"] == live["texts"] == 4
        assert live["same_rounds"] == live["compared_rounds"] == figures["rounds"]
        assert live["acceptance_length"] == figures["acceptance_length"]
        assert "bonus token counted" in figures["definition"]
        assert "chain of k = 3" in figures["definition"]
        assert set(figures["by_category"]) == {"one", "two", "asked"}
        assert figures["by_set"]["asked"]["rounds"] == figures["rounds"]
        assert sum(part["rounds"] for part in figures["by_context"].values()) == figures["rounds"]
        lost = figures["where_it_fails"]
        assert lost["lost_length"] == pytest.approx(3 + 1 - figures["acceptance_length"])
        misses = figures["draft_vocabulary_misses"]["ended_round_share"] * figures["rounds"]
        assert lost["causes"]["vocabulary"]["rejected"] == pytest.approx(misses)
        speed = figures["speed"]
        assert speed["predicted_speedup"] == pytest.approx(
            figures["acceptance_length"] / speed["break_even_acceptance_length"]
        )
    assert printed["drafts"][0]["draft_vocabulary_misses"]["tokens"] == 0
    assert printed["drafts"][1]["draft_vocabulary_misses"]["tokens"] > 0


def test_a_parallel_draft_is_recognized_and_a_run_names_its_target(place, own_cache, tmp_path):
    overrides = [f"target.model={place / 'target'}", "target.aux_layer_ids=0,1,2"]
    recipe = load_recipe(None, [*overrides, "data.train=x.jsonl", f"run.output_dir={tmp_path}"])
    recipe.write_resolved(tmp_path)
    (tmp_path / "best").symlink_to(place / "parallel")
    options = ["--prompts", str(place / "asked.jsonl"), "--max-new-tokens", "9", "--json"]
    result = CliRunner().invoke(app, ["eval", str(tmp_path), "--draft-tokens", "5", *options])
    assert result.exit_code == 0, result.output
    [figures] = json.loads(result.stdout)["drafts"]
    assert figures["method"] == "parallel"
    assert "k = 5 tokens drafted in parallel" in figures["definition"].replace("K", "k")
    assert figures["live"]["same_rounds"] == figures["live"]["compared_rounds"] > 0
    assert figures["draft"] == tmp_path.name


def test_answers_are_generated_once(place, own_cache, monkeypatch):
    first = run(place, str(place / "trained"))
    assert first.exit_code == 0, first.output
    assert "kept in" in first.output
    assert len(cached_names(own_cache)) == 1
    again = run(place, str(place / "trained"), "--live", "0")
    assert "from the cache" in again.output
    assert "acceptance length = tokens per round" in " ".join(again.output.split())
    assert "where trained loses length" in again.output
    assert "largest cause: " in " ".join(again.output.split())
    run(place, str(place / "trained"), "--limit", "2", "--live", "0")
    assert len(cached_names(own_cache)) == 2


@pytest.fixture
def answering(place, own_cache, monkeypatch):
    """A function that answers three prompts and a follow-up; it returns the bytes of the answer
    file and the prompts that were really decoded."""
    model = HFEagle3TargetModel.from_pretrained(place / "target", aux_layer_ids=AUX, device="cpu")
    prompts = read_prompts([str(place / "asked.jsonl")])
    decoded, real = [], SpeculativeDecoder.generate

    def generate(self, prompts, *rest, **options):
        decoded.append([model.tokenizer.decode(ids) for ids in prompts])
        return real(self, prompts, *rest, **options)

    monkeypatch.setattr(SpeculativeDecoder, "generate", generate)

    def answer(cache, *, batch, stop_at=float("inf")):
        def watch(what, done, total):
            if done >= stop_at:
                raise KeyboardInterrupt

        monkeypatch.setenv("FLEDGE_CACHE", str(cache))
        decoded.clear()
        answers = cached_answers(model, prompts, max_new_tokens=9, batch=batch, watch=watch)
        return answers.path.read_bytes(), list(decoded)

    answer.model = model
    return answer


@pytest.mark.parametrize(("batch", "stop_at", "left"), [(1, 2.9, 2), (2, 2.9, 2), (1, 3.5, 1)])
def test_interrupted_answers_resume(answering, tmp_path, batch, stop_at, left):
    whole, all_batches = answering(tmp_path / "whole", batch=batch)
    with pytest.raises(KeyboardInterrupt):
        answering(tmp_path / "cut", batch=batch, stop_at=stop_at)
    [part] = cached_names(tmp_path / "cut")
    assert part.endswith(".part")
    again, rest = answering(tmp_path / "cut", batch=batch)
    assert rest == all_batches[-left:]
    assert again == whole
    assert [name[-5:] for name in cached_names(tmp_path / "cut")] == [".json"]


def test_a_half_written_batch_is_answered_again_as_a_whole(answering, tmp_path):
    """Rounding depends on the batch, so the rest of a batch must not be answered alone."""
    whole, all_batches = answering(tmp_path / "whole", batch=2)
    with pytest.raises(KeyboardInterrupt):
        answering(tmp_path / "cut", batch=2, stop_at=2.9)
    [part] = tmp_path.glob("cut/answers/*.part")
    lines = part.read_bytes().splitlines(keepends=True)
    part.write_bytes(lines[0] + lines[1][:-9])  # killed while the second was written
    again, rest = answering(tmp_path / "cut", batch=2)
    assert rest == all_batches
    assert again == whole


def test_a_leftover_part_of_finished_answers_is_removed(answering, tmp_path):
    answering(tmp_path, batch=4)
    [name] = cached_names(tmp_path)
    (tmp_path / "answers" / name).with_suffix(".part").touch()  # killed before it was removed
    assert answering(tmp_path, batch=4)[1] == []
    assert cached_names(tmp_path) == [name]


def test_a_different_configuration_of_the_same_weights_answers_again(answering, tmp_path):
    answering(tmp_path, batch=4)
    answering.model.model.generation_config.eos_token_id = [1, 7]
    assert answering(tmp_path, batch=4)[1]
    answering.model.model.config.rope_parameters["rope_theta"] = 77.0
    assert answering(tmp_path, batch=4)[1]
    assert len(cached_names(tmp_path)) == 3


def test_trees_are_measured_by_live_decoding_only(place, own_cache):
    result = run(place, str(place / "trained"), "--method", "tree", "--tree", "3,2,5", "--json")
    [figures] = json.loads(result.stdout)["drafts"]
    assert figures["live"]["texts"] == figures["live"]["same_texts"] == 4
    assert figures["every_slot_length"] is None
    assert "tree of 5 nodes, 3 deep" in figures["definition"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "neither a draft nor a run"),
        (["TRAINED", "--prompts", "mixd"], "did you mean 'mixed'"),
        (["TRAINED", "--tree", "5,4"], "is not 3 numbers"),
        (["TRAINED", "--tree", "0,4,8"], "must be positive"),
        (["TRAINED", "--dtype", "float1"], "is not a dtype"),
        (["TRAINED", "--method", "parallel"], "not trained for parallel"),
        (["TRAINED", "--method", "trees"], "did you mean 'tree'"),
    ],
)
def test_bad_input_is_a_one_line_error(place, own_cache, arguments, message):
    given = [
        str(place / "trained") if argument == "TRAINED" else argument for argument in arguments
    ]
    result = run(place, *given)
    assert isinstance(result.exception, BadInput)
    assert message in str(result.exception)


def test_a_draft_of_a_different_target_is_refused(place):
    model = HFEagle3TargetModel.from_pretrained(place / "target", aux_layer_ids=AUX, device="cpu")
    other = make_draft(make_target(vocab=300))
    with pytest.raises(BadInput, match="knows 300 tokens"):
        check_fits(model, other, "other")


def test_follow_ups_come_after_the_answer(place, own_cache):
    model = HFEagle3TargetModel.from_pretrained(place / "target", aux_layer_ids=AUX, device="cpu")
    prompts = read_prompts([str(place / "asked.jsonl")])
    turns = cached_answers(model, prompts, max_new_tokens=6, batch=2).turns
    first, second = (next(t for t in turns if (t.name, t.turn) == ("a", n)) for n in (0, 1))
    reply = model.tokenizer.decode(first.answer_ids, skip_special_tokens=True)
    text = f"<u>hello<e><a>{reply}<e><u>and then?<e><a>"
    assert second.prompt_ids == model.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert eos_token_ids(model.model, model.tokenizer) == {1}


def test_prompts_without_room_are_skipped_and_counted(place, own_cache):
    model = HFEagle3TargetModel.from_pretrained(place / "target", aux_layer_ids=AUX, device="cpu")
    model.model.config.max_position_embeddings = 12
    answers = cached_answers(model, read_prompts([str(place / "asked.jsonl")]), max_new_tokens=5)
    assert [turn.name for turn in answers.turns] == ["b"]
    assert answers.skipped == 2


def test_the_built_in_prompt_set_is_valid():
    prompts = read_prompts(["mixed"])
    assert len({prompt.name for prompt in prompts}) == len(prompts) == 32
    assert len({prompt.category for prompt in prompts}) == 8
    assert len(read_prompts(["mixed"], limit=8)) == 8
    assert SETS["mixed"].is_file()


@pytest.mark.parametrize("row", ['{"messages": []}', '{"x": 1}', "[1]", '{"messages": [{}]}', "{"])
def test_a_bad_prompt_row_is_named(tmp_path, row):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{row}\n')
    with pytest.raises(BadInput, match=r"rows\.jsonl:2"):
        read_prompts([str(path)])


# --- figures by hand ----------------------------------------------------------------------------


def sample(category="x", prompt=3, total=8, accepted=(0, 0, 1, 0, 0, 2, 0, 0)):
    text = list(range(100, 100 + total))
    rounds = walk_rounds(accepted, prompt=prompt, total=total)
    return Sample(text[:prompt], text[prompt:], rounds, category, accepted)


def test_figures_of_the_worked_example():
    """Rounds (context 4, 1 of 2 accepted), (context 6, 0), (context 7, 1 and the text ends)."""
    figures = acceptance([sample()], depth=2)
    assert (figures.rounds, figures.emitted, figures.length) == (3, 4, 4 / 3)
    assert figures.tried == (3, 2)  # the last round's second token is past the end of the text
    assert figures.joint == [2 / 3, 0.0]
    assert figures.conditional == [2 / 3, 0.0]
    assert figures.reached == (3, 1)
    # rounds may start at slots 2..5: hits 1, 0, 0, 2 (one of the 2 is inside the text)
    assert every_slot_length([sample()], depth=2) == 1 + 2 / 4 + 0 / 3
    assert every_slot_length([Sample([1], [2, 3, 4], [])], depth=2) is None
    assert acceptance([], depth=2).length == 0.0
    assert acceptance([], depth=2).joint == acceptance([], depth=2).conditional == [0.0] * 2


def test_groups_partition_the_rounds():
    samples = [sample("x"), sample("y"), sample("x")]
    groups = by_label(samples, 2, lambda sample: sample.category)
    assert {name: group.rounds for name, group in groups.items()} == {"x": 6, "y": 3}
    long = Sample([0] * 128, [0] * 5, [Round(129, 1, 2), Round(131, 1, 2)])
    contexts = by_context([*samples, long], 2)
    assert {name: group.rounds for name, group in contexts.items()} == {"<= 128": 9, "<= 256": 2}


def test_vocabulary_misses_are_attributed_to_the_target(capsys):
    """A draft cannot propose tokens outside its vocabulary: it is the target that picks them."""
    # tokens 104..107 could be drafted; rounds reject 105 (token 5), 106 (token 6), nothing
    said = {104, 106}.__contains__
    lost = failures([sample()], 2, said)
    assert lost.misses() == {"token_share": 0.5, "ended_round_share": 1 / 3, "tokens": 2}
    report = SimpleNamespace(
        name="d", failures=lost, every_slot=None, other_picks=1, live=None, speed=None,
        replay_s=None,
    )  # fmt: skip
    eval_verb._remarks(report)
    printed = " ".join(capsys.readouterr().out.split())
    assert "50.00% of the target's tokens are outside the draft vocabulary" in printed
    assert "1 token the target would not pick again" in printed


def test_eval_stores_samples_token_by_token(place, own_cache, tmp_path):
    for method in ("chain", "tree"):
        out = tmp_path / f"{method}.json"
        options = ["--out", str(out), "--samples", "2", "--method", method]
        result = run(place, str(place / "trained"), *options)
        assert result.exit_code == 0, result.output
        [figures] = json.loads(out.read_text())["drafts"]
        assert len(figures["samples"]) == 2
        for sample in figures["samples"]:
            assert sample["prompt"] in ("hello", "and then?", "why", "plain words")
            assert len(sample["tokens"]) > 2
            draft_probabilities = [token[4] for token in sample["tokens"] if token[1]]
            assert all((p is None) == (method == "tree") for p in draft_probabilities)
    assert (
        "samples"
        not in json.loads(run(place, str(place / "trained"), "--json").stdout)["drafts"][0]
    )
