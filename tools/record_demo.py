"""docs/payoff.svg: the demo's last screen, recorded: `python tools/record_demo.py demo_out X.svg`.

`demo_out` is what `fledge demo` has made on this machine, where nothing else should run now.
"""

import io
import sys
from pathlib import Path

from fledge.cli import chat, demo
from fledge.core.machine import multiplies_bfloat16
from fledge.core.terminal import Terminal
from fledge.measure.answers import cached_answers, read_prompts
from fledge.training.runs import draft_directory, load_target

_SHOWN = 0.45  # of the time of the slowest, in the frame above the figures


def record(directory: Path, svg: Path) -> None:
    """Decode the demo's first answer again and save what it shows."""
    terminal = Terminal(
        record=True, force_terminal=True, width=110, color_system="truecolor", file=io.StringIO()
    )
    demo.out, chat.in_color = terminal, lambda: True
    show, run = demo.show, directory / "run"

    def framed(both, shipped=None):
        courses = {"without a draft": both.plain, "four minutes of training": both.drafted}
        if shipped is not None:
            courses["comes with fledge"] = shipped.drafted
        terminal.print(demo._columns(courses, _SHOWN * both.plain.seconds))
        terminal.is_interactive = False
        show(both, shipped)

    demo.show = framed
    dtype = "bfloat16" if multiplies_bfloat16() else "float32"
    with load_target(draft_directory(run), dtype=dtype) as target:
        prompts = read_prompts([str(directory / "unseen.jsonl")])[-1:]
        answers = cached_answers(target, prompts, max_new_tokens=demo._ANSWER_TOKENS, batch=1)
        demo._show_side_by_side(run, target, answers.turns[0])
    print(terminal.export_text(clear=False))
    terminal.save_svg(str(svg), title="fledge demo")


if __name__ == "__main__":
    record(Path(sys.argv[1]), Path(sys.argv[2]))
