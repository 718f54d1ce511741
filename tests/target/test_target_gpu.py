"""The target's fast passes on a GPU: compiled, recorded, whole packs in one row, fp8."""

import copy
import warnings

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fledge.bench.train_step import Case, build_batches, build_parts, random_rows
from fledge.data.pack import collate, pack_rows
from fledge.target.hf.loading import Fp8Linear
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.training.optimizer import make_optimizers
from fledge.training.step import train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def small_llama(dtype):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, vocab_size=512, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to("cuda", dtype)


def packs(count):
    rows = random_rows(Case(shape="tiny", seq=600), 60, 70)
    all_packs = pack_rows([len(row.input_ids) for row in rows], 600).packs
    return [collate(rows, all_packs[i : i + 1], 600, pad_id=0) for i in range(count)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("recorded", [True, False])
def test_whole_packs_are_answered_like_separate_documents(dtype, tolerance, recorded):
    model = small_llama(dtype)
    plain = HFEagle3TargetModel(copy.deepcopy(model), supervision="hidden")
    plain.try_one_row = False
    fast = HFEagle3TargetModel(model, supervision="hidden", compile_layers=True)
    fast.record_passes = recorded
    for pack in packs(3):
        want, got = (target.generate_batch(*pack.arguments()) for target in (plain, fast))
        for name in ("aux_hidden_states", "last_hidden_states"):
            w, g = getattr(want, name).double(), getattr(got, name).double()
            assert (w - g).norm() < tolerance * w.norm(), name
            assert not g[pack.attention_mask.cuda() == 0].any()  # padding stays empty
    assert fast.try_one_row
    assert bool(fast._recorded[False].sizes) == recorded
    assert "forward" not in model.model.layers[0].__dict__  # the patch is removed


@pytest.mark.parametrize("recorded", [True, False])
def test_features_equal_those_of_the_answer(recorded):
    model = small_llama(torch.float32)
    target = HFEagle3TargetModel(model, [0, 2, 4], supervision="hidden", compile_layers=True)
    target.record_passes = recorded
    for pack in packs(3):
        for ask in (target.features, target.answer):  # alternating: neither affects the other
            aux = ask(pack).aux_hidden_states
        assert torch.equal(target.features(pack).aux_hidden_states, aux)
        assert target.answer(pack).last_hidden_states.any()
        assert not target.features(pack).last_hidden_states.any()
    assert bool(target._recorded[True].sizes) == recorded


def test_an_fp8_product_matches_its_reference():
    linear = torch.nn.Linear(576, 192, bias=True, device="cuda", dtype=torch.bfloat16)
    fp8_linear, x = Fp8Linear(linear), torch.randn(77, 576, device="cuda", dtype=torch.bfloat16)
    want = fp8_linear.reference(x).float() + linear.bias.float()
    assert (fp8_linear(x).float() - want).norm() < 1e-2 * want.norm()


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dflash", "dspark"])
@pytest.mark.parametrize("documents", [0, 60])
def test_a_step_never_synchronizes(kind, documents):
    """After warm-up, no call of a training step waits for the GPU."""
    case = Case(shape="135m", kind=kind, seq=512, batch=1, documents=documents)
    parts = build_parts(case, torch.device("cuda"))
    batches = build_batches(case, 4)
    assert synchronizations(parts, batches) == []


def test_a_step_with_muon_never_synchronizes():
    case = Case(shape="135m", kind="eagle3", seq=512, batch=1, documents=60)
    parts = build_parts(case, torch.device("cuda"))
    draft = parts.objective.draft_model
    parts.optimizers = make_optimizers(draft, optimizer="muon", lr=1e-4)
    assert synchronizations(parts, build_batches(case, 4)) == []


def synchronizations(parts, batches):
    """Source lines at which the last step waited for the GPU."""
    for batch in batches[:3]:
        train_step(parts, batch, lr=1e-4)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train_step(parts, batches[3], lr=1e-4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [f"{w.filename}:{w.lineno}" for w in caught if "synchron" in str(w.message)]
