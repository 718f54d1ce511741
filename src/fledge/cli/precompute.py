"""`fledge precompute`: run the recipe's target once over its data and store its answers."""

import errno
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Exit, Option

from fledge.cli import options as opt
from fledge.cli.console import err, out, print_json, progress_bar, quiet_libraries
from fledge.cli.loading import recipes_of_words
from fledge.cli.spread import opened_spread
from fledge.core.errors import BadInput, nearest
from fledge.core.files import check_place
from fledge.core.text import counted

EXAMPLE = (
    "Example: fledge precompute smollm2_gpu data.train=chats.jsonl "
    "--out cache --encoding hidden-fp8"
)


def precompute(
    arguments: opt.RecipeWords,
    output_dir: Annotated[Path, Option(*opt.OUT, help="Where the cache goes.")],
    encoding: opt.EncodingOption = "hidden",
    dtype: opt.CacheDtype = "auto",
    target_dtype: opt.TargetDtype = "",
    top_k: opt.TopK = None,
    supervised_only: opt.SupervisedOnly = False,
    shard_size: opt.ShardSize = 256,
    batch_size: Annotated[int, Option(min=1, help="Rows per forward of the target.")] = 4,
    resume: opt.Resume = False,
    quota_gb: opt.Quota = None,
    ray: opt.OnRay = False,
    address: opt.RayAddress = "auto",
    workers: opt.RayWorkers = None,
    as_json: opt.OutcomeAsJson = False,
) -> None:
    """Write the target's answers to disk; train from them with target.backend=cache.

    Bytes are predicted before anything is written. An interrupted or stopped cache is continued
    with --resume. The same command with --resume may run any number of times at once, on any
    machines that see the directory: they share the work, as do processes under torchrun, and the
    workers of --ray. For a recipe of several drafts, the layers of all of them are kept.
    """
    from fledge.target.cache.precompute import execute
    from fledge.train.precompute import cache_dtype

    words = [*arguments, *([f"target.dtype={target_dtype}"] if target_dtype else [])]
    recipe, *others = recipes_of_words(words).values()
    output_dir = output_dir.expanduser()
    check_place(output_dir, directory=True)
    with _opened_spread(recipe, ray, address, workers) as spread:
        device = _device(recipe, spread)
        quiet_libraries()
        chosen = cache_options(
            encoding=encoding, dtype=dtype, natural=lambda: cache_dtype(recipe, device),
            top_k=top_k, supervised_only=supervised_only, shard_size=shard_size,
            batch_size=batch_size, resume=resume, quota_gb=quota_gb,
        )  # fmt: skip
        with progress_bar("preparing data", "parts") as update:

            def prepared(at: Any) -> None:
                update(total=at.parts, completed=at.done)

            job, head_bytes, load = _lay_out(recipe, others, output_dir, chosen, device, prepared)
            update(description="asking the target", total=len(job.rows), completed=0, unit="rows")
            run = partial(execute, job, head_bytes, load, device=device)
            if spread is not None:
                from fledge.target.ray.precompute import execute_on_ray

                work = partial(fill_cache, words, output_dir.absolute(), chosen)
                run = partial(execute_on_ray, spread, work, job, head_bytes)
            code = run_job(job, run, update, as_json=as_json)
    if code:
        raise Exit(code)


def fill_cache(words: list[str], output_dir: Path, chosen: Any) -> Any:
    """The job of one of several workers on a cluster: what the command does without --ray."""
    from fledge.core.distributed import pick_device
    from fledge.target.cache.precompute import execute

    recipe, *others = recipes_of_words(words).values()
    device, chosen = pick_device(recipe.training.device), replace(chosen, resume=True)
    quiet_libraries()
    job, head_bytes, load = _lay_out(recipe, others, output_dir, chosen, device)
    return execute(job, head_bytes, load, device=device, say=lambda _: None)


def _lay_out(
    recipe: Any,
    others: list[Any],
    output_dir: Path,
    chosen: Any,
    device: Any,
    prepared: Any = lambda _: None,
) -> tuple[Any, int, Any]:
    """Returns the job, the bytes stored beside its shards, and a function that opens its target."""
    from fledge.train.precompute import cache_dtype, recipe_job, recipe_target

    job, model = recipe_job(recipe, output_dir, chosen, prepared, others=others)
    head_bytes = model.head_bytes(cache_dtype(recipe, device))
    return job, head_bytes, partial(recipe_target, recipe, device, others)


def _opened_spread(recipe: Any, ray: bool, address: str, workers: int | None) -> Any:
    """Opens the workers that fill the cache; yields None if this process does."""
    gpus = 0
    if ray:
        from fledge.target.ray.spread import gpus_of

        gpus = gpus_of(recipe.target)
    return opened_spread(ray, address, workers, gpus=gpus, device=recipe.training.device)


def _device(recipe: Any, spread: Any) -> Any:
    """The target's device: of this process, or of the workers."""
    import torch

    from fledge.core.distributed import pick_device

    return pick_device(recipe.training.device) if spread is None else torch.device(spread.device)


def cache_options(*, dtype: str, natural: Any, quota_gb: float | None, **chosen: Any) -> Any:
    """The flags as `CacheOptions`; raises BadInput for combinations that make no sense."""
    from fledge.target.cache.format import DTYPES, ENCODINGS
    from fledge.target.cache.job import CacheOptions, quota_in_bytes
    from fledge.target.kinds import spelt_out

    encoding, dtype = chosen["encoding"], spelt_out(dtype)
    if encoding not in ENCODINGS:
        hint = nearest(encoding, list(ENCODINGS))
        raise BadInput(f"{encoding!r} is not an encoding", where="--encoding", fix=hint)
    if (encoding == "topk") != (chosen["top_k"] is not None):
        raise BadInput("the topk encoding and --top-k belong together", where="--encoding")
    if dtype != "auto" and dtype not in DTYPES:
        hint = nearest(dtype, ["auto", *DTYPES])
        raise BadInput(f"{dtype!r} is not a dtype", where="--dtype", fix=hint)
    return CacheOptions(
        dtype=natural() if dtype == "auto" else DTYPES[dtype],
        quota_bytes=quota_in_bytes(quota_gb),
        **chosen,
    )


def run_job(job: Any, run: Callable[..., Any], update: Any, *, as_json: bool) -> int:
    """Run a job (as `execute` does), show its progress, and return the exit code."""
    from fledge.target.cache.job import readable
    from fledge.target.cache.precompute import STOPPED

    def show(at: Any) -> None:
        update(total=len(job.rows), completed=at.rows, note=readable(at.bytes))

    def say(line: str) -> None:
        err.say(line, style="cyan")

    try:
        done = run(say=say, on_progress=show)
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
        out.say(
            f"{counted(len(job.rows), 'row')} in {job.directory}; train with target.backend=cache "
            f"target.cached_target_path={job.directory}"
        )
    return int(done.code)
