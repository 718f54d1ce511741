"""One draft against the target's answers: replayed for the figures, decoded live to confirm them.

Where its strategy can be replayed, a draft is replayed over all answers, and a sample of them is
decoded live: the live texts must be the target's, the live rounds the replayed ones, and the
speed-up is measured. Otherwise (a tree) all answers are decoded live.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch

from fledge.core.errors import BadInput
from fledge.core.progress import Watch, unwatched
from fledge.decode.speculative import Generation, SpeculativeDecoder
from fledge.decode.stops import Stops, eos_token_ids
from fledge.decode.strategy import DraftShape, TreeShape, choose
from fledge.measure import figures
from fledge.measure.answers import AnsweredTurn
from fledge.measure.figures import Acceptance, Failures, Sample
from fledge.measure.replay import Replay, Text, WrittenToken, look_closely, replay, written_tokens
from fledge.measure.speed import Speed, TimedText
from fledge.methods.block.calibration import Calibration, calibrate, has_confidence
from fledge.methods.shared.draft import DraftModel
from fledge.target.hf.model import HFEagle3TargetModel


@dataclass(frozen=True)
class EvalOptions:
    """What `fledge eval` and `fledge.evaluate` let a user choose."""

    method: str | None = None  # name of a strategy; None: the one a draft was trained for
    draft_tokens: int | None = None  # per round; None: each draft's own number
    tree: TreeShape = TreeShape()  # noqa: RUF009  (frozen)
    limit: int | None = None  # prompts per file; None: all
    max_new_tokens: int = 256
    live: int = 4  # answers to decode live as well; all if there is no replay
    samples: int = 0  # answers to show token by token
    batch: int = 16  # prompts answered at a time
    # how to load a target that is given by name
    aux_layer_ids: Sequence[int] | None = None
    dtype: torch.dtype | str | None = None
    device: torch.device | str | None = None
    trust_remote_code: bool = False

    @property
    def loading(self) -> dict[str, Any]:
        names = ("aux_layer_ids", "dtype", "device", "trust_remote_code")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class LiveCheck:
    """Live decoding compared with the target's own answers and with their replay."""

    texts: int
    same_texts: int  # token for token the target's own; rounding may break ties differently
    rounds: int  # live rounds inside the part of the text that agrees
    same_rounds: int  # of these, those with exactly the replayed length
    acceptance: Acceptance

    @property
    def agrees(self) -> bool:
        """Whether live decoding confirms the replay, except for ties that rounding breaks."""
        return self.rounds == 0 or self.same_rounds >= 0.95 * self.rounds

    def to_json(self) -> dict[str, Any]:
        return {
            "texts": self.texts,
            "same_texts": self.same_texts,
            "compared_rounds": self.rounds,
            "same_rounds": self.same_rounds,
            "agrees": self.agrees,
            "acceptance_length": self.acceptance.length,
        }


@dataclass(frozen=True)
class ShownAnswer:
    """One answer, token by token."""

    prompt: str
    category: str
    acceptance: Acceptance
    tokens: list[WrittenToken]

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "category": self.category,
            "acceptance_length": self.acceptance.length,
            "rounds": self.acceptance.rounds,
            "tokens": [token.to_json() for token in self.tokens],
        }


@dataclass(frozen=True)
class DraftReport:
    """Everything that `fledge eval` reports about one draft."""

    name: str
    method: str
    definition: str
    acceptance: Acceptance
    every_slot: float | None
    groups: dict[str, Acceptance]  # by prompt file or set
    categories: dict[str, Acceptance]
    contexts: dict[str, Acceptance]
    failures: Failures
    other_picks: int | None  # if replayed: answer tokens the target would not pick again (ties)
    live: LiveCheck | None
    speed: Speed | None
    replay_s: float | None  # seconds for all answers
    samples: list[ShownAnswer]
    calibration: Calibration | None = None  # of drafts with a confidence head

    def to_json(self) -> dict[str, Any]:
        groups = {"set": self.groups, "category": self.categories, "context": self.contexts}
        value: dict[str, Any] = {
            "draft": self.name,
            "method": self.method,
            "definition": self.definition,
            **self.acceptance.to_json(),
            "every_slot_length": self.every_slot,
            **{
                f"by_{kind}": {name: part.to_json() for name, part in parts.items()}
                for kind, parts in groups.items()
            },
            "draft_vocabulary_misses": self.failures.misses(),
            "where_it_fails": self.failures.to_json(),
            "target_picks_that_differ": self.other_picks,
            "replay_s": self.replay_s,
            "live": None if self.live is None else self.live.to_json(),
            "speed": None if self.speed is None else self.speed.to_json(self.acceptance.length),
        }
        if self.calibration is not None:
            value["calibration"] = vars(self.calibration)
        if self.samples:
            value["samples"] = [answer.to_json() for answer in self.samples]
        return value


