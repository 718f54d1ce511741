r"""Precompute the EAGLE-3 offline cache: run the target once, train many times.

    python -m fledge.precompute_eagle3 \
        --target-model meta-llama/Llama-3.1-8B-Instruct --input-data chats.jsonl \
        --output-dir /data/cache --seq-length 2048 --draft-vocab-size 8192 \
        --batch-size 4 --shard-size 256 --dtype bf16

Then train from it, without the target: `target.backend=cache
target.cached_target_path=/data/cache`. By default hidden states are kept, which serve every
draft vocabulary, loss and objective (see `--encoding` for the others); the vocabulary given here
is the default of training from the cache. Bytes are predicted before anything is written. Under
torchrun several processes write disjoint shards of one cache. `fledge precompute` does the same
from a recipe, for any target backend.

Exit codes: 0 done, 2 bad input (nothing written), 3 stopped by the quota or a full disk
(`--resume` continues), 130 interrupted.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.errors import BadInput, explain
from fledge.core.files import check_place
from fledge.core.head import TargetHead, target_distribution
from fledge.core.machine import find_device
from fledge.core.progress import unwatched
from fledge.core.terminal import Terminal
from fledge.recipe.schema import Recipe, load_recipe
from fledge.target.cache.format import DTYPES, ENCODINGS, OVER_A_VOCABULARY
from fledge.target.cache.job import CacheOptions, cache_options
from fledge.target.cache.manifest import ensure_free, ensure_resumable
from fledge.target.cache.precompute import STOPPED, execute
from fledge.target.hf.kind import HfTarget
from fledge.target.kinds import spelt_out, target_config
from fledge.target.layers import longest_text
from fledge.training.precompute import cache_dtype, recipe_job, recipe_target

logger = logging.getLogger(__name__)

_SEQ_LENGTH = 2048
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_TARGET_DTYPES = ("auto", "fp32", "bf16", "fp16", "fp8", *DTYPES)


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"precompute_eagle3: {message}; --help lists the flags\n")


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m fledge.precompute_eagle3",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--target-model", required=True, help="directory, hub id, GGUF file or embedded name")
    add("--input-data", required=True, nargs="+", help="files, directories, addresses, data sets")
    add("--output-dir", required=True, help="directory of the cache")
    add("--split", help="split of a data set id, e.g. train or train[:1000]; of files: train")
    longest = f"longest row in tokens ({_SEQ_LENGTH}, or the model's maximum if that is less)"
    add("--seq-length", type=int, help=longest)
    vocabulary = "draft vocabulary of the probabilities (left out: the whole one), or, with hidden "
    vocabulary += "states, what training takes where its recipe does not say"
    add("--draft-vocab-size", type=int, help=vocabulary)
    add("--batch-size", type=int, default=4, help="rows per forward of the target (4)")
    add("--shard-size", type=int, default=256, help="rows per shard (256)")
    add("--dtype", default="bf16", help="of stored floats: fp32 | bf16 | fp16 | auto (bf16)")
    computed = "of the target's forward: fp32 | bf16 | fp16 | fp8; auto: as it is stored (auto)"
    add("--target-dtype", default="auto", choices=_TARGET_DTYPES, metavar="DTYPE", help=computed)
    add("--encoding", help=f"{' | '.join(ENCODINGS)} (hidden; topk with --target-probs-topk)")
    topk = "keep the k largest probabilities (encoding topk); 0: all of them (0)"
    add("--target-probs-topk", type=int, default=0, help=topk)
    layers = "three decoder layers, 1,15,28 or 1 15 28; left out: the default"
    add("--aux-layer-ids", nargs="+", metavar="ID", help=layers)
    dropped = "largest share of rows that may be unusable (0.05)"
    add("--max-drop-share", type=float, default=0.05, help=dropped)
    order = "order of the rows; none: as in the data (42)"
    add("--shuffle-seed", type=_seed, default=42, metavar="SEED", help=order)
    add("--resume", action="store_true", help="continue the cache in --output-dir")
    add("--quota-gb", type=float, help="never write more shards than this; --resume continues")
    add("--device", default="auto", help="auto | cpu | cuda | cuda:N (auto)")
    add("--num-workers", type=int, default=0, help="processes that tokenise; 0: one per core")
    add("--trust-remote-code", action="store_true", help="run Python code of the model")
    add("--log-level", type=str.upper, default="INFO", choices=_LEVELS, help="(INFO)")
    return parser


def _seed(text: str) -> int | None:
    try:
        return None if text == "none" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor none") from None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _validate_args(args: argparse.Namespace) -> None:
    """Reject invalid CLI values before loading any model."""
    positive = ("batch_size", "shard_size", "draft_vocab_size")
    rest = ("target_probs_topk", "num_workers", "shuffle_seed")
    smallest = {"seq_length": 2, **dict.fromkeys(positive, 1), **dict.fromkeys(rest, 0)}
    for name, least in smallest.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise BadInput(f"{value} is too small", where=_flag(name), fix=f"at least {least}")
    _options(args, lambda: torch.bfloat16)
    _aux_layer_ids(args)
    if args.device != "auto":
        find_device(args.device)
    if args.split not in (None, "train") and any(map(_is_file, args.input_data)):
        what = f"a local file is one split, train, and has no {args.split!r}"
        raise BadInput(what, where="--split", fix="leave it out")
    directory = Path(args.output_dir).expanduser()
    check_place(directory, directory=True)
    ensure_free(directory, resume=args.resume)


def _is_file(name: str) -> bool:
    from fledge.data.remote import is_address

    return is_address(name) or Path(name).expanduser().exists()


def _options(args: argparse.Namespace, natural: Callable[[], torch.dtype]) -> CacheOptions:
    return cache_options(
        encoding=args.encoding or ("topk" if args.target_probs_topk else "hidden"),
        dtype=args.dtype,
        natural=natural,
        top_k=args.target_probs_topk,
        top_k_flag="--target-probs-topk",
        shard_size=args.shard_size,
        batch_size=args.batch_size,
        resume=args.resume,
        quota_gb=args.quota_gb,
    )


def _aux_layer_ids(args: argparse.Namespace) -> tuple[int, ...] | None:
    if args.aux_layer_ids is None:
        return None
    given = ",".join(map(str, args.aux_layer_ids))
    try:
        return tuple(int(text) for text in given.split(","))
    except ValueError:
        what, fix = f"{given!r} is not a list of layers", "for example 1,15,28"
        raise BadInput(what, where="--aux-layer-ids", fix=fix) from None


def _compute_target_distribution(
    target_logits: torch.Tensor,  # [B, T, V]
    selected_token_ids: torch.Tensor,  # [W]
    selected_token_mask: torch.Tensor,  # [V]
    loss_mask: torch.Tensor,  # [B, T]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`target_distribution`, which the live trainer calls, at every slot: probabilities [B, T, W],
    and where they are charged [B, T, 1]: supervised, the top token in the draft vocabulary."""
    probs_NW, covered_N = target_distribution(
        target_logits.flatten(0, -2), selected_token_ids, selected_token_mask
    )
    charged = covered_N.view_as(loss_mask) & loss_mask.bool()
    return probs_NW.view(*loss_mask.shape, -1), charged[..., None]


