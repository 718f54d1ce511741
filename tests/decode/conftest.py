"""One target, a few drafts, and the target's plain greedy answers, built once per session."""

import pytest

from decode.tiny_decode import STOPS, make_draft, make_target, plain_greedy, random_prompts


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
def asked():
    return random_prompts(200)


@pytest.fixture(scope="session")
def answers(target, asked):
    """The target's greedy answers, decoded without caches or drafts."""
    return [plain_greedy(target, prompt, STOPS) for prompt in asked]
