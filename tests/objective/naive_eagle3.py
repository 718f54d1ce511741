"""A textbook implementation of EAGLE-3's training-time test, and batches for both versions.

Dense masks, explicit concatenation, tensors shifted at every step, one padded row per document.
The only things shared with the code under test are the draft's parameters and rotary table.
"""

from dataclasses import dataclass, field

import torch
from torch.nn import functional as F
from transformers import LlamaConfig

from fledge.core.head import TargetHead, target_distribution
from fledge.methods.eagle3.draft import LlamaEagle3DraftModel
from fledge.rollout.slots import RowMasks

V, W, D, E = 31, 17, 10, 12


def make_draft(*, dtype=torch.float64, seed=0, spread=0.3, **changes):
    torch.manual_seed(seed)
    settings = {
        "vocab_size": V, "hidden_size": E, "intermediate_size": 20, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
        "max_position_embeddings": 64, "draft_vocab_size": W, "target_hidden_size": D,
    }  # fmt: skip
    draft = LlamaEagle3DraftModel(LlamaConfig(**(settings | changes))).to(dtype)
    with torch.no_grad():
        for parameter in draft.parameters():  # norms too, so that a missing norm is noticed
            parameter.add_(torch.randn_like(parameter) * spread)
    return draft


def vocabulary(width=W, seed=1):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(V, generator=generator)[:width].sort().values
    mask = torch.zeros(V, dtype=torch.bool)
    mask[ids] = True
    return ids, mask


def make_head(dtype=torch.float64, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return TargetHead(torch.randn(V, D, generator=generator, dtype=dtype))


@dataclass
class Document:
    """One unshifted conversation: its tokens and the target's states at each of them."""

    ids: torch.Tensor
    loss: torch.Tensor
    aux: torch.Tensor
    hidden: torch.Tensor


def make_documents(lengths, *, seed=3, supervised=0.6, dtype=torch.float64, aux=3 * D, hidden=D):
    g = torch.Generator().manual_seed(seed)
    return [
        Document(
            torch.randint(0, V, (n,), generator=g),
            (torch.rand(n, generator=g) < supervised).long(),
            torch.randn(n, aux, generator=g, dtype=dtype),
            torch.randn(n, hidden, generator=g, dtype=dtype),
        )
        for n in lengths
    ]


def reference_loss(logits, probs, charged, loss):
    """The loss of one depth: the mean over charged rows; 0 if there are none."""
    logits, probs = logits[charged], probs[charged].to(logits.dtype)
    return loss.definition(logits, probs).sum() / max(len(logits), 1)


def shift(x):
    """Shift each row left by one position, with a zero at the end."""
    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1)


def _pad(tensors, width):
    return torch.stack([F.pad(x, (0, 0) * (x.ndim - 1) + (0, width - len(x))) for x in tensors])


def padded_batch(documents, width=None):
    """One document per row, as `Eagle3TargetBatch.to_trainer_inputs` emits it (hidden encoding)."""
    width = width or max(len(d.ids) for d in documents)
    return {
        "input_ids": shift(_pad([d.ids for d in documents], width)),
        "attention_mask": _pad([torch.ones_like(d.ids) for d in documents], width),
        "loss_mask": shift(_pad([d.loss for d in documents], width)),
        "aux_hidden_states": _pad([d.aux for d in documents], width),
        "target_last_hidden_states": shift(_pad([d.hidden for d in documents], width)),
    }


def masks_of(batch):
    """The masks and packing metadata from which a plan is made."""
    packing = [batch.get(name) for name in ("position_ids", "seq_lens", "doc_remaining")]
    return RowMasks(batch["loss_mask"], batch["attention_mask"], *packing)


