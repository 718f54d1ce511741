"""The table of docs/performance.md: the named steps, one after the other, with the ceiling of the
same machine in the same run."""

import gc
from collections.abc import Iterable, Iterator, Mapping

import torch

from fledge.bench.train_step import Case, StepFigures, measure_step

CASES: Mapping[str, Case] = {
    "EAGLE-3, 8B, 4 x 2048": Case("8b", batch=4),
    "the same, fp8 target, depth_keep 0.7": Case("8b", batch=4, fp8=True, depth_keep=0.7),
    "the same, second epoch, states in host memory": Case("8b", batch=4, kept="host"),
    "EAGLE-3, 8B, 1 x 32,768": Case("8b", seq=32_768),
    "EAGLE-3, 1B, 8 x 2048": Case("1b", batch=8),
    "EAGLE-3, 135M, one pack of 16,384": Case("135m", seq=16_384, documents=250),
    "the same, second epoch, states on the device": Case(
        "135m", seq=16_384, documents=250, kept="device"
    ),
    "P-EAGLE, 8B, 2 x 2048, 8 depths, 4 layers": Case("8b", "peagle", batch=2),
    "DFlash, 8B, 4 x 2048": Case("8b", "dflash", batch=4),
    "DSpark, 8B, 4 x 2048": Case("8b", "dspark", batch=4),
}
COLUMNS = (
    *("step", "tokens/s", "step ms", "target / supervision / forward / backward / update ms"),
    *("slowest ms", "first step s", "above GiB", "share of ceiling"),
)


def compare(
    device: torch.device, cases: Mapping[str, Case] = CASES, *, steps: int, warmup: int
) -> Iterator[tuple[str, StepFigures]]:
    """Each in turn; the one before it is gone when the next begins."""
    for name, case in cases.items():
        yield name, measure_step(case, device, steps=steps, warmup=warmup)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def table_row(name: str, figures: StepFigures) -> list[str]:
    values = figures.to_json()
    above, share = values["peak_above_gib"], values["share_of_ceiling"]
    return [
        name,
        f"{values['tokens_per_s']:,}",
        f"{values['step_ms']:,.0f}",
        " / ".join(f"{ms:,.0f}" for ms in values["phases_ms"].values()),
        f"{values['slowest_step_ms']:,.0f}",
        f"{values['first_step_s']}",
        "" if above is None else f"{above:.2f}",
        "" if share is None else f"{share:.0%}",
    ]


def markdown_line(cells: Iterable[str]) -> str:
    """As in docs/performance.md."""
    return f"| {' | '.join(cells)} |"


HEAD = (
    markdown_line(COLUMNS),
    markdown_line(["---", "--:", "--:", "---", *["--:"] * 4]),
)
