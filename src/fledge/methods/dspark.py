"""DSpark: DFlash's block with two small heads. A Markov head conditions each token on the one
before it; a confidence head predicts how likely it is to be accepted."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fledge.core.registry import Registry
from fledge.methods.base import TrainerInputs
from fledge.methods.dflash import BlockMethod

if TYPE_CHECKING:
    from fledge.decode.strategies.base import Strategy
    from fledge.methods.block_section import BlockSection
    from fledge.objective.base import Objective


class Dspark(BlockMethod):
    name = "dspark"
    title = "DSpark"
    strategies: ClassVar[Mapping[str, "type[Strategy]"]] = Registry(
        "strategy", {"markov": "fledge.decode.strategies.block:MarkovBlock"}
    )
    formats: ClassVar[Mapping[str, str]] = {
        "vllm": "dspark-flat",
        "sglang": "dspark-flat",
        "speculators": "speculators-dspark",
    }
    algorithms: ClassVar[Mapping[str, str]] = {"vllm": "dspark", "sglang": "DSPARK"}
    bench_settings: ClassVar[Mapping[str, Any]] = {
        **BlockMethod.bench_settings,
        "sample_from_anchor": True,
        "markov_rank": 256,
        "confidence_head": True,
    }

    @property
    def section(self) -> "type[BlockSection]":
        from fledge.methods.dspark_section import DsparkSection

        return DsparkSection

    def owns(self, config: Any) -> bool:
        return getattr(config, "block_size", None) is not None and bool(
            getattr(config, "markov_rank", 0)
        )

    def objective(self, draft: Any, given: TrainerInputs, **options: Any) -> "Objective[Any]":
        from fledge.objective.dspark import DSparkTrainerModule

        return DSparkTrainerModule(draft, **given.arguments(), **options)


DSPARK = Dspark()
