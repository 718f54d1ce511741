"""Project files agree with the code: metadata, the site's navigation, CI."""

import re
import tomllib
from pathlib import Path

import yaml

import fledge

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_one_version_and_one_license_everywhere():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == PROJECT["version"] == fledge.__version__
    assert cited["license"] == PROJECT["license"]
    assert cited["keywords"] == PROJECT["keywords"]


def leaves(nav):
    for entry in nav:
        for value in entry.values():
            yield from leaves(value) if isinstance(value, list) else [value]


def test_every_page_is_in_the_site_navigation_once():
    text = (ROOT / "mkdocs.yml").read_text()
    listed = list(leaves(yaml.safe_load(text)["nav"]))
    globs = ("*.md", "docs/*.md", "benchmarks/results/*.md")
    pages = [str(page.relative_to(ROOT)) for glob in globs for page in ROOT.glob(glob)]
    assert sorted(listed) == sorted(pages)


def test_the_ci_workflow_runs_all_checks():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    [job] = workflow["jobs"].values()
    assert job["steps"][-1] == {"run": ".ci/run"}
    tested = {f"Programming Language :: Python :: {v}" for v in job["strategy"]["matrix"]["python"]}
    assert tested <= set(PROJECT["classifiers"])
    makefile = (ROOT / "Makefile").read_text()
    script = (ROOT / ".ci/run").read_text()
    [queue] = re.findall(r"^printf '%s\\n' (.*) \|$", script, flags=re.M)
    called = [*re.findall(r"^make ([\w-]+)", script, flags=re.M), *queue.split()]
    checks = set(re.findall(r"^(test[\w-]*|docs|lint):", makefile, flags=re.M))
    assert checks == set(called) - {"browser"}
    assert all(f"\n{target}:" in makefile for target in called)


def test_the_readme_lists_every_extra():
    install = (ROOT / "README.md").read_text().partition("## Install")[2].partition("\n## ")[0]
    first = " ".join(re.findall(r"^\| (`.*?) \|", install, flags=re.M))
    named = set(re.findall(r"`([\w-]+)`", first))
    assert named == set(PROJECT["optional-dependencies"])


def test_suggested_extras_exist():
    """Lines like `pip install 'fledge[serve]'` come from `install_extra("serve")`."""
    sources = (path.read_text() for path in (ROOT / "src").rglob("*.py"))
    extras = {name for text in sources for name in re.findall(r'install_extra\(["\'](\w+)', text)}
    assert extras >= {"serve", "track"}
    home = ROOT / "src/fledge/core/install.py"
    others = [path for path in (ROOT / "src").rglob("*.py") if path != home]
    assert not [path for path in others if "pip install 'fledge[" in path.read_text()]
    assert extras <= set(PROJECT["optional-dependencies"])
