"""Exported drafts in a real vLLM: every token that it proposes is the one that we propose.

Acceptance alone does not reveal, say, wrong aux layers of an overfitted draft; proposals do. The
negative controls at the end change one thing each in a config.json, and must fail.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.cases import engine_target, greedy_texts, make_draft, train
from engines.vllm.serving import Served, serve
from fledge.decode.accept import Chooser, walk_rounds
from fledge.decode.strategy import DraftShape, RoundState, Slots, choose, send_rows
from fledge.formats.engines import serve_command
from fledge.formats.export import export_draft, read_export_record
from fledge.measure.replay import Text, replay
from fledge.methods.shared.draft import DraftModel
from fledge.target.hf.model import HFEagle3TargetModel

pytestmark = pytest.mark.engine
PROMPT, ANSWER, DEPTHS = 6, 32, 4
_NEWER = {"fc_norm": True, "norm_output": True}
_PARALLEL = {"parallel_drafting": True, "mask_token_id": 2}
_SCALED = {
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_HALF = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
_OTHER_ROPE = {"rope_type": "default", "rope_theta": 50.0}
_UNSCALED = {"rope_type": "default", "rope_theta": 10_000.0}
KINDS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "eagle3": ([1, 3, 4], {"width": 60}),
    "eagle3-chosen-layers": ([6, 0, 3], {}),  # not ascending: the export reorders fc
    "eagle3.1": ([1, 3, 4], {"width": 60, "num_hidden_layers": 2} | _NEWER),
    "p-eagle": ([0, 4, 7], {"width": 60, "num_hidden_layers": 2} | _PARALLEL),
}
EAGLE1: dict[str, tuple[list[int], dict[str, Any]]] = {
    "eagle1": ([8], {"eagle_version": 1}),
    "eagle1, two layers": ([8], {"eagle_version": 1, "num_hidden_layers": 2}),
}
UNUSUAL: dict[str, tuple[list[int], dict[str, Any]]] = {
    "wider than the target": ([1, 3, 4], {"width": 60, "hidden_size": 96}),
    "llama3 rotary": ([1, 3, 4], {"rope_parameters": _SCALED | {"rope_type": "llama3"}}),
    "yarn rotary": ([1, 3, 4], {"rope_parameters": _SCALED | {"rope_type": "yarn"}}),
    "partial rotary": ([1, 3, 4], {"rope_parameters": _HALF}),
    "q/k norms": ([1, 3, 4], {"width": 60, "num_hidden_layers": 2, "qk_norm": True}),
    "q/k norms, parallel": (
        [1, 3, 4],
        {"num_hidden_layers": 2, "qk_norm": True} | _PARALLEL,
    ),
    "biases": (
        [1, 3, 4],
        {"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True},
    ),
}


@dataclass(frozen=True)
class Trained:
    """A briefly trained draft, and texts on which its proposals are compared."""

    draft: DraftModel
    target: HFEagle3TargetModel
    directory: Path
    target_directory: Path
    texts: list[list[int]]  # longer than the decoded text, so that no round is cut short

    @property
    def prompts(self) -> list[list[int]]:
        return [text[:PROMPT] for text in self.texts]

    @property
    def answers(self) -> list[list[int]]:
        return [text[PROMPT : PROMPT + ANSWER] for text in self.texts]

    def export(self, engine: str) -> Path:
        out = self.directory.parent / f"{self.directory.name}-{engine}"
        if not out.exists():
            export_draft(
                self.directory, out, engine=engine, target=str(self.target_directory),
                num_draft_tokens=DEPTHS, without_target=True,
            )  # fmt: skip
        return out

    def serve(self, export: Path) -> Served:
        """Serve with the very command that `fledge serve` prints."""
        target = str(self.target_directory)
        command = serve_command(read_export_record(export), str(export), target=target)
        assert command[:2] == ["vllm", "serve"]
        options: dict[str, Any] = {"model": command[2]}
        if "--hf-overrides" in command:
            options["hf_overrides"] = json.loads(command[command.index("--hf-overrides") + 1])
        if "--speculative-config" in command:
            at = command.index("--speculative-config")
            options["speculative_config"] = json.loads(command[at + 1])
        return serve(self.prompts, new_tokens=ANSWER, **options)

    @torch.no_grad()
    def proposals(self, text: list[int]) -> list[list[int]]:
        """What our rollout proposes from every slot of a text, each slot as a separate row."""
        ids_1T = torch.tensor([text])
        aux_1TD = self.target.generate_batch(ids_1T, torch.ones_like(ids_1T), ids_1T * 0 + 1)
        rows = len(text) - 1
        strategy = choose(self.draft)(self.draft, DraftShape(DEPTHS))
        strategy.start([text[:1]] * rows, aux_1TD.aux_hidden_states.expand(rows, -1, -1))
        verified = [(n, text[1 : n + 1], range(n)) for n in range(1, rows + 1)]
        table_BX = send_rows(verified, ids_1T.device, width=rows)
        aux_BQD = aux_1TD.aux_hidden_states[:, :-1].expand(rows, -1, -1)
        state = RoundState(*Slots.of(table_BX), aux_BQD, strategy.reserve(rows))
        tokens: list[list[int]] = strategy.propose(state, Chooser()).token_BN.tolist()
        return tokens


def fitted(kind: str, directory: Path, target_directory: Path) -> Trained:
    """A draft of the given kind for the tiny Llama saved in `target_directory`."""
    aux, options = (KINDS | UNUSUAL | EAGLE1)[kind]
    model = engine_target("llama")
    target = HFEagle3TargetModel(model, aux, supervision="hidden", num_aux_layers=len(aux))
    draft = make_draft(model, aux, **options)
    rows = greedy_texts(model, count=10, prompt=PROMPT, answer=ANSWER + DEPTHS + 1)
    seen = rows[:8]  # texts 6 and 7 are tested again, beside two unseen ones
    train(draft, target, [(seen, torch.ones_like(seen), torch.ones_like(seen))] * 80)
    draft.eval().save_pretrained(directory)
    return Trained(draft, target, directory, target_directory, rows[6:].tolist())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: Any, engines: Any) -> Callable[[str], Trained]:
    """Drafts by kind, each trained once; engines left open by other tests are closed."""
    engines.close()

    @cache
    def make(kind: str) -> Trained:
        return fitted(kind, tmp_path_factory.mktemp("draft") / kind, engines.saved("llama"))

    return make


def compare(trained: Trained, served: Served) -> tuple[list[int], list[int]]:
    """Per depth, how many of vLLM's proposals there were and how many were ours."""
    total, equal = [0] * DEPTHS, [0] * DEPTHS
    for text, rounds in zip(trained.texts, served.proposals, strict=True):
        our_proposals = trained.proposals(text)
        known = PROMPT + 1
        for tokens in rounds:
            if known >= PROMPT + ANSWER:
                break  # proposed after the last token was decoded
            assert len(tokens) == DEPTHS
            expected = our_proposals[known - 2]  # the slot that reads the last known token
            for depth in range(DEPTHS):
                total[depth] += 1
                equal[depth] += tokens[depth] == expected[depth]
            hits = [a == b for a, b in zip(tokens, text[known:], strict=False)]
            known += 1 + ([*hits, False].index(False))
        assert known >= PROMPT + ANSWER
    return total, equal


