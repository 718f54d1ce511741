"""The mask token is never a token that a text could contain."""

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fledge import BadInput
from fledge.methods.shared.placeholder import check_placeholder, choose_placeholder


def byte_level(added=(), **options):
    """A byte-level tokenizer with the 256 bytes and some added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bare = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<eos>", **options)
    tokenizer.add_tokens([AddedToken(name, special=special) for name, special in added])
    return tokenizer


def choose(tokenizer, extra=0):
    token_id = choose_placeholder(tokenizer, len(tokenizer) + extra)
    assert check_placeholder(token_id, tokenizer, len(tokenizer) + extra) == token_id
    return tokenizer.convert_ids_to_tokens(token_id) or token_id


USED = {"chat_template": "<|user|>{{ messages[0].content }}<eos>"}
SPECIAL = [("<think>", False), ("<|user|>", True), ("<repo>", True), ("<file>", True)]
RESERVED = [
    "<|reserved_special_token_0|>", "<unused7>", "[unused12]", "<|extra_204|>",
    "<|placeholder1|>", "<｜place▁holder▁no▁0｜>", "<SPECIAL_20>", "[control_8]",
]  # fmt: skip
CHOICES = [  # an embedding row without a token, a reserved token, a special token nobody uses
    (byte_level([(RESERVED[0], True)]), 3, 258),
    *((byte_level([("<tool>", True), (n, False), ("unused", False)]), 0, n) for n in RESERVED),
    (byte_level(SPECIAL, **USED), 0, "<repo>"),
]


@pytest.mark.parametrize(("tokenizer", "extra", "choice"), CHOICES, ids=lambda x: str(x)[:30])
def test_the_choice_is_what_stands_for_least(tokenizer, extra, choice):
    assert choose(tokenizer, extra) == choice


def test_last_choice_is_a_byte_that_no_text_contains():
    """0xC0 never occurs in UTF-8; the letter that stands for it is encoded as two other bytes."""
    tokenizer = byte_level()
    assert choose(tokenizer) == "À"
    chosen = tokenizer.convert_tokens_to_ids("À")
    every_letter = "".join(map(chr, range(1, 0x3000)))
    assert chosen not in tokenizer.encode(every_letter)


def test_a_vocabulary_of_letters_has_no_mask_token():
    letters = {letter: i for i, letter in enumerate("abÀÿ")} | {"<eos>": 4}
    bare = Tokenizer(models.WordLevel(letters, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<eos>", unk_token="a")
    with pytest.raises(BadInput, match="never emits"):
        choose_placeholder(tokenizer, len(tokenizer))


def test_explicit_ids_must_follow_the_same_rule():
    tokenizer = byte_level(
        [("<|user|>", True), ("<think>", False)], chat_template="<|user|>{{ messages }}"
    )
    size = len(tokenizer)
    for token, why in (
        ("z", "ordinary token"),
        ("<think>", "ordinary token"),
        ("<eos>", "eos_token"),
        ("<|user|>", "chat template"),
    ):
        with pytest.raises(BadInput, match=why):
            check_placeholder(tokenizer.convert_tokens_to_ids(token), tokenizer, size)
    for outside in (-1, size):
        with pytest.raises(BadInput, match="ids 0"):
            check_placeholder(outside, tokenizer, size)
    spare = tokenizer.convert_tokens_to_ids("À")
    assert check_placeholder(spare, tokenizer, size) == spare


def test_choices_for_real_tokenizers(smollm2_tokenizer, shared_data):
    assert choose(smollm2_tokenizer) == "<repo_name>"
    stories = AutoTokenizer.from_pretrained(shared_data / "models" / "stories260K")
    assert choose(stories) == "<0xC0>"
