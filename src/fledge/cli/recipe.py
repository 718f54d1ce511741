"""`fledge recipe show | schema | check`: see what a recipe means before it costs anything."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fledge.cli.console import out, print_json
from fledge.cli.help import Verbs
from fledge.cli.loading import recipe_of_words
from fledge.core.errors import BadInput

app = Verbs(
    help="Look at recipes: resolved values, the schema, a check of files.",
    epilog="Example: fledge recipe show recipes/smollm2_cpu.yaml training.lr=3e-4",
)

_Arguments = Annotated[
    list[str] | None,
    Argument(metavar="[RECIPE] [SECTION.KEY=VALUE]...", help="A recipe file, then overrides."),
]
_Json = Annotated[bool, Option("--json", help="JSON instead of YAML.")]


@app.command(epilog="Example: fledge recipe show recipes/smollm2_cpu.yaml training.lr=3e-4")
def show(arguments: _Arguments = None, as_json: _Json = False) -> None:
    """Print the resolved recipe: every field, with overrides applied and defaults filled in."""
    recipe = recipe_of_words(arguments or [])
    with suppress(BadInput):  # a cache that is not here yet has no say yet
        recipe = recipe.settled()
    if as_json:
        print_json(recipe.model_dump(mode="json"))
    else:
        out.plain(recipe.to_yaml(), end="")


@app.command(epilog="Example: fledge recipe schema > recipe.schema.json")
def schema(
    markdown: Annotated[
        bool, Option("--markdown/--json", help="Tables for people, or JSON.")
    ] = False,
) -> None:
    """Print the JSON schema of recipes, for editors and other programs."""
    from fledge.recipe import reference as recipe_reference

    if markdown:
        out.plain(recipe_reference.markdown(), end="")
    else:
        print_json(recipe_reference.json_schema())


@app.command(epilog="Example: fledge recipe check recipes/*.yaml")
def check(
    recipes: Annotated[list[Path], Argument(help="Recipe files.")],
    as_json: Annotated[bool, Option("--json", help="One JSON object per file.")] = False,
) -> None:
    """Check recipe files, one line each; the first bad one ends the check with exit code 2."""
    from fledge.recipe.schema import load_recipe

    for path in recipes:
        try:
            recipe = load_recipe(path)
        except BadInput as error:
            if as_json:
                told = {"recipe": str(path), "ok": False, "error": str(error)}
                print_json(told, one_line=True)
            raise
        facts = {
            "target": f"{recipe.target.model or recipe.target.backend}",
            "backend": recipe.target.backend,
            "objective": recipe.objective.kind,
            "output_dir": recipe.run.output_dir,
        }
        if as_json:
            print_json({"recipe": str(path), "ok": True, **facts}, one_line=True)
        else:
            words = ", ".join(f"{key} {value}" for key, value in facts.items())
            out.plain(f"ok  {path}: {words}")
