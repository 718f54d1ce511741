"""A textbook implementation of the training of native multi-token heads, and what tests train.

One anchor after another, one step after another, every key and value written down. The only things
shared with the code under test are the draft's parameters and its rotary table.
"""

import torch
from torch.nn import functional as F
from transformers import LlamaConfig

from fledge.core.head import TargetHead
from fledge.methods.eagle3.objective import Eagle3TrainerModule
from fledge.methods.mtp.draft import MtpDraftModel
from objective.naive_eagle1 import documents_of as documents_of  # one state for each token
from objective.naive_eagle3 import D, Naive, V, _norm, attended, finish_layer, queries_keys_values


class Table:
    """The target's embedding or head."""

    def __init__(self, seed, dtype):
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype)


# A head whose layer is transformers' own, with gated attention.
HOSTED = {
    "mtp_family": "qwen", "attention_bias": False,
    "layer_config": {
        "model_type": "qwen3_5_text", "vocab_size": V, "hidden_size": D, "intermediate_size": 20,
        "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
    },
}  # fmt: skip


def make_draft(*, dtype=torch.float64, **changes):
    torch.manual_seed(0)
    settings = {
        "vocab_size": V, "hidden_size": D, "intermediate_size": 20, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "attention_bias": True,
        "max_position_embeddings": 64, "num_aux_hidden_states": 1, "mtp_family": "mimo",
    }  # fmt: skip
    draft = MtpDraftModel(LlamaConfig(**(settings | changes))).to(dtype)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    draft.copy_embeddings_from_target(Table(4, dtype))
    draft.copy_head_from_target(Table(5, dtype))
    return draft


def make_module(draft=None, *, dtype=torch.float64, changes=None, steps=4, **options):
    draft = make_draft(dtype=dtype, **(changes or {})) if draft is None else draft
    head = {"target_head": TargetHead(draft.lm_head.weight.detach())}
    return Eagle3TrainerModule(
        draft, selected_token_ids=torch.arange(V), ttt_steps=steps,
        selected_token_mask=torch.ones(V, dtype=torch.bool), **(head | options),
    )  # fmt: skip


def naive_mtp(draft, documents, *, steps, decay=0.8):
    sums, out = [0.0] * steps, Naive(None, *([0] * steps for _ in range(4)))
    for document in documents:
        for anchor in range(len(document.ids)):
            alive = valid = True
            for k, state in enumerate(naive_rollout(draft, document, anchor, steps)):
                read = anchor + 1 + k  # the token that this step reads
                supervised = bool(document.loss[read])
                logits, wanted = (
                    F.linear(x, draft.lm_head.weight) for x in (state, document.hidden[read])
                )
                probs = wanted.softmax(-1, dtype=torch.float32).to(logits.dtype)
                valid &= supervised
                alive &= supervised and bool(logits.argmax() == wanted.argmax())
                out.charged[k] += supervised
                out.correct[k] += supervised and bool(logits.argmax() == wanted.argmax())
                out.valid[k] += valid
                out.hits[k] += alive
                if supervised:
                    sums[k] = sums[k] - (probs * logits.log_softmax(-1)).sum()
    weights = [decay**k for k in range(steps)]
    terms = zip(weights, sums, out.charged, strict=True)
    out.loss = sum(w * s / max(n, 1) for w, s, n in terms) / sum(weights)
    return out


def naive_rollout(draft, document, anchor, steps):
    """The head's inputs of one anchor's steps, as long as there are tokens to read."""
    p, c = dict(draft.named_parameters()), draft.config
    keys, values = [], []
    for slot in range(anchor + 1):  # the true keys of the prefix
        if slot + 1 == len(document.ids):
            return
        merged = merge(draft, p, document.ids[slot + 1], document.hidden[slot], slot)
        q, state = _attend(draft, p, merged, slot, keys, values)
    for k in range(steps):
        if k > 0:
            if anchor + 1 + k >= len(document.ids):
                return
            merged = merge(draft, p, document.ids[anchor + 1 + k], state, anchor + k)
            q, _ = _attend(draft, p, merged, anchor + k, keys, values)
        everything = torch.ones(1, len(keys), dtype=torch.bool)
        out = attended(q, torch.cat(keys, -2), torch.cat(values, -2), everything)
        state = finish_layer(merged[None], out, p, "layers.0.", c)
        state = _norm(state, p["norm.weight"], c.rms_norm_eps)[0]
        yield state


def merge(draft, p, token, state, position):
    """What the layer reads: the token's embedding first, as our files have it. MiMo's heads read no
    embedding at position 0."""
    embedding = draft.embed_tokens.weight[token] * (position > 0)
    left = _norm(embedding, p["embedding_norm.weight"], draft.config.rms_norm_eps)
    right = _norm(state, p["hidden_norm.weight"], draft.config.rms_norm_eps)
    return F.linear(torch.cat([left, right], -1), p["fc.weight"])


def _attend(draft, p, merged, position, keys, values):
    """The query of one row; its key and value are appended."""
    x = _norm(merged, p["layers.0.input_layernorm.weight"], draft.config.rms_norm_eps)[None]
    place = torch.tensor([position])
    q, k, v = queries_keys_values(x, p, "layers.0.", draft.config, place, draft.rotary)
    keys.append(k)
    values.append(v)
    return q, merged
