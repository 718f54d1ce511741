"""Names, verbs, flags and recipe keys that users rely on: none is removed by accident.

`interface.json` lists them. Additions need not be listed; a deliberate removal deletes the entry in
the same commit and is recorded in CHANGELOG.md.
"""

import inspect
import json
from pathlib import Path

import pytest
import typer.main

import fledge
from fledge.cli.main import app
from fledge.precompute_eagle3 import _build_parser
from fledge.recipe.schema import recipe_shapes

LISTED = json.loads((Path(__file__).parent / "interface.json").read_text())


@pytest.mark.parametrize("name", LISTED["names"])
def test_public_names_keep_their_arguments_and_members(name):
    thing, listed = getattr(fledge, name), LISTED["names"][name]
    if listed is None:
        return
    arguments = set(inspect.signature(thing).parameters)
    if inspect.isclass(thing):  # a class may validate its arguments before __init__
        arguments |= set(inspect.signature(thing.__init__).parameters)
    assert not set(listed["arguments"]) - arguments
    assert not [member for member in listed["members"] if not hasattr(thing, member)]


def flags_by_verb(command, path=()):
    if hasattr(command, "commands"):
        for name, sub in command.commands.items():
            yield from flags_by_verb(sub, (*path, name))
    else:
        options = (name for p in command.params for name in (*p.opts, *p.secondary_opts))
        yield " ".join(path), set(options)


def test_verbs_and_flags():
    current = dict(flags_by_verb(typer.main.get_command(app)))
    for verb, flags in LISTED["verbs"].items():
        assert not set(flags) - current[verb], verb


def test_recipe_keys():
    shapes = recipe_shapes()
    for place, keys in LISTED["recipe"].items():
        section, _, tag = place.partition(".")
        assert not set(keys) - set(shapes[section].fields(tag.partition("=")[2])), place


def test_flags_of_precompute_eagle3():
    current = {name for action in _build_parser()._actions for name in action.option_strings}
    assert not set(LISTED["precompute_eagle3"]) - current