class DraftEvaluation:
    """One draft, and the answers of a target that it is evaluated on."""

    def __init__(
        self, target: HFEagle3TargetModel, draft: DraftModel, answers: Sequence[AnsweredTurn],
        options: EvalOptions, num_draft_tokens: int, watch: Watch = unwatched,
    ) -> None:  # fmt: skip
        self.target, self.answers, self.options = target, answers, options
        shape = DraftShape(num_draft_tokens, options.tree)
        self.strategy = choose(draft, options.method)(draft, shape)
        self._watch = watch
        self._texts = [Text(turn.prompt_ids, turn.answer_ids) for turn in answers]

    def evaluate(self, name: str, *, trained_length: int | None = None) -> DraftReport:
        """`trained_length`: of the longest rows that the draft was trained on, if known."""
        strategy, depth = self.strategy, self.strategy.depth
        begin = time.perf_counter()
        replays = None if strategy.rollouts is None else self._replay()
        replay_s = None if replays is None else time.perf_counter() - begin
        live, speed = self._decode(every=replays is None)
        samples: list[Sample] = [
            _live_sample(live[i], turn)
            if replays is None
            else replace(replays[i], category=turn.category, group=turn.group)
            for i, turn in enumerate(self.answers)
        ]
        can_say = set(strategy.selected_W.tolist()).__contains__
        return DraftReport(
            name=name,
            method=strategy.name,
            definition=figures.definition(strategy.label),
            acceptance=figures.acceptance(samples, depth),
            every_slot=figures.every_slot_length(samples, depth),
            groups=figures.by_label(samples, depth, lambda sample: sample.group),
            categories=figures.by_label(samples, depth, lambda sample: sample.category),
            contexts=figures.by_context(samples, depth),
            failures=figures.failures(
                samples, depth, can_say, long_context=trained_length or figures.LONG_CONTEXT
            ),
            other_picks=None if replays is None else sum(text.other_picks for text in replays),
            live=self._check(live, replays) if live else None,
            speed=speed,
            replay_s=replay_s,
            samples=[self._show(i, samples[i]) for i in self._spread(self.options.samples)],
            calibration=self._calibrate(),
        )  # fmt: skip

    def _spread(self, count: int) -> list[int]:
        """Indices of that many answers, evenly spread."""
        total = len(self.answers)
        count = min(count, total)
        return [i * total // count for i in range(count)]

    def _calibrate(self) -> Calibration | None:
        draft = self.strategy.draft
        # the first token of an answer comes from the prompt's pass: drafting starts at the second
        texts = [text for text in self._texts if len(text.answer_ids) > 1]
        if not has_confidence(draft) or not texts:
            return None
        self._watch("calibrating", 0, len(texts))
        return calibrate(self.target, draft, texts, depths=self.strategy.depth)

    def _show(self, index: int, sample: Sample) -> ShownAnswer:
        """An answer token by token; without a replay only who wrote each token, since proposals are
        not kept."""
        strategy, tokenizer = self.strategy, self.target.tokenizer
        if strategy.rollouts is None:
            tokens = written_tokens(sample, tokenizer)
        else:
            rollouts = strategy.rollouts(strategy.draft, strategy.depth)
            tokens = look_closely(self.target, rollouts, sample, tokenizer)
        acceptance = figures.acceptance([sample], strategy.depth)
        return ShownAnswer(self.answers[index].question, sample.category, acceptance, tokens)

    def _replay(self) -> list[Replay]:
        total = len(self._texts)
        self._watch("replaying", 0, total)
        return replay(
            self.target, self.strategy.draft, self._texts, num_draft_tokens=self.strategy.depth,
            method=self.strategy.name, on_text=lambda done: self._watch("replaying", done, total),
        )  # fmt: skip

    def _decode(self, *, every: bool) -> tuple[dict[int, Generation], Speed | None]:
        """Decode prompts live, one at a time: a sample, or every one. Those of the sample are also
        decoded without a draft, to measure the speed-up; the two decoders alternate in going first,
        so that a machine that slows down affects both."""
        target, strategy, options = self.target, self.strategy, self.options
        decoder = SpeculativeDecoder(
            target.model, strategy.draft, aux_layer_ids=target.aux_layer_ids, method=strategy.name,
            num_draft_tokens=strategy.shape.num_draft_tokens, tree=options.tree,
        )  # fmt: skip
        plain = SpeculativeDecoder(target.model)
        stops = Stops(options.max_new_tokens, eos_token_ids(target.model, target.tokenizer))
        timed: dict[SpeculativeDecoder, list[TimedText]] = {decoder: [], plain: []}
        live: dict[int, Generation] = {}
        sample = self._spread(options.live)
        which = range(len(self.answers)) if every else sample
        for done, index in enumerate(which):
            self._watch("decoding live", done, len(which))
            prompts = [self.answers[index].prompt_ids]
            if done == 0:  # the first passes of a process are slow and must not count
                for cold in timed:
                    cold.generate(prompts, Stops(min(8, options.max_new_tokens)))
            both = [decoder, plain] if done % 2 else [plain, decoder]
            order = both if index in sample else [decoder]
            texts = {runner: runner.generate(prompts, stops)[0] for runner in order}
            live[index] = texts[decoder]
            if index in sample and all(runner.timing.rounds for runner in order):
                for runner, text in texts.items():
                    timed[runner].append(TimedText.of(text, runner.timing))
        return live, Speed(timed[plain], timed[decoder]) if timed[plain] else None

    def _check(self, live: dict[int, Generation], replays: list[Replay] | None) -> LiveCheck:
        same_texts = rounds = same_rounds = 0
        for index, text in live.items():
            answer_ids = self.answers[index].answer_ids
            same_texts += text.token_ids == answer_ids
            if replays is not None:
                pairs = zip(text.token_ids, answer_ids, strict=False)
                common = takewhile(lambda pair: pair[0] == pair[1], pairs)
                agreed = len(text.prompt_ids) + len([*common])
                contexts = {r.context for r in replays[index].rounds}
                compared = {r for r in text.rounds if r.context + r.emitted <= agreed}
                compared = {r for r in compared if r.context in contexts}
                rounds += len(compared)
                same_rounds += len(compared & set(replays[index].rounds))
        samples = [_live_sample(text, self.answers[i]) for i, text in live.items()]
        acceptance = figures.acceptance(samples, self.strategy.depth)
        return LiveCheck(len(live), same_texts, rounds, same_rounds, acceptance)


def _live_sample(text: Generation, turn: AnsweredTurn) -> Sample:
    return Sample(text.prompt_ids, text.token_ids, text.rounds, turn.category, group=turn.group)


def check_fits(target: HFEagle3TargetModel, draft: DraftModel, name: str) -> None:
    """Reject a draft that was made for another target, as far as its config shows."""
    info, config, fix = target.info(), draft.config, "name the target it was trained for"
    for key, of_draft, of_target in (
        ("target_hidden_size", config.target_hidden_size, info.hidden_size),
        ("num_aux_hidden_states", config.num_aux_hidden_states, len(target.aux_layer_ids)),
    ):
        if of_draft != of_target:
            message = f"the draft's {key} is {of_draft}, the target's {of_target}"
            raise BadInput(message, where=name, fix=fix)
    layers, target_layers = getattr(config, "aux_layer_ids", None), list(target.aux_layer_ids)
    if layers is not None and list(layers) != target_layers:
        message = f"trained on the target's layers {list(layers)}, not {target_layers}"
        raise BadInput(message, where=name, fix=f"--aux-layers {','.join(map(str, layers))}")
    if config.vocab_size > info.vocab_size:
        message = f"the draft knows {config.vocab_size} tokens, the target {info.vocab_size}"
        raise BadInput(message, where=name, fix=fix)
    if draft.selected_token_ids is None:
        raise BadInput("the draft has no vocabulary mapping (d2t)", where=name)
