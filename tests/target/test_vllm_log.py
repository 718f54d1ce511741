"""Where vLLM's log goes, tested with Python's own logging: vLLM reads the same config file."""

import json
import logging
import logging.config
import os

import pytest

from fledge.target.vllm.engine import log_file, send_log_to_file, where_to_look

VARIABLES = ("CONFIG_PATH", "LEVEL", "STREAM")


@pytest.fixture(autouse=True)
def no_user_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    for name in (*(f"VLLM_LOGGING_{name}" for name in VARIABLES), "VLLM_CONFIGURE_LOGGING"):
        monkeypatch.setenv(name, "")  # so that it is restored afterwards
        monkeypatch.delenv(name)


def test_everything_goes_to_the_file_and_errors_also_to_stderr(capsys):
    send_log_to_file()
    with open(os.environ["VLLM_LOGGING_CONFIG_PATH"]) as file:
        logging.config.dictConfig(json.load(file))
    vllm = logging.getLogger("vllm")
    try:
        for level in ("info", "warning", "error"):
            getattr(logging.getLogger("vllm.engine"), level)("some %s", level)
        output = capsys.readouterr()
        assert output.out == ""
        [line] = output.err.splitlines()
        assert line.endswith("some error")
        logged = log_file().read_text().splitlines()
        assert [line.split()[-1] for line in logged] == ["info", "warning", "error"]
    finally:
        for handler in [*vllm.handlers]:
            vllm.removeHandler(handler)
            handler.close()
        vllm.propagate = True
    assert str(log_file()) in where_to_look()


@pytest.mark.parametrize("name", VARIABLES)
def test_logging_settings_of_the_user_are_kept(name, monkeypatch):
    monkeypatch.setenv(f"VLLM_LOGGING_{name}", "DEBUG")
    send_log_to_file()
    assert not log_file().parent.exists()
    assert os.environ.get("VLLM_LOGGING_CONFIG_PATH", "DEBUG") == "DEBUG"
    assert str(log_file()) not in where_to_look()
