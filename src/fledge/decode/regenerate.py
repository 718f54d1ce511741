"""Answers for `fledge regenerate` from a model in this process: batched, turn after turn."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from fledge.core.errors import BadInput
from fledge.data.dialogue import EndedTask, Reply, Sampling, Task
from fledge.data.drops import BadRow
from fledge.data.template import ChatTemplate
from fledge.decode.speculative import Generation, SpeculativeDecoder
from fledge.decode.stops import Stops, eos_token_ids
from fledge.target.hf.loading import LoadedModel
from fledge.target.layers import longest_text
from fledge.target.weights import tokenizer_fingerprint, weights_fingerprint

_WINDOW = 4  # batches of rows taken at a time, so that similar lengths run together


class LocalModel:
    """A loaded target that answers `batch` questions at a time."""

    def __init__(self, target: LoadedModel, name: str, sampling: Sampling, batch: int) -> None:
        if target.tokenizer is None:
            raise BadInput("no tokenizer", where=name, fix="name a directory that holds one")
        self._model, self._tokenizer = target.model, target.tokenizer
        self._sampling, self._batch = sampling, batch
        self.together = _WINDOW * batch
        self._template = ChatTemplate.of(target.tokenizer, sampling.template_options)
        self._decoder = SpeculativeDecoder(target.model)  # no draft: the target alone
        eos = eos_token_ids(target.model, target.tokenizer)
        self._stops = Stops(sampling.max_new_tokens, eos)
        self._longest = longest_text(target.model.config)
        if (new := sampling.max_new_tokens) >= self._longest:
            what = f"{new:,} tokens, but the model takes {self._longest:,} in all"
            raise BadInput(what, where="--max-new-tokens", fix="leave room for prompts")

    def identity(self) -> dict[str, Any]:
        return {
            "by": "model",
            "weights": weights_fingerprint(self._model),
            "tokenizer": tokenizer_fingerprint(self._tokenizer),
            "template": self._template.template,
            "dtype": str(self._model.dtype).removeprefix("torch."),
        }

    def run(self, tasks: Iterator[Task], report: Callable[[EndedTask], None]) -> None:
        for _, group in itertools.groupby(tasks, lambda task: task.number // self.together):
            window = list(group)
            while window:
                window = self._turn(window, report)

    def _turn(self, tasks: list[Task], report: Callable[[EndedTask], None]) -> list[Task]:
        """Answer the next question of every task; returns the tasks that have another one."""
        encoded: list[tuple[Task, list[int]]] = []
        for task in tasks:
            try:
                encoded.append((task, self._encode(task)))
            except BadRow as bad:
                report(EndedTask(task, bad))
        unfinished = []
        order = sorted(encoded, key=lambda pair: len(pair[1]))
        for begin in range(0, len(order), self._batch):
            members = order[begin : begin + self._batch]
            for (task, _), answer in zip(members, self._generate(members), strict=True):
                text = self._tokenizer.decode(answer.token_ids, skip_special_tokens=True)
                cut, tokens = answer.finish == "length", len(answer.token_ids)
                try:
                    task.dialogue.hear(Reply.of(text, cut=cut, tokens=tokens))
                except BadRow as bad:
                    report(EndedTask(task, bad))
                    continue
                if task.dialogue.question is None:
                    report(EndedTask(task))
                else:
                    unfinished.append(task)
        return unfinished

    def _generate(self, members: list[tuple[Task, list[int]]]) -> list[Generation]:
        return self._decoder.generate(
            [ids for _, ids in members],
            self._stops,
            temperature=self._sampling.temperature,
            seed=self._sampling.seed + members[0][0].number,
        )

    def _encode(self, task: Task) -> list[int]:
        question = task.dialogue.question
        assert question is not None
        text = self._template.render(question, task.dialogue.tools, prompt=True)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        new = self._stops.max_new_tokens
        if len(ids) + new > self._longest:
            lengths = f"{len(ids)} tokens and {new} of the answer"
            raise BadRow("prompt too long", f"{lengths}, the model takes {self._longest}")
        return ids