def packed_batch(rows, width):
    """Several documents per row; the trailing padding is folded into the last document."""
    max_documents = max(len(row) for row in rows)
    batch = {}
    joined = [
        Document(
            *(torch.cat([getattr(d, f) for d in row]) for f in ("ids", "loss", "aux", "hidden"))
        )
        for row in rows
    ]
    batch |= padded_batch(joined, width)
    seq_lens = torch.zeros(len(rows), max_documents, dtype=torch.long)
    position_ids = torch.zeros(len(rows), width, dtype=torch.long)
    doc_remaining = torch.zeros(len(rows), width, dtype=torch.long)
    for r, row in enumerate(rows):
        begin = 0
        for i, d in enumerate(row):
            n = len(d.ids)
            seq_lens[r, i] = n
            position_ids[r, begin:] = torch.arange(width - begin)
            doc_remaining[r, begin : begin + n] = torch.arange(n - 1, -1, -1)
            begin += n
        seq_lens[r, len(row) - 1] += width - begin
    return batch | {
        "seq_lens": seq_lens, "position_ids": position_ids, "doc_remaining": doc_remaining,
    }  # fmt: skip


def with_logits(batch, head):
    batch = dict(batch)
    hidden = batch.pop("target_last_hidden_states")
    return batch | {
        "target_logits": head.logits(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
    }


def with_probs(batch, head, ids, mask):
    batch = with_logits(batch, head)
    logits = batch.pop("target_logits")
    probs, covered = target_distribution(logits.flatten(0, 1), ids, mask)
    position_mask = covered.view(logits.shape[:2]) & batch["loss_mask"].bool()
    return batch | {
        "target_probs": probs.unflatten(0, logits.shape[:2]),
        "position_mask": position_mask[..., None],
    }


def _norm(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _rope(x, position, rotary):  # x [B, heads, T, C]
    cos, sin = rotary(position, x.dtype)
    n = cos.shape[-1]
    a, b = x[..., : n // 2], x[..., n // 2 : n]
    return torch.cat([x[..., :n] * cos + torch.cat([-b, a], -1) * sin, x[..., n:]], -1)


def _times(x, p, name):
    """Apply a projection, with its bias if it has one."""
    return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))


def queries_keys_values(x, p, prefix, c, position, rotary):
    """[..., heads, T, C] each, from x [..., T, E]; keys and values are repeated for their heads."""

    def heads(name, count):
        out = _times(x, p, f"{prefix}self_attn.{name}_proj").unflatten(-1, (count, -1))
        norm = p.get(f"{prefix}self_attn.{name}_norm.weight")  # over the channels of a head
        return (out if norm is None else _norm(out, norm, c.rms_norm_eps)).transpose(-2, -3)

    q, k, v = heads("q", c.num_attention_heads), *(heads(n, c.num_key_value_heads) for n in "kv")
    repeat = c.num_attention_heads // c.num_key_value_heads
    q, k = _rope(q, position, rotary), _rope(k, position, rotary)
    return q, k.repeat_interleave(repeat, -3), v.repeat_interleave(repeat, -3)


def attended(q, k, v, visible):
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~visible, float("-inf"))
    return scores.softmax(-1) @ v


def finish_layer(state, out, p, prefix, c):
    """Output projection and MLP, with their residuals."""
    out = out.transpose(-2, -3).flatten(-2)
    state = state + _times(out, p, prefix + "self_attn.o_proj")
    y = _norm(state, p[prefix + "post_attention_layernorm.weight"], c.rms_norm_eps)
    gated = F.silu(_times(y, p, prefix + "mlp.gate_proj")) * _times(y, p, prefix + "mlp.up_proj")
    return state + _times(gated, p, prefix + "mlp.down_proj")


@dataclass
class Naive:
    """What a textbook version computes: its loss, and counts per depth."""

    loss: torch.Tensor | None = None
    charged: list = field(default_factory=list)
    correct: list = field(default_factory=list)
    hits: list = field(default_factory=list)
    valid: list = field(default_factory=list)


