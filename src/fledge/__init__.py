"""fledge: train draft models for speculative decoding, and measure honestly what they gain.

This file lists the public API. Names load lazily, so that `import fledge` is cheap and imports
neither torch nor an engine.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # type checkers do not follow lazy names
    from fledge.api import evaluate as evaluate
    from fledge.api import export as export
    from fledge.api import train as train

__version__ = "0.1.0"

_MODULES = ("precompute_eagle3",)  # a module with a main(argv)

# public name -> module that defines it
_PUBLIC = {
    "evaluate": "fledge.api",
    "export": "fledge.api",
    "train": "fledge.api",
    "Evaluation": "fledge.api",
    "Exported": "fledge.api",
    "Trained": "fledge.api",
    "BadInput": "fledge.core.errors",
    "CachedEagle3TargetModel": "fledge.target.cache.backend",
    "Eagle3TargetBackend": "fledge.target.base",
    "Eagle3TargetBatch": "fledge.core.batch",
    "HFEagle3TargetModel": "fledge.target.hf.model",
    "RemoteEagle3TargetModel": "fledge.target.remote.client",
    "RunnerEagle3TargetModel": "fledge.target.runner",
    "SGLangEagle3TargetModel": "fledge.target.sglang.runner",
    "SGLangTargetRunner": "fledge.target.sglang.runner",
    "TargetHead": "fledge.core.head",
    "TargetInfo": "fledge.target.base",
    "TargetRunner": "fledge.target.runner",
    "VLLMEagle3TargetModel": "fledge.target.vllm.runner",
    "VLLMTargetRunner": "fledge.target.vllm.runner",
    "Recipe": "fledge.recipe.schema",
    "load_recipe": "fledge.recipe.schema",
    "load_config": "fledge.models.resolve",
    "load_model": "fledge.models.resolve",
    "load_tokenizer": "fledge.models.resolve",
    "local_model": "fledge.models.resolve",
    "BlockDraftModel": "fledge.methods.block.draft",
    "DFlashTrainerModule": "fledge.methods.block.objective",
    "DSparkTrainerModule": "fledge.methods.block.objective",
    "Eagle1TrainerModule": "fledge.methods.eagle1.objective",
    "Eagle3TrainerModule": "fledge.methods.eagle3.objective",
    "PEagleTrainerModule": "fledge.methods.peagle.objective",
    "create_peagle_mask_mod": "fledge.peagle_draft",
    "generate_cod_sample_indices": "fledge.rollout.slots",
    "LlamaEagle1DraftModel": "fledge.methods.eagle1.draft",
    "LlamaEagle3DraftModel": "fledge.methods.eagle3.draft",
    "load_draft": "fledge.methods.registry",
    "simulated_accept_length": "fledge.methods.eagle3.objective",
    "SpeculativeDecoder": "fledge.decode.speculative",
    "Stops": "fledge.decode.stops",
    "TreeShape": "fledge.decode.strategy",
    "replay": "fledge.measure.replay",
    "diagnose": "fledge.formats.diagnose",
    "export_draft": "fledge.formats.export",
    "import_draft": "fledge.formats.import_draft",
    # for custom training loops (docs/python.md)
    "collate": "fledge.data.pack",
    "count_supervised": "fledge.data.vocab",
    "derive_draft_config": "fledge.methods.shared.config",
    "pack_rows": "fledge.data.pack",
    "prepare_rows": "fledge.data.prepare",
    "select_vocabulary": "fledge.data.vocab",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"fledge.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fledge' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
