"""What all drafts have in common: a vocabulary, an embedding, a head, files.

A method's own draft model (such as `eagle3/draft.py`) adds the computation.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from fledge.core.errors import BadInput, first_line
from fledge.core.files import atomic_directory, save_tensors, write_json
from fledge.methods.shared.config import DraftConfig
from fledge.methods.shared.files import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    check_tensors,
    config_json,
    read_draft,
)
from fledge.methods.shared.layer import DraftLayer, LayerWeights, kept_mlps
from fledge.target.base import Eagle3TargetBackend, HasWeight, selection_mask

log = logging.getLogger(__name__)


class DraftModel(nn.Module):
    """The base of all drafts. Subclasses define `embed_tokens` [V, E] and `lm_head` [W, E]."""

    architecture: ClassVar[str]  # its name in config.json
    typical_weight: ClassVar[str] = "lm_head.weight"  # in every file; its dtype is the draft's
    embed_tokens: nn.Embedding
    lm_head: nn.Linear
    layers: nn.ModuleList
    d2t: Tensor  # [W] int64: target id = draft id + d2t[draft id]
    t2d: Tensor  # [V] bool; all False until a vocabulary mapping is set
    config_type: ClassVar[type[DraftConfig]] = DraftConfig
    gradient_checkpointing: bool = False

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.config = config  # as users and files see it
        self.spec = self.config_type.of(config)

    def _register_vocabulary(self, config: DraftConfig) -> None:
        """Register buffers for the vocabulary mapping, unless the draft has the full vocabulary."""
        if not config.all_tokens:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))

    def _init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=self.spec.initializer_range)

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    # --- files ----------------------------------------------------------------------------------

    def write(self, directory: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Write the draft's files into a directory that the caller completes. `tensors` are its
        gathered tensors, for processes that hold only a share of each."""
        tensors = self.state_dict() if tensors is None else tensors
        dtype = tensors[self.typical_weight].dtype
        tensors = {name: value.detach().contiguous() for name, value in tensors.items()}
        write_json(directory / CONFIG_NAME, config_json(self.config, dtype, self.architecture))
        save_tensors(directory / WEIGHTS_NAME, tensors, {"format": "pt"})

    def save_pretrained(self, directory: str | Path) -> None:
        """Write config.json and model.safetensors; an existing directory is replaced atomically."""
        with atomic_directory(Path(directory)) as temporary:
            self.write(temporary)

    @classmethod
    def from_pretrained(cls, directory: str | Path, *, dtype: torch.dtype | None = None) -> Self:
        """Read a draft; no tensor may be missing, and there may be no others."""
        config, tensors = read_draft(Path(directory))
        return cls.from_tensors(config, tensors, where=Path(directory), dtype=dtype)

    @classmethod
    def from_tensors(
        cls,
        config: PretrainedConfig,
        tensors: Mapping[str, Tensor],
        *,
        where: Path,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """A draft with these weights, in their dtype unless `dtype` is given."""
        # check before allocating what the config specifies
        check_tensors(where, want=cls.expected(config, where=where), have=tensors)
        model = cls(config)
        model.to(dtype or tensors[cls.typical_weight].dtype)
        model.load_state_dict(tensors)
        return model

    @classmethod
    def expected(cls, config: PretrainedConfig, *, where: Path) -> dict[str, Tensor]:
        """The tensors of a draft with this config, without values."""
        try:
            with torch.device("meta"):
                return cls(config).state_dict()
        except ValueError as error:
            if isinstance(error, BadInput):
                raise
            raise BadInput(first_line(error), where=str(where / CONFIG_NAME)) from error

    # --- the vocabulary, and weights taken from the target --------------------------------------

    @property
    def selected_token_ids(self) -> Tensor | None:
        """[W] target ids in draft order; None until a mapping is set (a full one needs none)."""
        if self.spec.all_tokens or self.device.type == "meta":  # shapes have no map
            return torch.arange(self.spec.draft_vocab_size, device=self.device)
        if not bool(self.t2d.any()):
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @torch.no_grad()
    def set_vocab_mapping(
        self, selected_token_ids: Tensor, selected_token_mask: Tensor | None = None
    ) -> None:
        """Set the target tokens of the draft vocabulary, in their order (engines need ascending
        ids). The mask [V] may be omitted: it follows from the ids.

        A draft keeps the map it was trained with: a different one is refused.
        """
        if self.device.type == "meta":
            return
        width, full = self.spec.draft_vocab_size, self.spec.vocab_size
        if selected_token_mask is None:
            selected_token_mask = selection_mask(selected_token_ids, full)
        ids, mask = selected_token_ids, selected_token_mask.bool()
        for name, tensor, size in (
            ("selected_token_ids", ids, width),
            ("selected_token_mask", mask, full),
        ):
            if tensor.shape != (size,):
                raise ValueError(f"{name}: expected shape ({size},), got {tuple(tensor.shape)}")
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"selected_token_ids: must be integers, got {ids.dtype}")
        marked = mask.nonzero()[:, 0].to(ids.device)
        if not torch.equal(ids.sort().values.long(), marked):
            raise ValueError("selected_token_mask: must mark exactly the distinct ids selected")
        current = self.selected_token_ids
        if current is not None:
            if not torch.equal(current.cpu(), ids.cpu()):
                raise ValueError("selected_token_ids: the draft was trained with another map")
            return
        self.d2t.copy_(ids.to(self.d2t.device) - torch.arange(width, device=self.d2t.device))
        self.t2d.copy_(mask)

    def copy_embeddings_from_target(self, embedding: HasWeight) -> None:
        self._take("embedding", self.embed_tokens, embedding.weight)

    def copy_head_from_target(self, head: HasWeight) -> None:
        """Take the rows of the target's head (`head.weight` [V, D]) for the draft vocabulary."""
        ids, weight = self.selected_token_ids, head.weight
        if ids is None:
            raise ValueError("selected_token_ids: set the vocabulary mapping before the head")
        if len(ids) < len(weight):
            weight = weight[ids.to(weight.device)]
        self._take("head", self.lm_head, weight)

    def _take(self, what: str, table: nn.Embedding | nn.Linear, weight: Tensor) -> None:
        theirs, ours = tuple(weight.shape), tuple(table.weight.shape)
        if theirs != ours:
            raise ValueError(f"{what}: the target's is {theirs}, the draft's {ours}")
        self._set_weight(table, weight)

    @torch.no_grad()
    def _set_weight(self, table: nn.Embedding | nn.Linear, weight: Tensor) -> None:
        table.weight.copy_(weight)

    def start_as_target(self, model: nn.Module) -> None:
        """Initialize the layers from the target's last ones."""
        raise ValueError(f"layers_from_target: not for a {type(self).__name__}")

    def borrow_from(self, target: Eagle3TargetBackend) -> None:
        """Take the weights that belong to the target and are not in the draft's files. Called
        whenever a draft is created or read."""

    def freeze_embeddings(self) -> None:
        """Train everything except the input embeddings, which stay the target's."""
        self.embed_tokens.weight.requires_grad_(False)

    # --- layers and gradients -------------------------------------------------------------------

    @property
    def recordable(self) -> bool:
        """Whether its steps can be recorded as CUDA graphs: they wait for nothing on the host."""
        return True

    def layer_weights(
        self, dtype: torch.dtype, *, kept: int | None = None, used_once: bool = False
    ) -> list[LayerWeights]:
        """The weights that a step computes with, per layer. The MLPs of the last `kept` layers
        (None: of all) keep their activations for the backward pass, the others compute them again.
        `used_once` is for a single pass that is differentiated."""
        first = 0 if kept is None else len(self.layers) - kept
        return [
            layer.weights(dtype, recompute_mlp=number < first, used_once=used_once)
            for number, layer in enumerate(cast(Iterable[DraftLayer], self.layers))
        ]

    def step_weights(
        self, dtype: torch.dtype, rows: int, *, kept_gib: float, used_once: bool = False
    ) -> list[LayerWeights]:
        """`layer_weights` for a step of `rows` rows in each layer. Their MLPs keep at most
        `kept_gib` or, on a GPU, what a step may take of its free memory."""
        if self.checkpoints_layers:  # torch drops all activations that it is asked to save
            layers = self.layer_weights(dtype, used_once=used_once)
            return [replace(layer, checkpointed=True) for layer in layers]
        fitting = partial(kept_mlps, self.spec, rows, dtype, layers=len(self.layers))
        kept = fitting(kept_gib=kept_gib)
        if kept < len(self.layers) and torch.is_grad_enabled():
            kept = fitting(kept_gib=max(kept_gib, self._spare_gib()))
        return self.layer_weights(dtype, kept=kept, used_once=used_once)

    def _spare_gib(self) -> float:
        """A quarter of the memory that is free on the draft's GPU when all gradients and moments
        exist. The rest is for other activations, and for memory lost between allocations."""
        if self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return 0.0
        free, _ = torch.cuda.mem_get_info(self.device)
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        trained = sum(p.numel() for p in self.parameters() if p.requires_grad)
        return (free - 12 * trained) / 4 / 2**30

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """In training, keep only the layers' inputs for the backward pass: less memory, one more
        forward pass. `use_reentrant=True` causes a warning, other options are refused."""
        options = dict(gradient_checkpointing_kwargs or {})
        if options.pop("use_reentrant", False):
            log.warning("use_reentrant=False is used: the layers take more than tensors")
        if options:
            raise ValueError(
                f"gradient_checkpointing_kwargs: only use_reentrant, got {sorted(options)}"
            )
        self.gradient_checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        self.gradient_checkpointing = False

    @property
    def checkpoints_layers(self) -> bool:
        """Whether layers keep only their inputs for the backward pass."""
        return self.gradient_checkpointing and self.training

    def _run_draft_layer(self, layer_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer; under gradient checkpointing its activations are recomputed, not kept."""
        if not self.checkpoints_layers:
            return layer_fn(*args, **kwargs)
        return checkpoint(layer_fn, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    def reach_weights(self) -> Tensor:
        """A zero scalar that gives every trained weight a gradient of zeros. Ranks that sum
        gradients must all have gradients for the same weights; adding this to a loss ensures that,
        and changes nothing else."""
        trained = [weight for weight in self.parameters() if weight.requires_grad]
        zero: Tensor = _ReachWeights.apply(*trained)  # type: ignore[no-untyped-call]
        return zero


class _ReachWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        # expanded zeros, which take no memory
        return tuple(weight.new_zeros(()).expand_as(weight) for weight in ctx.saved_tensors)


# --- input map -----------------------------------------------------------------------------------
# How a draft reads the target: one linear map, which `fledge retarget` refits to the states of
# another target. Each method returns that of its drafts (`Method.reading`).
#
# Shapes: X inputs of the map, M inputs that are the draft's own.


@dataclass(frozen=True)
class Reading:
    """`weight_EX` and `own_MX` are the draft's own tensors: writing to them changes the draft."""

    weight_EX: Tensor
    inputs: Callable[[Tensor], Tensor]  # [..., A * D] states of the target -> [..., X]
    feeds_back: bool = False  # at deeper depths it also reads the draft's own states
    # inputs that do not come from a target (placeholders): they follow the weights, so that their
    # outputs do not change
    own_MX: Tensor | None = None


def wide(states: Tensor) -> Tensor:
    """The states in float32 or wider: those of many tokens are summed."""
    return states.to(torch.promote_types(states.dtype, torch.float32))
