"""`fledge chat`: talk to a target that decodes with a draft; the draft's words are green."""

import re
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Annotated, Any

from rich.text import Text
from typer import Option

from fledge.cli import options as opt
from fledge.cli.console import err, facts_table, in_color, out, print_json, quiet_libraries
from fledge.cli.loading import load_target
from fledge.core.errors import BadInput
from fledge.core.terminal import MARKS, marked, visible

EXAMPLE = "Example: fledge chat runs/my_draft --compare"

# Accepted at depth 1, 2, ...: the further ahead the token was drafted, the deeper the green.
SHADES = ("#d9f2e3", "#b5e4cb", "#8bd2b4", "#5fbd9f", "#3aa58d")
_PROBE_TOKENS = 24  # decoded without the draft, to measure the target's own speed
_COMMANDS = {
    "/help": "these lines",
    "/reset": "start a new conversation",
    "/quit": "end (or Ctrl-D)",
    "Ctrl-C": "stop the answer",
}


def chat(
    draft: opt.DraftArgument,
    target: opt.TargetOption = "",
    draft_tokens: opt.TrainedTokens = 0,
    method: opt.MethodOption = "",
    max_new_tokens: opt.AnswerTokens = 512,
    temperature: opt.Temperature = 0.0,
    seed: opt.Seed = 0,
    system: Annotated[str, Option(help="A system message.")] = "",
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
    go to standard output, figures to standard error. /help lists the other commands; Ctrl-C stops
    an answer, not the chat.
    """
    from fledge.training.runs import (
        check_method,
        draft_directory,
        load_draft_beside,
        trained_tokens,
    )

    quiet_libraries()
    path = draft_directory(draft)
    check_method(path, method or None)
    tokens = draft_tokens or trained_tokens(path)
    drafting = {"method": method or None, "num_draft_tokens": tokens}
    with err.waiting("loading the target"):
        backend = load_target(path, target, aux_layers, dtype, device, trust_remote_code)
        sampling = {"temperature": temperature, "seed": seed}
        loaded = load_draft_beside(backend, path)
        session = _Chat(backend, loaded, str(path), max_new_tokens, drafting, sampling)
    start = [{"role": "system", "content": system}] if system else []
    conversation = list(start)
    for line in _lines():
        if line == "/quit":
            return
        if line == "/reset":
            conversation = list(start)
            continue
        if re.fullmatch("/[a-z]+", line):
            if line not in _COMMANDS:
                err.say(f"no command {line}", style="yellow")
            err.print(facts_table(_COMMANDS))
            continue
        conversation.append({"role": "user", "content": line})
        answer = session.answer(conversation, compare=compare, quiet=as_json)
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
    err.print(f"the draft's words are {how_marked()}; /help lists the commands", style="dim")
    while (line := _read_line()) is not None:
        if line:
            yield line


def _read_line() -> str | None:
    """A line from the terminal, None at its end. An interrupt discards the line, not the chat."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return err.input(marked("[bold]you[/] › ")).strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        err.print("\n/quit ends the chat", style="dim")
        return ""
    finally:
        signal.signal(signal.SIGINT, before)


class _Chat:
    """Answers with a target and its draft, and with the target alone for comparison."""

    def __init__(
        self, backend: Any, draft: Any, name: str, max_new_tokens: int, drafting: dict[str, Any],
        sampling: dict[str, Any],
    ) -> None:  # fmt: skip
        from fledge.data.template import ChatTemplate
        from fledge.decode.speculative import SpeculativeDecoder
        from fledge.decode.stops import Stops, eos_token_ids
        from fledge.measure.evaluation import check_fits
        from fledge.target.layers import longest_text

        check_fits(backend, draft, name)
        self._tokenizer = backend.tokenizer
        if self._tokenizer is None:
            raise BadInput("the target has no tokenizer", fix="name a directory that holds one")
        self._template = ChatTemplate.of(self._tokenizer)
        self._stops = Stops(max_new_tokens, eos_token_ids(backend.model, self._tokenizer))
        self._decoder = SpeculativeDecoder(
            backend.model, draft, aux_layer_ids=backend.aux_layer_ids, **drafting
        )
        self._plain = SpeculativeDecoder(backend.model)
        self._sampling = sampling
        self._longest = longest_text(backend.model.config)
        self._plain_speed: float | None = None

    def answer(
        self, conversation: list[dict[str, str]], *, compare: bool, quiet: bool
    ) -> dict[str, Any]:
        """Answer, and show the text while it is decoded; returns the text and its figures."""
        from fledge.measure.answers import encode_prompt

        ids = encode_prompt(conversation, self._template, self._tokenizer)
        if len(ids) + self._stops.max_new_tokens > self._longest:
            problem = f"{len(ids)} tokens so far, and the target takes {self._longest}"
            raise BadInput(problem, fix="/reset, or a lower --max-new-tokens")
        stream = _Stream(self._tokenizer, quiet=quiet)
        generation, complete = self._generate(self._decoder, ids, self._stops, stream.show)
        stream.end(generation)
        rounds, emitted = len(generation.rounds), sum(r.emitted for r in generation.rounds)
        figures = {
            "text": self._tokenizer.decode(generation.token_ids, skip_special_tokens=True),
            "finish": generation.finish if complete else "interrupt",
            "tokens": len(generation.token_ids),
            "drafted": sum(r.accepted for r in generation.rounds),
            "rounds": rounds,
            "acceptance_length": emitted / rounds if rounds else None,
            "tokens_per_s": _speed(generation, self._decoder.timing) if complete else None,
        }
        compared = self._compared(ids, generation, compare=compare) if complete else {}
        return figures | {"plain_tokens_per_s": self._plain_speed} | compared

    def _generate(
        self, decoder: Any, ids: list[int], stops: Any, show: Callable[[Any], None]
    ) -> tuple[Any, bool]:
        """Returns (answer, whether it is complete): Ctrl-C ends it after the current round."""
        from fledge.training.signals import StopSignal

        shown: list[Any] = []
        with StopSignal(signal.SIGINT) as stop:

            def on_round(rows: list[Any]) -> None:
                shown[:] = rows
                show(rows[0])
                if stop.received and rows[0].finish is None:
                    raise _Interrupted

            try:
                [generation] = decoder.generate([ids], stops, **self._sampling, on_round=on_round)
            except _Interrupted:
                return shown[0], False
        return generation, True

    def _compared(self, ids: list[int], generation: Any, *, compare: bool) -> dict[str, Any]:
        """Decode the same prompt without the draft: all of the answer to compare, or once just
        enough of it to measure the target's speed."""
        from fledge.decode.stops import Stops

        if not compare and self._plain_speed is not None:
            return {}
        stops = self._stops if compare else Stops(min(_PROBE_TOKENS, self._stops.max_new_tokens))
        plain, complete = self._generate(self._plain, ids, stops, lambda text: None)
        if complete:
            self._plain_speed = _speed(plain, self._plain.timing)
        if complete and compare and self._sampling["temperature"] == 0:
            return {"same_text": plain.token_ids == generation.token_ids}
        return {}


class _Interrupted(Exception):  # noqa: N818  (not an error)
    """The user stopped the answer."""


def _speed(generation: Any, timing: Any) -> float | None:
    """Tokens per second after the prefill, which yields the first token."""
    return (len(generation.token_ids) - 1) / timing.decode_s if timing.rounds else None


class _Stream:
    """Prints the tokens of an answer round by round."""

    def __init__(self, tokenizer: Any, *, quiet: bool) -> None:
        from fledge.decode.stops import Pieces

        self._pieces, self._shown, self._quiet = Pieces(tokenizer), 0, quiet

    def show(self, generation: Any) -> None:
        new = generation.token_ids[self._shown :]
        depths = generation.depths[self._shown :]
        self._shown = len(generation.token_ids)
        self._write(self._pieces.add(new), depths)

    def end(self, generation: Any) -> None:
        self.show(generation)
        self._write([f"{self._pieces.rest()}\n"], [0])

    def _write(self, pieces: list[str], depths: list[int]) -> None:
        if self._quiet:
            return
        if out.is_terminal:
            out.print(coloured(pieces, depths), end="", soft_wrap=True)
        else:
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
    if fast is None:
        return f"stopped; {counts}"
    parts = [counts, f"{fast:.1f} tokens/s with the draft"]
    if slow:
        parts.append(f"{slow:.1f} without: {fast / slow:.2f}x")
    if "same_text" in answer:
        parts.append("the same text" if answer["same_text"] else "another text (a near tie)")
    return "; ".join(parts)
