"""Programs drawn at random with tensors that leave: bit for bit as plain autograd, every ticket released once.

`REMAT_EXAMPLES=5000 pytest tests/test_offload_programs.py` runs more programs, other ones each time.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import torch_remat as remat
from tests.handle_ops import SAVE
from tests.helpers import LiveStorages, assert_same, collector_off, leaf, plain
from tests.offloaders import OFFLOAD, Counting
from tests.test_handle_programs import BACKWARDS, SIDE, bodies, outcome, refused_or, settings_for


@pytest.fixture(scope="module", autouse=True)
def _without_collector():
    with LiveStorages():
        leaf(1).detach().sin()  # what torch loads when it first needs it leaves cycles
    with collector_off():
        yield


def offloading(body, chosen):
    """Return a drawn function with some of its SAVE ops made OFFLOAD ops, by the bits of a number."""
    steps = []
    for index, step in enumerate(body.steps):
        if step.inner is not None:
            step = replace(step, inner=offloading(step.inner, chosen >> 1))
        if step.policy is SAVE and chosen >> index & 1:
            step = replace(step, policy=OFFLOAD)
        steps.append(step)
    return replace(body, steps=tuple(steps))


def drawn(**options):
    return st.lists(st.builds(offloading, bodies(**options), st.integers(1, 255)), min_size=1, max_size=2)


OFFLOADERS = st.builds(
    Counting,
    prefetch_bytes=st.sampled_from([0, 1, 100, 10**6]),
    least_bytes=st.sampled_from([0, 0, 0, SIDE * SIDE * 4, 50]),
)


@settings_for(300)
@given(drawn(), BACKWARDS, OFFLOADERS, st.booleans(), st.booleans())
def test_drawn_program_is_equal_to_plain_autograd(bodies, backwards, offloader, inputs, early_stop):
    _, expected = outcome(bodies, plain, backwards)
    wrap = remat.checkpoint(offloader=offloader, offload_inputs=inputs, early_stop=early_stop)
    program, actual = outcome(bodies, wrap, backwards)
    assert_same(expected, actual)
    assert program.trace.alive() == set()
    offloader.assert_all_released_once()


@settings_for(100)
@given(drawn(depth=1, in_place=True), BACKWARDS, OFFLOADERS, st.booleans())
def test_drawn_program_with_in_place_ops_is_equal_or_refused(bodies, backwards, offloader, inputs):
    wrap = remat.checkpoint(offloader=offloader, offload_inputs=inputs)
    actual = refused_or(RuntimeError, lambda: outcome(bodies, wrap, backwards))
    if actual is None:
        return
    expected = refused_or(RuntimeError, lambda: outcome(bodies, plain, backwards))
    if expected is None:
        if backwards == "two orders":  # copies take no part in the graph
            return
        expected = refused_or(RuntimeError, lambda: outcome(bodies, plain, backwards, "copies"))
    assert expected is not None, "plain autograd refuses it"
    assert_same(expected[1], actual[1])
    offloader.assert_all_released_once()


@settings_for(100)
@given(drawn(depth=1, in_place=True), BACKWARDS)
def test_drawn_program_with_in_place_ops_is_refused_where_save_is(bodies, backwards):
    """What leaves is watched for changes as closely as what stays."""

    def run(wrap):
        try:
            return outcome(bodies, wrap, backwards)[1]
        except RuntimeError as error:
            return type(error)

    stays = run(remat.checkpoint(offloader=Counting(least_bytes=10**9)))
    leaves = run(remat.checkpoint(offloader=Counting()))
    if isinstance(stays, type):
        assert leaves == stays
    else:
        assert_same(stays, leaves)


@settings_for(60)
@given(drawn(), BACKWARDS, st.booleans())
def test_drawn_program_on_disk_is_equal_to_plain_autograd(store, bodies, backwards, inputs):
    _, expected = outcome(bodies, plain, backwards)
    _, actual = outcome(bodies, remat.checkpoint(offloader=store, offload_inputs=inputs), backwards)
    assert_same(expected, actual)
    store.flush()
    assert store.offloaded_bytes == 0


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return remat.DiskOffloader(tmp_path_factory.mktemp("store"), min_bytes=0, prefetch_bytes=200, queue_bytes=500)
