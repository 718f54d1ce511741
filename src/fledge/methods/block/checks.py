"""Checks of block drafts (DFlash, DSpark): by their files, and by decoding with other readings.

Engines load most of these faults without a warning: a missing norm stays at ones, a wrong mask
token is embedded like any other, and acceptance falls to that of a random draft.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.errors import BadInput
from fledge.formats.checks.base import (
    Finding,
    Repair,
    Subject,
    check,
    error,
    wrong_key,
)
from fledge.formats.checks.behaviour import AUX_SHIFTED, ROPE_MEASURED
from fledge.formats.checks.probe import Altered, Answering, Enough, Probe, Score, Setting
from fledge.formats.codec import set_path
from fledge.formats.foreign import DraftFiles
from fledge.methods.block.foreign import BlockView
from fledge.methods.shared.draft import DraftModel
from fledge.methods.shared.placeholder import choose_placeholder
from fledge.target.base import Eagle3TargetBackend
from fledge.target.hf.model import HFEagle3TargetModel

_W1, _W2 = (f"markov_head.markov_w{i}.weight" for i in (1, 2))
_SPEC_TOKENS = "speculators_config.proposal_methods.0.speculative_tokens"


def view_of(subject: Subject) -> BlockView:
    assert isinstance(subject.view, BlockView)
    return subject.view


@check("markov-transposed", "static", "DSpark: a transposed factor of the Markov head",
       repairs=True)  # fmt: skip
def markov_transposed(subject: Subject) -> Iterator[Finding]:
    view = view_of(subject)
    rank = view.setting("markov_rank")
    rows = {_W1: subject.vocab_size, _W2: subject.draft_vocab_size or subject.vocab_size}
    for name, count in rows.items():
        factor = view.state.get(name)
        if factor is None or factor.ndim != 2 or type(rank) is not int or rank == count:
            continue
        if tuple(factor.shape) == (rank, count):
            yield error(
                f"{name} is {list(factor.shape)}: engines read [tokens, rank] = {[count, rank]}",
                fix="transpose it",
                repair=partial(DraftFiles.put_tensor, own=name, value=factor.t().contiguous()),
            )
        elif tuple(factor.shape) != (count, rank):
            evidence = (
                f"{name} is {list(factor.shape)}, not [tokens, markov_rank] = {[count, rank]}"
            )
            yield error(evidence, fix="was it trained for another target or rank?")


@check("block-size", "static", "DFlash, DSpark: a block size that is absent, or does not match "
       "the tokens that a round proposes", repairs=True)  # fmt: skip
def block_size(subject: Subject) -> Iterator[Finding]:
    view = view_of(subject)
    size, first = view.setting("block_size"), view.first_place
    stated = view.stated_tokens
    if type(size) is not int or size <= first:
        certain = stated is not None
        repair = partial(DraftFiles.put, key="block_size", value=(stated or 0) + first)
        fix = f"block_size: {stated + first}" if stated else "the size that it was trained with"
        yield error(f"block_size is {size}", fix, repair if certain else None)
    elif stated is not None and stated != size - first:
        yield error(
            f"blocks of {size} slots propose {size - first} tokens, the file says {stated}: a "
            "block of another length is served than was trained",
            fix=f"speculative_tokens: {size - first}",
            repair=lambda files: set_path(files.config, _SPEC_TOKENS, size - first),
        )


@check("target-depth", "static", "DFlash, DSpark: num_target_layers other than the target's",
       repairs=True)  # fmt: skip
def target_depth(subject: Subject) -> Iterator[Finding]:
    count, depth = view_of(subject).setting("num_target_layers"), subject.target.depth
    if count is not None and count != depth:
        evidence = f"num_target_layers is {count}, the target has {depth}"
        yield wrong_key("num_target_layers", depth, evidence)


@check("block-direction", "static", "DFlash: a key that makes vLLM serve causal blocks",
       repairs=True)  # fmt: skip
def direction(subject: Subject) -> Iterator[Finding]:
    view = view_of(subject)
    if view.get("sliding_window_non_causal") is False and not view.sliding_layers:
        evidence = (
            "sliding_window_non_causal is false: the trainer means sliding layers, of which there "
            "are none; vLLM 0.32 applies it to all layers, and slots no longer see later ones"
        )
        put = partial(DraftFiles.put, key="sliding_window_non_causal", value=None)
        yield subject.only_for("vllm", error(evidence, "leave the key out", put))


@check("confidence-flags", "static", "DSpark: a confidence head whose flag and tensors disagree",
       repairs=True)  # fmt: skip
def confidence_flags(subject: Subject) -> Iterator[Finding]:
    view = view_of(subject)
    if not view.spark or view.layout.name == "fledge":
        return
    present, declared = (
        view.confidence_head,
        view.setting("enable_confidence_head", view.setting("use_confidence_head", False)),
    )
    if present != declared:
        evidence = f"enable_confidence_head is {str(declared).lower()}, the file has " + (
            "such a head: vLLM drops it" if present else "none"
        )
        yield wrong_key("enable_confidence_head", present, evidence)
    weight, width = view.state.get("confidence_head.proj.weight"), view.state.get("norm.weight")
    if weight is not None and width is not None and weight.ndim == 2:
        reads_both = weight.shape[1] > len(width)
        by_default = view.setting("use_confidence_head", False)  # ModelOpt's always reads both
        if declared and reads_both != bool(view.setting("confidence_head_with_markov", by_default)):
            evidence = f"the confidence head reads {weight.shape[1]} values, the states have "
            evidence += (
                f"{len(width)}: confidence_head_with_markov is {str(not reads_both).lower()}"
            )
            yield wrong_key("confidence_head_with_markov", reads_both, evidence)


# --- readings ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockReading:
    """One way to read the files."""

    aux_layer_ids: tuple[int, ...]
    mask: int
    block_size: int
    from_anchor: bool  # slot 0 predicts the first token
    causal: bool
    late: int = 0  # training used the features of token t as those of token t + late
    interleaved: bool = False  # rotary pairs channels 2i and 2i + 1
    target_rope: bool = False
    factors_swapped: bool = False  # of the Markov head


def late(inner: HFEagle3TargetModel, by: int) -> Altered:
    """The target with its features shifted by some tokens; negative is early."""

    def change(batch: Eagle3TargetBatch) -> Tensor:
        return batch.aux_hidden_states.roll(by, dims=1)

    return Altered(inner, change)


def in_halves(state: dict[str, Tensor], channels: int) -> dict[str, Tensor]:
    """q and k of every layer, permuted from rotary pairs of neighbors to rotary halves."""
    order = torch.cat([torch.arange(0, channels, 2), torch.arange(1, channels, 2)])
    permuted = {}
    for name, tensor in state.items():
        if name.endswith(("self_attn.q_proj.weight", "self_attn.k_proj.weight")):
            by_head = tensor.view(-1, channels, tensor.shape[1])
            permuted[name] = by_head[:, order.to(tensor.device)].reshape(tensor.shape).contiguous()
        elif name.endswith(("self_attn.q_norm.weight", "self_attn.k_norm.weight")):
            permuted[name] = tensor[order.to(tensor.device)]
    return permuted


# --- settings ------------------------------------------------------------------------------------


def _anchor(subject: Subject, right: BlockReading) -> Repair | None:
    if subject.view.method.name != "dspark":
        return None  # no engine reads a DFlash draft that way
    return partial(DraftFiles.put, key="sample_from_anchor", value=right.from_anchor)


def _permute(files: DraftFiles) -> None:
    for name, tensor in in_halves(files.view.state, files.view.get("head_dim")).items():
        files.put_tensor(name, tensor)


def _swap_factors(files: DraftFiles) -> None:
    w1, w2 = (files.view.state[name] for name in (_W1, _W2))
    files.put_tensor(_W1, w2)
    files.put_tensor(_W2, w1)


def _other_sizes(probe: "BlockProbe", reading: BlockReading) -> Iterator[BlockReading]:
    for size in (2 * reading.block_size, reading.block_size // 2):
        if 2 < size <= 64:
            yield replace(reading, block_size=size)


def _other_factors(probe: "BlockProbe", reading: BlockReading) -> Iterator[BlockReading]:
    state = probe.state
    if _W1 in state and state[_W1].shape == state[_W2].shape:
        yield replace(reading, factors_swapped=not reading.factors_swapped)


SETTINGS = (
    AUX_SHIFTED,
    Setting(
        "context-shifted", "DFlash, DSpark: features trained at the wrong token",
        lambda _, reading: (replace(reading, late=by) for by in (-1, 1)),
        lambda reading: f"with the features of token t at t{reading.late:+d}" if reading.late
        else "with the features of token t at t, as engines place them",
        "the context was off by one in training: train again",
    ),
    Setting(
        "slot-shifted", "DFlash, DSpark: the first token read from the wrong slot",
        lambda _, reading: [replace(reading, from_anchor=not reading.from_anchor)],
        lambda reading: f"first token from slot {0 if reading.from_anchor else 1}",
        "its slots predict other tokens than engines assume: sample_from_anchor, or, for "
        "DFlash, labels one place off in training",
        repair=_anchor,
    ),
    Setting(
        "rotary-layout", "DFlash, DSpark: rotary pairs of neighboring channels, not halves",
        lambda _, reading: [replace(reading, interleaved=not reading.interleaved)],
        lambda reading: "with neighboring channels paired" if reading.interleaved
        else "with halves paired, as engines do",
        "permute q_proj, k_proj and their norms",
        repair=lambda _, right: _permute,
    ),
    ROPE_MEASURED,
    Setting(
        "mask-measured", "DFlash, DSpark: another placeholder than in training",
        lambda probe, reading: (replace(reading, mask=token) for token in probe.mask_candidates),
        lambda reading: f"with token {reading.mask} as the placeholder",
        "write the id that it was trained with",
        repair=lambda _, right: partial(DraftFiles.put_mask, token=right.mask),
    ),
    Setting(
        "block-direction-measured", "DFlash, DSpark: causal or two-way blocks, unlike in training",
        lambda _, reading: [replace(reading, causal=not reading.causal)],
        lambda reading: f"with {'causal' if reading.causal else 'two-way'} blocks",
        "set is_causal (vLLM, SGLang) as in training",
        enough=Enough(0.03),
    ),
    Setting(
        "block-size-measured", "DFlash, DSpark: blocks of another size than trained", _other_sizes,
        lambda reading: f"in blocks of {reading.block_size}",
        "serve it with the block size that it was trained with",
        enough=Enough(0.1),
    ),
    Setting(
        "markov-swapped", "DSpark: the Markov head's two factors swapped", _other_factors,
        lambda reading: f"with markov_w{2 if reading.factors_swapped else 1} as the previous "
        "token's rows",
        "exchange markov_w1 and markov_w2",
        repair=lambda _, right: _swap_factors,
    ),
)  # fmt: skip
MEASURED = [setting.check() for setting in SETTINGS]


class BlockProbe(Probe[BlockReading]):
    """Readings differ in the source of the features, the mask token, the slot that predicts the
    first token, the rotary settings, the size of blocks and their attention direction, and the
    order of the Markov head's factors."""

    settings = SETTINGS

    def __init__(self, subject: Subject, draft: DraftModel, answering: Answering) -> None:
        config = draft.config
        written = BlockReading(
            tuple(config.aux_layer_ids), config.mask_token_id, config.block_size,
            config.sample_from_anchor, config.causal,
        )  # fmt: skip
        super().__init__(subject, draft, answering, written)
        self.draft.borrow_from(answering.first)
        self.state = {name: tensor.clone() for name, tensor in self.draft.state_dict().items()}

    def backend(self, reading: BlockReading) -> Eagle3TargetBackend:
        backend = self.answering.backend(reading.aux_layer_ids)
        return late(backend, reading.late) if reading.late else backend

    def beats(self, best: Score, score: Score) -> bool:
        return bool(score.accepted_S.mean() > best.accepted_S.mean())

    def apply(self, reading: BlockReading) -> None:
        self.draft.spec = replace(
            self.draft.spec, mask_token_id=reading.mask, block_size=reading.block_size,
            sample_from_anchor=reading.from_anchor, causal=reading.causal,
        )  # fmt: skip
        self.draft.rotary = self.rotary(reading)
        state = dict(self.state)
        if reading.interleaved:
            state |= in_halves(state, self.draft.spec.head_dim)
        if reading.factors_swapped:
            state |= {_W1: state[_W2], _W2: state[_W1]}
        self.draft.load_state_dict(state)

    @cached_property
    def mask_candidates(self) -> list[int]:
        """Tokens that trainers commonly use as the mask token, except the one in the files."""
        tokenizer, full = self.subject.target.tokenizer, self.subject.vocab_size
        candidates: list[int | None] = [full - 1, 0]
        if tokenizer is not None:
            names = ("mask_token_id", "pad_token_id", "unk_token_id", "eos_token_id")
            candidates += [getattr(tokenizer, name, None) for name in names]
            with suppress(BadInput):
                candidates.append(choose_placeholder(tokenizer, full))
        valid = [i for i in dict.fromkeys(candidates) if i is not None and 0 <= i < full]
        return [i for i in valid if i != self.as_written.mask]
