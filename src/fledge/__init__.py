"""fledge: train draft models for speculative decoding, and measure honestly what they gain.

This file lists the public API. Names load lazily, so that `import fledge` is cheap and imports
neither torch nor an engine.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # type checkers see the callable packages as functions
    from fledge.api import evaluate as evaluate
    from fledge.api import export as export
    from fledge.api import train as train

__version__ = "0.1.0"

# submodules: callable packages (see `fledge.core.callable`), and a module with a main(argv)
_MODULES = ("export", "precompute_eagle3", "train")

# public name -> module that defines it
_PUBLIC = {
    "evaluate": "fledge.api",
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
    "BlockDraftModel": "fledge.draft.block",
    "DFlashTrainerModule": "fledge.objective.dflash",
    "DSparkTrainerModule": "fledge.objective.dspark",
    "Eagle1TrainerModule": "fledge.objective.eagle1",
    "Eagle3TrainerModule": "fledge.objective.eagle3",
    "PEagleTrainerModule": "fledge.objective.peagle",
    "create_peagle_mask_mod": "fledge.compat.flex_peagle",
    "generate_cod_sample_indices": "fledge.rollout.cod",
    "LlamaEagle1DraftModel": "fledge.draft.eagle1",
    "LlamaEagle3DraftModel": "fledge.draft.eagle3",
    "load_draft": "fledge.methods.registry",
    "simulated_accept_length": "fledge.objective.eagle3",
    "SpeculativeDecoder": "fledge.decode.speculative",
    "Stops": "fledge.decode.stops",
    "TreeShape": "fledge.decode.strategies.shape",
    "replay": "fledge.measure.replay",
    "diagnose": "fledge.diagnosis.diagnose",
    "export_draft": "fledge.export.export",
    "import_draft": "fledge.diagnosis.import_draft",
    # for custom training loops (docs/python.md)
    "collate": "fledge.data.pack",
    "count_supervised": "fledge.data.vocab",
    "derive_draft_config": "fledge.draft.derive",
    "pack_rows": "fledge.data.pack",
    "prepare_rows": "fledge.data.prepare",
    "select_vocabulary": "fledge.data.vocab",
}

__all__ = ["__version__", *sorted({*_PUBLIC, "export", "train"})]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"fledge.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fledge' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
