"""Emulates CUDA graphs on a CPU: what recording does to a pass's inputs, results and memory."""

from dataclasses import fields, is_dataclass

import torch

from fledge.decode.recorded import Passes


def tensors_of(result):
    if isinstance(result, torch.Tensor):
        return [result]
    if is_dataclass(result):
        return [t for f in fields(result) for t in tensors_of(getattr(result, f.name))]
    assert result is None
    return []


class PretendPass:
    """Warmed up twice; then runs on its own input buffers, into results at fixed addresses."""

    def __init__(self, owner, run, inputs):
        self._owner, self._run = owner, run
        self._inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        for _ in range(2):
            self.results = run(**self._inputs)
        self._caches = owner.caches()
        owner.everything.append(self)

    def __call__(self, inputs):
        assert self._caches == self._owner.caches(), "recorded for memory that has moved since"
        assert {n: t.shape for n, t in inputs.items()} == {
            n: t.shape for n, t in self._inputs.items()
        }
        for name, tensor in inputs.items():
            self._inputs[name].copy_(tensor)
        for other in self._owner.everything:  # memory is shared: this overwrites all results
            for tensor in tensors_of(other.results):
                tensor.fill_(float("nan") if tensor.is_floating_point() else 1 << 40)
        new = tensors_of(self._run(**self._inputs))
        for tensor, value in zip(tensors_of(self.results), new, strict=True):
            tensor.copy_(value)
        return self.results


class PretendPasses(Passes):
    """Records as on a GPU. With `broken` set, every attempt to record a pass fails."""

    broken = False

    def __init__(self, device, *, record=True):
        super().__init__(device, record=record)
        self._can_record = record
        self.everything, self.learned = [], []
        self.caches = list  # returns the addresses of the caches

    def _try_record(self, key, run, inputs):
        function, constants = key[:2]
        self.learned.append((function.__name__, dict(constants).get("used")))
        return super()._try_record(key, run, inputs)

    def _recorded(self, run, inputs):
        if self.broken:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return PretendPass(self, run, inputs)
