"""The step of every trainer on this CPU: processor time and memory, ours and theirs in turns.

    make bench-trainers                  # all of it: about an hour
    python benchmarks/bench_trainers.py --methods eagle3 --tokens 512 --supervised 0.6

Runs where NeMo AutoModel, SpecForge and speculators are installed (.venv-trainers). Each trainer's
own module takes a step of the draft alone (forward and backward) with the same weights of a draft
for SmolLM2, and the same row; each is a process of its own, which waits while another one steps.
A trainer that takes the target's logits computes them in its step, because ours computes them from
the last hidden state there. Flex attention has no backward pass on a CPU: peers get SDPA with the
mask that they build, computed once. Nothing is compiled.

Prints, for each peer, its median processor time and its peak memory over ours: memory beyond what
the process holds before its first step, gradients included.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

TRAINERS = ("fledge", "automodel", "specforge", "speculators")
METHODS = ("eagle3", "peagle", "dflash", "dspark")
HIDDEN, VOCAB, DRAFT_VOCAB, MASK_ID = 576, 49_152, 8_192, 17
SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192,
    "vocab_size": VOCAB, "rms_norm_eps": 1e-5,
}  # fmt: skip
DEPTHS = {"eagle3": 7, "peagle": 8}
LAYERS = {"eagle3": 1, "peagle": 4, "dflash": 3, "dspark": 3}
BLOCK, GAMMA, RANK, TOKENS_PER_ANCHOR = 8, 4.0, 256, 4


@dataclass(frozen=True)
class Case:
    method: str
    tokens: int
    supervised: float
    dtype: str = "float32"

    @property
    def is_block(self) -> bool:
        return self.method in ("dflash", "dspark")

    @property
    def aux_layers(self) -> int:
        return 5 if self.is_block else 3


Step = Callable[[], Any]  # returns the loss, whose backward pass is timed too


# --- what all of them get -----------------------------------------------------------------------


def row(case: Case) -> dict[str, Any]:
    """One document: unshifted tokens, mask, and the target's states at each token."""
    import torch

    generator = torch.Generator().manual_seed(1)
    count, prompt = case.tokens, round(case.tokens * (1 - case.supervised))
    dtype = getattr(torch, case.dtype)
    aux = torch.randn(1, count, case.aux_layers * HIDDEN, generator=generator).to(dtype)
    hidden = torch.randn(1, count, HIDDEN, generator=generator).to(dtype)
    return {
        "ids": torch.randint(0, VOCAB, (1, count), generator=generator),
        "loss": (torch.arange(count) >= prompt).long()[None],
        "aux": aux,
        "hidden": hidden,
    }


def tables(case: Case) -> tuple[Any, Any]:
    """The target's head and embedding, as frozen modules."""
    import torch
    from torch import nn

    generator = torch.Generator().manual_seed(2)
    head, embedding = nn.Linear(1, 1, bias=False), nn.Embedding(1, 1)
    for module in (head, embedding):
        weight = 0.05 * torch.randn(VOCAB, HIDDEN, generator=generator)
        module.weight = nn.Parameter(weight.to(getattr(torch, case.dtype)), requires_grad=False)
    return head, embedding


def shift(x: Any) -> Any:
    import torch

    return torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1)


def eagle_vocabulary() -> tuple[Any, Any]:
    import torch

    ids = torch.arange(DRAFT_VOCAB) * (VOCAB // DRAFT_VOCAB)
    return ids, torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)


def our_draft(case: Case) -> Any:
    """The draft whose weights all trainers start from."""
    import torch
    from transformers import LlamaConfig

    from fledge.methods.block.draft import BlockDraftModel
    from fledge.methods.eagle3.draft import LlamaEagle3DraftModel

    torch.manual_seed(0)
    head, embedding = tables(case)
    settings: dict[str, Any] = {**SIZES, "num_hidden_layers": LAYERS[case.method]}
    settings |= {"target_hidden_size": HIDDEN, "num_aux_hidden_states": case.aux_layers}
    draft: Any
    if case.is_block:
        settings |= {"draft_vocab_size": VOCAB, "mask_token_id": MASK_ID, "block_size": BLOCK}
        if case.method == "dspark":
            settings |= {"markov_rank": RANK, "confidence_head": True, "sample_from_anchor": True}
        draft = BlockDraftModel(LlamaConfig(**settings))
        draft.set_vocab_mapping(torch.arange(VOCAB))
    else:
        settings |= {"draft_vocab_size": DRAFT_VOCAB}
        if case.method == "peagle":
            settings |= {"parallel_drafting": True, "mask_token_id": MASK_ID}
        draft = LlamaEagle3DraftModel(LlamaConfig(**settings))
        draft.set_vocab_mapping(*eagle_vocabulary())
    draft.copy_embeddings_from_target(embedding)
    if case.is_block:
        draft.copy_head_from_target(head)
    draft.freeze_embeddings()
    return draft.to(getattr(torch, case.dtype)).train()


