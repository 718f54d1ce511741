"""What a check is given, and what it reports.

A check looks for one cause. It reports findings backed by numbers, each with a fix in words and,
where the repair is certain, with a function that applies it.
"""

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from fledge.core.errors import BadInput, UntrustedCode
from fledge.formats.foreign import DraftFiles, DraftView
from fledge.methods.shared.config import derive_draft_config
from fledge.models.resolve import load_config, load_tokenizer, local_model
from fledge.models.weight_files import TargetTables, read_target_tables
from fledge.target.layers import target_depth, text_config

Repair = Callable[[DraftFiles], None]


@dataclass(frozen=True)
class Finding:
    """One fault (or note): the evidence, and what to do about it."""

    severity: Literal["error", "warning", "note"]
    evidence: str
    fix: str = ""
    repair: Repair | None = None
    last: bool = False  # no further check is worth running
    check: str = ""  # name of the check, filled in by the runner

    def to_json(self) -> dict[str, Any]:
        return {
            "check": self.check,
            "severity": self.severity,
            "evidence": self.evidence,
            "fix": self.fix,
            "repairable": self.repair is not None,
        }


error = partial(Finding, "error")
warning = partial(Finding, "warning")
note = partial(Finding, "note")


def wrong_key(key: str, right: Any, evidence: str) -> Finding:
    """An error about a config key whose value must be `right`; the repair writes it."""
    return error(
        evidence, f"{key}: {json.dumps(right)}", partial(DraftFiles.put, key=key, value=right)
    )


class TargetFiles:
    """The target, of which each part is loaded when a check first needs it."""

    def __init__(self, name: str, trust_remote_code: bool = False) -> None:
        self.name, self.trust_remote_code = name, trust_remote_code

    @cached_property
    def config(self) -> Any:
        return load_config(self.name, trust_remote_code=self.trust_remote_code)

    @property
    def text(self) -> Any:
        return text_config(self.config)

    @property
    def depth(self) -> int:
        return target_depth(self.config)

    @cached_property
    def tokenizer(self) -> Any:
        """The target's tokenizer; None if it has none."""
        try:
            return load_tokenizer(self.name, trust_remote_code=self.trust_remote_code)
        except UntrustedCode:
            raise
        except BadInput:
            return None

    @cached_property
    def tables(self) -> TargetTables:
        return read_target_tables(local_model(self.name))

    @cached_property
    def draft_config(self) -> Any:
        """The config that fledge derives for a draft of this target; None if it cannot."""
        with suppress(BadInput):
            return derive_draft_config(self.config)
        return None


@dataclass
class Subject:
    """A draft, its target, and the engine it is meant for."""

    files: DraftFiles
    target: TargetFiles
    engine: str = ""  # "vllm" or "sglang": what that engine cannot load becomes an error

    @cached_property
    def view(self) -> DraftView:
        return self.files.view

    @property
    def directory(self) -> Path:
        return self.files.directory

    @property
    def draft_vocab_size(self) -> int:
        """Rows of the head, else what the config declares; for EAGLE-1 the target's vocabulary,
        because its head is the target's."""
        if self.view.merges:
            return self.vocab_size
        head = self.view.state.get("lm_head.weight")
        if head is not None and head.ndim == 2:
            return len(head)
        return int(self.view.get("draft_vocab_size") or self.vocab_size)

    @property
    def vocab_size(self) -> int:
        return int(self.target.text.vocab_size)

    @property
    def aux_layer_ids(self) -> list[int] | None:
        """The layers the draft reads: those in its files, else the engines' default."""
        return self.view.aux_layer_ids or self.default_aux

    @property
    def aux_count(self) -> int:
        """How many of the target's states the draft reads: its config says it, or fc's width."""
        fc = self.view.state.get("fc.weight")
        if self.view.borrows and not self.view.merges and fc is not None and fc.ndim == 2:
            return fc.shape[1] // int(self.target.text.hidden_size)
        count: int = self.view.get("num_aux_hidden_states", self.view.method.aux_layers())
        return count

    @property
    def default_aux(self) -> list[int] | None:
        """The engines' default when a draft names no layers; None if the target is too shallow, or
        where engines have no default."""
        if self.view.borrows and not self.view.merges:
            return None
        with suppress(BadInput):
            method = self.view.method
            return method.default_layers(self.target.depth, method.aux_layers())
        return None

    def only_for(self, engine: str, evidence: str, fix: str) -> Finding:
        """A fault that affects one engine only: a note, unless that engine was requested."""
        return (error if self.engine == engine else note)(evidence, fix)


Check = Callable[[Subject], Iterable[Finding]]
