"""fledge is extensible: a method, a loss, a token head and a target kind, all defined in this file.

Each is registered here, taken through recipe check, plan, training, resumption, evaluation by
replay and lossless decoding, and removed again. Nothing in src/ refers to them.

The toy method drafts two tokens at once, each by a linear map of two of the target's layers and of
the next token's embedding: no attention, hence no cache.
"""

import json
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from fledge.cli.main import app
from fledge.core.batch import Eagle3TargetBatch
from fledge.core.head import TargetHead, target_distribution_from_hidden
from fledge.core.rows import TokenBatch
from fledge.decode.accept import Chooser, Proposal
from fledge.decode.strategy import Rollouts, RoundState, Strategy
from fledge.methods.base import Method, TrainerInputs
from fledge.methods.block.config import BlockConfig
from fledge.methods.block.heads.base import StepHead
from fledge.methods.losses.base import Loss, parameter
from fledge.methods.losses.registry import LOSSES
from fledge.methods.registry import METHODS, TOKEN_HEADS
from fledge.methods.section import ObjectiveSection
from fledge.methods.shared.draft import DraftModel
from fledge.methods.shared.objective import RolloutOutput
from fledge.recipe.schema import load_recipe
from fledge.target.base import Eagle3TargetBackend
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.kinds import TARGET_KINDS, TargetKind, TargetSection
from fledge.training.fit import fit
from fledge.training.setup import set_up
from train.test_fit import differing, final_weights, stop_after
from train.tiny import Notes

DEPTHS = 2

# --- a method ------------------------------------------------------------------------------------


class TwinDraft(DraftModel):
    """Two tokens at once from fc(aux) + embedding, with a separate matrix for each."""

    architecture = "TwinDraft"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        size, aux = config.hidden_size, config.num_aux_hidden_states * config.target_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.fc = nn.Linear(aux, size, bias=False)
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(DEPTHS))
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self._register_vocabulary(self.spec)

    def states(self, aux: Tensor, token: Tensor) -> list[Tensor]:
        """Head inputs [..., E] of both tokens, from aux states [..., 2D] and the next token."""
        joined = self.fc(aux.to(self.dtype)) + self.embed_tokens(token)
        return [torch.tanh(layer(joined)) for layer in self.layers]


@dataclass(frozen=True)
class TwinReady:
    answer: Eagle3TargetBatch
    probs_KBTW: Tensor
    charged_KBT: Tensor  # bool

    @property
    def charged_K(self) -> Tensor:  # noqa: N802
        return self.charged_KBT.flatten(1).sum(1)


class TwinObjective(nn.Module):
    """Cross entropy of both tokens with the target, where the draft vocabulary has its token."""

    depths, reads_target = DEPTHS, True

    def __init__(self, draft: TwinDraft, given: TrainerInputs) -> None:
        super().__init__()
        draft.set_vocab_mapping(given.selected_token_ids, given.selected_token_mask)
        self.draft_model, self.compute_dtype = draft, None
        self.head = TargetHead.of(given.target_head)
        self.vocabulary = given.selected_token_ids, given.selected_token_mask.bool()

    def begin_step(self, done: float) -> None:
        """All steps are alike."""

    def prepare(self, rows: TokenBatch, answer: Eagle3TargetBatch, seed: int) -> TwinReady:
        assert rows.doc_remaining is not None
        assert answer.last_hidden_states is not None
        states = answer.last_hidden_states
        probs, covered = target_distribution_from_hidden(
            states.flatten(0, 1), self.head, *self.vocabulary
        )
        probs_BTW, covered_BT = probs.unflatten(0, states.shape[:2]), covered.view(states.shape[:2])
        charged, wanted = [], []
        for depth in range(DEPTHS):  # slot t predicts at depth d what lies d slots ahead
            supervised_BT = ahead(answer.loss_mask.bool() & covered_BT, depth)
            charged.append(supervised_BT & (rows.doc_remaining > depth))
            wanted.append(ahead(probs_BTW, depth))
        return TwinReady(answer, torch.stack(wanted), torch.stack(charged))

    def totals(self, ready, world) -> None:
        """The loss depends on nothing else in the step."""

    def score(self, ready: TwinReady, normalizer: Tensor, totals: None = None) -> RolloutOutput:
        answer = ready.answer
        states = self.draft_model.states(answer.aux_hidden_states, answer.input_ids)
        logits_KBTW = self.draft_model.lm_head(torch.stack(states))
        ce_KBT = -(ready.probs_KBTW * logits_KBTW.log_softmax(-1)).sum(-1) * ready.charged_KBT
        correct_KBT = (logits_KBTW.argmax(-1) == ready.probs_KBTW.argmax(-1)) & ready.charged_KBT
        valid_KBT = ready.charged_KBT.cumprod(0).bool()
        right_KBT = correct_KBT.cumprod(0).bool()
        reached_KBT = valid_KBT & torch.cat([torch.ones_like(right_KBT[:1]), right_KBT[:-1]])
        loss_K = ce_KBT.flatten(1).sum(1)
        counts = [x.flatten(1).sum(1) for x in (ready.charged_KBT, correct_KBT, valid_KBT)]
        counts += [x.flatten(1).sum(1) for x in (reached_KBT, valid_KBT & right_KBT)]
        return RolloutOutput((loss_K / normalizer.clamp_min(1)).mean(), loss_K.detach(), *counts)


