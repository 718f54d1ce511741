"""Engine-agnostic target: the backend contract on top of any engine behind a narrow protocol.

Importing this module imports no engine. Shifting, packing and the choice of encoding are shared
with the co-located backend, so that every runner gives equal results.
"""

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from fledge.core.batch import Supervision
from fledge.core.errors import BadInput, in_words
from fledge.core.head import TargetHead
from fledge.target.base import InputEmbedding
from fledge.target.hf.loading import tokenizer_in
from fledge.target.inprocess import InProcessTarget
from fledge.target.layers import (
    EAGLE3_AUX_LAYERS,
    AuxBuffer,
    FinalNorm,
    stated,
    target_depth,
    validate_aux_layer_ids,
)
from fledge.target.packing import Group, overhead_in_tokens
from fledge.target.weights import describe_weights, weights_fingerprint


@runtime_checkable
class TargetRunner(Protocol):
    """The narrow interface an engine must implement. `model` is the loaded module: it exposes
    `.config` and `.parameters()`."""

    if TYPE_CHECKING:  # read access is enough

        @property
        def model(self) -> Any: ...

    else:  # a runner that inherits from the protocol may still assign it
        model: Any

    def set_aux_layers(self, aux_layer_ids: list[int]) -> None:
        """Capture the outputs of these decoder layers from now on, in this order."""

    def forward_eagle3(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Run right-padded rows once; return logits [B, T, V] and aux states [B, T, A * D], both
        unshifted."""

    def input_embedding_weight(self) -> Tensor:
        """The target's input embedding [V, D]."""


@runtime_checkable
class HiddenTargetRunner(TargetRunner, Protocol):
    """A runner that can also stop in front of the head, and that exposes the head."""

    def forward_eagle3_hidden(
        self, input_ids: Tensor, attention_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `forward_eagle3`, with last hidden states [B, T, D] in place of logits."""

    def target_head(self) -> TargetHead:
        """The frozen output head."""

    def final_norm(self) -> FinalNorm | None:
        """The norm in front of the head, if it is available."""


class RunnerEagle3TargetModel(InProcessTarget):
    """EAGLE-3 target backend that runs the frozen target through a runner.

    `hidden` supervision needs a `HiddenTargetRunner`; `probs` uses its hidden states if available
    and otherwise the runner's logits.
    """

    def __init__(
        self,
        runner: TargetRunner,
        aux_layer_ids: Sequence[int] | None = None,
        *,
        supervision: Supervision = "logits",
        tokenizer: Any = None,
        num_aux_layers: int | None = EAGLE3_AUX_LAYERS,
    ) -> None:
        super().__init__(supervision)
        shows_hidden = isinstance(runner, HiddenTargetRunner)
        self._answers_logits = supervision == "logits" or not shows_hidden
        if supervision == "hidden" and not shows_hidden:
            raise BadInput(
                f"{type(runner).__name__} returns logits only (no forward_eagle3_hidden)",
                fix="use supervision 'logits' or 'probs'",
            )
        self.runner = runner
        self.tokenizer = tokenizer
        self._depth = target_depth(runner.model.config)
        self.aux_layer_ids = validate_aux_layer_ids(aux_layer_ids, self._depth, num_aux_layers)
        self._check_last_state()
        runner.set_aux_layers(self._inner_layers)
        self._get_ready()

    @property
    def model(self) -> Any:
        """The runner's loaded module: exposes `.config` and `.parameters()`."""
        self._check_open()
        return self.runner.model

    def _get_ready(self) -> None:
        self.overhead_tokens = overhead_in_tokens(self.runner.model, depth=self._depth)

    def get_input_embeddings(self) -> InputEmbedding:
        self._check_open()
        return InputEmbedding(self.runner.input_embedding_weight())

    def _facts(self) -> dict[str, Any]:
        assert isinstance(self.runner, HiddenTargetRunner)
        return {
            "final_norm": self.runner.final_norm(),
            "dtype": self.runner.input_embedding_weight().dtype,
            "weight_dtypes": self._describe_weights(),
            "weights_fingerprint": self._fingerprint_weights(),
        }

    def close(self) -> None:
        if not self._closed:
            close = getattr(self.runner, "close", None)
            if close is not None:
                close()
            del self.runner
            self._info = self.tokenizer = None
        super().close()

    def _describe_weights(self) -> str:
        return describe_weights(self.runner.model)

    def _fingerprint_weights(self) -> str:
        model = self.runner.model
        if not isinstance(model, nn.Module):  # its parameters may have no names
            model = nn.ParameterList([self.runner.input_embedding_weight()])
        return weights_fingerprint(model)

    def _forward(self, ids: Tensor, mask: Tensor, aux: AuxBuffer, group: Group | None) -> Tensor:
        runner = self.runner
        if group is None and bool(((mask[:, 1:] != 0) & (mask[:, :-1] == 0)).any()):
            raise BadInput(
                "a runner may ignore the mask, so its rows are padded on the right only",
                where="attention_mask",
                fix="put the padding behind the tokens",
            )
        if self._answers_logits:
            answer, aux_NLD = runner.forward_eagle3(ids, mask)
        else:
            assert isinstance(runner, HiddenTargetRunner)
            answer, aux_NLD = runner.forward_eagle3_hidden(ids, mask)
        layers = len(self._inner_layers)
        if layers == 0:
            return answer
        width = stated(runner.model.config, "hidden_size") or aux_NLD.shape[-1] // layers
        if aux_NLD.shape[-1] != layers * width:  # some engines drop a layer silently
            raise RuntimeError(
                f"{type(runner).__name__} returned aux states {aux_NLD.shape[-1]} wide for layers "
                f"{self._inner_layers}; {in_words(layers)} layers of {width} are {layers * width}"
            )
        for layer_id, states_NLD in zip(self._inner_layers, aux_NLD.chunk(layers, -1), strict=True):
            aux.write(layer_id, states_NLD, group)
        return answer

    def _head_of_states(self) -> TargetHead:
        if not isinstance(self.runner, HiddenTargetRunner):
            raise BadInput(
                f"{type(self.runner).__name__} does not show its output head (no target_head)",
                fix="use logits or probs supervision, which need no head",
            )
        return self.runner.target_head()


class EngineEagle3TargetModel(RunnerEagle3TargetModel):
    """A target inside a serving engine that this process starts."""

    inside_engine = True
    runner_type: ClassVar[Any]  # its `build` starts the engine

    @classmethod
    def from_pretrained(
        cls,
        model: str | PathLike[str],
        *,
        aux_layer_ids: Sequence[int] | None = None,
        dtype: torch.dtype | str | None = None,
        supervision: Supervision = "logits",
        trust_remote_code: bool = False,
        num_aux_layers: int | None = EAGLE3_AUX_LAYERS,
        **engine_kwargs: Any,
    ) -> Self:
        """Load a model by any name that `fledge.local_model` accepts; `engine_kwargs` are passed to
        the runner's `build`. As in the constructor, answers are logits by default; recipes choose
        hidden states."""
        from fledge.models.resolve import local_model

        runner = cls.runner_type.build(
            model, dtype=dtype, trust_remote_code=trust_remote_code, **engine_kwargs
        )
        try:
            tokenizer = tokenizer_in(local_model(str(model)), trust_remote_code=trust_remote_code)
            options = {"tokenizer": tokenizer, "num_aux_layers": num_aux_layers}
            return cls(runner, aux_layer_ids, supervision=supervision, **options)
        except BaseException:
            runner.close()
            raise
