"""The draft replayed over the target's own answers, as its files say and with settings changed.

A wrong setting is found by trying the right one. Every way to read the files that differs in one
setting is replayed over the same answers; when one accepts clearly more, slot by slot, the setting
is wrong. The best is kept and the others are tried again on top of it, so that two faults do not
hide each other.
"""

import copy
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.errors import BadInput
from fledge.core.rows import TokenBatch
from fledge.diagnosis.checks.base import Subject, TargetFiles
from fledge.diagnosis.checks.positions import own_rope, target_rope
from fledge.draft.base import DraftModel
from fledge.draft.rotary import Rotary
from fledge.measure.answers import cached_answers
from fledge.measure.figures import Acceptance, Sample, acceptance
from fledge.measure.prompts import read_prompts
from fledge.measure.replay import Text, replay
from fledge.rollout.plan import plan_rollout
from fledge.rollout.slots import RowMasks
from fledge.target.base import Eagle3TargetBackend
from fledge.target.finite import checked_answer
from fledge.target.hf.model import HFEagle3TargetModel

DEPTHS = 4  # drafted tokens per slot: enough to see what a setting does to later ones
_SOME = 0.15  # of first tokens: below it no reading is the right one


@dataclass(frozen=True)
class Enough:
    """How much more a reading must accept to be the right one, counted over so many tokens."""

    share: float
    depths: int = DEPTHS


_ENOUGH = {
    "aux-shifted": Enough(0.03),  # neighboring layers resemble each other
    # a draft that is hardly trained may gain a little from a normed state
    "norm-output": Enough(0.5),
    # from the second token on it does what norm_output does: the first must tell
    "norm-residual": Enough(0.1, depths=1),
    "rope-measured": Enough(0.03),
    "capture-measured": Enough(0.03),
    "fc-swapped": Enough(0.1),
}


@dataclass(frozen=True)
class Reading:
    """One way to read the files."""

    aux_layer_ids: tuple[int, ...]
    norm_output: bool
    norm_before_residual: bool
    target_rope: bool = False  # the target's rotary settings instead of the file's
    last_normed: bool = False  # the last layer's state after the final norm
    # EAGLE-1: fc reads [state; embedding]; the draft foretells states before the final norm
    fc_swapped: bool = False
    final_norm: bool = False


@dataclass(frozen=True)
class Score:
    """Accepted tokens from every slot of the answers, and what rounds make of them."""

    accepted_S: np.ndarray
    acceptance: Acceptance

    @property
    def first(self) -> float:
        """Share of slots whose first drafted token is right."""
        return float((self.accepted_S > 0).mean()) if len(self.accepted_S) else 0.0

    def clearly_below(self, other: "Score", enough: Enough) -> bool:
        """Whether the other accepts enough more, and by more than chance."""
        own, theirs = (np.minimum(x.accepted_S, enough.depths).mean() for x in (self, other))
        sure = self.errors_below(other, depths=enough.depths) > 4
        return bool(theirs > (1 + enough.share) * own) and sure and other.first > _SOME

    def errors_below(self, other: "Score", *, depths: int = DEPTHS) -> float:
        """How much more the other accepts, in standard errors: paired over the slots."""
        own_S, other_S = (np.minimum(x.accepted_S, depths) for x in (self, other))
        gain_S = other_S - own_S
        error = float(gain_S.std()) / len(gain_S) ** 0.5
        return float(gain_S.mean()) / error if error else 0.0

    def __str__(self) -> str:
        return f"{self.first:.1%} of first tokens, length {self.acceptance.length:.2f}"


