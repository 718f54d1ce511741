"""Tiny targets and drafts in fp64, peaked enough that they sometimes agree."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fledge.decode.stops import Stops
from fledge.decode.strategy import RoundState, Slots, send_rows
from fledge.decode.target import CachedTarget
from fledge.measure.replay import Text, replay
from fledge.methods.base import TrainerInputs
from fledge.methods.block.draft import BlockDraftModel
from fledge.methods.eagle1.draft import LlamaEagle1DraftModel
from fledge.methods.eagle1.objective import Eagle1TrainerModule
from fledge.methods.eagle3.draft import LlamaEagle3DraftModel
from fledge.methods.eagle3.objective import Eagle3TrainerModule
from fledge.methods.mtp.draft import MtpDraftModel
from fledge.methods.registry import method_of

VOCAB, AUX = 40, [0, 1, 2]
STOPS = Stops(max_new_tokens=14, eos_token_ids=frozenset({3}))


SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


def make_target(vocab=VOCAB, seed=0, sharp=6.0, attention=4.0, **options):
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=vocab, num_hidden_layers=3, **SIZES, **options)
    model = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():  # the next token depends mostly on the last one, and somewhat on the rest
        model.lm_head.weight.mul_(sharp * 10)
        model.model.embed_tokens.weight.mul_(30)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(attention)
    return model


def make_draft(target, *, width=None, seed=1, layers=1, parallel=False, fit=0, **options):
    """A random draft, or one fitted for a few steps to the target's own continuations."""
    torch.manual_seed(seed)
    vocab = target.config.vocab_size
    config = LlamaConfig(
        vocab_size=vocab, num_hidden_layers=layers, draft_vocab_size=width or vocab,
        target_hidden_size=16, parallel_drafting=parallel,
        mask_token_id=vocab - 1 if parallel else None, **SIZES, **options,
    )  # fmt: skip
    draft = LlamaEagle3DraftModel(config).double()
    if width:
        draft.set_vocab_mapping(torch.randperm(vocab)[:width].sort().values)
    enlarge(draft)
    draft.copy_embeddings_from_target(target.model.embed_tokens)
    if fit:
        fit_draft(target, draft, steps=fit)
    return draft.eval()


@torch.no_grad()
def enlarge(draft):
    """Large weights, so that its choices differ from slot to slot."""
    for weight in draft.parameters():
        if weight.ndim == 2:
            weight.mul_(8)


def own_texts(target, prompts):
    """The prompts with 20 tokens of the target's own greedy text each."""
    return target.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=20, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip


def fit_draft(target, draft, steps, depths=4):
    """Train on greedy continuations, until draft and target agree often but not always."""
    from fledge.methods.peagle.objective import PEagleTrainerModule
    from fledge.target.hf.model import HFEagle3TargetModel

    if draft.config.parallel_drafting:
        options = {"num_depths": depths, "mask_token_id": draft.config.mask_token_id}
        module = PEagleTrainerModule(draft, **options, **vocabulary_of(target, draft))
    else:
        module = Eagle3TrainerModule(draft, ttt_steps=depths, **vocabulary_of(target, draft))
    rows = own_texts(target, torch.randint(0, target.config.vocab_size, (16, 4)))
    ones = torch.ones_like(rows)
    batch = HFEagle3TargetModel(target, AUX).generate_batch(rows, ones, ones)
    optimizer = torch.optim.Adam(draft.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        module(**batch.to_trainer_inputs()).loss.backward()
        optimizer.step()


def vocabulary_of(target, draft):
    ids = draft.selected_token_ids
    mask = torch.zeros(target.config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return {"selected_token_ids": ids, "selected_token_mask": mask}


def fit_with_head(target, draft, module_type, steps, **options):
    """The same for drafts that learn from the target's hidden states and head."""
    rows = own_texts(target, torch.tensor([[n, n + 1, 2 * n % 40, 7] for n in range(16)]))
    with backend_of(target, draft) as backend:
        batch = backend.generate_batch(rows, torch.ones_like(rows), torch.ones_like(rows))
        head = backend.info().head
    module = module_type(draft, target_head=head, **vocabulary_of(target, draft), **options)
    optimizer = torch.optim.Adam([p for p in draft.parameters() if p.requires_grad], lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        module(**batch.to_trainer_inputs(), seed=step).loss.backward()
        optimizer.step()


def backend_of(target, draft):
    """The target with the layers that the draft reads."""
    from fledge.target.hf.model import HFEagle3TargetModel

    if draft.config.num_aux_hidden_states == 1:
        return HFEagle3TargetModel(target, supervision="hidden", num_aux_layers=1)
    return HFEagle3TargetModel(target, AUX, supervision="hidden")


def make_eagle1(target, *, layers=1, version=1, fit=0):
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=target.config.vocab_size, num_hidden_layers=layers, eagle_version=version,
        num_aux_hidden_states=1, **SIZES,
    )  # fmt: skip
    draft = LlamaEagle1DraftModel(config).double()
    enlarge(draft)
    draft.copy_embeddings_from_target(target.model.embed_tokens)
    draft.copy_head_from_target(target.lm_head)
    if fit:
        fit_with_head(target, draft, Eagle1TrainerModule, fit, token_weight=1.0)
    return draft.eval()


def make_mtp(target, *, fit=0, **options):
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=target.config.vocab_size, num_hidden_layers=1, num_aux_hidden_states=1,
        mtp_family="mimo", attention_bias=True, **(SIZES | options),
    )  # fmt: skip
    draft = MtpDraftModel(config).double()
    enlarge(draft)
    draft.copy_embeddings_from_target(target.model.embed_tokens)
    draft.copy_head_from_target(target.lm_head)
    if fit:
        fit_with_head(target, draft, Eagle3TrainerModule, fit, ttt_steps=4)
    return draft.eval()


_CONVOLVED = {"conv_kernel_size": 2, "conv_group_size": 4, "candidates": 8}
HEADS = {
    "domino": {
        "sample_from_anchor": True, "token_head": "domino", "markov_rank": 6, "gru_hidden_dim": 8,
        "block_size": 4,
    },
    "xpress": {"token_head": "xpress", "markov_rank": 6, "num_jacobi_passes": 3},
    "dflash2": {**_CONVOLVED, "candidate_head": "selector", "selector_rank": 6},
    "lilicorr": {
        **_CONVOLVED, "candidate_head": "lilicorr", "lilicorr_num_heads": 2,
        "lilicorr_factor_dim": 8,
    },
}  # fmt: skip
SPARK = {"sample_from_anchor": True, "markov_rank": 6, "confidence_head": True, "block_size": 4}


def make_block(target, *, fit=0, seed=1, width=None, **options):
    """A DFlash draft, or with `SPARK` a DSpark draft."""
    torch.manual_seed(seed)
    vocab = target.config.vocab_size
    settings = {"block_size": 5, "num_hidden_layers": 2}
    config = LlamaConfig(
        vocab_size=vocab, mask_token_id=vocab - 1, num_aux_hidden_states=3, aux_layer_ids=AUX,
        draft_vocab_size=width or vocab, **SIZES, **(settings | options),
    )  # fmt: skip
    draft = BlockDraftModel(config).double()
    if width:
        draft.set_vocab_mapping(torch.randperm(vocab)[:width].sort().values)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            if weight.ndim == 2:
                in_head = any(word in name for word in ("_head.", "selector", "lilicorr"))
                weight.normal_(std=0.3 if in_head else 0.16)
    draft.copy_embeddings_from_target(target.model.embed_tokens)
    draft.copy_head_from_target(target.lm_head)
    if fit:
        method = method_of(draft.config)

        def module_of(*given, target_head, **options):
            ids, mask = options.pop("selected_token_ids"), options.pop("selected_token_mask")
            return method.objective(*given, TrainerInputs(ids, mask, target_head, None), **options)

        fit_with_head(target, draft, module_of, fit, anchors=1024, gamma=4.0)
    return draft.eval()


def random_prompts(count, *, vocab=VOCAB, seed=0, longest=12):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]


