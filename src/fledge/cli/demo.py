"""`fledge demo`: the whole story on a real 135M model, on a laptop CPU."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

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
    """Look at real chats, train a draft on them, see its acceptance, and decode with it."""
    from fledge.cli import data, train
    from fledge.demo import CHATS, RECIPE, ROWS
    from fledge.files import write_text
    from fledge.train.recipe import load_recipe

    chats = directory / "chats.jsonl"
    lines = CHATS.read_text().splitlines(keepends=True)
    write_text(chats, "".join(lines[: rows or ROWS]))
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
    out.rule("[bold]4. Decoding with it: what the draft wrote, the target would have written too")
    unseen = [json.loads(line)["messages"][:1] for line in lines[-2:]]
    if not _decode(recipe, directory / "run" / "best", unseen):
        raise typer.Exit(1)
    err.print(
        "This draft knows one narrow domain and three tokens ahead: enough to see it learn. "
        "recipes/ has what real drafts are made with.",
        style="dim",
    )


def _decode(recipe: Any, draft_dir: Path, prompts: list[Any]) -> bool:
    """Answer prompts the draft never saw, with it and without; True when the texts are equal."""
    import torch

    from fledge.decode.speculative import SpeculativeDecoder
    from fledge.decode.stops import Stops
    from fledge.draft.model import LlamaEagle3DraftModel
    from fledge.models.resolve import load_model, load_tokenizer

    tokenizer = load_tokenizer(recipe.target.model)
    model = load_model(recipe.target.model, dtype=torch.float32)
    draft = LlamaEagle3DraftModel.from_pretrained(draft_dir)
    ids = [
        tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for prompt in prompts
    ]
    stops = Stops(80, frozenset([tokenizer.eos_token_id]))
    depths = recipe.objective.ttt_steps
    layers = recipe.target.aux_layer_ids
    decoder = SpeculativeDecoder(model, draft, aux_layer_ids=layers, num_draft_tokens=depths)
    drafted = decoder.generate(ids, stops)
    plain = SpeculativeDecoder(model).generate(ids, stops)
    for prompt, answer in zip(prompts, drafted, strict=True):
        out.print(prompt[0]["content"], style="bold", markup=False)
        out.print(_coloured(answer, tokenizer))
    rounds = [r for answer in drafted for r in answer.rounds]
    tokens = sum(r.emitted for r in rounds)
    equal = sum(a.token_ids == b.token_ids for a, b in zip(drafted, plain, strict=True))
    out.print(
        f"[black on pale_green1]green[/] tokens were the draft's: {tokens} tokens in {len(rounds)} "
        f"rounds of the target, [bold]{tokens / max(1, len(rounds)):.2f}[/] a round; "
        f"{equal} of {len(plain)} answers equal the target's own, token for token"
    )
    return equal == len(plain)


def _coloured(answer: Any, tokenizer: Any) -> Text:
    """The text with the draft's accepted tokens in green."""
    text = Text()
    new, prompt = answer.token_ids, len(answer.prompt_ids)
    drafted = set()
    for r in answer.rounds:  # a round adds its accepted tokens first, then the target's own
        at = r.context - prompt
        drafted |= set(range(at, at + r.accepted))
    for index, token in enumerate(new):
        piece = tokenizer.decode([token], skip_special_tokens=True)
        text.append(piece, style="black on pale_green1" if index in drafted else "")
    return text
