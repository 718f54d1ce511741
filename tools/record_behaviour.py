"""Record what a checkout computes, so that two checkouts can be compared bit for bit.

    python tools/record_behaviour.py record --tree . --out new.json
    python tools/record_behaviour.py record --tree ../before --out old.json
    python tools/record_behaviour.py compare old.json new.json

A record holds digests and figures only: twenty CPU training steps of every method with a target in
the process (EAGLE-3 and P-EAGLE also from a cache and from a server); caches in every encoding;
replay figures; decoded texts; the files of every export; what the other verbs print with --json. It
uses the command line and the public names alone, so it runs on any version that has them. `--keep
DIR` keeps the runs and caches, which a later version must still be able to load. `make-inputs
DIR` writes a tiny target and its chats, for --target and --chats.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

SHARED = [
    "target.aux_layer_ids=0,1,2", "data.valid_rows=8", "data.max_length=64", "data.workers=1",
    "packing.tokens=96", "draft.draft_vocab_size=128", "training.lr=3e-3", "training.steps=20",
    "training.micro_batch=2", "training.device=cpu", "checkpoint.every_steps=10",
    "evaluation.every_steps=10", "tracking.every_steps=5",
]  # fmt: skip
KINDS = {
    "eagle3": ["objective.ttt_steps=3"],
    "peagle": ["objective.kind=peagle", "objective.num_depths=4", "draft.layers=2"],
}
_WHOLE = ["draft.draft_vocab_size=null"]
_BLOCKS = [*_WHOLE, "objective.block_size=4", "objective.anchors=8", "draft.layers=2"]
_BLOCKS += ["objective.listened_layers=3"]
# Further methods, with a target in the process only.
MORE_KINDS = {
    "eagle1": ["objective.kind=eagle1", "target.aux_layer_ids=null", *_WHOLE],
    "dflash": ["objective.kind=dflash", *_BLOCKS],
    "dspark": ["objective.kind=dspark", *_BLOCKS],
}
ENCODINGS = ["hidden", "hidden-fp8", "probs", "topk"]
EXPORTS = {
    "eagle3": ["vllm", "sglang", "speculators"], "peagle": ["vllm", "speculators"],
    "eagle1": ["vllm", "sglang"], "dflash": ["vllm", "sglang", "speculators"],
    "dspark": ["vllm", "sglang", "speculators"],
}  # fmt: skip
# Further ways through the same code, with a target in the process.
VARIANTS = {
    "eagle3": {
        "kl": ["objective.loss=kl"],
        "lk_alpha": ["objective.loss=lk_alpha"],
        "norms": ["draft.fc_norm=true", "draft.norm_output=true", "draft.layers=2"],
        "keep": ["objective.depth_keep=0.7"],
        "accumulate": ["training.accumulate=2"],
        "padded": ["packing.padded=true"],
        "probs": ["target.supervision=probs"],
        "logits": ["target.supervision=logits"],
        "full": ["draft.draft_vocab_size=null", "draft.freeze_embeddings=false"],
    },
    "peagle": {
        "partitions": ["objective.sequence_partitions=3"],
        "balance": ["objective.balance_depths=true", "objective.loss=ce"],
        "checkpointing": ["training.gradient_checkpointing=true"],
    },
}
DECODE = """
import json, sys
import torch, fledge
target, runs = sys.argv[1], sys.argv[2:]
tokenizer = fledge.load_tokenizer(target)
prompts = [tokenizer.encode(f"<|user|>count to {n}<|end|><|assistant|>") for n in (3, 9, 14)]
stops = fledge.Stops(max_new_tokens=24, eos_token_ids=frozenset({tokenizer.eos_token_id}))
model = fledge.load_model(target).float().eval()
found = {}
for run in runs:
    draft = fledge.LlamaEagle3DraftModel.from_pretrained(run + "/best", dtype=torch.float32)
    methods = ["parallel"] if draft.config.parallel_drafting else ["chain", "tree"]
    for method in methods:
        for temperature in (0.0, 0.9):
            decoder = fledge.SpeculativeDecoder(
                model, draft, aux_layer_ids=[0, 1, 2], method=method, num_draft_tokens=4)
            answers = decoder.generate(prompts, stops, temperature=temperature, seed=3)
            found[f"{run.rsplit('/')[-1]} {method} {temperature}"] = [
                [a.token_ids, [[r.context, r.accepted, r.emitted] for r in a.rounds]]
                for a in answers]
