"""`fledge retarget`: adapt a draft to its target after fine-tuning or quantization."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Table
from typer import Option

from fledge.cli import options as opt
from fledge.cli.console import out, plain_table, print_json, progress_bar, quiet_libraries
from fledge.core.install import fledge_command
from fledge.core.terminal import counted

if TYPE_CHECKING:
    from fledge.training.retarget import Retargeted

EXAMPLE = "Example: fledge retarget runs/my_draft --target models/tuned --data chats.jsonl"


def retarget(
    draft: opt.DraftArgument,
    target: Annotated[str, Option(help="The new target: the old one, tuned or quantized.")],
    data: Annotated[
        list[str], Option(help="Conversations, as data.train of a recipe; repeatable.")
    ],
    old: Annotated[
        str, Option(help="The target it was trained for; a run of fledge knows its own.")
    ] = "",
    directory: Annotated[
        Path | None, Option(*opt.OUT, help="The new draft; default: RUN-retargeted.")
    ] = None,
    device: opt.DeviceOption = "",
    trust_remote_code: opt.TrustRemoteCode = False,
    as_json: opt.AsJson = False,
) -> None:
    """Refit a draft in closed form after its target was changed.

    The map by which the draft reads the target's states is refitted, so that it makes of the new
    states what it made of the old ones: minutes, and no training. Length on held-out rows is shown
    with the old target, before and after. `fledge train` on the recipe that it writes trains the
    draft further.
    """
    from fledge.training.retarget import retarget as run_retarget

    quiet_libraries()
    with progress_bar() as watch:
        done = run_retarget(
            draft, target, data, old=old, out=directory, device=device or None,
            trust_remote_code=trust_remote_code, watch=watch,
        )  # fmt: skip
    if as_json:
        print_json(asdict(done))
        return
    out.print(_table(done))
    fitted = f"{counted(done.rows, 'row')}, {counted(done.tokens, 'token')}"
    out.say(
        f"{done.method}, refitted to {fitted}: what the draft makes of the target's states was off "
        f"by {done.error_before:.1%}, now by {done.error:.1%}"
        + (f"; {' and '.join(done.taken)} are the new target's" if done.taken else "")
    )
    if done.length < done.length_before:
        out.say("the refit made it worse on held-out rows: give more --data, or train it further")
    out.say(f"next: {fledge_command('train', Path(done.directory) / 'recipe.yaml')}")


def _table(done: "Retargeted") -> Table:
    table = plain_table("", "length", no_wrap=True)
    for name, length in (
        ("old target", done.old_length),
        ("new target, before", done.length_before),
        ("refitted", done.length),
    ):
        table.add_row(name, f"{length:.3f}")
    table.caption = (
        f"tokens per round, k = {done.num_draft_tokens}, replayed on "
        f"{counted(done.held_out_rows, 'held-out row')}"
    )
    return table
