"""vLLM's hidden-state connector for machines without a GPU, where its own needs CUDA streams.

vLLM loads this module by name (`kv_connector_module_path`). Only hooks that vLLM offers to
connectors are overridden. Files are moved into place as a whole, so no locks are needed.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "CpuHiddenStates",
        "kv_connector_module_path": "fledge.target.vllm.cpu_connector", ...}'
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
)

from fledge.core.files import save_tensors


def gather(cache: Tensor, pending: PendingSave) -> Tensor:
    """States [N, K, D] of a finished request, from pages [blocks, K, block size, D]. An aborted
    request has states for only some of its tokens."""
    page_size = cache.shape[2]
    block_M = torch.tensor(pending.block_ids, device=cache.device, dtype=torch.long)
    capacity = len(block_M) * page_size
    slot_N = torch.arange(min(len(pending.token_ids), capacity), device=cache.device)
    return cache[block_M[slot_N // page_size], :, slot_N % page_size]


class CpuHiddenStates(ExampleHiddenStatesConnector):  # type: ignore[misc]
    """Writes the states of a finished request before the next step."""

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        [layer] = self.cache_layers
        self.pages = kv_caches[layer]

    def wait_for_save(self) -> None:
        """Does nothing: no file is written in the background."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if not self.has_connector_metadata() or get_tensor_model_parallel_rank() != 0:
            return None, None
        written = set()
        # despite its name, `_get_connector_metadata` is meant for connectors
        for pending in self._get_connector_metadata().pending_saves:
            self._write(pending)
            written.add(pending.req_id)
        return written or None, None

    def _write(self, pending: PendingSave) -> None:
        path = Path(pending.filename)
        path.parent.mkdir(parents=True, exist_ok=True)
        states_NKD = gather(self.pages, pending).contiguous()
        part = path.with_name(f"{path.name}.part")
        save_tensors(part, {"hidden_states": states_NKD, "token_ids": pending.token_ids})
        os.replace(part, path)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return None  # vLLM has one layout on a CPU and rejects any request to change it
