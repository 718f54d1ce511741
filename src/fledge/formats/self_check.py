"""Check that an export does what training measured, before its directory gets its final name:
tensors and flags as the engine reads them, the run's held-out rows, and held-out prompts decoded
live (docs/export.md).
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fledge.core.distributed import pick_device
from fledge.core.errors import BadInput
from fledge.core.progress import Watch
from fledge.core.rows import TokenBatch
from fledge.data.template import ChatTemplate
from fledge.decode.speculative import Generation, SpeculativeDecoder
from fledge.decode.stops import Stops, eos_token_ids
from fledge.decode.strategy import DraftShape, choose, rollouts_of
from fledge.formats.codec import Format, PlainDraft
from fledge.formats.quantise import decoded
from fledge.formats.reread import (
    Reread,
    TargetSide,
    differing_flags,
    differing_tensors,
    reread,
    without_head,
)
from fledge.formats.source import DraftSource
from fledge.measure.answers import encode_prompt, read_prompts
from fledge.measure.evaluation import check_fits
from fledge.measure.figures import (
    Acceptance,
    Sample,
    acceptance,
    definition,
    every_slot_length,
)
from fledge.measure.replay import Text, answers_of, replay, replay_held_out, target_picks
from fledge.methods.registry import method_of
from fledge.methods.shared.draft import DraftModel
from fledge.target.base import Eagle3TargetBackend
from fledge.target.finite_check import checked_answer
from fledge.target.hf.kind import HF, HfTarget
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.kinds import kind_of
from fledge.target.layers import longest_text
from fledge.training.drafts import make_target
from fledge.training.setup import compute_dtype, held_out_batches, known_data, prepare_data

SAME_ROWS = 0.02  # of the acceptance length: allowed for rounding on another device
SLACK = 0.1  # tokens by which a small sample may also fall short of the estimate
LIVE_ROUNDS = 0.95  # share of live rounds that must match replay (near ties round either way)

_REPORT = "nothing was left behind; please report this"


@dataclass(frozen=True)
class CheckOptions:
    prompts: tuple[str, ...] = ()  # files or sets; empty: the run's held-out rows, else `mixed`
    limit: int = 8
    max_new_tokens: int = 64
    shortfall: float = 0.5  # share of the estimated gain over 1 that decoding may miss; 1: all


@dataclass(frozen=True)
class Decoded:
    """What the files did on held-out prompts."""

    definition: str
    prompts: int
    tokens: int
    acceptance_length: float
    every_slot_length: float  # with every slot as a start
    joint: list[float]
    checkpoint_acceptance_length: float
    same_as_checkpoint: bool


@dataclass
class SelfCheck:
    """The findings, as they go into the record and the model card."""

    tensors: int = 0
    estimate: float | None = None  # acceptance length that training measured
    same_rows: float | None = None  # measured on the same rows, from the files
    decoded: Decoded | None = None
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "SelfCheck":
        """The findings in an export's record."""
        decoded = record["decoded"]
        return cls(**{**record, "decoded": None if decoded is None else Decoded(**decoded)})


def check_files(
    directory: Path, engine: str, draft: PlainDraft, side: TargetSide, layout: Format | None = None
) -> tuple[SelfCheck, Reread]:
    """The static half of the check: names, values, flags. `layout`: by default the engine's."""
    served = reread(directory, engine, side)
    expected = dict(draft.tensors)
    if side.embeddings_VE is None:  # the target is not loaded: skip what comes from it
        shared = (layout or method_of(draft.config).formats[engine]).ignored
        expected = {name: tensor for name, tensor in expected.items() if name not in shared}
    faults = [f"{name}: the engine skips it" for name in served.unread]
    faults += differing_tensors(expected, served.tensors)
    faults += differing_flags(draft.config, served.config)
    if faults:
        what = f"self-check: the files are not the draft ({'; '.join(faults[:3])})"
        raise BadInput(what, fix=_REPORT)
    return SelfCheck(tensors=len(served.tensors)), served


