"""Rollout attention on a GPU: launches `triton_kernels.py`, and ties it into autograd.

Same results as `attention.reference_attention`. Importing this file imports Triton: `attention.py`
and `blocked.py` do so only once `unsupported` has nothing to say about tensors on a GPU.

Under TRITON_INTERPRET=1 the same code runs on CPU tensors, slowly, for tests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from fledge.rollout import triton_kernels as kernels
from fledge.rollout.plan import QueryRows
from fledge.triton_gate import on_device_of

SHORT_CHAIN = 8  # chains up to here share one compilation: TTT 7 needs 6, P-EAGLE's 8 depths 7
GRANULE = 32  # every key block is a multiple of this many keys


@dataclass(frozen=True)
class Tile:
    pairs: int  # (row, head) pairs
    keys: int
    warps: int
    stages: int


# By padded head dim. Chosen for Hopper: what fits its shared memory and spills few registers.
TILES: dict[str, dict[int, Tile]] = {
    "attend": {64: Tile(128, 64, 4, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 64, 8, 2)},
    "query_grad": {64: Tile(128, 64, 8, 2), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 8, 2)},
    "key_grad": {64: Tile(64, 128, 8, 2), 128: Tile(64, 128, 8, 2), 256: Tile(32, 64, 8, 1)},
}
TILES_FP32 = {64: Tile(32, 32, 8, 1), 128: Tile(32, 32, 8, 1), 256: Tile(16, 32, 8, 1)}
CHAIN_ROWS = 16


def tile_for(kernel: str, channels: int, dtype: torch.dtype) -> Tile:
    tiles = TILES_FP32 if dtype == torch.float32 else TILES[kernel]
    return tiles[max(64, triton.next_power_of_2(channels))]


def fused_attention(
    q_NHC: Tensor,
    k_TGC: Tensor,
    v_TGC: Tensor,
    rows: QueryRows,
    chain: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """Attend; the chain's tensors may have more rows than q, which are ignored."""
    keys = [keys for keys, _ in chain]
    values = [values for _, values in chain]
    out: Tensor = _FusedAttention.apply(q_NHC, k_TGC, v_TGC, rows, *keys, *values)  # type: ignore[no-untyped-call]
    return out


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_NHC: Tensor, k_TGC: Tensor, v_TGC: Tensor, rows: QueryRows, *chain: Tensor
    ) -> Tensor:
        job = _Job(q_NHC, k_TGC, v_TGC, rows, _Chain.of(chain))
        out_NHC, lse_NH = job.attend(q_NHC.dtype)
        ctx.rows = rows
        ctx.save_for_backward(job.q, job.k, job.v, out_NHC, lse_NH, *job.chain.tensors)
        return out_NHC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_NHC, k_TGC, v_TGC, out_NHC, lse_NH, *chain = ctx.saved_tensors
        dout_NHC = grads[0].contiguous()
        job = _Job(q_NHC, k_TGC, v_TGC, ctx.rows, _Chain.of(chain))
        delta_NH = torch.empty_like(lse_NH)
        dq_NHC = job.query_grad(dout_NHC, lse_NH, delta_NH, q_NHC.dtype, out=out_NHC)
        dk_TGC, dv_TGC = job.key_grad(dout_NHC, lse_NH, delta_NH, k_TGC.dtype)
        return (
            dq_NHC, dk_TGC, dv_TGC, None, *job.chain_grad(dout_NHC, lse_NH, delta_NH)
        )  # fmt: skip


def fused_prefix_forward(
    q_NHC: Tensor, k_TGC: Tensor, v_TGC: Tensor, rows: QueryRows
) -> tuple[Tensor, Tensor]:
    """`blocked.prefix_forward`: output [N, H, C] and log-sum-exp [N, H], both fp32."""
    return _Job(q_NHC, k_TGC, v_TGC, rows, _Chain.of(())).attend(torch.float32)