def ahead(tensor_BT: Tensor, count: int) -> Tensor:
    """[B, T, ...] shifted left by `count`, padded with zeros."""
    return torch.cat([tensor_BT[:, count:], torch.zeros_like(tensor_BT[:, :count])], dim=1)


class TwinRollouts(Rollouts):
    def unroll(self, aux_TD, ids_T, plan):
        by_token = self.draft.states(aux_TD, ids_T)
        return [by_token[depth][rows.slot_N] for depth, rows in enumerate(plan.depths)]


class TwinStrategy(Strategy):
    drafted = "twin"
    rollouts = TwinRollouts
    count = DEPTHS
    label = "two tokens at once"

    def start(self, prompts, aux_BTD):
        """There is no state."""

    def propose(self, state: RoundState, chooser: Chooser) -> Proposal:
        rows_B, last_B = torch.arange(len(state.count_B)), state.count_B - 1
        aux_BD, token_B = state.aux_BQD[rows_B, last_B], state.token_BQ[rows_B, last_B]
        steps = []
        for state_BE in self.draft.states(aux_BD, token_B):
            picked_B, top_B, probs_BW = chooser.pick(self.draft.lm_head(state_BE))
            steps.append((self.selected_W[picked_B], top_B, probs_BW))
        return Proposal.stacked(steps)


class TwinSection(ObjectiveSection):
    """Two tokens at once."""

    kind: Literal["twin"] = "twin"
    """A toy."""

    @property
    def depths(self) -> int:
        return DEPTHS


class Twin(Method):
    name, title, section = "twin", "Twin", TwinSection
    strategies: ClassVar = {"twin": TwinStrategy}
    formats: ClassVar = {}
    algorithms: ClassVar = {}

    def owns(self, config):
        return getattr(config, "twin", False)

    def draft_type(self):
        return TwinDraft

    def aux_layers(self, section=None):
        return 2

    def draft_settings(self, section, *, tokenizer, vocab_size):
        return {"twin": True, "num_aux_hidden_states": 2}

    def objective(self, draft, given, **options):
        return TwinObjective(draft, given)


# --- a loss --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Brier(Loss):
    """The squared distance between the two distributions."""

    power: float = parameter(2.0, "Of the distance, token by token.", ge=1)

    kind = "brier"

    def definition(self, logits_NW: Tensor, probs_NW: Tensor) -> Tensor:
        return ((logits_NW.softmax(-1) - probs_NW).abs() ** self.power).sum(-1)


# --- a token head of block drafts -----------------------------------------------------------------


