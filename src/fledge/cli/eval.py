"""`fledge eval`: the exact acceptance of drafts on the target's own answers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from rich.text import Text
from typer import Exit, Option

from fledge.cli import options as opt
from fledge.cli.console import err, out, plain_table, print_json, progress_bar, quiet_libraries
from fledge.cli.loading import numbers, target_options
from fledge.core.errors import BadInput
from fledge.core.files import check_place, write_json
from fledge.core.terminal import counted

if TYPE_CHECKING:
    from fledge.api import Evaluation
    from fledge.target.hf.model import HFEagle3TargetModel

EXAMPLE = "Example: fledge eval runs/my_draft/best --target smollm2-135m --prompts questions.jsonl"


def evaluate(
    drafts: opt.DraftArguments,
    target: Annotated[str, Option(help="The target's name; a run of fledge knows its own.")] = "",
    prompts: opt.Prompts = None,
    limit: opt.PromptLimit = 0,
    draft_tokens: opt.TrainedTokens = 0,
    method: opt.MethodOption = "",
    tree: Annotated[str, Option(help="Shape of a tree: depth,width,nodes.")] = "5,4,24",
    max_new_tokens: opt.MeasuredTokens = 256,
    live: opt.LiveAnswers = 4,
    batch: Annotated[int, Option(min=1, help="Prompts answered at a time.")] = 16,
    aux_layers: Annotated[
        str,
        Option(
            help="The layers the draft reads, e.g. 1,14,26; default: the run's, or fledge's own."
        ),
    ] = "",
    dtype: opt.RunDtype = "",
    device: opt.DeviceOption = "",
    trust_remote_code: opt.TrustRemoteCode = False,
    output: Annotated[
        Path | None, Option(*opt.OUT, help="Keep the figures, for `fledge report`: RUN/eval.json.")
    ] = None,
    samples: Annotated[int, Option(min=0, help="Answers kept token by token with --out.")] = 6,
    calibrated: Annotated[
        Path | None, Option(help="Write the draft with its fitted temperatures: RUN/calibrated.")
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Measure what drafts gain: acceptance per token, domain and length, and the speed-up.

    The target answers the prompts once (kept in the cache); every draft is replayed over the
    answers, which gives the acceptance of live decoding exactly, and a few answers are decoded live
    to prove it and to take the time. The exit code is 1 when live decoding disagrees.
    """
    from fledge.decode.strategy import TreeShape
    from fledge.measure.evaluation import EvalOptions
    from fledge.methods.block.calibration import says_nothing
    from fledge.methods.shared.files import write_with
    from fledge.training.runs import draft_directory

    typed = (aux_layers, dtype, device, trust_remote_code)
    options = EvalOptions(
        method=method or None, draft_tokens=draft_tokens or None,
        tree=TreeShape(*numbers(tree, 3, "--tree")), limit=limit or None,
        max_new_tokens=max_new_tokens, live=live, samples=samples if output is not None else 0,
        batch=batch, **target_options(draft_directory(drafts[0]), *typed),
    )  # fmt: skip
    if output is not None:
        check_place(output, read=prompts or ())
    if calibrated is not None:  # checked before hours of work
        check_place(calibrated, directory=True)
        if len(drafts) > 1:
            raise BadInput("several drafts are measured", where="--calibrated", fix="measure one")
        if calibrated.exists():
            raise BadInput("is there already", where=str(calibrated), fix="name a new directory")
    measured = measure_drafts(drafts, target, prompts or ["mixed"], options)
    if output is not None:
        write_json(output, measured.to_json())
    if calibrated is not None:
        calibration = measured.reports[0].calibration
        if calibration is None:
            raise says_nothing("--calibrated")
        fitted = {"confidence_temperatures": calibration.temperatures}
        write_with(draft_directory(drafts[0]), calibrated, fitted)
    if as_json:
        print_json(measured.to_json())
    else:
        _show_tables(measured.reports, measured.answers)
    total = len(measured.answers.turns)
    for report, count in zip(measured.reports, measured.trained_on, strict=True):
        if count:
            share = f"{counted(count, 'prompt')} of {total:,} ({count / total:.1%})"
            err.say(f"{report.name} was trained on {share}: measure on others", "yellow")
    if not measured.agrees:
        err.say("live decoding disagrees with the replay: do not trust these figures", "red")
        raise Exit(1)


