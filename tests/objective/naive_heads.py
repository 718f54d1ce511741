"""Textbook versions of Domino, XPress, DFlash 2 and LiLiCorr: one block, one slot, one pair each.

Written from their papers' definitions. Positions are text positions; nothing is shared with the
code under test but the draft's parameters, its backbone's textbook version and the sampled anchors.
"""

import torch
from torch.nn import functional as F

from objective.naive_block import Naive, _add_counts, block_states, target_probs
from objective.naive_eagle3 import _norm


def _weight(k, gamma):
    return torch.tensor(-k / gamma, dtype=torch.float64).exp()


def _finished(terms, weights, outcomes, drafts):
    out = Naive()
    out.loss = sum(terms) / sum(weights) if terms else torch.zeros(())
    return _add_counts(out, outcomes, drafts)


def _blocks(draft, documents, anchors):
    for document, starts in zip(documents, anchors, strict=True):
        for a in starts:
            yield document, a, block_states(draft, document, a)


def _is_charged(document, label):
    return label < len(document.ids) and bool(document.loss[label])


# --- domino --------------------------------------------------------------------------------------


def domino_logits(draft, states, tokens, depth):
    """Plain and corrected logits, after the tokens x_a .. x_{a+depth}."""
    p, c = dict(draft.named_parameters()), draft.config
    first = 0 if c.sample_from_anchor else 1
    state = states[depth + first]
    plain = draft.lm_head.weight @ state
    if depth < getattr(c, "pure_draft_prefix_len", 1):
        return plain, plain
    memory = torch.zeros(draft.token_head.prefix_gru.hidden_size, dtype=state.dtype)
    for token in tokens[: depth + 1]:
        i = p["domino_head.prefix_gru.weight_ih_l0"] @ draft.embed_tokens.weight[token]
        h = p["domino_head.prefix_gru.weight_hh_l0"] @ memory
        (ir, iz, new), (hr, hz, hn) = i.chunk(3), h.chunk(3)
        z = (iz + hz).sigmoid()
        memory = (1 - z) * (new + (ir + hr).sigmoid() * hn).tanh() + z * memory
    features = F.silu(p["domino_head.embed_proj.0.weight"] @ torch.cat([state, memory]))
    return plain, plain + p["domino_head.embed_proj.2.weight"] @ features


def naive_domino(draft, documents, anchors, *, gamma, plain_weight):
    c = draft.config
    drafts = c.block_size - (0 if c.sample_from_anchor else 1)
    terms, weights, blocks = [], [], []
    for document, a, states in _blocks(draft, documents, anchors):
        outcomes = []
        for k in range(drafts):
            label = a + k + 1
            if not _is_charged(document, label):
                outcomes.append((False, False))
                continue
            plain, logits = domino_logits(draft, states, document.ids[a:].tolist(), k)
            token = int(document.ids[label])
            ce, plain_ce = (-x.log_softmax(-1)[token] for x in (logits, plain))
            terms.append(_weight(k, gamma) * ((1 - plain_weight) * ce + plain_weight * plain_ce))
            weights.append(_weight(k, gamma))
            outcomes.append((True, int(logits.argmax()) == token))
        blocks.append(outcomes)
    return _finished(terms, weights, blocks, drafts)


# --- xpress --------------------------------------------------------------------------------------


def xpress_logits(draft, states, tokens):
    """[K, W] of the drafting slots, given the tokens before them: x_a, then those drafted."""
    p = {
        name.removeprefix("xpress_head."): value
        for name, value in draft.named_parameters()
        if name.startswith("xpress_head.")
    }
    previous = [tokens[0], *tokens[: len(states) - 1]]
    mean = states.mean(0)
    u = [
        p["in_proj.weight"] @ torch.cat([
            p["down_h.weight"] @ h, p["down_g.weight"] @ mean, p["token_embed.weight"][token],
        ])
        for h, token in zip(states, previous, strict=True)
    ]  # fmt: skip
    rows = []
    for s in range(1, len(states)):
        v = u[s] + sum(p["mix_l"][:, s, j] * u[j] for j in range(s + 1))
        mlp = F.silu(p["mlp_gate.weight"] @ v) * (p["mlp_up.weight"] @ v)
        w = v + p["mlp_down.weight"] @ mlp
        rows.append(draft.lm_head.weight @ states[s] + p["readout.weight"] @ w)
    return torch.stack(rows)