def naive_eagle3(draft, batch, *, ids, mask, steps, depth_loss, decay=0.8):
    """`batch`: padded, in logits encoding. `depth_loss(logits, probs, charged)` scores a depth."""
    c = draft.config
    p = dict(draft.named_parameters())
    tokens, loss_mask = batch["input_ids"], batch["loss_mask"].bool()
    rows, width = tokens.shape
    flat_probs, flat_covered = target_distribution(batch["target_logits"].flatten(0, 1), ids, mask)
    probs = flat_probs.unflatten(0, (rows, width))
    covered = flat_covered.view(rows, width)
    aux = batch["aux_hidden_states"]
    if c.fc_norm:
        chunks = aux.chunk(3, dim=-1)
        aux = torch.cat(
            [_norm(x, p[f"fc_norm.{i}.weight"], c.rms_norm_eps) for i, x in enumerate(chunks)], -1
        )
    state = aux @ p["fc.weight"].T
    causal = torch.ones(width, width).tril().bool()
    visible = causal[None] & batch["attention_mask"].bool()[:, None]  # [B, T, T]
    caches = [[] for _ in range(c.num_hidden_layers)]
    total, weights = 0.0, sum(decay**k for k in range(steps))
    out = Naive()
    alive, valid = torch.ones_like(loss_mask), torch.ones_like(loss_mask)
    for k in range(steps):
        embed = p["embed_tokens.weight"][tokens]
        for i in range(c.num_hidden_layers):
            state = _naive_layer(draft, p, f"layers.{i}.", embed, state, visible, caches[i], k)
        normed = _norm(state, p["norm.weight"], c.rms_norm_eps)
        if c.norm_output:
            state = normed
        logits = normed @ p["lm_head.weight"].T
        charged = loss_mask & covered
        total = total + decay**k * depth_loss(
            logits.flatten(0, 1), probs.flatten(0, 1), charged.flatten()
        )
        correct = (logits.argmax(-1) == probs.argmax(-1)) & charged
        alive, valid = alive & correct, valid & loss_mask
        out.correct.append(int(correct.sum()))
        out.charged.append(int(charged.sum()))
        out.hits.append(int(alive.sum()))
        out.valid.append(int(valid.sum()))
        tokens, loss_mask, covered, probs = map(shift, (tokens, loss_mask, covered, probs))
    out.loss = total / weights
    return out


def _naive_layer(draft, p, prefix, embed, state, visible, cache, k):
    c = draft.config
    t = state.shape[1]
    if prefix == "layers.0.":
        left = _norm(embed, p[prefix + "input_layernorm.weight"], c.rms_norm_eps)
        right = _norm(state, p[prefix + "hidden_norm.weight"], c.rms_norm_eps)
        x = torch.cat([left, right], -1)
        if c.norm_before_residual:
            state = right
    else:
        x = _norm(state, p[prefix + "input_layernorm.weight"], c.rms_norm_eps)

    q, *pair = queries_keys_values(x, p, prefix, c, torch.arange(t) + k, draft.rotary)
    cache.append(pair)
    scores = q @ cache[0][0].transpose(-1, -2) / c.head_dim**0.5
    scores = [scores.masked_fill(~visible[:, None], -1e30)]
    scores += [(q * keys).sum(-1, keepdim=True) / c.head_dim**0.5 for keys, _ in cache[1:]]
    weight = torch.cat(scores, -1).softmax(-1)
    out = weight[..., :t] @ cache[0][1]
    for j, (_, values) in enumerate(cache[1:]):
        out = out + weight[..., t + j, None] * values
    return finish_layer(state, out, p, prefix, c)


def check_autocast(make, batch, **extra):
    """Check the forward pass under torch.autocast, as many training loops run it: the whole step
    uses autocast's dtype, unless `make(compute_dtype)` was given a dtype."""

    def step(compute_dtype, *, autocast):
        module = make(compute_dtype)
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = module(**batch, **extra)
        out.loss.backward()
        return [out.loss.detach(), *(p.grad.clone() for p in module.draft_model.parameters())]

    low, full = (step(dtype, autocast=False) for dtype in (torch.bfloat16, torch.float32))
    assert not torch.equal(low[0], full[0])
    for dtype, expected in ((None, low), (torch.float32, full)):
        assert all(map(torch.equal, step(dtype, autocast=True), expected))
