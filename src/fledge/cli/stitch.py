"""`fledge stitch`: a target's files with a tuned native head."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fledge.cli import options as opt
from fledge.cli.console import out, print_json, quiet_libraries

EXAMPLE = "Example: fledge stitch runs/my_head --target org/model --out org-model-tuned"


def stitch(
    source: Annotated[Path, Argument(metavar="RUN_OR_DRAFT", help="A run (its best), or a draft.")],
    target: Annotated[str, Option(help="The model that the head belongs to.")],
    destination: Annotated[Path, Option(*opt.OUT, help="Directory of the new model.")],
    as_json: Annotated[bool, Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write a tuned native head (MTP) into a copy of its target's files.

    Engines load such a head with the model. Files that do not change are hard links.
    """
    from fledge.methods.mtp.stitch import stitch as write
    from fledge.models.resolve import local_model

    quiet_libraries()
    written = write(source, local_model(target), destination)
    if as_json:
        print_json({"out": str(destination), "written": written})
        return
    out.plain(f"{destination}: {', '.join(written)} written, all else linked")
