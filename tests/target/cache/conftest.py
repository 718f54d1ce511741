import pytest

from target.cache.caches import words_of


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
            words = words_of(
                target_model=tiny_target, input_data=tiny_chats, output_dir=path, dtype=dtype,
                encoding=encoding, draft_vocab_size=128, batch_size=1, shard_size=16,
                shuffle_seed="none",
            )  # fmt: skip
            assert main([*words, *more]) == 0
        return path

    return make
