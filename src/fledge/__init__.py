"""fledge: train draft models for speculative decoding, and measure honestly what they gain.

This file is the public list. Names load lazily, so that `import fledge` costs nothing and pulls
in neither torch nor an engine.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# public name -> module that defines it
_PUBLIC = {
    "BadInput": "fledge.errors",
    "CachedEagle3TargetModel": "fledge.target.cache",
    "Eagle3TargetBackend": "fledge.target.base",
    "Eagle3TargetBatch": "fledge.target.batch",
    "HFEagle3TargetModel": "fledge.target.hf",
    "RemoteEagle3TargetModel": "fledge.target.remote",
    "RunnerEagle3TargetModel": "fledge.target.runner",
    "SGLangEagle3TargetModel": "fledge.target.sglang_runner",
    "SGLangTargetRunner": "fledge.target.sglang_runner",
    "TargetHead": "fledge.target.head",
    "TargetInfo": "fledge.target.base",
    "TargetRunner": "fledge.target.runner",
    "VLLMEagle3TargetModel": "fledge.target.vllm_runner",
    "VLLMTargetRunner": "fledge.target.vllm_runner",
    "Recipe": "fledge.train.recipe",
    "load_recipe": "fledge.train.recipe",
    "load_config": "fledge.models.resolve",
    "load_model": "fledge.models.resolve",
    "load_tokenizer": "fledge.models.resolve",
    "local_model": "fledge.models.resolve",
    "Eagle3TrainerModule": "fledge.objective.eagle3",
    "PEagleTrainerModule": "fledge.objective.peagle",
    "create_peagle_mask_mod": "fledge.rollout.peagle_mask",
    "generate_cod_sample_indices": "fledge.rollout.cod",
    "LlamaEagle3DraftModel": "fledge.draft.model",
    "simulated_accept_length": "fledge.objective.eagle3",
    "SpeculativeDecoder": "fledge.decode.speculative",
    "Stops": "fledge.decode.stops",
    "TreeShape": "fledge.decode.tree",
    "replay": "fledge.decode.replay",
    "diagnose": "fledge.export.diagnose",
    "export_draft": "fledge.export.export",
    "import_draft": "fledge.export.import_draft",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name == "precompute_eagle3":  # a module of its own, with a main(argv)
        return import_module("fledge.precompute_eagle3")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fledge' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
