"""Rollout attention on a GPU: the kernels of `attention_kernels.py`, connected to autograd.

Same results as `attention.reference_attention` and the definitions of P-EAGLE and of blocks.
Importing this file imports Triton: `attention.py` does so only if its `kernel_runs` accepts the
tensors. Under TRITON_INTERPRET=1 the same code runs on CPU tensors, slowly, for tests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from fledge.kernels.gate import GRANULE, on_device_of, tile_for
from fledge.rollout import attention_kernels as kernels
from fledge.rollout import key_grad_kernels
from fledge.rollout.attention import KeysValues
from fledge.rollout.plan import QueryRows

# Chains up to this length share one compilation: 7 TTT steps need 6, P-EAGLE's 8 depths need 7.
SHORT_CHAIN = 8
CHAIN_ROWS = 16


def fused_attention(
    q_NHC: Tensor, k_TGC: Tensor, v_TGC: Tensor, rows: QueryRows, chain: Sequence[KeysValues]
) -> Tensor:
    """The attention output. Rows of the chain's tensors beyond those of q are ignored."""
    tensors = (*(keys for keys, _ in chain), *(values for _, values in chain))
    out: Tensor = _FusedAttention.apply(rows, None, q_NHC, k_TGC, v_TGC, *tensors)  # type: ignore[no-untyped-call]
    return out


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: QueryRows,
        nested: "Nested | None",
        q_NHC: Tensor,
        k_TGC: Tensor,
        v_TGC: Tensor,
        *chain: Tensor,
    ) -> Tensor:
        job = Job(q_NHC, k_TGC, v_TGC, rows, Chain.of(chain, nested))
        out_NHC, lse_NH = job.attend()
        ctx.rows, ctx.nested = rows, nested
        ctx.save_for_backward(job.q, job.k, job.v, out_NHC, lse_NH, *job.chain.tensors)
        return out_NHC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_NHC, k_TGC, v_TGC, out_NHC, lse_NH, *chain = ctx.saved_tensors
        dout_NHC = grads[0].contiguous()
        job = Job(q_NHC, k_TGC, v_TGC, ctx.rows, Chain.of(chain, ctx.nested))
        dq_NHC, delta_NH = job.query_grad(out_NHC, dout_NHC, lse_NH)
        dk_TGC, dv_TGC = job.key_grad(dout_NHC, lse_NH, delta_NH)
        chain_grads = job.chain_grad(dout_NHC, lse_NH, delta_NH)
        return None, None, dq_NHC, dk_TGC, dv_TGC, *chain_grads


@dataclass(frozen=True)
class Nested:
    """Chains of all depths in one tensor, with queries of all depths in one call (P-EAGLE)."""

    starts_K: Tensor  # first chain row of each depth, followed by the number of chain rows
    depth: int
    longest: int  # rows of the first depth


@dataclass(frozen=True)
class Chain:
    """Keys of all depths, which share their strides, and values, which share theirs.

    There is one tensor per depth; with `nested`, one tensor in total.
    """

    keys: list[Tensor]
    values: list[Tensor]
    nested: Nested | None = None

    @classmethod
    def of(cls, tensors: Sequence[Tensor], nested: Nested | None = None) -> "Chain":
        count = len(tensors) // 2
        return cls(_same_strides(tensors[:count]), _same_strides(tensors[count:]), nested)

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.keys, *self.values]


def _same_strides(tensors: Sequence[Tensor]) -> list[Tensor]:
    if len({x.stride() for x in tensors}) == 1 and _addressable(tensors[0]):
        return list(tensors)
    return [x.contiguous() for x in tensors]


def _dense(x: Tensor) -> Tensor:
    return x if _addressable(x) else x.contiguous()


def _addressable(x: Tensor) -> bool:
    """Whether the kernels can address x: channels must be contiguous, rows and heads may be
    strided. Kernels compute row offsets in 64 bits, but head offsets must fit in 32 bits."""
    return x.stride(-1) == 1 and x.shape[1] * x.stride(1) <= 2**31


@dataclass(frozen=True)
class Own:
    """Further keys and values, of which a row sees those from `first_N` to `slot_N` (blocks)."""

    keys: Tensor
    values: Tensor
    rows: QueryRows


