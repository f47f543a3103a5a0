"""A few values of a region, compared between forward and replay: what is checked by default.

In: small tensors that forward saved. Kept: at most 4 KiB of each, until the region is released. Out: an error where
replay saves other values in their place.

NOTE [ Samples ]
1. *Carriers*: saved tensors of at most 4 KiB that Python code knows, that have no `grad_fn` and are no inputs: scales,
   masks, schedules, wherever the function found them. How often an object is referred to shows whether Python code
   knows it; what an op makes for its own backward (statistics, noise, a workspace with gaps) is not known to it. Not
   in a native region, where a higher-order op may be traced with tensors that nobody has filled.
2. The *last* saved tensor that the region has made, or the beginning of it: another number, recipe or probability
   reaches it. What an op makes for its own backward counts, unless it may have gaps.
3. Forward takes the values when it ends: by then each op has filled what it saved. Replay compares when it ends, and
   carriers also when it saves them: only where they differ twice they differ. A batch norm changes its statistics,
   which no counter shows, after they were saved.
4. All of this costs two to three percent of a small transformer layer. So it is done for the first regions of a process
   and for one in seven of the later ones, spread so that each layer of a model has its turn.
5. Differences in the last bits do not count, since some ops vary from run to run. Nothing is read of accelerators'
   tensors, for which the host would have to wait.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from sys import getrefcount
from types import NoneType
from weakref import ref

import torch
from torch import Tensor

from torch_remat._compat import without_dispatch_modes
from torch_remat.dispatch.check.compare import described
from torch_remat.dispatch.holder import Holder
from torch_remat.dispatch.region.inputs import RegionInputs
from torch_remat.dispatch.region.region import SAME_OPS, Region
from torch_remat.errors import MismatchError

SAMPLE_BYTES = 4096
_MOST = 16  # carriers of a region
_FIRST = 1000  # regions of a process
_LAST = 16  # among so many saved tensors the last one with data is looked for
_TOLERANCE = 16  # times the precision of a dtype, relative to the largest value


def _references_of_results() -> int:
    """Return how often a pack hook finds a tensor referred to that no Python code knows."""
    counts: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        counts.append(getrefcount(tensor))
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        torch.zeros(1, device="cpu", requires_grad=True).exp()
    return counts[0] + 1  # the hook has a second name for it


UNKNOWN_TO_PYTHON = _references_of_results()


def takes_samples(serial: int) -> bool:
    """Whether samples are taken in the forward of a region with this number."""
    return serial < _FIRST or serial * 40503 & 0xFFFF < 0x10000 // 7  # multiples of the golden ratio are spread evenly


def sample_of(tensor: Tensor) -> bytes | None:
    """Return the first 4 KiB of a tensor's values; None where they cannot be read at once, or say nothing."""
    # Masks are bool; the workspace of recurrent layers is uint8, and has gaps.
    if type(tensor) is not Tensor or not tensor.is_cpu or tensor.dtype is torch.uint8:
        return None
    try:
        size = tensor.nbytes
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            if size > SAMPLE_BYTES:
                return None
            with torch.no_grad(), without_dispatch_modes():
                tensor = tensor.resolve_conj().resolve_neg().contiguous()
        address = tensor.data_ptr()
        # An empty one, or one whose storage was freed, as sharded parameters are: nothing may be read there.
        if address == tensor.storage_offset() * tensor.itemsize:
            return None
        return ctypes.string_at(address, size if size < SAMPLE_BYTES else SAMPLE_BYTES)
    except RuntimeError:  # sparse, nested, or wrapped by a transform
        return None


def samples_of_carriers(
    saved: Sequence[object], carriers: Sequence[int], leaves_out: Callable[[int, Tensor], bool]
) -> dict[int, bytes]:
    """Return samples of the carriers, by place, at the end of forward; see NOTE [ Samples ].

    The replay's pack hook leaves their holders to its general form.

    Args:
        saved: What forward saved; the holders have their values.
        carriers: The places of what Python code knows; inverted where an inner region hands it up, which checks itself.
        leaves_out: Takes a place and the tensor: whether it does not count, since the region has made or changed it.
    """
    samples: dict[int, bytes] = {}
    for place in [place for place in carriers if place >= 0]:
        holder = _holder_of(saved[place])
        if holder is None or (value := holder.value) is None or holder.metadata[0] != value._version:
            continue
        if (
            value.layout is not torch.strided
            or value.nbytes > SAMPLE_BYTES
            or leaves_out(place, value)
            or _is_statistic(saved, place)
        ):
            continue
        if (sample := sample_of(value)) is not None:
            samples[place], holder.plain = sample, None
            if len(samples) == _MOST:
                break
    return samples


