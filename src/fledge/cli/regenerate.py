"""`fledge regenerate`: have the target answer a data set again."""

import importlib.util
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from fledge.cli import options as opt
from fledge.cli.console import err, out, print_json, progress_bar, quiet_libraries
from fledge.cli.data import template_variables
from fledge.cli.llamacpp import runs_in_llama_cpp
from fledge.core.errors import BadInput
from fledge.core.install import install_extra
from fledge.core.terminal import counted

if TYPE_CHECKING:
    from fledge.decode.llamacpp import LlamaServer

_PROMPT_TOKENS = 2048  # of a conversation so far, in llama.cpp

EXAMPLE = (
    "Example: fledge regenerate chats.jsonl --out answers.jsonl --target smollm2-135m\n\n"
    "Example: fledge regenerate chats.jsonl --out answers.jsonl --url http://localhost:8000"
)


def regenerate(
    sources: Annotated[
        list[str], Argument(metavar="DATA", help="Files, directories, addresses, data set ids.")
    ],
    output: Annotated[Path, Option(*opt.OUT, help="The new data set (.jsonl).")],
    target: Annotated[str, Option(help="Run this model here.")] = "",
    engine: Annotated[
        str, Option(help="llama.cpp: run it in llama.cpp, as its GGUF file will be served.")
    ] = "",
    url: Annotated[
        list[str] | None,
        Option(help="Or ask an OpenAI-compatible server; repeatable, they take turns."),
    ] = None,
    model: Annotated[str, Option(help="The server's model; default: its only one.")] = "",
    max_new_tokens: opt.AnswerTokens = 1024,
    temperature: opt.Temperature = 0.0,
    seed: opt.Seed = 0,
    template_option: Annotated[
        list[str] | None,
        Option(metavar="NAME=VALUE", help="For the chat template: enable_thinking=false."),
    ] = None,
    limit: Annotated[int, Option(min=0, help="Rows; 0: all.")] = 0,
    batch: Annotated[int, Option(min=1, help="Questions at a time, run here.")] = 16,
    concurrency: Annotated[int, Option(min=1, help="Requests at a time, to servers.")] = 32,
    retries: Annotated[int, Option(min=0, help="Of a request that failed.")] = 5,
    timeout: Annotated[float, Option(min=0.001, help="Seconds for one request.")] = 600.0,
    extra: Annotated[str, Option(help="JSON added to requests: '{\"top_p\": 0.9}'.")] = "",
    max_failed_share: Annotated[
        float, Option(min=0.0, max=1.0, help="Exit with code 1 above this share.")
    ] = 0.05,
    dtype: Annotated[str, Option(help="Of a model run here; auto: as stored.")] = "auto",
    device: opt.DeviceOption = "",
    trust_remote_code: opt.TrustRemoteCode = False,
    as_json: opt.OutcomeAsJson = False,
) -> None:
    """Rewrite every answer with the target's own words: what a draft should learn from.

    Conversations are answered again, turn by turn. After a kill the same command continues: every
    row once, none lost. It may run any number of times at once, on any machines that see --out:
    they share the rows. Rows that fail are kept with their reasons, and tried again next time.
    $OPENAI_API_KEY, when set, is sent to servers.
    """
    from fledge.data.dialogue import Sampling
    from fledge.data.regenerate import check_out
    from fledge.data.regenerate import regenerate as run

    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        template_options=template_variables(template_option),
    )
    check_out(output, sources)
    if bool(target) == bool(url):
        raise BadInput("who answers?", fix="give either --target MODEL or --url http://host:port")
    if target and (extra or model):
        where, fix = "--extra" if extra else "--model", "give --url, or leave it out"
        raise BadInput("is for servers", where=where, fix=fix)
    ask = partial(_servers, retries=retries, timeout=timeout, extra=extra)
    with ExitStack() as opened:
        if runs_in_llama_cpp(engine):
            server = opened.enter_context(_llama_cpp(target, max_new_tokens, batch))
            answerer = ask([server.url], "", sampling, batch)
        elif target:
            answerer = _open_local(target, sampling, batch, dtype, device, trust_remote_code)
        else:
            answerer = ask(url, model, sampling, concurrency)
        job = partial(
            run, sources, output.absolute(), answerer, sampling, limit=limit or None,
            patience=max(64, 2 * concurrency),
        )  # fmt: skip
        summary = _with_progress(job)
    if as_json:
        print_json({"out": str(output), **summary.to_json()})
    else:
        _show(summary, output)
    if summary.failed.dropped > max_failed_share * summary.rows:
        err.print(f"{summary.failed.share:.1%} of the rows failed", style="red")
        raise Exit(1)


def _with_progress(job: Callable[..., Any]) -> Any:
    """Run the job with a progress bar; other processes may share the rows."""
    with progress_bar("answering") as show:

        def watch(done: int, summary: Any) -> None:
            speed = summary.tokens_now / summary.seconds_now if summary.seconds_now else 0.0
            note = f"{speed:,.0f} tok/s"
            note += f", {summary.failed_now:,} failed" if summary.failed_now else ""
            show("answering", done, summary.rows, "rows", note)

        return job(watch=watch, say=lambda line: err.say(line, style="cyan"))


def _open_local(
    name: str, sampling: Any, batch: int, dtype: str, device: str, trust_remote_code: bool
) -> Any:
    from fledge.cli.loading import parse_dtype
    from fledge.decode.regenerate import LocalModel
    from fledge.target.hf.loading import load_hf_model

    quiet_libraries()
    options = {"dtype": parse_dtype(dtype), "device": device or None}
    with err.waiting("loading the target"):
        loaded = load_hf_model(name, **options, trust_remote_code=trust_remote_code)
    return LocalModel(loaded, name, sampling, batch)


def _llama_cpp(target: str, max_new_tokens: int, at_a_time: int) -> "LlamaServer":
    from fledge.decode.llamacpp import LlamaServer
    from fledge.models.resolve import gguf_file

    if not target:
        raise BadInput("which model?", where="--engine llama.cpp", fix="give --target MODEL.gguf")
    with err.waiting("loading the target"):
        context = at_a_time * (_PROMPT_TOKENS + max_new_tokens)
        return LlamaServer.start(gguf_file(target), context=context, parallel=at_a_time)


def _servers(
    urls: Any, model: str, sampling: Any, concurrency: int, *, retries: int, timeout: float,
    extra: str,
) -> Any:  # fmt: skip
    if importlib.util.find_spec("httpx") is None:
        raise BadInput("asking servers needs httpx", fix=install_extra("serve"))
    from fledge.data.chat_servers import ChatServers, HttpOptions

    try:
        body = json.loads(extra) if extra else {}
    except ValueError as error:
        raise BadInput(f"not JSON ({error})", where="--extra") from None
    if not isinstance(body, dict):
        raise BadInput("not a JSON object", where="--extra")
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    options = HttpOptions(concurrency, retries, timeout, headers=headers, body=body)
    return ChatServers(urls, model, sampling, options)


def _show(summary: Any, output: Path) -> None:
    done = f"{summary.written:,} of {counted(summary.rows, 'row')} in {output}"
    cut = f"{counted(summary.truncated, 'answer')} cut at the length limit"
    out.say(f"{done}; {counted(summary.tokens, 'token')}; {cut}")
    for reason, count in sorted(summary.failed.counts.items(), key=lambda item: -item[1]):
        first = summary.failed.examples[reason][0]
        out.say(f"  {count:,} failed: {reason} (first: {first})")
    if summary.failed.dropped:
        out.print("the same command tries them again", style="dim")