def fused_prefix_backward(
    q_NHC: Tensor,
    k_TGC: Tensor,
    v_TGC: Tensor,
    dout_NHC: Tensor,
    lse_NH: Tensor,
    delta_NH: Tensor,
    rows: QueryRows,
) -> tuple[Tensor, Tensor, Tensor]:
    """`blocked.prefix_backward`: gradients of q, k, v in fp32."""
    job = _Job(q_NHC, k_TGC, v_TGC, rows, _Chain.of(()))
    dout_NHC, lse_NH, delta_NH = (x.contiguous() for x in (dout_NHC, lse_NH, delta_NH))
    dq_NHC = job.query_grad(dout_NHC, lse_NH, delta_NH, torch.float32, out=None)
    return dq_NHC, *job.key_grad(dout_NHC, lse_NH, delta_NH, torch.float32)


@dataclass(frozen=True)
class _Chain:
    """Keys of all depths with one pair of strides, and values with another."""

    keys: list[Tensor]
    values: list[Tensor]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "_Chain":
        depth = len(tensors) // 2
        return cls(_same_strides(tensors[:depth]), _same_strides(tensors[depth:]))

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.keys, *self.values]


def _same_strides(tensors: Sequence[Tensor]) -> list[Tensor]:
    if len({x.stride() for x in tensors}) == 1 and tensors[0].stride(-1) == 1:
        return list(tensors)
    return [x.contiguous() for x in tensors]