class Remainders(StepHead):
    """A term of the logits for each remainder of the previous token's id."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.rank = config.markov_rank
        self.term = nn.Parameter(torch.empty(config.draft_vocab_size, self.rank))

    def features(self, previous_N: Tensor, state_NE: Tensor, memory_NM: Tensor | None) -> Tensor:
        return nn.functional.one_hot(previous_N % self.rank, self.rank).to(state_NE.dtype)

    @property
    def out_WR(self) -> Tensor:  # noqa: N802
        return self.term


# --- a target kind --------------------------------------------------------------------------------


class MixedTarget(TargetSection):
    """A Hugging Face model whose aux states are scaled."""

    backend: Literal["mixed"] = "mixed"
    """Registered by a test."""

    gain: float = 1.0
    """The aux states are multiplied by it."""


class MixedModel(Eagle3TargetBackend):
    def __init__(self, inner: HFEagle3TargetModel, gain: float) -> None:
        super().__init__("hidden")
        self.inner, self.gain, self.aux_layer_ids = inner, gain, inner.aux_layer_ids

    def answer(self, rows: TokenBatch) -> Eagle3TargetBatch:
        batch = self.inner.answer(rows)
        return replace(batch, aux_hidden_states=batch.aux_hidden_states * self.gain)

    def get_input_embeddings(self):
        return self.inner.get_input_embeddings()

    def info(self):
        return self.inner.info()


class MixedKind(TargetKind[MixedTarget]):
    name, section = "mixed", MixedTarget

    def open(self, section, *, device, aux_layers):
        model = HFEagle3TargetModel.from_pretrained(
            section.model,
            aux_layer_ids=section.aux_layer_ids,
            device=device,
            num_aux_layers=aux_layers,
        )
        return MixedModel(model, section.gain)


# --- from recipe to text -------------------------------------------------------------------------


@pytest.fixture
def toys():
    """Registers all of them for one test."""
    METHODS.add("twin", Twin())
    LOSSES.add("brier", Brier)
    TOKEN_HEADS.add("remainders", Remainders)
    TARGET_KINDS.add("mixed", MixedKind())
    yield
    METHODS.remove("twin")
    LOSSES.remove("brier")
    TOKEN_HEADS.remove("remainders")
    TARGET_KINDS.remove("mixed")


def run(*arguments: str) -> Any:
    """Run a verb in this process and return its JSON output."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


TOYS = {
    "method": ["objective.kind=twin", "target.aux_layer_ids=0,3"],
    "loss": ["objective.loss=brier", "objective.loss.power=2.5"],
    "token head": [
        *("objective.kind=dspark", "objective.token_head=remainders", "objective.markov_rank=6"),
        *("objective.block_size=3", "objective.listened_layers=2", "target.aux_layer_ids=0,3"),
        *("draft.layers=1", "draft.draft_vocab_size=null"),
    ],
    "target kind": ["target.backend=mixed", "target.gain=1.0"],
    "all of them": ["objective.kind=twin", "target.backend=mixed", "target.aux_layer_ids=0,3"],
}


def toys_of(training):
    """Which toys a training uses."""
    parts, draft = training.parts, training.parts.objective.draft_model
    used = {
        "method": isinstance(draft, TwinDraft),
        "loss": getattr(parts.objective, "loss", None) == Brier(power=2.5),
        "token head": isinstance(getattr(draft, "token_head", None), Remainders),
        "target kind": isinstance(parts.target, MixedModel),
    }
    return {name for name, uses in used.items() if uses}


@pytest.mark.parametrize("toy", TOYS)
def test_from_recipe_to_decoded_text(toys, recipe, tiny_target, tmp_path, monkeypatch, toy):
    def made(run):
        base = recipe(run=run).model_dump()
        sections = [f"{name}={json.dumps(section)}" for name, section in base.items()]
        replaced = ("objective=", "target=", *(["draft="] if toy == "token head" else []))
        unchanged = [text for text in sections if not text.startswith(replaced)]
        model = [f"target.model={tiny_target}", "target.aux_layer_ids=0,1,2"]
        return load_recipe(None, [*unchanged, *model, *TOYS[toy], "training.steps=8"])

    whole_recipe = made("whole")
    (tmp_path / "recipe.yaml").write_text(whole_recipe.to_yaml())
    assert run("recipe", "check", tmp_path / "recipe.yaml")["target"]
    assert run("plan", tmp_path / "recipe.yaml")["tokens"] > 0

    assert run("train", tmp_path / "recipe.yaml")["finished"]
    cut = made("cut")
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert not fit(set_up(cut), Notes()).finished
    resumed = set_up(cut)
    assert toys_of(resumed) == ({"method", "target kind"} if toy == "all of them" else {toy})
    assert fit(resumed, Notes()).finished
    assert differing(final_weights(tmp_path / "whole"), final_weights(tmp_path / "cut")) == []

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"count to {n}"}) + "\n" for n in range(4)))
    [draft] = run(
        "eval", tmp_path / "whole", "--prompts", prompts, "--live", "3", "--draft-tokens", "2",
        "--max-new-tokens", "16", "--dtype", "float32", "--device", "cpu",
    )["drafts"]  # fmt: skip
    live = draft["live"]
    assert live["same_texts"] == live["texts"] == 3  # as the target decodes without a draft
    assert live["same_rounds"] == live["compared_rounds"] > 0  # as replay predicted
