"""A draft served by a real vLLM in this process, with every token that its drafter proposes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

# Small and deterministic: one request at a time, fp32, nothing compiled, nothing shared.
_ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 1,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "skip_tokenizer_init": True,
    "disable_log_stats": False,
    "kv_cache_memory_bytes": 2**26,
}
_COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


@dataclass
class Served:
    """What came out, prompt by prompt, and what vLLM counted over all of them."""

    answers: list[list[int]] = field(default_factory=list)
    proposals: list[list[list[int]]] = field(default_factory=list)  # prompt, round, depth
    counted: dict[str, int] = field(default_factory=dict)
    accepted_by_depth: list[int] = field(default_factory=list)


def serve(prompts: Sequence[Sequence[int]], *, new_tokens: int, **engine_args: Any) -> Served:
    """Greedy answers of `new_tokens` tokens; `engine_args` name the models."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    served = Served()
    params = SamplingParams(
        temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
    )
    with _proposals() as seen:
        llm = LLM(**_ENGINE | engine_args)
        try:
            before = _counters(llm)
            for prompt in prompts:
                seen.clear()
                output = llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
                served.answers.append(list(output[0].outputs[0].token_ids))
                served.proposals.append([tokens[0].tolist() for tokens in seen])
            after = _counters(llm)
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            cleanup_dist_env_and_memory()
    # counters are per process: they still include those of earlier engines
    served.counted = {name: after[name] - before.get(name, 0) for name in _COUNTERS}
    by_depth, earlier = after["by_depth"], before.get("by_depth", [0] * len(after["by_depth"]))
    served.accepted_by_depth = [now - then for now, then in zip(by_depth, earlier, strict=True)]
    return served


@contextmanager
def _proposals() -> Iterator[list[Any]]:
    """While open, every proposal [batch, depth] of vLLM's drafter is appended to the list."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    seen: list[Any] = []
    propose = SpecDecodeBaseProposer.propose

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = propose(self, *args, **kwargs)
        seen.append(tokens.clone())
        return tokens

    SpecDecodeBaseProposer.propose = watched
    try:
        yield seen
    finally:
        SpecDecodeBaseProposer.propose = propose


def _counters(llm: Any) -> dict[str, Any]:
    by_name = {
        metric.name.removeprefix("vllm:spec_decode_"): metric for metric in llm.get_metrics()
    }
    values: dict[str, Any] = {name: by_name[name].value for name in _COUNTERS if name in by_name}
    if "num_accepted_tokens_per_pos" in by_name:
        values["by_depth"] = list(by_name["num_accepted_tokens_per_pos"].values)
    return values