class Job:
    """The tensors of one call, and the arguments that its kernel launches share."""

    def __init__(
        self,
        q_NHC: Tensor,
        k_TGC: Tensor,
        v_TGC: Tensor,
        rows: QueryRows,
        chain: Chain,
        own: Own | None = None,
    ) -> None:
        self.q, self.k, self.v = _dense(q_NHC), _dense(k_TGC), _dense(v_TGC)
        self.rows, self.chain = rows, chain
        self.heads, self.channels = q_NHC.shape[1:]
        self.groups = k_TGC.shape[1]
        self.starts, self.first_chain = rows.slot_N, 0
        if chain.nested is None:
            self.depth = len(chain.keys)
            self.max_chain = max(SHORT_CHAIN, triton.next_power_of_2(self.depth))
        else:
            self.starts, self.depth = chain.nested.starts_K, chain.nested.depth
            self.first_chain, self.max_chain = len(rows) - len(chain.keys[0]), 0
        # Unused places may hold any tensor: the kernels read only the first `depth`.
        unused = self.max_chain - len(chain.keys)
        self.ck = (*chain.keys, *[self.k] * unused)
        self.cv = (*chain.values, *[self.v] * unused)
        self.device = on_device_of(q_NHC)
        self.order = (rows.order_N, rows.slot_N, rows.first_N)
        self.chain_strides = (*self.ck[0].stride()[:2], *self.cv[0].stride()[:2])
        self.qkv_strides = [step for x in (self.q, self.k, self.v) for step in x.stride()[:2]]
        seen = own or Own(self.k, self.v, rows)  # unused without `own`
        own_pair = (_dense(seen.keys), _dense(seen.values))
        self.tensors = (self.q, self.k, self.v, self.ck, self.cv, *own_pair)
        floor_N = rows.first_N if rows.floor_N is None else rows.floor_N
        self.places = (
            *(*self.order, floor_N, self.starts, seen.rows.slot_N, seen.rows.first_N),
            *(*self.qkv_strides, *self.chain_strides),
            *(step for x in own_pair for step in x.stride()[:2]),
            *(len(rows), self.depth, self.first_chain),
        )
        self.kind = {
            "MAX_CHAIN": self.max_chain,
            "NESTED": chain.nested is not None,
            "OWN": own is not None,
            "FLOORED": rows.floor_N is not None,
        }

    def shape(self) -> dict[str, Any]:
        return {
            "HEADS": self.heads,
            "GROUP": self.heads // self.groups,
            "SCALE": self.channels**-0.5,
            "CHANNELS": self.channels,
            "BLOCK_C": triton.next_power_of_2(self.channels),
        }

    def options(self, kernel: str) -> dict[str, Any]:
        tile = tile_for(kernel, self.channels, self.q.dtype, self.q.device)
        blocks = {"BLOCK_M": tile.pairs, "BLOCK_N": tile.keys}
        return self.shape() | blocks | {"num_warps": tile.warps, "num_stages": tile.stages}

    def grid(self, options: dict[str, Any]) -> tuple[int, int]:
        return triton.cdiv(len(self.rows) * options["GROUP"], options["BLOCK_M"]), self.groups

    def attend(self) -> tuple[Tensor, Tensor]:
        """Output [N, H, C], and total log-sum-exp [N, H] in fp32."""
        out_NHC = self.q.new_empty(self.q.shape)
        lse_NH = self.q.new_empty(self.q.shape[:2], dtype=torch.float32)
        options = self.options("attend")
        if len(self.rows):
            with self.device:
                kernels.attend[self.grid(options)](
                    *self.tensors, out_NHC, lse_NH, *self.places, **self.kind, **options,
                )  # fmt: skip
        return out_NHC, lse_NH

    def query_grad(
        self, out_NHC: Tensor, dout_NHC: Tensor, lse_NH: Tensor
    ) -> tuple[Tensor, Tensor]:
        """dq, and delta = sum(out * dout) [N, H], which the gradients of the keys need."""
        dq_NHC, delta_NH = self.q.new_empty(self.q.shape), torch.empty_like(lse_NH)
        options = self.options("query_grad")
        if len(self.rows):
            with self.device:
                kernels.query_grad[self.grid(options)](
                    *self.tensors, out_NHC, dout_NHC, lse_NH, delta_NH, dq_NHC,
                    *self.places, **self.kind, **options,
                )  # fmt: skip
        return dq_NHC, delta_NH

    def key_grad(self, dout_NHC: Tensor, lse_NH: Tensor, delta_NH: Tensor) -> tuple[Tensor, Tensor]:
        """dk, dv of the prefix."""
        num_keys = len(self.k)
        if len(self.rows) == 0:
            return self.k.new_zeros(self.k.shape), self.k.new_zeros(self.k.shape)
        dk_TGC, dv_TGC = (self.k.new_empty(self.k.shape) for _ in range(2))
        options = self.options("key_grad")
        bounds = self._row_bounds()
        with self.device:
            key_grad_kernels.key_grad[(triton.cdiv(num_keys, options["BLOCK_N"]), self.groups)](
                self.q, self.k, self.v, dout_NHC, lse_NH, delta_NH, dk_TGC, dv_TGC, *self.order,
                bounds, *self.qkv_strides, num_keys, bounds.shape[1], GRANULE=GRANULE, **options,
            )  # fmt: skip
        return dk_TGC, dv_TGC

    def _row_bounds(self) -> Tensor:
        rows, num_keys = self.rows, len(self.k)
        if num_keys not in rows.bounds:
            count = triton.cdiv(num_keys, GRANULE) + 1
            bounds = torch.empty(3, count, dtype=torch.int32, device=self.q.device)
            floor_N = rows.first_N if rows.floor_N is None else rows.floor_N
            with self.device:
                key_grad_kernels.row_bounds[(triton.cdiv(count, 64), 3)](
                    rows.order_N, rows.slot_N, floor_N, bounds,
                    len(rows), count, len(rows).bit_length(),
                    GRANULE=GRANULE, BLOCK=64, num_warps=2,
                )  # fmt: skip
            if rows.floor_N is not None:
                bounds[2].fill_(-1)  # mask all rows: none is assumed to see all keys of a range
            rows.bounds[num_keys] = bounds
        return rows.bounds[num_keys]

    def chain_grad(self, dout_NHC: Tensor, lse_NH: Tensor, delta_NH: Tensor) -> list[Tensor]:
        """dk of every depth, then dv of every depth; zero for rows beyond those of q."""
        if self.chain.nested is not None:
            return self._nested_chain_grad(self.chain.nested, dout_NHC, lse_NH, delta_NH)
        tensors = self.chain.tensors
        if not tensors:
            return []
        flat = self.q.new_zeros(sum(x.numel() for x in tensors))
        parts = torch.split(flat, [x.numel() for x in tensors])
        grads = [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]
        unused = [flat] * (self.max_chain - self.depth)
        if len(self.rows):
            with self.device:
                key_grad_kernels.chain_grad[(triton.cdiv(len(self.rows), CHAIN_ROWS), self.groups)](
                    self.q, self.ck, self.cv, dout_NHC, lse_NH, delta_NH,
                    (*grads[: self.depth], *unused), (*grads[self.depth :], *unused),
                    *self.q.stride()[:2], *self.chain_strides, len(self.rows), self.depth,
                    MAX_CHAIN=self.max_chain, BLOCK_R=CHAIN_ROWS, **self.shape(),
                )  # fmt: skip
        return grads

    def _nested_chain_grad(
        self, nested: "Nested", dout_QHC: Tensor, lse_QH: Tensor, delta_QH: Tensor
    ) -> list[Tensor]:
        (keys_MGC,), (values_MGC,) = self.chain.keys, self.chain.values
        dkeys_MGC, dvalues_MGC = (keys_MGC.new_empty(keys_MGC.shape) for _ in range(2))
        if nested.longest:
            grid = (triton.cdiv(nested.longest, CHAIN_ROWS), self.groups, nested.depth)
            with self.device:
                key_grad_kernels.nested_chain_grad[grid](
                    self.q, keys_MGC, values_MGC, dout_QHC, lse_QH, delta_QH,
                    dkeys_MGC, dvalues_MGC, nested.starts_K, *self.q.stride()[:2],
                    *self.chain_strides, self.first_chain, nested.depth, BLOCK_R=CHAIN_ROWS,
                    **self.shape(),
                )  # fmt: skip
        return [dkeys_MGC, dvalues_MGC]


# --- P-EAGLE: rows of all depths at once ----------------------------------------------------------


def fused_parallel(
    q_QHC: Tensor,
    prefix: KeysValues,
    chain: KeysValues,
    rows: QueryRows,
    counts: Sequence[int],
    starts_K: Tensor,  # first chain row of each depth, and the end of the last
) -> Tensor:
    """P-EAGLE's `parallel_attention` on a GPU."""
    present = [count for count in counts if count]
    nested = Nested(starts_K, len(present), max(present, default=0))
    out: Tensor = _FusedAttention.apply(rows, nested, q_QHC, *prefix, *chain)  # type: ignore[no-untyped-call]
    return out
