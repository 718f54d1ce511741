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
    stop_below: Annotated[
        float, Option(min=0.0, help="Percent of the length an hour: less is not worth waiting for.")
    ] = 1.0,
    evaluation: Annotated[
        Path | None, Option("--eval", help="Figures by kind of prompt; default: RUN/eval.json.")
    ] = None,
    steps: Annotated[
        int, Option(min=0, help="Of the run in all, where its files do not say; 0: they do.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Say what acceptance length a run will reach, when to stop it, and what limits it.

    From the run's own curve, or from finished runs of its recipe: at its end, with twice the data,
    with twice the time; the interval is meant to hold 80 %. It reads files and runs nothing.
    """
    if not run.is_dir():
        raise BadInput("no such run", where=str(run))
    from fledge.report.page import EVALUATION_NAME
    from fledge.training.curves import known_runs, read_curve
    from fledge.training.forecast import forecast as forecast_of
    from fledge.training.limits import limits_of

    curve, known = read_curve(run, steps=steps), known_runs(run, like or ())
    try:
        ahead = forecast_of(curve, known=known, stop_below=stop_below)
    except BadInput as error:
        raise BadInput(error.what, where=str(run), fix=error.fix) from None
    limits = limits_of(run, ahead, evaluation=evaluation or run / EVALUATION_NAME)
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
    least, hourly = f"{ahead.stop_below:g} % an hour", f"{ahead.gain_per_hour:.1f} % an hour"
    took = f"{60 * ahead.hours:.0f} minutes" if ahead.hours < 2 else f"{ahead.hours:.1f} hours"
    if ahead.finished:
        verdict = "worth it" if ahead.gain_per_hour >= ahead.stop_below else "not worth it"
        again = f"as long again ({took}) would gain {ahead.gain:.1f} %, {hourly}"
        return f"the run is over; {again}: {verdict} at {least}"
    if ahead.stop_at == ahead.step:
        return f"stop here: the {took} left gain {ahead.gain:.1f} %, {hourly}, less than {least}"
    if ahead.stop_at is not None:
        return f"stop at step {ahead.stop_at:,}: from there on the rest gains less than {least}"
    return f"worth it to the end: the {took} left gain {ahead.gain:.1f} %, {hourly}"
