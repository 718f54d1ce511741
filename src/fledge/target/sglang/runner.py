"""The target inside SGLang: the draft learns from the very numbers that SGLang will serve.

Rows and documents of any lengths run in one extend, each as a separate request, without padding and
without a scheduler. SGLang itself is imported by `SGLangTargetRunner.build`.
"""

import contextlib
import multiprocessing
import secrets
import signal
import socket
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from os import PathLike
from typing import Any, cast

import torch
from torch import Tensor, nn

from fledge.core.errors import BadInput, first_line, nearest
from fledge.core.head import TargetHead
from fledge.target.cache.format import DTYPES
from fledge.target.layers import FinalNorm, describe_final_norm, target_depth
from fledge.target.packing import Documents, Group
from fledge.target.runner import EngineEagle3TargetModel
from fledge.target.sglang.engine import (
    Captured,
    Limits,
    SGLangEngine,
    engine_class,
    installed_version,
)

_PORTS = range(20_000, 32_000)


class SGLangRanks:
    """The engine of rank 0 in this process and, with tensor parallelism, a process for each other.

    Ranks run collectives, so all must make the same calls: a call is sent to the others through
    pipes and then made here; only this rank's result is kept."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._peers: list[tuple[Connection, BaseProcess]] = []
        port = free_port()
        processes = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        for rank in range(1, int(options["tp_size"])):
            own_end, peer_end = processes.Pipe()
            # a daemon: it must not outlive rank 0, for whose calls it waits
            arguments = (peer_end, options, rank, port)
            peer: BaseProcess = processes.Process(target=_run_peer, args=arguments, daemon=True)
            peer.start()
            peer_end.close()
            self._peers.append((own_end, peer))
        try:
            engine = engine_class(options["device"])
            self.engine: SGLangEngine = engine(options, rank=0, port=port)
        except BaseException:
            for _, peer in self._peers:
                peer.terminate()
            raise

    def call(self, method: str, *args: Any) -> Any:
        """Make a call on every rank at once; returns this rank's result."""
        for rank, (pipe, peer) in enumerate(self._peers, 1):
            if not peer.is_alive():  # a collective would wait for it forever
                raise RuntimeError(
                    f"rank {rank} of the SGLang target ended with code {peer.exitcode}: "
                    "its own message is above"
                )
            pipe.send((method, args))
        return getattr(self.engine, method)(*args)

    def close(self) -> None:
        """Close every rank. A second call does nothing."""
        for pipe, _ in self._peers:
            pipe.close()  # the peers get EOF, and end
        self.engine.close()
        for _, peer in self._peers:
            peer.join(timeout=30)
            peer.terminate()
        self._peers = []


def _run_peer(pipe: Connection, options: dict[str, Any], rank: int, port: int) -> None:
    """Run another rank: repeat rank 0's calls until its pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all ranks; rank 0 handles it
    engine = engine_class(options["device"])(options, rank=rank, port=port)
    with contextlib.suppress(EOFError):
        while True:
            method, args = pipe.recv()
            getattr(engine, method)(*args)
    engine.close()


def free_port() -> int:
    """A port below those that systems hand out themselves: between this call and its use, another
    process would have to ask for this very one."""
    while True:
        port = secrets.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


# Capture depends on these; any other value is rejected. SGLang's public capture (the last two)
# returns aux states *in place of* the last hidden state, and drafts learn from both.
_FIXED: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enable_return_hidden_states": True,
    "disable_cuda_graph": True,
    "disable_radix_cache": True,
    "disable_overlap_schedule": True,
    "speculative_algorithm": None,
    "pp_size": 1,
    "dp_size": 1,
    "enable_return_aux_hidden_states": False,
    "return_aux_hidden_state_layer_ids": None,
}
# SGLang would fill the whole GPU with its KV pool; a target needs memory for one batch only, and a
# larger batch is run in parts.
_DEFAULTS: dict[str, Any] = {"max_total_tokens": 65536, "tp_size": 1, "log_level": "error"}
_ON_CPU: dict[str, Any] = {
    "max_total_tokens": 8192,
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
}


def server_options(asked: dict[str, Any], names: Sequence[str], *, device: str) -> dict[str, Any]:
    """Arguments for `ServerArgs`: our defaults, the user's, and those that capture needs."""
    for name, value in asked.items():
        if name not in names:
            raise BadInput(
                f"SGLang {installed_version()} has no argument '{name}'",
                where="engine_args",
                fix=nearest(name, list(names)),
            )
        if name in _FIXED and value != _FIXED[name]:
            raise BadInput(
                f"{name}={value!r} does not go with hidden-state capture",
                where="engine_args",
                fix=f"leave it out (it is {_FIXED[name]!r})",
            )
    kind, _, index = device.partition(":")
    return {
        **_DEFAULTS,
        **(_ON_CPU if kind == "cpu" else {}),
        **({"base_gpu_id": int(index)} if index else {}),
        **asked,
        # what must be off is unknown to some versions
        **{name: value for name, value in _FIXED.items() if value or name in names},
        "device": kind,
    }


