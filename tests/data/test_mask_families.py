"""The mask from a plain template against the same family's `{% generation %}` twin.

Templates are the real ones of about 25 model families, from the trl wheel. The twin's raw tags are
the independent reference. The two may differ only in the ways listed below.
"""

import pytest

from data.chats import chat
from data.families import load_template, random_row
from fledge.data.conversation import parse_conversation
from fledge.data.drops import BadRow
from fledge.data.mask import masked_texts

SEEDS = range(60)

# The families with a twin, and the differences in what counts as assistant text:
#   opening  the twin's tags include (part of) the generation prompt, which the server provides
#   trail    the twin's tags include boilerplate after the end token, which is never generated
#   stop     the twin leaves out the token on which the model stops after a tool call
#   appended the twin appends an end token that the template itself leaves to the next turn
#   before   the twin's tags include text that the plain template prints before the prompt's end
#   moved    text before a tool call is rendered after the tool's answer, and tagged there
LISTED = {
    "cohere": set(),
    "cohere2": set(),
    "deepseek_r1_distill": {"opening", "before"},
    "deepseekv3": {"opening", "before"},
    "diffusion_gemma": {"trail", "stop", "moved"},
    "gemma": {"trail"},
    "gemma3": {"trail"},
    "glm4moe": {"appended"},
    "gptoss": {"opening"},
    "idefics3": {"trail"},
    "lfm2": {"trail"},
    "lfm2_v2": {"trail"},
    "llama3": set(),
    "llava_next": set(),
    "muse_glimmer": {"opening"},
    "nemotron_3_5_lightning": {"opening", "trail"},
    "nemotron_3_nano": {"opening", "trail"},
    "nemotron_3_super": {"opening", "trail"},
    "nemotron_3_ultra": {"opening", "trail"},
    "phi3": {"trail"},
    "phi3_5": {"trail"},
    "qwen2_5": {"opening", "trail"},
    "qwen2_5_vl": {"trail"},
    "qwen3": {"trail"},
    "qwen3_5_nothink": {"opening", "trail"},
    "qwen3_5_think": {"opening", "trail"},
    "qwen3_6": {"opening", "trail"},
    "qwen3_8": {"opening", "trail"},
    "qwen3_instruct_2507": {"trail"},
    "qwen3_vl": {"trail"},
    "smolvlm": {"trail"},
}
# The template refuses the row or silently loses text: the row must be dropped for one of these.
REFUSALS = {
    "template refused the row",
    "template does not render tool calls",
    "template does not render the answer",  # muse_glimmer: text before a tool call
    "cannot tell where the answer begins",  # deepseekv3: a second round of tool calls
}


def _tagged_by_twin(twin, conversation, at):
    """The tagged text of the assistant turn at index `at`, as the twin renders it."""
    messages, tools = conversation.messages[: at + 1], conversation.tools
    full, tags = twin.render_tagged(messages, tools)
    last_word = messages[-2]["content"].rpartition(" ")[2]  # question2, rain2: unique in the text
    before = full.rindex(last_word)
    return "".join(full[start:end] for start, end in tags if end > before)


def _explain(plain_text, twin_text, template):
    """The listed differences that explain how the twin's text differs from ours, or None."""
    differences = set()
    if twin_text == plain_text:
        return differences
    trail = template.text_end.trail
    if trail and twin_text.endswith(trail):
        twin_text, differences = twin_text.removesuffix(trail), differences | {"trail"}
    if plain_text == twin_text + "<|tool_response>":
        return differences | {"stop"}
    if twin_text in (plain_text + "<|user|>", plain_text + "<|observation|>"):
        return differences | {"appended"}
    if twin_text.endswith(plain_text):
        extra = twin_text.removesuffix(plain_text)
        if not extra:
            return differences
        if extra in template.opening:
            return differences | {"opening"}
        if extra == "<｜tool▁outputs▁end｜>":
            return differences | {"before"}
        if extra == "Let me look.":
            return differences | {"moved"}
    return None


