"""The SGLang backend passes the contract suite of all target backends."""

import atexit
import tempfile
from functools import cache
from typing import Any, get_args

import pytest
import torch

import fledge
from fledge.core.batch import Supervision
from target.contract import CHECKS, Case
from target.tiny_models import tiny_model


@cache
def _directory() -> str:
    directory = tempfile.TemporaryDirectory()
    atexit.register(directory.cleanup)
    tiny_model("llama").save_pretrained(directory.name)
    return directory.name


def _sglang(supervision: Supervision) -> fledge.SGLangEagle3TargetModel:
    return fledge.SGLangEagle3TargetModel.from_pretrained(
        _directory(),
        supervision=supervision,
        dtype=torch.float32,
        device="cpu",
        max_total_tokens=256,
    )


CASES = [
    Case(f"sglang-{supervision}", tiny_model("llama"), _sglang, supervision, rtol=1e-4, atol=1e-4)
    for supervision in get_args(Supervision)
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Any, case: Case) -> None:
    check(case)
