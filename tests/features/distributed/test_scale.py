"""`docs/examples/scale.py`: what it computes from one process is what ranks keep, and the peaks that they have."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.features.distributed.cells import run_cells
from tests.helpers import OLDEST, no_other_regions

sys.path.insert(0, str(Path(__file__).parents[3] / "docs" / "examples"))

import scale  # of docs/examples
from transformer import Sizes

SIZES = Sizes(blocks=3 * scale.STAGE_BLOCKS)
INPUT = 4 * scale.MICROBATCH * SIZES.context * SIZES.width  # bytes of a block's input


@pytest.fixture(autouse=True)
def alone():
    """Reports of all regions are of these alone."""
    with no_other_regions():
        yield


@pytest.mark.skipif(OLDEST, reason="torch 2.10 lists no orders of GPipe and 1F1B")
def test_peak_is_the_most_that_is_alive_at_any_action():
    cost = scale.Cost(reported=0, kept=10, forward=15, backward=30, inputs=40, between=25, weights=50, sent=1)
    gpipe = scale.order_of("gpipe", 2, 4)[0]
    assert scale.peak_of("gpipe", gpipe, lambda _: cost) == 3 * 10 + 30
    assert scale.peak_of("1f1b", scale.order_of("1f1b", 2, 4)[0], lambda _: cost) == 10 + 30 + 1
    last = scale.order_of("zero bubble", 2, 2)[1]
    assert scale.peak_of("zero bubble", last, lambda _: cost) == 25 + 50


@pytest.mark.filterwarnings("ignore")  # of torch, about the group that sends nothing
def test_a_sequence_in_two_halves_halves_what_is_kept():
    whole, half = (
        scale.record(SIZES, scale.Layout(tensor=2, sequence=sequence), scale.MICROBATCH) for sequence in (False, True)
    )
    assert [cost.reported for cost in whole] == [scale.STAGE_BLOCKS * INPUT] * 3
    assert [cost.reported for cost in half] == [scale.STAGE_BLOCKS * INPUT // 2] * 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_computed_is_what_processes_measure_within_two_percent_where_stages_are_whole(ranks):
    ((_, told, texts),) = run_cells(ranks, ["check:scale"], 0, limit_seconds=120)
    tensor = ranks // 2
    assert told.startswith("equal "), texts
    measured = json.loads(told.removeprefix("equal "))
    layout = scale.Layout(tensor=tensor, sequence=tensor > 1, pipeline=ranks // tensor)
    costs = scale.record(SIZES, layout, scale.MICROBATCH)
    for schedule in scale.SCHEDULES:
        peaks = scale.peaks_of(schedule, layout.pipeline, 2 * layout.pipeline, costs)
        computed = [peak for peak in peaks for _ in range(tensor)]
        if tensor == 1:
            assert [one[schedule] for one in measured] == pytest.approx(computed, rel=0.02), schedule
        for one, peak in zip(measured, computed, strict=True):  # gloo's threads hold what they gathered a bit longer
            assert 0.98 * peak < one[schedule] < 1.2 * peak, schedule