CASES = [(kind, engine) for kind in KINDS for engine in ("vllm", "speculators")]
CASES += [(kind, "vllm") for kind in EAGLE1 | UNUSUAL]


@pytest.mark.parametrize(("kind", "engine"), CASES)
def test_vllm_proposes_what_we_propose(kind: str, engine: str, trained: Any) -> None:
    assert_parity(trained(kind), engine)


def assert_parity(draft: Trained, engine: str) -> None:
    served = draft.serve(draft.export(engine))
    total, equal = compare(draft, served)
    assert equal == total
    assert min(total) >= 20
    assert served.answers == draft.answers
    assert_counters_equal_replay(draft, served)


def assert_counters_equal_replay(trained: Trained, served: Served) -> None:
    texts = [Text(text[:PROMPT], text[PROMPT:]) for text in trained.texts]
    drafts, by_depth = 0, [0] * DEPTHS
    for result in replay(trained.target, trained.draft, texts, num_draft_tokens=DEPTHS):
        assert result.other_picks == 0
        for walked in walk_rounds(result.accepted_T, prompt=PROMPT, total=PROMPT + ANSWER):
            drafts += 1
            # vLLM counts what it verified, even past the last requested token
            for depth in range(result.accepted_T[walked.context - 2]):
                by_depth[depth] += 1
    assert served.counted["num_drafts"] == drafts
    assert served.counted["num_accepted_tokens"] == sum(by_depth)
    assert served.accepted_by_depth == by_depth
    assert 0 < sum(by_depth) < drafts * DEPTHS


def _change(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.update(values)


CONTROLS: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "aux layers": ("eagle3", _change(eagle_aux_hidden_state_layer_ids=[1, 3, 4])),
    "residual norm": ("eagle3", _change(norm_before_residual=True)),
    "rope": ("eagle3", _change(rope_theta=50.0, rope_parameters=_OTHER_ROPE)),
    "rope scaling": ("llama3 rotary", _change(rope_scaling=None, rope_parameters=_UNSCALED)),
    "output norm": ("eagle3.1", _change(norm_output=False)),
    "q/k norms": ("q/k norms", _change(rms_norm_eps=1.0)),
    "rope, eagle1": ("eagle1", _change(rope_theta=50.0, rope_parameters=_OTHER_ROPE)),
    "norm eps, eagle1": ("eagle1", _change(rms_norm_eps=10.0)),
    "aux layers, parallel": ("p-eagle", _change(eagle_aux_hidden_state_layer_ids=[2, 6, 7])),
}


def with_config(export: Path, change: Callable[[dict[str, Any]], None], place: Path) -> Path:
    """A copy of an export with a changed config."""
    shutil.copytree(export, place)
    config = json.loads((place / "config.json").read_text())
    change(config)
    (place / "config.json").write_text(json.dumps(config))
    return place


@pytest.mark.parametrize("control", CONTROLS)
def test_a_wrong_config_is_noticed(control: str, trained: Any, tmp_path: Path) -> None:
    kind, change = CONTROLS[control]
    draft: Trained = trained(kind)
    served = draft.serve(with_config(draft.export("vllm"), change, tmp_path / "broken"))
    total, equal = compare(draft, served)
    assert equal[-1] < 0.9 * total[-1]
    assert served.answers == draft.answers  # whatever is drafted, the text is the target's
