"""Briefly trained drafts of three methods for SmolLM2-135M, which llama.cpp serves in float32."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engines.cases import make_draft
from fledge.measure.replay import Replay, Text, replay
from fledge.methods.base import TrainerInputs
from fledge.methods.registry import method_of
from fledge.methods.shared.draft import DraftModel
from fledge.target.hf.model import HFEagle3TargetModel

TARGET, LAYERS = "smollm2-135m", [1, 14, 26]
WIDTH, DEPTHS = 1500, 3
_SMALL = {
    "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
}  # fmt: skip
_BLOCK = {"mask_token_id": 16, "num_hidden_layers": 2}
KINDS: dict[str, tuple[int | None, dict[str, Any], dict[str, Any]]] = {
    # width, config, options of the objective
    "eagle3": (WIDTH, {}, {"ttt_steps": 3}),
    "dflash": (WIDTH, {**_BLOCK, "block_size": DEPTHS + 1}, {}),
    "dspark": (
        WIDTH,
        {**_BLOCK, "block_size": DEPTHS, "sample_from_anchor": True, "markov_rank": 32,
         "confidence_head": True},
        {},
    ),
}  # fmt: skip


def trained(
    kind: str, texts: Sequence[Text], directory: Path, *, steps: int = 30
) -> tuple[DraftModel, HFEagle3TargetModel]:
    """A draft fitted to some of the texts, and its target."""
    width, options, objective = KINDS[kind]
    target = HFEagle3TargetModel.from_pretrained(
        TARGET, aux_layer_ids=LAYERS, num_aux_layers=3, device="cpu"
    )
    rows = _rows(texts)
    chosen = None if width is None else torch.bincount(rows[0].flatten()).argsort(descending=True)
    draft = make_draft(target.model, LAYERS, ids=chosen, width=width, **_SMALL, **options)
    ids = draft.selected_token_ids
    assert ids is not None
    if draft.lm_head.weight.requires_grad:
        draft.lm_head.weight.data.copy_(target.model.lm_head.weight[ids])
    mask = torch.zeros(draft.config.vocab_size, dtype=torch.bool)
    mask[ids] = True
    method = method_of(draft.config)
    given = TrainerInputs(ids, mask, target.info().head, None)
    module: Any = method.objective(draft, given, **(method.bench_options() | objective))
    inputs = target.generate_batch(*rows).to_trainer_inputs()
    optimizer = torch.optim.Adam([p for p in draft.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        module(**inputs).loss.backward()
        optimizer.step()
    draft.eval().save_pretrained(directory)
    return draft, target


def _rows(texts: Sequence[Text]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids, real, loss = torch.zeros(3, len(texts), max(map(len, texts)), dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor([*text.prompt_ids, *text.answer_ids])
        real[row, : len(text)] = 1
        loss[row, len(text.prompt_ids) : len(text)] = 1
    return ids, real, loss


def replayed(
    draft: DraftModel, target: HFEagle3TargetModel, texts: Sequence[Text], depths: int = DEPTHS
) -> list[Replay]:
    results = list(replay(target, draft, texts, num_draft_tokens=depths))
    assert not any(result.other_picks for result in results)
    return results


def counted(result: Replay, limit: int, end: int, depths: int = DEPTHS) -> tuple[int, int, int]:
    """Rounds, drafted and accepted tokens as llama.cpp counts them, for `limit` new tokens.

    The prompt's pass yields the first token. A round never drafts past the limit; accepted tokens
    count even after the end token.
    """
    prompt, answer = len(result.prompt_ids), list(result.answer_ids)
    rounds = drafted = accepted = 0
    known = 1
    while known < limit and end not in answer[:known]:
        most = min(depths, limit - known - 1)
        right = min(result.accepted_T[prompt + known - 2], most)
        rounds, drafted, accepted = rounds + (most > 0), drafted + most, accepted + right
        known += right + 1
    return rounds, drafted, accepted
