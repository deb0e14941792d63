"""What the pipeline's benchmark computes from times: the schedule, and what each cause costs."""

from __future__ import annotations

import pytest

from benchmarks.pipeline_bound import StageTime, explain, one_f_one_b_s


@pytest.mark.parametrize(("count", "chunks"), [(1, 4), (2, 1), (2, 8), (4, 4), (4, 16)])
def test_equal_stages_fill_and_drain_once(count: int, chunks: int) -> None:
    stages = [StageTime(1.0, 2.0)] * count
    assert one_f_one_b_s(stages, chunks) == pytest.approx(3.0 * (chunks + count - 1))


def test_the_slowest_stage_sets_the_pace() -> None:
    """By hand for two stages. A slow second one works without a pause, after the first's first micro-batch and before
    the first's last backward pass. A slow first one waits for the first gradient, two micro-batches ahead, and then
    no more."""
    first, second = StageTime(1.0, 2.0), StageTime(2.0, 4.0)
    assert one_f_one_b_s([first, second], 5) == pytest.approx(1.0 + 5 * 6.0 + 2.0)
    assert one_f_one_b_s([second, first], 5) == pytest.approx(2.0 + 1.0 + 2.0 + 5 * 4.0 + 3 * 2.0)


def test_each_cause_adds_to_those_before_it() -> None:
    stages = [StageTime(1.0, 2.0, 0.1), StageTime(1.5, 2.5, 0.3)]
    found = explain(7.0 * 8 * 0.9, stages, 8)
    assert list(found) == ["bound", "equal", "uneven", "update"]
    assert found["bound"] == pytest.approx(7.0 * 8 * 0.9 * 9 / 16) and found["equal"] == pytest.approx(3.5 * 9)
    assert found["equal"] < found["uneven"] and found["update"] == pytest.approx(found["uneven"] + 0.3)
