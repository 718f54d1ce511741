"""The same prompts decoded in several ways: with drafts, by the target alone, by transformers.

Every way continues every prompt greedily, in batches of the same rows, twice. The second time
counts: by then kernels are compiled and passes recorded. The clock runs over whole calls, the pass
over the prompts included, since that is what a caller of either library waits for. Ways alternate
batch by batch, so that a machine that slows down slows all of them down.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fledge.decode.speculative import SpeculativeDecoder
from fledge.decode.stops import Stops
from fledge.decode.strategy import fitting
from fledge.methods.shared.draft import DraftModel
from fledge.target.hf.model import HFEagle3TargetModel

PLAIN = "plain"  # fledge without a draft: what speed-ups and texts are compared with
GENERATE = "transformers generate"

TokenLists = list[list[int]]


@dataclass(frozen=True)
class Call:
    """What one call returned."""

    texts: TokenLists  # new tokens only
    passes: int  # of the target, after the one over the prompts
    rounds: int  # the same counted text by text: a pass over a batch is a round of every text


class Way(Protocol):
    """One way to continue prompts."""

    max_batch: int | None  # None: any

    def decode(self, prompts: TokenLists) -> Call: ...


@dataclass
class FledgeWay:
    """Our decoder, with a draft or without one."""

    decoder: SpeculativeDecoder
    stops: Stops
    max_batch: int | None = None

    def decode(self, prompts: TokenLists) -> Call:
        texts = self.decoder.generate(prompts, self.stops)
        # without a draft, every token after the first is a round
        rounds = sum(len(text.rounds) or len(text.token_ids) - 1 for text in texts)
        return Call([text.token_ids for text in texts], self.decoder.timing.rounds, rounds)


@dataclass
class TransformersWay:
    """`model.generate`, with whatever `options` turn on: an assistant, prompt lookup."""

    model: Any
    stops: Stops
    pad_id: int
    options: Mapping[str, Any] = field(default_factory=dict)
    max_batch: int | None = None

    def decode(self, prompts: TokenLists) -> Call:
        width = max(map(len, prompts))
        padding = [width - len(prompt) for prompt in prompts]  # on the left, as generate wants it
        ids_BT = torch.tensor(
            [[self.pad_id] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]
        )
        real_BT = torch.arange(width) >= torch.tensor(padding)[:, None]
        passes = 0

        def count(*_: Any) -> None:
            nonlocal passes
            passes += 1

        hook = self.model.register_forward_pre_hook(count)
        try:
            out_BT = self.model.generate(
                ids_BT.to(self.model.device), attention_mask=real_BT.long().to(self.model.device),
                do_sample=False, max_new_tokens=self.stops.max_new_tokens,
                eos_token_id=sorted(self.stops.eos_token_ids) or None, pad_token_id=self.pad_id,
                **self.options,
            )  # fmt: skip
        finally:
            hook.remove()
        new = [row[width:] for row in out_BT.tolist()]
        texts = [row[: self.stops.cut(row, 0)[0]] for row in new]
        alone = len(texts) == 1
        rounds = passes - 1 if alone else sum(len(text) - 1 for text in texts)
        return Call(texts, passes - 1, rounds)


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
        ways[f"{label}, {decoder.method}"] = FledgeWay(decoder, stops)
    return ways


def draftless_ways(
    model: Any, stops: Stops, *, pad_id: int, num_draft_tokens: int, assistant: Any = None
) -> dict[str, Way]:
    """The target alone, here and in transformers, and what transformers speculates with."""

    def transformers_way(max_batch: int | None = None, **options: Any) -> Way:
        return TransformersWay(model, stops, pad_id, options, max_batch)

    ways: dict[str, Way] = {
        PLAIN: FledgeWay(SpeculativeDecoder(model), stops),
        GENERATE: transformers_way(),
        # both take one text at a time
        "transformers prompt lookup": transformers_way(
            1, prompt_lookup_num_tokens=num_draft_tokens
        ),
    }
    if assistant is not None:
        assistant.generation_config.num_assistant_tokens = num_draft_tokens
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        ways["transformers assisted"] = transformers_way(1, assistant_model=assistant)
    return ways


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
        plain, generate = others.get(PLAIN), others.get(GENERATE)
        later = self.tokens - len(self.texts)  # first tokens come from the passes over prompts
        pairs = zip(self.texts, plain.texts if plain else [], strict=False)
        return {
            "way": self.way,
            "batch": self.batch,
            "texts": len(self.texts),
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "passes_per_s": self.passes / self.seconds,
            "tokens_per_round": later / self.rounds if self.rounds else None,
            "against_plain": plain and self.tokens_per_s / plain.tokens_per_s,
            "against_transformers": generate and self.tokens_per_s / generate.tokens_per_s,
            "texts_as_plain": sum(ours == theirs for ours, theirs in pairs) if plain else None,
        }


def taking(ways: Mapping[str, Way], batch: int) -> dict[str, Way]:
    """Those of the ways that take batches of this size."""
    return {name: way for name, way in ways.items() if (way.max_batch or batch) >= batch}


def decode_all(
    ways: Mapping[str, Way],
    prompts: Sequence[Sequence[int]],
    *,
    batch: int,
    device: torch.device,
    on_batch: Callable[[str], None] = lambda way: None,
) -> dict[str, Decoded]:
    """Decode all prompts in every way; see `taking` for those that take batches of this size."""
    results = {name: Decoded(name, batch) for name in ways}
    for rows in _batches(prompts, batch):
        for name, way in ways.items():
            way.decode(rows)
            begin = _now(device)
            call, result = way.decode(rows), results[name]
            result.seconds += _now(device) - begin
            result.texts += call.texts
            result.passes += call.passes
            result.rounds += call.rounds
            on_batch(name)
    return results


def _batches(prompts: Sequence[Sequence[int]], batch: int) -> Iterator[TokenLists]:
    """Batches of prompts of similar length; the last one may be smaller."""
    ordered = sorted(prompts, key=len)
    for begin in range(0, len(ordered), batch):
        yield [list(prompt) for prompt in ordered[begin : begin + batch]]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
