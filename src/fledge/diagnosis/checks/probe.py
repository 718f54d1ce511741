"""Replay the draft over the target's own answers, as its files say and with settings changed.

A wrong setting is found by trying the right one. Every reading of the files that differs in one
setting is replayed over the same answers; if it accepts clearly more, compared slot by slot, the
setting is wrong. The best reading is kept and the others are tried again on top of it, so that two
faults do not hide each other.
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
_MIN_FIRST = 0.15  # share of correct first tokens below which no reading counts as right


@dataclass(frozen=True)
class Enough:
    """How much more a reading must accept to count as the right one."""

    share: float  # relative gain
    depths: int = DEPTHS  # drafted tokens per slot that are counted


_ENOUGH = {
    "aux-shifted": Enough(0.03),  # neighboring layers resemble each other
    # a draft that is hardly trained may gain a little from a normed state
    "norm-output": Enough(0.5),
    # from the second token on it acts like norm_output: only the first token counts
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
    # EAGLE-1: fc reads [state; embedding]; the draft predicts states before the final norm
    fc_swapped: bool = False
    final_norm: bool = False


@dataclass(frozen=True)
class Score:
    """Accepted tokens from every slot of the answers, and the acceptance over whole rounds."""

    accepted_S: np.ndarray
    acceptance: Acceptance

    @property
    def first(self) -> float:
        """Share of slots whose first drafted token is correct."""
        return float((self.accepted_S > 0).mean()) if len(self.accepted_S) else 0.0

    def clearly_below(self, other: "Score", enough: Enough) -> bool:
        """Whether the other accepts enough more, and significantly so."""
        mean, other_mean = (
            np.minimum(score.accepted_S, enough.depths).mean() for score in (self, other)
        )
        sure = self.errors_below(other, depths=enough.depths) > 4
        return bool(other_mean > (1 + enough.share) * mean) and sure and other.first > _MIN_FIRST

    def errors_below(self, other: "Score", *, depths: int = DEPTHS) -> float:
        """How much more the other accepts, in standard errors, paired by slot."""
        accepted_S, other_S = (np.minimum(score.accepted_S, depths) for score in (self, other))
        gain_S = other_S - accepted_S
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
            raise BadInput(f"a target of {target.depth} layers is too shallow for three aux layers")
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
        """The same model, capturing these layers."""
        key = tuple(layer_ids)
        if key not in self._backends:
            self._backends[key] = HFEagle3TargetModel(
                self.first.model, key, supervision="hidden", tokenizer=self.first.tokenizer,
                num_aux_layers=len(key),
            )  # fmt: skip
        return self._backends[key]

    def showing(self, layer_ids: Sequence[int], *, last_normed: bool) -> Eagle3TargetBackend:
        """Like `backend`, optionally with the last layer's state captured after the final norm."""
        backend = self.backend(layer_ids)
        return _LastNormed(backend) if last_normed else backend

    def score(
        self, draft: DraftModel, layer_ids: Sequence[int], *, last_normed: bool = False
    ) -> Score:
        return self.score_on(self.showing(layer_ids, last_normed=last_normed), draft)

    def score_on(self, backend: Eagle3TargetBackend, draft: DraftModel) -> Score:
        """Replay a draft over the answers, with the features that `backend` returns."""
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
    """A target whose last layer is captured after the final norm, as in transformers."""

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
    """EAGLE-1's fc with the columns for embedding and state swapped."""
    return torch.cat(fc_EE.chunk(2, dim=1)[::-1], dim=1)


