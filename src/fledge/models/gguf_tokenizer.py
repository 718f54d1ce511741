"""The tokenizer of a GGUF file, built from the file's own tables.

The conversion in transformers loses the pre-tokenizer (without SmolLM2's, 2 % of prompts tokenize
differently) and the end-of-turn token (it reports the bos token as eos).
"""

from pathlib import Path
from typing import Any

from fledge.core.errors import BadInput
from fledge.models.gguf_facts import Facts

_CONTROL, _USER_DEFINED = 3, 4  # gguf.TokenType, as stored in tokenizer.ggml.token_type

# `tokenizer.ggml.pre` -> how text is split before byte-pair merging. Names that share a rule share
# a value. Other names are refused: a wrong split would go unnoticed until serving.
_PRE_TOKENIZER = {
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), "digits"),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), "gpt2"),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe"), "llama3"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), "qwen2"),
}
_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_tokenizer(path: Path, facts: Facts) -> Any:
    """A fast tokenizer with the special tokens and the chat template of the file."""
    from tokenizers import processors
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if facts.get("tokenizer.ggml.model") == "gpt2":
        backend = _byte_level_bpe(path, facts)
    else:  # SentencePiece families: the conversion in transformers keeps their rules
        backend = AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, trust_remote_code=False
        ).backend_tokenizer
    bos = facts.token("bos")
    if facts.get("tokenizer.ggml.add_bos_token") and bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B:1",
            special_tokens=[(bos, backend.token_to_id(bos))],
        )
    special = {
        "bos_token": bos,
        "eos_token": facts.token("eos"),
        "pad_token": facts.token("padding") or facts.token("eos"),
        "unk_token": facts.token("unknown"),
    }
    architecture = facts.get("general.architecture", "")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=facts.get("tokenizer.chat_template"),
        model_max_length=facts.get(f"{architecture}.context_length", int(1e30)),
        clean_up_tokenization_spaces=False,
        **{key: token for key, token in special.items() if token is not None},
    )


def _byte_level_bpe(path: Path, facts: Facts) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    pre = facts.get("tokenizer.ggml.pre", "gpt-2")
    rule = _PRE_TOKENIZER.get(pre)
    if rule is None:
        raise BadInput(
            f"its pre-tokenizer '{pre}' is not known, and guessing would tokenize text wrongly",
            where=str(path),
            fix="use the model's Hugging Face directory or hub id instead",
        )
    tokens: list[str] = facts.get("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in facts.get("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=rule == "llama3"))
    tokenizer.pre_tokenizer = _pre_tokenizer(rule)
    tokenizer.decoder = decoders.ByteLevel()
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    kinds = facts.get("tokenizer.ggml.token_type", [])
    pairs = list(zip(tokens, kinds, strict=False))
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, k in pairs if k == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token, k in pairs if k == _USER_DEFINED]
    )
    return tokenizer


def _pre_tokenizer(rule: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    use_regex = rule in ("gpt2", "digits")  # ByteLevel then splits by GPT-2's pattern
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    if rule == "gpt2":
        return bytes_
    if rule == "digits":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_])
    pattern = Regex(_SPLIT_PATTERN % ("{1,3}" if rule == "llama3" else ""))
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, behavior="isolated"), bytes_])
