"""Arguments and options that several verbs share."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

# The destination of results is --out everywhere; the other spellings are accepted as aliases.
OUT = ("--out", "--output-dir", "-o")

RecipeWords = Annotated[
    list[str],
    Argument(
        metavar="RECIPE|section.key=value",
        help="A recipe file, then overrides of its values.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, Option("--json", help="Print JSON.")]
OutcomeAsJson = Annotated[bool, Option("--json", help="Print the outcome as JSON.")]
TrustRemoteCode = Annotated[
    bool, Option("--trust-remote-code", help="Run Python code that comes with the model.")
]
DeviceOption = Annotated[str, Option(help="cpu, cuda, ...; default: a GPU if any.")]

RayAddress = Annotated[
    str, Option(help="HOST:PORT of the cluster's head; auto: the one this machine is part of.")
]

# drafts and how they are used
DraftArgument = Annotated[Path, Argument(metavar="DRAFT", help="A draft, or a run (its best one).")]
DraftArguments = Annotated[
    list[Path], Argument(metavar="DRAFT", help="Drafts, or runs (their best ones).")
]
TargetOption = Annotated[str, Option(help="The target; default: the one in the draft's run.")]
MethodOption = Annotated[
    str,
    Option(help="A strategy of the draft's method: chain, tree, ...; default: as trained."),
]
TrainedTokens = Annotated[int, Option(min=0, help="Tokens drafted per round (k); 0: as trained.")]
EngineOption = Annotated[
    str, Option(help="llama.cpp: decode in it, in this process; default: in torch.")
]
Prompts = Annotated[
    list[str] | None,
    Option(help="JSONL with `messages` or `prompt`, or the set `mixed`; repeatable."),
]
PromptLimit = Annotated[int, Option(min=0, help="Prompts per file; 0: all.")]
RunDtype = Annotated[
    str, Option(help="float32, bfloat16, ...; auto: as stored; default: the run's.")
]
LiveAnswers = Annotated[
    int, Option(min=0, help="Answers that are also decoded live, to check and time them.")
]
MeasuredTokens = Annotated[int, Option(min=2, help="Length limit of answers.")]
AnswerTokens = Annotated[int, Option(min=1, help="Length limit of an answer.")]
Temperature = Annotated[float, Option(min=0.0, help="0: always the likeliest token.")]
Seed = Annotated[int, Option(min=0, max=2**63 - 1, help="Random seed, for temperatures above 0.")]

# caches
EncodingOption = Annotated[str, Option(help="hidden | hidden-fp8 | probs | topk.")]
CacheDtype = Annotated[
    str, Option(help="How floats are stored: fp32 | bf16 | fp16; auto: as computed.")
]
TargetDtype = Annotated[
    str, Option(help="How the target computes: fp32 | bf16 | ...; default: target.dtype.")
]
TopK = Annotated[int | None, Option("--top-k", min=1, help="Probabilities kept (topk).")]
ShardSize = Annotated[int, Option(min=1, help="Rows per shard.")]
Resume = Annotated[bool, Option("--resume", help="Continue an unfinished cache.")]
Quota = Annotated[float | None, Option("--quota-gb", help="Never write more shards than this.")]
