import pytest


@pytest.fixture(autouse=True, scope="session")
def own_rows(tmp_path_factory):
    """Keep the tokenized rows of these tests out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEDGE_CACHE", str(tmp_path_factory.mktemp("fledge")))
        yield


@pytest.fixture(scope="session")
def caches(tiny_target, tiny_chats, tmp_path_factory):
    """encoding -> directory; the target runs on one row at a time, as it does on padded packs."""
    from fledge.precompute_eagle3 import main  # machines for GPU tests may lack pydantic

    root = tmp_path_factory.mktemp("caches")

    def make(encoding, dtype="fp32", *more):
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

    return make
