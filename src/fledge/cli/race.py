"""`fledge race`: which method drafts best for this target and these chats?"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Option

from fledge.cli.console import out, plain_table, print_json, progress_bar, quiet_libraries
from fledge.cli.options import OUT, AsJson, RecipeWords
from fledge.core.files import write_json, write_text

EXAMPLE = (
    "Example: fledge race smollm2_cpu data.train=chats.jsonl --methods all\n\n"
    "Example: fledge race smollm2_gpu data.train=chats.jsonl --methods eagle3,dspark --seconds 300"
)


def race(
    arguments: RecipeWords,
    methods: Annotated[str, Option(help="Names with commas between, or all.")] = "all",
    seeds: Annotated[int, Option(min=1, help="Of each method; the spread is the noise.")] = 3,
    tokens: Annotated[float, Option(min=0, help="Of each run; 0: as the recipe says.")] = 0,
    seconds: Annotated[float, Option(min=0, help="Of each run, instead of tokens.")] = 0,
    draft_tokens: Annotated[int, Option(min=0, help="A round; 0: as the recipe trains.")] = 0,
    place: Annotated[
        Path | None, Option(*OUT, help="A directory for race.json and race.svg.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train all methods from one capture of the target's states, and say which to take.

    Every entrant sees the same tokens in the same order. The recipe's own overrides hold for all of
    them (draft.layers=2), except for the objective's. What counts is the expected speed-up on this
    machine: tokens per round on the held-out rows, over what a round costs.
    """
    quiet_libraries()
    from fledge.recipe.schema import split_arguments
    from fledge.training import race as races

    options = races.RaceOptions(tuple(methods.split(",")), seeds, tokens, seconds, draft_tokens)
    source, words = split_arguments(arguments)
    laps = []
    with progress_bar("racing") as progress:
        for lap in races.race(source, words, options, progress):
            laps.append(lap)
            if place is not None:  # after every lap: a race is long
                write_json(place / "race.json", {"laps": [asdict(lap) for lap in laps]})
    found = races.results(laps)
    figures = {
        "verdict": races.verdict(found),
        "results": [result.to_json() for result in found],
        "laps": [asdict(lap) for lap in laps],
    }
    if place is not None:
        write_json(place / "race.json", figures)
        write_text(place / "race.svg", races.plot(found))
    if as_json:
        print_json(figures)
        return
    columns = ("method", "length", "over seeds", "2nd half", "s", "draft ms", "speed-up")
    table = plain_table(*columns)
    for result in found:
        table.add_row(
            result.method, f"{result.length:.3f}",
            f"{min(result.lengths):.3f} to {max(result.lengths):.3f}", f"{result.gain:+.3f}",
            f"{result.seconds:.0f}", "" if result.draft_ms is None else f"{result.draft_ms:.1f}",
            "" if result.speedup is None else f"{result.speedup:.2f}",
        )  # fmt: skip
    out.print(table)
    out.print(figures["verdict"])
