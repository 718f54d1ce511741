"""The parts of the SGLang backend that need no SGLang: options, rows, extends, refusals."""

import importlib.util
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fledge
from fledge.core.errors import explain
from fledge.target.runner import HiddenTargetRunner
from fledge.target.sglang.engine import VERSIONS, Limits, installed_version
from fledge.target.sglang.runner import (
    SGLangTargetRunner,
    cut_into_extends,
    find_rows,
    server_options,
    sglang_dtype,
)

NAMES = ["device", "page_size", "tp_size", "max_total_tokens", "disable_radix_cache"]


@pytest.fixture
def pretend_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A machine on which pip lists an SGLang of an unknown version."""
    (tmp_path / "sglang-0.6.1.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: sglang\nVersion: 0.6.1\n"
    (tmp_path / "sglang-0.6.1.dist-info" / "METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(tmp_path)
    return "0.6.1"


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is here")
def test_without_sglang_the_error_says_so() -> None:
    with pytest.raises(fledge.BadInput, match=r"SGLang is not installed.*\[sglang\]"):
        fledge.SGLangTargetRunner.build("smollm2-135m")
    with pytest.raises(ImportError, match="SGLang is not installed") as refusal:
        fledge.SGLangEagle3TargetModel.from_pretrained("smollm2-135m")
    assert explain(refusal.value) == (str(refusal.value), 2)


def test_an_unknown_version_is_refused_before_anything_is_loaded(pretend_sglang: str) -> None:
    with pytest.raises(fledge.BadInput, match=r"SGLang 0\.6\.1 .* 0\.5\.9, 0\.5\.23"):
        installed_version()
    with pytest.raises(fledge.BadInput, match=r"0\.6\.1"):
        fledge.SGLangTargetRunner.build("smollm2-135m")


@pytest.mark.parametrize("module", VERSIONS.values())
def test_every_known_version_has_a_module(module: str) -> None:
    assert importlib.util.find_spec(module) is not None


def test_the_runner_implements_every_protocol() -> None:
    names = {*dir(HiddenTargetRunner), "close"}
    public = {name for name in names if not name.startswith("_")}
    assert public <= set(dir(SGLangTargetRunner))


@pytest.mark.parametrize("dtype", [torch.int8, "fp8", torch.float64])
def test_other_dtypes_are_refused(dtype: torch.dtype | str) -> None:
    with pytest.raises(fledge.BadInput, match="SGLang cannot run in"):
        sglang_dtype(dtype)


def test_options_are_passed_on_except_those_that_capture_needs() -> None:
    options = server_options({"page_size": 16, "tp_size": 4}, NAMES, device="cuda")
    assert options["page_size"] == 16
    assert options["tp_size"] == 4
    assert options["disable_radix_cache"]
    assert options["device"] == "cuda"
    assert "attention_backend" not in options
    second = server_options({"device": "cuda:1"}, NAMES, device="cuda:1")
    assert (second["device"], second["base_gpu_id"]) == ("cuda", 1)
    on_cpu = server_options({"max_total_tokens": 77}, NAMES, device="cpu")
    assert on_cpu["attention_backend"] == "torch_native"
    assert on_cpu["max_total_tokens"] == 77
    assert server_options({"disable_radix_cache": True}, NAMES, device="cpu")
    with pytest.raises(fledge.BadInput, match="disable_radix_cache=False does not go with"):
        server_options({"disable_radix_cache": False}, NAMES, device="cuda")
    public_capture = "enable_return_aux_hidden_states"
    with pytest.raises(fledge.BadInput, match=rf"{public_capture}=True does not go.*leave it out"):
        server_options({public_capture: True}, [*NAMES, public_capture], device="cuda")


def test_a_mistyped_option_suggests_the_closest(pretend_sglang: str, monkeypatch) -> None:
    monkeypatch.setitem(VERSIONS, pretend_sglang, "")
    with pytest.raises(fledge.BadInput, match="no argument 'pagesize'; did you mean 'page_size'"):
        server_options({"pagesize": 1}, NAMES, device="cpu")


ROWS = st.lists(st.lists(st.integers(1, 5), max_size=4), min_size=1, max_size=4)


@given(ROWS, st.integers(0, 3), st.integers(0, 3))
def test_documents_are_found_at_their_offsets(
    rows: list[list[int]], before: int, after: int
) -> None:
    """Each row: some padding, documents numbered 1, 2, ..., more padding."""
    width = max(1, before + after + max(sum(lengths) for lengths in rows))
    mask_BT = torch.zeros((len(rows), width), dtype=torch.long)
    expected = []
    for row, lengths in enumerate(rows):
        begin = before
        for number, length in enumerate(lengths, 1):
            mask_BT[row, begin : begin + length] = number
            expected.append((row * width + begin, row * width + begin + length))
            begin += length
    assert find_rows(mask_BT) == expected


@given(st.lists(st.integers(1, 12)), st.integers(1, 4), st.integers(1, 4), st.integers(12, 40))
def test_extends_hold_every_row_once_and_no_more_than_fits(
    lengths: list[int], page_size: int, rows: int, tokens: int
) -> None:
    tokens -= tokens % page_size
    limits = Limits(context_length=12, rows=rows, tokens=max(tokens, 12), page_size=page_size)

    def pages(part: list[int]) -> int:
        return sum(-(-length // page_size) * page_size for length in part)

    cuts = list(cut_into_extends(lengths, limits))
    assert [i for first, last in cuts for i in range(first, last)] == list(range(len(lengths)))
    for first, last in cuts:
        assert last - first <= rows
        assert pages(lengths[first:last]) <= limits.tokens
        if last < len(lengths):  # the next row would not have fit
            one_more = lengths[first : last + 1]
            assert len(one_more) > rows or pages(one_more) > limits.tokens


@pytest.mark.parametrize("limits", [Limits(5, 9, 99, 1), Limits(99, 9, 5, 1), Limits(99, 9, 7, 4)])
def test_a_row_that_fits_nowhere_is_refused(limits: Limits) -> None:
    with pytest.raises(fledge.BadInput, match="a row of 6 tokens does not fit"):
        list(cut_into_extends([1, 6], limits))
