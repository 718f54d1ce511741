"""`fledge demo`: the whole workflow with a real 135M model on a laptop CPU."""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from typer import Exit, Option

from fledge.cli.chat import SHADES, coloured, how_marked
from fledge.cli.console import err, in_color, out, plain_table, print_json, shown_on_stderr
from fledge.cli.options import OUT
from fledge.core.files import write_json, write_text
from fledge.core.install import fledge_command
from fledge.core.machine import multiplies_bfloat16
from fledge.core.terminal import marked

if TYPE_CHECKING:
    from fledge.measure.answers import AnsweredTurn
    from fledge.recipe.schema import Recipe
    from fledge.target.hf.model import HFEagle3TargetModel

EXAMPLE = "Example: fledge demo --out demo_out"

_DRAFT_TOKENS = 3  # the depth that the recipe trains
_ANSWER_TOKENS = 64
_IN_BFLOAT16 = (
    "in bfloat16, which this CPU multiplies: checking several tokens costs about as much as one."
)
# The draft that comes with fledge for the demo's target, and how many tokens it drafts on a CPU.
_SHIPPED, _SHIPPED_FOR, _SHIPPED_TOKENS = "smollm2-135m-eagle3", "smollm2-135m", 4
_FRAMES_PER_S = 12
_LONGEST_REPLAY_S = 12.0  # longest replay: slower answers are sped up
_BAR, _BESIDE_BAR = 24, 56  # widths of the longest bar, and of the other columns
_LEAST_GAIN = 1.05  # a smaller gain may be timing noise
_ON_A_GPU = (
    "[bold]On a GPU it pays[/]: there a pass over several tokens takes about as long as over one; "
    "README.md has the figures of this target [dim](benchmarks/results/smollm2_decoding.md)[/]"
)
# The first word of a chat gives its kind: (name, number of questions asked at the end).
_KINDS = {"Write": ("stories", 4), "Give": ("tips", 2), "Explain": ("explanations", 2)}


def demo(
    directory: Annotated[
        Path, Option(*OUT, help="Where the run is kept; a second start continues it.")
    ] = Path("demo_out"),
    rows: Annotated[int, Option(min=0, help="Chats to train on; 0: the demo's own number.")] = 0,
    as_json: Annotated[
        bool, Option("--json", help="Figures as JSON; everything else goes to stderr.")
    ] = False,
) -> None:
    """Look at real chats, train a draft on them, see its acceptance, and decode with it."""
    with shown_on_stderr() if as_json else nullcontext():
        lossless = tell(directory, rows)
    if as_json:
        from fledge.report.page import EVALUATION_NAME

        run = directory / "run"
        figures = json.loads((run / EVALUATION_NAME).read_bytes())
        print_json({"directory": str(run), "lossless": lossless, "evaluation": figures})
    if not lossless:
        raise Exit(1)


def tell(directory: Path, rows: int) -> bool:
    """Run every step from the chats to the report; True when decoding was lossless."""
    from fledge.cli import data, train
    from fledge.demo import CHATS, ROWS

    chats, unseen, run = directory / "chats.jsonl", directory / "unseen.jsonl", directory / "run"
    lines = CHATS.read_text().splitlines(keepends=True)
    write_text(chats, "".join(lines[: rows or ROWS]))
    _heading("1. The data: the assistant's answers will teach the draft")
    data.preview([str(chats)], count=1)
    _heading("2. Numbers that decide a recipe")
    data.stats([str(chats)], pack=512, max_drop_share=0.05)
    _heading("3. Training a draft for SmolLM2-135M on this CPU (a few minutes)")
    recipe = recipe_for(chats, run)
    train.check_existing(recipe)
    if code := train.run_recipe(recipe):
        raise Exit(code)
    _heading("4. Decoding with it: what the draft wrote, the target would have written too")
    questions = _questions(lines[rows or ROWS :] or lines)
    write_text(unseen, "".join(json.dumps(row) + "\n" for row in questions))
    lossless = measure_and_show(run, unseen)
    what_next(run)
    return lossless


