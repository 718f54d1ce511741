"""`fledge cluster`: train on a Ray cluster, and show its runs."""

from functools import partial
from typing import Annotated, Any

from typer import Exit, Option

from fledge.cli.console import out, plain_table, print_json, progress_bar
from fledge.cli.help import VerbGroup, Verbs
from fledge.cli.loading import recipe_of_words
from fledge.cli.options import AsJson, OutcomeAsJson, RayAddress, RecipeWords

app = Verbs(
    cls=VerbGroup,
    epilog="Example: fledge cluster status",
    help="Train on a Ray cluster (train), and see who runs where (status).",
)

TRAIN_EXAMPLE = (
    "Example: fledge cluster train smollm2_cpu data.train=chats.jsonl target.backend=ray --ranks 2"
)
STATUS_EXAMPLE = "Example: fledge cluster status --json"


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


@app.command(name="status", epilog=STATUS_EXAMPLE)
def status(address: RayAddress = "auto", as_json: AsJson = False) -> None:
    """Show the runs on a cluster: who runs where, tokens/s, waiting for the target, restarts."""
    from fledge.target.ray.connection import connected, read_boards

    with connected(address):
        runs = read_boards()
    if as_json:
        print_json(runs)
        return
    if not runs:
        out.print("no run of fledge is on this cluster")
    for run in runs:
        _print_run(run)


def _print_run(board: dict[str, Any]) -> None:
    run = board["run"].get("run", {})
    title = f"{board['name']}  {run.get('state', 'targets only')}"
    if "step" in run:
        title += f"  step {run['step']}  {run['tokens_per_s']:,.0f} tok/s"
        title += f"  waiting for the target {run['target_share']:.0%}"
    if run:
        title += f"  restarts {run['restarts']}"
    columns = ("who", "where", "process", "restarts", "batches", "tok/s", "busy", "heard of")
    table = plain_table(*columns, words=2, title=title)
    for kind in ("ranks", "targets"):
        for name, facts in board[kind].items():
            table.add_row(
                name, facts["node"], str(facts["pid"]), str(facts["restarts"]), *_pace(facts)
            )
    out.print(table)


def _pace(facts: dict[str, Any]) -> tuple[str, ...]:
    """Of a target: batches, tokens/s while it works, the share of time in which it works, and the
    age of its last report (an idle target does not report, nor does a lost one)."""
    if "captured" not in facts:
        return ("", "", "", "")
    seconds = facts["seconds"]
    speed = facts["tokens"] / seconds if seconds else 0.0
    busy = seconds / facts["up_s"] if facts["up_s"] else 0.0
    ago = f"{facts['told_s_ago']:.0f} s ago"
    return str(facts["captured"]), f"{speed:,.0f}", f"{busy:.0%}", ago
