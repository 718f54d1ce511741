"""Drive SGLang's internal classes, as few as possible: load a model, run an extend, capture states.

Differences between versions are in one small file per version. SGLang is imported when an engine is
opened.
"""

import importlib
import importlib.metadata
import inspect
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from fledge.core.errors import BadInput, MissingPackage
from fledge.core.head import TargetHead
from fledge.core.install import install_extra
from fledge.target.layers import text_config

# SGLang's internal classes change with almost every release: only tested versions are listed.
VERSIONS = {"0.5.9": "fledge.target.sglang.v0_5_9", "0.5.23": "fledge.target.sglang.v0_5_23"}


def installed_version() -> str:
    """The installed SGLang's version; raises unless it is a supported one."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingPackage(
            "SGLang is not installed in this environment",
            where="target.backend=sglang",
            fix=f"{install_extra('sglang')}, or use target.backend=hf",
        ) from error
    if version not in VERSIONS:
        raise BadInput(
            f"SGLang {version} is not supported by fledge",
            where="target.backend=sglang",
            fix=f"install one of {', '.join(VERSIONS)}",
        )
    return version


def engine_class(device: str) -> "type[SGLangEngine]":
    """The engine for the installed SGLang, which is imported here."""
    if device == "cpu":  # SGLang reads this when it is imported
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    module = importlib.import_module(VERSIONS[installed_version()])
    return cast(type[SGLangEngine], module.Engine)


@dataclass(frozen=True)
class Captured:
    """The result of one extend for its N tokens, row after row."""

    hidden_ND: Tensor  # the head's input
    aux_KND: list[Tensor]  # the captured layers' outputs, in layer order
    logits_NV: Tensor | None  # only if requested


@dataclass(frozen=True)
class Limits:
    """Limits of one extend."""

    context_length: int  # longest row the model is configured for, in tokens
    rows: int
    tokens: int  # size of the KV pool
    page_size: int  # a row takes whole pages of the pool


class Tap:
    """Replaces the forward of a model's `LogitsProcessor`, which receives all the states we need.

    SGLang's own keeps the last position of each request. This one keeps every position, and calls
    the original only for its matrix product (with its scale and cap, if any).
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.lm_head: Any = None  # the head's module, known after the first forward
        self._logits = False
        self._captured: Captured | None = None
        processor.forward = self._answer

    def open(self, *, logits: bool) -> None:
        self._logits, self._captured = logits, None

    def take(self) -> Captured | None:
        captured, self._captured = self._captured, None
        return captured

    def _answer(
        self,
        input_ids: Any,
        hidden_states: Tensor,
        lm_head: Any,
        logits_metadata: Any,
        aux_hidden_states: Sequence[Tensor] | None = None,
        *_: Any,
        **__: Any,
    ) -> Any:
        from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessorOutput

        self.lm_head = lm_head
        logits_NV = None
        if self._logits:
            metadata = LogitsMetadata.from_forward_batch(logits_metadata)
            logits_NV = self.processor._get_logits(hidden_states, lm_head, metadata)
            logits_NV = logits_NV[:, : self.processor.vocab_size]
        self._captured = Captured(hidden_states, list(aux_hidden_states or ()), logits_NV)
        return LogitsProcessorOutput(next_token_logits=None)


class NoPrefixCache(SimpleNamespace):
    """The part of a prefix cache's interface that allocation uses: nothing is shared or evicted."""

    def supports_swa(self) -> bool:
        return False

    def supports_mamba(self) -> bool:
        return False