# --- the trainers -------------------------------------------------------------------------------


def ours(case: Case) -> Step:
    import torch

    import fledge
    from fledge.core.head import TargetHead

    draft, data = our_draft(case), row(case)
    head, _ = tables(case)
    kinds = {
        "eagle3": partial(fledge.Eagle3TrainerModule, ttt_steps=DEPTHS["eagle3"]),
        "peagle": partial(fledge.PEagleTrainerModule, num_depths=DEPTHS["peagle"]),
        "dflash": partial(fledge.DFlashTrainerModule, anchors=512, gamma=GAMMA),
        "dspark": partial(fledge.DSparkTrainerModule, anchors=512, gamma=GAMMA),
    }
    options: dict[str, Any] = {"mask_token_id": MASK_ID} if case.method == "peagle" else {}
    ids, mask = eagle_vocabulary()
    if case.is_block:
        ids = torch.arange(VOCAB)
        mask = torch.ones(VOCAB, dtype=torch.bool)
    module = kinds[case.method](
        draft, selected_token_ids=ids, selected_token_mask=mask,
        target_head=TargetHead(head.weight), **options,
    )  # fmt: skip
    batch = {
        "input_ids": shift(data["ids"]),
        "attention_mask": data["loss"].new_ones(data["loss"].shape),
        "loss_mask": shift(data["loss"]),
        "aux_hidden_states": data["aux"],
        "target_last_hidden_states": shift(data["hidden"]),
    }
    return lambda: module(**batch, seed=3).loss


def automodel(case: Case) -> Step:
    import copy

    from nemo_automodel.components.speculative import eagle
    from nemo_automodel.components.speculative.dflash import core as dflash
    from nemo_automodel.components.speculative.dflash import draft_qwen3 as draft_dflash
    from nemo_automodel.components.speculative.dspark import core as dspark
    from nemo_automodel.components.speculative.dspark import draft_qwen3 as draft_dspark

    draft, data = our_draft(case), row(case)
    head, embedding = tables(case)
    state = draft.state_dict()
    if case.method == "dflash":
        model = draft_dflash.Qwen3DFlashDraftModel(_block_config(draft)).to(draft.dtype)
        model.load_state_dict(state)
        module = dflash.DFlashTrainerModule(
            model, head, embedding, mask_token_id=MASK_ID, block_size=BLOCK,
            num_anchors=case.tokens // TOKENS_PER_ANCHOR, attention_backend="sdpa",
            loss_decay_gamma=GAMMA,
        )  # fmt: skip
        return lambda: module(data["ids"], data["aux"], data["loss"].to(draft.dtype)).loss
    if case.method == "dspark":
        config = _block_config(
            draft, num_anchors=case.tokens // TOKENS_PER_ANCHOR, enable_confidence_head=True,
            confidence_head_with_markov=True, markov_rank=RANK, markov_head_type="vanilla",
        )  # fmt: skip
        model = draft_dspark.Qwen3DSparkModel(config).to(draft.dtype)
        model.initialize_embeddings_and_head(embed_tokens=embedding, lm_head=head)
        model.load_state_dict(state, strict=False)
        module = dspark.DSparkTrainerModule(model, loss_decay_gamma=GAMMA)
        return lambda: module(data["ids"], data["aux"], data["loss"], data["hidden"]).loss
    config = copy.deepcopy(draft.config)
    config._attn_implementation = "eager"
    model = eagle.draft_llama.LlamaEagle3DraftModel(config).to(draft.dtype)
    outside = ("lm_head.", "d2t", "t2d", "mask_hidden")
    model.load_state_dict(
        {name if name.startswith(outside) else f"model.{name}": state[name] for name in state}
    )
    model.model.embed_tokens.weight.requires_grad_(False)
    ids, mask = eagle_vocabulary()
    settings = {"selected_token_ids": ids, "selected_token_mask": mask}
    if case.method == "eagle3":
        module = eagle.core.Eagle3TrainerModule(model, ttt_steps=DEPTHS["eagle3"], **settings)
    else:
        eagle.peagle_draft._peagle_flex_attention = sdpa
        eagle.peagle_draft.create_block_mask = DenseMask
        module = eagle.peagle_trainer.PEagleTrainerModule(
            model, num_depths=DEPTHS["peagle"], mask_token_id=MASK_ID, **settings
        )
    batch = {
        "input_ids": shift(data["ids"]),
        "attention_mask": data["loss"].new_ones(data["loss"].shape),
        "loss_mask": shift(data["loss"]),
        "aux_hidden_states": data["aux"],
    }
    return lambda: module(**batch, target_logits=head(shift(data["hidden"]))).loss


