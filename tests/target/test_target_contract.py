"""Every check of the contract over every in-process backend, in every encoding."""

from functools import cache
from typing import Any, get_args

import pytest
from contract import CHECKS, Case
from hf_runner import HFTargetRunner
from tiny_models import tiny_model

from fledge.core.batch import Supervision
from fledge.target.base import Eagle3TargetBackend
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.runner import RunnerEagle3TargetModel


def _hf(supervision: Supervision) -> Eagle3TargetBackend:
    return HFEagle3TargetModel(_model(), supervision=supervision)


def _runner(supervision: Supervision) -> Eagle3TargetBackend:
    return RunnerEagle3TargetModel(HFTargetRunner(_model()), supervision=supervision)


@cache
def _model(architecture: str = "llama") -> Any:
    return tiny_model(architecture)


CASES = [
    Case(f"{name}-{supervision}", _model(), make, supervision)
    for name, make in {"hf": _hf, "runner": _runner}.items()
    for supervision in get_args(Supervision)
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Any, case: Case) -> None:
    check(case)