def recipe_for(chats: Path, run: Path) -> "Recipe":
    """The demo's recipe, in bfloat16 where the CPU multiplies it. An existing run continues in the
    dtypes it was started with."""
    from fledge.demo import RECIPE
    from fledge.recipe.schema import RESOLVED_NAME, load_recipe

    overrides = [f"data.train={chats}", f"run.output_dir={run}", "run.name=demo"]
    target, step = ["bfloat16" if multiplies_bfloat16() else "float32"] * 2
    if (run / RESOLVED_NAME).is_file():
        begun = load_recipe(run / RESOLVED_NAME).model_dump()
        target, step = begun["target"]["dtype"], begun["training"]["compute_dtype"]
    overrides += [f"target.dtype={target}", f"training.compute_dtype={step}"]
    return load_recipe(RECIPE, overrides)


def _heading(text: str) -> None:
    out.rule(marked("[bold]{}", text))


def _questions(lines: list[str]) -> Iterator[dict[str, Any]]:
    """The last questions of each kind."""
    questions = [json.loads(line)["messages"][0] for line in lines]
    for word, (kind, count) in _KINDS.items():
        matching = [q for q in questions if q["content"].startswith(f"{word} ")]
        yield from ({"category": kind, "messages": [question]} for question in matching[-count:])


def measure_and_show(run: Path, prompts: Path) -> bool:
    """Measure acceptance on new questions, verify it by live decoding, write the report, and show
    one answer decoded both ways; True when decoding was lossless."""
    from fledge.cli import eval, report
    from fledge.measure.evaluation import EvalOptions
    from fledge.report.page import EVALUATION_NAME
    from fledge.training.runs import draft_directory, load_target

    options = EvalOptions(live=2, max_new_tokens=_ANSWER_TOKENS, samples=8)
    # whatever the training dtype: in float32 the texts are equal, token for token
    with load_target(draft_directory(run), dtype="float32") as target:
        measured = eval.measure_drafts([run], target, [str(prompts)], options)
    write_json(run / EVALUATION_NAME, measured.to_json())
    [draft] = measured.reports
    for sample in draft.samples[:2]:
        out.print(sample.prompt, style="bold")
        pieces, depths = [t.text for t in sample.tokens], [t.depth for t in sample.tokens]
        out.print(coloured(pieces, depths), soft_wrap=True)
    shade = f"[black on {SHADES[1]}]{{}}[/]" if in_color() else "{}"
    sentence = f"\nThe draft wrote what is {shade}. On {{}} questions it never saw:"
    out.print(marked(sentence, how_marked(), len(draft.samples)))
    out.print(eval.positions(measured.reports))
    live = draft.live
    assert live is not None  # options.live is 2
    lossless = bool(live.same_texts == live.texts and live.agrees)
    mark = "[green]lossless[/]" if lossless else "[red]not lossless[/]"
    equal = "{} of {} answers decoded live with the draft equal the target's own, token for token"
    figures = live.same_texts, live.texts, live.same_rounds, live.rounds
    out.print(marked(f"{mark}: {equal}; {{}} of {{}} rounds as replayed", *figures))
    report.report(run)
    _heading("5. The pay-off: one answer, without a draft and with it")
    fast = multiplies_bfloat16()  # then a pass over four tokens takes about as long as over one
    if fast:
        out.print(_IN_BFLOAT16, style="dim")
    with load_target(draft_directory(run), dtype="bfloat16" if fast else "float32") as target:
        _show_side_by_side(run, target, measured.answers.turns[-1])  # an explanation
    return lossless


def _show_side_by_side(run: Path, target: "HFEagle3TargetModel", turn: "AnsweredTurn") -> None:
    """Show an answer decoded without a draft, with the one just trained, and with the one that
    comes with fledge for this target."""
    from fledge.measure.speed import decode_both
    from fledge.training.runs import draft_directory, load_draft_beside, recipe_of

    def decoded(path: Path, tokens: int) -> Any:
        draft = load_draft_beside(target, path)
        lengths = {"num_draft_tokens": tokens, "max_new_tokens": _ANSWER_TOKENS}
        return decode_both(target, draft, turn.prompt_ids, **lengths)

    recipe = recipe_of(run)
    known = recipe is not None and getattr(recipe.target, "model", "") == _SHIPPED_FOR
    with err.waiting("decoding one answer both ways"):
        both = decoded(draft_directory(run), _DRAFT_TOKENS)
        shipped = decoded(draft_directory(Path(_SHIPPED)), _SHIPPED_TOKENS) if known else None
    if both is not None:
        out.print(turn.question, style="bold")
        show(both, shipped)


