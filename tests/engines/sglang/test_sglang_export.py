"""What `fledge export --engine sglang` writes, loaded by SGLang's own draft class and loader."""

import importlib.metadata
import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang_draft import SGLangDraft, layers_that_sglang_reads, target_states
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fledge.decode.strategy import DraftShape, RoundState, Slots, send_rows
from fledge.formats.export import export_draft
from fledge.formats.self_check import CheckOptions
from fledge.measure.replay import Text, replay
from fledge.methods.eagle3.decoding import Chain
from fledge.methods.eagle3.draft import LlamaEagle3DraftModel
from fledge.methods.eagle3.objective import Eagle3TrainerModule
from fledge.methods.shared.config import derive_draft_config
from fledge.models.resolve import load_config
from fledge.target.hf.model import HFEagle3TargetModel

VERSION = importlib.metadata.version("sglang") if importlib.util.find_spec("sglang") else ""
DEPTHS = 4
DEFAULT_LAYERS = [1, 3, 4]  # of 8
KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab_size": 128},
    "chosen-layers": {"aux_layer_ids": [0, 2, 5]},
}
if VERSION != "0.5.9":  # which supports neither; export refuses them
    KINDS |= {
        "eagle3.1": {"draft_vocab_size": 128, "fc_norm": True, "norm_output": True},
        "two-layers": {"num_hidden_layers": 2},
    }


@dataclass(frozen=True)
class Exported:
    target: Path
    directory: Path
    draft: LlamaEagle3DraftModel
    texts: list[Text]

    @property
    def rows(self) -> list[list[int]]:
        return [[*text.prompt_ids, *text.answer_ids] for text in self.texts]


