"""Checks by decoding: how much a draft accepts, and whether another reading accepts more."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.rows import TokenBatch
from fledge.formats.checks.base import Finding, Repair, Subject, check, error, note, warning
from fledge.formats.checks.probe import DEPTHS, Altered, Answering, Enough, Probe, Setting
from fledge.formats.checks.settings import take_rope, target_rope
from fledge.formats.foreign import DraftFiles
from fledge.methods.shared.draft import DraftModel
from fledge.rollout.plan import plan_rollout
from fledge.rollout.slots import RowMasks
from fledge.target.base import Eagle3TargetBackend
from fledge.target.finite_check import checked_answer
from fledge.target.hf.model import HFEagle3TargetModel


@dataclass(frozen=True)
class Reading:
    """One way to read the files of an EAGLE or P-EAGLE draft."""

    aux_layer_ids: tuple[int, ...]
    norm_output: bool
    norm_before_residual: bool
    target_rope: bool = False  # the target's rotary settings instead of the file's
    last_normed: bool = False  # the last layer's state after the final norm
    # EAGLE-1: fc reads [state; embedding]; the draft predicts states before the final norm
    fc_swapped: bool = False
    final_norm: bool = False

    @property
    def inner(self) -> bool:
        """Whether it is of a draft that reads inner states, not only the last (EAGLE-1)."""
        return len(self.aux_layer_ids) > 1


def swapped_halves(fc_EE: Tensor) -> Tensor:
    """EAGLE-1's fc with the columns for embedding and state swapped."""
    return torch.cat(fc_EE.chunk(2, dim=1)[::-1], dim=1)


def last_normed(inner: HFEagle3TargetModel) -> Altered:
    """The target with its last layer captured after the final norm, as in transformers."""

    def change(batch: Eagle3TargetBatch) -> Tensor:
        chunks = list(batch.aux_hidden_states.chunk(len(inner.aux_layer_ids), dim=-1))
        assert batch.last_hidden_states is not None
        last = inner.aux_layer_ids.index(inner.info().depth - 1)
        chunks[last] = batch.last_hidden_states.to(chunks[0].dtype)
        return torch.cat(chunks, dim=-1)

    return Altered(inner, change)


# --- settings ---------------------------------------------------------------------------------


def _flag(id: str, flag: str, vary: Callable[[Any, Any], Iterable[Any]], enough: Enough) -> Setting:
    def value(reading: Reading) -> str:
        return str(getattr(reading, flag)).lower()

    return Setting(
        id, f"{flag} set differently than in training", vary,
        lambda reading: f"{flag} {value(reading)}",
        lambda right: f"{flag}: {value(right)}",
        better=value,
        repair=lambda _, right: partial(DraftFiles.put, key=flag, value=getattr(right, flag)),
        enough=enough,
    )  # fmt: skip


def _flipped(reading: Reading, flag: str) -> Reading:
    changed: dict[str, Any] = {flag: not getattr(reading, flag)}
    return replace(reading, **changed)


def _other_norm(probe: "ChainProbe", reading: Reading) -> Iterator[Reading]:
    if probe.subject.view.method.carries_states and not probe.merges:
        yield _flipped(reading, "norm_output")


def _other_residual(probe: "ChainProbe", reading: Reading) -> Iterator[Reading]:
    if not probe.merges:
        yield _flipped(reading, "norm_before_residual")


def _swapped_fc(probe: "ChainProbe", reading: Reading) -> Iterator[Reading]:
    if probe.merges:
        yield _flipped(reading, "fc_swapped")


def _other_side_of_norm(probe: "ChainProbe", reading: Reading) -> Iterator[Reading]:
    last = probe.subject.target.depth - 1
    if probe.merges:
        before_norm = replace(reading, aux_layer_ids=(last,))
        yield before_norm
        norm = probe.answering.first.info().final_norm
        if norm is not None and norm.kind.endswith("RMSNorm"):
            yield replace(before_norm, final_norm=True)
    elif last in reading.aux_layer_ids and not reading.last_normed:
        yield replace(reading, last_normed=True)


def _take_target_rope(subject: Subject, _: object) -> Repair | None:
    rope = target_rope(subject)
    return None if rope is None else partial(take_rope, rope=rope)


def _swap_fc(files: DraftFiles) -> None:
    files.put_tensor("fc.weight", swapped_halves(files.view.state["fc.weight"]))