def naive_xpress(draft, documents, anchors, *, head, gamma, rounds, round_weight, plain_weight):
    drafts = draft.config.block_size - 1
    terms, weights, blocks = [], [], []
    for document, a, states in _blocks(draft, documents, anchors):
        count = 0
        while count < drafts and _is_charged(document, a + count + 1):
            count += 1
        text = document.ids[a : a + drafts].tolist()
        text += [0] * (drafts - len(text))  # what they are changes nothing that is charged
        plain = states[1:] @ draft.lm_head.weight.T
        first = xpress_logits(draft, states, text)
        passes, picked = [], plain.argmax(-1).tolist()
        for _ in range(rounds):
            passes.append(xpress_logits(draft, states, [text[0], *picked[:-1]]))
            picked = passes[-1].argmax(-1).tolist()
        outcomes = []
        for k in range(count):
            p = target_probs(head, document, a + k)
            top = int(p.argmax())

            def loss(rows, k=k, p=p, top=top):
                q = rows[k].softmax(-1)
                return -0.1 * q[top].log() + 0.45 * (p - q).abs().sum()

            total = loss(first) + plain_weight * loss(plain)
            if passes:
                total = total + round_weight * sum(map(loss, passes)) / len(passes)
            terms.append(_weight(k, gamma) * total)
            weights.append(_weight(k, gamma))
            outcomes.append((True, int(first[k].argmax()) == top))
        blocks.append(outcomes + [(False, False)] * (drafts - count))
    return _finished(terms, weights, blocks, drafts)


# --- dflash 2 ------------------------------------------------------------------------------------


def selector_scores(draft, state, before, tokens, logits):
    p = dict(draft.named_parameters())
    wanted = p["candidate_selector.predecessor_codebook"][before] * (
        p["candidate_selector.hidden_projection.weight"] @ state
    )
    successors = p["candidate_selector.successor_codebook"]
    return torch.stack([logits[b] + wanted @ successors[b] for b in tokens])


def naive_dflash2(
    draft, documents, anchors, *, head, gamma, missing, selector_weight, by_target=None
):
    drafts, count = draft.config.block_size - 1, draft.spec.candidates
    terms, weights, chosen, chosen_weights, blocks = [], [], [], [], []
    for document, a, states in _blocks(draft, documents, anchors):
        outcomes = []
        for k in range(1, drafts + 1):
            if not _is_charged(document, a + k):
                outcomes.append((False, False))
                continue
            logits, label = states[k] @ draft.lm_head.weight.T, int(document.ids[a + k])
            base = -logits.log_softmax(-1)[label]
            if by_target is not None:
                p = target_probs(head, document, a + k - 1)
                label = int(p.argmax())
                base = by_target.definition(logits[None], p[None])[0]
            weight = _weight(k - 1, gamma)
            terms.append(weight * base)
            weights.append(weight)
            outcomes.append((True, int(logits.argmax()) == label))
            tokens = logits.topk(count).indices.tolist()
            if label not in tokens:
                if missing == "skip":
                    continue
                tokens[-1] = label
            before = int(document.ids[a + k - 1])
            scores = selector_scores(draft, states[k], before, tokens, logits)
            chosen.append(-weight * scores.log_softmax(-1)[tokens.index(label)])
            chosen_weights.append(weight)
        blocks.append(outcomes)
    out = _finished(terms, weights, blocks, drafts)
    out.loss = out.loss + selector_weight * sum(chosen) / sum(chosen_weights)
    return out


# --- lilicorr ------------------------------------------------------------------------------------


