"""What the docs mention exists: links, files, public names, and every command line shown."""

import json
import re
from statistics import mean

import pytest
import typer.main

import fledge
from command_lines import COMMAND, ROOT, understand
from fledge.cli.main import app

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md")])
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
FENCED = re.compile(r"^```\w*\n(.*?)^```", flags=re.M | re.S)
PUBLIC = re.compile(r"`((?:Eagle[13]|HFEagle3|LlamaEagle[13]|PEagle|Remote|SGLang|VLLM)[A-Z]\w+)")


def named(path):
    return str(path.relative_to(ROOT))


def anchor(heading: str) -> str:
    """The anchor that GitHub derives from a heading."""
    words = re.sub(r"[^\w\s-]", "", heading.strip().lower().replace("`", ""))
    return re.sub(r"\s", "-", words)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_resolve(page):
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
def test_mentioned_files_exist(page):
    """`src/...`, `tests/...`, `recipes/...`, and in the tour paths inside the package."""
    text = page.read_text()
    for name in re.findall(r"`((?:src|tests|recipes|benchmarks|docs|tools)/[\w./-]+\.\w+)`", text):
        assert (ROOT / name).exists(), name
    if page.name == "tour.md":
        rooms = "|".join(path.name for path in (ROOT / "src/fledge").iterdir() if path.is_dir())
        for name in re.findall(rf"`((?:(?:{rooms})/)?\w+\.py|(?:{rooms})/)`", text):
            inside = [ROOT / "src/fledge" / name, *(ROOT / "src/fledge").rglob(name)]
            assert any(path.exists() for path in inside), name


def test_public_names_in_the_docs_exist():
    pages = (page.read_text() for page in PAGES if page.parent.name == "docs")
    names = {name for text in pages for name in PUBLIC.findall(text)}
    assert len(names) > 5
    for name in names:
        assert name in fledge.__all__, name


def shown():
    """(source, command line) from the docs, the recipes' comments and the examples of `--help`."""
    for path in [*PAGES, *RECIPES]:
        if path.name == "CHANGELOG.md":  # describes past versions
            continue
        text = re.sub(r"\\\n[#\s]*", "", path.read_text())
        blocks = text if path.suffix == ".yaml" else "\n".join(FENCED.findall(text))
        lines = re.findall(rf"^(?:\$ |#\s*)?{COMMAND}", blocks, flags=re.M)
        lines += re.findall(rf"`{COMMAND}`", FENCED.sub("", text).replace("\n", " "))
        yield from ((named(path), line) for line in lines)

    def examples(command, verb):
        for line in re.findall(rf"^Example: {COMMAND}", command.epilog or "", flags=re.M):
            yield f"{verb} --help", line
        for name, sub in getattr(command, "commands", {}).items():
            yield from examples(sub, f"{verb} {name}")

    yield from examples(typer.main.get_command(app), "fledge")


@pytest.mark.parametrize(("where", "line"), sorted(set(shown())), ids=lambda text: text[:60])
def test_command_lines_are_valid(where, line):
    understand(line)


def test_recipe_headers_agree_with_the_readme():
    """What the recipes' headers promise is in the README and in the race's results."""
    readme = (ROOT / "README.md").read_text()
    headers = {path.stem: path.read_text() for path in RECIPES}
    [demo] = re.findall(r"^ after +([\d.]+) ", readme, flags=re.M)
    [minutes] = re.findall(r"laptop CPU, in (about \w+ minutes)", readme)
    assert f"# acceptance  length {demo} " in headers["smollm2_cpu"]
    assert f"# time        {minutes} " in headers["smollm2_cpu"]
    data = ROOT / "benchmarks/results/data"
    race = json.loads((data / "smollm2_race.json").read_text())
    for recipe, figures in race.items():
        lengths = [mean(figures["length"][name]) for name in ("mt_bench", "gsm8k", "alpaca")]
        expected = "lengths {:.2f} on MT-bench, {:.2f} on GSM8K, {:.2f} on Alpaca ".format(*lengths)
        assert f"# acceptance  {expected}" in headers[recipe]
        assert f"({figures['steps']:,} steps)" in headers[recipe]