AUX_SHIFTED = Setting(
    "aux-shifted", "aux layers one too low or too high, by replay of both",
    lambda probe, reading: probe.shifted(reading),
    lambda reading: f"with the outputs of {list(reading.aux_layer_ids)}",
    lambda right: f"it was trained on {list(right.aux_layer_ids)}: the trainer numbers layers "
    "differently than the file",
    better=lambda reading: f"of {list(reading.aux_layer_ids)}",
    repair=lambda _, right: partial(DraftFiles.put_aux, layer_ids=list(right.aux_layer_ids)),
    enough=Enough(0.03),  # neighboring layers resemble each other
)  # fmt: skip
ROPE_MEASURED = Setting(
    "rope-measured", "rotary settings with which it accepts less than with the target's",
    lambda probe, reading: probe.other_rope(reading),
    lambda reading: "with the file's rotary settings",
    "write the target's settings",
    better=lambda reading: "with the target's",
    repair=_take_target_rope,
    enough=Enough(0.03),
)  # fmt: skip
SETTINGS = (
    AUX_SHIFTED,
    # a draft that is hardly trained may gain a little from a normed state
    _flag("norm-output", "norm_output", _other_norm, Enough(0.5)),
    # from the second token on it acts like norm_output: only the first token counts
    _flag("norm-residual", "norm_before_residual", _other_residual, Enough(0.1, depths=1)),
    ROPE_MEASURED,
    Setting(
        "fc-swapped", "EAGLE-1: fc that reads [state; embedding], not the reverse", _swapped_fc,
        lambda reading: "with fc over [embedding; state], as engines have it",
        "swap the halves of fc",
        better=lambda reading: "over [state; embedding]",
        repair=lambda _, right: _swap_fc,
        enough=Enough(0.1),
    ),
    Setting(
        "capture-measured", "training on a last state from the other side of the final norm",
        _other_side_of_norm,
        lambda reading: "with the last layer's state as engines capture it" if reading.inner
        else "with the target's last hidden state, which engines capture after its final norm",
        lambda right: "it was trained on transformers' last hidden state: train on the layer's own "
        "output" if right.inner
        else "it was trained on the last layer's own output: train on the state after the norm",
        better=lambda reading: "after the final norm" if reading.inner
        else "with the one before it",
        enough=Enough(0.03),
    ),
)  # fmt: skip
MEASURED = [setting.check() for setting in SETTINGS]


class ChainProbe(Probe[Reading]):
    settings = SETTINGS

    def __init__(self, subject: Subject, draft: DraftModel, answering: Answering) -> None:
        ids, config = subject.aux_layer_ids, draft.config
        assert ids is not None
        written = Reading(tuple(ids), bool(config.norm_output), bool(config.norm_before_residual))
        super().__init__(subject, draft, answering, written)
        self.merges = subject.view.merges
        self._written_norm = self.draft.norm_weight
        self._written_fc: Tensor = self.draft.fc.weight.detach()

    def apply(self, reading: Reading) -> None:
        self.draft.spec = replace(self.draft.spec, norm_output=reading.norm_output)
        self.draft.layers[0].norm_residual = reading.norm_before_residual
        self.draft.rotary = self.rotary(reading)
        fc = swapped_halves(self._written_fc) if reading.fc_swapped else self._written_fc
        self.draft.fc.weight.data = fc
        self.draft.norm_weight = self._final_norm if reading.final_norm else self._written_norm

    def backend(self, reading: Reading) -> Eagle3TargetBackend:
        backend = self.answering.backend(reading.aux_layer_ids)
        return last_normed(backend) if reading.last_normed else backend

    def _final_norm(self, dtype: torch.dtype) -> Tensor:
        """The effective weight of the target's final norm, however stored: the norm of ones."""
        info = self.answering.first.info()
        assert info.final_norm is not None
        norm = self.answering.first.model.get_submodule(info.final_norm.path)
        with torch.no_grad():
            weight: Tensor = norm(self._written_fc.new_ones(len(self._written_fc))).to(dtype)
        return weight

    def shifted(self, reading: Reading) -> Iterator[Reading]:
        others = () if self.merges else super().shifted(reading)
        return (replace(other, last_normed=False) for other in others)

    @torch.no_grad()
    def matches_by_offset(self) -> dict[int, float]:
        """Share of answer slots t whose first drafted token, in the best reading, is token
        t + offset of the text."""
        reading = self.best_reading
        self.apply(reading)
        backend = self.backend(reading)
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
        self.apply(self.as_written)
        return {offset: count / max(1, slots) for offset, count in hits.items()}


def _probe(subject: Subject) -> ChainProbe:
    assert isinstance(subject.probe, ChainProbe), "behavioral checks run with a probe"
    return subject.probe


# --- checks --------------------------------------------------------------------------------------


@check("labels", "behavioural", "a draft that predicts the token before or after the one it should")
def labels(subject: Subject) -> Iterator[Finding]:
    shares = _probe(subject).matches_by_offset()
    best = max(shares, key=lambda offset: shares[offset])
    if best != 2 and shares[best] > max(0.3, shares[2] + 0.2):
        what = "the token it was just given" if best == 1 else "the token after the next"
        yield error(
            f"{shares[best]:.1%} of its first tokens are {what} in the text; "
            f"{shares[2]:.1%} are the next",
            fix="labels were not shifted with the inputs in training: train again",
        )


@check("estimate", "behavioural", "a training estimate that decoding does not confirm")
def estimate(subject: Subject) -> Iterator[Finding]:
    claim, real = subject.estimate, _probe(subject).best.first
    if claim is not None and claim > real + 0.25:
        yield warning(
            f"training says {claim:.1%} of first tokens are right, the files give {real:.1%} on "
            "the shipped prompts",
            fix="too good to be true: a leaking mask or the training rows themselves; or prompts "
            "unlike the data: run fledge eval --prompts on held-out chats",
        )


@check("acceptance", "behavioural", "a draft that accepts nothing, whatever else is right")
def accepts_nothing(subject: Subject) -> Iterator[Finding]:
    probe = subject.probe
    assert probe is not None
    score, repaired = probe.best, " (as repaired above)" if probe.steps else ""
    rounds = f"{score.acceptance.rounds} rounds of {DEPTHS} drafted tokens{repaired}"
    evidence = f"replay of the files: {score}, {rounds}"
    fix = (
        "what files do not show: labels or masks shifted, hidden states of another request, "
        "truncated answers, a leaking mask in training; `fledge data preview` shows what was "
        "supervised"
    )
    yield error(evidence, fix) if score.first < 0.05 else note(evidence)
