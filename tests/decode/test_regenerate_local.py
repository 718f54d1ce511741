"""Regeneration by a model in this process: its own greedy answers, turn by turn, resumable."""

import json
import multiprocessing

import pytest
import torch
from typer.testing import CliRunner

from fledge.cli.main import app
from fledge.data import regenerate as regenerate_module
from fledge.data.dialogue import Sampling
from fledge.data.regenerate import regenerate
from fledge.decode.regenerate import LocalModel
from fledge.target.hf.loading import load_hf_model


@pytest.fixture(scope="module")
def loaded(tiny_target):
    return load_hf_model(tiny_target, device="cpu")


@pytest.fixture
def data(tmp_path):
    turns = [[f"count to {i}"] for i in range(7)] + [["hello", "old", "and then", "old", "why"]]
    roles = ("user", "assistant")
    rows = [
        {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}
        for texts in turns
    ]
    rows.insert(3, {"messages": [{"role": "user", "content": "word " * 600}]})
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(path)]


def greedy_answer(loaded, messages, limit):
    """transformers' own greedy answer, one prompt at a time."""
    tokenizer, model = loaded.tokenizer, loaded.model
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt_BT = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    out = model.generate(
        prompt_BT, attention_mask=torch.ones_like(prompt_BT), max_new_tokens=limit,
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=0,
    )  # fmt: skip
    return out[0, prompt_BT.shape[1] :].tolist()


def test_answers_match_plain_greedy_generation(loaded, data, tmp_path):
    out, sampling = tmp_path / "new.jsonl", Sampling(max_new_tokens=12)
    summary = regenerate(data, out, LocalModel(loaded, "tiny", sampling, 3), sampling)
    rows = [json.loads(line) for line in out.open()]
    assert (summary.rows, summary.written, len(rows)) == (9, 8, 8)
    assert summary.failed.counts == {"prompt too long": 1}
    tokens = 0
    for row in rows:
        for at, message in enumerate(row["messages"]):
            if message["role"] != "assistant":
                continue
            answer_ids = greedy_answer(loaded, row["messages"][:at], 12)
            assert message["content"] == loaded.tokenizer.decode(
                answer_ids, skip_special_tokens=True
            )
            tokens += len(answer_ids)
            cut = answer_ids[-1] != loaded.tokenizer.eos_token_id
        assert row["finish"] == ("length" if cut else "stop")
    assert summary.tokens == tokens
    manifest = json.loads((tmp_path / "new.manifest.json").read_text())
    assert "generation_prompt" in manifest["target"]["template"]
    assert manifest["sampling"]["max_new_tokens"] == 12


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_an_interrupted_run_resumes_with_the_remaining_answers(
    loaded, data, tmp_path, batch, temperature
):
    """Also with sampled answers, where a row's draws depend on the other rows of its batch."""
    sampling = Sampling(max_new_tokens=6, temperature=temperature)
    model = LocalModel(loaded, "tiny", sampling, batch)
    whole = regenerate(data, tmp_path / "whole.jsonl", model, sampling)
    for at in range(1, whole.written):

        def stop(done, so_far, at=at):
            if so_far.answered_now == at:
                raise KeyboardInterrupt

        out = tmp_path / f"cut{at}.jsonl"
        with pytest.raises(KeyboardInterrupt):
            regenerate(data, out, model, sampling, watch=stop)
        resumed = regenerate(data, out, model, sampling)
        assert resumed.written == whole.written
        assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def answer_all(*job):
    torch.set_num_threads(1)
    regenerate(*job)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_several_processes_write_the_same_file_as_one(
    loaded, data, tmp_path, monkeypatch, temperature
):
    """Also with sampled answers: rows of one batch are never split among processes."""
    monkeypatch.setattr(regenerate_module, "_SHARD_ROWS", 1)
    sampling = Sampling(max_new_tokens=6, temperature=temperature)
    model = LocalModel(loaded, "tiny", sampling, 1)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "shared.jsonl"
    regenerate(data, whole, model, sampling)
    context = multiprocessing.get_context("fork")
    job = (data, out, model, sampling)
    workers = [context.Process(target=answer_all, args=job) for _ in range(3)]
    for process in workers:
        process.start()
    for process in workers:
        process.join(60)
    assert [process.exitcode for process in workers] == [0] * 3
    assert out.read_bytes() == whole.read_bytes()


def test_the_command_with_a_local_model(tiny_target, data, tmp_path):
    out = tmp_path / "new.jsonl"
    arguments = [
        "regenerate", *data, "--out", str(out), "--target", str(tiny_target), "--batch", "4",
        "--max-new-tokens", "5", "--device", "cpu",
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1, result.output  # one row in nine failed, more than 5 %
    assert "1 failed: prompt too long" in result.output
    assert "tokens and 5 of the answer, the model takes" in result.output
    assert len(out.read_text().splitlines()) == 8
    result = CliRunner().invoke(app, [*arguments, "--max-failed-share", "0.2"])
    assert result.exit_code == 0
