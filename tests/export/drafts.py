"""A tiny target with a tokenizer, and drafts fitted to it that are sensitive to their settings.

The target's layers differ, fc reads differences between them, and the rotary base is small: so a
wrong layer, norm or base costs acceptance, as it does with real drafts.
"""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fledge.measure.answers import cached_answers, read_prompts
from fledge.methods.eagle1.draft import LlamaEagle1DraftModel
from fledge.methods.eagle1.objective import Eagle1TrainerModule
from fledge.methods.eagle3.draft import LlamaEagle3DraftModel
from fledge.methods.eagle3.objective import Eagle3TrainerModule
from fledge.methods.peagle.objective import PEagleTrainerModule
from fledge.methods.shared.config import derive_draft_config
from fledge.target.hf.model import HFEagle3TargetModel

AUX = [1, 3, 4]  # the default for eight layers
WIDTH, PROMPTS, NEW_TOKENS = 200, 8, 48
ROPE = {"rope_type": "linear", "factor": 8.0, "rope_theta": 100.0}
TEMPLATE = (
    "{% for m in messages %}{{ '<u>' if m['role'] == 'user' else '<a>' }}{{ m['content'] }}"
    "{{ '<e>' }}{% endfor %}{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<pad>", "<e>", "<u>", "<a>", "<|reserved_0|>", *letters]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<e>",
        additional_special_tokens=["<u>", "<a>", "<|reserved_0|>"],
    )  # fmt: skip
    fast.chat_template = TEMPLATE
    return fast


def make_target(directory: Path) -> Path:
    """A target of eight random layers, each of which changes the state considerably."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        rope_parameters=ROPE, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(60)
        model.lm_head.weight[1] = -1.0  # never ends an answer early
        model.model.embed_tokens.weight.mul_(30)
        model.model.norm.weight.copy_(torch.randn(32).mul(1.2).exp())  # not a mere rescaling
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(16)
            layer.mlp.down_proj.weight.mul_(16)
    model.save_pretrained(directory)
    return directory


def make_draft(
    target: Path,
    *,
    parallel=False,
    aux=AUX,
    fit=40,
    norm_before_residual=False,
    fc_scale=1,
    **flags,
) -> LlamaEagle3DraftModel:
    """A draft fitted to the target's own answers to the prompts that `diagnose` uses."""
    backend = HFEagle3TargetModel.from_pretrained(target, aux_layer_ids=aux, device="cpu")
    model = backend.model
    torch.manual_seed(1)
    config = derive_draft_config(
        model.config, architecture="LlamaForCausalLM", draft_vocab_size=WIDTH,
        parallel_drafting=parallel, mask_token_id=4 if parallel else None,
        num_hidden_layers=2 if parallel else 1, **flags,
    )  # fmt: skip
    config.aux_layer_ids, config.norm_before_residual = list(aux), norm_before_residual
    draft = LlamaEagle3DraftModel(config)
    rows = answered_rows(backend)
    counts = torch.bincount(rows[0][rows[2] != 0], minlength=config.vocab_size)
    counts[1] += 10_000  # the end token belongs to every draft vocabulary
    ids = counts.argsort(descending=True, stable=True)[:WIDTH].sort().values
    mask = torch.zeros(config.vocab_size, dtype=torch.bool)
    mask[ids] = True
    draft.set_vocab_mapping(ids, mask)
    draft.copy_embeddings_from_target(model.model.embed_tokens)
    draft.copy_head_from_target(model.lm_head)
    prepare(draft, fc_scale)
    if fit:
        fit_draft(draft, backend, rows, ids, mask, steps=fit)
    return draft.eval()


@torch.no_grad()
def prepare(draft: LlamaEagle3DraftModel, fc_scale: float) -> None:
    """Start fc as differences of layers, which only the right layers provide."""
    size = draft.config.hidden_size
    for name, weight in draft.named_parameters():
        if weight.ndim == 2 and name not in ("embed_tokens.weight", "lm_head.weight"):
            weight.mul_(6)
    low, high = torch.randn(2, size, size) * 6 * fc_scale / size**0.5
    draft.fc.weight.copy_(torch.cat([-low, low - high, high], dim=1))
    draft.embed_tokens.weight.requires_grad_(False)


def answered_rows(backend: HFEagle3TargetModel) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prompts followed by the target's answers: ids, attention mask, loss mask."""
    answers = cached_answers(
        backend, read_prompts(["mixed"], limit=PROMPTS), max_new_tokens=NEW_TOKENS
    ).turns
    width = max(len(turn.prompt_ids) + len(turn.answer_ids) for turn in answers)
    ids, real, loss = torch.zeros(3, len(answers), width, dtype=torch.long)
    for row, turn in enumerate(answers):
        end = len(turn.prompt_ids) + len(turn.answer_ids)
        ids[row, :end] = torch.tensor(turn.prompt_ids + turn.answer_ids)
        real[row, :end] = 1
        loss[row, len(turn.prompt_ids) : end] = 1
    return ids, real, loss


def fit_draft(draft, backend, rows, ids, mask, *, steps, depths=3) -> None:
    common = {"selected_token_ids": ids, "selected_token_mask": mask}
    if draft.config.parallel_drafting:
        module = PEagleTrainerModule(
            draft, num_depths=depths, mask_token_id=draft.config.mask_token_id,
            target_head=backend.info().head, **common,
        )  # fmt: skip
    else:
        head = backend.info().head
        module = Eagle3TrainerModule(draft, ttt_steps=depths, target_head=head, **common)
    descend(module, draft, backend, rows, steps=steps)


def descend(module, draft, backend, rows, *, steps, lr=5e-3, seeded=False) -> None:
    """Fit a draft by its objective; `seeded` ones take another sample in every step."""
    inputs = backend.generate_batch(*rows).to_trainer_inputs()
    optimizer = torch.optim.Adam([w for w in draft.parameters() if w.requires_grad], lr=lr)
    for step in range(steps):
        optimizer.zero_grad()
        module(**inputs, **({"seed": step} if seeded else {})).loss.backward()
        optimizer.step()


def make_eagle1(target: Path, *, fit=20, layers=1, bias=False) -> LlamaEagle1DraftModel:
    backend = HFEagle3TargetModel.from_pretrained(target, num_aux_layers=1, device="cpu")
    model = backend.model
    torch.manual_seed(1)
    config = derive_draft_config(
        model.config, architecture="LlamaForCausalLM", num_hidden_layers=layers, eagle_version=1,
        num_aux_hidden_states=1, fc_bias=bias,
    )  # fmt: skip
    config.aux_layer_ids = [model.config.num_hidden_layers]
    draft = LlamaEagle1DraftModel(config)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.mul_(6 if weight.ndim == 2 else 1)
        if bias:
            draft.fc.bias.normal_()
    draft.copy_embeddings_from_target(model.model.embed_tokens)
    draft.copy_head_from_target(model.lm_head)
    if fit:
        fit_eagle1(draft, backend, steps=fit)
    return draft.eval()


def fit_eagle1(draft, backend, *, steps) -> None:
    full = torch.arange(draft.config.vocab_size)
    module = Eagle1TrainerModule(
        draft, selected_token_ids=full, selected_token_mask=torch.ones_like(full).bool(),
        target_head=backend.info().head, token_weight=1.0,
    )  # fmt: skip
    descend(module, draft, backend, answered_rows(backend), steps=steps, lr=1e-2, seeded=True)


def files_of(directory: Path):
    """The config and the tensors of a draft, for comparisons."""
    from safetensors.torch import load_file

    config = json.loads((directory / "config.json").read_text())
    return config, load_file(directory / "model.safetensors")
