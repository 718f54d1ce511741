"""Drafts that come with fledge, by name: small directories in the package.

They hold no embedding, because it is their target's. On first use a draft is completed with it in
the cache, and is from then on a directory like any other.
"""

import hashlib
import json
import shutil
from pathlib import Path

import yaml

from fledge.core.files import write_json
from fledge.core.machine import multiplies_bfloat16
from fledge.models.stored import stored

HOME = Path(__file__).parents[1] / "shipped"
EMBEDDING = "embed_tokens.weight"
_WEIGHTS, _RECIPE, _CONFIG = "model.safetensors", "recipe.yaml", "config.json"


def shipped_drafts() -> list[str]:
    return sorted(path.parent.name for path in HOME.glob(f"*/{_WEIGHTS}"))


def shipped_directory(name: str) -> Path:
    """The complete directory of a shipped draft; the first call needs its target."""
    source = HOME / name
    with (source / _WEIGHTS).open("rb") as file:
        key = hashlib.file_digest(file, "sha256").hexdigest()[:24]

    def make(directory: Path) -> None:
        from safetensors.torch import load_file, save_file

        from fledge.models.resolve import local_model
        from fledge.models.weight_files import read_target_tables

        for file in source.iterdir():
            shutil.copyfile(file, directory / file.name)
        recipe = yaml.safe_load((source / _RECIPE).read_text())
        recipe["target"]["dtype"] = "bfloat16" if multiplies_bfloat16() else "float32"
        (directory / _RECIPE).write_text(yaml.safe_dump(recipe, sort_keys=False))
        # in float32, so that the embedding is exactly the target's
        packed = load_file(source / _WEIGHTS)
        tensors = {k: t.float() if t.is_floating_point() else t for k, t in packed.items()}
        if EMBEDDING not in tensors:
            tables = read_target_tables(local_model(recipe["target"]["model"]))
            tensors[EMBEDDING] = tables.embedding_VD.float().contiguous()
        save_file(tensors, directory / _WEIGHTS, {"format": "pt"})
        config = json.loads((source / _CONFIG).read_text())
        write_json(directory / _CONFIG, {**config, "torch_dtype": "float32"})

    return stored(f"draft-v1-{name}-{key}", make, source=name)
