"""A tiny target with a real tokenizer and template, and recipes that train on it in seconds."""

import json
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data.chats import chat, write_jsonl
from fledge.demo import CHATS
from fledge.recipe.schema import Recipe, load_recipe

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_target(directory: Path) -> Path:
    """A random Llama of 4 layers whose tokenizer was trained on the demo chats."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    texts = [json.loads(line)["messages"][1]["content"] for line in CHATS.open()]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts[:50], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|end|>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # confident predictions, so that there is something to learn
        model.lm_head.weight.mul_(60)
        model.model.embed_tokens.weight.mul_(30)
    model.save_pretrained(directory)
    return directory


def make_overflowing(target: Path, directory: Path) -> Path:
    """The same target in float16: its weights are finite, but layer 2 overflows float16 (not
    float32). Special tokens alone do not trigger it, so a quick check does not find it."""
    shutil.copytree(target, directory)
    model = LlamaForCausalLM.from_pretrained(target)
    mlp = model.model.layers[2].mlp
    with torch.no_grad():
        model.model.embed_tokens.weight[:5, 0] = 0.0
        model.model.embed_tokens.weight[5:, 0] = 5.0  # a channel that marks ordinary text
        for weight, factor in ((mlp.gate_proj.weight, 10.0), (mlp.up_proj.weight, 50.0)):
            weight[0] = 0.0
            weight[0, 0] = factor
        mlp.down_proj.weight[:, 0] = 100.0
    model.half().save_pretrained(directory)
    return directory


def make_damaged(target: Path, directory: Path) -> Path:
    """The same target with one NaN in a weight of layer 1."""
    shutil.copytree(target, directory)
    model = LlamaForCausalLM.from_pretrained(target)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = float("nan")
    model.save_pretrained(directory)
    return directory


def make_chats(path: Path, count: int = 60) -> Path:
    answers = (" ".join(str(n) for n in range(1 + i % 17)) for i in range(count))
    return write_jsonl(path, [chat(f"count to {i}", text) for i, text in enumerate(answers)])


def recipe_for(target: Path, chats: Path, run: Path, *overrides: str) -> Recipe:
    kinds = {text for text in overrides if text.startswith("objective.kind=")}
    if kinds <= {"objective.kind=eagle3"}:
        overrides = ("objective.ttt_steps=3", *overrides)
    if kinds & {f"objective.kind={kind}" for kind in ("eagle1", "eagle2", "mtp")}:
        overrides = ("target.aux_layer_ids=null", "draft.draft_vocab_size=null", *overrides)
    return load_recipe(
        None,
        [
            f"target.model={target}", "target.aux_layer_ids=0,1,2", "target.dtype=float32",
            f"data.train={chats}", "data.valid_rows=8", "data.max_length=64", "data.workers=1",
            "packing.tokens=96", "draft.draft_vocab_size=128",
            "training.lr=3e-3", "training.epochs=2", "training.micro_batch=2",
            "training.device=cpu", "checkpoint.every_steps=3", "evaluation.every_steps=4",
            "tracking.every_steps=2", f"run.output_dir={run}", *overrides,
        ],
    )  # fmt: skip


def _block(kind, *, size, layers):
    return (
        f"objective.kind={kind}", f"objective.listened_layers={len(layers.split(','))}",
        f"target.aux_layer_ids={layers}", f"objective.block_size={size}",
        "objective.anchors=1024", "draft.layers=2", "draft.draft_vocab_size=null",
        "training.steps=6", "training.lr=1e-2",
    )  # fmt: skip


BLOCKS = {
    "dflash": _block("dflash", size=5, layers="0,1,2"),
    "dspark": _block("dspark", size=4, layers="0,2"),
    "domino": (
        *_block("domino", size=4, layers="0,2"), "objective.rank=8", "objective.gru_hidden_dim=8",
    ),
    "xpress": (*_block("xpress", size=5, layers="0,2"), "objective.rank=8"),
    "dflash2": (
        *_block("dflash2", size=5, layers="0,2"), "objective.selector_rank=8",
        "objective.candidates=4",
    ),
    "lilicorr": (
        *_block("lilicorr", size=5, layers="0,2"), "objective.lattice_width=16",
        "objective.factor_dim=8", "objective.candidates=4",
    ),
}  # fmt: skip


class Notes:
    """An observer that keeps everything it receives."""

    def __init__(self):
        self.notes, self.lines, self.evaluations = [], [], []

    def note(self, text):
        self.notes.append(text)

    def logged(self, values):
        self.lines.append(values)

    def evaluated(self, values):
        self.evaluations.append(values)
