"""A draft inside SGLang's own draft-model class, loaded by SGLang's own loader.

SGLang's speculative workers need kernels that no CPU has (tree building and verification), so the
part of them that a checkpoint can get wrong is driven here directly: the class that the config
names, the loader, and the calls that a worker makes of it, which are one extend with the target's
aux states and then one decode step per further token, fed with the draft's own last state.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fledge.target.sglang.engine import Captured, SGLangEngine, engine_class
from fledge.target.sglang.runner import free_port, server_options


def open_engine(directory: Path, **options: Any) -> SGLangEngine:
    engine = engine_class("cpu")
    engine_options = {"max_total_tokens": 4096, **options}
    settings = server_options(engine_options, engine.option_names(), device="cpu")
    settings |= {"model_path": str(directory), "dtype": "float32"}
    return engine(settings, rank=0, port=free_port())


def layers_that_sglang_reads(draft_directory: Path) -> list[int] | None:
    """The target's layers that SGLang's ModelRunner takes from a draft's config."""
    config = json.loads((draft_directory / "config.json").read_text())
    ids: list[int] | None = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    return ids


def target_states(
    directory: Path, layer_ids: list[int] | None, rows: Sequence[list[int]]
) -> list[Tensor]:
    """Each row's aux states [T, 3D] as SGLang's target hands them to SGLang's draft."""
    engine = open_engine(directory)
    try:
        engine.model.set_eagle3_layers_to_capture(layer_ids)  # type: ignore[operator]
        captured = engine.extend(rows, True)
    finally:
        engine.close()
    aux_ND = torch.cat(captured.aux_KND, dim=-1)
    return list(aux_ND.split([len(row) for row in rows]))


@dataclass(frozen=True)
class Drafted:
    token_BK: Tensor  # target ids
    logits_BKW: Tensor


class SGLangDraft:
    """The draft of an export, run as an SGLang worker runs it."""

    def __init__(self, directory: Path, embedding_VD: Tensor) -> None:
        self.engine = open_engine(directory)
        with torch.no_grad():  # as `set_embed` does, which needs a GPU
            self.model.model.embed_tokens.weight[: len(embedding_VD)] = embedding_VD

    @property
    def model(self) -> Any:
        return self.engine.model

    @torch.no_grad()
    def propose(self, token_rows: list[list[int]], aux_rows: list[Tensor], count: int) -> Drafted:
        """Draft `count` tokens, one after another, from the end of each row.

        Row i reads tokens x[1] .. x[n] beside the aux states of x[0] .. x[n - 1].
        """
        tokens: list[Tensor] = []
        logits: list[Tensor] = []
        try:
            batch = self.engine._schedule(token_rows)
            captured = self._run(batch, torch.cat(aux_rows))
            last_B = torch.tensor([len(row) for row in token_rows]).cumsum(0) - 1
            for step in range(count):
                assert captured.logits_NV is not None
                logits.append(captured.logits_NV[last_B])
                tokens.append(self._target_ids(logits[-1].argmax(-1)))
                if step + 1 < count:
                    captured = self._decode(batch, tokens[-1], self._state(captured)[last_B])
                    last_B = torch.arange(len(token_rows))
        finally:
            self.engine._runner.req_to_token_pool.clear()
            self.engine._runner.token_to_kv_pool_allocator.clear()
        return Drafted(torch.stack(tokens, 1), torch.stack(logits, 1))

    def _state(self, captured: Captured) -> Tensor:
        """The state that a worker feeds into the next step."""
        return captured.aux_KND[0]

    def _target_ids(self, draft_id_B: Tensor) -> Tensor:
        hot = self.model.get_hot_token_id()
        return draft_id_B if hot is None else hot[draft_id_B]

    def _decode(self, batch: Any, token_B: Tensor, state_BD: Tensor) -> Captured:
        batch.output_ids = token_B  # read by 0.5.9
        batch.input_ids = token_B  # read by 0.5.23
        batch.prepare_for_decode()
        return self._run(batch, state_BD)

    def _run(self, batch: Any, hidden_ND: Tensor) -> Captured:
        forward_batch = self.engine._forward_batch(batch)
        forward_batch.spec_info = SimpleNamespace(hidden_states=hidden_ND)
        (tap,) = self.engine._taps
        tap.open(logits=True)
        self.engine._runner.forward(forward_batch)
        captured = tap.take()
        assert captured is not None
        return captured

    def close(self) -> None:
        self.engine.close()
