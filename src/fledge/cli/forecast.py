"""`fledge forecast`: the length a run will reach, when to stop it, and what limits it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from fledge.cli.console import out, plain_table, print_json
from fledge.cli.options import AsJson
from fledge.core.errors import BadInput
from fledge.core.terminal import marked

if TYPE_CHECKING:
    from fledge.training.forecast import Forecast

EXAMPLE = "Example: fledge forecast runs/my_draft"


def forecast(
    run: Annotated[Path, Argument(metavar="RUN", help="The directory of a run, over or not.")],
    like: Annotated[
        list[Path] | None,
        Option(
            metavar="RUN",
            help="A finished run of the same method to go by; may be given several times. "
            "Default: those of the same recipe beside RUN.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what acceptance length a run will reach, when to stop it, and what limits it.

    From the run's own curve, or from finished runs of its recipe: at its end, with twice the data,
    with twice the time; the interval is meant to hold 80 %. It reads files and runs nothing.
    """
    if not run.is_dir():
        raise BadInput("no such run", where=str(run))
    from fledge.training.curves import known_runs, read_curve
    from fledge.training.forecast import forecast as forecast_of
    from fledge.training.forecast import limits_of

    try:
        ahead = forecast_of(read_curve(run), known=known_runs(run, like or ()))
    except BadInput as error:
        raise BadInput(error.what, where=error.where or str(run), fix=error.fix) from None
    limits = limits_of(run, ahead)
    if as_json:
        print_json({**ahead.to_json(), "limits": [limit._asdict() for limit in limits]})
        return
    title = f"acceptance length, step {ahead.step:,} of {ahead.steps:,}"
    table = plain_table("", "length", "80 % between", title=title)
    table.add_row("measured last", marked("[bold]{:.2f}[/]", ahead.measured), "")
    rows = {"twice the data": ahead.twice_data, "twice the time": ahead.twice_time}
    if not ahead.finished:
        rows = {"at the end": ahead.end, **rows}
    for name, estimate in rows.items():
        between = f"{estimate.low:.2f} to {estimate.high:.2f}"
        table.add_row(name, marked("[bold]{:.2f}[/]", estimate.length), between)
    out.print(table)
    out.say("tokens per round on the run's held-out rows, by replay", style="dim")
    if ahead.by:
        out.say(ahead.by_whom(), style="dim")
    out.say(_advice(ahead))
    if limits:
        table = plain_table("limit", "gain", "", title="what limits it, each alone")
        table.columns[2].justify = "left"
        for limit in limits:
            table.add_row(limit.name, f"{limit.gain:+.1f} %", limit.says)
        out.print(table)


def _advice(ahead: "Forecast") -> str:
    """One sentence on when more steps stop helping."""
    if ahead.gain_per_hour is None:
        return "the time of steps was not logged, so the gain per hour is unknown"
    took = f"{60 * ahead.hours:.0f} minutes" if ahead.hours < 2 else f"{ahead.hours:.1f} hours"
    gain = f"would gain {ahead.gain:.1f} %, {ahead.gain_per_hour:.1f} % an hour"
    if ahead.finished:
        return f"the run is over; as long again ({took}) {gain}"
    if ahead.stop_at is None:
        return f"worth it to the end: the {took} left {gain}"
    return f"stop at step {ahead.stop_at:,}: from there on the rest gains less than 1 % an hour"
