"""Recipe sections other than target and objective: data, draft, training, ...

Defaults are what a practitioner would start an 8B run with on one GPU; shipped recipes explain
where they differ and why. Does not import torch.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from fledge.core.settings import (
    Count,
    Device,
    NonNegative,
    Positive,
    PositiveCount,
    PositiveShare,
    Section,
    Share,
    ShareBelowOne,
    Text,
    Texts,
)


class Data(Section):
    """Conversations: where they come from and what is supervised."""

    train: Texts = ()
    """Files (jsonl, json, parquet), directories, addresses (s3://, hf://, https://) of them, data
    set ids (org/name, org/name:train[:99])."""

    valid: Texts = ()
    """Held-out conversations, same forms as train; empty: valid_rows are taken from train."""

    valid_rows: Count | None = None
    """Rows kept out of training for acceptance when `valid` is empty; null: a tenth of them, at
    most 512; 0: none."""

    max_length: PositiveCount = 2048
    """Longest row in tokens."""

    overlong: Literal["cut", "drop"] = "cut"
    """What happens to longer rows; both are counted."""

    last_turn_only: bool = False
    """Supervise only the last assistant turn of a conversation."""

    mask_reasoning: bool = False
    """Leave the assistant's reasoning out of the supervision."""

    drop_truncated: bool = False
    """Leave out answers that were cut by a length limit when they were generated."""

    max_drop_share: Share = 0.05
    """Stop when more than this share of the rows cannot be used; long rows do not count."""

    template_options: dict[str, Any] = Field(default_factory=dict)
    """Variables handed to the chat template, for example enable_thinking: false."""

    workers: PositiveCount | None = None
    """Processes that tokenize; null: one per CPU core."""


class Packing(Section):
    """How rows share the fixed token budget of a pack."""

    tokens: PositiveCount = 8192
    """Tokens per pack, padding included; at least data.max_length."""

    padded: bool = False
    """One conversation per pack, padded: only for comparisons."""

    seed: Count = 0
    """Order of the rows; the epoch number is mixed in."""


class Draft(Section):
    """The draft model; everything else is derived from the target's configuration."""

    layers: PositiveCount = 1
    """Decoder layers; by default 4 for P-EAGLE, 5 for block drafts. SGLang 0.5.9 serves EAGLE
    drafts with 1 only."""

    draft_vocab_size: PositiveCount | None = 32_000
    """The draft can propose this many of the most frequent tokens; null: all of the target's, the
    default for block drafts and MTP."""

    intermediate_size: PositiveCount | None = None
    """Width of the MLP; null: the target's."""

    fc_norm: bool = False
    """EAGLE-3.1: normalize each aux state before fc. Not in SGLang 0.5.9."""

    norm_output: bool = False
    """EAGLE-3.1: feed the normalized state to the next step. Not in SGLang 0.5.9."""

    qk_norm: bool = False
    """Normalize queries and keys head by head, as Qwen3 does. vLLM only."""

    freeze_embeddings: bool = True
    """Keep the target's embeddings; by default false for P-EAGLE. SGLang always uses the
    target's."""

    head_from_target: bool = True
    """Start the head from the target's rows of the draft vocabulary."""

    layers_from_target: bool = False
    """EAGLE-3, P-EAGLE, MTP: start with copies of the target's last layers and its norm, behind an
    fc that passes on the last aux state. The target must be in this process, with layers like
    Llama's."""

    init_from: Text | None = None
    """Draft to start from (a run, a checkpoint, an export for vLLM; `fledge import` converts
    others); its vocabulary map is kept. target: the native head in the target's files (MTP)."""

    @property
    def computation(self) -> dict[str, Any]:
        """The keys of the draft's config that say what it computes."""
        return self.model_dump(include={"fc_norm", "norm_output", "qk_norm"})


class Training(Section):
    """The optimizer and its schedule."""

    lr: Positive = 1e-4
    """Peak learning rate. 1e-4 suits 8B targets; small drafts need more (SmolLM2: 2e-3)."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the matrices of the layers and fc, with steps as large as AdamW's, which
    updates the rest. Not with shard."""

    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.95)
    """AdamW's two decay rates."""

    eps: Positive = 1e-8
    """AdamW's epsilon."""

    weight_decay: NonNegative = 0.0
    """Weight decay, on matrices only."""

    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """After the warm-up. wsd: constant, then falling over the last decay_share of all steps."""

    decay_share: PositiveShare = 0.2
    """For wsd: share of all steps during which the rate falls (as 1 - sqrt)."""

    warmup_share: ShareBelowOne = 0.02
    """Share of all steps spent warming up, unless warmup_steps is given."""

    warmup_steps: Count | None = None
    """Warm-up in steps; null: by warmup_share."""

    final_lr_share: Share = 0.0
    """The schedule ends at this share of lr."""

    epochs: Annotated[PositiveCount, Field(le=10_000)] = 1
    """Passes over the data, unless steps is given."""

    steps: PositiveCount | None = None
    """Optimizer steps; null: by epochs."""

    micro_batch: PositiveCount = 1
    """Packs per forward and rank."""

    accumulate: PositiveCount = 1
    """Forwards per optimizer step; the gradient is that of one big batch."""

    clip: Positive | None = 1.0
    """Largest gradient norm; null: no clipping."""

    seed: Count = 0
    """Initialization, sampling and noise."""

    device: Device = "auto"
    """auto: the rank's GPU when there is one, else the CPU."""

    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Weights and moments stay float32; auto computes in bfloat16 on GPUs from Ampere on, and on
    CPUs that multiply it if the target does; else in float32."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward: less memory, one more forward."""

    record_steps: bool = True
    """On one GPU, run the steps of small EAGLE-3, P-EAGLE and block drafts as CUDA graphs,
    which removes Python's overhead; false: step by step, as everywhere else."""

    shard: PositiveCount = 1
    """Processes that share one copy of the draft's weights and moments (FSDP2)."""

    context: PositiveCount = 1
    """Processes that share their rows, each a slice: for rows too long for one."""

    prefetch: Count = 2
    """Batches prepared ahead; 0: none."""

    spike_factor: Positive | None = 10.0
    """Skip a step whose gradient norm is above this many times its recent median; null: off."""

    max_bad_steps: PositiveCount = 5
    """Stop after this many skipped steps (spike, NaN, infinity) in a row."""

    @model_validator(mode="after")
    def _muon_without_shards(self) -> "Training":
        if self.optimizer == "muon" and self.shard > 1:
            raise ValueError(
                "muon needs whole matrices, which ranks with shard > 1 do not have; leave one out"
            )
        return self


class Checkpoint(Section):
    """What is saved, and whether a run continues."""

    every_steps: PositiveCount = 500
    """Steps between two checkpoints; one is also saved at the end."""

    keep: PositiveCount = 2
    """Newest checkpoints kept; the best by acceptance is kept besides."""


class Evaluation(Section):
    """Acceptance on held-out rows during training, by replay: it chooses the best checkpoint."""

    every_steps: PositiveCount = 500
    """Also at the start and at the end."""

    rows: PositiveCount = 256
    """Held-out rows used each time, at most."""


class Tracking(Section):
    """Where metrics go besides metrics.jsonl, which is always written."""

    trackers: Annotated[
        tuple[Literal["tensorboard", "wandb"], ...],
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    ] = ()
    """Any of tensorboard, wandb (extra: track)."""

    project: Text = "fledge"
    """Project name shown by the trackers."""

    every_steps: PositiveCount = 10
    """Steps between two lines of metrics."""


class Run(Section):
    """Where the run lives."""

    output_dir: Text = "runs/draft"
    """Everything the run writes: recipe, metrics, checkpoints."""

    name: Text | None = None
    """Name shown by trackers and reports; null: the last part of output_dir."""
