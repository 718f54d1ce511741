"""A random block draft, a text for it to continue, and what fledge computes for both: the reference
that an engine's own classes are compared with."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from engines.cases import VOCABULARY, engine_target, make_draft, saved
from fledge.decode.accept import Chooser
from fledge.decode.strategy import DraftShape, RoundState, Slots, choose, send_rows
from fledge.formats.export import export_draft
from fledge.methods.block.draft import BlockDraftModel

LAYERS, SLOTS, KNOWN = [1, 3, 5], 4, 9
DSPARK: dict[str, Any] = {
    "block_size": SLOTS, "mask_token_id": 2, "num_hidden_layers": 2, "markov_rank": 8,
    "confidence_head": True, "sample_from_anchor": True,
}  # fmt: skip


def _swap(first: str, second: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[first], tensors[second] = tensors[second], tensors[first]

    return change


# Negative controls: what is wrong with the tensors of an export.
CONTROLS: dict[str, Callable[[dict[str, Tensor]], None]] = {
    "norms of keys": _swap("layers.0.self_attn.k_norm.weight", "layers.1.self_attn.k_norm.weight"),
    "norm of features": lambda tensors: tensors["hidden_norm.weight"].fill_(1.0),
    "Markov factors": _swap("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"),
}


def spoiled(export: Path, control: str, place: Path) -> Path:
    """A copy of an export with wrong tensors."""
    shutil.copytree(export, place)
    tensors = load_file(place / "model.safetensors")
    CONTROLS[control](tensors)
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    return place


class BlockCase:
    """KNOWN verified tokens with their aux states, and one more that no model has read yet."""

    def __init__(self, root: Path, slots: int = SLOTS, **options: Any) -> None:
        self.root, self.slots = root, slots
        self.model = engine_target("llama")
        self.target = saved(self.model, root / "target")
        draft = make_draft(self.model, LAYERS, **options)
        assert isinstance(draft, BlockDraftModel)
        self.draft = draft.eval()
        with torch.no_grad():
            for weight in draft.parameters():
                if weight.ndim == 2 and weight.requires_grad:
                    weight.normal_(std=0.2)
        draft.save_pretrained(root / "draft")
        generator = torch.Generator().manual_seed(5)
        self.aux_TD = torch.randn(KNOWN, len(LAYERS) * 64, generator=generator)
        self.text = torch.randint(3, VOCABULARY, (KNOWN + 1,), generator=generator).tolist()

    def export(self, engine: str) -> Path:
        out = self.root / engine
        if not out.exists():
            options = {"engine": engine, "target": str(self.target), "without_target": True}
            export_draft(self.root / "draft", out, **options)
        return out

    @torch.inference_mode()
    def ours(self) -> dict[str, Tensor]:
        """Logits and tokens of the slots that draft; for DSpark, its biases and confidences too."""
        draft, strategy = self.draft, choose(self.draft)(self.draft, DraftShape(self.slots))
        blocks: Any = strategy
        aux_1TD = self.aux_TD[None]
        blocks.start([self.text[:1]], aux_1TD)
        table = send_rows([(KNOWN, self.text[1:], range(KNOWN))], torch.device("cpu"), width=KNOWN)
        state = RoundState(*Slots.of(table), aux_1TD, blocks.reserve(KNOWN))
        states_JE = blocks.states(state)[0]
        tokens_J = blocks.propose(state, Chooser()).token_BN[0]
        results = {"tokens": tokens_J, "logits": F.linear(states_JE, draft.lm_head.weight)}
        if draft.token_head is None or draft.confidence_head is None:
            return results
        before_J = torch.cat([torch.tensor(self.text[-1:]), tokens_J[:-1]])
        features_JR = draft.token_head.features(before_J, states_JE, None)
        return results | {
            "biases": F.linear(features_JR, draft.token_head.out_WR),
            "confidence": draft.confidence_head(states_JE, features_JR).sigmoid(),
        }
