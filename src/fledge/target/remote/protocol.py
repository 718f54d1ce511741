"""The protocol between a trainer and a target server: questions, answers, the target's identity.

A question is self-contained (token rows, encoding, draft vocabulary). Servers keep no state between
requests, so any of them can answer any question, repeatedly if need be, with the same result.

    GET  /health         status, queue length and counters; needs no token
    GET  /v1/info        JSON: identity, sizes, limits
    GET  /v1/embeddings  message: the input embedding
    GET  /v1/head        message: output head and final norm
    GET  /v1/files       message: config and tokenizer files, as bytes
    POST /v1/generate    message -> message

Answers are sent in one of three encodings. `hidden` carries both states at every slot. `probs` and
`topk` carry aux states at every slot and supervision at supervised slots only (M of them, rows end
to end), in the precision of the states.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.errors import first_line
from fledge.core.head import TargetHead
from fledge.core.reading import Table, Whole
from fledge.core.rows import PACKING_FIELDS, TokenBatch, shift_left
from fledge.target.base import selection_mask
from fledge.target.cache.format import DTYPES, CacheShape, Field, decode_states, encode_probs
from fledge.target.cache.manifest import AUX_LAYERS, SIZE, TARGET_FACTS
from fledge.target.remote.wire import Message, WireError

PROTOCOL = 1  # increment when the meaning of a message changes
WireEncoding = Literal["hidden", "probs", "topk"]
WIRE_ENCODINGS: tuple[WireEncoding, ...] = get_args(WireEncoding)
ROW_FIELDS = ("input_ids", "attention_mask", "loss_mask")
# Facts that every server of one trainer must share, or the draft would learn from two targets.
IDENTITY = (
    *("protocol", "weights_fingerprint", "tokenizer_fingerprint", "aux_layer_ids"),
    *("dtype", "hidden_size", "vocab_size", "depth"),
)
# What a client reads of /v1/info.
INFO = Table(
    {
        **TARGET_FACTS.fields,
        "protocol": Whole(),
        "hidden_size": SIZE,
        "aux_layer_ids": AUX_LAYERS,
    }
)


@dataclass(frozen=True)
class Question:
    """The rows that a target is asked about, with the requested form of the answer."""

    request_id: str
    rows: TokenBatch  # on the CPU
    encoding: WireEncoding = "hidden"
    dtype: str = "auto"  # of the states on the wire; auto: the target's own
    top_k: int = 0
    vocabulary: Tensor | None = None  # [W] target ids in draft order, for probs and topk
    fingerprint: str = ""  # of the weights that must answer
    askers: int = 1  # clients that ask this question, each with the same id

    def to_message(self) -> Message:
        fields = zip((*ROW_FIELDS, *PACKING_FIELDS), self.rows.arguments(), strict=True)
        tensors = {name: _narrow(name, tensor) for name, tensor in fields if tensor is not None}
        if self.vocabulary is not None:
            tensors["vocabulary"] = self.vocabulary.to(torch.int32)
        names = ("request_id", "encoding", "dtype", "top_k", "fingerprint", "askers")
        metadata = {name: str(getattr(self, name)) for name in names}
        return Message(tensors, {**metadata, "protocol": str(PROTOCOL)})

    @classmethod
    def read(cls, tensors: dict[str, Tensor], metadata: dict[str, str]) -> "Question":
        """Parse a question from the network; a ValueError says what is wrong with it."""
        if metadata.get("protocol") != str(PROTOCOL):
            raise WireError(f"protocol {metadata.get('protocol')!r}, this server speaks {PROTOCOL}")
        wide: dict[str, Any] = {name: tensor.long() for name, tensor in tensors.items()}
        ids = wide.pop("vocabulary", None)
        try:
            question = cls(
                request_id=metadata["request_id"],
                rows=TokenBatch(**wide),
                encoding=metadata["encoding"],  # type: ignore[arg-type]  # checked below
                dtype=metadata["dtype"],
                top_k=int(metadata["top_k"]),
                vocabulary=ids,
                fingerprint=metadata["fingerprint"],
                askers=int(metadata["askers"]),
            )
        except (KeyError, TypeError, RuntimeError) as error:
            raise WireError(f"not a question ({first_line(error)})") from None
        if question.encoding not in WIRE_ENCODINGS:
            raise WireError(f"encoding {question.encoding!r} is not one of {WIRE_ENCODINGS}")
        if question.dtype != "auto" and question.dtype not in DTYPES:
            raise WireError(f"dtype {question.dtype!r} is not one of auto, {', '.join(DTYPES)}")
        if question.encoding != "hidden" and (ids is None or ids.ndim != 1 or not len(ids)):
            raise WireError(f"encoding {question.encoding} needs a draft vocabulary [W]")
        if question.encoding == "topk" and not 1 <= question.top_k <= len(ids):
            raise WireError(f"top_k must be from 1 to {len(ids)}, got {question.top_k}")
        return question


def _narrow(name: str, tensor: Tensor) -> Tensor:
    """The smallest integers that hold the values: masks are 0 or 1, ids and lengths fit 32 bits."""
    return (tensor != 0).to(torch.uint8) if name.endswith("_mask") else tensor.to(torch.int32)


class WireShape(CacheShape):
    """What is sent for each token and slot: as in a cache, in every dtype a target can run in."""

    @classmethod
    def of(
        cls, question: Question, *, hidden_size: int, aux_layers: int, dtype: torch.dtype
    ) -> "WireShape":
        """The shape of the answer to a question by a target whose states have that dtype."""
        return cls(
            encoding=question.encoding,
            dtype=DTYPES.get(question.dtype, dtype),
            hidden_size=hidden_size,
            aux_layers=aux_layers,
            draft_vocab_size=0 if question.vocabulary is None else len(question.vocabulary),
            top_k=question.top_k,
        )

    def answer_bytes(self, tokens: int, supervised: int) -> int:
        """An upper bound on the size of an answer; exact except for the header."""
        slots = tokens if self.encoding == "hidden" else supervised
        token_bytes = sum(field.row_bytes for field in self.token_fields())
        slot_bytes = sum(field.row_bytes for field in self.slot_fields())
        return token_bytes * tokens + slot_bytes * slots + 4096


@torch.no_grad()
def encode_answer(batch: Eagle3TargetBatch, question: Question, head: TargetHead) -> Message:
    """The target's hidden states as a message in the requested encoding."""
    dtype = DTYPES.get(question.dtype, batch.aux_hidden_states.dtype)
    tensors = {"aux_hidden_states": batch.aux_hidden_states.to(dtype)}
    if question.encoding == "hidden":
        assert batch.last_hidden_states is not None
        tensors["last_hidden_states"] = batch.last_hidden_states.to(dtype)
    else:
        assert question.vocabulary is not None
        ids_W = question.vocabulary.to(batch.loss_mask.device)
        mask_V = selection_mask(ids_W, len(head.weight_VD))
        probs_MW, position_M = batch.supervised_probs(head, ids_W, mask_V)
        top_k = question.top_k if question.encoding == "topk" else None
        tensors |= encode_probs(probs_MW, position_M[:, None], dtype, top_k)
    return Message(_to_host(tensors), {"request_id": question.request_id})