def _dense(x: Tensor) -> Tensor:
    """Channels side by side; rows and heads may lie apart."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _Job:
    """One call's tensors and what all of its launches have in common."""

    def __init__(
        self, q_NHC: Tensor, k_TGC: Tensor, v_TGC: Tensor, rows: QueryRows, chain: _Chain
    ) -> None:
        self.q, self.k, self.v = _dense(q_NHC), _dense(k_TGC), _dense(v_TGC)
        self.rows, self.chain, self.depth = rows, chain, len(chain.keys)
        self.heads, self.channels = q_NHC.shape[1:]
        self.groups = k_TGC.shape[1]
        # Unused places hold any tensor at all: the kernels count up to `depth`.
        longest = max(SHORT_CHAIN, triton.next_power_of_2(self.depth))
        self.max_chain = longest
        self.ck = (*chain.keys, *[self.k] * (longest - self.depth))
        self.cv = (*chain.values, *[self.v] * (longest - self.depth))
        self.device = on_device_of(q_NHC)

    @property
    def order(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.rows.order_N, self.rows.slot_N, self.rows.first_N

    @property
    def chain_strides(self) -> tuple[int, ...]:
        return (*self.ck[0].stride()[:2], *self.cv[0].stride()[:2])

    @property
    def qkv_strides(self) -> tuple[int, ...]:
        return (*self.q.stride()[:2], *self.k.stride()[:2], *self.v.stride()[:2])

    def shape(self) -> dict[str, Any]:
        return {
            "HEADS": self.heads,
            "GROUP": self.heads // self.groups,
            "SCALE": self.channels**-0.5,
            "CHANNELS": self.channels,
            "BLOCK_C": triton.next_power_of_2(self.channels),
        }

    def options(self, kernel: str) -> dict[str, Any]:
        tile = tile_for(kernel, self.channels, self.q.dtype)
        blocks = {"BLOCK_M": tile.pairs, "BLOCK_N": tile.keys}
        return self.shape() | blocks | {"num_warps": tile.warps, "num_stages": tile.stages}

    def grid(self, options: dict[str, Any]) -> tuple[int, int]:
        return triton.cdiv(len(self.rows) * options["GROUP"], options["BLOCK_M"]), self.groups

    def attend(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Output [N, H, C] in `dtype` and total log-sum-exp [N, H] in fp32."""
        out_NHC = self.q.new_empty(self.q.shape, dtype=dtype)
        lse_NH = self.q.new_empty(self.q.shape[:2], dtype=torch.float32)
        options = self.options("attend")
        if len(self.rows):
            with self.device:
                kernels.attend[self.grid(options)](
                    self.q, self.k, self.v, self.ck, self.cv, out_NHC, lse_NH, *self.order,
                    *self.qkv_strides, *self.chain_strides, len(self.rows), self.depth,
                    MAX_CHAIN=self.max_chain, **options,
                )  # fmt: skip
        return out_NHC, lse_NH

    def query_grad(
        self,
        dout_NHC: Tensor,
        lse_NH: Tensor,
        delta_NH: Tensor,
        dtype: torch.dtype,
        *,
        out: Tensor | None,
    ) -> Tensor:
        """dq; `delta_NH` is filled from the output where that is given, and read where not."""
        dq_NHC = self.q.new_empty(self.q.shape, dtype=dtype)
        options = self.options("query_grad")
        if len(self.rows):
            with self.device:
                kernels.query_grad[self.grid(options)](
                    self.q, self.k, self.v, self.ck, self.cv, dout_NHC if out is None else out,
                    dout_NHC, lse_NH, delta_NH, dq_NHC, *self.order,
                    *self.qkv_strides, *self.chain_strides, len(self.rows), self.depth,
                    MAX_CHAIN=self.max_chain, DELTA_GIVEN=out is None, **options,
                )  # fmt: skip
        return dq_NHC

    def key_grad(
        self, dout_NHC: Tensor, lse_NH: Tensor, delta_NH: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """dk, dv of the prefix."""
        num_keys = len(self.k)
        dk_TGC, dv_TGC = (
            torch.zeros(self.k.shape, dtype=dtype, device=self.k.device)
            if len(self.rows) == 0
            else torch.empty(self.k.shape, dtype=dtype, device=self.k.device)
            for _ in range(2)
        )
        if len(self.rows) == 0:
            return dk_TGC, dv_TGC
        options = self.options("key_grad")
        bounds, count = self._row_bounds()
        with self.device:
            kernels.key_grad[(triton.cdiv(num_keys, options["BLOCK_N"]), self.groups)](
                self.q, self.k, self.v, dout_NHC, lse_NH, delta_NH, dk_TGC, dv_TGC, *self.order,
                bounds, *self.qkv_strides, num_keys, count, GRANULE=GRANULE, **options,
            )  # fmt: skip
        return dk_TGC, dv_TGC

    def _row_bounds(self) -> tuple[Tensor, int]:
        count = triton.cdiv(len(self.k), GRANULE) + 1
        bounds = torch.empty(3, count, dtype=torch.int32, device=self.q.device)
        with self.device:
            kernels.row_bounds[(triton.cdiv(count, 64), 3)](
                *self.order, bounds, len(self.rows), count, len(self.rows).bit_length(),
                GRANULE=GRANULE, BLOCK=64, num_warps=2,
            )  # fmt: skip
        return bounds, count

    def chain_grad(self, dout_NHC: Tensor, lse_NH: Tensor, delta_NH: Tensor) -> list[Tensor]:
        """dk of every depth, then dv of every depth; zero for the rows that q does not have."""
        tensors = self.chain.tensors
        if not tensors:
            return []
        flat = self.q.new_zeros(sum(x.numel() for x in tensors))
        parts = torch.split(flat, [x.numel() for x in tensors])
        grads = [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]
        unused = [flat] * (self.max_chain - self.depth)
        if len(self.rows):
            with self.device:
                kernels.chain_grad[(triton.cdiv(len(self.rows), CHAIN_ROWS), self.groups)](
                    self.q, self.ck, self.cv, dout_NHC, lse_NH, delta_NH,
                    (*grads[: self.depth], *unused), (*grads[self.depth :], *unused),
                    *self.q.stride()[:2], *self.chain_strides, len(self.rows), self.depth,
                    MAX_CHAIN=self.max_chain, BLOCK_R=CHAIN_ROWS, **self.shape(),
                )  # fmt: skip
        return grads
