"""`fledge chat`: talk to a target that decodes with a draft; the draft's words are green."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

from rich.text import Text
from typer import Argument, Option

from fledge.cli import options as opt
from fledge.cli.console import err, in_color, out, print_json, quiet_libraries
from fledge.cli.llamacpp import CPU_DRAFT_TOKENS, EngineChat, gguf_pair, runs_in_llama_cpp
from fledge.cli.loading import target_options
from fledge.core.errors import BadInput
from fledge.core.terminal import MARKS, marked, visible

EXAMPLE = (
    "Example: fledge chat runs/my_draft --compare\n\n"
    "Example: fledge chat smollm2-135m --draft smollm2-135m-eagle3"
)

# Accepted at depth 1, 2, ...: the further ahead the token was drafted, the deeper the green.
SHADES = ("#d9f2e3", "#b5e4cb", "#8bd2b4", "#5fbd9f", "#3aa58d")
_PROBE_TOKENS = 24  # decoded without the draft, to measure the target's own speed


def chat(
    draft: Annotated[
        Path, Argument(metavar="DRAFT", help="A draft, or a run; with --draft, the target.")
    ],
    target: opt.TargetOption = "",
    draft_option: Annotated[
        Path | None, Option("--draft", metavar="DRAFT", help="The draft, after a target's name.")
    ] = None,
    engine: opt.EngineOption = "",
    draft_tokens: Annotated[
        int, Option(min=0, help="Tokens drafted per round; 0: as trained, on a CPU at most 3.")
    ] = 0,
    method: opt.MethodOption = "",
    max_new_tokens: opt.AnswerTokens = 512,
    temperature: opt.Temperature = 0.0,
    seed: opt.Seed = 0,
    compare: Annotated[
        bool, Option(help="Decode every answer without the draft too: the same text, slower.")
    ] = False,
    aux_layers: Annotated[
        str, Option(help="The layers the draft reads, e.g. 1,14,26; default: its own.")
    ] = "",
    dtype: Annotated[str, Option(help="float32, bfloat16, ...; default: the run's.")] = "",
    device: opt.DeviceOption = "",
    trust_remote_code: opt.TrustRemoteCode = False,
    as_json: Annotated[bool, Option("--json", help="One JSON line per answer.")] = False,
) -> None:
    """Chat in the terminal: the draft's accepted words in green, speed with and without it.

    From a pipe every line is a question: `echo 'Why is the sky blue?' | fledge chat DRAFT`. Answers
    go to standard output, figures to standard error. /reset starts a new conversation, /quit ends
    the chat; Ctrl-C stops an answer.
    """
    quiet_libraries()
    if draft_option is not None:
        if target:
            raise BadInput("is given twice", where="--target", fix="leave it out with --draft")
        draft, target = draft_option, str(draft)
    sampling = {"temperature": temperature, "seed": seed}
    with ExitStack() as opened:
        if runs_in_llama_cpp(engine):
            if method or temperature:
                raise BadInput("not in llama.cpp", where="--method" if method else "--temperature")
            pair = opened.enter_context(gguf_pair(draft, target, draft_tokens))
            session: Any = opened.enter_context(EngineChat(pair, max_new_tokens, _write))
        else:
            loading = (aux_layers, dtype, device, trust_remote_code)
            session = _torch_chat(
                draft, target, method, draft_tokens, loading, sampling, max_new_tokens
            )
        _talk(session, compare=compare, as_json=as_json)


def _torch_chat(
    draft: Path, target: str, method: str, draft_tokens: int, loading_words: tuple[Any, ...],
    sampling: dict[str, Any], max_new_tokens: int,
) -> "_Chat":  # fmt: skip
    from fledge.measure.evaluation import check_fits
    from fledge.training.runs import (
        check_method,
        draft_directory,
        load_draft_beside,
        load_target,
        trained_tokens,
    )

    path = draft_directory(draft)
    check_method(path, method or None)
    with err.waiting("loading the target"):
        loading = target_options(path, *loading_words)
        backend = load_target(path, target, **loading)
        loaded = load_draft_beside(backend, path)
        check_fits(backend, loaded, str(path))
        drafting = {
            "aux_layer_ids": backend.aux_layer_ids,
            "method": method or None,
            "num_draft_tokens": draft_tokens or _fewer_on_a_cpu(trained_tokens(path), backend),
        }
        return _Chat(backend, loaded, drafting, sampling, max_new_tokens)


def _fewer_on_a_cpu(trained: int, target: Any) -> int:
    """On a CPU a drafted token costs a twelfth of a step: those far ahead do not pay."""
    on_cpu = target.get_input_embeddings().weight.device.type == "cpu"
    return min(trained, CPU_DRAFT_TOKENS) if on_cpu else trained


def _talk(session: Any, *, compare: bool, as_json: bool) -> None:
    """Answer every line until the user ends the chat."""
    conversation: list[dict[str, str]] = []
    for line in _lines():
        if line == "/quit":
            return
        if line == "/reset":
            conversation = []
            continue
        conversation.append({"role": "user", "content": line})
        try:
            answer = session.answer(conversation, compare=compare, quiet=as_json)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            conversation.pop()
            err.print("\nstopped", style="dim")
            continue
        conversation.append({"role": "assistant", "content": answer["text"]})
        if as_json:
            print_json(answer, one_line=True)
        else:
            err.say(_figures(answer), style="dim")


def _lines() -> Iterator[str]:
    """The lines that the user enters, from a terminal or a pipe."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    commands = "/reset starts over, /quit ends the chat, Ctrl-C stops an answer"
    err.print(f"the draft's words are {how_marked()}; {commands}", style="dim")
    while True:
        try:
            line = err.input(marked("[bold]you[/] › ")).strip()
        except EOFError:
            return
        if line:
            yield line