def _to_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors from a GPU through pinned memory, with a single synchronization."""
    if all(tensor.device.type == "cpu" for tensor in tensors.values()):
        return tensors
    host = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        for name, tensor in tensors.items()
    }
    for name, tensor in tensors.items():
        host[name].copy_(tensor, non_blocking=True)
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)
    return host


@torch.no_grad()
def decode_answer(
    tensors: dict[str, Tensor], metadata: dict[str, str], question: Question, shape: WireShape
) -> Eagle3TargetBatch:
    """The batch for a question's rows, from the answer; raises a WireError if they do not match."""
    rows, wanted_id, got_id = question.rows, question.request_id, metadata.get("request_id")
    if got_id != wanted_id:
        raise WireError(f"an answer to request {got_id!r}, not to {wanted_id}")
    supervised_BT = shift_left(rows.loss_mask).bool()
    slots = rows.shape if shape.encoding == "hidden" else (int(supervised_BT.sum()),)
    for field in shape.token_fields():
        _check_field(tensors, field, rows.shape)
    for field in shape.slot_fields():
        _check_field(tensors, field, slots)
    states = {"aux_hidden_states": tensors["aux_hidden_states"]}
    if shape.encoding == "hidden":
        states["last_hidden_states"] = tensors["last_hidden_states"]
    else:
        states |= _scatter_supervision(tensors, shape, supervised_BT)
    return Eagle3TargetBatch.about(rows, **states, shifted=True)


def _check_field(tensors: dict[str, Tensor], field: Field, places: tuple[int, ...]) -> None:
    tensor, expected = tensors.get(field.name), (field.dtype, (*places, field.width))
    if tensor is None or (tensor.dtype, tuple(tensor.shape)) != expected:
        got = "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
        raise WireError(f"{field.name} should be {field.dtype} {list(expected[1])}, got {got}")


def _scatter_supervision(
    tensors: dict[str, Tensor], shape: WireShape, supervised_BT: Tensor
) -> dict[str, Tensor]:
    """The supervision of the M supervised slots at their positions; all other slots are 0."""
    if shape.encoding == "topk" and len(ids := tensors["topk_ids"]):
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= shape.draft_vocab_size:
            raise WireError(f"topk_ids reach from {low} to {high}")
    slots = decode_states(tensors, shape, shape.dtype)
    fields = {}
    for name in ("target_probs", "position_mask"):
        fields[name] = slots[name].new_zeros((*supervised_BT.shape, slots[name].shape[-1]))
        fields[name][supervised_BT] = slots[name]
    return fields