def specforge(case: Case) -> Step:
    from specforge.algorithms.common import dflash_family_model as family
    from specforge.algorithms.eagle3 import model as eagle3
    from specforge.algorithms.peagle import model as peagle
    from specforge.modeling.draft import peagle as draft_peagle
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from specforge.modeling.draft.dspark import DSparkDraftModel
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

    draft, data = our_draft(case), row(case)
    head, embedding = tables(case)
    state = draft.state_dict()
    if case.is_block:
        config = _block_config(draft)
        if case.method == "dspark":
            config.dflash_config |= {
                "markov_rank": RANK, "markov_head_type": "vanilla",
                "enable_confidence_head": True, "confidence_head_with_markov": True,
            }  # fmt: skip
        kind, network = {
            "dflash": (family.OnlineDFlashModel, DFlashDraftModel),
            "dspark": (family.OnlineDSparkModel, DSparkDraftModel),
        }[case.method]
        model = network(config).to(draft.dtype)
        model.load_state_dict(state)
        module = kind(
            model, head, embedding, mask_token_id=MASK_ID, block_size=BLOCK,
            attention_backend="sdpa", num_anchors=case.tokens // TOKENS_PER_ANCHOR,
            loss_decay_gamma=GAMMA,
        )  # fmt: skip
        if case.method == "dflash":
            return lambda: module(data["ids"], data["aux"], data["loss"].to(draft.dtype))[0]
        hidden = {"target_last_hidden_states": data["hidden"]}
        return lambda: module(data["ids"], data["aux"], data["loss"], **hidden)[0]
    eagle3.LogSoftmaxLoss = peagle.LogSoftmaxLoss = _EagerLoss
    network = LlamaForCausalLMEagle3
    if case.method == "eagle3":
        state = {name.replace("layers.0.", "midlayer."): state[name] for name in state}
    else:
        network = draft_peagle.PEagleDraftModel
        draft_peagle.compile_friendly_flex_attention = lambda query, key, value, **rest: sdpa(
            query, key, value, **rest
        )
        peagle.create_block_mask = DenseMask
    model = network(draft.config).to(draft.dtype)
    model.load_state_dict(state, strict=False)
    model.freeze_embedding()
    batch = {
        "input_ids": shift(data["ids"]),
        "attention_mask": data["loss"].new_ones(data["loss"].shape),
        "loss_mask": shift(data["loss"]),
        "hidden_states": data["aux"],
    }
    if case.method == "peagle":
        module = peagle.OnlinePEagleModel(
            model, num_depths=DEPTHS["peagle"], mask_token_id=MASK_ID, down_sample_ratio=0.7
        )
        return lambda: module(**batch, target=head(shift(data["hidden"])))[0]
    module = eagle3.OnlineEagle3Model(model, length=DEPTHS["eagle3"])
    batch["loss_mask"] = batch["loss_mask"][..., None]

    def step() -> Any:
        losses = module(**batch, target=head(shift(data["hidden"])))[0]
        return sum(0.8**depth * loss for depth, loss in enumerate(losses))

    return step


