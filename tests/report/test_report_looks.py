"""What the page looks like in a real browser: tick marks, labels, colors, and explanations."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from fledge.report.page import gather, render

ROOT = Path(__file__).parents[2]

# --- axes, labels and colors --------------------------------------------------------------------

AXES = """[...document.querySelectorAll('svg.chart')].map((svg) => {
  const texts = [...svg.querySelectorAll('text:not(.label):not(.best-label)')];
  const of = (anchor) => texts.filter((t) => t.getAttribute('text-anchor') === anchor);
  return ['end', 'middle'].map((anchor) => of(anchor).map((t) => t.textContent));
})"""
TOUCHING = """[...document.querySelectorAll('svg.chart')].flatMap((svg) => {
  const room = svg.getBoundingClientRect();
  const box = (text) => [text.textContent, text.getBoundingClientRect()];
  const boxes = [...svg.querySelectorAll('text')].map(box);
  const wrong = boxes.filter(([, b]) => b.left < room.left || b.right > room.right + 4
    || b.top < room.top || b.bottom > room.bottom).map(([text]) => `${text} is outside`);
  for (const mark of svg.querySelectorAll('.best-label')) {
    const b = mark.getBBox();
    for (const curve of svg.querySelectorAll('.curve')) {
      const at = (i) => curve.getPointAtLength((i / 99) * curve.getTotalLength());
      const inside = (p) => p.x > b.x && p.x < b.x + b.width && p.y > b.y && p.y < b.y + b.height;
      const points = Array.from({ length: 100 }, (_, i) => at(i));
      if (points.some(inside)) wrong.push(`a curve in ${mark.textContent}`);
    }
  }
  boxes.forEach(([one, a], i) => boxes.slice(i + 1).forEach(([other, b]) => {
    const beside = a.right <= b.left || b.right <= a.left;
    const over = a.bottom <= b.top + 2 || b.bottom <= a.top + 2; // letters do not fill their boxes
    if (!beside && !over) wrong.push(`${one} and ${other}`);
  }));
  return wrong;
})"""


def flat(data, *, depths, steps=50, best=-1, slope=0.0, size=1.0):
    """The page of a run with flat or nearly flat curves, whose labels all compete for one place."""
    x = list(range(1, steps + 1))
    curve = [size + slope * i for i in x]
    names = ("loss", "lr", "grad_norm", "tokens_per_s", "target_share", "tau")
    data["training"] |= {"step": x, **dict.fromkeys(names, curve), "joint": [curve] * depths}
    joint = [curve] * depths
    data["held_out"] |= {"step": x, "length": curve, "joint": joint, "best": best % steps}
    return render(data)


@pytest.mark.parametrize("size", [2e-4, 0.013, 1.0, 83.0, 10_300.0])
def test_tick_marks_of_an_axis_are_distinct(run, page, tmp_path, size):
    for slope in (size / 7, size / 900):
        for steps in (3, 50):
            html = flat(gather(run), depths=3, steps=steps, slope=slope, size=size)
            page.show(html, tmp_path)
            axes = page.run(AXES)
            assert len(axes) == 8
            for marks in [axis for chart in axes for axis in chart]:
                assert len(marks) >= 2
                assert len(set(marks)) == len(marks)


@pytest.mark.parametrize("width", [390, 700, 1160, 1700])
def test_labels_do_not_overlap(run, page, tmp_path, width):
    for depths in (2, 3, 8, 16):
        for best, size in ((0, 0.0), (-1, 0.0), (25, 0.37), (-1, 0.9)):
            html = flat(gather(run), depths=depths, best=best, size=size)
            page.show(html, tmp_path, width=width)
            assert page.run(TOUCHING) == []
    page.open(run / "report.html", width=width)
    assert page.run(TOUCHING) == []


def as_seen(colors):
    """The colors in OKLab, for four kinds of color vision (Machado et al. 2009, severity 1)."""
    linear = np.array(colors) / 255
    linear = np.where(linear <= 0.04045, linear / 12.92, ((linear + 0.055) / 1.055) ** 2.4)
    visions = [
        np.eye(3),
        [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],  # protanopia
        [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],  # deuteranopia
        [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],  # tritanopia
    ]
    cones = [[0.41222, 0.53633, 0.05145], [0.2119, 0.6807, 0.1074], [0.0883, 0.28172, 0.62998]]
    axes = [[0.21045, 0.79362, -0.00407], [1.978, -2.42859, 0.45059], [0.0259, 0.78277, -0.80868]]
    for matrix in visions:
        yield np.cbrt(
            np.clip(linear @ np.transpose(matrix), 0, 1) @ np.transpose(cones)
        ) @ np.transpose(axes)


def smallest_distance(colors):
    """The smallest distance between any two of the colors, for any kind of color vision."""
    gaps = [
        np.linalg.norm(lab[:, None] - lab[None], axis=2) + np.eye(len(lab))
        for lab in as_seen(colors)
    ]
    return min(gap.min() for gap in gaps)


def luminance(color):
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_token_colors_differ_for_every_kind_of_color_vision(run, page, tmp_path, scheme):
    def rgb(texts):
        return [[int(x) for x in re.findall(r"\d+", text)[:3]] for text in texts]

    page.show(flat(gather(run), depths=8), tmp_path, scheme)
    curves = page.run(
        "[...document.querySelectorAll('svg.chart')].map((c) => [...c.querySelectorAll('.curve')])"
        ".find((c) => c.length === 8).map((c) => getComputedStyle(c).stroke)"
    )
    [card] = rgb([page.run("getComputedStyle(document.querySelector('.panel')).backgroundColor")])
    colors = rgb(curves)
    assert smallest_distance(colors) > 0.09
    assert smallest_distance(colors[:3]) > 0.13
    for color in colors:
        low, high = sorted([luminance(color), luminance(card)])
        assert (high + 0.05) / (low + 0.05) >= 3  # the contrast that WCAG requires for lines
    page.open(run / "report.html", scheme)
    swatches = "[...document.querySelectorAll('.legend .t:not(.own)')]"
    shades = rgb(page.run(f"{swatches}.map((t) => getComputedStyle(t).backgroundColor)"))
    assert len(shades) == 3
    assert smallest_distance(shades) > 0.13


# --- explanations beside the figures ------------------------------------------------------------


def with_speed(data, gain):
    draft = data["evaluation"]["drafts"][0]
    draft["speed"] |= {
        "disturbed": False,
        "measured_speedup_live_sample": gain,
        "break_even_acceptance_length": 1.5,
        "plain_step_ms": 10.0,
        "verify_ms_per_round": 13.0,
        "draft_ms_per_round": 2.0,
        "plain_tokens_per_s": 9.0,
        "speculative_tokens_per_s": 9.0,
    }
    return data


def text_of(page, directory, data):
    page.show(render(data), directory)
    return page.text()


def test_a_speed_up_below_one_is_explained(run, page, tmp_path):
    text = text_of(page, tmp_path, with_speed(gather(run), 0.85))
    assert "Below 1 on this CPU: reading 4 tokens at once takes 1.30 times as long" in text
    assert "drafting adds 0.20" in text
    assert "In float32, every token of a pass costs a CPU compute; in bfloat16" in text
    assert "A GPU verifies a few tokens in the time of one." in text
    data = with_speed(gather(run), 0.85)
    data["evaluation"]["target"]["dtype"] = "bfloat16"
    assert "costs a CPU compute" not in text_of(page, tmp_path, data)
    data["evaluation"]["target"]["device"] = "cuda:0"
    assert "Below 1 on this machine" in text_of(page, tmp_path, data)
    assert "Below 1" not in text_of(page, tmp_path, with_speed(gather(run), 1.2))


def test_different_acceptance_lengths_are_explained(run, page, tmp_path):
    data = gather(run)
    held_out, draft = data["held_out"], data["evaluation"]["drafts"][0]
    held_out["length"][held_out["best"]], draft["acceptance_length"] = 1.51, 1.39
    text = text_of(page, tmp_path, data)
    assert "Why 1.39 and 1.51?" in text
    assert "the target's own answers to 6 new prompts; 1.51 counts them by rounds along" in text
    draft["acceptance_length"] = 1.51
    assert "Why 1.51" not in text_of(page, tmp_path, data)


@pytest.mark.parametrize("width", [390, 1160])
def test_no_panel_is_half_empty(run, page, width):
    """A single bar gets no panel, and no panel is stretched to the height of its neighbor."""
    assert len(json.loads((run / "eval.json").read_text())["drafts"][0]["by_context"]) == 1
    page.open(run / "report.html", width=width)
    assert "By context" not in page.text()
    empty = page.run(
        "[...document.querySelectorAll('.panel')].filter((p) => {"
        "const box = p.getBoundingClientRect(), end = p.lastElementChild.getBoundingClientRect();"
        "return box.bottom - end.bottom > 60 }).map((p) => p.innerText.slice(0, 30))"
    )
    assert empty == []
