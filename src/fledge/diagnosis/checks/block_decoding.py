"""Checks of block drafts by decoding: whether another reading of the files accepts more."""

from collections.abc import Callable, Iterator
from functools import partial

from fledge.diagnosis.checks.base import Finding, Repair, Subject, check, error, note
from fledge.diagnosis.checks.block_probe import BlockProbe, BlockReading, in_halves
from fledge.diagnosis.checks.positions import take_rope, target_rope
from fledge.diagnosis.foreign import DraftFiles

_W1, _W2 = (f"markov_head.markov_w{i}.weight" for i in (1, 2))


def _measured(
    subject: Subject,
    name: str,
    describe: Callable[[BlockReading], str],
    fix: str,
    repair: Callable[[BlockReading], Repair | None] = lambda reading: None,
) -> Iterator[Finding]:
    """An error if decoding found that another value of this setting accepts clearly more."""
    probe = subject.probe
    assert isinstance(probe, BlockProbe), "decoding checks run with a probe"
    if step := probe.steps.get(name):
        before, score, after, better = step
        yield error(f"{describe(before)}: {score}; {describe(after)}: {better}", fix, repair(after))


@check("block-layers-shifted", "behavioural", "DFlash, DSpark: aux layers one too low or too high",
       repairs=True)  # fmt: skip
def layers_shifted(subject: Subject) -> Iterator[Finding]:
    return _measured(
        subject, "block-layers-shifted",
        lambda reading: f"with the outputs of {list(reading.aux_layer_ids)}",
        "its trainer numbers layers differently than the file",
        lambda right: partial(DraftFiles.put_aux, layer_ids=list(right.aux_layer_ids)),
    )  # fmt: skip


@check("context-shifted", "behavioural", "DFlash, DSpark: features trained at the wrong token")
def context_shifted(subject: Subject) -> Iterator[Finding]:
    return _measured(
        subject, "context-shifted",
        lambda reading: f"with the features of token t at t{reading.late:+d}" if reading.late
        else "with the features of token t at t, as engines place them",
        "the context was off by one in training: train again",
    )  # fmt: skip


@check("slot-shifted", "behavioural", "DFlash, DSpark: the first token read from the wrong slot",
       repairs=True)  # fmt: skip
def slot_shifted(subject: Subject) -> Iterator[Finding]:
    def repair(right: BlockReading) -> Repair | None:
        if subject.view.method.name != "dspark":
            return None  # no engine reads a DFlash draft that way
        return partial(DraftFiles.put, key="sample_from_anchor", value=right.from_anchor)

    return _measured(
        subject, "slot-shifted",
        lambda reading: f"first token from slot {0 if reading.from_anchor else 1}",
        "its slots predict other tokens than engines assume: sample_from_anchor, or, for "
        "DFlash, labels one place off in training",
        repair,
    )  # fmt: skip


@check("rotary-layout", "behavioural", "DFlash, DSpark: rotary pairs of neighboring channels, "
       "not halves", repairs=True)  # fmt: skip
def rotary_layout(subject: Subject) -> Iterator[Finding]:
    def permute(files: DraftFiles) -> None:
        channels = files.view.get("head_dim")
        for name, tensor in in_halves(files.view.state, channels).items():
            files.put_tensor(name, tensor)

    return _measured(
        subject, "rotary-layout",
        lambda reading: "with neighboring channels paired" if reading.interleaved
        else "with halves paired, as engines do",
        "permute q_proj, k_proj and their norms",
        lambda right: permute,
    )  # fmt: skip


@check("block-rope-measured", "behavioural", "DFlash, DSpark: rotary settings with which it "
       "accepts less than with the target's", repairs=True)  # fmt: skip
def rope_measured(subject: Subject) -> Iterator[Finding]:
    rope = target_rope(subject)
    return _measured(
        subject, "block-rope-measured",
        lambda reading: f"with the {'target' if reading.target_rope else 'file'}'s rotary settings",
        "write the target's settings",
        lambda right: None if rope is None else partial(take_rope, rope=rope),
    )  # fmt: skip


@check("mask-measured", "behavioural", "DFlash, DSpark: another placeholder than in training",
       repairs=True)  # fmt: skip
def mask_measured(subject: Subject) -> Iterator[Finding]:
    return _measured(
        subject, "mask-measured",
        lambda reading: f"with token {reading.mask_token_id} as the placeholder",
        "write the id that it was trained with",
        lambda right: partial(DraftFiles.put_mask, token=right.mask_token_id),
    )  # fmt: skip


@check("block-direction-measured", "behavioural", "DFlash, DSpark: causal or two-way blocks, "
       "unlike in training")  # fmt: skip
def direction_measured(subject: Subject) -> Iterator[Finding]:
    return _measured(
        subject, "block-direction-measured",
        lambda reading: f"with {'causal' if reading.causal else 'two-way'} blocks",
        "set is_causal (vLLM, SGLang) as in training",
    )  # fmt: skip


@check("block-size-measured", "behavioural", "DFlash, DSpark: blocks of another size than trained")
def size_measured(subject: Subject) -> Iterator[Finding]:
    return _measured(
        subject, "block-size-measured",
        lambda reading: f"in blocks of {reading.block_size}",
        "serve it with the block size that it was trained with",
    )  # fmt: skip


@check("markov-swapped", "behavioural", "DSpark: the Markov head's two factors swapped",
       repairs=True)  # fmt: skip
def markov_swapped(subject: Subject) -> Iterator[Finding]:
    def swap(files: DraftFiles) -> None:
        w1, w2 = (files.view.state[name] for name in (_W1, _W2))
        files.put_tensor(_W1, w2)
        files.put_tensor(_W2, w1)

    return _measured(
        subject, "markov-swapped",
        lambda reading: f"with markov_w{2 if reading.factors_swapped else 1} as the previous "
        "token's rows",
        "exchange markov_w1 and markov_w2",
        lambda right: swap,
    )  # fmt: skip


@check("block-acceptance", "behavioural", "DFlash, DSpark: a draft that accepts nothing")
def accepts_nothing(subject: Subject) -> Iterator[Finding]:
    probe = subject.probe
    assert isinstance(probe, BlockProbe)
    repaired = " (as repaired above)" if probe.steps else ""
    evidence = f"replay of the files: {probe.best}{repaired}"
    fix = "what files do not show: labels or masks shifted, features of another request"
    yield error(evidence, fix) if probe.best.first < 0.05 else note(evidence)