class Probe:
    """Scores one draft under every reading of its files that differs in one setting."""

    def __init__(self, subject: Subject, draft: DraftModel, answering: Answering) -> None:
        ids, config = subject.aux_layer_ids, draft.config
        assert ids is not None
        model, info = answering.first.model, answering.first.info()
        # Any: EAGLE's parts (layers, rotary, fc, unroll) are modified and run separately here
        self.draft: Any = draft.to(next(model.parameters()).device, info.dtype)
        self.answering, self._subject = answering, subject
        self.as_written = Reading(
            tuple(ids), bool(config.norm_output), bool(config.norm_before_residual)
        )
        self._written_rotary: Any = self.draft.rotary
        self._written_norm: Any = self.draft.norm_weight
        fc: Any = self.draft.fc
        self._written_fc: Tensor = fc.weight.detach()
        self._scores: dict[Reading, Score] = {}

    def score(self, reading: Reading) -> Score:
        if reading not in self._scores:
            self._apply(reading)
            self._scores[reading] = self.answering.score(
                self.draft, reading.aux_layer_ids, last_normed=reading.last_normed
            )
            self._apply(self.as_written)
        return self._scores[reading]

    def _apply(self, reading: Reading) -> None:
        self.draft.config.norm_output = reading.norm_output
        self.draft.layers[0].norm_residual = reading.norm_before_residual
        self.draft.rotary = self._rotary(reading)
        fc = swapped_halves(self._written_fc) if reading.fc_swapped else self._written_fc
        self.draft.fc.weight.data = fc
        self.draft.norm_weight = self._final_norm if reading.final_norm else self._written_norm

    def _final_norm(self, dtype: torch.dtype) -> Tensor:
        """The effective weight of the target's final norm, however stored: the norm of ones."""
        info = self.answering.first.info()
        assert info.final_norm is not None
        norm = self.answering.first.model.get_submodule(info.final_norm.path)
        with torch.no_grad():
            weight: Tensor = norm(self._written_fc.new_ones(len(self._written_fc))).to(dtype)
        return weight

    def _rotary(self, reading: Reading) -> Any:
        rope = target_rope(self._subject)
        if not reading.target_rope or rope is None:
            return self._written_rotary
        config = copy.deepcopy(self.draft.config)
        config.rope_parameters = rope
        return Rotary(config)

    def _variants(self, reading: Reading) -> Iterator[tuple[str, Reading]]:
        """The readings that differ in one setting, each with the id of its check."""
        variants = self._eagle1_variants if self._subject.view.merges else self._eagle3_variants
        yield from variants(reading)
        rope, expected_rope = own_rope(self._subject), target_rope(self._subject)
        if expected_rope is not None and rope != expected_rope and not reading.target_rope:
            yield "rope-measured", replace(reading, target_rope=True)

    def _eagle1_variants(self, reading: Reading) -> Iterator[tuple[str, Reading]]:
        yield "fc-swapped", replace(reading, fc_swapped=not reading.fc_swapped)
        before_norm = replace(reading, aux_layer_ids=(self._subject.target.depth - 1,))
        yield "capture-measured", before_norm
        norm = self.answering.first.info().final_norm
        if norm is not None and norm.kind.endswith("RMSNorm"):
            yield "capture-measured", replace(before_norm, final_norm=True)

    def _eagle3_variants(self, reading: Reading) -> Iterator[tuple[str, Reading]]:
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
        """The changes from the files' own reading to the best one, by the id of their check."""
        steps: dict[str, tuple[Reading, Score, Reading, Score]] = {}
        current = self.as_written
        while better := self._better(current, steps):
            name, best = better
            steps[name] = (current, self.score(current), best, self.score(best))
            current = best
        return steps

    def _better(self, current: Reading, done: Container[str]) -> tuple[str, Reading] | None:
        """The check and reading that clearly beat the current one; None if none does.

        Two readings may be nearly equal (a state normed where it leaves one depth or where it
        enters the next), so a later one must beat the earlier one too.
        """
        better = None
        for name, other in self._variants(current):
            if name in done:
                continue
            score = self.score(other)
            if not self.score(current).clearly_below(score, _ENOUGH[name]):
                continue
            if better is None or self.score(better[1]).clearly_below(score, Enough(0.05)):
                better = (name, other)
        return better

    def leaning(self, name: str) -> tuple[Reading, float] | None:
        """The most likely reading of this check, and its gain in standard errors; None if small."""
        written = self.score(self.as_written)
        others = [reading for check, reading in self._variants(self.as_written) if check == name]
        gains = [(reading, written.errors_below(self.score(reading))) for reading in others]
        best = max(gains, key=lambda pair: pair[1], default=None)
        return best if best is not None and best[1] > 2.5 else None

    @property
    def best_reading(self) -> Reading:
        """The reading with every setting corrected that decoding found wrong."""
        readings = list(self.steps.values())
        return readings[-1][2] if readings else self.as_written

    @property
    def best(self) -> Score:
        """The score of the best reading."""
        return self.score(self.best_reading)

    def matches_by_offset(self) -> dict[int, float]:
        """Share of answer slots t whose first drafted token, in the best reading, is token
        t + offset of the text."""
        reading = self.best_reading
        self._apply(reading)
        backend = self.answering.showing(reading.aux_layer_ids, last_normed=reading.last_normed)
        matches = self._matches(backend)
        self._apply(self.as_written)
        return matches

    @torch.no_grad()
    def _matches(self, backend: Eagle3TargetBackend) -> dict[int, float]:
        hits, slots = dict.fromkeys((1, 2, 3), 0), 0
        selected, device = self.draft.selected_token_ids, self.draft.device
        for answer in self.answering.answers:
            text = torch.tensor([[*answer.prompt_ids, *answer.answer_ids]])
            ones, wanted = torch.ones_like(text), torch.zeros_like(text)
            wanted[:, len(answer.prompt_ids) - 1 : text.shape[1] - 3] = 1
            if not wanted.any():
                continue
            batch = checked_answer(backend, TokenBatch(text, ones, ones))
            plan = plan_rollout(RowMasks(wanted, ones), num_depths=1, device=device)
            aux = plan.on_key_axis(batch.aux_hidden_states.to(device))
            states = self.draft.unroll(aux, plan.on_key_axis(batch.input_ids.to(device)), plan)[0]
            picked = selected[F.linear(states, self.draft.lm_head.weight).argmax(-1)].cpu()
            slot_N = plan.slot_T[plan.depths[0].slot_N].cpu()
            slots += len(slot_N)
            for offset in hits:
                hits[offset] += int((picked == text[0, slot_N + offset]).sum())
        return {offset: count / max(1, slots) for offset, count in hits.items()}
