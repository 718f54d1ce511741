"""Tiny targets and drafts in fp64, peaked enough that they sometimes agree."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fledge.decode.stops import Stops
from fledge.decode.strategy import RoundState, columns, send_rows
from fledge.decode.target import CachedTarget
from fledge.measure.replay import Text, replay
from fledge.methods.eagle3.draft import LlamaEagle3DraftModel

VOCAB, AUX = 40, [0, 1, 2]
STOPS = Stops(max_new_tokens=14, eos_token_ids=frozenset({3}))


def make_target(vocab=VOCAB, seed=0, sharp=6.0, attention=4.0, **options):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, **options,
    )  # fmt: skip
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
        vocab_size=vocab, hidden_size=16, intermediate_size=24, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        draft_vocab_size=width or vocab, target_hidden_size=16,
        parallel_drafting=parallel, mask_token_id=vocab - 1 if parallel else None, **options,
    )  # fmt: skip
    draft = LlamaEagle3DraftModel(config).double()
    if width:
        ids = torch.randperm(vocab)[:width].sort().values
        mask = torch.zeros(vocab, dtype=torch.bool)
        mask[ids] = True
        draft.set_vocab_mapping(ids, mask)
    with torch.no_grad():  # large weights, so that its choices differ from slot to slot
        for weight in draft.parameters():
            if weight.ndim == 2:
                weight.mul_(8)
    draft.copy_embeddings_from_target(target.model.embed_tokens)
    if fit:
        fit_draft(target, draft, steps=fit)
    return draft.eval()


def fit_draft(target, draft, steps, depths=4):
    """Train on greedy continuations, until draft and target agree often but not always."""
    from fledge.methods.eagle3.objective import Eagle3TrainerModule
    from fledge.methods.peagle.objective import PEagleTrainerModule
    from fledge.target.hf.model import HFEagle3TargetModel

    ids = draft.selected_token_ids
    mask = torch.zeros(target.config.vocab_size, dtype=torch.bool)
    mask[ids] = True
    common = {"selected_token_ids": ids, "selected_token_mask": mask}
    if draft.config.parallel_drafting:
        module = PEagleTrainerModule(
            draft, num_depths=depths, mask_token_id=draft.config.mask_token_id, **common
        )
    else:
        module = Eagle3TrainerModule(draft, ttt_steps=depths, **common)
    prompts = torch.randint(0, target.config.vocab_size, (16, 4))
    rows = target.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=20, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    ones = torch.ones_like(rows)
    batch = HFEagle3TargetModel(target, AUX).generate_batch(rows, ones, ones)
    optimizer = torch.optim.Adam(draft.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        module(**batch.to_trainer_inputs()).loss.backward()
        optimizer.step()


def fit_on_own_texts(target, draft, backend, module_of, steps):
    """Train a draft for some steps on the target's own greedy texts; `module_of` makes the trainer
    module from the target's head."""
    prompts = torch.tensor([[n, n + 1, 2 * n % 40, 7] for n in range(16)])
    rows = target.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=20, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with backend:
        batch = backend.generate_batch(rows, torch.ones_like(rows), torch.ones_like(rows))
        module = module_of(backend.info().head)
    optimizer = torch.optim.Adam([p for p in draft.parameters() if p.requires_grad], lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        module(**batch.to_trainer_inputs(), seed=step).loss.backward()
        optimizer.step()


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


def check_lossless(decoder, asked, answers, *, batch, accepts=True):
    """Decoding gives the target's own answers, and, if `accepts`, accepted something and rejected
    something."""
    generations = []
    for begin in range(0, len(asked), batch):
        generations += decoder.generate(asked[begin : begin + batch], STOPS)
    assert [(text.token_ids, text.finish) for text in generations] == answers[: len(asked)]
    for text in generations:
        assert sum(r.emitted for r in text.rounds) == len(text.token_ids) - 1
        assert all(r.accepted <= r.emitted <= r.accepted + 1 for r in text.rounds)
    accepted = [r.accepted for text in generations for r in text.rounds]
    if accepts:
        assert max(accepted) >= 2
        assert min(accepted) == 0
    return accepted


def check_replay(backend, live, asked, *, batch_tokens=90):
    """Replay takes the rounds of live decoding, from the text alone; returns the replays."""
    generations = live.generate(asked, STOPS)
    texts = [Text(text.prompt_ids, text.token_ids) for text in generations]
    replayed = replay(
        backend, live.strategy.draft, texts, num_draft_tokens=live.strategy.shape.num_draft_tokens,
        batch_tokens=batch_tokens,
    )  # fmt: skip
    assert [text.rounds for text in replayed] == [text.rounds for text in generations]
    assert sum(text.other_picks for text in replayed) == 0
    return replayed


def round_state(drafter, aux_BQD, token_BQ, start, count, *, ahead=0):
    """A round state from plain lists of numbers, with room for `ahead` more cache entries."""
    rows = [
        (begin + n, tokens[:n], range(n))
        for begin, n, tokens in zip(start, count, token_BQ.tolist(), strict=True)
    ]
    table_BX = send_rows(rows, drafter.device, width=token_BQ.shape[1])
    used = drafter.room(max(start) + token_BQ.shape[1] + ahead)
    return RoundState(*columns(table_BX), aux_BQD, used)


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
