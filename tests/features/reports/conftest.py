"""Reports list all regions that are alive: those of other tests are hidden."""

from __future__ import annotations

import pytest

from tests.helpers import no_other_regions


@pytest.fixture(autouse=True)
def _no_other_regions():
    with no_other_regions():
        yield
