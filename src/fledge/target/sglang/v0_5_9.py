"""SGLang 0.5.9: how its `ModelRunner` is built and fed."""

from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.eplb import expert_location
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs

from fledge.target.sglang.engine import NoPrefixCache, SGLangEngine, new_request


class _NoPrefixCache(NoPrefixCache):
    def is_chunk_cache(self) -> bool:
        return True

    def is_tree_cache(self) -> bool:
        return False


class Engine(SGLangEngine):
    """Drives SGLang 0.5.9."""

    prefix_cache = _NoPrefixCache

    def _start(self, options: dict[str, Any], *, rank: int, port: int) -> Any:
        args = ServerArgs(**options)
        initialize_moe_config(args)
        initialize_fp8_gemm_config(args)
        initialize_fp4_gemm_config(args)
        return ModelRunner(
            model_config=ModelConfig.from_server_args(args),
            mem_fraction_static=args.mem_fraction_static,
            gpu_id=args.base_gpu_id + rank * args.gpu_id_step,
            tp_rank=rank,
            tp_size=args.tp_size,
            moe_ep_rank=rank // (args.tp_size // args.ep_size),
            moe_ep_size=args.ep_size,
            pp_rank=0,
            pp_size=1,
            nccl_port=port,
            server_args=args,
        )

    def _request(self, index: int, row: list[int]) -> Any:
        request = new_request(index, row)
        request.fill_ids = row
        request.set_extend_input_len(len(row))
        return request

    def _forward_batch(self, batch: Any) -> Any:
        return ForwardBatch.init_new(batch.get_model_worker_batch(), self._runner)

    def _reset_globals(self) -> None:
        parallel_state.destroy_model_parallel()
        parallel_state._ATTN_TP = None  # 0.5.9 does not reset this one (it is the TP group)
        parallel_state.destroy_distributed_environment()
        expert_location._global_expert_location_metadata = None  # it may be set only once