def last_sample(saved: Sequence[object], carriers: Sequence[int], inputs: RegionInputs) -> tuple[int, bytes] | None:
    """Return a sample of the last saved tensor that the region has made, with its place; see NOTE [ Samples ]."""
    for place in range(len(saved) - 1, max(len(saved) - _LAST, 0) - 1, -1):
        holder = _holder_of(saved[place])
        if holder is None or (producer := holder.plain) is None or holder.layout is not None:
            continue
        if (value := holder.value) is None or value._version != holder.metadata[0]:
            continue
        is_carrier = place in carriers or ~place in carriers
        if producer is NoneType and (is_carrier or not _has_no_gaps(saved, place, value, inputs)):
            continue
        if (sample := sample_of(value)) is not None:
            return place, sample
    return None


def _has_no_gaps(saved: Sequence[object], place: int, owner: Tensor, inputs: RegionInputs) -> bool:
    """Whether a saved tensor without a `grad_fn` is no input, and surely written as a whole.

    The noise of `F.rrelu` is not in evaluation, nor a table of `F.ctc_loss`: their neighbours show which these are.
    """
    if owner.layout is not torch.strided or owner.nbytes > SAMPLE_BYTES or inputs.contains(owner):
        return False
    after = _holder_of(saved[place + 1]) if place + 1 < len(saved) else None
    before = _holder_of(saved[place - 1]) if place else None
    if after is not None and after.metadata[1] == owner.shape:
        return False
    return before is None or not before.producer.__name__.startswith("CtcLoss")


def _is_statistic(saved: Sequence[object], place: int) -> bool:
    """Whether these are running statistics of a batch norm in training, which changes them and does not read them.

    It saves their two, then its own two, all of one shape; in evaluation its own are empty.
    """
    for first in (place, place - 1):
        four = [_holder_of(entry) for entry in saved[max(first, 0) : first + 4]]
        kinds = {(one.producer, one.metadata[1:]) for one in four if one is not None}
        if len(four) == 4 and None not in four and len(kinds) == 1 and kinds.pop()[0] is NoneType:
            return True
    return False


def _holder_of(entry: object) -> Holder | None:
    """Return the holder that replay fills at a place."""
    found: Holder | None = entry() if type(entry) is ref else None
    return None if found is None or found.resident else found


def has_other_values(before: bytes, tensor: Tensor) -> bool:
    """Whether a tensor of replay differs from a sample of forward by more than the last bits."""
    now = sample_of(tensor)
    if now is None or now == before or len(now) != len(before):
        return False
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    with torch.no_grad(), without_dispatch_modes():
        old, new = _values(before, tensor.dtype), _values(now, tensor.dtype)
        finite = old[old.isfinite()].abs()
        largest = finite.max().item() if finite.numel() else 0.0
        tolerance = _TOLERANCE * torch.finfo(tensor.dtype).eps * largest
        return not torch.allclose(new, old, rtol=0, atol=tolerance, equal_nan=True)


def _values(sample: bytes, dtype: torch.dtype) -> Tensor:
    values = torch.frombuffer(bytearray(sample), dtype=dtype)
    return values.to(torch.complex128 if dtype.is_complex else torch.float64)


def other_values(region: Region, holder: Holder, before: bytes, place: str) -> MismatchError:
    """Return the error about a saved tensor that has other values in replay.

    Args:
        region: The region.
        holder: What has replay's tensor.
        before: The sample of forward.
        place: Where replay saved it, for the message.
    """
    value = holder.value
    assert value is not None
    told = ""
    if value.numel() == 1 and (now := sample_of(value)) is not None:
        old, new = (torch.frombuffer(bytearray(one), dtype=value.dtype).item() for one in (before, now))
        told = f" ({old} in forward, {new} in replay)"
    what = f"the saved {described(holder)} has other values in replay{place} than in forward{told}"
    if holder.producer is NoneType:
        what += "; it, or what it is made from, changed in between"
    else:
        what += "; something before it changed: a number, a tensor, a probability"
    remedy = SAME_OPS + ' determinism_check="bitwise" finds the first tensor that differs; "none" compares no values.'
    return region.differs_at(holder, what, remedy)
