"""The same prompts decoded in several ways: with drafts, by the target alone, by transformers.

Every way continues every prompt greedily, in batches of the same rows, twice. The second time
counts: by then kernels are compiled and passes recorded. The clock runs over whole calls, the pass
over the prompts included, since that is what a caller of either library waits for. Ways alternate
batch by batch, so that a machine that slows down slows all of them down.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fledge.core.progress import Progress, unwatched
from fledge.decode.llamacpp import LlamaServer
from fledge.decode.speculative import SpeculativeDecoder
from fledge.decode.stops import Stops
from fledge.decode.strategy import fitting
from fledge.methods.shared.draft import DraftModel
from fledge.target.hf.model import HFEagle3TargetModel

PLAIN = "plain"  # fledge without a draft: what speed-ups and texts are compared with
GENERATE = "transformers generate"
LLAMA_CPP = "llama.cpp"  # without a draft: what its ways with one are compared with

TokenLists = list[list[int]]


class Call(NamedTuple):
    """What one call returned."""

    texts: TokenLists  # new tokens only
    passes: int  # of the target, after the one over the prompts
    rounds: int  # the same counted text by text: a pass over a batch is a round of every text


Way = Callable[[TokenLists], Call]


def fledge_way(decoder: SpeculativeDecoder, stops: Stops) -> Way:
    """Our decoder, with a draft or without one."""

    def decode(prompts: TokenLists) -> Call:
        texts = decoder.generate(prompts, stops)
        # without a draft, every token after the first is a round
        rounds = sum(len(text.rounds) or len(text.token_ids) - 1 for text in texts)
        return Call([text.token_ids for text in texts], decoder.timing.rounds, rounds)

    return decode


def llama_cpp_way(server: LlamaServer, stops: Stops) -> Way:
    """llama.cpp, one text after another."""

    def decode(prompts: TokenLists) -> Call:
        answers = [server.complete(prompt, stops.max_new_tokens) for prompt in prompts]
        rounds = sum(answer.rounds for answer in answers)
        return Call([answer.token_ids for answer in answers], rounds, rounds)

    return decode


def transformers_way(model: Any, stops: Stops, pad_id: int) -> Way:
    """`model.generate`."""

    def decode(prompts: TokenLists) -> Call:
        width = max(map(len, prompts))
        padding = [width - len(prompt) for prompt in prompts]  # on the left, as generate wants it
        ids_BT = torch.tensor(
            [[pad_id] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]
        )
        real_BT = torch.arange(width) >= torch.tensor(padding)[:, None]
        passes: list[None] = []
        hook = model.register_forward_pre_hook(lambda *_: passes.append(None))
        try:
            out_BT = model.generate(
                ids_BT.to(model.device), attention_mask=real_BT.long().to(model.device),
                do_sample=False, max_new_tokens=stops.max_new_tokens,
                eos_token_id=sorted(stops.eos_token_ids) or None, pad_token_id=pad_id,
            )  # fmt: skip
        finally:
            hook.remove()
        new = [row[width:] for row in out_BT.tolist()]
        texts = [row[: stops.cut(row, 0)[0]] for row in new]
        return Call(texts, len(passes) - 1, sum(len(text) - 1 for text in texts))

    return decode


def draft_ways(
    target: HFEagle3TargetModel,
    label: str,
    draft: DraftModel,
    stops: Stops,
    *,
    num_draft_tokens: int,
    methods: Sequence[str] = (),
) -> dict[str, Way]:
    """A draft with each of the strategies in `methods` that it has; without any of them, with the
    one that it was trained for."""
    ways: dict[str, Way] = {}
    strategies = fitting(draft)
    for method in [name for name in strategies if name in methods] or strategies[:1]:
        decoder = SpeculativeDecoder(
            target.model, draft, aux_layer_ids=target.aux_layer_ids, method=method,
            num_draft_tokens=num_draft_tokens,
        )  # fmt: skip
        ways[f"{label}, {decoder.method}"] = fledge_way(decoder, stops)
    return ways


def draftless_ways(model: Any, stops: Stops, *, pad_id: int) -> dict[str, Way]:
    """The target alone, here and in transformers."""
    plain = fledge_way(SpeculativeDecoder(model), stops)
    return {PLAIN: plain, GENERATE: transformers_way(model, stops, pad_id)}


@dataclass
class Decoded:
    """All prompts, decoded one way in batches of one size."""

    way: str
    batch: int
    texts: TokenLists = field(default_factory=list)
    passes: int = 0
    rounds: int = 0
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def to_json(self, others: "Mapping[str, Decoded]") -> dict[str, Any]:
        """`others`: all ways at this batch size, by name."""
        plain, generate = others[PLAIN], others[GENERATE]
        if self.way.startswith(LLAMA_CPP):
            plain = others[LLAMA_CPP]
        later = self.tokens - len(self.texts)  # first tokens come from the passes over prompts
        pairs = zip(self.texts, plain.texts, strict=True)
        return {
            "way": self.way,
            "batch": self.batch,
            "texts": len(self.texts),
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "passes_per_s": self.passes / self.seconds,
            "tokens_per_round": later / self.rounds if self.rounds else None,
            "against_plain": self.tokens_per_s / plain.tokens_per_s,
            "against_transformers": self.tokens_per_s / generate.tokens_per_s,
            "texts_as_plain": sum(ours == theirs for ours, theirs in pairs),
        }


def decode_all(
    ways: Mapping[str, Way],
    prompts: Sequence[Sequence[int]],
    *,
    batch: int,
    device: torch.device,
    progress: Progress = unwatched,
) -> dict[str, Decoded]:
    """Decode all prompts in every way, in batches of similar length; the last may be smaller."""
    results = {name: Decoded(name, batch) for name in ways}
    ordered = [list(prompt) for prompt in sorted(prompts, key=len)]
    done, total = 0, -(-len(ordered) // batch) * len(ways)
    for first in range(0, len(ordered), batch):
        rows = ordered[first : first + batch]
        for name, way in ways.items():
            way(rows)
            begin = _now(device)
            call, result = way(rows), results[name]
            result.seconds += _now(device) - begin
            result.texts += call.texts
            result.passes += call.passes
            result.rounds += call.rounds
            done += 1
            progress(f"batch {batch}", done, total, "batches", name)
    return results


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