def measure_drafts(
    drafts: list[Path], target: "str | HFEagle3TargetModel", prompts: list[str], options: Any
) -> "Evaluation":
    """`fledge.api.evaluate_drafts` with a progress bar."""
    from fledge.api import evaluate_drafts

    quiet_libraries()
    with progress_bar() as watch:
        return evaluate_drafts(drafts, target, prompts, options, watch)


def _show_tables(reports: Any, answers: Any) -> None:
    tokens = sum(len(turn.answer_ids) for turn in answers.turns)
    cut = sum(turn.finish == "length" for turn in answers.turns)
    source = "from the cache" if answers.from_cache else f"kept in {answers.path}"
    out.say(
        f"{counted(len(answers.turns), 'answer')} of the target, {counted(tokens, 'token')}, "
        f"{cut:,} cut at the limit, {counted(answers.skipped, 'prompt')} skipped as too long; "
        f"{source}"
    )
    tables = {"acceptance": positions(reports)}
    if len(reports[0].groups) > 1:
        tables["by set of prompts"] = _groups(reports, "groups")
    tables["by category"] = _groups(reports, "categories")
    tables["by tokens known when the round begins"] = _groups(reports, "contexts")
    tables["speed, one text at a time, medians"] = _speeds(reports)
    for report in reports:
        tables[f"where {report.name} loses length"] = _failures(report.failures)
        if report.calibration is not None:
            tables[f"how sure {report.name} is, and how right"] = _calibration(report.calibration)
    for title, table in tables.items():
        out.print(f"\n{title}", style="italic")
        out.print(table)
    out.print()
    for line in dict.fromkeys(report.definition for report in reports):
        out.print(f"{line}.", style="dim")
    for report in reports:
        _remarks(report)


def positions(reports: Any) -> Table:
    """Acceptance per token, in two lines per draft so that eight tokens fit into 80 columns."""
    depth = max(len(report.acceptance.joint) for report in reports)
    tokens = ["token 1", *(f"{k}" for k in range(2, depth + 1))]
    table = plain_table("draft", "length", *tokens, no_wrap=True)
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    for report in reports:
        acceptance = report.acceptance
        length = Text(f"{acceptance.length:.3f}", style="bold")
        table.add_row(report.name, length, *(f"{x:.1%}" for x in acceptance.joint))
        table.add_row(f"  {report.method}", "", *(f"{x:.1%}" for x in acceptance.conditional))
    table.caption = (
        "length: tokens per round (one pass of the target), the target's own token counted\n"
        "upper line: rounds in which all tokens up to this one were accepted\n"
        "lower line: the same, out of the rounds in which all before it were"
    )
    return table


def _groups(reports: Any, attribute: str) -> Table:
    table = plain_table("", *(report.name for report in reports), "rounds")
    for name in getattr(reports[0], attribute):
        row = [getattr(report, attribute).get(name) for report in reports]
        lengths = [f"{part.length:.3f}" if part is not None else "-" for part in row]
        table.add_row(name, *lengths, f"{row[0].rounds:,}")
    return table


