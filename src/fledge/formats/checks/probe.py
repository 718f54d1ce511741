"""Checks by decoding: replay a draft over the target's answers, with settings changed one by one.

A wrong setting is found by trying the right one. Every reading of the files that differs in one
setting is replayed over the same answers; if it accepts clearly more, compared slot by slot, the
setting is wrong. The best reading is kept and the others are tried again on top of it, so that two
faults do not hide each other.
"""

import copy
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from fledge.core.errors import BadInput
from fledge.core.progress import Watch, unwatched
from fledge.formats.checks.base import (
    Finding,
    Repair,
    Subject,
    TargetFiles,
    error,
    note,
    warning,
)
from fledge.formats.checks.settings import own_rope, take_rope, target_rope
from fledge.formats.foreign import DraftFiles
from fledge.measure.answers import cached_answers, read_prompts
from fledge.measure.figures import Acceptance, acceptance
from fledge.measure.replay import Text, replay
from fledge.methods.shared.draft import DraftModel
from fledge.methods.shared.rotary import Rotary
from fledge.target.base import Eagle3TargetBackend
from fledge.target.hf.model import HFEagle3TargetModel

DEPTHS = 4  # drafted tokens per slot: enough to see what a setting does to later ones
_MIN_FIRST = 0.15  # share of correct first tokens below which no reading counts as right


@dataclass(frozen=True)
class Score:
    """Accepted tokens from every slot of the answers, and the acceptance over whole rounds."""

    accepted_S: np.ndarray
    acceptance: Acceptance

    @property
    def first(self) -> float:
        """Share of slots whose first drafted token is correct."""
        return float((self.accepted_S > 0).mean()) if len(self.accepted_S) else 0.0

    def clearly_below(self, other: "Score", gain: float, depths: int = DEPTHS) -> bool:
        """Whether the other accepts more by this share, and significantly so."""
        mean, other_mean = (np.minimum(s.accepted_S, depths).mean() for s in (self, other))
        sure = self.errors_below(other, depths) > 4
        return bool(other_mean > (1 + gain) * mean) and sure and other.first > _MIN_FIRST

    def errors_below(self, other: "Score", depths: int) -> float:
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
        watch: Watch = unwatched,
    ) -> None:
        self._watch = watch
        watch("loading the target", 0, 1)
        if target.depth < 3:
            raise BadInput(f"a target of {target.depth} layers is too shallow for three aux layers")
        self.first = HFEagle3TargetModel.from_pretrained(
            target.name, aux_layer_ids=[0, 1, 2], dtype=dtype, device=device,
            trust_remote_code=target.trust_remote_code,
        )  # fmt: skip
        self._backends: dict[tuple[int, ...], HFEagle3TargetModel] = {}
        asked = read_prompts(["mixed"], limit=prompts)
        answers = cached_answers(self.first, asked, max_new_tokens=max_new_tokens, watch=watch)
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

    def score(self, backend: Eagle3TargetBackend, draft: DraftModel) -> Score:
        """Replay a draft over the answers, with the features that `backend` returns."""
        texts = [Text(answer.prompt_ids, answer.answer_ids) for answer in self.answers]
        replays = replay(
            backend, draft, texts, num_draft_tokens=DEPTHS,
            on_text=lambda done: self._watch("replaying", done, len(texts)),
        )  # fmt: skip
        accepted: list[int] = []
        for text in replays:
            accepted += text.accepted_T[len(text.prompt_ids) - 1 : len(text) - 2]
        return Score(np.array(accepted), acceptance(replays, DEPTHS))


@dataclass(frozen=True)
class Reading:
    """One way to read the files."""

    aux_layer_ids: tuple[int, ...]
    norm_output: bool
    norm_before_residual: bool
    target_rope: bool = False  # the target's rotary settings instead of the file's


@dataclass(frozen=True)
class Setting:
    """A setting that the files may have wrong: an error if the draft accepts clearly more with
    another value."""

    name: str
    vary: Callable[["Probe", Reading], Iterator[Reading]]  # readings that differ in it
    describe: Callable[[Reading], str]  # what a reading says about it
    fix: str
    repair: Callable[[Subject, Reading], Repair | None]  # given the better reading
    gain: float = 0.05  # by which share a reading must accept more to count as the right one
    depths: int = DEPTHS  # drafted tokens per slot that are counted


def _shifted(probe: "Probe", reading: Reading) -> Iterator[Reading]:
    """The layers one below and one above; EAGLE-1 reads the last state."""
    for shift in () if probe.subject.view.merges else (-1, 1):
        ids = tuple(layer + shift for layer in reading.aux_layer_ids)
        if all(0 <= layer < probe.subject.target.depth for layer in ids):
            yield replace(reading, aux_layer_ids=ids)


def _other_rope(probe: "Probe", reading: Reading) -> Iterator[Reading]:
    rope, expected_rope = own_rope(probe.subject), target_rope(probe.subject)
    if expected_rope is not None and rope != expected_rope and not reading.target_rope:
        yield replace(reading, target_rope=True)


def _flag(name: str, flag: str, *, gain: float, depths: int = DEPTHS) -> Setting:
    def flipped(probe: "Probe", reading: Reading) -> Iterator[Reading]:
        view = probe.subject.view
        if not probe.has_flags or (flag == "norm_output" and not view.method.carries_states):
            return
        changed: dict[str, Any] = {flag: not getattr(reading, flag)}
        yield replace(reading, **changed)

    return Setting(
        name, flipped, lambda reading: f"{flag} {str(getattr(reading, flag)).lower()}",
        f"write the {flag} that it was trained with",
        lambda _, right: partial(DraftFiles.put, key=flag, value=getattr(right, flag)),
        gain=gain, depths=depths,
    )  # fmt: skip