# --- what needs the target -----------------------------------------------------------------------


def load_target(
    source: DraftSource, section: HfTarget, device: str | None
) -> tuple[HFEagle3TargetModel, TargetSide]:
    """The target in this process, wherever it ran in training, and what engines take from it."""
    target: HFEagle3TargetModel | None = None
    if (recipe := source.recipe) is not None:
        precise = section.model_copy(update={"dtype": getattr(recipe.target, "dtype", "auto")})
        # it may have been trained on a device, or in a precision, that this machine lacks
        with suppress(BadInput):
            place = pick_device(device or recipe.training.device)
            target = cast(HFEagle3TargetModel, HF.open(precise, device=place, aux_layers=0))
    if target is None:
        target = HFEagle3TargetModel.from_pretrained(
            section.model, aux_layer_ids=section.aux_layer_ids, device=device,
            num_aux_layers=None, trust_remote_code=section.trust_remote_code,
        )  # fmt: skip
    info, embedding = target.info(), target.get_input_embeddings().weight.detach().cpu()
    return target, TargetSide(info.depth, embedding, info.head.weight_VD.detach().cpu())


@dataclass(frozen=True)
class DecodingCheck:
    """The half of the check that needs the target."""

    source: DraftSource
    target: HFEagle3TargetModel
    section: HfTarget  # how it was loaded
    options: CheckOptions
    depth: int  # tokens that a round drafts
    watch: Watch
    quantised: bool = False  # the files hold other numbers than the checkpoint, knowingly

    def lengths(self, draft: PlainDraft, sets: Sequence[Mapping[str, str]]) -> list[float]:
        """The acceptance lengths on the run's held-out rows with each of some sets of types."""
        if self.source.recipe is None or self.source.state is None:
            raise BadInput("it has no run, so there are no held-out rows")
        model = method_of(draft.config).draft_type().from_tensors(
            draft.config, without_head(draft.config, draft.tensors), where=self.source.directory
        )  # fmt: skip
        model.to(self.target.get_input_embeddings().weight.device).borrow_from(self.target)
        blocks = {
            pair: decoded(draft, dict([pair])).tensors[pair[0]]
            for pair in {pair for types in sets for pair in types.items()}
        }
        variants = [
            {name: blocks[name, types[name]] if name in types else draft.tensors[name]
             for name in {name for name, _ in blocks}}
            for types in sets
        ]  # fmt: skip
        with ExitStack() as opened:
            rows, asked = self._held_out(opened)
            return self._measure(model, rows, asked, variants)

    def run(self, check: SelfCheck, served: Reread) -> None:
        """Measure and decode with the files, and add the findings to `check`."""
        files = served.model().to(self.target.get_input_embeddings().weight.device)
        files.borrow_from(self.target)
        if self.quantised:
            set_weights(files, served.tensors)  # its head's rows are not quite the target's
        check_fits(self.target, files, "the export")
        rows: list[TokenBatch] = []
        with ExitStack() as opened:
            if check.estimate is not None and self.source.recipe is not None:
                self.watch("the run's held-out rows", 0, 1)
                try:
                    rows, asked = self._held_out(opened)
                except BadInput as error:
                    reason = f"the run's held-out rows were not measured again ({error})"
                    check.notes.append(reason)
            if rows:
                [check.same_rows] = self._measure(files, rows, asked)
        if not self.quantised:
            check_same_rows(check)
        check.decoded = self._decode(files, [] if self.options.prompts else rows)
        if rows and not self.options.prompts:
            check_gain(self.source.every_slot_estimate or 1.0, check.decoded, self.options)
        elif check.estimate is not None:
            check.notes.append("the prompts are not the run's: not compared with its estimate")

    def _held_out(self, opened: ExitStack) -> tuple[list[TokenBatch], Eagle3TargetBackend]:
        """The packs on which training measured the estimate, and the target that answers them."""
        source, target = self.source, self.target
        assert source.recipe is not None
        assert source.state is not None
        recipe, asked = source.recipe.settled(), cast(Eagle3TargetBackend, target)
        if kind_of(recipe.target).brings_rows:
            device = target.get_input_embeddings().weight.device
            asked = opened.enter_context(make_target(recipe, device))
            _, held_out, fingerprint = known_data(recipe, asked)
        else:
            recipe = recipe.model_copy(update={"target": self.section})
            _, held_out, fingerprint = prepare_data(recipe)
        same = fingerprint == source.state["fingerprints"]["data"]
        if not same or list(asked.aux_layer_ids) != list(target.aux_layer_ids):
            raise BadInput("its data has changed")
        pad_id = 0 if target.tokenizer is None else target.tokenizer.pad_token_id or 0
        return held_out_batches(held_out, recipe, pad_id), asked

    def _measure(
        self,
        files: DraftModel,
        rows: Sequence[TokenBatch],
        asked: Eagle3TargetBackend,
        variants: Sequence[Mapping[str, Tensor]] = ({},),
    ) -> list[float]:
        """The acceptance length of the files on these packs, as training measures it, with each of
        some sets of weights."""
        assert self.source.recipe is not None
        dtype = compute_dtype(self.source.recipe, files.device, asked.info().dtype)
        head, selected_W = asked.info().head.to(files.device), files.selected_token_ids
        assert selected_W is not None
        totals = [Acceptance.none(self.depth)] * len(variants)
        for batch in rows:
            answer = checked_answer(asked, batch).to(files.device)
            picks = target_picks(answer, batch, head, selected_W)
            for i, weights in enumerate(variants):
                set_weights(files, weights)
                rollouts = rollouts_of(files, self.depth, dtype=dtype)
                totals[i] += replay_held_out(answer, batch, rollouts, picks)
        return [total.length for total in totals]

    def _prompts(self, rows: Sequence[TokenBatch]) -> list[list[int]]:
        """The token ids of some prompts, up to the start of the assistant's answer."""
        options, tokenizer = self.options, self.target.tokenizer
        if rows:
            first = [ids for batch in rows for ids in _prompts_of(batch)]
            count = min(options.limit, len(first))
            return [first[i * len(first) // count] for i in range(count)]
        if tokenizer is None:
            raise BadInput("the target has no tokenizer", fix="name a directory that holds one")
        prompts = read_prompts(options.prompts or ["mixed"], limit=options.limit)
        template = ChatTemplate.of(tokenizer)
        return [encode_prompt(list(prompt.messages), template, tokenizer) for prompt in prompts]

    def _decode(self, files: DraftModel, rows: Sequence[TokenBatch]) -> Decoded:
        tokenizer, model = self.target.tokenizer, self.target.model
        longest = longest_text(model.config) - self.options.max_new_tokens
        prompts = [ids for ids in self._prompts(rows) if len(ids) <= longest]
        if not prompts:
            raise BadInput("no prompt leaves room for an answer", fix="lower --max-new-tokens")
        ends = frozenset() if tokenizer is None else eos_token_ids(model, tokenizer)
        stops = Stops(self.options.max_new_tokens, ends)
        self.watch("decoding from the files", 0, 2)
        live = self.decode_live(files, prompts, stops)
        checkpoint = self.source.model().to(files.device, files.dtype)
        checkpoint.borrow_from(self.target)
        before = live
        if not _same_network(files, checkpoint):  # else they decode alike, and one is enough
            self.watch("decoding from the checkpoint", 1, 2)
            before = self.decode_live(checkpoint, prompts, stops)
        same = all(
            (exported.token_ids, exported.rounds) == (original.token_ids, original.rounds)
            for exported, original in zip(live, before, strict=True)
        )
        kept = files.config.aux_layer_ids == checkpoint.config.aux_layer_ids
        kept &= torch.equal(files.embed_tokens.weight, checkpoint.embed_tokens.weight)
        if kept and not same and not self.quantised:
            what = "self-check: the exported files decode other tokens or rounds than the draft"
            raise BadInput(what, where=str(self.source.directory), fix=_REPORT)
        texts = [Text(generation.prompt_ids, generation.token_ids) for generation in live]
        samples = replay(self.target, files, texts, num_draft_tokens=self.depth)
        check_rounds(samples, live)
        figures = acceptance(samples, self.depth)
        of_checkpoint = [Sample(g.prompt_ids, g.token_ids, g.rounds) for g in before]
        strategy = choose(files, method_of(files.config).replayed_strategy)
        return Decoded(
            definition=definition(strategy(files, DraftShape(self.depth)).label),
            prompts=len(prompts),
            tokens=sum(len(generation.token_ids) for generation in live),
            acceptance_length=figures.length,
            every_slot_length=every_slot_length(samples, self.depth) or 1.0,
            joint=figures.joint,
            checkpoint_acceptance_length=acceptance(of_checkpoint, self.depth).length,
            same_as_checkpoint=same,
        )

    def decode_live(
        self, draft: DraftModel, prompts: list[list[int]], stops: Stops
    ) -> list[Generation]:
        decoder = SpeculativeDecoder(
            self.target.model, draft, aux_layer_ids=draft.config.aux_layer_ids,
            num_draft_tokens=self.depth, method=method_of(draft.config).replayed_strategy,
        )  # fmt: skip
        return decoder.generate(prompts, stops)


@torch.no_grad()
def set_weights(draft: DraftModel, tensors: Mapping[str, Tensor]) -> None:
    """Replace some of its weights: not in place, since a block draft's head may be the target's."""
    for name in tensors.keys() & dict(draft.named_parameters()).keys():
        path, _, last = name.rpartition(".")
        weight = torch.nn.Parameter(tensors[name].to(draft.device, draft.dtype), False)
        setattr(draft.get_submodule(path), last, weight)


def check_same_rows(check: SelfCheck) -> None:
    measured, estimate = check.same_rows, check.estimate
    if measured is None or estimate is None:
        return
    if abs(measured - estimate) > SAME_ROWS * estimate:
        raise BadInput(
            f"self-check: training measured an acceptance length of {estimate:.3f} on its held-out "
            f"rows, the exported files reach {measured:.3f} there (allowed: {SAME_ROWS:.0%})",
            fix="nothing was left behind; is the data or the target another one now?",
        )


def check_rounds(samples: Sequence[Sample], live: Sequence[Generation]) -> None:
    """Refuse live rounds that differ from the replayed ones of the same texts."""
    rounds = sum(len(generation.rounds) for generation in live)
    pairs = zip(samples, live, strict=True)
    same = sum(len(set(sample.rounds) & set(generation.rounds)) for sample, generation in pairs)
    if same < LIVE_ROUNDS * rounds:
        what = f"self-check: of {rounds} rounds decoded live only {same} are as replayed"
        raise BadInput(what, fix=_REPORT)


def check_gain(estimate: float, decoded: Decoded, options: CheckOptions) -> None:
    """Refuse files that gain far less on the target's own answers than on the held-out rows, both
    from every slot: few answers have few rounds."""
    reached = decoded.every_slot_length
    if reached - 1 < (1 - options.shortfall) * (estimate - 1) - SLACK:
        raise BadInput(
            f"self-check: training estimates an acceptance length of {estimate:.3f} from every "
            f"slot, decoding the target's own answers reaches {reached:.3f}",
            fix="if the training data is not the target's own answers, regenerate them, or "
            "allow more with --shortfall",
        )


def _same_network(a: DraftModel, b: DraftModel) -> bool:
    """Whether two drafts compute the same, to the bit."""
    return not (
        differing_flags(a.config, b.config) or differing_tensors(a.state_dict(), b.state_dict())
    )


def _prompts_of(batch: TokenBatch) -> list[list[int]]:
    """The documents of a pack, each up to its first supervised token."""
    spans = {(span.row, span.begin): span for span in reversed(list(answers_of(batch)))}
    return [
        batch.input_ids[span.row, span.begin : span.begin + span.prompt].tolist()
        for span in reversed(spans.values())
    ]
