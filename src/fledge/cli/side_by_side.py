"""The demo's last screen: one answer without the draft and with it, side by side.

On a terminal both answers are replayed in two columns at the speed they were decoded. Below them,
and everywhere else, come two bars, the figures, and a sentence on what was gained or why not.
"""

import re
import time
from collections.abc import Callable
from typing import Any

from rich.live import Live
from rich.table import Table
from rich.text import Text

from fledge.cli.chat import coloured
from fledge.cli.console import out, plain_table
from fledge.core.terminal import marked
from fledge.measure.on_gpus import SOURCE, gain_on_a_gpu

NAMES = ("without the draft", "with the draft")
_FRAMES_PER_S = 12
_LONGEST_REPLAY_S = 12.0  # longest replay: slower answers are sped up
_BAR = 24
_LEAST_GAIN = 1.05  # a smaller gain may be timing noise


def show(both: Any, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show `both`, a `measure.side_by_side.SideBySide`."""
    if out.is_interactive:
        _replay(both, sleep)
    out.print(_bars(both))
    for line in verdict(both):
        out.print(line)


def _replay(both: Any, sleep: Callable[[float], None]) -> None:
    """Replay the two answers, each with its own timing."""
    longest = max(both.plain.seconds, both.drafted.seconds)
    speed_up = max(1.0, longest / _LONGEST_REPLAY_S)
    frames = int(longest / speed_up * _FRAMES_PER_S) + 1
    with Live(_columns(both, 0.0), console=out, auto_refresh=False) as live:
        for frame in range(1, frames + 1):
            sleep(1 / _FRAMES_PER_S)
            now_s = longest if frame == frames else frame * speed_up / _FRAMES_PER_S
            live.update(_columns(both, now_s), refresh=True)
    if speed_up > 1:
        out.print(f"(shown {speed_up:.1f} times as fast as it was)", style="dim")


def _columns(both: Any, now_s: float) -> Table:
    """The text decoded after `now_s` seconds; dots reserve the space of the remaining text, so that
    the layout does not jump."""
    table = Table(box=None, expand=True, padding=(0, 1))
    cells = []
    for name, course in zip(NAMES, (both.plain, both.drafted), strict=True):
        pieces, count = course.pieces, course.known(now_s)
        table.add_column(marked("[bold]{}[/] [dim]{}/{} tokens[/]", name, count, len(pieces)),
                         ratio=1)  # fmt: skip
        text = coloured(pieces[:count], course.depths[:count])
        to_come = Text(re.sub(r"\S", "·", "".join(pieces[count:])), style="dim")
        cells.append(text + to_come)
    table.add_row(*cells)
    return table


def _bars(both: Any) -> Table:
    """One bar per answer, whose length is proportional to its time."""
    longest = max(both.plain.seconds, both.drafted.seconds)
    table = plain_table("", "", "seconds", "tokens/s", "target passes", words=2)
    for name, course in zip(NAMES, (both.plain, both.drafted), strict=True):
        bar = "█" * max(1, round(_BAR * course.seconds / longest))
        table.add_row(
            name, Text(bar, style="green" if course is both.drafted else "cyan"),
            f"{course.seconds:.1f}", f"{course.tokens_per_s:.1f}", f"{course.passes}",
        )  # fmt: skip
    return table


def verdict(both: Any) -> list[Text]:
    """What the draft gained; if it gained nothing, why, and what it gains on a GPU."""
    speed = both.speed
    same = "the same text, token for token" if both.same else "another text (a near tie)"
    fewer = f"{both.drafted.passes} passes of the target instead of {both.plain.passes}"
    if speed.disturbed:
        return [marked("{}; {}; the clock was disturbed, so no speed-up is shown", same, fewer)]
    if both.gain >= _LEAST_GAIN:
        return [marked("[bold green]{:.2f} times as fast[/]: {}, {}", both.gain, same, fewer)]
    why = (
        "{:.2f} times as fast here: {}, {}, but a pass that checks the drafted tokens takes {:.1f} "
        "times as long as a plain one, and drafting {:.0%} of one. Below {:.2f} tokens a round "
        "nothing is gained; this answer had {:.2f}."
    )
    step_s = speed.plain_step_s
    figures = (
        both.gain, same, fewer, speed.verify_s / step_s, speed.draft_s / step_s, speed.break_even,
        speed.live.tokens_per_round,
    )  # fmt: skip
    return [marked(why, *figures), on_a_gpu()]


def on_a_gpu() -> Text:
    """What the same target gains where a pass over eight tokens costs little more than one."""
    gain = gain_on_a_gpu("smollm2-135m", "chain")
    assert gain is not None
    return marked(
        "[bold]On a GPU it pays[/]: one {}, this target, recipe {}, about {:.0f} s of training: "
        "{:.2f} tokens a round, {:.0f} tokens/s instead of {:.0f}, [bold]{:.2f} times as fast[/] "
        "[dim]({})[/]",
        gain.gpu, gain.recipe, gain.training_s, gain.length, gain.tokens_per_s,
        gain.plain_tokens_per_s, gain.speedup, SOURCE,
    )  # fmt: skip
