"""`fledge demo`: the whole story on a real 135M model, on a laptop CPU."""

from pathlib import Path
from typing import Annotated

import typer

from fledge.cli.console import err, out

EXAMPLE = "Example: fledge demo --out demo_out"


def demo(
    directory: Annotated[
        Path, typer.Option("--out", help="Where the run is kept; a second start continues it.")
    ] = Path("demo_out"),
    rows: Annotated[
        int, typer.Option(min=0, help="Chats to train on; 0: the demo's own number.")
    ] = 0,
) -> None:
    """Look at real chats, train a draft on them, and see its acceptance before and after."""
    from fledge.cli import data, train
    from fledge.demo import CHATS, RECIPE, ROWS
    from fledge.files import write_text
    from fledge.train.recipe import load_recipe

    chats = directory / "chats.jsonl"
    lines = CHATS.read_text().splitlines(keepends=True)[: rows or ROWS]
    write_text(chats, "".join(lines))
    out.rule("[bold]1. The data: green tokens will teach the draft")
    data.preview([str(chats)], count=1)
    out.rule("[bold]2. Numbers that decide a recipe")
    data.stats([str(chats)], pack=512, max_drop_share=0.05)
    out.rule("[bold]3. Training a draft for SmolLM2-135M on this CPU (a few minutes)")
    overrides = [f"data.train={chats}", f"run.output_dir={directory / 'run'}"]
    recipe = load_recipe(RECIPE, overrides)
    train.check_existing(recipe)
    code = train.run_recipe(recipe)
    if code:
        raise typer.Exit(code)
    err.print(
        "This draft knows one narrow domain and three tokens ahead: enough to see it learn. "
        "recipes/ has what real drafts are made with.",
        style="dim",
    )
