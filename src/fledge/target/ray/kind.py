"""`target.backend=ray`: the target in workers on a Ray cluster. Imports neither torch nor Ray when
loaded."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError, model_validator

from fledge.core.errors import nearest
from fledge.core.settings import NonNegative, PositiveCount, Text, refused
from fledge.target.kinds import LoadedTarget, TargetKind, kind_of, loaded_sections

if TYPE_CHECKING:
    import torch

    from fledge.target.ray.client import RayEagle3TargetModel


class RayTarget(LoadedTarget):
    """The target in workers on a Ray cluster, which places and restarts them (extra: cluster)."""

    backend: Literal["ray"] = "ray"
    """Targets and drafts on different machines of one cluster; each worker holds a whole target."""

    address: Text = "auto"
    """The cluster: HOST:PORT of its head; auto: the one that this machine is part of."""

    workers: PositiveCount = 1
    """Target workers, all alike; the ranks of a run share them."""

    worker: dict[str, Any] = Field(default_factory=dict)
    """What a worker is: backend (hf, vllm or sglang; default hf) and further keys of that kind."""

    worker_cpus: NonNegative = 1.0
    """CPUs that the cluster sets aside for a worker."""

    worker_gpus: NonNegative | None = None
    """GPUs of a worker; null: as many as worker.tp_size where the cluster has any."""

    placement: Literal["spread", "pack"] = "spread"
    """Workers on as many machines as possible, or on as few."""

    prefetch: PositiveCount = 2
    """Batches in flight at each worker, requested in advance; the ranks share them."""

    wait_s: NonNegative = 300.0
    """How long to wait while no worker answers before the run stops, resumable."""

    @model_validator(mode="after")
    def _check_worker(self) -> "RayTarget":
        self.inner()
        return self

    def inner(self) -> LoadedTarget:
        """The section of the target that a worker loads."""
        kinds, name = loaded_sections(), self.worker.get("backend", "hf")
        if name not in kinds:
            why = f"one of {', '.join(kinds)} is wanted"
            raise refused("worker", "backend", value=name, why=why)
        shared, fields = set(LoadedTarget.model_fields), kinds[name].model_fields
        for key in self.worker:
            if key != "backend" and (key in shared or key not in fields):
                fix = "it belongs beside worker, under target" if key in shared else ""
                fix = fix or nearest(key, [field for field in fields if field not in shared])
                raise refused("worker", key, value=self.worker[key], why=fix)
        common = {key: getattr(self, key) for key in shared - {"backend"}}
        try:
            section = kinds[name].model_validate({**self.worker, **common, "backend": name})
        except ValidationError as error:
            first = error.errors()[0]
            place = ("worker", *map(str, first["loc"]))
            raise refused(*place, value=first["input"], why=first["msg"]) from error
        cut = kind_of(section).cut(section)
        if cut is not None and cut.ranks > 1:
            why = "a worker is one process; to split a target use vllm or sglang with tp_size"
            raise refused("worker", value=self.worker, why=why)
        return section


class RayKind(TargetKind[RayTarget]):
    name = "ray"
    section = RayTarget
    shows_any_layers = True

    def open(
        self, section: RayTarget, *, device: "torch.device", aux_layers: int
    ) -> "RayEagle3TargetModel":
        from fledge.target.ray.client import RayEagle3TargetModel

        on_gpu = device.type == "cuda"
        return RayEagle3TargetModel(section, aux_layers=aux_layers, pin_memory=on_gpu)

    @contextmanager
    def placed(
        self, section: RayTarget, *, aux_layers: int, name: str
    ) -> Iterator[Mapping[str, str]]:
        """Start workers that outlive the ranks, so that restarted ranks do not reload the
        target."""
        from fledge.target.ray.placing import FLEET_VARIABLE, start_fleet

        with start_fleet(section, aux_layers=aux_layers, name=name):
            yield {FLEET_VARIABLE: name}

    def dtype(self, section: RayTarget, device: "torch.device") -> "torch.dtype":
        inner = section.inner()
        return kind_of(inner).dtype(inner, device)

    def asked_once(self, section: RayTarget) -> RayTarget:
        inner = section.inner()
        inner = kind_of(inner).asked_once(inner)
        specific = inner.model_dump(exclude=set(LoadedTarget.model_fields))
        return section.model_copy(update={"worker": {"backend": inner.backend, **specific}})


RAY = RayKind()
