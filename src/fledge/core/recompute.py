"""Gradient checkpointing of a model's layers: less memory for one more forward pass."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.checkpoint import checkpoint

log = logging.getLogger(__name__)


class RecomputedLayers:
    """For a module that runs its layers through `_run_draft_layer`."""

    gradient_checkpointing: bool = False
    training: bool  # the module's

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """In training, keep only the layers' inputs for the backward pass: less memory, one more
        forward pass. Checkpoints are not reentrant: `use_reentrant=True` causes a warning, other
        options are refused."""
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
