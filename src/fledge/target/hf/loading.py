"""Load a Hugging Face model by name, plain or quantized, or explain in one line why not."""

import logging
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fledge.core.errors import BadInput, UntrustedCode, broken_files, first_line
from fledge.core.machine import find_device
from fledge.target.hf.sharded import loading_options, sharded_class
from fledge.target.weights import quantisation_method

log = logging.getLogger(__name__)

# Every directory with a tokenizer holds one of these; without any, transformers creates an empty
# tokenizer for some architectures.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@dataclass(frozen=True)
class LoadedModel:
    model: nn.Module
    tokenizer: Any  # None if the directory has no readable one
    stored_as: str | None  # the checkpoint's own quantization method, if any


def load_hf_model(
    name_or_path: str | PathLike[str],
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str | None = None,
    attn_implementation: str | None = None,
    quantization_config: Any = None,
    trust_remote_code: bool = False,
    mesh: DeviceMesh | None = None,
) -> LoadedModel:
    """The model on `device` (by default a GPU if there is one), with its tokenizer. Each rank of a
    `mesh` loads its part (`sharded`)."""
    import transformers

    from fledge.models.resolve import local_model, wants_trust

    directory = local_model(str(name_or_path))
    device = find_device(device)
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if quantization_config is not None:
        options["quantization_config"] = quantization_config
    try:
        config = transformers.AutoConfig.from_pretrained(
            directory, trust_remote_code=trust_remote_code
        )
        stored_as = quantisation_method(config)
        loader = loader_for(config)
        if stored_as is not None or quantization_config is not None:
            _refuse_sharding(mesh, stored_as or "this quantization", where=str(name_or_path))
            options["device_map"] = {"": device}  # quantized weights are packed where they will run
        elif mesh is not None:
            loader = sharded_class(_class_for(config, loader), mesh, device)
            options |= loading_options(mesh)
            options.pop("trust_remote_code")  # no code of the checkpoint runs here
        model, report = loader.from_pretrained(
            directory, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except BadInput:
        raise
    except broken_files() as error:
        if wants_trust(error):
            raise UntrustedCode.of(str(name_or_path)) from error
        raise BadInput(
            f"the target could not be loaded on {device} ({first_line(error)})",
            where=str(name_or_path),
            fix="check the files, and whether this machine can run their number format",
        ) from error
    if "device_map" in options:  # quantized: missing tensors are derived from those stored
        report["missing_keys"] = ()
    check_complete(report, str(name_or_path))
    if "device_map" not in options and mesh is None:
        model = model.to(device)
    tokenizer = tokenizer_in(directory, trust_remote_code=trust_remote_code)
    return LoadedModel(model, tokenizer, stored_as)


def _refuse_sharding(mesh: DeviceMesh | None, method: str, *, where: str) -> None:
    if mesh is not None:
        what = f"weights quantized by {method} cannot be sharded"
        fix = "take the model in bfloat16, or an engine (target.backend=sglang or vllm)"
        raise BadInput(what, where=where, fix=fix)


def _class_for(config: Any, auto: Any) -> Any:
    """The model class that an auto class would choose; sharding needs one of transformers' own."""
    if type(config) not in auto._model_mapping:
        what = f"{type(config).__name__} comes with its own code, which cannot be sharded"
        raise BadInput(what, where="target.parallel", fix="leave target.parallel out")
    classes = auto._model_mapping[type(config)]
    if not isinstance(classes, list | tuple):
        return classes
    by_name = {model_class.__name__: model_class for model_class in classes}
    return next((by_name[n] for n in config.architectures or () if n in by_name), classes[0])


def check_complete(report: dict[str, Any], where: str) -> None:
    """Reject a checkpoint whose missing weights transformers would initialize randomly."""
    # names in transformers 4, (name, stored, wanted) in 5
    mismatched = [
        entry if isinstance(entry, str) else entry[0] for entry in report["mismatched_keys"]
    ]
    for reason, names in (
        ("the weights lack", sorted(report["missing_keys"])),
        ("config.json gives another shape to", sorted(mismatched)),
    ):
        if names:
            more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
            raise BadInput(
                f"{reason} {names[0]}{more}", where=where, fix="config.json and weights must match"
            )


def loader_for(config: Any) -> Any:
    """The text-only auto class if the architecture has one, else the image-text one."""
    import transformers

    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto
    return transformers.AutoModelForCausalLM  # remote code, or an error that names what is missing


def tokenizer_in(directory: Path, *, trust_remote_code: bool) -> Any:
    """The tokenizer in a target's directory; None if there is no readable one."""
    import transformers

    from fledge.models.resolve import wants_trust

    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(
            directory, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        if wants_trust(error):
            raise UntrustedCode.of(str(directory)) from error
        # a target runs without one; its fingerprint is then absent
        log.warning("%s: its tokenizer cannot be read (%s)", directory, first_line(error))
        return None
