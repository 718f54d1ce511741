"""Held-out acceptance of a draft per domain, from teacher-forced rollouts of its files.

    python benchmarks/acceptance.py runs/smollm2_gpu/best --model smollm2-135m \
        mt_bench=mt_bench.jsonl gsm8k=gsm8k.jsonl

Each file holds chats that the target itself answered (tools/make_demo_chats.py --prompts). The
figure is joint prefix acceptance over every slot: length = 1 + sum_k P(tokens 1..k all correct).
"""

import argparse
import json

import torch

from fledge.core.distributed import World, pick_device
from fledge.data.pack import collate, pack_rows
from fledge.data.prepare import prepare_rows
from fledge.data.tokenise import TokeniseOptions
from fledge.methods.eagle3.draft import LlamaEagle3DraftModel
from fledge.methods.eagle3.objective import Eagle3TrainerModule
from fledge.models.resolve import local_model
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.training.fit import evaluate
from fledge.training.step import Clock, Models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("draft")
    parser.add_argument("domains", nargs="+", help="name=file.jsonl")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--depths", type=int, default=7)
    parser.add_argument("--max-length", type=int, default=2048)
    args = parser.parse_args()
    device = pick_device("auto")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = HFEagle3TargetModel.from_pretrained(args.model, dtype=dtype, device=device)
    draft = LlamaEagle3DraftModel.from_pretrained(args.draft).to(device).eval()
    ids = draft.selected_token_ids
    mask = torch.zeros(draft.config.vocab_size, dtype=torch.bool, device=device)
    mask[ids] = True
    objective = Eagle3TrainerModule(
        draft,
        selected_token_ids=ids,
        selected_token_mask=mask,
        ttt_steps=args.depths,
        target_head=target.info().head,
        compute_dtype=dtype,
    )
    models = Models(target, objective, device, World(), Clock(device))
    for domain in args.domains:
        name, _, path = domain.partition("=")
        options = TokeniseOptions(max_length=args.max_length)
        rows = prepare_rows([path], local_model(args.model), options)
        packs = pack_rows(rows.lengths, 8192).packs
        figures = evaluate(models, [collate(rows, [pack], 8192, 0) for pack in packs])
        rates = [round(rate, 3) for rate in figures["prefix_acceptance"]]
        print(json.dumps({"domain": name, "rows": len(rows), "tau": round(figures["tau"], 3),
                          "prefix_acceptance": rates}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
