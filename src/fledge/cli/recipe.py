"""`fledge recipe list | copy | show | schema | check`: recipes that come with fledge, and checks
of a recipe before anything runs."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fledge.cli.console import out, plain_table, print_json
from fledge.cli.help import Verbs
from fledge.cli.loading import recipe_of_words
from fledge.cli.options import OUT
from fledge.core.errors import BadInput
from fledge.core.files import check_place, write_text

app = Verbs(
    help="Recipes: the shipped ones, resolved values, the schema, a check of files.",
    epilog="Example: fledge recipe show smollm2_cpu training.lr=3e-4",
)

_Arguments = Annotated[
    list[str] | None,
    Argument(
        metavar="RECIPE [section.key=value ...]",
        help="A file or the name of a shipped recipe, then overrides.",
    ),
]
_Json = Annotated[bool, Option("--json", help="JSON instead of YAML.")]


@app.command(name="list", epilog="Example: fledge recipe list")
def list_shipped(
    as_json: Annotated[bool, Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """List the recipes that come with fledge; `fledge train NAME` takes them by name."""
    from fledge.recipe.schema import shipped_recipes, title

    titles = {name: title(path) for name, path in shipped_recipes().items()}
    if as_json:
        print_json([{"name": name, "title": text} for name, text in titles.items()])
    else:
        table = plain_table("name", "for", words=2)
        for row in titles.items():
            table.add_row(*row)
        out.print(table)


@app.command(epilog="Example: fledge recipe copy smollm2_gpu --out my_recipe.yaml")
def copy(
    name: Annotated[str, Argument(metavar="NAME", help="As `fledge recipe list` shows it.")],
    output: Annotated[Path | None, Option(*OUT, help="Where to; default: NAME.yaml, here.")] = None,
    as_json: Annotated[bool, Option("--json", help="JSON instead of a line.")] = False,
) -> None:
    """Copy a recipe that comes with fledge, to change it."""
    from fledge.recipe.schema import recipe_file

    source, place = recipe_file(name), output or Path(f"{name}.yaml")
    check_place(place)
    if place.exists():
        raise BadInput("a file is here already", where=str(place), fix="--out FILE")
    write_text(place, source.read_text())
    if as_json:
        print_json({"recipe": name, "file": str(place)})
    else:
        out.say(f"written: {place}")


@app.command(epilog="Example: fledge recipe show smollm2_cpu training.lr=3e-4")
def show(arguments: _Arguments = None, as_json: _Json = False) -> None:
    """Print the resolved recipe: every field, with overrides applied and defaults filled in."""
    recipe = recipe_of_words(arguments or [])
    with suppress(BadInput):  # the cache may not exist yet
        recipe = recipe.settled()
    if as_json:
        print_json(recipe.model_dump(mode="json"))
    else:
        out.plain(recipe.to_yaml(), end="")


@app.command(epilog="Example: fledge recipe schema > recipe.schema.json")
def schema(
    as_json: Annotated[bool, Option("--json", help="It is always JSON.")] = True,
) -> None:
    """Print the JSON schema of recipes, for editors and other programs."""
    from fledge.recipe.schema import json_schema

    print_json(json_schema())


@app.command(epilog="Example: fledge recipe check my_recipe.yaml")
def check(
    recipes: Annotated[
        list[Path], Argument(metavar="RECIPE", help="Recipe files, or names of shipped ones.")
    ],
    as_json: Annotated[bool, Option("--json", help="One JSON object per file.")] = False,
) -> None:
    """Check recipe files, one line each; the first bad one ends the check with exit code 2."""
    from fledge.recipe.schema import load_recipe

    for path in recipes:
        recipe = load_recipe(path)
        facts = {
            "target": recipe.target.model or recipe.target.backend,
            "backend": recipe.target.backend,
            "objective": recipe.objective.kind,
            "output_dir": recipe.run.output_dir,
        }
        if as_json:
            print_json({"recipe": str(path), "ok": True, **facts}, one_line=True)
        else:
            out.plain(f"ok  {path}: " + ", ".join(" ".join(fact) for fact in facts.items()))
