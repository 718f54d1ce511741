"""A textbook implementation of DFlash and DSpark: one document, one block, one slot at a time.

A block is a list of tokens, visibility is decided key by key, and every loss is a sum over Python
lists. Positions are text positions; nothing is shifted. The only things shared with the code under
test are the draft's parameters, its rotary table and the sampled anchors.
"""

from functools import partial

import torch
from transformers import LlamaConfig

from fledge.methods.block.draft import BlockDraftModel
from objective.naive_eagle3 import (
    E,
    Naive,
    V,
    _norm,
    attended,
    finish_layer,
    make_documents,
    queries_keys_values,
)

MASK_ID, NUM_AUX = 30, 2


def make_block_draft(*, dtype=torch.float64, seed=0, spread=0.3, tables=True, **changes):
    torch.manual_seed(seed)
    settings = {
        "vocab_size": V, "hidden_size": E, "intermediate_size": 20, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
        "max_position_embeddings": 64, "num_aux_hidden_states": NUM_AUX, "block_size": 4,
        "mask_token_id": MASK_ID,
    }  # fmt: skip
    draft = BlockDraftModel(LlamaConfig(**(settings | changes))).to(dtype)
    with torch.no_grad():
        for parameter in draft.parameters():  # norms too, so that a missing norm is noticed
            parameter.add_(torch.randn_like(parameter) * spread)
    if tables:
        draft.copy_embeddings_from_target(Table(V, dtype))
        if draft.selected_token_ids is not None:
            draft.copy_head_from_target(Table(V, dtype))
    return draft


def make_spark_draft(**changes):
    heads = {"sample_from_anchor": True, "markov_rank": 5, "confidence_head": True}
    return make_block_draft(**(heads | changes))


def make_head_draft(*, new=False, **changes):
    """With one of the other heads; all weights are random unless it is `new`."""
    return make_block_draft(spread=0.0 if new else 0.3, **changes)


class Table:
    """A target's embedding or head."""

    def __init__(self, rows, dtype, seed=8):
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(rows, E, generator=generator, dtype=torch.float64).to(dtype)


make_block_documents = partial(make_documents, supervised=0.75, aux=NUM_AUX * E, hidden=E)


def candidates(document):
    """Positions where a block may start: itself and its successor supervised, and not the first."""
    loss = document.loss.tolist()
    return [a for a in range(1, len(loss) - 1) if loss[a] and loss[a + 1]]


def sees(query, key, anchor, *, causal, window, both=False):
    """Whether the slot at position `query` attends to position `key`: keys before the anchor are
    context, the others belong to the block."""
    if window is not None and query - key >= window:
        return False
    return key < anchor or not (causal or (window is not None and not both)) or key <= query