def what_next(run: Path) -> None:
    """Three commands to try next, each on its own line, and where to find real recipes."""
    _heading("What to type next")
    steps = {
        ("chat", run, "--compare"): f"talk to it: the draft's words are {how_marked()}, "
        "both speeds below",
        ("report", run): "the page again: curves, acceptance, who wrote which token",
        ("export", run, "--engine", "vllm"): "files for vLLM, checked before they are there",
    }
    for arguments, purpose in steps.items():
        out.say(f"  {fledge_command(*arguments)}")
        out.print(Padding(Text(purpose, style="dim"), (0, 0, 0, 6)))
    more = fledge_command("recipe", "list")
    out.say(f"This draft knows one narrow domain. Recipes of real ones: {more}", style="dim")


# --- side by side --------------------------------------------------------------------------------
# One answer without the draft and with it. On a terminal both are replayed in two columns at the
# speed they were decoded; below, and everywhere else, come two bars, the figures, and a sentence on
# what was gained or why not.


def show(both: Any, shipped: Any = None, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show both answers, the figures and the verdict; `shipped`: with another draft too. They are
    `measure.speed.SideBySide`."""
    courses = {"without the draft": both.plain, "with the draft": both.drafted}
    if shipped is not None:
        courses[_SHIPPED] = shipped.drafted
    longest = max(course.seconds for course in courses.values())
    if out.is_interactive:
        speed_up = max(1.0, longest / _LONGEST_REPLAY_S)
        frames = int(longest / speed_up * _FRAMES_PER_S) + 1
        with Live(_columns(courses, 0.0), console=out, auto_refresh=False) as live:
            for frame in range(1, frames + 1):
                sleep(1 / _FRAMES_PER_S)
                now_s = longest if frame == frames else frame * speed_up / _FRAMES_PER_S
                live.update(_columns(courses, now_s), refresh=True)
        if speed_up > 1:
            out.print(f"(shown {speed_up:.1f} times as fast as it was)", style="dim")
    table = plain_table("", "", "seconds", "tokens/s", "target passes", words=2)
    widest = max(4, min(_BAR, out.width - _BESIDE_BAR))
    for name, course in courses.items():
        bar = "█" * max(1, round(widest * course.seconds / longest))
        table.add_row(
            name, Text(bar, style="cyan" if course is both.plain else "green"),
            f"{course.seconds:.1f}", f"{course.tokens_per_s:.1f}", f"{course.passes}",
        )  # fmt: skip
    out.print(table)
    out.print(verdict(both))
    if shipped is not None:
        out.print(marked("[bold]{}[/], trained longer: ", _SHIPPED), end="")
        out.print(verdict(shipped))


def _columns(courses: dict[str, Any], now_s: float) -> Table:
    """The text decoded after `now_s` seconds; dots reserve the space of the remaining text, so that
    the layout does not jump."""
    table = Table(box=None, expand=True, padding=(0, 1))
    cells = []
    for name, course in courses.items():
        pieces, count = course.pieces, course.known(now_s)
        title = marked("[bold]{}[/] [dim]{}/{} tokens[/]", name, count, len(pieces))
        table.add_column(title, ratio=1)
        to_come = Text(re.sub(r"\S", "·", "".join(pieces[count:])), style="dim")
        cells.append(coloured(pieces[:count], course.depths[:count]) + to_come)
    table.add_row(*cells)
    return table


def verdict(both: Any) -> Text:
    """What the draft gained; if it gained nothing, why."""
    speed = both.speed
    same = "the same text, token for token" if both.same else "another text (a near tie)"
    fewer = f"{both.drafted.passes} passes of the target instead of {both.plain.passes}"
    if speed.disturbed:
        return marked("{}; {}; the clock was disturbed, so no speed-up is shown", same, fewer)
    if speed.measured >= _LEAST_GAIN:
        return marked("[bold green]{:.2f} times as fast[/]: {}, {}", speed.measured, same, fewer)
    step_s = speed.plain_step_s
    figures = (
        speed.measured, same, fewer, speed.verify_s / step_s, speed.draft_s / step_s,
        speed.break_even, speed.tokens_per_round,
    )  # fmt: skip
    return marked(
        "{:.2f} times as fast here: {}, {}, but a pass that checks the drafted tokens takes {:.1f} "
        "times as long as a plain one, and drafting {:.0%} of one. Below {:.2f} tokens a round "
        "nothing is gained; this answer had {:.2f}.\n" + _ON_A_GPU,
        *figures,
    )
