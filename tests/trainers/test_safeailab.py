"""The EAGLE authors' own draft network computes the states of our EAGLE-1 drafts."""

import pytest
import torch
from transformers import LlamaConfig

from fledge import LlamaEagle1DraftModel
from fledge.rollout.plan import plan_rollout
from fledge.rollout.slots import RowMasks

pytestmark = pytest.mark.engine

T, V, D = 23, 31, 16


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("fc_bias", [False, True])
def test_eagle1(layers, fc_bias):
    """At every slot of a row, from the target's state and the next token."""
    cnets = pytest.importorskip("eagle.model.cnets", reason="make test-trainers installs it")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=D, intermediate_size=20, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, eagle_version=1, num_aux_hidden_states=1,
        fc_bias=fc_bias, pad_token_id=0,
    )  # fmt: skip
    draft = LlamaEagle1DraftModel(config).eval()
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    config.rope_scaling = None  # transformers puts the default there, which they do not know
    model = cnets.Model(config, bias=fc_bias).eval()
    state = {
        name: tensor for name, tensor in draft.state_dict().items() if name != "lm_head.weight"
    }
    model.load_state_dict(state)

    hidden, ids = torch.randn(1, T, D), torch.randint(0, V, (1, T))
    ones = torch.ones(1, T, dtype=torch.long)
    plan = plan_rollout(RowMasks(ones, ones), num_depths=1)
    with torch.no_grad():
        [ours] = draft.unroll(plan.on_key_axis(hidden), plan.on_key_axis(ids), plan)
        theirs = model(hidden, ids)[0]
    slot_N = plan.slot_T[plan.depths[0].slot_N]
    assert len(slot_N) == T
    torch.testing.assert_close(ours, theirs[slot_N], rtol=1e-5, atol=1e-5)
    assert ours.std() > 0.1  # not a comparison of zeros
