"""A random tiny Llama that llama.cpp serves too, and drafts of every form, trained in seconds."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engines.cases import VOCABULARY, engine_target, greedy_texts, make_draft, saved, train
from engines.llamacpp.drafts import replayed
from fledge.formats.codec import PlainDraft, TargetFacts, config_values, draft_facts
from fledge.formats.gguf_layout import write_gguf
from fledge.formats.gguf_tokenizer import tokenizer_keys
from fledge.formats.source import read_source
from fledge.measure.replay import Replay, Text
from fledge.methods.registry import method_of
from fledge.target.hf.model import HFEagle3TargetModel
from gguf_target import target_gguf

LAYERS, END, PROMPT, LIMIT, DEPTHS = [1, 3, 5], 2, 6, 32, 4
_SCALED = {"rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
_LLAMA3 = {**_SCALED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_BLOCK = {"mask_token_id": 2, "num_hidden_layers": 2, "block_size": DEPTHS + 1}
_SPARK = {**_BLOCK, "block_size": DEPTHS, "markov_rank": 8, "sample_from_anchor": True}
_SURE = {"confidence_head": True}
KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {"width": 60},
    "eagle3, full vocabulary": {},
    "eagle3, own embeddings": {"width": 60},
    "eagle3, wider than the target": {"width": 60, "hidden_size": 96},
    "eagle3, llama3 rotary": {"rope_parameters": _LLAMA3},
    "eagle3, yarn rotary": {"rope_parameters": {**_SCALED, "rope_type": "yarn"}},
    "eagle3, linear rotary": {"rope_parameters": {**_SCALED, "rope_type": "linear"}},
    "dflash": _BLOCK,
    "dflash, small vocabulary": {**_BLOCK, "width": 60},
    "dspark": {**_SPARK, **_SURE},
    "dspark, small vocabulary": {**_SPARK, **_SURE, "width": 60},
    "dspark, without confidence": _SPARK,
    "dspark, from the second slot": {
        **_SPARK, **_SURE, "sample_from_anchor": False, "block_size": DEPTHS + 1,
    },
}  # fmt: skip


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<s>", "</s>", *map(chr, range(33, 126)), "t0"]
    model = models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[("t", "0")])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


class Tiny:
    """The target, and the texts that it writes."""

    def __init__(self, root: Path) -> None:
        self.root, self.model = root, engine_target("llama")
        self.directory = saved(self.model, root / "target")
        make_tokenizer().save_pretrained(self.directory)
        self.gguf = target_gguf(str(self.directory), root / "target.gguf")
        self.rows = greedy_texts(self.model, count=10, prompt=PROMPT, answer=LIMIT + DEPTHS + 1)
        self.texts = [Text(row[:PROMPT], row[PROMPT:]) for row in self.rows[4:].tolist()]

    def trained(self, kind: str) -> "Trained":
        draft = make_draft(self.model, LAYERS, **KINDS[kind])
        target = HFEagle3TargetModel(self.model, LAYERS, supervision="hidden", num_aux_layers=3)
        if kind != "eagle3, own embeddings":
            draft.freeze_embeddings()
        unsure = kind == "dspark, without confidence"
        options = {"confidence_weight": 0.0} if unsure else {}
        seen = self.rows[:8]
        batch = (seen, torch.ones_like(seen), torch.ones_like(seen))
        train(draft, target, [batch] * 80, **options)
        directory = self.root / kind
        draft.eval().save_pretrained(directory)
        texts = replayed(draft, target, self.texts, DEPTHS)
        return Trained(self, directory, method_of(draft.config).name, texts)


@dataclass(frozen=True)
class Trained:
    tiny: Tiny
    directory: Path
    method: str
    replays: list[Replay]

    def write(
        self,
        path: Path,
        *,
        keys: Mapping[str, Any] | None = None,
        tensors: Mapping[str, torch.Tensor] | None = None,
        **layout: Any,
    ) -> Path:
        """The draft's file, without any check; the arguments put something wrong into it."""
        facts = TargetFacts(layers=8)
        plain = read_source(self.directory).draft(facts)
        method = method_of(plain.config)
        plain = method.with_target_rows(plain, self.tiny.model.lm_head.weight.detach())
        plain = PlainDraft(plain.config, {**plain.tensors, **(tensors or {})})
        if self.directory.name.endswith(("own embeddings", "wider than the target")):
            layout["ignored"] = frozenset()
        form: Any = dataclasses.replace(method.formats["llama.cpp"], **layout)
        own = draft_facts(plain, facts, num_draft_tokens=DEPTHS)
        values = {**config_values(form, own, frozenset()), **(keys or {})}
        tokenizer = tokenizer_keys(str(self.tiny.directory), VOCABULARY)
        write_gguf(path, form, plain, values, tokenizer, name="tiny", types={})
        return path
