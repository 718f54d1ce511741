"""`fledge bench`: how fast a training step and decoding run here, and a draft on a server."""

from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from fledge.cli import bench_decode, bench_server
from fledge.cli.console import facts_table, out, print_json, progress_bar, quiet_libraries
from fledge.cli.help import VerbGroup, Verbs
from fledge.cli.options import AsJson
from fledge.core.errors import BadInput, nearest

if TYPE_CHECKING:
    import torch

    from fledge.train.batches import StepBatch
    from fledge.train.step import Parts


class _ServerByDefault(VerbGroup):
    """`fledge bench URL` is short for `fledge bench server URL`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["server", *args]
        return super().resolve_command(ctx, args)


app = Verbs(
    cls=_ServerByDefault,
    epilog="Example: fledge bench http://localhost:8000",
    help="Measure speed: of a training step (train), of decoding with drafts (decode), or of a "
    "server (server URL, or just URL).",
)
app.command(name="server", epilog=bench_server.EXAMPLE)(bench_server.bench)
app.command(name="decode", epilog=bench_decode.EXAMPLE)(bench_decode.bench)

TRAIN_EXAMPLE = (
    "Example: fledge bench train --shape 8b --seq 2048 --batch 4\n\n"
    "Example: fledge bench train --shape 135m --seq 16384 --documents 250 --profile"
)


@app.command(name="train", epilog=TRAIN_EXAMPLE)
def bench_train(
    shape: Annotated[str, Option(help="Target's shape: tiny, 135m, 1b or 8b.")] = "135m",
    kind: Annotated[
        str, Option(help="The method, as objective.kind names it; default: EAGLE-3.")
    ] = "",
    seq: Annotated[int, Option(min=8, help="Tokens a row.")] = 2048,
    batch: Annotated[int, Option(min=1, help="Rows a step.")] = 1,
    documents: Annotated[
        int, Option(min=0, help="Pack documents of about so many tokens; 0: one a row.")
    ] = 0,
    supervised: Annotated[
        float, Option(min=0.01, max=1.0, help="Share of the tokens that are supervised.")
    ] = 0.6,
    depths: Annotated[int, Option(min=0, help="0: as the method's recipes.")] = 0,
    layers: Annotated[int, Option(min=0, help="0: as the method's recipes.")] = 0,
    depth_keep: Annotated[
        float, Option(min=0.05, max=1.0, help="EAGLE-3: objective.depth_keep.")
    ] = 1.0,
    fp8: Annotated[bool, Option("--fp8", help="Target in fp8.")] = False,
    compile_target: Annotated[
        bool, Option("--compile/--no-compile", help="Compile the target's layers.")
    ] = True,
    partitions: Annotated[int, Option(min=1, help="P-EAGLE: sequence partitions.")] = 1,
    checkpointing: Annotated[
        bool, Option("--checkpointing", help="Recompute whole layers.")
    ] = False,
    kept: Annotated[
        str, Option(help="Measure a later epoch, whose states are kept: device or host.")
    ] = "",
    record: Annotated[
        bool, Option("--record/--no-record", help="Steps of small drafts as CUDA graphs.")
    ] = True,
    steps: Annotated[int, Option(min=1, help="Steps measured; the median counts.")] = 5,
    warmup: Annotated[int, Option(min=1, help="Steps before that.")] = 2,
    device: Annotated[str, Option(help="auto, cpu or cuda.")] = "auto",
    profile: Annotated[bool, Option("--profile", help="Then print torch's tables.")] = False,
    memory: Annotated[
        bool, Option("--memory", help="Then print who holds the memory at the peak.")
    ] = False,
    compare: Annotated[
        bool, Option("--compare", help="On a GPU: every step of docs/performance.md, as its table.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Tokens per second, phase times and memory of one training step, on random weights."""
    quiet_libraries()
    from fledge.bench import cost as bench_cost
    from fledge.bench import train_step as bench
    from fledge.core.distributed import pick_device
    from fledge.methods.registry import DEFAULT_METHOD, METHODS

    if compare:
        _compare(pick_device(device), steps, warmup, as_json=as_json)
        return
    kind = kind or DEFAULT_METHOD
    places = ["device", "host"]
    named = ((shape, list(bench.SHAPES)), (kind, list(METHODS)), (kept or places[0], places))
    for value, known in named:
        if value not in known:
            raise BadInput(f"nothing is named '{value}' here", fix=nearest(value, known))
    where = pick_device(device)
    case = bench.Case(
        shape=shape, kind=kind, seq=seq, batch=batch, documents=documents, depths=depths,
        layers=layers, supervised=supervised, depth_keep=depth_keep, fp8=fp8,
        compile=compile_target, partitions=partitions, checkpointing=checkpointing, kept=kept,
        record=record,
    )  # fmt: skip
    notes: list[str] = []

    def look(parts: "Parts", rows: "StepBatch") -> None:
        if memory and where.type == "cuda":
            held = bench_cost.memory_at_peak(parts, rows)
            notes.extend(f"{gib:7.2f} GiB  {source}" for source, gib in held)
        if profile:
            notes.append(bench_cost.profile(parts, rows))

    with progress_bar(f"{kind} {shape}", "steps") as update:
        update(total=steps + warmup)
        measured = bench.measure_step(
            case, where, steps=steps, warmup=warmup, on_step=lambda: update(advance=1), look=look
        )
    figures = {"kind": kind, "shape": shape, **measured.to_json()}
    if as_json:
        print_json(figures)
    else:
        texts = {k: f"{v:,}" if isinstance(v, int) else f"{v}" for k, v in figures.items()}
        out.print(facts_table(texts))
    for note in notes:
        out.plain(note)


def _compare(device: "torch.device", steps: int, warmup: int, *, as_json: bool) -> None:
    """Print every line as soon as it is measured: all of them take minutes."""
    from fledge.bench import compare as table

    if device.type != "cuda":
        what = "the steps of the table need a GPU, and there is none"
        raise BadInput(what, where="--compare", fix="fledge bench train --shape 135m")
    if not as_json:
        out.plain("\n".join(table.HEAD))
    rows = []
    for name, figures in table.compare(device, steps=steps, warmup=warmup):
        if not as_json:
            out.plain(table.markdown_line(table.table_row(name, figures)))
        rows.append({"step": name, **figures.to_json()})
    if as_json:
        print_json(rows)