def plain_greedy(model, prompt, stops: Stops):
    """Greedy decoding by definition: one uncached pass over the whole text per token."""
    ids = list(prompt)
    while True:
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        new = ids[len(prompt) :]
        count, finish = stops.cut(new, len(new) - 1)
        if finish:
            return new[:count], finish


def decode(decoder, prompts, batch, stops=STOPS):
    """Continue the prompts in batches of that size."""
    parts = [prompts[begin : begin + batch] for begin in range(0, len(prompts), batch)]
    return [text for part in parts for text in decoder.generate(part, stops)]


def outcomes(generations):
    return [(text.token_ids, text.finish) for text in generations]


def check_replay(backend, live, asked, *, batch_tokens=90):
    """Replay takes the rounds of live decoding, from the text alone; returns the rounds."""
    generations = live.generate(asked, STOPS)
    texts = [Text(text.prompt_ids, text.token_ids) for text in generations]
    replayed = replay(
        backend, live.strategy.draft, texts, num_draft_tokens=live.strategy.shape.num_draft_tokens,
        method=live.method, batch_tokens=batch_tokens,
    )  # fmt: skip
    assert [text.rounds for text in replayed] == [text.rounds for text in generations]
    assert sum(text.other_picks for text in replayed) == 0
    return [round_ for text in replayed for round_ in text.rounds]


def round_state(drafter, aux_BQD, token_BQ, start, count, *, ahead=0):
    """A round state from plain lists of numbers, with room for `ahead` more cache entries."""
    rows = [
        (begin + n, tokens[:n], range(n))
        for begin, n, tokens in zip(start, count, token_BQ.tolist(), strict=True)
    ]
    table_BX = send_rows(rows, drafter.device, width=token_BQ.shape[1])
    used = drafter.room(max(start) + token_BQ.shape[1] + ahead)
    return RoundState(*Slots.of(table_BX), aux_BQD, used)


class NumberedTarget(CachedTarget):
    """The target's passes, called with plain lists of numbers."""

    def begin(self, prompts, **options):
        self.lengths = [len(prompt) for prompt in prompts]
        return super().begin(prompts, **options)

    def step(self, token_BN, layout=None):
        """Append new tokens to each row. They all stay in the cache until `keep` is called."""
        used = self.room(max(self.lengths) + token_BN.shape[1])
        level = len({*self.lengths}) == 1
        return self.read(
            token_BN, torch.tensor(self.lengths), used=used, level=level, layout=layout
        )

    def keep(self, rows, kept):
        """Keep these rows, and of each row these tokens of its last step (ascending)."""
        if rows != list(range(len(self.lengths))):
            self.select(rows)
        lengths = [self.lengths[row] for row in rows]
        most = max(1, *(len(places) for places in kept))
        self.room(max(lengths) + most)
        place_BQ = torch.tensor([[*places, *range(len(places), most)] for places in kept])
        self.settle(torch.tensor(lengths), place_BQ)
        self.lengths = [length + len(places) for length, places in zip(lengths, kept, strict=True)]
