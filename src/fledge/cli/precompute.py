"""`fledge precompute`: run the recipe's target once over its data and store its answers."""

import errno
import functools
from pathlib import Path
from typing import Annotated, Any

import typer

from fledge.cli.console import err, out, print_json, progress_bar, quiet_libraries
from fledge.core.files import check_place

EXAMPLE = (
    "Example: fledge precompute recipes/smollm2_gpu.yaml data.train=chats.jsonl "
    "--output-dir cache --encoding hidden-fp8"
)

Encoding = Annotated[str, typer.Option(help="hidden | hidden-fp8 | probs | topk.")]
Dtype = Annotated[str, typer.Option(help="float32 | bfloat16 | float16; auto: the target's.")]
TopK = Annotated[int | None, typer.Option("--top-k", min=1, help="Probabilities kept (topk).")]
Only = Annotated[
    bool, typer.Option("--supervised-only", help="No supervision at unsupervised tokens.")
]
ShardSize = Annotated[int, typer.Option(min=1, help="Rows per shard.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Rows per forward of the target.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the cache that is there.")]
Quota = Annotated[float | None, typer.Option("--quota-gb", help="Never write more than this.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")]


def precompute(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="RECIPE [section.key=value ...]", show_default=False),
    ],
    output_dir: Annotated[Path, typer.Option("--output-dir", "-o", help="Where the cache goes.")],
    encoding: Encoding = "hidden",
    dtype: Dtype = "auto",
    top_k: TopK = None,
    supervised_only: Only = False,
    shard_size: ShardSize = 256,
    batch_size: BatchSize = 4,
    resume: Resume = False,
    quota_gb: Quota = None,
    as_json: AsJson = False,
) -> None:
    """Write the target's answers to disk; train from them with target.backend=cache.

    Bytes are predicted before anything is written. Under torchrun several processes share the
    work. An interrupted or stopped cache is continued with --resume.
    """
    from fledge.core.distributed import pick_device
    from fledge.recipe.schema import load_recipe, split_arguments
    from fledge.train.precompute import cache_dtype, recipe_job, recipe_target

    path, overrides = split_arguments(arguments)
    recipe = load_recipe(path, overrides)
    check_place(output_dir.expanduser(), directory=True)
    device = pick_device(recipe.training.device)
    quiet_libraries()
    chosen = cache_options(
        encoding=encoding, dtype=dtype, natural=lambda: cache_dtype(recipe, device), top_k=top_k,
        supervised_only=supervised_only, shard_size=shard_size, batch_size=batch_size,
        resume=resume, quota_gb=quota_gb,
    )  # fmt: skip
    with progress_bar("rows") as bar:
        task = bar.add_task("preparing data", total=None, note="")
        job, model = recipe_job(
            recipe,
            output_dir.expanduser(),
            chosen,
            lambda at: bar.update(task, total=at.parts, completed=at.done, note="parts"),
        )
        bar.update(task, description="asking the target", total=None, completed=0)
        load = functools.partial(recipe_target, recipe, device)
        code = run_job(
            job, model.head_bytes(chosen.dtype), load, device, bar, task, as_json=as_json
        )
    if code:
        raise typer.Exit(code)


def cache_options(*, dtype: str, natural: Any, quota_gb: float | None, **chosen: Any) -> Any:
    """The flags as `CacheOptions`, refused in one line where they make no sense."""
    from fledge.core.errors import BadInput, nearest
    from fledge.target.cache.format import DTYPES, ENCODINGS
    from fledge.target.cache.job import CacheOptions, quota_in_bytes

    if chosen["encoding"] not in ENCODINGS:
        hint = nearest(chosen["encoding"], list(ENCODINGS))
        raise BadInput(f"{chosen['encoding']!r} is not an encoding", where="--encoding", fix=hint)
    if (chosen["encoding"] == "topk") != (chosen["top_k"] is not None):
        raise BadInput("the topk encoding and --top-k belong together", where="--encoding")
    if dtype != "auto" and dtype not in DTYPES:
        raise BadInput(
            f"{dtype!r} is not a dtype", where="--dtype", fix=nearest(dtype, ["auto", *DTYPES])
        )
    return CacheOptions(
        dtype=natural() if dtype == "auto" else DTYPES[dtype],
        quota_bytes=quota_in_bytes(quota_gb),
        **chosen,
    )


def run_job(
    job: Any, head_bytes: int, load: Any, device: Any, bar: Any, task: Any, *, as_json: bool
) -> int:
    """Run a job with its progress shown; the exit code."""
    from fledge.target.cache.job import readable
    from fledge.target.cache.precompute import STOPPED, execute

    def show(at: Any) -> None:
        bar.update(task, total=len(job.rows), completed=at.rows, note=readable(at.bytes))

    def say(line: str) -> None:
        err.print(line, style="cyan", markup=False, soft_wrap=True)

    try:
        done = execute(job, head_bytes, load, device=device, say=say, on_progress=show)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        say(f"the disk is full ({job.directory}); free some space, then continue with --resume")
        return STOPPED
    facts = {
        "directory": str(job.directory),
        "complete": done.complete,
        "rows": len(job.rows),
        "bytes": done.predicted_bytes,
        "shards_written": done.written_shards,
        "shards_reused": done.reused_shards,
    }
    if as_json:
        print_json(facts)
    elif done.complete:
        out.print(
            f"{len(job.rows):,} rows in {job.directory}; train with target.backend=cache "
            f"target.cached_target_path={job.directory}",
            soft_wrap=True,
            markup=False,
        )
    return done.code
