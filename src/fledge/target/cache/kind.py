"""`target.backend=cache`: the target's answers from disk. Importing this does not import torch."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fledge.core.errors import BadInput
from fledge.core.settings import Text
from fledge.target.kinds import TargetKind, TargetSection

if TYPE_CHECKING:
    import torch

    from fledge.target.cache.backend import CachedEagle3TargetModel


class CacheTarget(TargetSection):
    """The target's answers from disk, written by `fledge precompute` (or AutoModel's)."""

    backend: Literal["cache"] = "cache"
    """The target is not loaded at all; data.train is ignored, the rows are in the cache."""

    model: Text | None = None
    """Checked against the model that the cache was made from; null: take the cache's."""

    cached_target_path: Text
    """Directory of the cache; giving it chooses this backend."""


class CacheKind(TargetKind[CacheTarget]):
    name = "cache"
    section = CacheTarget
    brings_rows = True

    def open(
        self, section: CacheTarget, *, device: "torch.device", aux_layers: int
    ) -> "CachedEagle3TargetModel":
        """Open the target of a cache and check it against the recipe."""
        from fledge.target.cache.backend import CachedEagle3TargetModel

        target = CachedEagle3TargetModel(
            section.cached_target_path,
            device=device,
            model=section.model,
            trust_remote_code=section.trust_remote_code,
        )
        where, layer_ids = str(target.store.directory), section.aux_layer_ids
        if layer_ids is not None and not set(layer_ids) <= set(target.aux_layer_ids):
            what = f"made with aux layers {target.aux_layer_ids}, the recipe says {list(layer_ids)}"
            fix = "leave target.aux_layer_ids out, or make another cache"
            raise BadInput(what, where=where, fix=fix)
        if section.model is not None:
            _check_model(section.model, target.store.manifest, where)
        return target

    def model_name(self, section: CacheTarget) -> str:
        from fledge.target.cache.manifest import target_files

        return section.model or target_files(Path(section.cached_target_path).expanduser())

    def draft_vocab_size(self, section: CacheTarget) -> int | None:
        from fledge.target.cache.manifest import read_manifest, vocabulary_size

        directory = Path(section.cached_target_path).expanduser()
        return vocabulary_size(read_manifest(directory))


def _check_model(name: str, manifest: dict[str, Any], where: str) -> None:
    """Refuse a model the cache was not made from; weights are compared if they are on disk."""
    from fledge.models.resolve import local_model
    from fledge.target.cache.job import files_fingerprint, has_weights

    if "model_files" not in manifest:  # an AutoModel cache, which does not record them
        return
    directory = local_model(name, weights=False)
    if has_weights(directory) and files_fingerprint(directory) != manifest["model_files"]:
        what = f"made from another model than {name} (different weights or config)"
        fix = "leave target.model out, or make a cache for this model"
        raise BadInput(what, where=where, fix=fix)


CACHE = CacheKind()
