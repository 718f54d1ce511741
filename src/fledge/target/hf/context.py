"""Context parallelism of the target: ranks share the rows of a pass, each computes some slots.

Everything but attention works slot by slot. Rows [N, L] are padded to 2n equal chunks, and rank r
of n takes chunk r and chunk 2n - 1 - r, so that every rank sees as many keys as any other. L = 12,
n = 2, chunks of three slots, and the keys that their queries look at:

    rank 0    slots 0 1 2      keys 0 .. 2          rank 1    slots 3 4 5    keys 0 .. 5
              slots 9 10 11    keys 0 .. 11                   slots 6 7 8    keys 0 .. 8

In front of each attention the ranks gather keys and values, and the local queries attend to those
they may see: exact, whatever the window. Gathered and not passed round a ring: with grouped heads
keys and values are a fraction of the states (Llama 3 8B: 2 x 1,024 of 4,096 numbers a slot), live
for one layer, and need no softmax to be put together from parts, so windows, soft caps and sinks
cost nothing extra. States leave the pass gathered: every rank ends with the whole answer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from fledge.core.errors import BadInput
from fledge.target.hf.one_row import HARMLESS, Unsupported, lent_attention, may_support

NAME = "fledge_context"
_SCORES = 1 << 26  # of attention, held at a time where they are written out


@dataclass(frozen=True, eq=False)
class Share:
    """This rank's slots of rows [N, L]."""

    group: dist.ProcessGroup
    rank: int
    size: int
    length: int  # L
    hidden_NL: Tensor | None  # bool: keys that nobody sees (padding); None: all are real
    caps: bool = True  # whether the model's own attention caps scores if it is told to

    @property
    def chunk(self) -> int:
        """Slots of a chunk; 2n of them cover the rows, the last ones perhaps past their end."""
        return -(-self.length // (2 * self.size))

    @property
    def chunks(self) -> tuple[int, int]:
        return self.rank, 2 * self.size - 1 - self.rank

    def slots(self, device: torch.device) -> Tensor:
        """[Q] in the order in which this rank holds them."""
        offset = torch.arange(self.chunk, device=device)
        return torch.cat([chunk * self.chunk + offset for chunk in self.chunks])

    def take(self, tokens_NL: Tensor) -> Tensor:
        """[N, L] -> [N, Q]; slots past the end repeat the last one, and nobody sees them."""
        return tokens_NL[:, self.slots(tokens_NL.device).clamp_max(self.length - 1)]

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """Every rank's slots, in order: [.., Q, ..] -> [.., L rounded up to chunks, ..]."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part, group=self.group)
        halves = [one.chunk(2, dim) for one in parts]
        return torch.cat([low for low, _ in halves] + [high for _, high in reversed(halves)], dim)

    def whole(self, states_NQD: Tensor) -> Tensor:
        """Every rank's states as one process would have them, [N, L, D]."""
        return self.gather(states_NQD, 1)[:, : self.length]


_active: ContextVar[Share | None] = ContextVar("fledge_share", default=None)


def share_of(mesh: Any, length: int, mask_NL: Tensor | None, *, caps: bool = True) -> Share:
    """What this rank computes of rows of this length; `mask_NL` is 1 at real tokens."""
    hidden_NL = None
    if mask_NL is not None and not bool(mask_NL.all()):
        hidden_NL = mask_NL == 0
    return Share(mesh.get_group(), mesh.get_local_rank(), mesh.size(), length, hidden_NL, caps)


def check_shareable(model: nn.Module, mesh: Any) -> None:
    """Refuse what is no mesh of ranks, and a model whose layers carry more than attention does."""
    what = f"cp_mesh of size {mesh.size()}"
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        fix = "pass one dimension of a torch.distributed DeviceMesh, or None"
        raise BadInput(f"{what} is no mesh of ranks", fix=fix)
    if not may_support(model):
        raise not_shareable(model, mesh)


def not_shareable(model: nn.Module, mesh: DeviceMesh) -> BadInput:
    """The line about a model that gives other states when ranks share its rows."""
    what = f"cp_mesh of size {mesh.size()}: its layers are more than causal attention, and ranks "
    what += "cannot share rows"
    fix = "shard the weights instead (target.parallel.fsdp or tp)"
    return BadInput(what, where=type(model).__name__, fix=fix)


@contextmanager
def shared_rows(model: nn.Module, share: Share) -> Iterator[None]:
    """While open, the model's attention looks at the keys of all ranks."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    token = _active.set(share)
    try:
        with lent_attention(model, NAME):
            yield
    finally:
        _active.reset(token)


def attend(
    module: nn.Module,
    query_NHQC: Tensor,
    key_NGQC: Tensor,
    value_NGQC: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: local queries, everybody's keys and values."""
    odd = [name for name, v in options.items() if v is not None and name not in HARMLESS]
    if attention_mask is not None or odd or options.get("is_causal") is False:
        raise Unsupported(f"{type(module).__name__} passes {odd or 'a mask'}")
    share = _active.get()
    assert share is not None
    key_NGLC, value_NGLC = share.gather(key_NGQC, 2), share.gather(value_NGQC, 2)
    outputs = []
    for chunk, query_NHqC in zip(share.chunks, query_NHQC.chunk(2, 2), strict=True):
        begin, end = chunk * share.chunk, (chunk + 1) * share.chunk
        first = 0 if sliding_window is None else max(0, begin - sliding_window + 1)
        seen = slice(first, end)
        visible = _visible(share, begin, seen, sliding_window, query_NHqC.device)
        keys = key_NGLC[:, :, seen], value_NGLC[:, :, seen]
        softcap = softcap if share.caps else None
        if softcap is not None or s_aux is not None:
            outputs.append(_written_out(query_NHqC, *keys, visible, scaling, softcap, s_aux))
            continue
        outputs.append(
            F.scaled_dot_product_attention(
                query_NHqC,
                *keys,
                attn_mask=causal_lower_right(end - begin, end) if visible is None else visible,
                scale=scaling,
                enable_gqa=query_NHQC.shape[1] != key_NGQC.shape[1],
            )
        )
    return torch.cat(outputs, 2).transpose(1, 2), None


def _visible(
    share: Share, begin: int, seen: slice, window: int | None, device: torch.device
) -> Tensor | None:
    """Which of the keys `seen` [K] a chunk's queries [q] may look at, [q, K] or, with padding,
    [N, 1, q, K]; None: the causal rule alone, which the kernels of a GPU know by themselves."""
    if window is None and share.hidden_NL is None and device.type == "cuda":
        return None
    query_q = torch.arange(begin, seen.stop, device=device)
    key_K = torch.arange(seen.start, seen.stop, device=device)
    distance_qK = query_q[:, None] - key_K
    visible_qK = distance_qK >= 0
    if window is not None:
        visible_qK &= distance_qK < window
    if share.hidden_NL is None:
        return visible_qK
    past = 2 * share.size * share.chunk - share.length
    hidden_NK = F.pad(share.hidden_NL.to(device), (0, past), value=True)[:, seen]
    visible_NqK = visible_qK & ~hidden_NK[:, None]
    # padding that sees nothing would be NaN, and spoil those that look at its value times 0
    blind_Nq1 = ~visible_NqK.any(-1, keepdim=True)
    return (visible_NqK | (blind_Nq1 & (distance_qK == 0)))[:, None]


def _written_out(
    query_NHqC: Tensor,
    key_NGKC: Tensor,
    value_NGKC: Tensor,
    visible: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Attention with what the kernels do not know: capped scores (Gemma 2), sinks (gpt-oss). Some
    queries at a time: their scores are never all there."""
    (rows, heads, queries, channels), keys = query_NHqC.shape, key_NGKC.shape[2]
    groups = heads // key_NGKC.shape[1]
    key_NHKC, value_NHKC = (t.repeat_interleave(groups, 1) for t in (key_NGKC, value_NGKC))
    scale = channels**-0.5 if scaling is None else scaling
    key_K = torch.arange(keys, device=query_NHqC.device)
    some = max(1, _SCORES // (rows * heads * keys))
    outputs = []
    for begin in range(0, queries, some):
        scores_NHqK = query_NHqC[:, :, begin : begin + some] @ key_NHKC.transpose(2, 3) * scale
        if softcap is not None:
            scores_NHqK = torch.tanh(scores_NHqK / softcap) * softcap
        if visible is None:  # the last query sees the last key
            query_q = key_K[keys - queries + begin :][:some]
            seen = key_K <= query_q[:, None]
        else:
            seen = visible[..., begin : begin + some, :]
        scores_NHqK = scores_NHqK.masked_fill(~seen, float("-inf"))
        if sinks_H is not None:
            sinks_NHq1 = sinks_H.view(1, -1, 1, 1).expand(*scores_NHqK.shape[:3], 1)
            scores_NHqK = torch.cat([scores_NHqK, sinks_NHq1.to(scores_NHqK.dtype)], -1)
        wide = torch.promote_types(scores_NHqK.dtype, torch.float32)
        weights_NHqK = torch.softmax(scores_NHqK, -1, dtype=wide)[..., :keys]
        outputs.append(weights_NHqK.to(value_NHKC.dtype) @ value_NHKC)
    return torch.cat(outputs, 2)