class _EagerLoss:
    """SpecForge's own definition of its loss, which a Triton kernel computes on a GPU."""

    @staticmethod
    def apply(logits: Any, probs: Any, mask: Any) -> Any:
        from specforge.core.loss import _compute_loss

        return _compute_loss(logits, probs, mask)


def speculators(case: Case) -> Step:
    import copy

    import torch
    from speculators import SpeculatorModel, SpeculatorModelConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import CollateFn

    draft, data = our_draft(case), row(case)
    head, _ = tables(case)
    settings: dict[str, Any] = {"speculators_model_type": case.method}
    if case.is_block:
        layers, head_rows = _block_config(draft), head.weight
        settings |= {"block_size": BLOCK, "mask_token_id": MASK_ID}
        settings["aux_hidden_state_layer_ids"] = list(range(case.aux_layers))
        if case.method == "dspark":
            settings["markov_rank"] = RANK
    else:
        layers, head_rows = copy.deepcopy(draft.config), head.weight[eagle_vocabulary()[0]]
        names = ("norm_before_residual", "fc_norm", "norm_output", "mask_token_id")
        settings |= {name: getattr(draft.config, name) for name in names}
        settings["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
        if case.method == "peagle":
            from speculators.models.peagle import core

            core.create_block_mask = DenseMask
    layers._attn_implementation = "sdpa"
    config = SpeculatorModelConfig.from_dict(
        {
            "transformer_layer_config": layers,
            "draft_vocab_size": draft.config.draft_vocab_size,
            **settings,
        }
    )
    model = SpeculatorModel.registered_model_class_from_config(config)(config)
    state = draft.state_dict() | {"verifier_lm_head.weight": head_rows}
    state["verifier_norm.weight"] = torch.ones(HIDDEN)
    for name in ("lm_head", "embed_tokens"):
        state.setdefault(f"{name}.weight", getattr(draft, name).weight)
    model.to(draft.dtype).load_state_dict(state)
    if not case.is_block:
        model.lm_head.requires_grad_(True)
    sample = {
        "input_ids": data["ids"][0], "hidden_states": data["aux"][0],
        "verifier_last_hidden_states": data["hidden"][0], "loss_mask": data["loss"][0],
        "lengths": torch.tensor([case.tokens]), "position_ids": torch.arange(case.tokens),
    }  # fmt: skip
    preprocess, terms = (None, "ce") if case.is_block else (shift_batch, "kl_div")
    batch = CollateFn(case.tokens, 0, dtype=draft.dtype, preprocess=preprocess)([sample])
    options: dict[str, Any] = {
        "eagle3": {"ttt_steps": DEPTHS["eagle3"]}, "peagle": {"num_depths": DEPTHS["peagle"]},
    }.get(case.method, {})  # fmt: skip
    if case.is_block:
        options = {"gamma": GAMMA, "max_anchors": case.tokens // TOKENS_PER_ANCHOR}
    if case.method == "dspark":
        terms = '{"ce": 0.1, "tv": 0.9}'
        [(options["tv_loss_fn"], _)] = resolve_loss_config("tv", "eager").values()
    losses = resolve_loss_config(terms, "eager")
    return lambda: model(**batch, loss_config=losses, **options)[1]


def _block_config(draft: Any, **more: Any) -> Any:
    """A peer's config for the same block draft."""
    from transformers import Qwen3Config

    layers = list(range(draft.config.num_aux_hidden_states))
    config = Qwen3Config(
        **SIZES, num_hidden_layers=len(draft.layers), num_target_layers=30, block_size=BLOCK,
        mask_token_id=MASK_ID, target_layer_ids=layers,
        rope_parameters=draft.config.rope_parameters, **more,
    )  # fmt: skip
    config.dflash_config = {"mask_token_id": MASK_ID, "target_layer_ids": layers}
    config._attn_implementation = "sdpa"
    return config


class DenseMask:
    """In place of torch's `create_block_mask`: a mask as SDPA needs it, made once."""

    def __init__(self, mask_mod: Any, *args: Any, Q_LEN: int, KV_LEN: int, **rest: Any) -> None:
        import torch

        zero = torch.zeros((), dtype=torch.long)
        self.dense = mask_mod(zero, zero, torch.arange(Q_LEN)[:, None], torch.arange(KV_LEN))


def sdpa(q: Any, k: Any, v: Any, *, block_mask: Any, scale: Any = None, **rest: Any) -> Any:
    from torch.nn.functional import scaled_dot_product_attention

    return scaled_dot_product_attention(
        q, k, v, attn_mask=block_mask.dense, scale=scale, enable_gqa=True
    )


BUILD = {
    "fledge": ours, "automodel": automodel, "specforge": specforge, "speculators": speculators,
}  # fmt: skip


# --- measuring ----------------------------------------------------------------------------------


def child(trainer: str, case: Case) -> None:
    """Take one step for each line of the input, and answer with its processor time and memory."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    import torch

    torch.manual_seed(0)
    with torch.compiler.set_stance("force_eager"):
        step = BUILD[trainer](case)
        idle = _memory("VmRSS")  # both networks, before anything is kept from a step
        for _ in sys.stdin:
            figures = measured(step, idle)
            answers.write(json.dumps(figures) + "\n")
            answers.flush()


def measured(step: Step, idle: int) -> dict[str, float]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    wall, begin = time.perf_counter(), time.process_time()
    loss = step()
    loss.backward()
    seconds, wall = time.process_time() - begin, time.perf_counter() - wall
    return {
        "seconds": seconds, "wall": wall, "mib": (_memory("VmHWM") - idle) / 1024,
        "loss": float(loss.detach()),
    }  # fmt: skip


def _memory(name: str) -> int:
    """KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


class Entrant:
    def __init__(self, trainer: str, case: Case, threads: int) -> None:
        self.trainer = trainer
        words = [str(case.tokens), str(case.supervised), case.dtype]
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", trainer, case.method, *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip

    def step(self) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            sys.exit(f"{self.trainer} ended; its message is above")
        figures: dict[str, float] = json.loads(line)
        return figures

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def race(case: Case, trainers: list[str], turns: int, threads: int) -> dict[str, dict[str, float]]:
    """Medians of every trainer; the first two steps of each do not count."""
    entrants = [Entrant(trainer, case, threads) for trainer in trainers]
    for entrant in entrants * 2:
        entrant.step()
    steps: dict[str, list[dict[str, float]]] = {trainer: [] for trainer in trainers}
    for _ in range(turns):
        for entrant in entrants:
            steps[entrant.trainer].append(entrant.step())
    for entrant in entrants:
        entrant.end()
    return {
        trainer: {
            "seconds": statistics.median(step["seconds"] for step in taken),
            "wall": statistics.median(step["wall"] for step in taken),
            "mib": max(step["mib"] for step in taken),
            "loss": taken[-1]["loss"],
        }
        for trainer, taken in steps.items()
    }


def table(results: dict[str, dict[str, dict[str, float]]]) -> Iterator[str]:
    """Peer over ours: time / peak memory."""
    yield "| step | ours, s / MiB | AutoModel | SpecForge | speculators |"
    yield "|---|--:|--:|--:|--:|"
    for name, by_trainer in results.items():
        mine = by_trainer["fledge"]
        cells = [
            f"{theirs['seconds'] / mine['seconds']:.2f} / {theirs['mib'] / mine['mib']:.1f}"
            if (theirs := by_trainer.get(trainer))
            else ""
            for trainer in TRAINERS[1:]
        ]
        yield f"| {name} | {mine['seconds']:.2f} / {mine['mib']:,.0f} | {' | '.join(cells)} |"


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        trainer, method, tokens, supervised, dtype = sys.argv[2:]
        child(trainer, Case(method, int(tokens), float(supervised), dtype))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--trainers", nargs="+", default=list(TRAINERS[1:]), choices=TRAINERS[1:])
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--supervised", nargs="+", type=float, default=[0.6, 1.0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, help="keep the figures as JSON")
    args = parser.parse_args()
    results = {}
    for method in args.methods:
        for tokens in args.tokens:
            for supervised in args.supervised:
                case = Case(method, tokens, supervised, args.dtype)
                name = f"{method}, 1 x {tokens:,}, {supervised:.0%} supervised"
                figures = race(case, ["fledge", *args.trainers], args.turns, args.threads)
                results[name] = figures
                print(f"{name}: {json.dumps(figures)}", file=sys.stderr, flush=True)
                if args.out is not None:
                    args.out.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
