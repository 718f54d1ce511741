"""Real vLLM engines, shared by the tests: starting one takes seconds, and only one can be open."""

import os

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process: tests inspect them

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.cases import engine_target, saved
from fledge.target.vllm.runner import VLLMTargetRunner


def lent(runner: Any) -> Any:
    """A view of an open runner whose `close` leaves it open."""
    kind = type("Lent", (type(runner),), {"close": lambda self: None})
    borrowed = kind.__new__(kind)
    borrowed.__dict__ = runner.__dict__  # shared: changes of the engine show in both
    return borrowed


class Engines:
    """One engine at a time: requesting another target closes the open one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key: Any = None
        self._runner: Any = None

    def runner(self, target: str | Path, **options: Any) -> Any:
        """`target`: the name of a tiny model of `cases`, or a directory."""
        key = (target, sorted(options.items()))
        if self._runner is None or self._key != key:
            self.close()
            self._runner = VLLMTargetRunner.build(self.saved(target), dtype="float32", **options)
            self._key = key
        return lent(self._runner)

    def saved(self, target: str | Path) -> Path:
        if isinstance(target, Path):
            return target
        directory = self._directory / target
        return directory if directory.is_dir() else saved(engine_target(target), directory)

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
        self._runner = None


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    engines = Engines(tmp_path_factory.mktemp("targets"))
    yield engines
    engines.close()


@pytest.fixture
def norms_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM normalizes the context keys of all layers at once, with one row of weights per layer.
    Its CPU kernel (0.32) uses the first row for all; on a GPU each layer uses its own, as here."""
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normalize(self: Any, all_k: torch.Tensor) -> torch.Tensor:
        layers = zip(all_k, self._k_norm_weights, strict=True)
        size, eps = all_k.shape[-1:], self._rms_norm_eps
        normed = [torch.nn.functional.rms_norm(k, size, weight, eps) for k, weight in layers]
        return torch.stack(normed)

    monkeypatch.setattr(DFlashQwen3Model, "_normalize_context_k", normalize)