def block_states(draft, document, anchor):
    """States [slots, E] of one block, after the final norm."""
    c, p = draft.config, dict(draft.named_parameters())
    eps, size = c.rms_norm_eps, c.block_size
    context = _norm(document.aux[:anchor] @ p["fc.weight"].T, p["hidden_norm.weight"], eps)
    tokens = [int(document.ids[anchor]), *[c.mask_token_id] * (size - 1)]
    x = torch.stack([draft.embed_tokens.weight[token] for token in tokens])
    positions = list(range(anchor + size))
    both = getattr(c, "sliding_both_ways", False)
    for i in range(c.num_hidden_layers):
        prefix = f"layers.{i}."
        y = _norm(x, p[prefix + "input_layernorm.weight"], eps)
        gates = None
        if convolved := prefix + "attention_conv.base_kernel" in p:
            gates, y = convolve_in(y, p, prefix + "attention_conv.")
        rows = torch.cat([context, y])  # no layer norm on the context
        window = c.sliding_window if i in c.sliding_layers else None
        q, k, v = queries_keys_values(rows, p, prefix, c, torch.tensor(positions), draft.rotary)
        visible = torch.tensor([
            [
                sees(anchor + j, u, anchor, causal=c.causal, window=window, both=both)
                for u in positions
            ]
            for j in range(size)
        ])  # fmt: skip
        seen = attended(q[:, anchor:], k, v, visible)
        if not convolved:
            x = finish_layer(x, seen, p, prefix, c)
            continue
        x = x + convolve(
            seen.transpose(-2, -3).flatten(-2) @ p[prefix + "self_attn.o_proj.weight"].T,
            gates[1],
            p[prefix + "attention_conv.base_kernel"][1],
        )
        y = _norm(x, p[prefix + "post_attention_layernorm.weight"], eps)
        gates, y = convolve_in(y, p, prefix + "mlp_conv.")
        gate, up, down = (p[f"{prefix}mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        z = (torch.nn.functional.silu(y @ gate.T) * (y @ up.T)) @ down.T
        x = x + convolve(z, gates[1], p[prefix + "mlp_conv.base_kernel"][1])
    return _norm(x, p["norm.weight"], eps)


def convolve(x, gates, base):
    """y_s[c] = sum_t (base[t, c] + d_s[t, g]) x_{s-t}[c]; `gates` [slots, T, G]"""
    slots, size = x.shape
    taps, groups = gates.shape[1:]
    rows = []
    for s in range(slots):
        row = torch.zeros(size, dtype=x.dtype)
        for t in range(taps):
            if s - t >= 0:
                gate = gates[s, t].repeat_interleave(size // groups)
                row = row + (base[t] + gate) * x[s - t]
        rows.append(row)
    return torch.stack(rows)


def convolve_in(x, p, prefix):
    """The gates of both sides [2, slots, T, G], and the sublayer's input."""
    base = p[prefix + "base_kernel"]
    gates = (x @ p[prefix + "kernel_projection.weight"].T).view(len(x), 2, base.shape[1], -1)
    return gates.transpose(0, 1), convolve(x, gates[:, 0], base[0])


def target_probs(head, document, position):
    """The target's next-token distribution, in float32 as everywhere."""
    return head.logits(document.hidden[position]).float().softmax(-1).double()


def dpace_weights(probabilities):
    """w_k = sum over m >= k of the product of the smoothed probabilities up to m."""
    smooth = [0.5 * q + 0.5 for q in probabilities]
    cumulative = [torch.stack(smooth[: m + 1]).prod() for m in range(len(smooth))]
    return [torch.stack(cumulative[k:]).sum() for k in range(len(smooth))]


def naive_dflash(draft, documents, anchors, *, head, row_loss, gamma=None):
    """Terms are `row_loss(logits, label, probs)`, weighted by `gamma`, or by D-PACE if None."""
    drafts = draft.config.block_size - 1
    out, terms, weights = Naive(), [], []
    block_outcomes = []
    for document, starts in zip(documents, anchors, strict=True):
        for a in starts:
            states = block_states(draft, document, a)
            charged_slots, scored, outcomes = [], [], []
            for k in range(1, drafts + 1):  # slot k predicts token a + k; slot 0 is not charged
                label = a + k
                is_charged = label < len(document.ids) and bool(document.loss[label])
                if not is_charged:
                    outcomes.append((False, False))
                    continue
                logits = states[k] @ draft.lm_head.weight.T
                probs = target_probs(head, document, label - 1)
                loss, hit = row_loss(logits, int(document.ids[label]), probs)
                scored.append((k, loss, logits.softmax(-1)[document.ids[label]].detach()))
                charged_slots.append(k)
                outcomes.append((True, hit))
            if gamma is None:
                block_weights = dpace_weights([prob for _, _, prob in scored]) if scored else []
            else:
                block_weights = [
                    torch.tensor(-(k - 1) / gamma, dtype=torch.float64).exp() for k in charged_slots
                ]
            terms += [
                loss * weight for (_, loss, _), weight in zip(scored, block_weights, strict=True)
            ]
            weights += block_weights
            block_outcomes.append(outcomes)
    out.loss = sum(terms) / sum(weights) if terms else torch.zeros(())
    return _add_counts(out, block_outcomes, drafts)


def naive_dspark(draft, documents, anchors, *, head, gamma, text, distance, confidence):
    p, drafts = dict(draft.named_parameters()), draft.config.block_size
    out, terms, weights, block_outcomes = Naive(), [], [], []
    for document, starts in zip(documents, anchors, strict=True):
        for a in starts:
            states = block_states(draft, document, a)
            outcomes = []
            for k in range(drafts):  # slot k predicts token a + k + 1
                label = a + k + 1
                if label >= len(document.ids) or not document.loss[label]:
                    break  # only the contiguous supervised prefix
                previous = p["markov_head.markov_w1.weight"][document.ids[label - 1]]
                logits = states[k] @ draft.lm_head.weight.T
                logits = logits + p["markov_head.markov_w2.weight"] @ previous
                q, target_q = logits.softmax(-1), target_probs(head, document, label - 1)
                cross_entropy = -q[document.ids[label]].log()
                l1_distance = (q - target_q).abs().sum()
                head_input = torch.cat([states[k], previous])
                logit = (
                    p["confidence_head.proj.weight"][0] @ head_input
                    + p["confidence_head.proj.bias"][0]
                )
                acceptance = (1 - 0.5 * l1_distance).detach()
                predicted = logit.sigmoid()
                bce = -(acceptance * predicted.log() + (1 - acceptance) * (1 - predicted).log())
                weight = torch.tensor(-k / gamma, dtype=torch.float64).exp()
                terms.append(
                    weight * (text * cross_entropy + distance * l1_distance + confidence * bce)
                )
                weights.append(weight)
                outcomes.append((True, int(logits.argmax()) == int(document.ids[label])))
            block_outcomes.append(outcomes + [(False, False)] * (drafts - len(outcomes)))
    out.loss = sum(terms) / sum(weights) if terms else torch.zeros(())
    return _add_counts(out, block_outcomes, drafts)


def _add_counts(out, blocks, drafts):
    for k in range(drafts):
        out.charged.append(sum(block[k][0] for block in blocks))
        out.correct.append(sum(block[k][0] and block[k][1] for block in blocks))
        out.valid.append(sum(all(charged for charged, _ in block[: k + 1]) for block in blocks))
        out.hits.append(
            sum(all(charged and hit for charged, hit in block[: k + 1]) for block in blocks)
        )
    return out