def _compute_batch_cache(
    target_batch: Any,
    selected_token_ids: torch.Tensor,
    selected_token_mask: torch.Tensor,
    cache_dtype: torch.dtype,
    *,
    head: TargetHead | None = None,
) -> dict[str, torch.Tensor]:
    """Turn one target-model batch into the per-sample tensors the trainer takes, on the CPU.

    `target_batch` is an `Eagle3TargetBatch`, or any object with the attributes of one; fields that
    it lacks count as None. The result is the draft-vocabulary view: what the `probs` encoding
    keeps, but with padded rows and a distribution at unsupervised slots too. Probabilities come
    from the function that the live trainer calls, so they equal the live ones; floating-point
    fields are then cast to `cache_dtype`. `head` is needed when the batch carries last hidden
    states.
    """
    names = [field.name for field in fields(Eagle3TargetBatch)]
    given: dict[str, Any] = {name: getattr(target_batch, name, None) for name in names}
    batch = Eagle3TargetBatch(**given)
    if batch.last_hidden_states is not None:
        if head is None:
            raise ValueError("head is needed to turn last_hidden_states into probabilities")
        batch = batch.with_logits(head)
    if batch.logits is not None:
        probs, position_mask = _compute_target_distribution(
            batch.logits, selected_token_ids, selected_token_mask, batch.loss_mask
        )
        batch = replace(batch, logits=None, target_probs=probs, position_mask=position_mask)
    float_fields = ("aux_hidden_states", "target_probs")
    return {
        name: (tensor.to(cache_dtype) if name in float_fields else tensor).cpu()
        for name, tensor in batch.tensors()
    }