@pytest.mark.parametrize("family", sorted(LISTED))
def test_plain_template_agrees_with_its_twin(trl_templates, family):
    plain = load_template(trl_templates, family)
    twin = load_template(trl_templates, f"{family}_training")
    assert not plain.has_tags
    assert twin.has_tags
    compared, seen, refused = 0, set(), set()
    for seed in SEEDS:
        conversation = parse_conversation(random_row(seed))
        for at, message in enumerate(conversation.messages):
            if message["role"] != "assistant":
                continue
            turn = type(conversation)(conversation.messages[: at + 1], conversation.tools)
            try:
                [row] = masked_texts(turn, plain, last_turn_only=True)
            except BadRow as bad:
                refused.add(bad.reason)
                break  # the whole row is dropped
            plain_text = "".join(row.supervised())
            twin_text = _tagged_by_twin(twin, conversation, at)
            difference = _explain(plain_text, twin_text, plain)
            assert difference is not None, (family, plain_text, twin_text)
            seen |= difference
            compared += 1
    assert compared >= 20
    assert refused <= REFUSALS
    assert seen <= LISTED[family], f"{family}: not listed: {seen - LISTED[family]}"


@pytest.mark.parametrize("family", sorted(LISTED))
def test_tags_and_boundaries_give_the_same_mask(trl_templates, family):
    """Where plain and twin render the same text, both kinds of mask agree to the character."""
    plain = load_template(trl_templates, family)
    twin = load_template(trl_templates, f"{family}_training")
    compared = 0
    for seed in SEEDS:
        conversation = parse_conversation(random_row(seed))
        try:
            rows, twins = masked_texts(conversation, plain), masked_texts(conversation, twin)
        except BadRow:
            continue
        if [row.text for row in rows] != [row.text for row in twins]:
            continue
        compared += 1
        for row, other in zip(rows, twins, strict=True):
            if "<|tool_response>" in row.text:  # the listed difference "stop"
                assert [s.removesuffix("<|tool_response>") for s in row.supervised()] == [
                    s.removesuffix("<|tool_response>") for s in other.supervised()
                ]
            else:
                assert row.spans == other.spans
    if family not in {"glm4moe"}:  # GLM's twin appends an end token: never the same text
        assert compared >= 5


PLAIN_ONLY = ["llama3_1", "llama3_2", "gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"]
TAGGED = ["lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"]


@pytest.mark.parametrize("family", [*sorted(LISTED), *PLAIN_ONLY, *TAGGED])
def test_supervised_text_is_the_answer_and_the_end_token(trl_templates, family):
    template = load_template(trl_templates, family)
    row = chat("What?", "First words.", "And?", "Last words.")
    texts = masked_texts(parse_conversation(row), template)
    pieces = [piece for text in texts for piece in text.supervised()]
    assert len(pieces) == 2
    for answer, piece, last in zip(
        ("First words.", "Last words."), pieces, (False, True), strict=True
    ):
        before, _, after = piece.partition(answer)
        assert "What?" not in piece
        assert "And?" not in piece
        end = template.text_end
        closing = "" if end.next_role_closes and last else end.closing or "<|user|>"
        assert after == closing
        # Before the answer: only what the model itself generates to open its turn.
        opened = before.replace("<think>", "").replace("</think>", "").strip()
        assert opened in ("", "<|channel|>final<|message|>", "to=user<|message|>")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_think", "qwen3_6", "gptoss"])
def test_rewritten_history_becomes_one_row_per_turn(trl_templates, family):
    template = load_template(trl_templates, family)
    turns = [(f"Q{n}", f"A{n}", f"because {n}") for n in (1, 2, 3)]
    messages = []
    for question, answer, why in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer, "reasoning_content": why})
    rows = masked_texts(parse_conversation({"messages": messages}), template)
    assert len(rows) == 3
    for row, (question, answer, why) in zip(rows, turns, strict=True):
        [supervised] = row.supervised()
        assert why in supervised
        assert answer in supervised
        assert row.text.count("because") == 1  # history without the earlier reasoning
        start = row.spans[0][0]
        index = messages.index({"role": "user", "content": question})
        assert row.text[:start] == template.render(messages[: index + 1], prompt=True)


def test_turns_that_share_their_history_share_a_row(trl_templates):
    """Qwen3 keeps reasoning within one round of tool calls: such turns share a row."""
    template = load_template(trl_templates, "qwen3")
    call = {"function": {"name": "weather", "arguments": {"place": "Oslo"}}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "reasoning_content": "look", "tool_calls": [call]},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "Rain.", "reasoning_content": "tell"},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "Welcome.", "reasoning_content": "polite"},
    ]
    first, second = masked_texts(parse_conversation({"messages": messages}), template)
    assert [len(first.spans), len(second.spans)] == [2, 1]
    assert "look" in first.supervised()[0]
    assert "Rain." in first.supervised()[1]
    assert "look" not in second.text
    assert "Welcome." in second.supervised()[0]
