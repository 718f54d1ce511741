"""What the page looks like in a real browser: labels, and explanations beside the figures."""

import pytest

from fledge.report.page import gather, render

# --- labels ---------------------------------------------------------------------------------------

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


def flat(data, *, depths, best, size, steps=50):
    """The page of a run with flat curves, whose labels all compete for one place."""
    x = list(range(1, steps + 1))
    curve = [size] * steps
    names = ("loss", "lr", "grad_norm", "tokens_per_s", "target_share", "tau")
    data["training"] |= {"step": x, **dict.fromkeys(names, curve), "joint": [curve] * depths}
    joint = [curve] * depths
    data["held_out"] |= {"step": x, "length": curve, "joint": joint, "best": best % steps}
    return render(data)


@pytest.mark.parametrize("width", [390, 700, 1160, 1700])
def test_labels_do_not_overlap(run, page, tmp_path, width):
    for depths in (2, 3, 8, 16):
        for best, size in ((0, 0.0), (-1, 0.0), (25, 0.37), (-1, 0.9)):
            html = flat(gather(run), depths=depths, best=best, size=size)
            page.show(html, tmp_path, width=width)
            assert page.run(TOUCHING) == []
    page.open(run / "report.html", width=width)
    assert page.run(TOUCHING) == []


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
