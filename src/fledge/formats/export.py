"""`export_draft`: write a run or a checkpoint as a directory that an engine serves, and check it.

Files are laid out (`codec.py`), written into a hidden directory, read back the way the engine
reads them (`reread.py`) and used for decoding (`self_check.py`); only then does the directory get
its final name. A failed or killed export leaves nothing that looks like one.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fledge import __version__
from fledge.core.errors import BadInput, UntrustedCode, nearest
from fledge.core.files import atomic_directory, check_place, save_tensors, write_json, write_text
from fledge.core.progress import Watch, unwatched
from fledge.core.reading import read_json
from fledge.data.tokenise import checksum
from fledge.formats.card import model_card
from fledge.formats.codec import (
    CARD_NAME,
    RECORD_NAME,
    Feature,
    TargetFacts,
    config_values,
    draft_facts,
    draft_features,
    file_tensors,
)
from fledge.formats.engines import ENGINES, check_representable
from fledge.formats.gguf_layout import DRAFT_NAME, GgufFormat, write_gguf
from fledge.formats.gguf_tokenizer import tokenizer_keys
from fledge.formats.quantise import AUTO, KINDS, Choice, choose_types, decoded
from fledge.formats.reread import TargetSide
from fledge.formats.self_check import (
    CheckOptions,
    DecodingCheck,
    SelfCheck,
    check_files,
    load_target,
)
from fledge.formats.source import (
    DraftSource,
    dtype_for_engines,
    facts_of_target,
    read_source,
)
from fledge.methods.registry import method_of
from fledge.methods.shared.config import PLACEHOLDER_KEY
from fledge.methods.shared.files import CONFIG_NAME, WEIGHTS_NAME
from fledge.models.resolve import public_name
from fledge.target.hf.kind import HfTarget
from fledge.target.hf.model import HFEagle3TargetModel

_EMBEDDINGS = "embed_tokens.weight"
_SHAPE = ("num_hidden_layers", "hidden_size", "draft_vocab_size", "vocab_size")


def export_draft(
    source: str | Path,
    out: str | Path,
    *,
    engine: str,
    engine_version: str | None = None,  # None: the newest tested one
    target: str = "",  # "": the run's own
    dtype: torch.dtype | None = None,  # None: as stored
    num_draft_tokens: int | None = None,  # None: as trained
    without_target: bool = False,  # skip what needs the target's weights
    device: str | None = None,
    check: CheckOptions | None = None,
    watch: Watch | None = None,
    trust_remote_code: bool = False,  # run Python code that comes with the target
    target_name: str = "",  # its name in card and config; "": its public name
    overwrite: bool = False,  # replace an existing export
    quantise: str = "",  # for llama.cpp: q8_0, q4_k_m or auto
) -> Path:
    """Write `source` (a run, a checkpoint, a draft) to `out` as `engine` reads it; returns `out`.

    Raises BadInput if the engine cannot serve the draft, or if the files do not behave like the
    checkpoint; `out` is then unchanged. `read_export_record(out)` returns what was measured.
    """
    out = Path(out)
    check_place(out, directory=True)
    if out.resolve() == Path.cwd():  # the directory is replaced as a whole
        raise BadInput("the current directory", where=str(out), fix="name a new one for --out")
    if out.exists() and not (out / RECORD_NAME).is_file() and any(out.iterdir()):
        raise BadInput("not empty, and not an export", where=str(out), fix="give another --out")
    if (out / RECORD_NAME).is_file() and not overwrite:
        fix = "give --overwrite to replace it, or another --out"
        raise BadInput("an export is here already", where=str(out), fix=fix)
    job = _Job(
        read_source(Path(source)), engine, engine_version, target, dtype, num_draft_tokens,
        without_target, device, check or CheckOptions(), watch or unwatched, trust_remote_code,
        target_name, quantise,
    )  # fmt: skip
    try:
        return job.write(out)
    finally:
        job.close()


def read_export_record(directory: str | Path) -> dict[str, Any]:
    """The record of an export: its source, its engine, and what was measured on it."""
    path = Path(directory) / RECORD_NAME
    if not path.is_file():
        fix = "make one with `fledge export`"
        raise BadInput(f"no {RECORD_NAME} here", where=str(directory), fix=fix)
    record: dict[str, Any] = read_json(path, what="the record of the export")
    return record


@dataclass
class _Job:
    """One export: `__post_init__` makes all decisions, `write` carries them out."""

    source: DraftSource
    engine_name: str
    engine_version: str | None
    target_name: str
    dtype: torch.dtype | None
    asked_draft_tokens: int | None
    without_target: bool
    device: str | None
    check: CheckOptions
    watch: Watch
    trust_remote_code: bool
    public_name: str
    quantise: str

    def __post_init__(self) -> None:
        source = self.source
        if (name := self.engine_name) not in ENGINES:
            fix = nearest(name, list(ENGINES))
            raise BadInput(f"no engine '{name}'", where="--engine", fix=fix)
        self.engine = ENGINES[name]
        self.version = self.engine.check_version(self.engine_version)
        self.target_name = self.target_name or source.target_name
        self.target = self._target_facts()
        draft = source.draft(self.target)
        self.draft = draft if self.dtype is None else draft.to(self.dtype)
        self.method = method_of(draft.config)
        if name not in self.method.formats:
            others = " or ".join(self.method.formats)
            fix = f"--engine {others}" if others else "such drafts cannot be exported yet"
            what = f"{self.engine.title} does not read {self.method.title} drafts"
            raise BadInput(what, where="--engine", fix=fix)
        self.layout = self.method.formats[name]
        asked = self.asked_draft_tokens
        if asked is not None and (refusal := self.method.refused_tokens(draft.config, asked)):
            raise refusal
        self.num_draft_tokens = self.asked_draft_tokens or source.num_draft_tokens
        self._check(trained_embeddings=False)  # fail before anything slow
        if isinstance(self.layout, GgufFormat):
            size, trust = draft.config.vocab_size, self.trust_remote_code
            self.tokenizer = tokenizer_keys(self.target_name, size, trust=trust)
        elif self.quantise:
            what = f"{self.engine.title} reads no quantised drafts of ours"
            raise BadInput(what, where="--quantise", fix="--engine llama.cpp")
        self.watch("loading the target", 0, 1)
        self.side = TargetSide(self.target.layers)
        self.loaded: HFEagle3TargetModel | None = None
        if not self.without_target:
            self.section = HfTarget(
                model=self.target_name, aux_layer_ids=tuple(draft.aux_layer_ids), compile=False,
                trust_remote_code=self.trust_remote_code,
            )  # fmt: skip
            self.loaded, self.side = load_target(source, self.section, self.device)
            info = self.loaded.info()
            self.target = dataclasses.replace(
                self.target, tokenizer_fingerprint=info.tokenizer_fingerprint,
                dtype=dtype_for_engines(info.dtype),
            )  # fmt: skip
        self.embeddings = self._settle_embeddings()
        if self.embeddings == "trained" and isinstance(self.layout, GgufFormat):
            self.layout = dataclasses.replace(self.layout, ignored=frozenset())
        self.draft = self.method.with_target_rows(self.draft, self.side.head_VE)
        self.features = self._check(trained_embeddings=self.embeddings == "trained")
        self.written, self.choice = self.draft, Choice({})
        if self.quantise:
            self._quantise()

    def _target_facts(self) -> TargetFacts:
        name, trust = self.target_name, self.trust_remote_code
        public = self.public_name or (public_name(name) if name else "")
        if not name and not self.without_target:
            raise BadInput(
                "which target?",
                where=str(self.source.directory),
                fix="give --target MODEL, or --without-target to skip decoding with the files",
            )
        if self.engine.name == "speculators" and not public:
            raise BadInput("which target? the format names it", fix="give --target MODEL")
        if self.engine.name == "llama.cpp" and not name:
            raise BadInput("which target? its tokenizer goes into the file", fix="give --target")
        try:
            if name:
                return facts_of_target(name, public, trust_remote_code=trust)
        except BadInput as error:  # without its weights, it may be known only by name
            if not self.without_target or isinstance(error, UntrustedCode):
                raise
        return TargetFacts(public, public.partition("@")[0])

    def _check(self, *, trained_embeddings: bool) -> frozenset[Feature]:
        features = draft_features(self.draft, self.target, trained_embeddings=trained_embeddings)
        check_representable(self.engine, self.layout, self.version, features)
        inner = self.method.aux_layers() > 1
        self.engine.check_target(self.target.architectures, inner_states=inner)
        if refusal := self.method.refused_target(self.draft.config, self.engine.name, self.target):
            raise refusal
        return features

    def _settle_embeddings(self) -> str:
        """Which embeddings the draft is served with: `the target's` or `trained`."""
        if _EMBEDDINGS not in self.draft.tensors:
            return "the target's"
        if self.loaded is None:
            recipe = self.source.recipe
            frozen = self.method.fixed_draft.get("freeze_embeddings", False)
            frozen |= recipe is not None and recipe.draft.freeze_embeddings
            return "the target's" if frozen else "trained"
        if not self._has_target_embeddings():
            return "trained"
        if _EMBEDDINGS in self.layout.ignored:
            assert self.side.embeddings_VE is not None
            weight_VE = self.side.embeddings_VE.to(self.draft.dtype)
            tensors = {**self.draft.tensors, _EMBEDDINGS: weight_VE}
            self.draft = dataclasses.replace(self.draft, tensors=tensors)
        return "the target's"

    def _quantise(self) -> None:
        """Choose the types; from here on the draft is what the quantised file holds."""
        if self.quantise not in (*KINDS, AUTO):
            what = f"'{self.quantise}' is not a kind of file that is written"
            raise BadInput(what, where="--quantise", fix=f"one of {', '.join((*KINDS, AUTO))}")
        self.written, measure = self.draft.to(torch.float32), None
        if self.loaded is not None and self.source.estimate is not None:
            self.watch("lengths of the quantised draft", 0, 1)
            measure = partial(self._decoding().lengths, self.written)
        elif self.quantise == AUTO:
            fix = "export the run, with its target and its data, or give q8_0 or q4_k_m"
            raise BadInput("auto measures on the run's held-out rows", where="--quantise", fix=fix)
        self.choice = choose_types(self.written, self.quantise, self._left_out(), measure)
        self.draft = decoded(self.written, self.choice.types)

    def _left_out(self) -> set[str]:
        """Tensors that stay as they are in a quantised file, or are not in it."""
        return {*self.layout.ignored, "confidence_head.proj.weight"}

    def _decoding(self) -> DecodingCheck:
        # an estimate is only comparable for as many tokens as it was made for
        unknown = self.source.estimate is None
        depth = self.num_draft_tokens if unknown else self.source.num_draft_tokens
        assert self.loaded is not None
        return DecodingCheck(
            self.source, self.loaded, self.section, self.check, depth, self.watch,
            quantised=bool(self.quantise),
        )  # fmt: skip

    def _has_target_embeddings(self) -> bool:
        """Whether the draft embeds tokens as its target does, up to rounding in half precision."""
        draft_VE, target_VE = self.draft.tensors[_EMBEDDINGS].float(), self.side.embeddings_VE
        if target_VE is None or target_VE.shape != draft_VE.shape:
            return False
        target_VE = target_VE.float()
        return bool(((draft_VE - target_VE).abs() <= 2**-7 * target_VE.abs()).all())

    def write(self, out: Path) -> Path:
        facts = draft_facts(self.draft, self.target, num_draft_tokens=self.num_draft_tokens)
        self.watch("writing", 0, 1)
        with atomic_directory(out) as directory:
            self._write_files(directory, facts)
            record = self._record(facts, self._self_check(directory), directory)
            write_text(directory / CARD_NAME, model_card(record, out.name, self.source.recipe))
            write_json(directory / RECORD_NAME, record)
        return out

    def _write_files(self, directory: Path, facts: dict[str, Any]) -> None:
        layout, keys = self.layout, config_values(self.layout, facts, self.features)
        if isinstance(layout, GgufFormat):
            name = f"{self.method.title} draft for {self.target.name}"
            path = directory / DRAFT_NAME
            types = self.choice.types
            write_gguf(path, layout, self.written, keys, self.tokenizer, name=name, types=types)
            return
        save_tensors(directory / WEIGHTS_NAME, file_tensors(layout, self.draft), {"format": "pt"})
        write_json(directory / CONFIG_NAME, keys)

    def close(self) -> None:
        """Release the target."""
        if self.loaded is not None:
            self.loaded.close()

    def _self_check(self, directory: Path) -> SelfCheck:
        self.watch("reading back", 0, 1)
        check, reread = check_files(directory, self.engine.name, self.draft, self.side, self.layout)
        check.estimate = self.source.estimate
        if self.loaded is None:
            check.notes.append("exported without the target: nothing was decoded")
        else:
            self._decoding().run(check, reread)
        if self.engine.name == "speculators" and "/" not in self.target.served_as:
            check.notes.append(
                f"the speculators library reads the target where the file says: it will look for"
                f" '{self.target.served_as}' in its working directory and on the hub"
                " (set a hub id or a path with --target-name)"
            )
        return check

    def _record(self, facts: dict[str, Any], check: SelfCheck, directory: Path) -> dict[str, Any]:
        return {
            "fledge_version": __version__,
            "kind": self.method.version(self.draft.config),
            "objective": self.method.name,
            "method": self.method.own_strategy,
            "format": self.layout.name,
            "engine": self.engine.name,
            "file": DRAFT_NAME if isinstance(self.layout, GgufFormat) else WEIGHTS_NAME,
            "engine_title": self.engine.title,
            "engine_version": self.version,
            "target": dataclasses.asdict(self.target),
            "shape": {name: facts[name] for name in _SHAPE},
            "aux_layer_ids": self.draft.aux_layer_ids,
            "chosen_aux_layers": "chosen aux layers" in self.features,
            "embeddings": self.embeddings,
            PLACEHOLDER_KEY: facts[PLACEHOLDER_KEY],
            "num_draft_tokens": self.num_draft_tokens,
            "dtype": self.quantise or facts["torch_dtype"],
            "quantised": dataclasses.asdict(self.choice) if self.quantise else None,
            "step": self.source.step,
            "self_check": dataclasses.asdict(check),
            "checksums": {file.name: checksum(file) for file in sorted(directory.iterdir())},
        }
