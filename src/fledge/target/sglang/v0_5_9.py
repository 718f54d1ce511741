"""SGLang 0.5.9: how its `ModelRunner` is built and fed."""

import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.eplb import expert_location
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from fledge.target.sglang.engine import SGLangEngine


class _NoPrefixCache(SimpleNamespace):
    """What allocation asks of a prefix cache: nothing is shared, nothing can be evicted."""

    def supports_swa(self) -> bool:
        return False

    def supports_mamba(self) -> bool:
        return False

    def is_chunk_cache(self) -> bool:
        return True

    def is_tree_cache(self) -> bool:
        return False


class Engine(SGLangEngine):
    """Drives SGLang 0.5.9."""

    @staticmethod
    def option_names() -> list[str]:
        return list(inspect.signature(ServerArgs).parameters)

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

    def _schedule(self, rows: Sequence[list[int]]) -> Any:
        runner = self._runner
        batch = ScheduleBatch.init_new(
            reqs=[_request(index, row) for index, row in enumerate(rows)],
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            tree_cache=_NoPrefixCache(
                page_size=runner.page_size,
                device=runner.device,
                token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            ),
            model_config=runner.model_config,
            enable_overlap=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
        batch.prepare_for_extend()
        return batch

    def _forward_batch(self, batch: Any) -> Any:
        return ForwardBatch.init_new(batch.get_model_worker_batch(), self._runner)

    def _forget(self) -> None:
        parallel_state.destroy_model_parallel()
        parallel_state._ATTN_TP = None  # the one group that 0.5.9 forgets (it is the TP group)
        parallel_state.destroy_distributed_environment()
        expert_location._global_expert_location_metadata = None  # it may be set only once


def _request(index: int, row: list[int]) -> Any:
    request = Req(
        rid=str(index),
        origin_input_text="",
        origin_input_ids=row,
        sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
    )
    request.fill_ids = row
    request.logprob_start_len = -1
    request.set_extend_input_len(len(row))
    return request
