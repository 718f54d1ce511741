"""`fledge demo`: the whole workflow with a real 135M model on a laptop CPU."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Exit, Option

from fledge.cli.chat import SHADES, coloured
from fledge.cli.console import err, out, print_json, shown_on_stderr
from fledge.cli.loading import load_draft_beside
from fledge.cli.options import OUT
from fledge.core.files import write_json, write_text
from fledge.core.install import fledge_command
from fledge.core.machine import multiplies_bfloat16
from fledge.core.terminal import marked

if TYPE_CHECKING:
    from fledge.api import Evaluation
    from fledge.measure.answers import AnsweredTurn
    from fledge.recipe.schema import Recipe
    from fledge.target.hf.model import HFEagle3TargetModel

EXAMPLE = "Example: fledge demo --out demo_out"

_DRAFT_TOKENS = 3  # the depth that the recipe trains
_ANSWER_TOKENS = 64
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
    with ExitStack() as stack:
        if as_json:
            stack.enter_context(shown_on_stderr())
        lossless = tell(directory, rows)
    if as_json:
        from fledge.report.gather import EVALUATION_NAME

        run = directory / "run"
        figures = json.loads((run / EVALUATION_NAME).read_bytes())
        print_json({"directory": str(run), "lossless": lossless, "evaluation": figures})
    if not lossless:
        raise Exit(1)


def tell(directory: Path, rows: int) -> bool:
    """Run every step from the chats to the report; True when decoding was lossless."""
    from fledge.cli import data, train
    from fledge.demo import CHATS, ROWS

    chats = directory / "chats.jsonl"
    lines = CHATS.read_text().splitlines(keepends=True)
    write_text(chats, "".join(lines[: rows or ROWS]))
    _heading("1. The data: green tokens will teach the draft")
    data.preview([str(chats)], count=1)
    _heading("2. Numbers that decide a recipe")
    data.stats([str(chats)], pack=512, max_drop_share=0.05)
    _heading("3. Training a draft for SmolLM2-135M on this CPU (a few minutes)")
    recipe = recipe_for(chats, directory / "run")
    train.check_existing(recipe)
    code = train.run_recipe(recipe)
    if code:
        raise Exit(code)
    _heading("4. Decoding with it: what the draft wrote, the target would have written too")
    unseen = directory / "unseen.jsonl"
    questions = _questions(lines[rows or ROWS :] or lines)
    write_text(unseen, "".join(json.dumps(row) + "\n" for row in questions))
    lossless = measure_and_show(directory / "run", unseen)
    what_next(directory / "run")
    return lossless


def recipe_for(chats: Path, run: Path) -> "Recipe":
    """The demo's recipe, in bfloat16 where the CPU multiplies it: a quarter less time. An existing
    run continues in the dtype it was started with."""
    from fledge.demo import RECIPE
    from fledge.recipe.schema import RESOLVED_NAME, load_recipe

    overrides = [f"data.train={chats}", f"run.output_dir={run}", "run.name=demo"]
    fast = multiplies_bfloat16()
    if (run / RESOLVED_NAME).is_file():
        fast = load_recipe(run / RESOLVED_NAME).training.compute_dtype == "bfloat16"
    if fast:
        overrides += ["target.dtype=bfloat16", "training.compute_dtype=bfloat16"]
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
    """Measure acceptance on new questions, verify it by live decoding, and write the report; True
    when decoding was lossless."""
    from fledge.cli import eval, report
    from fledge.measure.evaluation import EvalOptions
    from fledge.train.loading import load_target
    from fledge.train.runs import draft_directory

    options = EvalOptions(
        num_draft_tokens=_DRAFT_TOKENS, live=2, max_new_tokens=_ANSWER_TOKENS, samples=8
    )
    # whatever the training dtype: in float32 the texts are equal, token for token
    with load_target(draft_directory(run), dtype="float32") as target:
        measured = eval.measure_drafts([run], [str(prompts)], options, target=target)
        lossless = _show_measured(run, measured)
        report.report(run)
        _heading("5. The same answer, without the draft and with it")
        _show_side_by_side(run, target, measured.answers.turns[0])
    return lossless


def _show_measured(run: Path, measured: "Evaluation") -> bool:
    """Show two answers in color and the figures of all; True when decoding was lossless."""
    from fledge.cli import eval
    from fledge.report.gather import EVALUATION_NAME

    write_json(run / EVALUATION_NAME, measured.to_json())
    [draft] = measured.reports
    for sample in draft.samples[:2]:
        out.print(sample.prompt, style="bold")
        pieces, depths = [t.text for t in sample.tokens], [t.depth for t in sample.tokens]
        out.print(coloured(pieces, depths), soft_wrap=True)
    shade = f"[black on {SHADES[1]}]green[/]"
    sentence = "tokens were the draft's; on {} questions it never saw:"
    out.print(marked(f"\n{shade} {sentence}", len(draft.samples)))
    out.print(eval.positions(measured.reports))
    live = draft.live
    assert live is not None  # options.live is 2
    lossless = bool(live.same_texts == live.texts and live.agrees)
    mark = "[green]lossless[/]" if lossless else "[red]not lossless[/]"
    out.print(
        marked(
            f"{mark}: {{}} of {{}} answers decoded live with the draft equal the target's own, "
            "token for token; {} of {} rounds as replayed",
            live.same_texts, live.texts, live.same_rounds, live.rounds,
        )
    )  # fmt: skip
    return lossless


def _show_side_by_side(run: Path, target: "HFEagle3TargetModel", turn: "AnsweredTurn") -> None:
    """Show the first answer, as above, decoded without the draft and with it."""
    from fledge.cli import side_by_side
    from fledge.measure.side_by_side import decode_both
    from fledge.train.runs import draft_directory

    draft = load_draft_beside(target, draft_directory(run))
    with err.waiting("decoding one answer both ways"):
        comparison = decode_both(
            target, draft, turn.prompt_ids,
            num_draft_tokens=_DRAFT_TOKENS, max_new_tokens=_ANSWER_TOKENS,
        )  # fmt: skip
    if comparison is not None:
        out.print(turn.question, style="bold")
        side_by_side.show(comparison)


def what_next(run: Path) -> None:
    """Print three commands to try next, each on its own line, and where to find real recipes."""
    _heading("What to type next")
    for arguments, purpose in (
        (("chat", run, "--compare"), "talk to it: its words are green, both speeds below"),
        (("report", run), "the page again: curves, acceptance, who wrote which token"),
        (("export", run, "--engine", "vllm"), "files for vLLM, checked before they are there"),
    ):
        out.say(f"  {fledge_command(*arguments)}")
        out.print(f"      {purpose}", style="dim")
    more = fledge_command("recipe", "list")
    out.say(f"This draft knows one narrow domain. Recipes of real ones: {more}", style="dim")
