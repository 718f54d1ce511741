import pytest

from fledge.compat.precompute_eagle3 import main


@pytest.fixture(autouse=True, scope="session")
def own_rows(tmp_path_factory):
    """Tokenised rows of these tests stay with these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEDGE_CACHE", str(tmp_path_factory.mktemp("fledge")))
        yield


@pytest.fixture(scope="session")
def caches(tiny_target, tiny_chats, tmp_path_factory):
    """encoding -> directory; rows run through the target one at a time, as padded packs are."""
    root = tmp_path_factory.mktemp("caches")

    def made(encoding, dtype="fp32", *more):
        path = root / f"{encoding}-{dtype}{''.join(more)}"
        if not path.exists():
            code = main(
                [
                    "--target-model", str(tiny_target), "--input-data", str(tiny_chats),
                    "--output-dir", str(path), "--seq-length", "64", "--draft-vocab-size", "128",
                    "--batch-size", "1", "--shard-size", "16", "--dtype", dtype,
                    "--aux-layer-ids", "0,1,2", "--encoding", encoding, "--num-workers", "1",
                    "--device", "cpu", "--shuffle-seed", "none", *more,
                ]
            )  # fmt: skip
            assert code == 0
        return path

    return made
