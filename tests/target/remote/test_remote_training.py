"""Training through servers equals local training, whatever happens to the servers."""

import copy
import json
import os
import signal
import sys
import threading
import time
import types

import pytest
import torch

from fledge.cli.main import run
from fledge.core.errors import BadInput, TargetUnreachable
from fledge.recipe.schema import load_recipe
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.kinds import engine_section
from fledge.training import fit as fit_module
from fledge.training.checkpoint import newest_checkpoint
from fledge.training.drafts import make_target
from fledge.training.fit import fit
from fledge.training.setup import set_up
from target.cache.caches import payload
from target.remote.chaos import Proxy, free_port
from target.remote.servers import Running
from train.test_fit import comparable, differing, final_weights
from train.tiny import Notes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target(tiny_target):
    return HFEagle3TargetModel.from_pretrained(
        str(tiny_target), aux_layer_ids=[0, 1, 2], dtype="float32", device="cpu"
    )


@pytest.fixture
def start(target, tiny_target):
    """Start servers of the tiny target; all of them are stopped at the end."""
    started = []

    def begin(**options):
        backend = HFEagle3TargetModel(
            copy.deepcopy(target.model), [0, 1, 2], supervision="hidden", tokenizer=target.tokenizer
        )
        started.append(Running(backend=backend, model_dir=tiny_target, **options))
        return started[-1]

    yield begin
    for server in started:
        server.stop()


def remote_recipe(recipe, urls, *overrides, run="remote", **section):
    """The same run with its target on servers."""
    plain = recipe(run=run).model_dump()
    target = {"backend": "remote", "urls": urls, "timeout_s": 20.0, "wait_s": 20.0, **section}
    sections = {name: value for name, value in plain.items() if name != "target"}
    section_overrides = [f"{name}={json.dumps(value)}" for name, value in sections.items()]
    return load_recipe(None, [f"target={json.dumps(target)}", *section_overrides, *overrides])


def train(recipe, notes=None):
    training = set_up(recipe)
    try:
        return fit(training, notes or Notes())
    finally:
        training.parts.target.close()


@pytest.mark.parametrize("options", [{}, {"prefetch": 5}], ids=str)
def test_remote_training_equals_local_training_bit_for_bit(recipe, start, tmp_path, options):
    urls = [start().url, start().url]
    overrides = ("training.accumulate=2", "training.micro_batch=1")
    train(recipe(*overrides, run="local"))
    outcome = train(remote_recipe(recipe, urls, *overrides, **options))
    assert outcome.finished
    assert differing(final_weights(tmp_path / "local"), final_weights(tmp_path / "remote")) == []
    assert comparable(tmp_path / "local") == comparable(tmp_path / "remote")


@pytest.mark.parametrize("supervision", ["probs", "topk"])
def test_training_with_probs_and_topk_supervision(recipe, start, tmp_path, supervision):
    train(recipe("target.supervision=probs", run="local"))
    notes = Notes()
    train(remote_recipe(recipe, [start().url], supervision=supervision, top_k=64), notes)
    if supervision == "probs":
        assert (
            differing(final_weights(tmp_path / "local"), final_weights(tmp_path / "remote")) == []
        )
    assert notes.lines[-1]["loss"] < notes.lines[0]["loss"]


def stop_servers_at(monkeypatch, step, *servers):
    """Stop the servers when training reaches `step`."""
    real = fit_module.train_step

    def stepping(parts, batch, **options):
        if batch.step == step:
            for server in servers:
                server.stop()
        return real(parts, batch, **options)

    monkeypatch.setattr(fit_module, "train_step", stepping)


def stop_server_in_an_evaluation(monkeypatch, server):
    real, calls = fit_module.evaluate, []

    def evaluating(*args):
        calls.append(1)
        if len(calls) == 2:  # the first evaluation precedes training
            server.stop()
        return real(*args)

    monkeypatch.setattr(fit_module, "evaluate", evaluating)


