"""A textbook implementation of P-EAGLE: one document at a time, every element against every other.

Elements are (anchor, depth) pairs in a list; visibility is the rule of docs/semantics.md in a
double loop; q, k, v read explicit concatenations. The only things shared with the code under test
are the draft's parameters and rotary table.
"""

import torch
from torch.nn import functional as F

from fledge.core.head import target_distribution
from fledge.methods.losses.kl import KLDivergence
from fledge.rollout.slots import Documents, sample_depths
from objective.naive_eagle3 import (
    Naive,
    _norm,
    attended,
    finish_layer,
    make_draft,
    queries_keys_values,
    reference_loss,
)

MASK_ID = 30


def make_parallel_draft(*, layers=2, **changes):
    return make_draft(
        num_hidden_layers=layers, parallel_drafting=True, mask_token_id=MASK_ID, **changes
    )


def sampled_depths(documents, *, num_depths, ratio, ratio_min, seed):
    """The deepest depth of each anchor, per document, from the sampler's documented interface."""
    lengths = torch.tensor([len(d.ids) for d in documents])
    supervised = torch.cat([F.pad(d.loss[1:], (0, 1)) for d in documents]).bool()
    slots = Documents(
        supervised.numpy(),
        ordinal=torch.repeat_interleave(torch.arange(len(documents)), lengths).numpy(),
        place=torch.cat([torch.arange(n) for n in lengths]).numpy(),
    )
    options = {"num_depths": num_depths, "ratio": ratio, "ratio_min": ratio_min, "seed": seed}
    deepest = sample_depths(slots, **options)
    return [part.tolist() for part in torch.split(torch.from_numpy(deepest), lengths.tolist())]


def visible(query, key):
    """The visibility rule for two elements (anchor, depth) of one document."""
    (qa, qd), (ka, kd) = query, key
    return (kd == 0 and ka <= qa) or (ka == qa and kd <= qd)


def naive_peagle(
    draft, documents, deepest, *, head, ids, mask, num_depths, loss=None, balance=False
):
    logits, probs, charged, depths, correct = [], [], [], [], []
    document_outcomes = []
    for document, document_deepest in zip(documents, deepest, strict=True):
        elements = [(a, 0) for a in range(len(document.ids))]
        elements += [
            (a, d)
            for d in range(1, num_depths)
            for a, last in enumerate(document_deepest)
            if last >= d
        ]
        doc_logits = element_logits(draft, document, elements)
        next_hidden = F.pad(document.hidden[1:], (0, 0, 0, 1))
        doc_probs, covered = target_distribution(head.logits(next_hidden), ids, mask)
        supervised = F.pad(document.loss[1:], (0, 1)).bool()
        target_slot = torch.tensor([a + d for a, d in elements])
        is_charged = supervised[target_slot]
        hit = (
            (doc_logits.argmax(-1) == doc_probs.argmax(-1)[target_slot])
            & covered[target_slot]
            & is_charged
        )
        logits.append(doc_logits)
        probs.append(doc_probs[target_slot])
        charged.append(is_charged)
        depths.append(torch.tensor([d for _, d in elements]))
        correct.append(hit)
        outcomes = zip(hit.tolist(), is_charged.tolist(), strict=True)
        document_outcomes.append((elements, dict(zip(elements, outcomes, strict=True))))
    logits, probs, charged, depths, correct = map(
        torch.cat, (logits, probs, charged, depths, correct)
    )
    parts = [depths == k for k in range(num_depths)] if balance else [depths >= 0]
    losses = [
        reference_loss(logits[n], probs[n], charged[n], loss or KLDivergence()) for n in parts
    ]
    out = Naive(loss=torch.stack(losses).mean())
    for k in range(num_depths):
        out.charged.append(int((charged & (depths == k)).sum()))
        out.correct.append(int((correct & (depths == k)).sum()))
        rollouts = [
            [outcome[a, j] for j in range(k + 1)]
            for elements, outcome in document_outcomes
            for a, d in elements
            if d == k
        ]
        out.valid.append(sum(all(is_charged for _, is_charged in rollout) for rollout in rollouts))
        out.hits.append(sum(all(hit for hit, _ in rollout) for rollout in rollouts))
    return out


def element_logits(draft, document, elements):
    """Logits [N, W] of one document's elements."""
    c, p = draft.config, dict(draft.named_parameters())
    anchor = torch.tensor([a for a, _ in elements])
    depth = torch.tensor([d for _, d in elements])
    tokens = torch.where(depth == 0, F.pad(document.ids[1:], (0, 1))[anchor], c.mask_token_id)
    aux = torch.where((depth == 0)[:, None], document.aux[anchor], p["mask_hidden"].reshape(1, -1))
    if c.fc_norm:
        chunks = enumerate(aux.chunk(3, dim=-1))
        aux = torch.cat([_norm(x, p[f"fc_norm.{i}.weight"], c.rms_norm_eps) for i, x in chunks], -1)
    state = aux @ p["fc.weight"].T
    embed = p["embed_tokens.weight"][tokens]
    sees = torch.tensor([[visible(q, k) for k in elements] for q in elements])
    for i in range(c.num_hidden_layers):
        state = _layer(draft, p, f"layers.{i}.", embed, state, sees, anchor + depth)
    return _norm(state, p["norm.weight"], c.rms_norm_eps) @ p["lm_head.weight"].T


def _layer(draft, p, prefix, embed, state, sees, position):
    c = draft.config
    x = _norm(state, p[prefix + "input_layernorm.weight"], c.rms_norm_eps)
    if prefix == "layers.0.":
        left = _norm(embed, p[prefix + "input_layernorm.weight"], c.rms_norm_eps)
        x = torch.cat([left, _norm(state, p[prefix + "hidden_norm.weight"], c.rms_norm_eps)], -1)

    q, k, v = queries_keys_values(x, p, prefix, c, position, draft.rotary)
    return finish_layer(state, attended(q, k, v, sees), p, prefix, c)