def sglang_dtype(dtype: torch.dtype | str | None) -> str:
    """The name of a dtype that SGLang expects: it compares strings, and would ignore a
    `torch.dtype`."""
    name = "auto" if dtype is None else str(dtype).removeprefix("torch.")
    if name not in ("auto", *DTYPES):
        raise BadInput(
            f"SGLang cannot run in {dtype}",
            where="dtype",
            fix=f"one of auto, {', '.join(DTYPES)} (fp8: engine argument quantization)",
        )
    return name


# Raised by SGLang for a model or an argument that it does not support.
_ENGINE_ERRORS = (
    *(OSError, ValueError, RuntimeError, ImportError),
    *(AssertionError, AttributeError, TypeError, KeyError),
)


class SGLangTargetRunner:
    """A standalone SGLang `ModelRunner` that returns EAGLE-3 supervision; see `HiddenTargetRunner`.
    A process can hold one at a time: SGLang's configuration and process groups are global. Created
    by `build`."""

    def __init__(self, ranks: SGLangRanks) -> None:
        self._ranks: SGLangRanks | None = ranks
        self._limits: Limits = ranks.engine.limits()
        self._aux_layer_ids: list[int] | None = None
        self._head: TargetHead | None = None

    @classmethod
    def build(
        cls,
        model_path: str | PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        trust_remote_code: bool = False,
        **sglang_kwargs: Any,
    ) -> "SGLangTargetRunner":
        """Load a model into SGLang by any name that `fledge.local_model` accepts.

        `sglang_kwargs` are passed to `ServerArgs` under their own names (`page_size`, `tp_size`,
        `mem_fraction_static`, `attention_backend`, `quantization`, `context_length`, ...).
        `max_total_tokens` (default 65,536, on a CPU 8,192) limits how many tokens run at once, and
        is the size of the KV pool.
        """
        from fledge.models.resolve import local_model

        version = installed_version()
        gpu = torch.cuda.is_available()
        device = str(sglang_kwargs.get("device") or ("cuda" if gpu else "cpu"))
        options = server_options(sglang_kwargs, engine_class(device).option_names(), device=device)
        options |= {
            "model_path": str(local_model(str(model_path))),
            "dtype": sglang_dtype(dtype),
            "trust_remote_code": trust_remote_code,
        }
        random_state = torch.get_rng_state()
        try:
            return cls(SGLangRanks(options))
        except BadInput:
            raise
        except _ENGINE_ERRORS as error:
            reason = first_line(error)[:200]
            raise BadInput(
                f"SGLang {version} could not load the target ({reason})",
                where=str(model_path),
                fix="check the files and the engine's arguments; target.backend=hf runs any model",
            ) from error
        finally:
            # some models draw random numbers, which must not change the draft's initialization
            torch.set_rng_state(random_state)

    @property
    def model(self) -> nn.Module:
        """SGLang's own module (of rank 0): exposes `.config` and `.parameters()`."""
        return self._open().engine.model

    def set_aux_layers(self, aux_layer_ids: list[int]) -> None:
        last = target_depth(self.model.config) - 1
        if last in aux_layer_ids:
            raise BadInput(
                f"SGLang shows a layer's output where the next layer begins, and layer {last} is "
                "the last",
                where="aux_layer_ids",
                fix=f"choose layers 0 .. {last - 1}, or target.backend=hf",
            )
        self._open().call("capture_layers", sorted(aux_layer_ids))
        self._aux_layer_ids = list(aux_layer_ids)

    def forward_eagle3(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, T, V] and aux states [B, T, A * D] of every position, unshifted.

        Padding (mask 0) is not run and stays 0. In a row, tokens with different numbers in the mask
        belong to different documents and never attend to each other: 1 1 1 2 2 0 holds two.
        """
        return self._run(input_ids, attention_mask, logits=True)

    def forward_eagle3_hidden(
        self, input_ids: Tensor, attention_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `forward_eagle3`, with last hidden states [B, T, D] in place of logits; the head never
        runs."""
        return self._run(input_ids, attention_mask, logits=False)

    def input_embedding_weight(self) -> Tensor:
        return cast(Tensor, self._open().call("input_embedding"))

    def target_head(self) -> TargetHead:
        """The frozen output head, checked once against the logits that SGLang itself computes."""
        if self._head is None:
            captured: Captured = self._open().call("extend", [[0, 1, 2, 3]], True)
            head: TargetHead = self._open().call("head")
            assert captured.logits_NV is not None
            head_NV, engine_NV = head.logits(captured.hidden_ND).float(), captured.logits_NV.float()
            if not torch.allclose(head_NV, engine_NV, rtol=2e-2, atol=1e-3):
                raise BadInput(
                    f"the head of {type(self.model).__name__} does more in SGLang than a matrix "
                    "product, scale and soft cap",
                    fix="use supervision 'logits'",
                )
            self._head = head
        return self._head

    def final_norm(self) -> FinalNorm | None:
        return describe_final_norm(self.model)

    def close(self) -> None:
        """Release weights, memory pools and process groups. A second call does nothing."""
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = self._head = None

    def _open(self) -> SGLangRanks:
        if self._ranks is None:
            raise RuntimeError("this SGLangTargetRunner is closed: build a new one")
        return self._ranks

    def _run(self, ids_BT: Tensor, mask_BT: Tensor, *, logits: bool) -> tuple[Tensor, Tensor]:
        documents = find_rows(mask_BT)
        tokens = ids_BT.flatten().tolist()
        rows = [tokens[begin:end] for begin, end in documents]
        batch: tuple[Tensor, Tensor] | None = None
        for first, last in cut_into_extends([len(row) for row in rows], self._limits):
            captured: Captured = self._open().call("extend", rows[first:last], logits)
            answer_NX = captured.logits_NV if logits else captured.hidden_ND
            assert answer_NX is not None
            aux_NX = torch.cat(self._reorder(captured.aux_KND), dim=-1)
            if batch is None:
                answer_BTX = answer_NX.new_zeros((*ids_BT.shape, answer_NX.shape[-1]))
                aux_BTX = aux_NX.new_zeros((*ids_BT.shape, aux_NX.shape[-1]))
                batch = answer_BTX, aux_BTX
            slots_N = torch.cat([torch.arange(*span) for span in documents[first:last]])
            slots_N = slots_N.to(answer_NX.device)
            for whole_BTX, part_NX in zip(batch, (answer_NX, aux_NX), strict=True):
                whole_BTX.flatten(0, 1)[slots_N] = part_NX
        if batch is None:
            raise ValueError("attention_mask marks no token at all")
        return batch

    def _reorder(self, aux_KND: list[Tensor]) -> list[Tensor]:
        """The states in the order of `set_aux_layers`: SGLang returns layers in ascending order,
        and drops those it does not support."""
        ids = self._aux_layer_ids
        assert ids is not None, "set_aux_layers comes first"
        if len(aux_KND) != len(ids):
            raise RuntimeError(
                f"SGLang returned the states of {len(aux_KND)} layers and not of {ids}"
            )
        return [aux_KND[sorted(ids).index(i)] for i in ids]