def _ensure_resume_compatible(
    cache_dir: str, manifest: dict[str, Any], existing_shards: set[int]
) -> None:
    """Refuse to --resume into a cache produced with a different configuration."""
    ensure_resumable(Path(cache_dir), manifest, existing_shards)


def _run(args: argparse.Namespace) -> int:
    """Load the target, scan the dataset once, and write the sharded cache; returns the exit code.
    Raises BadInput for bad arguments before anything is loaded."""
    from fledge.cli.console import progress_bar, quiet_libraries
    from fledge.core.distributed import pick_device

    _validate_args(args)
    logging.basicConfig(level=args.log_level, format="%(message)s")
    quiet_libraries()
    device, recipe = pick_device(args.device), _recipe(args)
    options = _options(args, lambda: cache_dtype(recipe, device))
    directory = Path(args.output_dir).expanduser()
    shown = logger.isEnabledFor(logging.INFO)
    with progress_bar("asking the target") if shown else nullcontext(unwatched) as bar:
        job = recipe_job(recipe, directory, options, bar, shuffle_seed=args.shuffle_seed)
        done = execute(job, partial(recipe_target, recipe, device), device=device, progress=bar)
    if not done.complete:
        logger.info("stopped by the quota; --resume continues")
        return STOPPED
    logger.info("train with target.backend=cache target.cached_target_path=%s", directory)
    return 0


def _recipe(args: argparse.Namespace) -> Recipe:
    """The flags as a recipe, for the same work as that of `fledge precompute`."""
    section = HfTarget(
        model=args.target_model,
        aux_layer_ids=_aux_layer_ids(args),
        dtype=spelt_out(args.target_dtype),
        trust_remote_code=args.trust_remote_code,
    )
    longest = longest_text(target_config(section))
    seq_length = args.seq_length or min(_SEQ_LENGTH, longest)
    if seq_length > longest:
        what = f"{seq_length:,} tokens, and the target takes {longest:,}"
        raise BadInput(what, where="--seq-length", fix=f"at most {longest}")
    names = args.input_data
    if args.split:
        names = [name if _is_file(name) else f"{name}:{args.split}" for name in names]
    data = {"train": names, "valid_rows": 0, "max_length": seq_length}
    data |= {"workers": args.num_workers or None, "max_drop_share": args.max_drop_share}
    draft = {}
    over_a_vocabulary = args.target_probs_topk or args.encoding in OVER_A_VOCABULARY
    if args.draft_vocab_size is not None or over_a_vocabulary:
        draft["draft_vocab_size"] = args.draft_vocab_size  # None: the target's whole one
    packing = {"tokens": seq_length}
    return load_recipe(
        None, {"target": section.model_dump(), "data": data, "draft": draft, "packing": packing}
    )


def main(argv: Sequence[str] | None = None) -> int:
    """CLI entry point. Parses argv and returns the process exit code."""
    args = _build_parser().parse_args(argv)
    try:
        return _run(args)
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        explained = explain(error)
        if explained is None:
            raise
        line, code = explained
        again = "" if code == 2 else ", with --resume"
        Terminal(stderr=True).plain(f"precompute_eagle3: {line}{again}")
        return code
    except KeyboardInterrupt:
        Terminal(stderr=True).plain("precompute_eagle3: interrupted; --resume continues")
        return 130


if __name__ == "__main__":
    sys.exit(main())
