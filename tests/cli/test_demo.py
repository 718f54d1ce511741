"""The demo's last act, on the tiny target: decoding with the trained draft is lossless."""

from fledge.cli import demo
from fledge.train.fit import fit
from fledge.train.setup import set_up
from train.tiny import Notes, make_chats, make_target, recipe_for


def test_decoding_with_the_draft_changes_nothing(tmp_path, capsys):
    target, chats = make_target(tmp_path / "target"), make_chats(tmp_path / "chats.jsonl")
    recipe = recipe_for(target, chats, tmp_path / "run", "training.epochs=4")
    fit(set_up(recipe), Notes())
    prompts = [[{"role": "user", "content": f"count to {n}"}] for n in (5, 12)]
    assert demo._decode(recipe, tmp_path / "run" / "best", prompts)
    shown = capsys.readouterr().out
    assert "count to 12" in shown
    assert "2 of 2 answers equal" in shown.replace("\n", " ")


def test_green_tokens_are_the_accepted_ones():
    from types import SimpleNamespace

    from fledge.decode.rounds import Round

    class Letters:
        def decode(self, ids, **_):
            return "abcdefgh"[ids[0]]

    # Prompt of 2, then a (the prompt's own), round 1: b c drafted and d the target's, round 2: e.
    rounds = [Round(context=3, accepted=2, emitted=3), Round(context=6, accepted=0, emitted=1)]
    answer = SimpleNamespace(token_ids=[0, 1, 2, 3, 4], prompt_ids=[7, 7], rounds=rounds)
    text = demo._coloured(answer, Letters())
    assert text.plain == "abcde"
    green = [text.plain[s.start : s.end] for s in text.spans if "pale_green1" in str(s.style)]
    assert "".join(green) == "bc"