class SGLangEagle3TargetModel(EngineEagle3TargetModel):
    """A target that SGLang runs in this process; `fledge serve-target` runs it in another one."""

    runner_type = SGLangTargetRunner

    def _groups(self, documents: Documents, ids_BT: Tensor) -> Sequence[Group]:
        """All documents concatenated in one row: SGLang needs no padding to keep them apart."""
        if not documents.lengths:
            return []
        lengths = torch.tensor(documents.lengths)
        spans = zip(documents.starts, documents.lengths, strict=True)
        slots_N = torch.cat([torch.arange(begin, begin + length) for begin, length in spans])
        slots_N = slots_N.to(ids_BT.device)
        numbers_N = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), lengths)
        cells_N = torch.arange(len(slots_N), device=ids_BT.device)
        return [Group(slots_N[None], numbers_N[None], cells=cells_N, slots=slots_N)]


def find_rows(mask_BT: Tensor) -> list[tuple[int, int]]:
    """The documents as slots [begin, end) of the flattened batch: runs of one number in a row's
    mask.

    >>> find_rows(torch.tensor([[1, 1, 0], [1, 2, 2]]))
    [(0, 2), (3, 4), (4, 6)]
    """
    numbers_BT = mask_BT.detach().cpu().long()
    edges_BT = torch.ones_like(numbers_BT, dtype=torch.bool)
    edges_BT[:, 1:] = numbers_BT[:, 1:] != numbers_BT[:, :-1]
    begins = edges_BT.flatten().nonzero()[:, 0].tolist()
    flat = numbers_BT.flatten().tolist()
    ends = [*begins[1:], len(flat)]
    return [(begin, end) for begin, end in zip(begins, ends, strict=True) if flat[begin] != 0]


def cut_into_extends(lengths: Sequence[int], limits: Limits) -> Iterator[tuple[int, int]]:
    """Split rows into as few extends as the engine's memory allows: (first, last + 1) of each."""
    first = taken = 0
    for index, length in enumerate(lengths):
        needed = -(-length // limits.page_size) * limits.page_size
        if length > limits.context_length or needed > limits.tokens:
            raise BadInput(
                f"a row of {length} tokens does not fit: SGLang was built for rows of "
                f"{limits.context_length} and {limits.tokens} tokens at once",
                fix="shorten data.max_length, or give context_length / max_total_tokens",
            )
        if taken + needed > limits.tokens or index - first == limits.rows:
            yield first, index
            first, taken = index, 0
        taken += needed
    if lengths:
        yield first, len(lengths)