plain = fledge.SpeculativeDecoder(model).generate(prompts, stops)
found["plain"] = [a.token_ids for a in plain]
print(json.dumps(found))
"""


def run(tree: Path, *arguments: str, code: str | None = None, codes: tuple[int, ...] = (0,)) -> str:
    """One command of that checkout; what it printed."""
    environment = {
        **os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "100",
    }  # fmt: skip
    how = ["-m", "fledge"] if code is None else ["-c", code]
    done = subprocess.run(
        [sys.executable, *how, *arguments], env=environment, capture_output=True, text=True
    )
    if done.returncode not in codes:
        sys.exit(f"{' '.join(arguments)}\n{done.stdout}\n{done.stderr}")
    return done.stdout if done.returncode != 2 else json.dumps({"refused": done.stderr})


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def metrics(run_directory: Path) -> list[dict[str, object]]:
    """The run's metrics without the clock's."""
    lines = [json.loads(line) for line in (run_directory / "metrics.jsonl").open()]
    clock = re.compile("second|tokens_per_s|share|time|memory")
    return [{k: v for k, v in line.items() if not clock.search(k)} for line in lines]


def trained(tree: Path, directory: Path, *overrides: str) -> dict[str, object]:
    run(tree, "train", *SHARED, f"run.output_dir={directory}", *overrides)
    weights = {
        str(path.relative_to(directory)): digest(path)
        for path in sorted(directory.rglob("model.safetensors"))
    }
    return {"weights": weights, "metrics": metrics(directory)}


def record(tree: Path, keep: Path, target: Path, chats: Path) -> dict[str, object]:
    """Everything, case by case."""
    found: dict[str, object] = {}
    data = [f"data.train={chats}"]
    live = [f"target.model={target}", "target.dtype=float32", *data]
    # one run leaves the cache that all others of its kind read
    cache = keep / "cache"
    if not cache.exists():
        run(tree, "precompute", *SHARED, *live, "--output-dir", str(cache))
    for encoding in ENCODINGS[1:]:
        place = keep / f"cache-{encoding}"
        words = ["--output-dir", str(place), "--encoding", encoding]
        words += ["--top-k", "16"] if encoding == "topk" else []
        run(tree, "precompute", *SHARED, *live, *words)
    for place in sorted(keep.glob("cache*")):
        found[place.name] = {p.name: digest(p) for p in sorted(place.glob("*.safetensors"))}
    server, url = serve(tree, target)
    try:
        for kind, options in KINDS.items():
            sources = {
                "live": live,
                "cached": [f"target.cached_target_path={cache}"],
                "remote": ["target.backend=remote", f"target.urls={url}", *data],
            }
            for name, source in sources.items():
                directory = keep / f"{kind}-{name}"
                found[directory.name] = trained(tree, directory, *source, *options)
            for name, more in VARIANTS[kind].items():
                directory = keep / f"{kind}-{name}"
                found[directory.name] = trained(tree, directory, *live, *options, *more)
    finally:
        server.terminate()
        server.wait()
    for kind, options in MORE_KINDS.items():
        found[f"{kind}-live"] = trained(tree, keep / f"{kind}-live", *live, *options)
    prompts = keep / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"count to {n}"}) + "\n" for n in range(6)))
    strategies = {"eagle3": ["chain", "tree"], "peagle": ["parallel"]}
    for kind in (*KINDS, *MORE_KINDS):
        for method in strategies.get(kind, [""]):
            chosen = ["--method", method] if method else []
            text = run(
                tree, "eval", str(keep / f"{kind}-live"), "--prompts", str(prompts), *chosen,
                "--max-new-tokens", "24", "--live", "2", "--dtype", "float32", "--device", "cpu",
                "--json",
            )  # fmt: skip
            found[f"eval {kind} {method}"] = figures(json.loads(text))
    decoded = run(tree, str(target), *(str(keep / f"{k}-live") for k in KINDS), code=DECODE)
    found["decoded"] = json.loads(decoded)
    for kind, engines in EXPORTS.items():
        for engine in engines:
            found[f"export {kind} {engine}"] = exported(tree, keep, f"{kind}-live", engine)
    found |= {
        f"verb {name}": printed(tree, words, str(keep))
        for name, words in verbs(keep, chats, target).items()
    }
    return found


def exported(tree: Path, keep: Path, name: str, engine: str) -> dict[str, str]:
    """The digests of an export's tensors, and its config as written."""
    place = keep / f"export-{name}-{engine}"
    words = ["--engine", engine, "--out", str(place), "--overwrite", "--shortfall", "1"]
    run(tree, "export", str(keep / name), *words, "--max-new-tokens", "8", "--json")
    texts = {p.name: p.read_text() for p in [place / "config.json"]}
    return {**texts, **{p.name: digest(p) for p in sorted(place.glob("*.safetensors"))}}