def lattice_scores(draft, states, context, tokens):
    """Scores of the first slot's candidates [C], and of pairs [S - 1, C, C]. `tokens` [S][C]."""
    c, m = draft.spec, "lilicorr."
    p = {n.removeprefix(m): v for n, v in draft.named_parameters() if n.startswith(m)}

    def linear(name, x):
        return p[name + ".weight"] @ x + p[name + ".bias"]

    def unit(x):
        return x / torch.maximum(x.norm(), torch.tensor(c.lilicorr_vector_eps, dtype=x.dtype))

    slots, count = len(tokens), len(tokens[0])
    items, places = [], []
    for s in range(slots):
        logits = draft.lm_head.weight @ states[s]
        logp = logits.log_softmax(-1)
        for j, token in enumerate(tokens[s]):
            best = max(logp[t] for t in tokens[s])
            numbers = torch.stack([
                logp[token], logp[token].exp(), logp[token] - best,
                torch.tensor(j / (count - 1), dtype=logp.dtype),
                torch.tensor(float(j == 0), dtype=logp.dtype),
            ])  # fmt: skip
            centred = numbers - numbers.mean()
            normed = centred / (numbers.var(unbiased=False) + 1e-5).sqrt()
            normed = normed * p["feature_norm.weight"] + p["feature_norm.bias"]
            mlp = linear("feature_mlp.down_proj", F.silu(linear("feature_mlp.up_proj", normed)))
            e = draft.embed_tokens.weight[token]
            e = linear("token_proj", e) if "token_proj.weight" in p else e
            item = e + linear("pass_hidden_proj", states[s]) + mlp
            items.append(item + p["slot_embedding"][0, 0, s, 0] + p["rank_embedding"][0, 0, 0, j])
            places.append(s)
    x = torch.stack(items)
    heads, middle = c.lilicorr_num_heads, c.block_size - 1
    for number in range(c.lilicorr_num_layers):
        b = f"layers.{number}."
        y = _norm(x, p[b + "attn_norm.weight"], c.rms_norm_eps)
        packed = y @ p[b + "attn.in_proj_weight"].T + p[b + "attn.in_proj_bias"]
        q, k, v = (t.view(len(x), heads, -1) for t in packed.chunk(3, -1))
        rows = []
        for i in range(len(x)):
            parts = []
            for h in range(heads):
                scores = []
                for j in range(len(x)):
                    apart = places[i] - places[j]
                    bias = p["relative_slot_bias"][h, apart + middle]
                    bias = bias + (p["same_slot_bias"][h] if apart == 0 else 0)
                    scores.append(q[i, h] @ k[j, h] / q.shape[-1] ** 0.5 + bias)
                parts.append(torch.stack(scores).softmax(-1) @ v[:, h])
            rows.append(torch.cat(parts))
        out = torch.stack(rows)
        x = x + out @ p[b + "attn.out_proj.weight"].T + p[b + "attn.out_proj.bias"]
        y = _norm(x, p[b + "mlp_norm.weight"], c.rms_norm_eps)
        up = F.silu(y @ p[b + "mlp.up_proj.weight"].T + p[b + "mlp.up_proj.bias"])
        x = x + up @ p[b + "mlp.down_proj.weight"].T + p[b + "mlp.down_proj.bias"]
    z = _norm(x, p["output_norm.weight"], c.rms_norm_eps)
    n = _norm(linear("context_proj", context), p["anchor_norm.weight"], c.rms_norm_eps)
    f = [F.silu(linear("factor_input_proj", torch.cat([row, n, row * n]))) for row in z]
    outs = [unit(linear("out_head", row)) for row in f]
    ins = [unit(linear("in_head", row)) for row in f]
    start, scale = unit(linear("anchor_out_head", n)), c.lilicorr_logit_scale
    first = torch.stack([scale * (start @ ins[j]) for j in range(count)])
    pairs = [
        torch.stack([
            torch.stack([scale * (outs[s * count + i] @ ins[(s + 1) * count + j])
                         for j in range(count)])
            for i in range(count)
        ])
        for s in range(slots - 1)
    ]  # fmt: skip
    return first, pairs


def context_before(draft, document, a):
    """The target's features of the token before position `a`, as all layers read them."""
    p = dict(draft.named_parameters())
    state = document.aux[a - 1] @ p["fc.weight"].T
    return _norm(state, p["hidden_norm.weight"], draft.config.rms_norm_eps)


def naive_lilicorr(draft, documents, anchors, *, head, gamma, pair_weight, target_weight):
    drafts, count = draft.config.block_size - 1, draft.spec.candidates
    terms, weights, chosen, blocks = [], [], [], []
    for document, a, states in _blocks(draft, documents, anchors):
        charged = [_is_charged(document, a + k) for k in range(1, drafts + 1)]
        logits = states @ draft.lm_head.weight.T
        outcomes = []
        for k in range(1, drafts + 1):
            if not charged[k - 1]:
                outcomes.append((False, False))
                continue
            label = int(document.ids[a + k])
            terms.append(-_weight(k - 1, gamma) * logits[k].log_softmax(-1)[label])
            weights.append(_weight(k - 1, gamma))
            outcomes.append((True, int(logits[k].argmax()) == label))
        blocks.append(outcomes)
        if not all(charged):
            continue
        tokens = [logits[k].topk(count).indices.tolist() for k in range(1, drafts + 1)]
        context = context_before(draft, document, a)
        first, pairs = lattice_scores(draft, states[1:], context, tokens)
        before = None
        for k in range(1, drafts + 1):
            label = int(document.ids[a + k])
            if label not in tokens[k - 1]:
                break
            scores = first if before is None else pairs[k - 2][before]
            before = tokens[k - 1].index(label)
            wanted = target_probs(head, document, a + k - 1).log()  # logits, but for a constant
            behind = torch.stack([(wanted[label] - wanted[t]).relu() for t in tokens[k - 1]])
            chosen.append(
                pair_weight * -scores.log_softmax(-1)[before]
                + target_weight * (scores.softmax(-1) * behind).sum()
            )
    out = _finished(terms, weights, blocks, drafts)
    out.loss = out.loss + (sum(chosen) / len(chosen) if chosen else 0)
    return out
