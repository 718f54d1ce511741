"""An EAGLE-1 export in SGLang's own draft class and loader: every parameter, every proposal."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang_draft import SGLangDraft
from test_sglang_export import (
    DEPTHS,
    VERSION,
    Exported,
    accepted,
    compare_with_files,
    deep_target,
    every_slot,
    greedy_texts,
    our_proposals,
)

from fledge.formats.export import export_draft
from fledge.formats.self_check import CheckOptions
from fledge.measure.replay import Text, replay
from fledge.methods.eagle1.draft import LlamaEagle1DraftModel
from fledge.methods.eagle1.objective import Eagle1TrainerModule
from fledge.methods.shared.config import derive_draft_config
from fledge.models.resolve import load_config
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.sglang.engine import Captured

__all__ = ["deep_target"]


class SGLangEagle1Draft(SGLangDraft):
    """With the target's embeddings and head, as SGLang's worker passes them on."""

    def __init__(self, directory: Path, draft: LlamaEagle1DraftModel) -> None:
        super().__init__(directory, draft.embed_tokens.weight)
        head_VE = draft.lm_head.weight
        with torch.no_grad():
            self.model.lm_head.weight[: len(head_VE)] = head_VE

    def _state(self, captured: Captured) -> torch.Tensor:
        return captured.hidden_ND

    def _target_ids(self, draft_id_B: torch.Tensor) -> torch.Tensor:
        return draft_id_B


@pytest.fixture(scope="module", params=[1] if VERSION == "0.5.9" else [1, 2])
def exported(request: Any, deep_target: Path, tmp_path_factory: Any) -> Exported:
    directory, texts = tmp_path_factory.mktemp("export"), greedy_texts(deep_target)
    draft = fitted_eagle1(deep_target, texts, layers=request.param)
    draft.save_pretrained(directory / "draft")
    out = export_draft(
        directory / "draft", directory / "out", engine="sglang", engine_version=VERSION,
        target=str(deep_target), num_draft_tokens=DEPTHS,
        check=CheckOptions(limit=2, max_new_tokens=8),
    )  # fmt: skip
    return Exported(deep_target, out, draft, texts)  # type: ignore[arg-type]


def target_of(directory: Path) -> HFEagle3TargetModel:
    return HFEagle3TargetModel.from_pretrained(directory, dtype="float32", num_aux_layers=1)


def fitted_eagle1(directory: Path, texts: list[Text], *, layers: int) -> LlamaEagle1DraftModel:
    settings = {"eagle_version": 1, "num_aux_hidden_states": 1, "num_hidden_layers": layers}
    torch.manual_seed(1)
    draft = LlamaEagle1DraftModel(derive_draft_config(load_config(str(directory)), **settings))
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if "norm" in name:
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
    with target_of(directory) as target:
        rows = torch.tensor([[*text.prompt_ids, *text.answer_ids] for text in texts])
        batch = target.generate_batch(rows, torch.ones_like(rows), torch.ones_like(rows))
        draft.config.aux_layer_ids = target.aux_layer_ids
        draft.copy_embeddings_from_target(target.get_input_embeddings())
        draft.copy_head_from_target(target.model.lm_head)
        trainer = Eagle1TrainerModule(
            draft, selected_token_ids=torch.arange(400),
            selected_token_mask=torch.ones(400, dtype=torch.bool), target_head=target.info().head,
            token_weight=1.0,
        )  # fmt: skip
    optimizer = torch.optim.Adam([p for p in draft.parameters() if p.requires_grad], lr=1e-2)
    for step in range(60):
        optimizer.zero_grad()
        trainer(**batch.to_trainer_inputs(), seed=step).loss.backward()
        optimizer.step()
    return draft.eval()


def proposals(
    directory: Path, exported: Exported, states: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    sglang = SGLangEagle1Draft(directory, exported.draft)  # type: ignore[arg-type]
    try:
        mismatched, unused = compare_with_files(sglang.model, directory, never_read="")
        assert mismatched == ["lm_head.weight"]  # the target's
        assert not unused
        drafted = sglang.propose(*every_slot(exported.rows, states), DEPTHS)
    finally:
        sglang.close()
    return drafted.token_BK, drafted.logits_BKW


def test_every_proposal_is_ours(exported: Exported, tmp_path: Path) -> None:
    with target_of(exported.target) as target:
        batches = [
            target.generate_batch(torch.tensor([row]), *(torch.ones((1, len(row))).long(),) * 2)
            for row in exported.rows
        ]
        expected = replay(target, exported.draft, exported.texts, num_draft_tokens=DEPTHS)
    states = [batch.aux_hidden_states[0] for batch in batches]
    token_BK, logits_BKV = our_proposals(exported, states)
    sglang_BK, sglang_BKV = proposals(exported.directory, exported, states)
    torch.testing.assert_close(sglang_BKV, logits_BKV, rtol=1e-3, atol=1e-3)
    assert torch.equal(sglang_BK, token_BK)
    assert len(sglang_BK.unique()) > 5, "a draft that always says the same proves nothing"
    assert accepted(exported, sglang_BK) == [result.accepted_T for result in expected]
    assert any(any(result.accepted_T) for result in expected)
    # negative control: a nonzero bias of fc changes the proposals
    shutil.copytree(exported.directory, tmp_path / "biased")
    tensors = load_file(exported.directory / "model.safetensors")
    tensors["fc.bias"] += torch.linspace(-1, 1, 32)
    save_file(tensors, tmp_path / "biased" / "model.safetensors")
    control_BK, _ = proposals(tmp_path / "biased", exported, states)
    assert (control_BK == token_BK).float().mean() < 0.9