class _Chat:
    """Answers with a target and its draft, and with the target alone for comparison."""

    def __init__(
        self, backend: Any, draft: Any, drafting: dict[str, Any], sampling: dict[str, Any],
        max_new_tokens: int,
    ) -> None:  # fmt: skip
        from fledge.data.template import ChatTemplate
        from fledge.decode.speculative import SpeculativeDecoder
        from fledge.decode.stops import Stops, eos_token_ids
        from fledge.target.layers import longest_text

        self._tokenizer = backend.tokenizer
        if self._tokenizer is None:
            raise BadInput("the target has no tokenizer", fix="name a directory that holds one")
        self._template = ChatTemplate.of(self._tokenizer)
        self._stops = Stops(max_new_tokens, eos_token_ids(backend.model, self._tokenizer))
        self._probe = Stops(min(_PROBE_TOKENS, max_new_tokens))
        self._decoder = SpeculativeDecoder(backend.model, draft, **drafting)
        self._plain = SpeculativeDecoder(backend.model)
        self._sampling = sampling
        self._longest = longest_text(backend.model.config)
        self._plain_speed: float | None = None

    def answer(
        self, conversation: list[dict[str, str]], *, compare: bool, quiet: bool
    ) -> dict[str, Any]:
        """Answer, and show the text while it is decoded; returns the text and its figures."""
        from fledge.decode.stops import Pieces
        from fledge.measure.answers import encode_prompt

        ids = encode_prompt(conversation, self._template, self._tokenizer)
        if len(ids) + self._stops.max_new_tokens > self._longest:
            problem = f"{len(ids)} tokens so far, and the target takes {self._longest}"
            raise BadInput(problem, fix="/reset, or a lower --max-new-tokens")
        pieces, shown = Pieces(self._tokenizer), 0

        def show(generation: Any) -> None:
            nonlocal shown
            new, depths = generation.token_ids[shown:], generation.depths[shown:]
            shown = len(generation.token_ids)
            _write(pieces.add(new), depths, quiet=quiet)

        answer, speed = self._generate(self._decoder, ids, self._stops, show)
        show(answer)
        _write([f"{pieces.rest()}\n"], [0], quiet=quiet)
        rounds, emitted = len(answer.rounds), sum(r.emitted for r in answer.rounds)
        figures = {
            "text": self._tokenizer.decode(answer.token_ids, skip_special_tokens=True),
            "finish": answer.finish,
            "tokens": len(answer.token_ids),
            "drafted": sum(r.accepted for r in answer.rounds),
            "rounds": rounds,
            "acceptance_length": emitted / rounds if rounds else None,
            "tokens_per_s": speed,
        }
        if compare or self._plain_speed is None:
            # without the draft: all of the answer, or once just enough to measure the speed
            stops = self._stops if compare else self._probe
            plain, self._plain_speed = self._generate(self._plain, ids, stops, lambda text: None)
            if compare and self._sampling["temperature"] == 0:
                figures["same_text"] = plain.token_ids == answer.token_ids
        return figures | {"plain_tokens_per_s": self._plain_speed}

    def _generate(
        self, decoder: Any, ids: list[int], stops: Any, show: Callable[[Any], None]
    ) -> tuple[Any, float | None]:
        """The answer, and tokens per second without the first, which the prompt's pass yields."""
        [answer] = decoder.generate(
            [ids], stops, **self._sampling, on_round=lambda rows: show(rows[0])
        )
        timing = decoder.timing
        return answer, (len(answer.token_ids) - 1) / timing.decode_s if timing.rounds else None


def _write(pieces: list[str], depths: list[int], *, quiet: bool) -> None:
    if out.is_terminal and not quiet:
        out.print(coloured(pieces, depths), end="", soft_wrap=True)
    elif not quiet:
        out.plain("".join(pieces), end="")


def coloured(pieces: list[str], depths: list[int]) -> Text:
    """Text with the draft's accepted tokens in green; without colors, between marks."""
    text = Text()
    if not in_color():
        for drafted, group in groupby(zip(pieces, depths, strict=True), lambda item: item[1] > 0):
            run = visible("".join(piece for piece, _ in group))
            text.append(f"{MARKS[0]}{run}{MARKS[1]}" if drafted else run)
        return text
    for piece, depth in zip(pieces, depths, strict=True):
        shade = SHADES[min(depth, len(SHADES)) - 1]
        text.append(visible(piece), style=f"black on {shade}" if depth else "")
    return text


def how_marked() -> str:
    """How `coloured` shows the draft's tokens, in words."""
    return "green" if in_color() else f"between {MARKS[0]} and {MARKS[1]}"


def _figures(answer: dict[str, Any]) -> str:
    """One line about an answer."""
    if not answer["rounds"]:
        return f"{answer['tokens']} tokens, no round"
    fast, slow = answer["tokens_per_s"], answer["plain_tokens_per_s"]
    counts = (
        f"{answer['tokens']} tokens in {answer['rounds']} rounds, "
        f"{answer['acceptance_length']:.2f} a round, {answer['drafted']} by the draft"
    )
    parts = [counts, f"{fast:.1f} tokens/s with the draft"]
    if slow:
        parts.append(f"{slow:.1f} without: {fast / slow:.2f}x")
    if "same_text" in answer:
        parts.append("the same text" if answer["same_text"] else "another text (a near tie)")
    return "; ".join(parts)
