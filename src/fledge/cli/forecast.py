"""`fledge forecast`: the length a run will reach, when to stop it, and what limits it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from fledge.cli.console import out, plain_table, print_json
from fledge.cli.options import AsJson
from fledge.core.errors import BadInput
from fledge.core.terminal import marked

if TYPE_CHECKING:
    from fledge.training.forecast.curves import Curve
    from fledge.training.forecast.forecast import Forecast

EXAMPLE = "Example: fledge forecast runs/my_draft"
_WIDTH, _HEIGHT = 60, 12  # of the plot, in characters


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
    from fledge.training.forecast.curves import known_runs, read_curve
    from fledge.training.forecast.forecast import forecast as forecast_of
    from fledge.training.forecast.limits import limits_of

    curve, known = read_curve(run, steps=steps), known_runs(run, like or ())
    try:
        ahead = forecast_of(curve, known=known, stop_below=stop_below)
    except BadInput as error:
        raise BadInput(error.what, where=str(run), fix=error.fix) from None
    limits = limits_of(run, ahead, evaluation=evaluation or run / EVALUATION_NAME)
    if as_json:
        print_json({**ahead.to_json(), "limits": [limit.to_json() for limit in limits]})
        return
    out.print(_table(ahead))
    out.say("tokens per round on the run's held-out rows, by replay", style="dim")
    if ahead.by:
        out.say(ahead.by_whom(), style="dim")
    if not ahead.finished:
        for line in plot(curve, ahead):
            out.say(line)
    out.say(advice(ahead))
    if limits:
        table = plain_table("limit", "gain", "", title="what limits it, each alone")
        table.columns[2].justify = "left"
        for limit in limits:
            table.add_row(limit.name, f"{limit.gain:+.1f} %", limit.says)
        out.print(table)


def _table(ahead: "Forecast") -> Any:
    where = f"step {ahead.step:,} of {ahead.steps:,}"
    table = plain_table("", "length", "80 % between", title=f"acceptance length, {where}")
    table.add_row("measured last", marked("[bold]{:.2f}[/]", ahead.measured), "")
    rows = {"twice the data": ahead.twice_data, "twice the time": ahead.twice_time}
    if not ahead.finished:
        rows = {"at the end": ahead.end, **rows}
    for name, estimate in rows.items():
        between = f"{estimate.low:.2f} to {estimate.high:.2f}"
        table.add_row(name, marked("[bold]{:.2f}[/]", estimate.length), between)
    return table


def advice(ahead: "Forecast") -> str:
    """One sentence on when more steps stop helping."""
    if ahead.gain_per_hour is None:
        return "how long a step takes was not logged: no gain an hour"
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


def plot(curve: "Curve", ahead: "Forecast") -> list[str]:
    """Evaluations (o), the forecast (*) and its interval (.) over the steps."""
    low_y = min([1.0, *(length for _, length, _ in curve.measured)])
    high_y = max(
        [estimate.high for _, estimate in ahead.path] + [length for _, length, _ in curve.measured]
    )
    canvas = [[" "] * _WIDTH for _ in range(_HEIGHT)]

    def put(step: float, length: float, letter: str) -> None:
        column = round(step / ahead.steps * (_WIDTH - 1))
        row = round((high_y - length) / max(1e-9, high_y - low_y) * (_HEIGHT - 1))
        canvas[min(max(row, 0), _HEIGHT - 1)][column] = letter

    for step, estimate in ahead.path:
        for length, letter in ((estimate.low, "."), (estimate.high, "."), (estimate.length, "*")):
            put(step, length, letter)
    for step, length, _ in curve.measured:
        put(step, length, "o")
    lines = []
    for index, row in enumerate(canvas):
        level = high_y - index * (high_y - low_y) / (_HEIGHT - 1)
        lines.append(f"{level:6.2f} |{''.join(row)}".rstrip())
    lines.append(f"{'':6} +{'-' * _WIDTH}")
    lines.append(f"{'':8}0{ahead.steps:>{_WIDTH - 1},}  (o measured, * forecast, . 80 %)")
    return lines
