"""A race of methods on one target and one set of chats: which draft would serve these users best?

All entrants train from one capture of the target's states, on the same packs in the same order, for
equal tokens (or equal seconds), with several seeds. Each is judged on the held-out rows by exact
replay, halfway and at its end, and by the clock: a round costs a draft and a verification, and
yields its acceptance length in tokens, so what counts is length / break-even length.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fledge.core.distributed import pick_device
from fledge.core.errors import BadInput, nearest
from fledge.core.progress import Progress, unwatched
from fledge.data.pack import collate, pack_rows
from fledge.data.rows import RowView
from fledge.decode.speculative import SpeculativeDecoder
from fledge.decode.stops import Stops, eos_token_ids
from fledge.decode.strategy import rollouts_of
from fledge.measure.figures import Acceptance
from fledge.measure.replay import Ints, replay_held_out, target_picks
from fledge.measure.speed import Speed, TimedText
from fledge.recipe.schema import Recipe, load_recipe
from fledge.target.finite_check import checked_answer
from fledge.target.kinds import kind_of, target_tokenizer
from fledge.target.state_cache import RememberingTarget, colocated
from fledge.training.drafts import target_section
from fledge.training.setup import Training, prepare_data, set_up
from fledge.training.step import train_step

_FRESH = "draft.layers_from_target=false"
_BLOCK = (_FRESH, "target.aux_layer_ids=null")  # they read other layers of the target
# What makes a recipe one of this method that drafts `k` tokens a round. EAGLE-2 is EAGLE-1 with
# trees; JetSpec is DFlash with causal blocks that learn the target's distribution.
ENTRANTS: dict[str, Callable[[int], tuple[str, ...]]] = {
    "eagle3": lambda k: (f"objective.ttt_steps={k}",),
    "peagle": lambda k: (f"objective.num_depths={k}", _FRESH),
    "eagle1": lambda k: (f"objective.draft_tokens={k}", "draft.draft_vocab_size=null", *_BLOCK),
    "dflash": lambda k: (f"objective.block_size={k + 1}", *_BLOCK),
    "jetspec": lambda k: (
        "objective.kind=dflash", f"objective.block_size={k + 1}", "objective.causal=true",
        "objective.loss=kl", "objective.gamma=1e6", *_BLOCK,
    ),
    "dspark": lambda k: (f"objective.block_size={k}", *_BLOCK),
    "domino": lambda k: (f"objective.block_size={k + 1}", *_BLOCK),
    "xpress": lambda k: (f"objective.block_size={k + 1}", *_BLOCK),
    "dflash2": lambda k: (f"objective.block_size={k + 1}", *_BLOCK),
    "lilicorr": lambda k: (f"objective.block_size={k + 1}", *_BLOCK),
}  # fmt: skip
_PACK = 16384  # tokens of a pass of the target, or the longest document
_PROBE = 20  # steps that measure an entrant's speed, for equal seconds
_LIVE, _LIVE_TOKENS = 4, 32  # held-out prompts decoded by the clock, and tokens of each answer


@dataclass(frozen=True)
class RaceOptions:
    methods: tuple[str, ...] = ()  # none: all
    seeds: int = 3
    tokens: float = 0  # of training, for each entrant and seed; 0: as the recipe says
    seconds: float = 0  # instead of tokens
    draft_tokens: int = 0  # a round; 0: as the recipe trains

    def entrants(self) -> tuple[str, ...]:
        for name in self.methods:
            if name not in ENTRANTS and name != "all":
                raise BadInput(
                    f"no method '{name}' to race", where="--methods", fix=nearest(name, [*ENTRANTS])
                )
        return self.methods if self.methods and "all" not in self.methods else tuple(ENTRANTS)


@dataclass(frozen=True)
class Lap:
    """One entrant with one seed."""

    method: str
    seed: int
    steps: int
    seconds: float  # of training
    half: float  # acceptance length halfway
    length: float  # at the end
    draft_ms: float | None = None  # of a round; by the first seed
    break_even: float | None = None  # the length below which the draft slows decoding down


# --- the race -----------------------------------------------------------------------------------


def race(
    source: Any, words: Sequence[str], options: RaceOptions, progress: Progress = unwatched
) -> Iterator[Lap]:
    """Yield every finished lap: all entrants with the first seed, then with the next."""
    base = load_recipe(source, list(words))
    count = options.draft_tokens or base.objective.depths
    recipes = {
        name: [_recipe(source, words, name, count, seed, options) for seed in range(options.seeds)]
        for name in options.entrants()
    }
    device = pick_device(base.training.device)
    progress("asking the target once about all rows")
    with RememberingTarget(_open([each[0] for each in recipes.values()], device), 2**62) as target:
        judge = _Judge.of(base, target, count)
        for seed in range(options.seeds):
            for name, seeds in recipes.items():
                progress(f"{name}, seed {seed}")
                yield _lap(name, seed, seeds[seed], target, judge, options)


def _recipe(
    source: Any, words: Sequence[str], name: str, count: int, seed: int, options: RaceOptions
) -> Recipe:
    kind = () if name == "jetspec" else (f"objective.kind={name}",)
    quiet = ("target.keep_states_gb=0", "target.compile=false")  # it answers each row once
    seeds = (f"training.seed={seed}", f"packing.seed={seed}", "run.output_dir=race/nothing")
    words = [*words, *kind, *ENTRANTS[name](count), *quiet, *seeds]
    recipe = load_recipe(source, words)
    if not options.tokens:
        return recipe
    training = recipe.training
    step = training.micro_batch * training.accumulate * recipe.packing.tokens
    return load_recipe(source, [*words, f"training.steps={max(2, round(options.tokens / step))}"])


def _open(recipes: Sequence[Recipe], device: torch.device) -> Any:
    """The target, with all aux layers that any entrant reads."""
    if recipes[0].target.backend != "hf":
        raise BadInput("a race captures states in this process", where="target.backend", fix="hf")
    sections = [target_section(recipe) for recipe in recipes]
    layers = tuple(sorted({i for section in sections for i in section.aux_layer_ids or ()}))
    section = sections[0].model_copy(update={"aux_layer_ids": layers})
    return kind_of(section).open(section, device=device, aux_layers=len(layers))


def _lap(
    name: str, seed: int, recipe: Recipe, target: Any, judge: "_Judge", options: RaceOptions
) -> Lap:
    training = set_up(recipe, target=target)
    if options.seconds:
        steps = max(2, int(options.seconds * _steps_per_s(training)))
        updated = recipe.training.model_copy(update={"steps": steps})
        training = set_up(recipe.model_copy(update={"training": updated}), target=target)
    steps, seconds, half, begin = training.stream.steps, 0.0, 1.0, time.perf_counter()
    training.draft.train()
    for batch in training.stream.prefetched(0, 2):
        training.parts.objective.begin_step(batch.step / steps)
        result = train_step(training.parts, batch, lr=training.lr(batch.step))
        if batch.step + 1 == max(1, steps // 2):
            bool(result.bad)  # waits for the device
            seconds, half = time.perf_counter() - begin, judge.length(training)
            begin = time.perf_counter()
    seconds += time.perf_counter() - begin
    length = judge.length(training)
    clock = {} if seed else judge.clock(training)
    return Lap(name, seed, steps, seconds, half, length, **clock)


def _steps_per_s(training: Training) -> float:
    """Over the second half of a few steps that change nothing."""
    training.draft.train()
    begin = 0.0
    for done, batch in enumerate(training.stream.prefetched(0, 2), 1):
        result = train_step(training.parts, batch, lr=0.0)
        if done in (_PROBE // 2, _PROBE):
            bool(result.bad)
            begin, before = time.perf_counter(), begin
        if done == _PROBE:
            return (_PROBE - _PROBE // 2) / (begin - before)
    raise BadInput(f"--seconds needs runs of {_PROBE} steps or more", where="training.steps")


class _Judge:
    """Measures drafts on the held-out rows."""

    def __init__(self, target: Any, packs: list[Any], prompts: list[list[int]], count: int) -> None:
        self._target, self._packs, self._prompts, self._count = target, packs, prompts, count
        self._picks: dict[tuple[int, int], Ints] = {}  # by pack and size of the draft vocabulary
        self._plain: list[TimedText] = []

    @classmethod
    def of(cls, recipe: Recipe, target: RememberingTarget, count: int) -> "_Judge":
        train, held_out, _ = prepare_data(recipe)
        if not len(held_out.lengths):
            raise BadInput("a race needs held-out rows", where="data.valid_rows", fix="24 or more")
        pad_id = target_tokenizer(recipe.target).pad_token_id or 0
        packs = _packs(held_out, pad_id)
        for batch in (*_packs(train, pad_id), *packs):  # remembered from here on
            checked_answer(target, batch)
        rows = (held_out[i] for i in range(min(_LIVE, len(held_out.lengths))))
        prompts = [row.input_ids[: int(row.loss_mask.argmax())].tolist() for row in rows]
        return cls(target, packs, [prompt for prompt in prompts if prompt], count)

    @torch.no_grad()
    def length(self, training: Training) -> float:
        """Tokens per round, by exact replay."""
        parts, draft = training.parts, training.draft
        head, acceptance = parts.target.info().head.to(parts.device), Acceptance.none(self._count)
        draft.eval()
        rollouts = rollouts_of(draft, self._count, dtype=parts.objective.compute_dtype)
        for index, pack in enumerate(self._packs):
            answer = parts.target.answer(pack).to(parts.device)
            key = (index, len(rollouts.selected_token_ids))
            if key not in self._picks:
                self._picks[key] = target_picks(answer, pack, head, rollouts.selected_token_ids)
            acceptance += replay_held_out(answer, pack, rollouts, self._picks[key])
        draft.train()
        return acceptance.length

    def clock(self, training: Training) -> dict[str, float]:
        """What a round costs, decoding one text at a time; nothing if the clock was disturbed."""
        model, draft = colocated(self._target), training.draft
        if model is None or not self._prompts:
            return {}
        stops = Stops(_LIVE_TOKENS, eos_token_ids(model.model, model.tokenizer))
        layers = draft.config.aux_layer_ids

        def timed(decoder: SpeculativeDecoder) -> list[TimedText]:
            decoder.generate(self._prompts[:1], Stops(8))  # the first passes are slow
            texts = []
            for prompt in self._prompts:
                [text] = decoder.generate([prompt], stops)
                texts.append(TimedText.of(text, decoder.timing))
            return texts

        self._plain = self._plain or timed(SpeculativeDecoder(model.model))
        live = timed(
            SpeculativeDecoder(
                model.model, draft.eval(), aux_layer_ids=layers, num_draft_tokens=self._count
            )
        )
        draft.train()
        speed = Speed(self._plain, live)
        if not speed.live_rounds or speed.break_even < 1:
            return {}
        return {"draft_ms": 1e3 * speed.draft_s, "break_even": speed.break_even}


def _packs(rows: RowView, pad_id: int) -> list[Any]:
    width = max(_PACK, int(rows.lengths.max()))
    return [collate(rows, [pack], width, pad_id) for pack in pack_rows(rows.lengths, width).packs]


# --- the verdict --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """An entrant over all its seeds."""

    method: str
    lengths: tuple[float, ...]
    gain: float  # of the second half of training, in length
    seconds: float
    draft_ms: float | None
    break_even: float | None

    @property
    def length(self) -> float:
        return statistics.mean(self.lengths)

    @property
    def speedup(self) -> float | None:
        return None if self.break_even is None else self.length / self.break_even

    @property
    def score(self) -> float:
        """What entrants are ranked by: the speed-up, or the length where no clock was readable."""
        return self.length if self.break_even is None else self.length / self.break_even

    @property
    def noise(self) -> float:
        """The standard error of the score over the seeds."""
        if len(self.lengths) < 2:
            return math.inf
        error = statistics.stdev(self.lengths) / math.sqrt(len(self.lengths))
        return error * self.score / self.length

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "length": self.length, "speedup": self.speedup}


def results(laps: Sequence[Lap]) -> list[Result]:
    """All entrants, the best first. Where one has no readable clock, all are ranked by length."""
    found = []
    by_clock = all(lap.break_even is not None for lap in laps if lap.seed == 0)
    for name in dict.fromkeys(lap.method for lap in laps):
        own = [lap for lap in laps if lap.method == name]
        gain = statistics.mean(lap.length - lap.half for lap in own)
        lengths, seconds = tuple(lap.length for lap in own), [lap.seconds for lap in own]
        cost = (own[0].draft_ms, own[0].break_even if by_clock else None)
        found.append(Result(name, lengths, gain, statistics.mean(seconds), *cost))
    return sorted(found, key=lambda result: -result.score)


def verdict(found: Sequence[Result]) -> str:
    """One sentence: which to take, which are within two standard errors, which still improve."""
    best, *others = found
    if len(best.lengths) < 2:
        return f"one seed says nothing about noise; ahead: {best.method}"
    near = [o.method for o in others if best.score - o.score <= 2 * math.hypot(best.noise, o.noise)]
    growing = [
        o.method for o in others
        if o.method not in near and o.gain - best.gain > (best.length - o.length) / 2 > 0
    ]  # fmt: skip
    parts = [f"on this data take {best.method}"]
    if near:
        parts.append(f"{', '.join(near)}: within noise")
    if growing:
        parts.append(f"{', '.join(growing)}: catching up, more data may change the order")
    return "; ".join(parts)


_ROW, _NAMES, _PANEL = 24, 90, 420  # pixels


def plot(found: Sequence[Result]) -> str:
    """The scores as an SVG document: a bar for the mean, a dot for every seed."""
    what = "speed-up" if found[0].break_even is not None else "acceptance length"
    most = max(result.score for result in found) or 1.0
    rows = []
    for index, result in enumerate(found):
        y, width = 30 + _ROW * index, _PANEL * result.score / most
        rows.append(f'<text x="{_NAMES - 8}" y="{y + 12}" text-anchor="end">{result.method}</text>')
        rows.append(f'<rect x="{_NAMES}" y="{y}" width="{width:.1f}" height="16" fill="#1f6f8b"/>')
        scale = _PANEL * result.score / result.length / most
        rows += [
            f'<circle cx="{_NAMES + scale * length:.1f}" cy="{y + 8}" r="3" fill="#e07a3f"/>'
            for length in result.lengths
        ]
        text = f"{result.score:.2f} (length {result.length:.2f})"
        rows.append(f'<text x="{_NAMES + _PANEL + 8}" y="{y + 12}">{text}</text>')
    size = f"0 0 {_NAMES + _PANEL + 150} {40 + _ROW * len(found)}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" font-family="sans-serif" '
    title = f'<text x="{_NAMES}" y="18">{what}, a dot for each seed</text>'
    return "\n".join([head + 'font-size="12">', title, *rows, "</svg>"]) + "\n"
