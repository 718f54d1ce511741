"""One target, a few drafts, and the target's plain greedy answers, built once per session."""

import functools
from functools import partial

import pytest

from decode.tiny_decode import (
    HEADS,
    SPARK,
    STOPS,
    make_block,
    make_draft,
    make_eagle1,
    make_mtp,
    make_target,
    plain_greedy,
    random_prompts,
)


@pytest.fixture(scope="session")
def target():
    return make_target()


@pytest.fixture(scope="session")
def drafts(target):
    return {
        "random": make_draft(target, width=25, fc_norm=True),
        "trained": make_draft(target, width=32, fit=40),
        "deep": make_draft(target, layers=2, norm_output=True, fc_norm=True, fit=40),
        "parallel": make_draft(target, layers=2, width=36, parallel=True, fit=40),
    }


@pytest.fixture(scope="session")
def draft_of(target, drafts):
    """A function that returns a draft of any family, made on first use."""
    sliding = {"sliding_layers": [0], "sliding_window": 6}
    fitted = {"layers": 2, "width": 32, "fit": 20}
    makers = {
        "normed": lambda: make_draft(target, **fitted, qk_norm=True),
        "biased": lambda: make_draft(target, **fitted, attention_bias=True, mlp_bias=True),
        "eagle1 random": lambda: make_eagle1(target),
        "eagle1 trained": lambda: make_eagle1(target, fit=60),
        "eagle1 deep": lambda: make_eagle1(target, layers=2, fit=60),
        "mtp random": lambda: make_mtp(target),
        "mtp trained": lambda: make_mtp(target, fit=60),
        "dflash random": lambda: make_block(target, width=30),
        "dflash trained": lambda: make_block(target, fit=30),
        "dflash causal": lambda: make_block(target, causal=True, fit=30, **sliding),
        "dspark": lambda: make_block(target, fit=30, **SPARK),
        **{kind: partial(make_block, target, fit=30, **head) for kind, head in HEADS.items()},
        "dspark sure": lambda: make_block(target, fit=30, **SPARK, confidence_threshold=0.3),
    }
    return functools.cache(lambda kind: drafts[kind] if kind in drafts else makers[kind]())


@pytest.fixture(scope="session")
def asked():
    return random_prompts(200)


@pytest.fixture(scope="session")
def answers(target, asked):
    """The target's greedy answers, decoded without caches or drafts."""
    return [plain_greedy(target, prompt, STOPS) for prompt in asked]
