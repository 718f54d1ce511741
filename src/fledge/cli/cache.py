"""`fledge cache info | verify | convert`: inspect, check and convert an offline cache."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from fledge.cli import options as opt
from fledge.cli.console import facts_table, out, print_json, progress_bar, quiet_libraries
from fledge.cli.help import Verbs
from fledge.cli.loading import recipe_of_words
from fledge.core.errors import BadInput, nearest
from fledge.core.files import check_place
from fledge.core.terminal import counted

if TYPE_CHECKING:
    from fledge.target.cache.job import CacheJob
    from fledge.target.cache.precompute import Done

app = Verbs(
    help="Look at an offline cache, check it, convert it.",
    epilog="Example: fledge cache info cache",
)
Directory = Annotated[
    Path, Argument(metavar="CACHE", help="Directory of the cache.", show_default=False)
]


@app.command(epilog="Example: fledge cache info cache --json")
def info(directory: Directory, as_json: opt.OutcomeAsJson = False) -> None:
    """Show what a cache holds and its size, finished or not."""
    from rich import filesize

    facts = _facts(directory.expanduser())
    if as_json:
        print_json(facts)
        return
    texts = {k: f"{v:,.0f}" if type(v) in (int, float) else str(v) for k, v in facts.items()}
    out.print(facts_table(texts | {"bytes": filesize.decimal(facts["bytes"])}))
    if not facts["complete"]:
        out.print("unfinished: run the same precompute with --resume", style="yellow")


def _facts(directory: Path) -> dict[str, Any]:
    from fledge.target.cache import manifest as manifests

    manifest = manifests.read_manifest(directory)
    shards, wanted = len(manifests.existing_shards(directory)), manifests.shards_of(manifest)
    plain = ("encoding", "dtype", "rows", "held_out_rows", "aux_layer_ids", "hidden_size")
    target = manifest[manifests.LATE]
    return {
        "directory": str(directory),
        "complete": shards == wanted,
        "layout": manifest.get("layout", "fledge"),
        **{name: manifest[name] for name in (*plain, "vocab_size", "top_k")},
        "shards": shards,
        "shards_wanted": wanted,
        "bytes": sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()),
        "draft_vocabulary": manifests.vocabulary_size(manifest),
        **{name: target[name] for name in ("weight_dtypes", "weights_fingerprint")},
    }


@app.command(epilog="Example: fledge cache verify cache")
def verify(directory: Directory, as_json: opt.OutcomeAsJson = False) -> None:
    """Read every row and compare its checksum; exit code 1 when one is damaged."""
    from fledge.target.cache.backend import CacheStore
    from fledge.target.cache.manifest import lacks_target, read_target

    store = CacheStore(directory.expanduser())
    if not lacks_target(store.directory, store.manifest):
        read_target(store.directory, store.manifest)
    damaged = []
    with progress_bar("reading") as show:
        for row in range(len(store)):
            if not store.is_whole(row):
                damaged.append(store.name(row))
            show("reading", row + 1, len(store), "rows")
    if as_json:
        print_json({"rows": len(store), "damaged": damaged})
    else:
        for name in damaged:
            out.say(f"damaged: {name}", style="red")
        out.print(f"{counted(len(store), 'row')} read, {len(damaged):,} damaged")
    if damaged:
        raise Exit(1)


@app.command(
    epilog="Example: fledge cache convert cache --out small --encoding hidden-fp8\n\n"
    "Example: fledge cache convert cache --out theirs --layout automodel --draft-vocab-size 8192"
)
def convert(
    source: Directory,
    output_dir: Annotated[Path, Option(*opt.OUT, help="The new cache.")],
    encoding: Annotated[
        str,
        Option(
            help="hidden | hidden-fp8 | probs | topk; left out: hidden-fp8 of hidden states, else "
            "the source's, and probs for AutoModel."
        ),
    ] = "",
    layout: Annotated[
        str, Option(help="fledge | automodel: padded shards that AutoModel trains from.")
    ] = "fledge",
    dtype: opt.CacheDtype = "auto",
    top_k: opt.TopK = None,
    draft_vocab_size: Annotated[
        int | None, Option(min=1, help="Counted on the rows (probs, topk from hidden).")
    ] = None,
    model: Annotated[
        str, Option("--target", help="The target, where AutoModel's cache names another place.")
    ] = "",
    shard_size: opt.ShardSize = 256,
    resume: opt.Resume = False,
    quota_gb: opt.Quota = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    as_json: opt.OutcomeAsJson = False,
) -> None:
    """Write a cache in another encoding or layout, without the target."""
    from fledge.core.distributed import pick_device
    from fledge.target.cache.backend import CachedEagle3TargetModel
    from fledge.target.cache.job import cache_options, convert_job
    from fledge.target.cache.precompute import execute

    if layout not in ("fledge", "automodel"):
        hint = nearest(layout, ["fledge", "automodel"])
        raise BadInput(f"{layout!r} is not a layout", where="--layout", fix=hint)
    quiet_libraries()
    output_dir = output_dir.expanduser()
    check_place(output_dir, directory=True)
    device, name = pick_device("auto"), model or None
    trust: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    target = CachedEagle3TargetModel(source, device=device, model=name, **trust)
    shape, padded = target.shape, layout == "automodel"
    if not encoding:  # the default one
        top_k = top_k or shape.top_k or None
        encoding = "probs" if top_k is None else "topk"
        if shape.is_hidden and not padded:
            encoding = "hidden-fp8"
    chosen = cache_options(
        encoding=encoding, dtype=dtype, natural=lambda: shape.dtype, top_k=top_k,
        shard_size=shard_size, resume=resume, quota_gb=quota_gb,
    )  # fmt: skip
    with progress_bar("converting") as progress:
        job = convert_job(
            target, output_dir, chosen, draft_vocab_size=draft_vocab_size, padded=padded,
            model=name, **trust,
        )  # fmt: skip
        done = execute(job, lambda: target, device=device, progress=progress)
    show_outcome(job, done, as_json=as_json)


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
    shard_size: opt.ShardSize = 256,
    batch_size: Annotated[int, Option(min=1, help="Rows per forward of the target.")] = 4,
    resume: opt.Resume = False,
    quota_gb: opt.Quota = None,
    as_json: opt.OutcomeAsJson = False,
) -> None:
    """Write the target's answers to disk; train from them with target.backend=cache.

    Bytes are predicted before anything is written. An interrupted or stopped cache is continued
    with --resume. The same command with --resume may run any number of times at once, on any
    machines that see the directory: they share the work, as do processes under torchrun.
    """
    from fledge.core.distributed import pick_device
    from fledge.target.cache.job import cache_options
    from fledge.target.cache.precompute import execute
    from fledge.training.precompute import cache_dtype, recipe_job, recipe_target

    words = [*arguments, *([f"target.dtype={target_dtype}"] if target_dtype else [])]
    recipe = recipe_of_words(words)
    output_dir = output_dir.expanduser()
    check_place(output_dir, directory=True)
    device = pick_device(recipe.training.device)
    quiet_libraries()
    chosen = cache_options(
        encoding=encoding, dtype=dtype, natural=lambda: cache_dtype(recipe, device), top_k=top_k,
        shard_size=shard_size, batch_size=batch_size, resume=resume, quota_gb=quota_gb,
    )  # fmt: skip
    with progress_bar("preparing data") as progress:
        job = recipe_job(recipe, output_dir, chosen, progress)
        load = partial(recipe_target, recipe, device)
        done = execute(job, load, device=device, progress=progress)
    show_outcome(job, done, as_json=as_json)


def show_outcome(job: "CacheJob", done: "Done", *, as_json: bool) -> None:
    from fledge.target.cache.precompute import STOPPED

    if as_json:
        print_json({
            "directory": str(job.directory),
            "complete": done.complete,
            "rows": len(job.rows),
            "bytes": done.shard_bytes,
            "shards_written": done.written_shards,
            "shards_reused": done.reused_shards,
        })  # fmt: skip
    elif done.complete:
        out.say(
            f"{counted(len(job.rows), 'row')} in {job.directory}; train with target.backend=cache "
            f"target.cached_target_path={job.directory}"
        )
    else:
        out.say("stopped by the quota; --resume continues", style="yellow")
    if not done.complete:
        raise Exit(STOPPED)