# counted from 0; an evaluation comes between steps 3 and 4
@pytest.mark.parametrize("step", [4, 5, "evaluation"])
def test_losing_all_servers_exits_and_resumes_bitwise(
    recipe, start, monkeypatch, tmp_path, step, caplog
):
    port = free_port()
    first = start(port=port)
    train(remote_recipe(recipe, [first.url], run="whole"))
    cut = remote_recipe(recipe, [first.url], run="cut", wait_s=0.5)
    notes = Notes()
    with monkeypatch.context() as patch:
        if step == "evaluation":
            stop_server_in_an_evaluation(patch, first)
        else:
            stop_servers_at(patch, step, first)
        with pytest.raises(TargetUnreachable, match="no target server answered"):
            train(cut, notes)
    assert "waiting, for" in caplog.text
    if step != "evaluation":
        checkpoint, _ = newest_checkpoint(tmp_path / "cut")
        assert checkpoint.state["step"] > step  # no trained step is lost, whatever was prefetched
        assert notes.notes[-1].startswith(f"stopped after step {checkpoint.state['step']}")
    start(port=port)
    assert train(cut).finished
    assert differing(final_weights(tmp_path / "whole"), final_weights(tmp_path / "cut")) == []
    assert comparable(tmp_path / "whole") == comparable(tmp_path / "cut")


def test_a_signal_ends_the_wait_for_a_server(recipe, start, monkeypatch, tmp_path):
    port = free_port()
    first = start(port=port)
    cut = remote_recipe(recipe, [first.url], run="cut", wait_s=60.0)
    with monkeypatch.context() as patch:
        stop_servers_at(patch, 4, first)
        timer = threading.Timer(0.0, lambda: None)
        real = fit_module.train_step

        def stepping(parts, batch, **options):
            nonlocal timer
            if batch.step == 4:
                timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
                timer.start()
            return real(parts, batch, **options)

        patch.setattr(fit_module, "train_step", stepping)
        outcome = train(cut)
        timer.join()
    assert not outcome.finished
    assert outcome.signal == signal.SIGTERM
    start(port=port)
    assert train(cut).finished


@pytest.mark.parametrize("number", [1, 2, "last"])  # the first one precedes training
@pytest.mark.parametrize("fault", ["gone", "silent"])
def test_a_signal_ends_an_evaluation_that_waits(
    recipe, start, monkeypatch, tmp_path, fault, number
):
    port = free_port()
    first = start(port=port)
    proxy = Proxy(first.port, stall_s=60.0)
    options = ("training.steps=5", "evaluation.every_steps=3")
    train(remote_recipe(recipe, [first.url], *options, run="whole"))
    waiting = {"run": "cut", "wait_s": 60.0, "timeout_s": 60.0}
    cut = remote_recipe(recipe, [proxy.url], *options, **waiting)
    real, calls, signaled = fit_module.evaluate, [], []

    def stop():
        signaled.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    def evaluating(*args):
        calls.append(1)
        if len(calls) == {"last": 3}.get(number, number):
            if fault == "gone":
                first.stop()
            proxy.mischief = {"stall": 1.0}
            threading.Timer(1.0, stop).start()
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(fit_module, "evaluate", evaluating)
        outcome = train(cut)
    assert time.monotonic() - signaled[0] < 10
    proxy.close()
    assert (outcome.finished, outcome.signal) == (False, signal.SIGTERM)
    assert outcome.state.step == {1: 0, 2: 3, "last": 5}[number]
    server = start(port=port) if fault == "gone" else first
    resumed = train(remote_recipe(recipe, [server.url], *options, run="cut"))
    assert resumed.finished
    assert not resumed.already
    assert newest_checkpoint(tmp_path / "cut")[0].finished
    assert differing(final_weights(tmp_path / "whole"), final_weights(tmp_path / "cut")) == []
    assert comparable(tmp_path / "whole") == comparable(tmp_path / "cut")


