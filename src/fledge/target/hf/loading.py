"""Load a Hugging Face model by name, plain or quantized, or explain in one line why not."""

import logging
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from fledge.core.errors import BadInput, UntrustedCode, broken_files, first_line
from fledge.core.machine import find_device
from fledge.target.hf.parallel import loading_options, sharded_class
from fledge.target.layers import find_layers
from fledge.target.weights import quantisation_method

if TYPE_CHECKING:
    from transformers import PretrainedConfig

log = logging.getLogger(__name__)

# Every directory with a tokenizer holds one of these; without any, transformers creates an empty
# tokenizer for some architectures.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@dataclass(frozen=True)
class LoadedModel:
    model: nn.Module
    tokenizer: Any  # None if the directory has no readable one


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
    `mesh` loads its part (`parallel`)."""
    import transformers

    from fledge.models.resolve import local_model, wants_trust

    directory = local_model(str(name_or_path))
    device = find_device(device)
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    chosen = {
        "attn_implementation": attn_implementation,
        "quantization_config": quantization_config,
    }
    options |= {name: value for name, value in chosen.items() if value is not None}
    try:
        config = transformers.AutoConfig.from_pretrained(
            directory, trust_remote_code=trust_remote_code
        )
        loader = loader_for(config)
        if quantisation_method(config) is not None or quantization_config is not None:
            if mesh is not None:
                fix = "take the model in bfloat16, or an engine (target.backend=sglang or vllm)"
                what = "quantized weights cannot be sharded"
                raise BadInput(what, where=str(name_or_path), fix=fix)
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
    return LoadedModel(model, tokenizer)


def _class_for(config: "PretrainedConfig", auto: Any) -> Any:
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
            what, fix = f"{reason} {names[0]}{more}", "config.json and weights must match"
            raise BadInput(what, where=where, fix=fix)


def loader_for(config: "PretrainedConfig") -> Any:
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


# --- fp8 -----------------------------------------------------------------------------------------
# A target whose linear layers multiply in 8 bits: half the time on a GPU that supports it.
#
# Weights are stored as float8 (e4m3) with one scale per output channel, activations are rounded
# on the fly with one scale per token: scale * float8 comes within 2^-4 of every number down to
# 2^-15 of the row's largest. `Fp8Linear.reference` is the definition. Embeddings and the head are
# not converted. This changes what a draft learns: docs/performance.md has the measured effect.


FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max


def rounded(x_ND: Tensor) -> tuple[Tensor, Tensor]:
    """(float8 [N, D], scale [N, 1] fp32), whose product approximates x."""
    scale_N1 = x_ND.abs().amax(-1, keepdim=True).float().clamp_min(1e-12) / LARGEST
    return (x_ND.float() / scale_N1).clamp(-LARGEST, LARGEST).to(FLOAT8), scale_N1


class Fp8Linear(nn.Module):
    """A replacement for `nn.Linear`."""

    scale_O1: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight_OD, scale_O1 = rounded(linear.weight.detach())
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight_OD = nn.Parameter(weight_OD, requires_grad=False)
        self.register_buffer("scale_O1", scale_O1)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        x_ND = x.reshape(-1, self.in_features)
        out_NO = self._product(x_ND) if x.is_cuda else self.reference(x_ND)
        if self.bias is not None:
            out_NO = out_NO + self.bias
        return out_NO.view(*x.shape[:-1], self.out_features)

    def reference(self, x_ND: Tensor) -> Tensor:
        x8_ND, scale_N1 = rounded(x_ND)
        products_NO = F.linear(x8_ND.float(), self.weight_OD.float())
        return (products_NO * scale_N1 * self.scale_O1.t()).to(x_ND.dtype)

    def _product(self, x_ND: Tensor) -> Tensor:
        x8_ND, scale_N1 = rounded(x_ND)
        out_NO: Tensor = torch._scaled_mm(
            x8_ND,
            self.weight_OD.t(),
            scale_a=scale_N1,
            scale_b=self.scale_O1.t(),
            out_dtype=torch.bfloat16,  # the only one it supports with scales per row
            use_fast_accum=True,
        )
        return out_NO.to(x_ND.dtype)


def convert_linears(model: nn.Module) -> int:
    """Replace every linear of the decoder layers with `Fp8Linear`; returns how many."""
    replaced = 0
    for layer in find_layers(model):
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                # the GPU product requires sizes that are multiples of 16
                if type(child) is nn.Linear and not (child.in_features | child.out_features) % 16:
                    setattr(parent, name, Fp8Linear(child))
                    replaced += 1
    return replaced
