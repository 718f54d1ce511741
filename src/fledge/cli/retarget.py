"""`fledge retarget`: adapt a draft to its target after fine-tuning or quantization."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from typer import Option

from fledge.cli import options as opt
from fledge.cli.console import err, out, plain_table, print_json, progress_bar, quiet_libraries
from fledge.cli.loading import parse_dtype
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
    steps: Annotated[int, Option(min=0, help="Training steps after the refit; 0: none.")] = 0,
    directory: Annotated[
        Path | None, Option(*opt.OUT, help="A new run; default: RUN-retargeted.")
    ] = None,
    rows: Annotated[int, Option(min=2, help="Rows for the refit, at most.")] = 2000,
    dtype: Annotated[
        str, Option(help="Of both targets: float32, bfloat16, ...; default: the run's.")
    ] = "",
    device: opt.DeviceOption = "",
    trust_remote_code: opt.TrustRemoteCode = False,
    as_json: opt.AsJson = False,
) -> None:
    """Refit a draft in closed form after its target was changed, and optionally train it further.

    The map by which the draft reads the target's states is refitted, so that it makes of the new
    states what it made of the old ones: minutes, and no training. With --steps, the refitted draft
    is then trained. Length on held-out rows is shown with the old target, before and after.
    """
    from fledge.training.retarget import Asked
    from fledge.training.retarget import retarget as run_retarget

    quiet_libraries()
    request = Asked(
        draft, target, tuple(data), old=old, steps=steps, out=directory, rows=rows,
        dtype=parse_dtype(dtype) if dtype else None, device=device or None,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    with progress_bar() as watch:
        done = run_retarget(request, _Observer(watch, steps), watch)
    if as_json:
        print_json(done.to_json())
        return
    out.print(_table(done))
    for line in _remarks(done):
        out.say(line)


class _Observer:
    """Observes the training: the bar counts steps, notes and lengths are printed."""

    def __init__(self, watch: Any, steps: int) -> None:
        self._watch, self._steps = watch, steps

    def note(self, text: str) -> None:
        err.say(text, style="cyan")

    def logged(self, values: dict[str, Any]) -> None:
        self._watch("training", values["step"], self._steps)

    def evaluated(self, values: dict[str, Any]) -> None:
        length = values["evaluation"]["acceptance_length"]
        self.note(f"step {values['step']:>6}  held-out acceptance length {length:.3f}")


def _table(done: "Retargeted") -> Table:
    table = plain_table("", "length", "back", no_wrap=True)
    lengths = {
        "old target": done.old_length,
        "new target, before": done.length_before,
        "  with the old states": done.length_with_old_states,
        "refitted": done.length,
    }
    if done.trained_length is not None:
        lengths[f"and {counted(done.steps, 'step')}"] = done.trained_length
    for name, length in lengths.items():
        share = done.share(length) if name.startswith(("refitted", "and")) else None
        table.add_row(name, f"{length:.3f}", "" if share is None else f"{share:.0%}")
    table.caption = (
        f"tokens per round, k = {done.num_draft_tokens}, replayed on "
        f"{counted(done.held_out_rows, 'held-out row')};\nback: of what other states cost, which "
        "a refit can win; other words cost the rest"
    )
    return table


def _remarks(done: "Retargeted") -> list[str]:
    fitted = f"{counted(done.rows, 'row')}, {counted(done.tokens, 'token')}"
    lines = [
        f"{done.method}, refitted to {fitted}: what the draft makes of the target's states was off "
        f"by {done.error_before:.1%}, now by {done.error:.1%}"
        + (f"; {' and '.join(done.taken)} are the new target's" if done.taken else "")
    ]
    if done.kept:
        tables = " and ".join(done.kept)
        lines.append(
            f"the new target's {tables} is in another basis: the draft keeps its own, which SGLang "
            "does not read: serve it with vLLM"
        )
    if done.penalty is None:
        lines[0] += "; no change of the map was better than none"
    if done.length < done.length_before:
        more = "more --data and --rows, or --steps, or the draft as it was"
        lines.append(f"the refit made it worse on held-out rows: {more}")
    if done.trained_length is not None and done.trained_length < done.length:
        lines.append("the steps made it worse: best is the refitted draft")
    lines.append(f"next: {fledge_command('eval', done.directory)}")
    return lines