@pytest.fixture(scope="module")
def deep_target(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with 8 layers: enough for default aux layers and for their neighbours."""
    directory = tmp_path_factory.mktemp("target") / "deep"
    shutil.copytree(tiny_target, directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        rope_theta=500.0,  # an engine that ignored it would use 10,000
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # so that layers differ clearly
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.3)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", params=KINDS)
def exported(
    request: pytest.FixtureRequest, deep_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Exported:
    directory = tmp_path_factory.mktemp("export")
    texts = greedy_texts(deep_target)
    draft = fitted_draft(deep_target, texts, **KINDS[request.param])
    draft.save_pretrained(directory / "draft")
    out = export_draft(
        directory / "draft",
        directory / "out",
        engine="sglang",
        engine_version=VERSION,
        target=str(deep_target),
        num_draft_tokens=DEPTHS,
        check=CheckOptions(limit=2, max_new_tokens=8),
    )
    return Exported(deep_target, out, draft, texts)


def fitted_draft(
    directory: Path, texts: list[Text], *, aux_layer_ids: list[int] = DEFAULT_LAYERS, **options: Any
) -> LlamaEagle3DraftModel:
    """A draft that has partly learned these texts and in which every norm matters."""
    with HFEagle3TargetModel.from_pretrained(
        directory, aux_layer_ids=aux_layer_ids, dtype="float32"
    ) as target:
        rows = torch.tensor([[*text.prompt_ids, *text.answer_ids] for text in texts])
        batch = target.generate_batch(rows, torch.ones_like(rows), torch.ones_like(rows))
        torch.manual_seed(1)
        draft = LlamaEagle3DraftModel(derive_draft_config(load_config(str(directory)), **options))
        draft.config.aux_layer_ids = aux_layer_ids
        draft.copy_embeddings_from_target(target.get_input_embeddings())
        head, size = target.info().head, target.info().vocab_size
    candidates = [*rows.unique().tolist(), *range(size)]
    ids = torch.tensor(sorted(list(dict.fromkeys(candidates))[: draft.config.draft_vocab_size]))
    mask = torch.zeros(size, dtype=torch.bool)
    mask[ids] = True
    draft.set_vocab_mapping(ids, mask)
    draft.embed_tokens.weight.requires_grad_(False)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if "norm" in name:
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
    trainer = Eagle3TrainerModule(
        draft,
        selected_token_ids=ids,
        selected_token_mask=mask,
        ttt_steps=DEPTHS,
        target_head=head,
    )
    optimizer = torch.optim.Adam([p for p in draft.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        trainer(**batch.to_trainer_inputs()).loss.backward()
        optimizer.step()
    return draft.eval()


def greedy_texts(directory: Path) -> list[Text]:
    """The target's own continuations of a few prompts."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    generator = torch.Generator().manual_seed(0)
    texts = []
    for length in (3, 5, 8):
        prompt = torch.randint(5, 400, (1, length), generator=generator)
        whole = model.generate(
            prompt, max_new_tokens=20 - length, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0].tolist()
        texts.append(Text(whole[:length], whole[length:]))
    return texts


def test_every_parameter_comes_from_the_files(exported: Exported) -> None:
    sglang = SGLangDraft(exported.directory, exported.draft.embed_tokens.weight)
    try:
        mismatched, unused = compare_with_files(sglang.model, exported.directory)
        hot = sglang.model.get_hot_token_id()
    finally:
        sglang.close()
    assert mismatched == []
    assert unused <= {"d2t", "t2d"}
    if exported.draft.config.draft_vocab_size == exported.draft.config.vocab_size:
        assert hot is None
    else:
        assert torch.equal(hot, exported.draft.selected_token_ids)


def test_a_layer_that_sglang_skips_is_noticed(exported: Exported, tmp_path: Path) -> None:
    """Negative control: 0.5.9 knows layer 0 only as `midlayer`, and skips other names silently."""
    shutil.copytree(exported.directory, tmp_path / "renamed")
    files = load_file(exported.directory / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in files.items()}
    save_file(renamed, tmp_path / "renamed" / "model.safetensors")
    sglang = SGLangDraft(tmp_path / "renamed", exported.draft.embed_tokens.weight)
    try:
        mismatched, _ = compare_with_files(sglang.model, tmp_path / "renamed")
    finally:
        sglang.close()
    first_layer = [name for name in mismatched if "midlayer" in name or "layers.0" in name]
    assert len(first_layer) == (7 if VERSION == "0.5.9" else 0)


# created by SGLang's EAGLE-3 class, but unused in its forward pass
NEVER_READ = "model.layers.1.input_layernorm.weight"


def compare_with_files(
    model: Any, directory: Path, never_read: str = NEVER_READ
) -> tuple[list[str], set[str]]:
    """Parameters of SGLang's draft that differ from the files, and tensors that it did not load."""
    files = load_file(directory / "model.safetensors")
    mismatched, unused = [], set(files)
    for name, parameter in model.named_parameters():
        if name in ("model.embed_tokens.weight", never_read):  # always the target's
            continue
        parts = [part for part in parts_of(name) if part in files]
        unused -= set(parts)
        if not parts:
            mismatched.append(name)
            continue
        expected = torch.cat([files[part] for part in parts])
        padding = len(parameter) - len(expected)  # a vocabulary is padded to blocks of 64
        if not torch.equal(parameter[: len(expected)], expected) or padding >= 64:
            mismatched.append(name)
    return mismatched, unused


def parts_of(name: str) -> list[str]:
    """The possible names in a file of the tensors that make up one of SGLang's parameters."""
    plain = name.removeprefix("model.")
    names = [plain, plain.replace("layers.0.", "midlayer.")]
    fused = {"qkv_proj": "q_proj k_proj v_proj", "gate_up_proj": "gate_proj up_proj"}
    for whole, parts in fused.items():
        names += [n.replace(whole, part) for n in names[:2] if whole in n for part in parts.split()]
    return list(dict.fromkeys(names))


def proposals(exported: Exported, aux: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """SGLang's tokens and logits, drafted from every slot of every text."""
    sglang = SGLangDraft(exported.directory, exported.draft.embed_tokens.weight)
    try:
        drafted = sglang.propose(*every_slot(exported.rows, aux), DEPTHS)
    finally:
        sglang.close()
    return drafted.token_BK, drafted.logits_BKW


def every_slot(rows: list[list[int]], aux: list[torch.Tensor]) -> tuple[Any, Any]:
    anchors = [(r, n) for r, row in enumerate(rows) for n in range(1, len(row))]
    return [rows[r][1 : n + 1] for r, n in anchors], [aux[r][:n] for r, n in anchors]


@torch.no_grad()
def our_proposals(exported: Exported, aux: list[torch.Tensor]) -> tuple[Any, Any]:
    """Tokens and logits of our own decoder, one row after another."""
    tokens, logits = [], []
    selected_W = exported.draft.selected_token_ids
    assert selected_W is not None
    for row, aux_TD in zip(*every_slot(exported.rows, aux), strict=True):
        drafter = Chain(exported.draft, DraftShape(DEPTHS))
        drafter.clear(1)
        count = len(row)
        table_BX = send_rows([(count, row, range(count))], drafter.device, width=count)
        verified = RoundState(*Slots.of(table_BX), aux_TD[None], drafter.room(count + DEPTHS))
        state = drafter.extend(verified)
        chain: list[torch.Tensor] = []
        scores: list[torch.Tensor] = []
        for depth in range(DEPTHS):
            if depth > 0:
                at = torch.tensor([[count - 1 + depth]])
                state = drafter.run(state[:, None], chain[-1][None], at, used=count + depth)[:, 0]
            scores.append(drafter.logits(state)[0])
            chain.append(selected_W[scores[-1].argmax(-1)][None])
        tokens.append(torch.cat(chain))
        logits.append(torch.stack(scores))
    return torch.stack(tokens), torch.stack(logits)


def test_every_proposal_is_ours(exported: Exported) -> None:
    with HFEagle3TargetModel.from_pretrained(
        exported.target, aux_layer_ids=exported.draft.config.aux_layer_ids, dtype="float32"
    ) as target:
        batches = [
            target.generate_batch(torch.tensor([row]), *(torch.ones((1, len(row))).long(),) * 2)
            for row in exported.rows
        ]
        expected = replay(target, exported.draft, exported.texts, num_draft_tokens=DEPTHS)
    our_aux = [batch.aux_hidden_states[0] for batch in batches]
    token_BK, logits_BKW = our_proposals(exported, our_aux)
    ids = layers_that_sglang_reads(exported.directory)
    aux = target_states(exported.target, ids, exported.rows)
    for theirs_TD, ours_TD in zip(aux, our_aux, strict=True):
        torch.testing.assert_close(theirs_TD, ours_TD, rtol=1e-3, atol=1e-3)
    sglang_BK, sglang_BKW = proposals(exported, aux)
    torch.testing.assert_close(sglang_BKW, logits_BKW, rtol=1e-3, atol=1e-3)
    assert torch.equal(sglang_BK, token_BK)
    assert len(sglang_BK.unique()) > 5, "a draft that always says the same proves nothing"
    assert accepted(exported, sglang_BK) == [result.accepted_T for result in expected]
    assert any(any(result.accepted_T) for result in expected)
    # negative controls: wrong layers, and the layers in another order
    neighbours = [i + 1 for i in exported.draft.config.aux_layer_ids]
    reordered = [torch.cat(aux_TD.chunk(3, -1)[::-1], -1) for aux_TD in aux]
    for control in (target_states(exported.target, neighbours, exported.rows), reordered):
        control_BK, control_BKW = proposals(exported, control)
        assert (control_BK == token_BK).float().mean() < 0.9
        assert (control_BKW - logits_BKW).abs().max() > 0.1


def accepted(exported: Exported, token_BK: torch.Tensor) -> list[list[int]]:
    """For each slot, how many of SGLang's tokens match the text, counted as replay does."""
    counts, chains = [], iter(token_BK.tolist())
    for text, row in zip(exported.texts, exported.rows, strict=True):
        hits = [0] * len(row)
        for slot in range(len(row) - 1):
            chain = next(chains)
            if slot >= len(text.prompt_ids) - 1:
                rest = row[slot + 2 :]
                wrong = (i for i, (a, b) in enumerate(zip(chain, rest, strict=False)) if a != b)
                hits[slot] = next(wrong, min(len(rest), len(chain)))
        counts.append(hits)
    return counts
