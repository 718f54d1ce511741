"""`fledge plan`: memory, disk and hours of a run, before it runs."""

import time

from fledge.cli.console import out, print_json, progress_bar, quiet_libraries
from fledge.cli.loading import recipe_of_words, show_set_up
from fledge.cli.options import AsJson, RecipeWords
from fledge.core.text import counted

EXAMPLE = "Example: fledge plan smollm2_gpu data.train=chats.jsonl"


def plan(arguments: RecipeWords, as_json: AsJson = False) -> None:
    """Predict what a recipe costs on this machine; `fledge train` prints the truth beside it."""
    begin = time.perf_counter()
    from fledge.train.predict import predict
    from fledge.train.setup import set_up

    recipe = recipe_of_words(arguments)
    quiet_libraries()
    with progress_bar("preparing data", "parts") as update:
        training = set_up(recipe, show_set_up(update))
        update(description="trying out this machine")
        predicted = predict(training, begin)
    if as_json:
        print_json({**predicted.to_json(), "warnings": training.warnings})
        return
    stream = training.stream
    out.print(
        f"{counted(stream.steps, 'step')}, {counted(predicted.tokens, 'token')}, padding "
        f"{stream.padding_share:.2%}"
    )
    out.print(predicted.table())
    for line in training.warnings:
        out.say(f"warning: {line}", style="yellow")