class Answering:
    """The target, loaded once, with its answers to a few prompts of the shipped set."""

    def __init__(
        self,
        target: TargetFiles,
        *,
        prompts: int = 16,
        max_new_tokens: int = 64,
        dtype: torch.dtype | str = "auto",
        device: str | None = None,
        watch: Callable[[str, float, int], None] | None = None,
    ) -> None:
        self._watch = watch or (lambda what, done, total: None)
        self._watch("loading the target", 0, 1)
        if target.depth < 3:
            raise BadInput(f"a target of {target.depth} layers has no three to listen to")
        self.first = HFEagle3TargetModel.from_pretrained(
            target.name, aux_layer_ids=[0, 1, 2], dtype=dtype, device=device,
            trust_remote_code=target.trust_remote_code,
        )  # fmt: skip
        self._backends: dict[tuple[int, ...], HFEagle3TargetModel] = {}
        answers = cached_answers(
            self.first,
            read_prompts(["mixed"], limit=prompts),
            max_new_tokens=max_new_tokens,
            on_answer=partial(self._watch, "the target answers"),
        )
        self.answers = [turn for turn in answers.turns if len(turn.answer_ids) > 2]
        if not self.answers:
            raise BadInput("the target answers none of the prompts with more than two tokens")

    def backend(self, layer_ids: Sequence[int]) -> HFEagle3TargetModel:
        """The same model, listening to these layers."""
        key = tuple(layer_ids)
        if key not in self._backends:
            self._backends[key] = HFEagle3TargetModel(
                self.first.model, key, supervision="hidden", tokenizer=self.first.tokenizer,
                num_aux_layers=len(key),
            )  # fmt: skip
        return self._backends[key]

    def showing(self, layer_ids: Sequence[int], *, last_normed: bool) -> Eagle3TargetBackend:
        """The same, and whether the last layer's state is shown after the final norm."""
        backend = self.backend(layer_ids)
        return _LastNormed(backend) if last_normed else backend

    def score(
        self, draft: DraftModel, layer_ids: Sequence[int], *, last_normed: bool = False
    ) -> Score:
        return self.score_on(self.showing(layer_ids, last_normed=last_normed), draft)

    def score_on(self, backend: Eagle3TargetBackend, draft: DraftModel) -> Score:
        """What a draft accepts of the answers, given features as `backend` shows them."""
        replays = replay(
            backend,
            draft,
            [Text(answer.prompt_ids, answer.answer_ids) for answer in self.answers],
            num_draft_tokens=DEPTHS,
            on_text=lambda done: self._watch("replaying", done, len(self.answers)),
        )
        accepted, samples = [], []
        for answer, replayed in zip(self.answers, replays, strict=True):
            length = len(answer.prompt_ids) + len(answer.answer_ids)
            accepted += replayed.accepted_T[len(answer.prompt_ids) - 1 : length - 2]
            samples.append(Sample(answer.prompt_ids, answer.answer_ids, replayed.rounds))
        return Score(np.array(accepted), acceptance(samples, DEPTHS))


class _LastNormed(Eagle3TargetBackend):
    """A target whose last layer is captured after the final norm, as transformers shows it."""

    def __init__(self, inner: HFEagle3TargetModel) -> None:
        super().__init__("hidden")
        self.inner, self.aux_layer_ids = inner, inner.aux_layer_ids

    def answer(self, rows: TokenBatch) -> Eagle3TargetBatch:
        batch = self.inner.answer(rows)
        chunks = list(batch.aux_hidden_states.chunk(len(self.aux_layer_ids), dim=-1))
        last = self.inner.info().depth - 1
        assert batch.last_hidden_states is not None
        chunks[self.aux_layer_ids.index(last)] = batch.last_hidden_states.to(chunks[0].dtype)
        return replace(batch, aux_hidden_states=torch.cat(chunks, dim=-1))

    def get_input_embeddings(self) -> Any:
        return self.inner.get_input_embeddings()

    def info(self) -> Any:
        return self.inner.info()


def swapped_halves(fc_EE: Tensor) -> Tensor:
    """EAGLE-1's fc for a state and an embedding in the other order."""
    return torch.cat(fc_EE.chunk(2, dim=1)[::-1], dim=1)


