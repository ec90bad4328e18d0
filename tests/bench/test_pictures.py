"""Pictures of spans: steps from the middle of a generation, as matplotlib draws them."""

import re
from dataclasses import replace

import pytest

from lib.twin import twin_prompts, twin_target
from specdec.bench.common import pictures
from specdec.bench.common.pictures import draw_lanes, middle_steps
from specdec.loop.decoder import Decoder
from specdec.loop.stats import AcceptanceStats


def test_a_timeline_shows_steps_from_the_middle():
    step = ("draft", "score", "verify", "commit")
    spans = [("prefill", 0.0, 5.0)]
    spans += [(name, 10.0 * i + j, 10.0 * i + j + 1) for i in range(1, 8) for j, name in enumerate(step)]
    found = middle_steps(spans, num_steps=3)
    assert [name for name, _, _ in found] == [*step] * 3
    assert found[0] == ("draft", 0.0, 1.0)
    assert found[4] == ("draft", 10.0, 11.0)
    assert [name for name, _, _ in middle_steps(spans, num_steps=99)] == [*step] * 7
    assert middle_steps([]) == []


def test_every_lane_and_bar_is_drawn(monkeypatch):
    lanes = {"a<b": [("draft", 0.0, 1.0), ("score", 1.0, 3.0), ("draft", 3.0, 4.0)], "none": []}
    picture = draw_lanes(lanes, "the title")
    assert picture == draw_lanes(lanes, "the title")
    texts = re.findall(r"<text[^>]*>([^<]*)", picture)
    assert {"a&lt;b", "none", "the title", "draft", "score", "ms"} <= {*texts}
    fills = re.findall(r"fill: (#\w+)", picture)
    assert (fills.count("#ff7f0e"), fills.count("#1f77b4")) == (2 + 1, 1 + 1)  # the bars, and the key
    monkeypatch.setattr(pictures, "find_spec", lambda _: None)
    with pytest.raises(RuntimeError, match=r"specdec-triton\[eval\]"):
        draw_lanes(lanes, "the title")


def test_spans_of_the_loop_add_up_to_its_times():
    stats = Decoder(twin_target()).decode(twin_prompts(), 8).stats
    assert isinstance(stats, AcceptanceStats)
    names = [name for name, _, _ in stats.spans_ms]
    assert names == ["prefill", *["draft", "score", "verify", "commit"] * stats.num_target_passes]
    assert all(begin <= end for _, begin, end in stats.spans_ms)
    total = sum(end - begin for name, begin, end in stats.spans_ms if name == "score")
    assert total == pytest.approx(stats.times_ms["score"])
    assert replace(stats, spans_ms=[]).tau == stats.tau
