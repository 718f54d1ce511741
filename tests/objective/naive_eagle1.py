"""A textbook implementation of EAGLE-1's training, and what tests train it on.

One document at a time, dense masks, all concatenations written out. The only things shared with the
code under test are the draft's parameters, its rotary table and the words that noise is made of.
"""

import numpy as np
import torch
from torch.nn import functional as F
from transformers import LlamaConfig

from fledge.core.head import TargetHead
from fledge.methods.eagle1.draft import LlamaEagle1DraftModel
from fledge.methods.eagle1.objective import Eagle1TrainerModule
from fledge.rollout.slots import Documents, slot_words
from objective.naive_eagle3 import (
    _norm,
    attended,
    finish_layer,
    make_documents,
    queries_keys_values,
)

V, D = 31, 10  # the sizes of the documents of `naive_eagle3`
LENGTHS = [9, 1, 6, 13, 2]
SEED = 11


def make_draft(*, layers=1, fc_bias=False):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=D, intermediate_size=20, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, head_dim=4, max_position_embeddings=64,
        eagle_version=1, num_aux_hidden_states=1, fc_bias=fc_bias,
    )  # fmt: skip
    draft = LlamaEagle1DraftModel(config).double()
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return draft


def make_module(draft, **options):
    """The target head is the draft's copy of it."""
    return Eagle1TrainerModule(
        draft,
        selected_token_ids=torch.arange(V),
        selected_token_mask=torch.ones(V, dtype=torch.bool),
        target_head=TargetHead(draft.lm_head.weight.detach()),
        **options,
    )


def documents_of(lengths=LENGTHS, **options):
    """A token's only aux state is its last hidden state."""
    documents = make_documents(lengths, **options)
    for document in documents:
        document.aux = document.hidden
    return documents


def naive_states(draft, document, features):
    """The draft's states [T, D] for one document, with all concatenations written out."""
    config, p = draft.config, dict(draft.named_parameters())
    embedding = p["embed_tokens.weight"][F.pad(document.ids[1:], (0, 1))]
    state = F.linear(torch.cat([embedding, features], -1), p["fc.weight"], p.get("fc.bias"))
    visible, position = torch.ones(len(state), len(state)).tril().bool(), torch.arange(len(state))
    for i in range(config.num_hidden_layers):
        prefix, x = f"layers.{i}.", state
        if i > 0:
            x = _norm(x, p[prefix + "input_layernorm.weight"], config.rms_norm_eps)
        q, k, v = queries_keys_values(x, p, prefix, config, position, draft.rotary)
        state = finish_layer(state, attended(q, k, v, visible), p, prefix, config)
    return state


def naive_noise(document, seed, bound):
    """splitmix64 written out, one word at a time."""
    wrap = 2**64 - 1

    def mix(word):
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & wrap
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & wrap
        return word ^ (word >> 31)

    supervised = F.pad(document.loss[1:], (0, 1)).bool().numpy()
    place = np.arange(len(supervised))
    words = slot_words(Documents(supervised, np.zeros_like(place), place), seed)
    golden = 0x9E3779B97F4A7C15
    rows = [
        [(mix((int(word) + golden * (c + 1)) & wrap) >> 40) / 2**24 for c in range(D)]
        for word in words
    ]
    return (2 * torch.tensor(rows, dtype=torch.float64) - 1) * bound


def naive_eagle1(draft, documents, *, noise=0.0, feature_weight=1.0, token_weight=0.1):
    head, regression, entropy, hits, count = draft.lm_head.weight.detach(), 0.0, 0.0, 0, 0
    for document in documents:
        features = document.hidden
        if noise:
            features = features + naive_noise(document, SEED, noise)
        states = naive_states(draft, document, features)
        for t in range(len(document.ids) - 1):
            if not document.loss[t + 1]:
                continue
            target_state, count = document.hidden[t + 1], count + 1
            difference = (states[t] - target_state).abs()
            smooth = torch.where(difference < 1, 0.5 * difference**2, difference - 0.5)
            regression = regression + smooth.mean()
            logits, target_logits = head @ states[t], head @ target_state
            probs = target_logits.softmax(-1, dtype=torch.float32)  # as in every method
            entropy = entropy - (probs * logits.log_softmax(-1)).sum()
            hits += int(logits.argmax() == target_logits.argmax())
    return (feature_weight * regression + token_weight * entropy) / count, count, hits
