"""Samples over time: few of them, and no peak lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npusim.report.timeline import Sample, Timeline


def test_a_sample_lasts_until_something_changes():
    timeline = Timeline()
    for time, values in [(0.0, {"a": 1}), (1.0, {"a": 1}), (2.0, {"a": 1, "b": 2}), (2.0, {"b": 2})]:
        timeline.add(time, values)
    assert timeline.samples() == (Sample(0.0, {"a": 1}), Sample(2.0, {"a": 1, "b": 2}), Sample(2.0, {"b": 2}))
    assert timeline.peaks == {"a": 1, "b": 2}
    assert timeline.peak_sample == Sample(2.0, {"a": 1, "b": 2})


def test_neighbours_are_merged_into_the_larger_one():
    timeline = Timeline(max_samples=4)
    for time, value in enumerate([1, 5, 3, 2, 9, 1, 0, 4, 7]):
        timeline.add(float(time), {"a": value})
    assert timeline.samples() == (Sample(0.0, {"a": 5}), Sample(4.0, {"a": 9}), Sample(8.0, {"a": 7}))


def test_time_does_not_run_backwards():
    timeline = Timeline()
    timeline.add(1.0, {"a": 1})
    with pytest.raises(ValueError, match=r"a sample at 0\.5 s came after one at 1\.0 s"):
        timeline.add(0.5, {"a": 2})


def test_pairs_need_an_even_number():
    with pytest.raises(ValueError, match="max_samples must be an even number from 2, got 3"):
        Timeline(3)


@settings(max_examples=50)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(1, 100)), min_size=1, max_size=200))
def test_peaks_stay_whatever_is_merged(moments):
    timeline = Timeline(max_samples=8)
    for time, values in enumerate(moments):
        timeline.add(float(time), values)
    kept = timeline.samples()
    assert len(kept) <= 8
    assert [sample.time for sample in kept] == sorted(sample.time for sample in kept)
    assert max(sample.total for sample in kept) == max(sum(values.values()) for values in moments)
    assert timeline.peaks == {
        layer: max(values.get(layer, 0) for values in moments) for layer in "abc" if any(layer in m for m in moments)
    }
