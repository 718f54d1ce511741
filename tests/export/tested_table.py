"""Generates the two tables of docs/export.md: what is tested where, and what engines cannot serve.

`python tests/export/tested_table.py` rewrites them; a test checks that the page is up to date.
Kinds of drafts come from the tests' own `KINDS`, versions and limits from `engines.py`.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from fledge.export.engines import ENGINES, SPECULATORS_PEAGLE_LIMITS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "export.md"


@dataclass(frozen=True)
class Tested:
    """A test against a reader of our files; listed if its file is in this checkout."""

    where: str  # file::function
    formats: str
    reader: str
    what: str
    kinds: tuple[str, ...] = ()  # (): the file's KINDS
    newest_only: bool = False  # True: only the kinds that the file adds for newer versions


def _versions(engine: str, *, newest_only: bool = False) -> str:
    title, tested = ENGINES[engine].title, ENGINES[engine].tested
    return f"{title} {', '.join(tested[-1:] if newest_only else tested)}"


_VLLM, _SGLANG = (
    "tests/engines/vllm/test_vllm_export.py",
    "tests/engines/sglang/test_sglang_export.py",
)
_SGLANG_EAGLE1 = "tests/engines/sglang/test_sglang_eagle1.py"
_SPECULATORS = "tests/export/test_export_speculators.py"
_BLOCKS, _DSPARK = (f"tests/engines/vllm/test_vllm_{name}.py" for name in ("blocks", "dspark"))
_PROPOSALS = "every proposed token is ours, at every depth"
TESTED = [
    Tested(
        f"{_VLLM}::test_vllm_proposes_what_we_propose", "plain-vllm, speculators",
        _versions("vllm"), f"{_PROPOSALS}; output is plain greedy's; its counters equal our replay",
    ),
    Tested(
        f"{_VLLM}::test_vllm_proposes_what_unusual_drafts_propose", "plain-vllm",
        _versions("vllm"), "the same",
        kinds=("wider than the target", "llama3 rotary", "yarn rotary", "partial rotary"),
    ),
    Tested(
        f"{_VLLM}::test_vllm_proposes_what_eagle1_drafts_propose", "eagle1-vllm",
        _versions("vllm"), "the same", kinds=("eagle1", "eagle1 of two layers"),
    ),
    *(
        Tested(
            f"tests/engines/vllm/test_vllm_server.py::{test}", "plain-vllm",
            f"{_versions('vllm')}, a server by `serve --run`",
            f"{how}, one and four requests at a time: every round, and /metrics, equal our replay",
            kinds=("eagle3", "p-eagle"),
        )
        for test, how in (("test_greedy", "greedy"), ("test_at_a_temperature", "at a temperature"))
    ),
    Tested(
        f"{_VLLM}::test_a_wrong_config_is_noticed", "plain-vllm, eagle1-vllm", _versions("vllm"),
        "controls: wrong aux layers, norm flags, rotary base and scaling do not pass",
        kinds=("eagle3", "llama3 rotary", "eagle3.1", "p-eagle", "eagle1"),
    ),
    Tested(
        f"{_BLOCKS}::test_vllm_proposes_the_blocks_that_we_propose",
        "dflash-flat, speculators-dflash", _versions("vllm"),
        f"{_PROPOSALS}; output is plain greedy's; its counters equal our replay",
        kinds=("dflash",),
    ),
    Tested(
        f"{_BLOCKS}::test_vllm_proposes_what_unusual_blocks_propose", "dflash-flat",
        _versions("vllm"), "the same", kinds=("causal", "small vocabulary", "sliding layers"),
    ),
    Tested(
        f"{_BLOCKS}::test_a_wrong_block_is_noticed", "dflash-flat, speculators-dflash",
        _versions("vllm"),
        "controls: wrong layers, placeholder, rotary layout and direction do not pass",
        kinds=("dflash",),
    ),
    Tested(
        f"{_DSPARK}::test_vllm_computes_our_blocks", "dspark-flat, speculators-dspark",
        f"{_versions('vllm')}, its loader and classes (its runner wants a GPU)",
        "logits, Markov biases, confidences to 1e-4, tokens; wrong tensors do not pass",
        kinds=("dspark",),
    ),
    Tested(
        f"{_SGLANG}::test_every_parameter_comes_from_the_files", "plain-sglang",
        _versions("sglang"), "its draft class and loader: no parameter stays as initialised",
    ),
    Tested(
        f"{_SGLANG}::test_every_proposal_is_ours", "plain-sglang", _versions("sglang"),
        f"{_PROPOSALS}, logits to 1e-3; neighbouring layers do not pass",
    ),
    Tested(
        f"{_SGLANG}::test_every_proposal_is_ours", "plain-sglang",
        _versions("sglang", newest_only=True), "the same", newest_only=True,
    ),
    Tested(
        f"{_SGLANG_EAGLE1}::test_every_proposal_is_ours", "eagle1-sglang", _versions("sglang"),
        "every parameter and every proposal, logits to 1e-3; another bias of fc does not pass",
        kinds=("eagle1",),
    ),
    Tested(
        f"{_SGLANG_EAGLE1}::test_every_proposal_is_ours", "eagle1-sglang",
        _versions("sglang", newest_only=True), "the same", kinds=("eagle1 of two layers",),
    ),
    Tested(
        f"{_SPECULATORS}::test_eagle3_loads_and_computes_our_logits", "speculators-eagle3",
        _versions("speculators"), "every tensor is loaded; logits of 4 depths to 1e-4",
        kinds=("eagle3", "full vocabulary", "eagle3.1"),
    ),
    Tested(
        f"{_SPECULATORS}::test_peagle_loads_and_computes_our_logits", "speculators-peagle",
        _versions("speculators"), "every tensor is loaded; logits of 4 depths to 1e-4",
        kinds=("peagle",),
    ),
    Tested(
        "tests/export/test_export_speculators_blocks.py::test_they_load_and_compute_our_logits",
        "speculators-dflash, speculators-dspark", _versions("speculators"),
        "every tensor is loaded; logits, Markov biases, confidences of all slots to 1e-4",
        kinds=("dflash", "dspark", "small vocabularies of both"),
    ),
    Tested(
        f"{_SPECULATORS}::test_their_converter_takes_our_plain_exports", "plain-vllm",
        f"{_versions('speculators')}, converter", "converted, loaded, logits to 1e-4",
        kinds=("eagle3", "full vocabulary"),
    ),
    Tested(
        f"{_SPECULATORS}::test_their_converter_takes_exports_without_embeddings", "plain-sglang",
        f"{_versions('speculators')}, converter", "converted tensor by tensor",
        kinds=("eagle3", "full vocabulary"),
    ),
    Tested(
        "tests/export/test_export_files.py::test_files_match_the_draft",
        "plain-vllm, plain-sglang, speculators", "our reader (`reread.py`)",
        "every tensor and flag; decoding equal to the checkpoint's",
    ),
    Tested(
        "tests/train/test_eagle1_run.py::test_evaluated_and_exported", "eagle1-vllm, eagle1-sglang",
        "our reader (`reread.py`)", "the same", kinds=("eagle1", "eagle2"),
    ),
    Tested(
        "tests/export/test_export_blocks.py::test_the_files_match_the_draft_and_decode_like_it",
        "dflash-flat, dspark-flat, speculators", "our reader (`reread_block.py`)",
        "every tensor and flag; decoding equal to the checkpoint's",
        kinds=("dflash", "dspark", "small vocabularies, causal, sliding"),
    ),
    Tested(
        "tests/export/test_export_files.py::test_a_broken_file_is_named",
        "plain-vllm, plain-sglang, speculators", "our reader (`reread.py`)",
        "broken exports are named",
    ),
]  # fmt: skip


def _kinds(module: ast.Module, *, newest_only: bool) -> list[str]:
    """The keys of KINDS: those at module level, or those added under a condition."""
    blocks = [node for node in module.body if isinstance(node, ast.If)] if newest_only else [module]
    names: list[str] = []
    for block in blocks:
        for node in block.body:
            targets = (
                node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            )
            value = getattr(node, "value", None)
            if any(getattr(target, "id", "") == "KINDS" for target in targets) and value:
                names += [key.value for key in getattr(value, "keys", [])]
    return names


def _module(path: str) -> ast.Module | None:
    file = ROOT / path
    return ast.parse(file.read_text()) if file.is_file() else None


def tested_table() -> str:
    rows = ["| format | read by | drafts | what is tested |", "|---|---|---|---|"]
    shared = _module("tests/export/export_cases.py")
    assert shared is not None
    for test in TESTED:
        path, function = test.where.split("::")
        module = _module(path)
        if module is None:  # the engines' tests may not be part of this checkout
            continue
        names = {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
        assert function in names, f"{test.where}: no such test"
        kinds = (
            test.kinds
            or _kinds(module, newest_only=test.newest_only)
            or _kinds(shared, newest_only=False)
        )
        rows.append(f"| {test.formats} | {test.reader} | {', '.join(kinds)} | {test.what} |")
    return "\n".join(rows)


def limits_table() -> str:
    rows = ["| engine | cannot serve | since | instead |", "|---|---|---|---|"]
    for engine in ENGINES.values():
        rows += [
            f"| {engine.title} | {limit.feature} | {limit.since or 'never'} | {limit.instead} |"
            for limit in engine.limits
        ]
    rows += [
        f"| speculators, P-EAGLE | {limit.feature} | never | {limit.instead} |"
        for limit in SPECULATORS_PEAGLE_LIMITS
    ]
    return "\n".join(rows)


def with_tables(page: str) -> str:
    """The page with both tables regenerated."""
    for name, table in (("tested", tested_table()), ("limits", limits_table())):
        marks = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        page, count = re.subn(
            f"{marks[0]}.*?{marks[1]}", f"{marks[0]}\n{table}\n{marks[1]}", page, flags=re.DOTALL
        )
        assert count == 1, f"no place for the table '{name}'"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
