"""What the verbs that run llama.cpp share: a draft and its target as files, and a server."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from fledge.cli.console import err
from fledge.core.errors import BadInput, nearest

if TYPE_CHECKING:
    from fledge.decode.llamacpp import LlamaServer

ENGINE = "llama.cpp"
CPU_DRAFT_TOKENS = 3  # a round by default: also llama.cpp's own default


def runs_in_llama_cpp(engine: str) -> bool:
    """Whether `--engine` asks for llama.cpp; otherwise it must ask for nothing."""
    if engine not in ("", ENGINE):
        raise BadInput(
            f"no engine '{engine}' here", where="--engine", fix=nearest(engine, [ENGINE])
        )
    return bool(engine)


@dataclass(frozen=True)
class Pair:
    """A draft and its target as GGUF files."""

    target_name: str
    target: Path
    draft: Path
    spec_type: str
    draft_tokens: int

    def serve(self, **options: Any) -> "LlamaServer":
        from fledge.decode.llamacpp import LlamaServer

        return LlamaServer.start(
            self.target, self.draft, spec_type=self.spec_type, draft_tokens=self.draft_tokens,
            **options,
        )  # fmt: skip

    def serve_plain(self) -> "LlamaServer":
        from fledge.decode.llamacpp import LlamaServer

        return LlamaServer.start(self.target)


@contextmanager
def gguf_pair(draft: Path, target: str = "", draft_tokens: int = 0) -> Iterator[Pair]:
    """The files of an export for llama.cpp, or of any draft, which is exported for the moment."""
    from fledge.decode.llamacpp import llama_cpp

    llama_cpp()  # says how to install it before anything is written
    with TemporaryDirectory(prefix="fledge-") as scratch:
        yield pair_of(exported(draft, target, Path(scratch) / "draft"), draft, target, draft_tokens)


def exported(draft: Path, target: str = "", place: Path | None = None) -> Path:
    """An export for llama.cpp: `draft` itself if it is one, else made at `place` in q8_0 (default:
    where `fledge export` puts it, unless it has been made there before)."""
    from fledge.formats.codec import RECORD_NAME
    from fledge.formats.export import export_draft
    from fledge.formats.source import default_out

    if (draft / RECORD_NAME).is_file():
        return draft
    out = place or default_out(draft, ENGINE)
    if (out / RECORD_NAME).is_file():
        return out
    return export_draft(
        draft, out, engine=ENGINE, target=target, without_target=True, quantise="q8_0"
    )


def pair_of(place: Path, draft: Path, target: str, draft_tokens: int) -> Pair:
    """The files of the export at `place`, made from `draft`."""
    from fledge.formats.export import read_export_record
    from fledge.methods.registry import METHODS
    from fledge.models.resolve import gguf_file
    from fledge.target.kinds import model_name
    from fledge.training.runs import draft_directory, recipe_of

    record = read_export_record(place)
    if record["engine"] != ENGINE:
        what = f"it is an export for {record['engine_title']}"
        raise BadInput(what, where=str(draft), fix="name the run, or export it for llama.cpp")
    if not target:
        recipe = recipe_of(draft if place == draft else draft_directory(draft))
        target = model_name(recipe.target) if recipe else record["target"]["name"]
    algorithm = METHODS[record["objective"]].algorithms[ENGINE]
    tokens = draft_tokens or min(record["num_draft_tokens"], CPU_DRAFT_TOKENS)
    return Pair(target, gguf_file(target), place / record["file"], algorithm, tokens)


def run_until_stopped(server: "LlamaServer") -> None:
    """Keep a server of this process running until Ctrl-C."""
    err.say(f"llama.cpp in this process, at {server.url}; Ctrl-C stops it", style="cyan")
    with server, suppress(KeyboardInterrupt):
        threading.Event().wait()


class EngineChat:
    """Answers of llama.cpp, with a draft and without, for `fledge chat`. `write` shows pieces of
    text and how far ahead each was drafted."""

    def __init__(self, pair: Pair, max_new_tokens: int, write: Callable[..., None]) -> None:
        from fledge.data.template import ChatTemplate
        from fledge.models.resolve import load_tokenizer

        self._tokenizer = load_tokenizer(pair.target_name)
        self._template = ChatTemplate.of(self._tokenizer)
        self._most, self._write = max_new_tokens, write
        self._drafted, self._plain = pair.serve(), pair.serve_plain()
        self._plain_speed = 0.0

    def __enter__(self) -> "EngineChat":
        return self

    def __exit__(self, *error: object) -> None:
        self._drafted.close()
        self._plain.close()

    def answer(
        self, conversation: list[dict[str, str]], *, compare: bool, quiet: bool
    ) -> dict[str, Any]:
        """Answer, and show the text while it is decoded; returns the text and its figures."""
        from fledge.measure.answers import encode_prompt

        ids = encode_prompt(conversation, self._template, self._tokenizer)

        def show(piece: str, depth: int) -> None:
            self._write([piece], [depth], quiet=quiet)

        answer = self._drafted.complete(ids, self._most, on_token=show)
        self._write(["\n"], [0], quiet=quiet)
        rounds = answer.rounds
        figures: dict[str, Any] = {
            "text": answer.text,
            "finish": answer.finish,
            "tokens": answer.tokens,
            "drafted": answer.accepted,
            "rounds": rounds,
            "acceptance_length": (answer.tokens - 1) / rounds if rounds else None,
            "tokens_per_s": answer.tokens_per_s,
        }
        if compare or not self._plain_speed:
            plain = self._plain.complete(ids, self._most if compare else 24)
            self._plain_speed = plain.tokens_per_s
            if compare:
                figures["same_text"] = plain.text == answer.text
        return figures | {"plain_tokens_per_s": self._plain_speed}
