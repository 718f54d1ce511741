"""vLLM's own hidden-state connector as the target: in this process, and behind a `vllm serve`."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fledge
from engines.cases import assert_same_answers, engine_target
from engines.vllm.server import Server, serving_model
from fledge.core.batch import Supervision
from fledge.core.rows import TokenBatch
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.kinds import kind_of
from fledge.target.vllm.connector import connector_settings, layer_settings
from fledge.target.vllm.kind import VllmTarget
from fledge.target.vllm.runner import VLLMEagle3TargetModel, VLLMTargetRunner
from target.contract import CHECKS, Case, packed_rows, padded_rows, some_documents

pytestmark = pytest.mark.engine
AUX = [6, 0, 7]  # any order, the first layer and the last


assert_equal = partial(assert_same_answers, tolerance=1e-3)
ROWS = (padded_rows(), packed_rows(some_documents(), 14))


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
    assert_equal(through, local, long_rows(), *ROWS, long_rows())
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


@pytest.fixture(scope="module")
def server(
    engines: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Path, Path]]:
    """A `vllm serve` with prefix caching (the default) that writes the states of our layers 1, 3, 4
    and of the last."""
    engines.close()
    model, shared = engines.saved("llama"), tmp_path_factory.mktemp("states")
    with serving_model(
        model, "--dtype", "float32", "--enforce-eager", "--skip-tokenizer-init",
        "--kv-cache-memory-bytes", str(2**26),
        "--speculative-config", json.dumps(layer_settings([2, 4, 5, 8])),
        "--kv-transfer-config", json.dumps(connector_settings(shared, on_cpu=True)),
    ) as running:  # fmt: skip
        yield running, model, shared


def opened(server: tuple[Server, Path, Path], aux: list[int], **options: Any) -> Any:
    running, model, shared = server
    fields = {"model": str(model), "url": f"{running.url}/v1", "shared_dir": str(shared), **options}
    section = VllmTarget.model_validate({"aux_layer_ids": aux, **fields})
    return kind_of(section).open(section, device=torch.device("cpu"), aux_layers=3)


def test_a_server_that_fledge_did_not_start(server: Any) -> None:
    local = HFEagle3TargetModel(engine_target("llama"), [4, 1, 3], supervision="hidden")
    with opened(server, [4, 1, 3]) as target:
        assert_equal(target, local, long_rows(), *ROWS, long_rows())
        long = torch.ones((1, 256), dtype=torch.long)
        with pytest.raises(fledge.BadInput, match=r"256 tokens is longer.*\(255\)"):
            target.generate_batch(long, long, long)
    assert list(server[2].iterdir()) == []
    with pytest.raises(fledge.BadInput, match=r"4x64.*expected three layers.*\[1, 7, 8\]"):
        opened(server, AUX)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_server_keeps_the_contract(check: Any, server: Any) -> None:
    def make(supervision: Supervision) -> Any:
        return opened(server, [1, 3, 4], supervision=supervision)

    check(Case("vllm serve", engine_target("llama"), make, "hidden", rtol=1e-4, atol=1e-4))