def verbs(keep: Path, chats: Path, target: Path) -> dict[str, list[str]]:
    """Verbs that only read."""
    words = {
        "data stats": ["data", "stats", str(chats), "--model", str(target)],
        "data preview": ["data", "preview", str(chats), "--model", str(target)],
        "recipe list": ["recipe", "list"],
        "recipe show": ["recipe", "show", "smollm2_gpu"],
        "recipe schema": ["recipe", "schema"],
        "cache info": ["cache", "info", str(keep / "cache")],
        "cache verify": ["cache", "verify", str(keep / "cache")],
        "forecast": ["forecast", str(keep / "eagle3-live")],
    }
    for kind in (*KINDS, *MORE_KINDS):
        words[f"diagnose {kind}"] = ["diagnose", str(keep / f"{kind}-live"), "--prompts", "2"]
    return words


def printed(tree: Path, words: list[str], keep: str) -> object:
    """What a verb prints with --json, without clocks and paths; 1 is the exit code of findings, 2
    that of a refusal."""
    return figures(json.loads(run(tree, *words, "--json", codes=(0, 1, 2)).replace(keep, "")))


def make_inputs(place: Path) -> None:
    """The tiny target and the chats of the tests."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from train.tiny import make_chats, make_target

    make_target(place / "target")
    make_chats(place / "chats.jsonl")


def figures(value: object) -> object:
    """An evaluation without clocks and paths."""
    if isinstance(value, dict):
        clock = re.compile("speed|_s$|_ms$|second|time|path|name|break_even|machine|cost|version")
        kept = {k: v for k, v in value.items() if not clock.search(k)}
        return {k: figures(v) for k, v in kept.items() if k != "prompts" or isinstance(v, dict)}
    return [figures(v) for v in value] if isinstance(value, list) else value


def serve(tree: Path, target: Path) -> tuple["subprocess.Popen[str]", str]:
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fledge", "serve-target", "--target", str(target)]
    command += ["--aux-layer-ids", "0,1,2", "--dtype", "float32", "--port", "0"]
    server = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert server.stdout is not None
    for line in server.stdout:
        if match := re.search(r"http://[\d.]+:\d+", line):
            return server, match.group()
    sys.exit("the server did not start")


def compare(old: object, new: object, place: str = "") -> list[str]:
    """Every place in which two records differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = {**old, **new}
        return [line for k in keys for line in compare(old.get(k), new.get(k), f"{place}/{k}")]
    return [] if old == new else [f"{place}: {str(old)[:200]} -> {str(new)[:200]}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    subparsers = parser.add_subparsers(dest="verb", required=True)
    recorder = subparsers.add_parser("record")
    recorder.add_argument("--tree", type=Path, default=Path())
    recorder.add_argument("--target", type=Path, required=True, help="a tiny model with tokenizer")
    recorder.add_argument("--chats", type=Path, required=True)
    recorder.add_argument("--out", type=Path, required=True)
    recorder.add_argument("--keep", type=Path)
    maker = subparsers.add_parser("make-inputs")
    maker.add_argument("place", type=Path)
    comparer = subparsers.add_parser("compare")
    comparer.add_argument("records", type=Path, nargs=2)
    given = parser.parse_args()
    if given.verb == "compare":
        old, new = (json.loads(path.read_text()) for path in given.records)
        lines = compare(old, new)
        print("\n".join(lines) or f"{len(old)} cases, all equal")
        return bool(lines)
    if given.verb == "make-inputs":
        make_inputs(given.place)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        keep = (given.keep or Path(temporary)).resolve()
        keep.mkdir(parents=True, exist_ok=True)
        found = record(given.tree.resolve(), keep, given.target.resolve(), given.chats.resolve())
    given.out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(f"{len(found)} cases -> {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