def test_the_command_reports_unreachable_servers_and_exits_with_code_2(recipe, tmp_path, capsys):
    remote = remote_recipe(recipe, [f"http://127.0.0.1:{free_port()}"], wait_s=0.2)
    path = remote.write_resolved(tmp_path / "r")
    with pytest.raises(SystemExit) as ended:
        run(["train", str(path)])
    assert ended.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("fledge: no target server answered for")


def test_the_address_may_change_but_not_the_target(recipe, start, tmp_path):
    from fledge.cli.train import check_existing

    server = start()
    train(remote_recipe(recipe, [server.url]))
    check_existing(remote_recipe(recipe, ["http://elsewhere:1"], prefetch=7, wait_s=1.0))
    with pytest.raises(BadInput, match="supervision"):
        check_existing(remote_recipe(recipe, [server.url], supervision="probs"))


def test_the_tokenizer_comes_from_the_server(recipe, start, tiny_target):
    """`target.model` is null in these recipes: the trainer has never seen the model."""
    remote = remote_recipe(recipe, [start().url])
    assert remote.target.model is None
    training = set_up(remote)
    assert training.draft.config.vocab_size == 400
    training.parts.target.close()
    named = remote_recipe(recipe, [start().url], model=str(tiny_target))
    with make_target(named, torch.device("cpu")) as target:
        assert target.aux_layer_ids == [0, 1, 2]


def test_a_cache_written_through_a_server_equals_a_local_one(recipe, start, tmp_path, tiny_target):
    remote = remote_recipe(recipe, [start().url], model=str(tiny_target))
    for name, variant in (("here", recipe()), ("there", remote)):
        path = variant.write_resolved(tmp_path / f"{name}-recipe")
        with pytest.raises(SystemExit) as ended:
            run(
                ["precompute", str(path), "--output-dir", str(tmp_path / name), "--batch-size", "3"]
            )
        assert ended.value.code == 0
    assert payload(tmp_path / "here") == payload(tmp_path / "there")


def test_engines_are_opened_by_name_with_their_own_arguments(recipe, tiny_target, monkeypatch):
    """Stand-ins replace the engines and record the arguments that those would receive."""
    received = {}

    def stand_in(engine, name):
        class Model:
            aux_layer_ids = (0, 1, 2)

            @classmethod
            def from_pretrained(cls, model, **options):
                received[engine] = model, options
                return cls()

        module = types.ModuleType(f"fledge.target.{engine}.runner")
        setattr(module, name, Model)
        monkeypatch.setitem(sys.modules, module.__name__, module)

    stand_in("sglang", "SGLangEagle3TargetModel")
    stand_in("vllm", "VLLMEagle3TargetModel")
    plain = {name: value for name, value in recipe().model_dump().items() if name != "target"}
    overrides = [f"{name}={json.dumps(value)}" for name, value in plain.items()]
    for engine in ("sglang", "vllm"):
        section = {"backend": engine, "model": str(tiny_target), "aux_layer_ids": [0, 1, 2]}
        section |= {"memory_fraction": 0.5, "tp_size": 2, "engine_args": {"page_size": 16}}
        engine_recipe = load_recipe(None, [f"target={json.dumps(section)}", *overrides])
        make_target(engine_recipe, torch.device("cpu"))
    shared = {"aux_layer_ids": (0, 1, 2), "num_aux_layers": None, "page_size": 16}
    shared |= {"dtype": "auto", "supervision": "hidden"}
    sglang = {**shared, "tp_size": 2, "mem_fraction_static": 0.5}
    vllm = {**shared, "tensor_parallel_size": 2, "gpu_memory_utilization": 0.5}
    vllm |= {"shared_dir": None, "device": torch.device("cpu")}
    assert received == {"sglang": (str(tiny_target), sglang), "vllm": (str(tiny_target), vllm)}
    with pytest.raises(BadInput, match=r"no engine 'sgl'.*did you mean 'sglang'"):
        engine_section("sgl", model="x")
