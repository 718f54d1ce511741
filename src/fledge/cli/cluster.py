"""`fledge cluster`: train on a Ray cluster."""

from functools import partial
from typing import Annotated

from typer import Exit, Option

from fledge.cli.console import out, progress_bar
from fledge.cli.help import VerbGroup, Verbs
from fledge.cli.loading import recipe_of_words
from fledge.cli.options import OutcomeAsJson, RayAddress, RecipeWords

TRAIN_EXAMPLE = (
    "Example: fledge cluster train smollm2_cpu data.train=chats.jsonl target.backend=ray --ranks 2"
)

app = Verbs(
    cls=VerbGroup,
    epilog=TRAIN_EXAMPLE,
    help="Train on a Ray cluster.",
)


@app.command(name="train", epilog=TRAIN_EXAMPLE)
def train(
    arguments: RecipeWords,
    ranks: Annotated[int, Option(min=1, help="Processes that train together.")] = 1,
    rank_cpus: Annotated[float, Option(min=0.0, help="CPUs of a rank.")] = 1.0,
    rank_gpus: Annotated[
        float | None, Option(min=0.0, help="GPUs of a rank; default: 1 where there are any.")
    ] = None,
    address: RayAddress = "",
    wait_s: Annotated[float, Option(min=0.0, help="How long to wait for room.")] = 60.0,
    as_json: OutcomeAsJson = False,
) -> None:
    """Train a draft with ranks and targets on one cluster.

    When a machine or a rank is lost, all ranks start again from the newest checkpoint on what is
    left. Otherwise like `fledge train`, which can continue such a run too.
    """
    from fledge.training.continuation import check_existing

    recipe = recipe_of_words(arguments).settled()
    check_existing(recipe)
    from fledge.cli.train import run_recipe
    from fledge.training.cluster import Layout, train_on_cluster

    layout = Layout(ranks, rank_cpus, rank_gpus, wait_s)
    address = address or getattr(recipe.target, "address", "auto")
    with progress_bar("placing targets and ranks") as progress:
        entry = partial(run_recipe, as_json=as_json)
        code, output = train_on_cluster(recipe, entry, layout, address=address, progress=progress)
    out.plain(output, end="")  # the output of the first rank
    if code:
        raise Exit(code)
