"""The co-located target: a Hugging Face causal LM in this process.

The head's input is captured where the head would run: in `hidden` encoding the head never runs, in
`probs` only on supervised rows, chunk by chunk, and in `logits` (the constructor's default) on
every row. A pass may end after the last aux layer, may be shared by ranks along its rows, and on a
GPU may run compiled layers or be replayed as a CUDA graph.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from os import PathLike
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fledge.core.batch import Eagle3TargetBatch, Supervision
from fledge.core.errors import BadInput
from fledge.core.graphs import RecordedSizes
from fledge.core.head import TargetHead
from fledge.core.machine import find_device
from fledge.core.rows import TokenBatch, shift_left
from fledge.target.base import HasWeight, InputEmbedding
from fledge.target.hf import loading as fp8
from fledge.target.hf.embedding_and_head import find_head_module, learn_head, without_cache
from fledge.target.hf.loading import load_hf_model
from fledge.target.hf.one_row import (
    WholeRow,
    attends_plainly,
    causal_rows,
    documents_apart,
    kernel_takes,
    needs_no_mask,
    whole_row,
)
from fledge.target.hf.parallel import along, check_shareable, rank_slots, shared_rows
from fledge.target.inprocess import InProcessTarget, find_rank_groups
from fledge.target.layers import (
    EAGLE3_AUX_LAYERS,
    AuxBuffer,
    CompiledLayers,
    compile_errors,
    default_aux_layer_ids,
    describe_final_norm,
    find_layers,
    hidden_of,
    layer_outputs,
    muted_head,
    stop_behind,
    target_depth,
    validate_aux_layer_ids,
)
from fledge.target.packing import Documents, Group, overhead_in_tokens
from fledge.target.weights import (
    describe_weights,
    is_here,
    take_apart,
    weights_fingerprint,
    whole_tensor,
)

StatesOf = Callable[[int, Tensor], None]  # (layer id, its output)
_shift_left_with_zero = shift_left  # the name that other programs import from here


class HFEagle3TargetModel(InProcessTarget):
    """Co-located backend that captures auxiliary hidden states from a causal LM.

    The caller's model itself is put in eval mode and frozen, and otherwise never changed.
    `compile_layers` runs large passes on a GPU through torch.compile, and those of small models as
    CUDA graphs: faster, with different rounding. EAGLE-3 uses three layers; another number of
    `aux_layer_ids` must equal `num_aux_layers` (None: any number).
    """

    model: nn.Module

    def __init__(
        self,
        model: nn.Module,
        aux_layer_ids: Sequence[int] | None = None,
        cp_mesh: Any = None,
        *,
        supervision: Supervision = "logits",
        tokenizer: Any = None,
        compile_layers: bool = False,
        num_aux_layers: int | None = EAGLE3_AUX_LAYERS,
    ) -> None:
        super().__init__(supervision)
        self._answers_logits = supervision == "logits"
        self._cp_size = int(cp_mesh.size()) if cp_mesh is not None else 1
        self.cp_mesh = cp_mesh
        if self._cp_size > 1:
            check_shareable(model, cp_mesh)
        self.tokenizer = tokenizer
        self.model = model
        self._layers = self._get_transformer_layers()
        self._depth = target_depth(getattr(model, "config", None), self._layers)
        self._num_aux_layers = num_aux_layers
        candidate_ids = self._default_aux_layer_ids() if aux_layer_ids is None else aux_layer_ids
        self.aux_layer_ids = self._validate_aux_layer_ids(candidate_ids)
        self._check_last_state()
        self.model = model.eval().requires_grad_(False)
        self._options = without_cache(model)
        self.overhead_tokens = overhead_in_tokens(model, depth=self._depth)
        self._head_module: nn.Module | None = None
        self._head: TargetHead | None = None
        device = self._device()
        self._rank_groups = find_rank_groups(model, cp_mesh if self._cp_size > 1 else None, device)
        self.joins = self._rank_groups is not None
        gpu = device.type == "cuda"
        # a pass has no launch cost on a CPU; ranks that share rows use their own attention function
        self.try_one_row = (
            gpu and self._cp_size == 1 and attends_plainly(model) and kernel_takes(model)
        )
        spread = any(hasattr(module, "_hf_hook") for module in model.modules())  # over devices
        self.skip_masks = gpu and needs_no_mask(model)
        compiles = compile_layers and gpu and not self.joins and not spread
        self._compiled = CompiledLayers(self._layers if compiles else ())
        # by whether passes end after the last aux layer
        self._recorded = {ends: RecordedSizes[list[Tensor]]() for ends in (False, True)}
        self._stop = False
        self.record_passes = compiles
        if supervision != "logits":
            self._head_of_states()  # reject a head that cannot be represented now, not later
            if self.joins:  # this needs all ranks, and later one of them may ask alone
                self.info()

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | PathLike[str],
        *,
        aux_layer_ids: Sequence[int] | None = None,
        supervision: Supervision = "hidden",
        dtype: torch.dtype | str = "auto",
        device: torch.device | str | None = None,
        attn_implementation: str | None = None,
        quantization_config: Any = None,
        trust_remote_code: bool = False,
        compile_layers: bool = False,
        num_aux_layers: int | None = EAGLE3_AUX_LAYERS,
        mesh: DeviceMesh | None = None,
    ) -> "HFEagle3TargetModel":
        """Load a model by any name that `fledge.local_model` accepts, with its weights as stored.

        `dtype="auto"` keeps the checkpoint's own precision, "fp8" loads bfloat16 and multiplies in
        8 bits. For a quantized target, name the quantized checkpoint or pass a
        `quantization_config` of transformers: a draft must learn from what will be served. The
        ranks of a `mesh` shard one model along tp and fsdp, and share long rows along cp: every
        rank calls this and loads its own part.
        """
        device = find_device(device)
        no_units = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9)
        if dtype == "fp8" and (mesh is not None or no_units):
            reason = "no fp8 units" if no_units else "sharded"
            raise BadInput(f"dtype fp8: {reason}", where=str(name_or_path), fix="take bfloat16")
        loaded = load_hf_model(
            name_or_path,
            dtype="bfloat16" if dtype == "fp8" else dtype,
            device=device,
            attn_implementation=attn_implementation,
            quantization_config=quantization_config,
            trust_remote_code=trust_remote_code,
            mesh=mesh,
        )
        if dtype == "fp8":
            fp8.convert_linears(loaded.model)
        return cls(
            loaded.model,
            aux_layer_ids,
            along(mesh, "cp"),
            supervision=supervision,
            tokenizer=loaded.tokenizer,
            compile_layers=compile_layers,
            num_aux_layers=num_aux_layers,
        )

    def with_layers(self, aux_layer_ids: Sequence[int]) -> "HFEagle3TargetModel":
        """The same model with other aux layers, for another draft. This target closes it."""
        ids = list(aux_layer_ids)
        if ids == self.aux_layer_ids:
            return self
        return HFEagle3TargetModel(
            self.model, ids, self.cp_mesh, supervision=self.supervision, tokenizer=self.tokenizer,
            num_aux_layers=len(ids),
        )  # fmt: skip

    def features(self, rows: TokenBatch) -> Eagle3TargetBatch:
        """`answer` with the aux states only, skipping the layers above the last aux layer."""
        self._check_open()
        above = self._depth - 1 - max(self.aux_layer_ids)
        self._stop = above > 0 and self.supervision == "hidden" and not self.joins
        try:
            return self.answer(rows)
        finally:
            self._stop = False

    def _get_transformer_layers(self) -> list[nn.Module]:
        """The decoder layers in order, from a ModuleList or a ModuleDict keyed by str(i)."""
        return find_layers(self.model)

    def _default_aux_layer_ids(self) -> list[int]:
        return default_aux_layer_ids(self._depth, self._num_aux_layers or EAGLE3_AUX_LAYERS)

    def _validate_aux_layer_ids(self, aux_layer_ids: Sequence[int]) -> list[int]:
        """Check for distinct existing layers, as many as the method uses; else a ValueError."""
        depth = min(self._depth, len(self._layers))
        return validate_aux_layer_ids(aux_layer_ids, depth, self._num_aux_layers)

    def get_input_embeddings(self) -> HasWeight:
        """The model's own module, or, of a sharded model, its whole weight. Where
        ranks share the model, every rank must call this."""
        self._check_open()
        take_apart(self.model)
        module = self._embedding()
        weight = cast(Tensor, module.weight)
        if is_here(weight):
            return cast(nn.Embedding, module)
        return InputEmbedding(whole_tensor(weight))

    def _embedding(self) -> nn.Module:
        return cast(nn.Module, self.model.get_input_embeddings())  # type: ignore[operator]

    def _facts(self) -> dict[str, Any]:
        take_apart(self.model)
        return {
            "final_norm": describe_final_norm(self.model),
            "dtype": self._state_dtype,
            "weight_dtypes": describe_weights(self.model),
            "weights_fingerprint": weights_fingerprint(self.model),
            "module": self.model,
        }

    def close(self) -> None:
        """Drop the model, so that its memory is freed once nothing else references it."""
        if not self._closed:
            del self.model, self._layers, self._compiled
            for recorded in self._recorded.values():
                recorded.forget()
            self._head_module = self._head = self._info = self.tokenizer = None
        super().close()

    def _groups(self, documents: Documents, ids_BT: Tensor) -> Sequence[Group]:
        if self.try_one_row and documents.lengths:
            plan, lengths = self._plan(documents, ids_BT), documents.lengths
            cells = sum(len(members) * max(lengths[i] for i in members) for members in plan)
            saved = cells - sum(lengths) + self.overhead_tokens * (len(plan) - 1)
            if saved > 0:
                return [whole_row(documents, ids_BT.numel(), device=ids_BT.device)]
        return super()._groups(documents, ids_BT)

    @torch.no_grad()
    def _head_of_states(self) -> TargetHead:
        if self._head is None:
            take_apart(self.model)
            self._head_module = find_head_module(self.model)
            probe_BT = torch.arange(4, device=self._device())[None]
            self._head, states_ND = learn_head(
                self.model,
                lambda: self._call(probe_BT, torch.ones_like(probe_BT)),
                where=type(self.model).__name__,
            )
            self._state_dtype = states_ND.dtype
        return self._head

    # --- one pass: the model's own forward, with the states of some layers captured ---------------

    def _forward(self, ids: Tensor, mask: Tensor, aux: AuxBuffer, group: Group | None) -> Tensor:
        if self.model.training:  # the caller may have called train() on the shared module
            self.model.eval()
        write = partial(aux.write, group=group)
        if self._cp_size > 1:
            return self._run_slots(ids, mask if group is None else None, write)
        # only a pass over the whole batch has the same shape every time and is worth compiling
        if ids.numel() != aux.rows_BT.numel():
            return self._run(ids, mask, group, write)
        try:
            with self._compiled.lent():
                # where launching kernels takes longer than running them, and the size recurs
                short = self.record_passes and ids.numel() < 2 * self.overhead_tokens
                recorded = self._recorded[self._stop]
                if isinstance(group, WholeRow) and short and recorded.worth_it(ids.numel()):
                    return self._replay(ids, group, write)
                return self._run(ids, mask, group, write)
        except compile_errors() as error:  # no C compiler, for example
            self._compiled.give_up(error)
            return self._run(ids, mask, group, write)

    def _run(
        self, ids: Tensor, mask: Tensor | None, group: Group | None, write: StatesOf
    ) -> Tensor:
        """Run the model's own forward: `write` gets the aux layers' states, the answer is
        returned."""
        with ExitStack() as stack:
            if isinstance(group, WholeRow):
                stack.enter_context(documents_apart(self.model))
                return self._captured(write, ids, None, **group.options())
            # documents need no mask, and without one the causal kernels are faster
            if group is not None and self.skip_masks:
                stack.enter_context(causal_rows(self.model))
            return self._captured(write, ids, mask if group is None else None)

    def _run_slots(self, ids_NL: Tensor, mask_NL: Tensor | None, write: StatesOf) -> Tensor:
        """`_run` for rows that the ranks of `cp_mesh` share: each rank runs some of their slots,
        and every rank gets the states of all slots."""
        own = rank_slots(self.cp_mesh, ids_NL.shape[1], mask_NL)
        positions_NL = torch.arange(ids_NL.shape[1], device=ids_NL.device).expand_as(ids_NL)
        with shared_rows(self.model, own):
            answer_NQX = self._captured(
                lambda layer_id, states_NQD: write(layer_id, own.whole(states_NQD)),
                own.take(ids_NL),
                None,
                position_ids=own.take(positions_NL),
            )
        return own.whole(answer_NQX)

    def _captured(self, write: StatesOf, *arguments: Any, **options: Any) -> Tensor:
        """`_call` with the aux layers' states passed to `write`; returns logits or, if the head is
        not run, its input."""
        head_inputs: list[Tensor] = []

        def keep(hidden: Tensor) -> Tensor:
            head_inputs.append(hidden_of(hidden))
            return hidden

        with ExitStack() as stack:
            if self._stop:
                write = stack.enter_context(stop_behind(max(self._inner_layers), write, keep))
            stack.enter_context(layer_outputs(self._layers, self._inner_layers, write))
            if self.supervision != "logits":
                assert self._head_module is not None
                stack.enter_context(muted_head(self._head_module, keep))
            logits = self._call(*arguments, **options)
        return logits if self.supervision == "logits" else head_inputs[0]

    def _replay(self, ids: Tensor, group: WholeRow, write: StatesOf) -> Tensor:
        def run(ids: Tensor, **options: Tensor) -> list[Tensor]:
            states: dict[int, Tensor] = {}
            answer = self._run(ids, None, group.with_options(options), states.__setitem__)
            return [*(states[i] for i in self._inner_layers), answer]

        *states, answer = self._recorded[self._stop](
            ids.numel(), run, {"ids": ids, **group.options()}
        )
        for layer_id, layer_states in zip(self._inner_layers, states, strict=True):
            write(layer_id, layer_states)
        return answer

    def _call(self, ids: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
        """Call the model's own forward and return its logits, however they are wrapped. Where ranks
        hold a part of them each (a caller's tensor parallelism), they are gathered."""
        output = self.model(input_ids=ids, attention_mask=mask, **self._options, **options)
        logits = getattr(output, "logits", None)
        return hidden_of(logits if isinstance(logits, Tensor) else output)
