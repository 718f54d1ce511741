"""Check that an export is its draft, before its directory gets its final name: tensors and flags as
the engine reads them, and prompts decoded live with the files (docs/export.md)."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from fledge.core.distributed import pick_device
from fledge.core.errors import BadInput
from fledge.core.progress import Watch
from fledge.data.template import ChatTemplate
from fledge.decode.speculative import Generation, SpeculativeDecoder
from fledge.decode.stops import Stops, eos_token_ids
from fledge.decode.strategy import DraftShape, choose
from fledge.formats.codec import PlainDraft
from fledge.formats.reread import Reread, TargetSide, differing_flags, differing_tensors, reread
from fledge.formats.source import DraftSource
from fledge.measure.answers import encode_prompt, read_prompts
from fledge.measure.evaluation import check_fits
from fledge.measure.figures import Sample, acceptance, definition
from fledge.methods.registry import method_of
from fledge.methods.shared.draft import DraftModel
from fledge.target.hf.kind import HF, HfTarget
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.layers import longest_text

_REPORT = "nothing was left behind; please report this"


@dataclass(frozen=True)
class CheckOptions:
    prompts: tuple[str, ...] = ("mixed",)  # files or sets
    limit: int = 8
    max_new_tokens: int = 64


@dataclass(frozen=True)
class Decoded:
    """What the files did on the prompts."""

    definition: str
    prompts: int
    tokens: int
    acceptance_length: float
    joint: list[float]
    checkpoint_acceptance_length: float
    same_as_checkpoint: bool


@dataclass
class SelfCheck:
    """The findings, as they go into the record and the model card."""

    tensors: int = 0
    estimate: float | None = None  # acceptance length that training measured on its held-out rows
    decoded: Decoded | None = None
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "SelfCheck":
        """The findings in an export's record."""
        decoded = record["decoded"]
        return cls(**{**record, "decoded": None if decoded is None else Decoded(**decoded)})


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
    options: CheckOptions
    depth: int  # tokens that a round drafts
    watch: Watch

    def run(self, served: Reread) -> Decoded:
        """Decode prompts with the files, and with the checkpoint if it is not the same network."""
        files = served.model().to(self.target.get_input_embeddings().weight.device)
        files.borrow_from(self.target)
        check_fits(self.target, files, "the export")
        tokenizer, model = self.target.tokenizer, self.target.model
        if tokenizer is None:
            raise BadInput("the target has no tokenizer", fix="name a directory that holds one")
        longest = longest_text(model.config) - self.options.max_new_tokens
        prompts = [ids for ids in self._prompts(tokenizer) if len(ids) <= longest]
        if not prompts:
            raise BadInput("no prompt leaves room for an answer", fix="lower --max-new-tokens")
        stops = Stops(self.options.max_new_tokens, eos_token_ids(model, tokenizer))
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
        if kept and not same:
            what = "self-check: the exported files decode other tokens or rounds than the draft"
            raise BadInput(what, where=str(self.source.directory), fix=_REPORT)
        figures, of_checkpoint = (
            acceptance([Sample(g.prompt_ids, g.token_ids, g.rounds) for g in texts], self.depth)
            for texts in (live, before)
        )
        strategy = choose(files, method_of(files.config).replayed_strategy)
        return Decoded(
            definition=definition(strategy(files, DraftShape(self.depth)).label),
            prompts=len(prompts),
            tokens=sum(len(generation.token_ids) for generation in live),
            acceptance_length=figures.length,
            joint=figures.joint,
            checkpoint_acceptance_length=of_checkpoint.length,
            same_as_checkpoint=same,
        )

    def _prompts(self, tokenizer: Any) -> list[list[int]]:
        """The token ids of the prompts, up to the start of the assistant's answer."""
        prompts = read_prompts(list(self.options.prompts), limit=self.options.limit)
        template = ChatTemplate.of(tokenizer)
        return [encode_prompt(list(prompt.messages), template, tokenizer) for prompt in prompts]

    def decode_live(
        self, draft: DraftModel, prompts: list[list[int]], stops: Stops
    ) -> list[Generation]:
        decoder = SpeculativeDecoder(
            self.target.model, draft, aux_layer_ids=draft.config.aux_layer_ids,
            num_draft_tokens=self.depth, method=method_of(draft.config).replayed_strategy,
        )  # fmt: skip
        return decoder.generate(prompts, stops)


def _same_network(a: DraftModel, b: DraftModel) -> bool:
    """Whether two drafts compute the same, to the bit."""
    return not (
        differing_flags(a.config, b.config) or differing_tensors(a.state_dict(), b.state_dict())
    )