SETTINGS = (
    Setting(
        "aux-shifted", _shifted, lambda reading: f"with the outputs of {[*reading.aux_layer_ids]}",
        "the trainer numbers layers differently than the file: write those that it was trained on",
        lambda _, right: partial(DraftFiles.put_aux, layer_ids=list(right.aux_layer_ids)),
        gain=0.03,  # neighboring layers resemble each other
    ),
    # a draft that is hardly trained may gain a little from a normed state
    _flag("norm-output", "norm_output", gain=0.5),
    # from the second token on it acts like norm_output: only the first token counts
    _flag("norm-residual", "norm_before_residual", gain=0.1, depths=1),
    Setting(
        "rope-measured", _other_rope,
        lambda reading: f"with the {'target' if reading.target_rope else 'file'}'s rotary settings",
        "write the target's settings", lambda subject, _: take_rope(subject), gain=0.03,
    ),
)  # fmt: skip


class Step(NamedTuple):
    """A change of one setting with which the draft accepts clearly more."""

    setting: Setting
    before: Reading
    after: Reading


class Probe:
    """Scores one draft under every reading of its files that differs in one setting."""

    def __init__(self, subject: Subject, draft: DraftModel, answering: Answering) -> None:
        ids, spec = subject.aux_layer_ids, draft.spec
        assert ids is not None
        model, info = answering.first.model, answering.first.info()
        # Any: a draft's parts (layers, rotary) are changed here
        self.draft: Any = draft.to(next(model.parameters()).device, info.dtype)
        self.draft.borrow_from(answering.first)
        self.answering, self.subject = answering, subject
        self.as_written = Reading(tuple(ids), spec.norm_output, spec.norm_before_residual)
        self.has_flags = not subject.view.merges and not subject.view.borrows
        self._written_rotary: Any = self.draft.rotary
        self._scores: dict[Reading, Score] = {}

    def score(self, reading: Reading) -> Score:
        if reading not in self._scores:
            self._apply(reading)
            backend = self.answering.backend(reading.aux_layer_ids)
            self._scores[reading] = self.answering.score(backend, self.draft)
            self._apply(self.as_written)
        return self._scores[reading]

    def _apply(self, reading: Reading) -> None:
        """Make the draft compute by this reading."""
        if self.has_flags:
            self.draft.spec = replace(self.draft.spec, norm_output=reading.norm_output)
            self.draft.layers[0].norm_residual = reading.norm_before_residual
        self.draft.rotary = self._written_rotary
        if reading.target_rope:
            config = copy.deepcopy(self.draft.config)
            config.rope_parameters = target_rope(self.subject)
            self.draft.rotary = Rotary(config)

    @cached_property
    def steps(self) -> list[Step]:
        """The changes from the files' own reading to the best one."""
        steps: list[Step] = []
        current = self.as_written
        while better := self._better(current, [step.setting for step in steps]):
            steps.append(better)
            current = better.after
        return steps

    def _better(self, current: Reading, done: Container[Setting]) -> Step | None:
        """The change that clearly beats the current reading; None if none does.

        Two readings may be nearly equal (a state normed where it leaves one depth or where it
        enters the next), so a later one must beat the earlier one too.
        """
        better: Step | None = None
        for setting in SETTINGS:
            for other in setting.vary(self, current) if setting not in done else ():
                score = self.score(other)
                if not self.score(current).clearly_below(score, setting.gain, setting.depths):
                    continue
                if better is None or self.score(better.after).clearly_below(score, 0.05):
                    better = Step(setting, current, other)
        return better

    @property
    def best(self) -> Score:
        """The score with every setting corrected that decoding found wrong."""
        return self.score(self.steps[-1].after if self.steps else self.as_written)

    def findings(self, estimate: float | None) -> Iterator[Finding]:
        """The settings that are wrong, and then what the draft accepts. `estimate` is the share of
        correct first tokens in training, if recorded."""
        for setting, before, after in self.steps:
            yield error(
                f"{setting.describe(before)}: {self.score(before)}; "
                f"{setting.describe(after)}: {self.score(after)}",
                setting.fix,
                setting.repair(self.subject, after),
                check=setting.name,
            )
        yield replace(self._acceptance(estimate), check="acceptance")

    def _acceptance(self, estimate: float | None) -> Finding:
        score, repaired = self.best, " (as repaired)" if self.steps else ""
        rounds = f"{score.acceptance.rounds} rounds of {DEPTHS} drafted tokens{repaired}"
        evidence = f"replay of the files: {score}, {rounds}"
        if score.first < 0.05:
            return error(
                evidence,
                "what files do not show: labels or masks shifted, hidden states of another "
                "request, truncated answers, a leaking mask in training; `fledge data preview` "
                "shows what was supervised",
            )
        if estimate is not None and estimate > score.first + 0.25:
            return warning(
                f"{evidence}; training says {estimate:.1%} of first tokens are right",
                "too good to be true: a leaking mask or the training rows themselves; or prompts "
                "unlike the data: run fledge eval --prompts on held-out chats",
            )
        return note(evidence)
