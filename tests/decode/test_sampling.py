"""At temperature 1, texts follow the target's distribution; a broken rule is detected."""

import itertools

import pytest
import torch

from decode.tiny_decode import AUX, HEADS, SPARK, make_block, make_draft, make_target
from fledge.decode import accept
from fledge.decode.speculative import SpeculativeDecoder
from fledge.decode.stops import Stops
from fledge.decode.strategy import TreeShape
from fledge.methods.registry import METHODS

VOCAB, LENGTH, ROWS, PROMPT = 6, 3, 6000, [2, 4, 1]


@pytest.fixture(scope="module")
def small():
    target = make_target(vocab=VOCAB, sharp=0.35, seed=4)
    unsure = make_block(target, width=4, seed=5, **SPARK, confidence_threshold=0.45)
    with torch.no_grad():
        unsure.confidence_head.proj.bias.fill_(0.4)
    return target, {
        **{way: make_draft(target, width=4, seed=5) for way in METHODS["eagle3"].strategies},
        "parallel": make_draft(target, width=4, seed=6, parallel=True),
        "block": make_block(target, width=4, seed=5),
        "markov": make_block(target, width=4, seed=5, **SPARK),
        "markov, with a threshold": unsure,
        **{
            METHODS[kind].own_strategy + f", {kind}": make_block(
                target, width=5, seed=5, **head | {"candidates": 3}
            )
            for kind, head in HEADS.items()
        },
    }


def true_probabilities(target):
    """The target's probability of every text of LENGTH tokens."""
    texts = list(itertools.product(range(VOCAB), repeat=LENGTH))
    with torch.no_grad():
        logits = target(torch.tensor([[*PROMPT, *text] for text in texts])).logits
    logp = logits.log_softmax(-1)[:, len(PROMPT) - 1 : -1]
    return logp.gather(2, torch.tensor(texts)[..., None]).sum((1, 2)).exp()


def p_value(target, draft, method, seed, temperature=1.0):
    decoder = SpeculativeDecoder(
        target, draft, aux_layer_ids=AUX, method=method, num_draft_tokens=2,
        tree=TreeShape(depth=2, width=2, nodes=5),
    )  # fmt: skip
    generations = decoder.generate(
        [PROMPT] * ROWS, Stops(LENGTH), temperature=temperature, seed=seed
    )
    accepted = sum(r.accepted for text in generations for r in text.rounds)
    assert accepted > 0.05 * ROWS
    if decoder.method == "tree" or accept.acceptance_probability is not always:
        assert accepted < 1.9 * ROWS  # tokens were both accepted and rejected
    index = torch.tensor([text.token_ids for text in generations]) @ torch.tensor(
        [VOCAB**2, VOCAB, 1]
    )
    seen = torch.bincount(index, minlength=VOCAB**LENGTH).double()
    expected = true_probabilities(target) * ROWS
    rare = expected < 5  # pooled: the chi-squared approximation needs well-filled cells
    seen = torch.cat([seen[~rare], seen[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    statistic = ((seen - expected) ** 2 / expected.clamp_min(1e-9)).sum()
    freedom = torch.tensor((len(seen) - 1) / 2, dtype=torch.double)
    return float(torch.special.gammaincc(freedom, statistic / 2))


@pytest.mark.parametrize(
    "kind",
    [
        *METHODS["eagle3"].strategies,
        "parallel",
        "block",
        "markov",
        "markov, with a threshold",
        *(f"{METHODS[kind].own_strategy}, {kind}" for kind in HEADS),
    ],
)
def test_texts_follow_the_targets_distribution(small, kind):
    target, drafts = small
    method = kind.partition(",")[0]
    values = [p_value(target, drafts[kind], method, seed) for seed in (0, 1)]
    assert max(values) > 0.05
    assert min(values) > 0.001


def always(p, q):
    return torch.ones_like(p)


def half(p, q):
    return 0.5 * (p / q).clamp_max(1.0)


def target_itself(p, q):
    return p


def no_clamp(p, q):
    left = (p - q).abs()
    return left / left.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("acceptance_probability", always),
        ("acceptance_probability", half),
        ("residual", target_itself),
        ("residual", no_clamp),
    ],
)
@pytest.mark.parametrize("method", ["chain", "parallel"])
def test_a_broken_acceptance_rule_is_detected(small, monkeypatch, name, broken, method):
    target, drafts = small
    monkeypatch.setattr(accept, name, broken)
    assert p_value(target, drafts[method], method, 0) < 1e-6


def test_the_seed_determines_the_text(small):
    target, drafts = small
    decoder = SpeculativeDecoder(target, drafts["chain"], aux_layer_ids=AUX, num_draft_tokens=3)

    def sample_texts(seed):
        generations = decoder.generate([PROMPT] * 4, Stops(20), temperature=1.0, seed=seed)
        return [text.token_ids for text in generations]

    assert sample_texts(1) == sample_texts(1)
    assert sample_texts(1) != sample_texts(2)


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 5e-324])  # the last makes logits overflow
def test_a_cold_temperature_is_greedy(target, drafts, asked, temperature):
    decoder = SpeculativeDecoder(target, drafts["trained"], aux_layer_ids=AUX)
    cold = decoder.generate(asked[:8], Stops(12), temperature=temperature)
    assert [text.token_ids for text in cold] == [
        text.token_ids for text in decoder.generate(asked[:8], Stops(12))
    ]


def test_the_residual_of_equal_distributions_is_the_distribution():
    p = torch.tensor([[0.25, 0.75]])
    torch.testing.assert_close(accept.residual(p, p), p)
