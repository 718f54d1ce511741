"""From a name to a loaded Hugging Face model, plain or quantized, or one line that says why not."""

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

# One of these is in every directory that holds a tokenizer; without any, transformers makes up an
# empty one for some architectures.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@dataclass(frozen=True)
class LoadedModel:
    model: nn.Module
    tokenizer: Any  # None when the directory holds none that can be read
    stored_as: str | None  # the checkpoint's own quantisation method, if it has one


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
    """The model on `device` (a GPU where there is one), with its tokenizer. Ranks of a `mesh` load
    a part each (`sharded`)."""
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
            options["device_map"] = {"": device}  # quantised weights are packed where they will run
        elif mesh is not None:
            loader = sharded_class(_class_for(config, loader), mesh, device)
            options |= loading_options(mesh)
            options.pop("trust_remote_code")  # nothing of a checkpoint's own code runs here
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
    if "device_map" in options:  # quantised: what is missing is made from what is there
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
    """The model class that an auto class would take; sharding needs one that transformers has."""
    if type(config) not in auto._model_mapping:
        what = f"{type(config).__name__} brings code of its own, which cannot be sharded"
        raise BadInput(what, where="target.parallel", fix="leave target.parallel out")
    found = auto._model_mapping[type(config)]
    if not isinstance(found, list | tuple):
        return found
    named = {one.__name__: one for one in found}
    return next((named[n] for n in config.architectures or () if n in named), found[0])


def check_complete(report: dict[str, Any], where: str) -> None:
    """Refuse weights that transformers would fill up with random numbers."""
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
    """The text-only auto class where the architecture has one, else the image-text one."""
    import transformers

    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto
    return transformers.AutoModelForCausalLM  # remote code, or an error that names what is missing


def tokenizer_in(directory: Path, *, trust_remote_code: bool) -> Any:
    """The tokenizer beside a target's weights; None when there is none that can be read."""
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
