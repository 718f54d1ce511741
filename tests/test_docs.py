"""What the pages say exists: links, files, public names, and every command line they show."""

import re
import shlex
from pathlib import Path

import pytest
import typer.main

import fledge
from fledge.cli.main import app
from fledge.recipe.schema import load_recipe, split_arguments

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md")])
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
FENCED = re.compile(r"^```\w*\n(.*?)^```", flags=re.M | re.S)
COMMAND = r"((?:[A-Z_]+=\S+ )?fledge [a-z][^`\n]*)"
PUBLIC = re.compile(r"`((?:Eagle[13]|HFEagle3|LlamaEagle[13]|PEagle|Remote|SGLang|VLLM)[A-Z]\w+)")
TAKES_RECIPE = ("train", "plan", "precompute", "recipe")


def named(path):
    return str(path.relative_to(ROOT))


def anchor(heading: str) -> str:
    """As GitHub makes it of a heading."""
    words = re.sub(r"[^\w\s-]", "", heading.strip().lower().replace("`", ""))
    return re.sub(r"\s", "-", words)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        name, _, part = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{link} leads nowhere"
        if part:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.M)
            assert part in [anchor(heading) for heading in headings], f"{link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_files_that_are_named_exist(page):
    """`src/...`, `tests/...`, `recipes/...`, and in the tour paths inside the package."""
    text = page.read_text()
    for name in re.findall(r"`((?:src|tests|recipes|benchmarks|docs|tools)/[\w./-]+\.\w+)`", text):
        assert (ROOT / name).exists(), name
    if page.name == "tour.md":
        rooms = "|".join(path.name for path in (ROOT / "src/fledge").iterdir() if path.is_dir())
        for name in re.findall(rf"`((?:(?:{rooms})/)?\w+\.py|(?:{rooms})/)`", text):
            inside = [ROOT / "src/fledge" / name, *(ROOT / "src/fledge").rglob(name)]
            assert any(path.exists() for path in inside), name


def test_public_names_of_the_pages_exist():
    pages = (page.read_text() for page in PAGES if page.parent.name == "docs")
    names = {name for text in pages for name in PUBLIC.findall(text)}
    assert len(names) > 5
    for name in names:
        assert name in fledge.__all__, name


def shown():
    """(where, command line) of the pages, the recipes' comments and the examples of `--help`."""
    for path in [*PAGES, *RECIPES]:
        if path.name == "CHANGELOG.md":  # speaks of the past
            continue
        text = re.sub(r"\\\n[#\s]*", "", path.read_text())
        blocks = text if path.suffix == ".yaml" else "\n".join(FENCED.findall(text))
        lines = re.findall(rf"^(?:\$ |#\s*)?{COMMAND}", blocks, flags=re.M)
        lines += re.findall(rf"`{COMMAND}`", FENCED.sub("", text).replace("\n", " "))
        yield from ((named(path), line) for line in lines)

    def examples(command, verb):
        for line in re.findall(r"(?:^|: )(fledge [a-z].*)", command.epilog or "", flags=re.M):
            yield f"{verb} --help", line
        for name, sub in getattr(command, "commands", {}).items():
            yield from examples(sub, f"{verb} {name}")

    yield from examples(typer.main.get_command(app), "fledge")


def words_of(line: str) -> list[str]:
    """A command line without comments, pipes and what stands before the command."""
    words = shlex.split(re.split(r"\s#|\s[|>&]|;|\s\(|\sthen:", line)[0])
    return words[words.index("fledge") + 1 :]


@pytest.mark.parametrize(("where", "line"), sorted(set(shown())), ids=lambda text: text[:60])
def test_command_lines_are_understood(where, line):
    words, command = words_of(line), typer.main.get_command(app)
    context = command.make_context("fledge", [], resilient_parsing=True)
    verb = words[0]
    while hasattr(command, "commands") and words:
        _, command, words = command.resolve_command(context, words)
        context = command.make_context(verb, [], parent=context, resilient_parsing=True)
    if not any(word.startswith("-") or "=" in word or "." in word or "/" in word for word in words):
        return  # a mention, not a command line
    if any(re.fullmatch(r"[A-Z]|\.\.\.|\[.*", word) for word in words):
        return  # with letters for numbers, or an ellipsis
    parsed = command.make_context(verb, list(words)).params
    if verb in TAKES_RECIPE and parsed.get("arguments"):
        path, overrides = split_arguments(parsed["arguments"])
        if path is not None and str(path).startswith("recipes/"):
            path = ROOT / path
        elif path is not None and path.suffix:  # one of the reader's own
            path = None
        load_recipe(path, overrides)
