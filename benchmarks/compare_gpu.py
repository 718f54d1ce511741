"""Training steps and decoding on a GPU, two versions of fledge alternating.

    git worktree add ../before COMMIT
    python benchmarks/compare_gpu.py ../before/src src [--steps 7] [--only decode]

Every row of docs/performance.md is measured with both versions, one right after the other, each in
its own process (`fledge bench train`); decoding runs greedy rounds of random models of SmolLM2's
shape through the public decoder. Prints the ratio of tokens or rounds per second.
"""

import argparse
import json
import os
import subprocess
import sys

TRAIN = {
    "EAGLE-3, 8B, 4 x 2048": "--shape 8b --batch 4",
    "the same, fp8, depth_keep 0.7": "--shape 8b --batch 4 --fp8 --depth-keep 0.7",
    "EAGLE-3, 1B, 8 x 2048": "--shape 1b --batch 8",
    "P-EAGLE, 8B, 2 x 2048": "--shape 8b --batch 2 --kind peagle",
    "EAGLE-3, 135M, pack of 16,384": "--shape 135m --seq 16384 --documents 250",
    "EAGLE-3, 8B, 1 x 32,768": "--shape 8b --seq 32768",
}
DECODE = """
import json, sys
import torch, fledge
from transformers import LlamaConfig, LlamaForCausalLM
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
shape = dict(
    hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3,
    head_dim=64, vocab_size=49152, max_position_embeddings=2048,
)
torch.manual_seed(0)
with torch.device(device):
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=30, **shape)).bfloat16().eval()

def draft(layers, **options):
    config = LlamaConfig(num_hidden_layers=layers, draft_vocab_size=49152, **shape, **options)
    with torch.device(device):
        return fledge.LlamaEagle3DraftModel(config).bfloat16().eval()

chain = draft(1)
drafts = {"plain": None, "chain": chain, "tree": chain,
          "parallel": draft(4, parallel_drafting=True, mask_token_id=7)}
rounds_per_s = {}
for batch in (1, 16):
    prompts = [[(7 * i + j) % 49152 for j in range(64)] for i in range(batch)]
    for name, own_draft in drafts.items():
        method = None if own_draft is None else name
        options = {} if own_draft is None else {"aux_layer_ids": [1, 14, 26], "method": method}
        decoder = fledge.SpeculativeDecoder(model, own_draft, num_draft_tokens=7, **options)
        stops = fledge.Stops(max_new_tokens=160)
        rates = []
        for _ in range(4):  # the first records passes
            decoder.generate(prompts, stops)
            rates.append(decoder.timing.rounds / decoder.timing.decode_s)
        rounds_per_s[f"{name}, batch {batch}"] = max(rates[1:])
print(json.dumps(rounds_per_s))
"""


def run(source: str, command: list[str]) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": source}
    process = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True
    )
    if process.returncode:
        sys.exit(process.stdout[-2000:] + process.stderr[-4000:])
    start = process.stdout.index("{")
    values: dict[str, float] = json.loads(process.stdout[start:])
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs=2, help="src folders: before, after")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--only", choices=["train", "decode"])
    parser.add_argument("--out", help="write the figures as JSON")
    args = parser.parse_args()
    rows: list[tuple[str, float, float]] = []
    if args.only != "decode":
        for name, flags in TRAIN.items():
            steps = "3" if "32768" in flags else str(args.steps)
            command = ["-m", "fledge", "bench", "train", *flags.split(), "--steps", steps, "--json"]
            before, after = (run(source, command) for source in args.sources)
            rows.append((name, before["tokens_per_s"], after["tokens_per_s"]))
            print(f"{name:36} {rows[-1][1]:10,.0f} {rows[-1][2]:10,.0f} tok/s", flush=True)
            memory = before["peak_above_gib"], after["peak_above_gib"]
            print(f"{'':36} {memory[0]} {memory[1]} GiB above", flush=True)
    if args.only != "train":
        before, after = (run(source, ["-c", DECODE]) for source in args.sources)
        rows += [(f"decode {name}", before[name], after[name]) for name in before]
    print(f"\n{'':36} {'before':>10} {'after':>10}  ratio")
    for name, old, new in rows:
        print(f"{name:36} {old:10,.1f} {new:10,.1f}  {new / old:.3f}")
    if args.out:
        with open(args.out, "w") as file:
            json.dump([{"row": n, "before": a, "after": b} for n, a, b in rows], file, indent=1)


if __name__ == "__main__":
    main()
