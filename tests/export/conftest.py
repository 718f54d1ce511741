"""One target, healthy drafts of three kinds, and the target's answers, built once per session."""

import pytest


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """Directories `target`, `eagle3`, `eagle31`, `peagle`, with a cache of their own."""
    import os

    from export.drafts import make_draft, make_target

    root = tmp_path_factory.mktemp("drafts")
    before = os.environ.get("FLEDGE_CACHE")
    os.environ["FLEDGE_CACHE"] = str(root / "cache")
    make_target(root / "target")
    make_draft(root / "target").save_pretrained(root / "eagle3")
    make_draft(root / "target", fc_norm=True, norm_output=True).save_pretrained(root / "eagle31")
    make_draft(root / "target", parallel=True).save_pretrained(root / "peagle")
    yield root
    if before is None:
        del os.environ["FLEDGE_CACHE"]
    else:
        os.environ["FLEDGE_CACHE"] = before


@pytest.fixture(scope="session")
def answering(place):
    """The target, loaded once for all tests."""
    from export.drafts import NEW_TOKENS, PROMPTS
    from fledge.formats.checks.base import TargetFiles
    from fledge.formats.checks.probe import Answering

    loaded = Answering(
        TargetFiles(str(place / "target")), prompts=PROMPTS, max_new_tokens=NEW_TOKENS, device="cpu"
    )
    return lambda facts: loaded


@pytest.fixture(scope="session")
def drafts(tiny_target, tmp_path_factory):
    """kind -> the directory of a random draft, of every kind that can be exported."""
    from export import block_cases, export_cases

    root, chains = tmp_path_factory.mktemp("random"), export_cases.KINDS | export_cases.VLLM_ONLY
    made = {
        kind: export_cases.make_draft(root / kind.replace("/", ""), tiny_target, **options)
        for kind, options in chains.items()
    }
    blocks = block_cases.KINDS.items()
    return made | {kind: block_cases.make_block(root / kind, **options) for kind, options in blocks}


@pytest.fixture(scope="session")
def exports(drafts, tiny_target, tmp_path_factory):
    """(kind, engine) -> every possible export, each of which runs its self-check."""
    from export.export_cases import CHECK, SERVED
    from fledge import export_draft

    root, options = tmp_path_factory.mktemp("exports"), {"target": str(tiny_target), "check": CHECK}
    return {
        (kind, engine): export_draft(
            drafts[kind], root / f"{drafts[kind].name}-{engine}", engine=engine, **options
        )
        for kind, engine in SERVED
    }


@pytest.fixture(scope="session")
def speculators():
    return pytest.importorskip("speculators", reason="make test-trainers installs it")