def _speeds(reports: Any) -> Table:
    """Medians, and below them the interquartile ranges."""
    table = plain_table(
        "draft", "texts", "plain\nms/token", "draft + verify\nms/round", "break-even\nlength",
        "predicted\nspeed-up", "measured\n(live)", no_wrap=True,
    )  # fmt: skip
    for report in reports:
        if report.speed is None:
            table.add_row(report.name, *["-"] * 6)
            continue
        speed = report.speed.to_json(report.acceptance.length)
        gains, spread = ["-"] * 3, ""
        if not speed["disturbed"]:
            gains = [
                f"{speed['break_even_acceptance_length']:.2f}",
                f"{speed['predicted_speedup']:.2f}x",
                f"{speed['measured_speedup_live_sample']:.2f}x",
            ]
            spread = "{:.2f} to {:.2f}".format(*speed["measured_speedup_quartiles"])
        rounds = f"{speed['draft_ms_per_round']:.1f} + {speed['verify_ms_per_round']:.1f}"
        plain = f"{speed['plain_step_ms']:.1f}"
        table.add_row(report.name, str(speed["texts"]), plain, rounds, *gains)
        names = ("plain_step_ms_quartiles", "round_ms_quartiles")
        quartiles = ["{:.1f} to {:.1f}".format(*speed[name]) for name in names]
        table.add_row("  middle half", "", *quartiles, "", "", spread, style="dim")
    return table


def _failures(failures: Any) -> Table:
    """One line per cause; the caption says what to do about the largest."""
    table = plain_table("first rejected token", "lost a round", "share", "rejected", "of")
    figures = failures.to_json()
    ended = {"title": "none: the text ends", **figures["end_of_text"]}
    for row in (*figures["causes"].values(), ended):
        counts = [f"{row[name]:,}" if name in row else "" for name in ("rejected", "judged")]
        table.add_row(row["title"], f"{row['lost_length']:.3f}", f"{row['share']:.1%}", *counts)
    table.add_row("k + 1 - length", f"{failures.lost_length:.3f}", "", "", "", style="bold")
    table.caption = f"a line takes what those above it leave; {failures.remedy}"
    return table


def _calibration(calibration: Any) -> Table:
    """One line per token: how far predicted and observed acceptance of all up to it are apart."""
    table = plain_table("all up to", "temperature", "off before", "off after", no_wrap=True)
    figures = (calibration.temperatures, calibration.error_before, calibration.error_after)
    for depth, (temperature, before, after) in enumerate(zip(*figures, strict=True), start=1):
        table.add_row(f"token {depth}", f"{temperature:.2f}", f"{before:.1%}", f"{after:.1%}")
    table.caption = "off: mean distance of predicted and observed; after: fitted on the other half"
    return table


def _remarks(report: Any) -> None:
    from fledge.measure.speed import DISTURBED

    misses = report.failures.misses()
    lines = [
        f"{misses['token_share']:.2%} of the target's tokens are outside the draft vocabulary; "
        f"they ended {misses['ended_round_share']:.1%} of the rounds"
    ]
    if report.every_slot is not None:
        lines.append(f"from every slot (what training estimates): {report.every_slot:.3f}")
    if report.other_picks:
        others = counted(report.other_picks, "token")
        lines.append(f"{others} the target would not pick again (near ties)")
    if report.live is not None:
        live = report.live
        lines.append(
            f"decoded live: {live.same_texts} of {live.texts} texts token for token the target's "
            f"own, {live.same_rounds} of {live.rounds} rounds as replayed, "
            f"length {live.acceptance.length:.3f}"
        )
    if report.speed is not None:
        speed = report.speed
        rounds = counted(len(speed.live_rounds), "round")
        steps = counted(len(speed.plain_steps_s), "plain step")
        lines.append(f"timed on {counted(len(speed.live), 'text')}: {rounds} and {steps}")
    if report.replay_s is not None:
        lines.append(f"replayed in {report.replay_s:.1f} s")
    out.print(f"{report.name}: {'; '.join(lines)}.")
    if report.speed is not None and report.speed.disturbed:
        why = "a round seemed cheaper than the plain step that it holds"
        err.say(f"{report.name}: {DISTURBED} ({why}); no speed-up is shown", "yellow")
