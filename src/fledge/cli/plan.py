"""`fledge plan`: memory, disk and hours of a run, before it runs."""

from typing import Annotated

import typer

from fledge.cli.console import out, print_json, progress_bar, quiet_libraries

EXAMPLE = "Example: fledge plan recipes/smollm2_gpu.yaml data.train=chats.jsonl"


def plan(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="RECIPE [section.key=value ...]", show_default=False),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict what a recipe costs on this machine; `fledge train` prints the truth beside it."""
    from fledge.recipe.schema import load_recipe, split_arguments
    from fledge.train.predict import predict
    from fledge.train.setup import set_up

    path, overrides = split_arguments(arguments)
    recipe = load_recipe(path, overrides)
    quiet_libraries()
    with progress_bar("parts") as bar:
        task = bar.add_task("preparing data", total=None, note="")
        training = set_up(recipe, lambda at: bar.update(task, total=at.parts, completed=at.done))
    predicted = predict(recipe, training)
    if as_json:
        print_json(predicted.to_json())
        return
    stream = training.stream
    out.print(
        f"{stream.steps:,} steps, {predicted.tokens:,} tokens, padding {stream.padding_share:.2%}"
    )
    out.print(predicted.table())
