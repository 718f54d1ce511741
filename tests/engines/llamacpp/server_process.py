"""Runs in the environment of llama.cpp: a native server for the arguments in argv[1] (JSON), until
its input ends. Prints its address. Imports nothing of fledge."""

import json
import sys

import xllamacpp
from xllamacpp import common_speculative_type, ggml_type, llama_flash_attn_type


def main() -> None:
    asked = json.loads(sys.argv[1])
    params = xllamacpp.CommonParams()
    params.model.path = asked["target"]
    params.n_ctx, params.n_parallel, params.n_gpu_layers = asked.get("context", 512), 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.port, params.warmup, params.endpoint_metrics = 0, False, True
    params.fit_params, params.verbosity = False, asked.get("verbosity", 1)
    params.flash_attn_type = llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = ggml_type.GGML_TYPE_F32
    if "draft" in asked:
        draft = params.speculative.draft
        draft.mparams.path, draft.n_max = asked["draft"], asked["draft_tokens"]
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = 1
        draft.cache_type_k = draft.cache_type_v = ggml_type.GGML_TYPE_F32
        name = "COMMON_SPECULATIVE_TYPE_" + asked["algorithm"].replace("-", "_").upper()
        params.speculative.types = [common_speculative_type.__members__[name]]
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


main()