class Probe:
    """One draft's files under every reading that differs in one setting."""

    def __init__(self, subject: Subject, draft: DraftModel, answering: Answering) -> None:
        ids, config = subject.aux_layer_ids, draft.config
        assert ids is not None
        model, info = answering.first.model, answering.first.info()
        # Any: EAGLE's parts (layers, rotary, fc, unroll) are changed and run here one by one
        self.draft: Any = draft.to(next(model.parameters()).device, info.dtype)
        self.answering, self._subject = answering, subject
        self.as_written = Reading(
            tuple(ids), bool(config.norm_output), bool(config.norm_before_residual)
        )
        self._own_rotary: Any = self.draft.rotary
        self._own_norm: Any = self.draft.norm_weight
        fc: Any = self.draft.fc
        self._own_fc: Tensor = fc.weight.detach()
        self._scores: dict[Reading, Score] = {}

    def score(self, reading: Reading) -> Score:
        if reading not in self._scores:
            self._set(reading)
            self._scores[reading] = self.answering.score(
                self.draft, reading.aux_layer_ids, last_normed=reading.last_normed
            )
            self._set(self.as_written)
        return self._scores[reading]

    def _set(self, reading: Reading) -> None:
        self.draft.config.norm_output = reading.norm_output
        self.draft.layers[0].norm_residual = reading.norm_before_residual
        self.draft.rotary = self._rotary(reading)
        fc = swapped_halves(self._own_fc) if reading.fc_swapped else self._own_fc
        self.draft.fc.weight.data = fc
        self.draft.norm_weight = self._final_norm if reading.final_norm else self._own_norm

    def _final_norm(self, dtype: torch.dtype) -> Tensor:
        """What the target's final norm makes of ones: its weight, however it is written down."""
        info = self.answering.first.info()
        assert info.final_norm is not None
        norm = self.answering.first.model.get_submodule(info.final_norm.path)
        with torch.no_grad():
            weight: Tensor = norm(self._own_fc.new_ones(len(self._own_fc))).to(dtype)
        return weight

    def _rotary(self, reading: Reading) -> Any:
        rope = target_rope(self._subject)
        if not reading.target_rope or rope is None:
            return self._own_rotary
        config = copy.deepcopy(self.draft.config)
        config.rope_parameters = rope
        return Rotary(config)

    def _others(self, reading: Reading) -> Iterator[tuple[str, Reading]]:
        """Readings that differ in one setting, by the check that asks for it."""
        others = self._eagle1 if self._subject.view.merges else self._eagle3
        yield from others(reading)
        own, theirs = own_rope(self._subject), target_rope(self._subject)
        if theirs is not None and own != theirs and not reading.target_rope:
            yield "rope-measured", replace(reading, target_rope=True)

    def _eagle1(self, reading: Reading) -> Iterator[tuple[str, Reading]]:
        yield "fc-swapped", replace(reading, fc_swapped=not reading.fc_swapped)
        before = replace(reading, aux_layer_ids=(self._subject.target.depth - 1,))
        yield "capture-measured", before
        norm = self.answering.first.info().final_norm
        if norm is not None and norm.kind.endswith("RMSNorm"):
            yield "capture-measured", replace(before, final_norm=True)

    def _eagle3(self, reading: Reading) -> Iterator[tuple[str, Reading]]:
        depth = self._subject.target.depth
        for shift in (-1, 1):
            ids = tuple(layer + shift for layer in reading.aux_layer_ids)
            if all(0 <= layer < depth for layer in ids):
                yield "aux-shifted", replace(reading, aux_layer_ids=ids, last_normed=False)
        if self._subject.view.method.carries_states:
            yield "norm-output", replace(reading, norm_output=not reading.norm_output)
        residual = not reading.norm_before_residual
        yield "norm-residual", replace(reading, norm_before_residual=residual)
        if depth - 1 in reading.aux_layer_ids and not reading.last_normed:
            yield "capture-measured", replace(reading, last_normed=True)

    @cached_property
    def steps(self) -> dict[str, tuple[Reading, Score, Reading, Score]]:
        """From the files' own reading to the best: what was changed, by the check that names it."""
        steps: dict[str, tuple[Reading, Score, Reading, Score]] = {}
        here = self.as_written
        while better := self._better(here, steps):
            name, best = better
            steps[name] = (here, self.score(here), best, self.score(best))
            here = best
        return steps

    def _better(self, here: Reading, done: Container[str]) -> tuple[str, Reading] | None:
        """The reading that beats this one. Two may do so alike (a state normed where it leaves one
        depth or where it enters the next): the later must beat the earlier too."""
        better = None
        for name, other in self._others(here):
            if name in done:
                continue
            score = self.score(other)
            if not self.score(here).clearly_below(score, _ENOUGH[name]):
                continue
            if better is None or self.score(better[1]).clearly_below(score, Enough(0.05)):
                better = (name, other)
        return better

    def leaning(self, name: str) -> tuple[Reading, float] | None:
        """A reading of this kind that may be the right one, and by how many standard errors."""
        own = self.score(self.as_written)
        others = [reading for check, reading in self._others(self.as_written) if check == name]
        above = [(reading, own.errors_below(self.score(reading))) for reading in others]
        best = max(above, key=lambda pair: pair[1], default=None)
        return best if best is not None and best[1] > 2.5 else None

    @property
    def best_reading(self) -> Reading:
        """The files with everything that decoding found mended."""
        readings = list(self.steps.values())
        return readings[-1][2] if readings else self.as_written

    @property
    def best(self) -> Score:
        """What they are worth then."""
        return self.score(self.best_reading)

    def matches_by_offset(self) -> dict[int, float]:
        """Share of answer slots t whose first drafted token, as mended, is token t + offset of the
        text."""
        reading = self.best_reading
        self._set(reading)
        shown = self.answering.showing(reading.aux_layer_ids, last_normed=reading.last_normed)
        matches = self._matches(shown)
        self._set(self.as_written)
        return matches

    @torch.no_grad()
    def _matches(self, backend: Eagle3TargetBackend) -> dict[int, float]:
        hits, slots = dict.fromkeys((1, 2, 3), 0), 0
        selected, device = self.draft.selected_token_ids, self.draft.device
        for answer in self.answering.answers:
            text = torch.tensor([[*answer.prompt_ids, *answer.answer_ids]])
            real, wanted = torch.ones_like(text), torch.zeros_like(text)
            wanted[:, len(answer.prompt_ids) - 1 : text.shape[1] - 3] = 1
            if not wanted.any():
                continue
            batch = checked_answer(backend, TokenBatch(text, real, real))
            plan = plan_rollout(RowMasks(wanted, real), num_depths=1, device=device)
            aux = plan.on_key_axis(batch.aux_hidden_states.to(device))
            states = self.draft.unroll(aux, plan.on_key_axis(batch.input_ids.to(device)), plan)[0]
            picked = selected[F.linear(states, self.draft.lm_head.weight).argmax(-1)].cpu()
            slot_N = plan.slot_T[plan.depths[0].slot_N].cpu()
            slots += len(slot_N)
            for offset in hits:
                hits[offset] += int((picked == text[0, slot_N + offset]).sum())
        return {offset: count / max(1, slots) for offset, count in hits.items()}