def new_request(index: int, tokens: Sequence[int]) -> Any:
    """A `Req` with these tokens as its prompt that generates one token."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(temperature=0, max_new_tokens=1)
    request = Req(
        rid=str(index), origin_input_text="", origin_input_ids=tokens, sampling_params=params
    )
    request.logprob_start_len = -1
    return request


class SGLangEngine(ABC):
    """One rank of a model in a `ModelRunner`, driven directly: no scheduler, sampling or server.

    SGLang keeps its configuration and process groups in globals, so a process can hold one engine
    at a time. With tensor parallelism every rank makes the same calls in the same order.
    """

    _in_use: ClassVar[bool] = False

    def __init__(self, options: dict[str, Any], *, rank: int, port: int) -> None:
        if SGLangEngine._in_use:
            raise BadInput(
                "this process holds an SGLang target already",
                fix="close it first, or run the second one elsewhere (fledge serve-target)",
            )
        if torch.distributed.is_initialized():
            raise BadInput(
                "SGLang cannot start inside a process group of torch.distributed (several ranks?)",
                fix="run it in another process: fledge serve-target --engine sglang",
            )
        logging.getLogger("sglang").setLevel(str(options["log_level"]).upper())
        SGLangEngine._in_use, self._closed = True, False
        try:
            self._runner = self._start(options, rank=rank, port=port)
            self._taps = [Tap(processor) for processor in self._logits_processors()]
        except BaseException:
            self.close()
            raise

    prefix_cache: ClassVar[type[NoPrefixCache]]

    @staticmethod
    def option_names() -> list[str]:
        """Arguments that this version's `ServerArgs` accepts."""
        from sglang.srt.server_args import ServerArgs

        return list(inspect.signature(ServerArgs).parameters)

    @abstractmethod
    def _start(self, options: dict[str, Any], *, rank: int, port: int) -> Any:
        """Set up process groups, weights and memory pools; returns a `ModelRunner` ready to run."""

    @abstractmethod
    def _request(self, index: int, row: list[int]) -> Any:
        """A row as a `Req` whose extend covers all of its tokens."""

    def _schedule(self, rows: Sequence[list[int]]) -> Any:
        """Whole rows as one extend, one request per row: a `ScheduleBatch`."""
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        runner = self._runner
        batch = ScheduleBatch.init_new(
            reqs=[self._request(index, row) for index, row in enumerate(rows)],
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            tree_cache=self.prefix_cache(
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

    @abstractmethod
    def _forward_batch(self, batch: Any) -> Any:
        """The model's input for a `ScheduleBatch`."""

    @abstractmethod
    def _reset_globals(self) -> None:
        """Destroy the process groups that `_start` created, and reset other globals that would
        break the next engine."""

    @property
    def model(self) -> nn.Module:
        return cast(nn.Module, self._runner.model)

    def limits(self) -> Limits:
        """The limits of one extend; to be called between extends, when all memory is free."""
        return Limits(
            context_length=int(self._runner.model_config.context_len),
            rows=int(self._runner.req_to_token_pool.available_size()),
            tokens=int(self._runner.token_to_kv_pool_allocator.available_size()),
            page_size=int(self._runner.page_size),
        )

    def capture_layers(self, layer_ids: list[int]) -> None:
        """From now on, capture the outputs of these layers (ascending)."""
        capture = getattr(self.model, "set_eagle3_layers_to_capture", None)
        if not callable(capture):
            raise BadInput(
                f"SGLang {installed_version()} cannot show the inner layers of "
                f"{type(self.model).__name__}",
                fix="use target.backend=hf",
            )
        capture(layer_ids)

    @torch.no_grad()
    def extend(self, rows: Sequence[list[int]], logits: bool) -> Captured:
        """Run whole rows once, in one batch and without padding, and free their memory. With
        `logits` the head runs on every position; without, it never runs."""
        for tap in self._taps:
            tap.open(logits=logits)
        try:
            self._runner.forward(self._forward_batch(self._schedule(rows)))
        finally:
            self._runner.req_to_token_pool.clear()
            self._runner.token_to_kv_pool_allocator.clear()
            taken = [tap.take() for tap in self._taps]
        answers = [captured for captured in taken if captured is not None]
        assert len(answers) == 1, f"the forward reached {len(answers)} logits processors"
        return answers[0]

    @torch.no_grad()
    def input_embedding(self) -> Tensor:
        """The input embedding [V, D], whole on every rank."""
        from sglang.srt.layers import vocab_parallel_embedding as layers

        for name, module in self.model.named_modules():
            if isinstance(module, layers.ParallelLMHead):
                continue
            if isinstance(module, layers.VocabParallelEmbedding):
                return self._whole(module.weight)
            if isinstance(module, nn.Embedding) and name.endswith("embed_tokens"):
                return module.weight.detach()  # not split over the ranks (Gemma 3)
        raise BadInput(f"{type(self.model).__name__} has no input embedding that could be found")

    @torch.no_grad()
    def head(self) -> TargetHead:
        """The output head, whole on every rank; known after the first extend."""
        tap = next(tap for tap in self._taps if tap.lm_head is not None)
        scale, softcap = tap.processor.logit_scale, tap.processor.final_logit_softcapping
        return TargetHead(
            weight_VD=self._whole(tap.lm_head.weight),
            scale=1.0 if scale is None else float(scale),
            softcap=None if softcap is None else float(softcap),
        )

    def close(self) -> None:
        """Free weights and pools and destroy the process groups. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self.__dict__.pop("_taps", None)
        self.__dict__.pop("_runner", None)
        self._reset_globals()
        SGLangEngine._in_use = False
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _whole(self, part_VD: Tensor) -> Tensor:
        """A matrix with one row per token, gathered from all ranks, without the padding rows."""
        from sglang.srt.distributed import tensor_model_parallel_all_gather

        whole_VD: Tensor = tensor_model_parallel_all_gather(part_VD.detach(), dim=0)
        return whole_VD[: text_config(self.model.config).vocab_size]

    def _logits_processors(self) -> list[Any]:
        from sglang.srt.layers.logits_processor import LogitsProcessor

        return [module for module in self.model.modules() if isinstance(module, LogitsProcessor)]
