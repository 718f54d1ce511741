"""SGLang 0.5.23: how its `ModelRunner` is built and fed."""

from array import array
from collections.abc import Sequence
from typing import Any

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import bootstrap, parallel_state
from sglang.srt.eplb.expert_location import set_global_expert_location_metadata
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
from sglang.srt.layers.quantization.unquant import initialize_bf16_gemm_config
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import SpawnRanks, get_device, publish, spawn_world_rank
from sglang.srt.server_args import ServerArgs

from fledge.target.sglang.engine import NoPrefixCache, SGLangEngine, new_request


class _NoPrefixCache(NoPrefixCache):
    def supports_prefix_sharing(self) -> bool:
        return False

    def evict(self, params: Any) -> None:
        """There is nothing to evict."""

    def maybe_hand_to_session(self, request: Any) -> None:
        """There are no sessions."""


class Engine(SGLangEngine):
    """Drives SGLang 0.5.23."""

    prefix_cache = _NoPrefixCache

    def _start(self, options: dict[str, Any], *, rank: int, port: int) -> Any:
        args = ServerArgs(**options)
        args.resolve_once()
        resolved = resolving_view(args)
        gpu_id = resolved.base_gpu_id + rank * resolved.gpu_id_step
        world_rank = spawn_world_rank(args, tp_rank=rank, pp_rank=0)
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=world_rank, gpu_id=gpu_id))
        initialize_moe_config()
        initialize_fp8_gemm_config()
        initialize_bf16_gemm_config()
        initialize_fp4_gemm_config()
        model_config = ModelConfig.from_server_args(args)
        bootstrap.init_parallel_runtime(
            server_args=args, device=get_device().device, dist_port=port
        )
        bootstrap.init_layer_runtime(model_config=model_config)
        runner = ModelRunner(
            model_config=model_config,
            mem_fraction_static=resolved.mem_fraction_static,
            gpu_id=gpu_id,
            nccl_port=port,
            server_args=args,
        )
        runner.alloc_memory_pool()
        runner.init_attention_backends()
        runner.init_cuda_graphs()
        return runner

    def _request(self, index: int, row: list[int]) -> Any:
        tokens = array("q", row)
        request = new_request(index, tokens)
        request.full_untruncated_fill_ids = tokens
        request.extend_end = len(tokens)
        return request

    def _schedule(self, rows: Sequence[list[int]]) -> Any:
        batch = super()._schedule(rows)
        if batch.input_ids is None:
            batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device)
            batch.prefill_input_ids_cpu = None
        return batch

    def _forward_batch(self, batch: Any) -> Any:
        return ForwardBatch.init_new(
            batch,
            self._runner,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            return_hidden_states_before_norm=False,
        )

    def _reset_globals(self) -> None:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
        set_global_expert_location_metadata(None, allow_overwrite=True)
