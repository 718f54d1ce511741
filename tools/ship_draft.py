"""Put a trained draft into the package: `python tools/ship_draft.py RUN NAME [EVAL.json ...]`.

Weights in bfloat16, without the embedding where it is the target's; the recipe and the prompts'
digests of the run; a card with the figures of `fledge eval --out` files. The card is only written
once: what a person adds to it stays.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from fledge.core.files import atomic_directory, write_json, write_text
from fledge.formats.card import portable
from fledge.methods.shared.files import CONFIG_NAME, WEIGHTS_NAME, read_config, read_draft
from fledge.models.resolve import local_model
from fledge.models.shipped import EMBEDDING, HOME
from fledge.models.weight_files import read_target_tables
from fledge.recipe.schema import RESOLVED_NAME, Recipe, load_recipe
from fledge.recipe.yaml_text import dump_yaml
from fledge.target.kinds import model_name
from fledge.training.runs import PROMPTS_NAME, draft_directory, recipe_of, run_directory


def ship(run: Path, name: str, recipe: Recipe | None, evaluations: list[Path]) -> Path:
    """Write `HOME/name`; an existing one is replaced, but not its card."""
    draft = draft_directory(run)
    recipe = recipe or recipe_of(draft)
    assert recipe is not None, f"{run} has no recipe: give --recipe"
    target = model_name(recipe.target)
    _, tensors = read_draft(draft)
    embedding = read_target_tables(local_model(target)).embedding_VD.float()
    if EMBEDDING in tensors and torch.equal(tensors[EMBEDDING].float(), embedding):
        del tensors[EMBEDDING]
    known = HOME / name / "README.md"
    written = known.read_text() if known.exists() else ""
    packed = {k: t.bfloat16() if t.is_floating_point() else t for k, t in tensors.items()}
    with atomic_directory(HOME / name) as directory:
        save_file(packed, directory / WEIGHTS_NAME, {"format": "pt"})
        write_json(directory / CONFIG_NAME, read_config(draft) | {"torch_dtype": "bfloat16"})
        values = portable(recipe.model_dump())
        write_text(directory / RESOLVED_NAME, dump_yaml(values))
        prompts = (run_directory(draft) or draft) / PROMPTS_NAME
        if prompts.exists():
            shutil.copyfile(prompts, directory / PROMPTS_NAME)
        rows = [json.loads(path.read_bytes()) for path in evaluations]
        write_text(directory / "README.md", written or card(name, target, values, rows))
    return HOME / name


def card(name: str, target: str, recipe: dict, evaluations: list[dict]) -> str:
    """What it is, how it was made, what it reaches."""
    figures = [
        f"| {', '.join(Path(p).stem for p in one['prompts'])} | {one['answers']} "
        f"| {one['drafts'][0]['acceptance_length']:.3f} |"
        for one in evaluations
    ]
    table = ["| prompts | answers | acceptance length |", "|---|--:|--:|", *figures]
    return "\n".join(
        [
            f"# {name}\n",
            f"Comes with fledge: `fledge chat {target} --draft {name}`.\n",
            "Its embedding is the target's and is not in the file.\n",
            "## Acceptance\n", "By exact replay (`fledge eval`), greedy.\n", *table, "",
            "## Training\n", "`fledge train recipe.yaml` with this recipe:\n",
            f"```yaml\n{dump_yaml(recipe)}```\n",
        ]
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    parser.add_argument("evaluations", type=Path, nargs="*", help="files of `fledge eval --out`")
    parser.add_argument("--recipe", help="of a draft that is not in its run")
    given = parser.parse_args()
    recipe = load_recipe(given.recipe) if given.recipe else None
    place = ship(given.run, given.name, recipe, given.evaluations)
    size = sum(file.stat().st_size for file in place.iterdir())
    print(f"{place}: {size / 1e6:.1f} MB")
