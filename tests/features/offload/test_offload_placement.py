"""Views rebuilt on another storage are the views that they were."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import assert_same
from torch_remat.offload.transfer import ALIGNMENT_BYTES, Placement, flattened, travelling_span

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@st.composite
def views(draw):
    """Draw a view of a storage, with any strides, zero too."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(1, 4), max_size=3))
    stride = [draw(st.integers(0, 9)) for _ in shape]
    offset = draw(st.integers(0, 500))
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    length = offset + last + 1 + draw(st.sampled_from([0, 1, 7, 1000]))
    base = torch.arange(length).to(dtype) if dtype is not torch.bool else torch.arange(length) % 3 == 0
    view = base.as_strided(shape, stride, offset)
    if dtype.is_complex and draw(st.booleans()):
        view = view.conj()
        if draw(st.booleans()):
            view = view.imag
    return view


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(views())
def test_view_is_rebuilt_with_its_strides_on_a_copy_of_what_travelled(view):
    placement = Placement.of(view)
    span = travelling_span(view, placement)
    assert span.covers(placement.span)
    flat = flattened(view, span)
    assert flat.is_contiguous()
    assert not flat.is_conj()
    assert not flat.is_neg()
    total = view.untyped_storage().nbytes()
    assert flat.nbytes == span.stop - span.start <= total
    whole = span.start == 0 and span.stop > total - 16
    assert whole or span.stop - span.start < ALIGNMENT_BYTES + total / 2
    assert span.start % ALIGNMENT_BYTES == 0
    rebuilt = placement.seen_in(flat.clone(), -span.start)
    assert_same(view, rebuilt)
    assert rebuilt.stride() == view.stride()
    assert (rebuilt.is_conj(), rebuilt.is_neg()) == (view.is_conj(), view.is_neg())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint8, torch.bool])
def test_view_of_smaller_elements_is_rebuilt_on_larger_ones(dtype):
    base = torch.randn(8, 4, dtype=torch.float64)
    view = (base.view(torch.uint8) & 1).view(dtype)[:, 3:7] if dtype is torch.bool else base.view(dtype)[:, 3:7]
    source = view if dtype is torch.bool else base
    span = travelling_span(source, Placement.of(source))
    assert_same(view, Placement.of(view).seen_in(flattened(source, span).clone(), -span.start))


def test_rebuilt_view_shares_the_version_counter_of_what_came_back():
    view = torch.randn(4, 4).t()[1:]
    flat = torch.zeros(16)
    rebuilt = Placement.of(view).seen_in(flat)
    rebuilt.add_(1)
    assert flat._version == rebuilt._version == 1
