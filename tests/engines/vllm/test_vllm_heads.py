"""DFlash 2 and LiLiCorr exports in vLLM's own classes: the loader takes our files, and candidates,
scores and the greedy walk are ours. The runner that walks needs a GPU. XPress needs vLLM 0.33."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engines.block_case import SLOTS, BlockCase
from engines.vllm.dspark_model import loaded_block, walk_block
from fledge.decode.accept import Chooser
from fledge.decode.strategy import DraftShape, RoundState, Slots, choose, send_rows

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("norms_by_layer")]
_COMMON = {
    "block_size": SLOTS, "mask_token_id": 2, "num_hidden_layers": 2, "candidates": 8,
    "conv_kernel_size": 2, "conv_group_size": 16,
}  # fmt: skip
HEADS: dict[str, dict[str, Any]] = {
    "DFlash2Qwen3ForCausalLM": {**_COMMON, "candidate_head": "selector", "selector_rank": 8},
    "LiLiCorrForCausalLM": {
        **_COMMON, "candidate_head": "lilicorr", "lilicorr_hidden_size": 32,
        "lilicorr_factor_dim": 16,
    },
}  # fmt: skip


class Case(BlockCase):
    @torch.inference_mode()
    def ours(self) -> dict[str, torch.Tensor]:
        known, strategy = len(self.aux_TD), choose(self.draft)(self.draft, DraftShape(SLOTS - 1))
        walk: Any = strategy
        aux_1TD = self.aux_TD[None]
        walk.start([self.text[:1]], aux_1TD)
        table = send_rows([(known, self.text[1:], range(known))], torch.device("cpu"), width=known)
        state = RoundState(*Slots.of(table), aux_1TD, walk.reserve(known))
        found, first, pairs = walk.lattice(state)
        scores = torch.cat([first[:, None, None].expand_as(pairs[:, :1]), pairs], dim=1)
        tokens = walk.propose(state, Chooser()).token_BN[0]
        return {"tokens": tokens, "ids": found.id_NKC[0], "scores": scores[0]}


@pytest.mark.parametrize("name", HEADS)
def test_vllm_computes_our_scores(name: str, engines: Any, tmp_path: Path) -> None:
    engines.close()
    case = Case(tmp_path, SLOTS - 1, **HEADS[name])
    export = case.export("vllm")
    speculative = {
        "method": "dflash", "model": str(export), "num_speculative_tokens": SLOTS - 1,
    }  # fmt: skip
    with loaded_block(case.target, speculative, tmp_path / "init", kind="dflash") as model:
        assert type(model).__name__ == name
        theirs = walk_block(model, case.aux_TD, case.text[-1], SLOTS)
    ours = case.ours()
    assert torch.equal(ours["ids"], theirs["ids"])
    torch.testing.assert_close(theirs["scores"], ours["scores"], rtol=0, atol=1e-4)
    assert torch.equal(ours["tokens"], theirs["tokens"])
    assert ours["scores"].std() > 0.1
