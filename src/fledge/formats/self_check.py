"""Check that an export does what training measured, before its directory gets its final name:
tensors and flags as the engine reads them, the run's held-out rows, and held-out prompts decoded
live (docs/export.md). The texts of the last step differ from the estimate's, so its bound is wide,
but a draft that lost its layers, map or norms in the export does not come near it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fledge.core.errors import BadInput
from fledge.core.progress import Watch
from fledge.core.rows import TokenBatch
from fledge.data.template import ChatTemplate
from fledge.decode.speculative import Generation, SpeculativeDecoder
from fledge.decode.stops import Stops, eos_token_ids
from fledge.decode.strategy import DraftShape, choose
from fledge.formats.codec import PlainDraft
from fledge.formats.reread import Reread, TargetSide, differing_flags, differing_tensors, reread
from fledge.formats.source import DraftSource
from fledge.measure.answers import cached_continuations, encode_prompt, read_prompts
from fledge.measure.evaluation import check_fits
from fledge.measure.figures import Sample, acceptance, definition, every_slot_length
from fledge.measure.replay import Text, replay
from fledge.methods.registry import method_of
from fledge.methods.shared.draft import DraftModel
from fledge.recipe.schema import RESOLVED_NAME, load_recipe
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.kinds import kind_of
from fledge.target.layers import longest_text
from fledge.target.state_cache import colocated
from fledge.training.evaluation import evaluate
from fledge.training.setup import OpenRun, open_run

SAME_ROWS = 0.02  # of the acceptance length: allowed for rounding on another device
SLACK = 0.1  # tokens by which a small sample may also fall short of the estimate
LIVE_ROUNDS = 0.95  # share of live rounds that must match replay (near ties round either way)

_NOT_COMPUTED_WITH = ("architectures", "dtype", "ttt_steps")  # settings that only describe
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
    every_slot_length: float  # comparable with the estimate of training
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


@dataclass(frozen=True)
class TargetInUse:
    """The loaded target, and the run with its held-out rows, if available."""

    target: HFEagle3TargetModel
    run: OpenRun | None
    notes: list[str]

    @property
    def side(self) -> TargetSide:
        info, embedding = self.target.info(), self.target.get_input_embeddings()
        weight = embedding.weight.detach().cpu()
        return TargetSide(info.depth, weight, info.head.weight_VD.detach().cpu())


def open_target(
    source: DraftSource,
    name: str,
    *,
    aux_layer_ids: Sequence[int],
    device: str | None,
    trust_remote_code: bool = False,
) -> TargetInUse:
    """Load the target once: by the run's own recipe if its data is available, else by name.

    `aux_layer_ids` are ascending, as in the files, whatever their order in training.
    """
    notes: list[str] = []
    run = None
    if source.recipe is not None and source.run is not None and source.estimate is not None:
        trusted = str(trust_remote_code).lower()  # the user decides, not the run's files
        overrides = [f"run.output_dir={source.run}", f"target.trust_remote_code={trusted}"]
        overrides += ["training.shard=1", "training.context=1"]  # one process, however many trained
        overrides += [f"training.device={device}"] if device else []
        if not kind_of(source.recipe.target).brings_rows:  # load the target here, wherever it ran
            layers = ",".join(map(str, aux_layer_ids))
            overrides += ["target.backend=hf", f"target.model={name}"]
            overrides += [f"target.aux_layer_ids={layers}"]
        try:
            run = open_run(load_recipe(source.run / RESOLVED_NAME, overrides))
        except BadInput as error:
            notes.append(f"the run's held-out rows were not measured again ({error})")
    loaded = None if run is None else colocated(run.parts.target)
    if run is not None and not _comparable(source, run, aux_layer_ids):
        notes.append("the run's held-out rows were not measured again (its data has changed)")
        run = None
    if loaded is None:
        count = len(aux_layer_ids)
        loaded = HFEagle3TargetModel.from_pretrained(
            name,
            aux_layer_ids=aux_layer_ids,
            device=device,
            num_aux_layers=count,
            trust_remote_code=trust_remote_code,
        )
    return TargetInUse(loaded, run, notes)


def _comparable(source: DraftSource, run: OpenRun, aux_layer_ids: Sequence[int]) -> bool:
    """Whether the rows are the same, and the states are in the order that the files read."""
    assert source.state is not None
    same = source.state["fingerprints"]["data"] == run.fingerprints["data"]
    return bool(same) and list(run.parts.target.aux_layer_ids) == list(aux_layer_ids)


def check_files(
    directory: Path, engine: str, draft: PlainDraft, side: TargetSide
) -> tuple[SelfCheck, Reread]:
    """The static half of the check: names, values, flags."""
    served = reread(directory, engine, side)
    expected = dict(draft.tensors)
    if side.embeddings_VE is None:  # the target is not loaded: skip what comes from it
        shared = method_of(draft.config).formats[engine].ignored
        expected = {name: tensor for name, tensor in expected.items() if name not in shared}
    faults = [f"{name}: the engine skips it" for name in served.unread]
    faults += differing_tensors(expected, served.tensors)
    faults += differing_flags(draft.config, served.config)
    if faults:
        what = f"self-check: the files are not the draft ({'; '.join(faults[:3])})"
        raise BadInput(what, fix=_REPORT)
    return SelfCheck(tensors=len(served.tensors)), served


@dataclass(frozen=True)
class DecodingCheck:
    """The half of the check that needs the target."""

    source: DraftSource
    in_use: TargetInUse
    options: CheckOptions
    depth: int  # tokens that a round drafts
    watch: Watch

    @property
    def _target(self) -> HFEagle3TargetModel:
        return self.in_use.target

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._target.get_input_embeddings().weight.device
        return device

    def run(self, check: SelfCheck, served: Reread, *, unchanged: bool) -> None:
        """Decode with the files and add the findings to `check`.

        `unchanged`: the tensors are the checkpoint's own, so every round must agree.
        """
        check.notes += self.in_use.notes
        files = served.model().to(self._device)
        files.borrow_from(self._target)
        check_fits(self._target, files, "the export")
        check.estimate = self.source.estimate
        self._measure_same_rows(check, files)
        check.decoded = self._decode(files, unchanged=unchanged)
        if self._uses_run_prompts:
            self._check_gain(check)
        elif check.estimate is not None:
            check.notes.append("the prompts are not the run's: not compared with its estimate")

    # --- the rows that training measured --------------------------------------------------------

    def _measure_same_rows(self, check: SelfCheck, files: DraftModel) -> None:
        run = self.in_use.run
        if check.estimate is None or run is None or not run.held_out:
            return
        self.watch("the run's held-out rows", 0, 1)
        run.draft.load_state_dict(files.state_dict())
        check.same_rows = float(evaluate(run.parts, run.held_out)["tau"])
        if abs(check.same_rows - check.estimate) > SAME_ROWS * check.estimate:
            raise BadInput(
                f"self-check: training measured an acceptance length of {check.estimate:.3f} on "
                f"its held-out rows, the exported files reach {check.same_rows:.3f} there "
                f"(allowed: {SAME_ROWS:.0%})",
                fix="nothing was left behind; is the data or the target another one now?",
            )

    # --- held-out prompts, decoded --------------------------------------------------------------

    @property
    def _uses_run_prompts(self) -> bool:
        """Whether the prompts are the run's held-out rows: only then must the estimate hold."""
        run = self.in_use.run
        return not self.options.prompts and run is not None and bool(run.held_out)

    def _prompts(self) -> list[list[int]]:
        """The prompts' token ids, up to the start of the assistant's answer."""
        run, options = self.in_use.run, self.options
        if self._uses_run_prompts:
            assert run is not None
            rows = [ids for batch in run.held_out for ids in _prompts_of(batch)]
            count = min(options.limit, len(rows))
            return [rows[i * len(rows) // count] for i in range(count)]
        tokenizer = self._target.tokenizer
        if tokenizer is None:
            raise BadInput("the target has no tokenizer", fix="name a directory that holds one")
        prompts = read_prompts(options.prompts or ["mixed"], limit=options.limit)
        template = ChatTemplate.of(tokenizer)
        return [encode_prompt(list(prompt.messages), template, tokenizer) for prompt in prompts]

    def _decode(self, files: DraftModel, *, unchanged: bool) -> Decoded:
        tokenizer, model = self._target.tokenizer, self._target.model
        longest = longest_text(model.config) - self.options.max_new_tokens
        prompts = [ids for ids in self._prompts() if len(ids) <= longest]
        if not prompts:
            raise BadInput("no prompt leaves room for an answer", fix="lower --max-new-tokens")
        ends = frozenset() if tokenizer is None else eos_token_ids(model, tokenizer)
        stops = Stops(self.options.max_new_tokens, ends)
        self.watch("the target answers", 0, 3)
        answers = cached_continuations(self._target, prompts, stops)
        self.watch("decoding from the files", 1, 3)
        live = self._decode_live(files, prompts, stops)
        checkpoint = self.source.model().to(self._device, files.dtype)
        checkpoint.borrow_from(self._target)
        before = live
        if not _same_network(files, checkpoint):
            self.watch("decoding from the checkpoint", 2, 3)
            before = self._decode_live(checkpoint, prompts, stops)
        same = all(
            (exported.token_ids, exported.rounds) == (original.token_ids, original.rounds)
            for exported, original in zip(live, before, strict=True)
        )
        if unchanged and not same:
            what = (
                "self-check: the exported files decode other tokens or rounds than the checkpoint"
            )
            raise BadInput(what, where=str(self.source.directory), fix=_REPORT)
        texts = [Text(answer.prompt_ids, answer.token_ids) for answer in answers]
        samples = replay(self._target, files, texts, num_draft_tokens=self.depth)
        self._check_rounds(samples, live)
        figures = acceptance(samples, self.depth)
        every_slot = every_slot_length(samples, self.depth)
        assert every_slot is not None
        checkpoint_samples = [Sample(g.prompt_ids, g.token_ids, g.rounds) for g in before]
        strategy_type = choose(files, method_of(files.config).replayed_strategy)
        strategy = strategy_type(files, DraftShape(self.depth))
        return Decoded(
            definition=definition(strategy.label),
            prompts=len(prompts),
            tokens=sum(len(generation.token_ids) for generation in answers),
            acceptance_length=figures.length,
            every_slot_length=every_slot,
            joint=figures.joint,
            checkpoint_acceptance_length=acceptance(checkpoint_samples, self.depth).length,
            same_as_checkpoint=same,
        )

    def _decode_live(
        self, draft: DraftModel, prompts: list[list[int]], stops: Stops
    ) -> list[Generation]:
        model, layers = self._target.model, draft.config.aux_layer_ids
        decoder = SpeculativeDecoder(
            model, draft, aux_layer_ids=layers, num_draft_tokens=self.depth,
            method=method_of(draft.config).replayed_strategy,
        )  # fmt: skip
        return decoder.generate(prompts, stops)

    @staticmethod
    def _check_rounds(samples: Sequence[Sample], live: Sequence[Generation]) -> None:
        """Refuse live rounds that differ from the replayed ones, where the texts are the same."""
        rounds = same = 0
        for sample, generation in zip(samples, live, strict=True):
            if list(sample.answer_ids) == generation.token_ids:
                rounds += len(generation.rounds)
                same += len(set(sample.rounds) & set(generation.rounds))
        if rounds and same < LIVE_ROUNDS * rounds:
            what = f"self-check: of {rounds} rounds decoded live only {same} are as replayed"
            raise BadInput(what, fix=_REPORT)

    def _check_gain(self, check: SelfCheck) -> None:
        estimate = check.estimate if check.same_rows is None else check.same_rows
        if estimate is None or check.decoded is None:
            return
        reached, shortfall = check.decoded.every_slot_length, self.options.shortfall
        if reached - 1 < (1 - shortfall) * (estimate - 1) - SLACK:
            raise BadInput(
                f"self-check: training estimates an acceptance length of {estimate:.3f}, decoding "
                f"the target's own answers reaches {reached:.3f} from every slot",
                fix="if the training data is not the target's own answers, regenerate them, or "
                "allow more with --shortfall",
            )


def _same_network(a: DraftModel, b: DraftModel) -> bool:
    """Whether two drafts are equal to the bit: then they decode alike, and one of them is enough.
    Most of an export's time on a CPU is decoding."""
    settings_a, settings_b = (
        {k: v for k, v in draft.config.to_dict().items() if k not in _NOT_COMPUTED_WITH}
        for draft in (a, b)
    )
    weights_a, weights_b = a.state_dict(), b.state_dict()
    return (
        settings_a == settings_b
        and weights_a.keys() == weights_b.keys()
        and all(torch.equal(tensor, weights_b[name]) for name, tensor in weights_a.items())
    )


def _prompts_of(batch: TokenBatch) -> list[list[int]]:
    """The documents of a pack, each up to its first supervised token."""
    prompts: list[list[int]] = []
    assert batch.seq_lens is not None
    rows = zip(batch.input_ids, batch.loss_mask, batch.seq_lens, strict=True)
    for ids_T, mask_T, lengths in rows:
        start = 0
        for length in lengths.tolist():
            first = int(mask_T[start : start + length].int().argmax())
            if first:  # 0 means that nothing is supervised
                prompts.append(ids_T[start : start + first].tolist())
            start += length
    return prompts


def same_embeddings(draft: PlainDraft, side: TargetSide) -> bool:
    """Whether a draft embeds tokens as its target does, up to the rounding of half precision."""
    draft_VE, target_VE = draft.tensors["embed_tokens.weight"].float(), side.embeddings_VE
    if target_VE is None or target_VE.shape != draft_VE.shape:
        return False
    return bool(((draft_VE - target_VE.float()).abs() <= 2**-7 * target_VE.float().abs()).all())
