"""The tensor without data that represents a skipped op's output in replay.

In: a tensor's metadata, and what the placeholder stands for. Kept: no data. Out: views of it, real tensors where only
metadata is asked for, and a `PlaceholderError` for anything that would read or write data.

NOTE [ What an op may do with a placeholder ]
Decided by the op's schema, never by its name:
1. A result that aliases the placeholder and writes nothing is a view: it is a placeholder too. Its metadata comes from
   the op itself, run on the meta device.
2. A factory takes one tensor, ``self``, and the tensor options (dtype, layout, device, pin_memory): it needs nothing
   but metadata, and makes a real tensor. (A conversion takes ``non_blocking`` besides: it reads.)
3. Every other op reads or writes data, and raises: a placeholder cannot get a value. The replay learns of the refusal
   from `last_refusal` and may start over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from torch_remat._compat import (
    active_modes,
    forbid_data_access,
    make_wrapper_subclass,
    negative_view,
    optree,
    set_conj,
    set_neg,
    without_dispatch_modes,
    without_torch_function,
    without_torch_function_ever,
)
from torch_remat.dispatch.ops.schema import argument, effects_of
from torch_remat.errors import PlaceholderError, user_line

NOT_LAZY = (False, False)
# Makes a named tuple for half the time.
new_tuple: Callable[[type, tuple[Any, ...]], Any] = tuple.__new__


class Source(NamedTuple):
    """What a placeholder represents."""

    region: str
    op: str
    output: str
    owner: int = 0  # the region's identity: another may have its name

    def is_of(self, region: object) -> bool:
        """Whether a region's replay passes it: to another one, around or inside, it is a tensor like others."""
        return self.owner == id(region)


# The geometry of a tensor in its storage: its shape, strides and offset there.
Geometry = tuple[torch.Size, tuple[int, ...], int]


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """Return the geometry of a tensor in its storage."""
    offset: Any = tensor.storage_offset()
    return tensor.shape, tensor.stride(), offset


class Placeholder(torch.Tensor):
    """A tensor with true metadata and no data; see NOTE [ What an op may do with a placeholder ]."""

    source: Source
    resized = False  # whether an op has resized what it stands for

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse what reaches data without an aten op; leave results as they are."""
        name = getattr(func, "__name__", str(func))
        if name in _OTHER_FOR_SUBCLASSES and any(getattr(mode, "answers", False) for mode in active_modes()):
            # Its ops are answered one by one; where one of them runs, the log has kept what it reads.
            args, kwargs = mapped(_zeros_in_place_of, args, kwargs or {})
            return func(*args, **kwargs)
        if name not in _DATA_ACCESS:
            try:
                return without_torch_function_ever(func, types, args, kwargs or {})
            except RuntimeError as error:
                if isinstance(error, PlaceholderError) or not any(text in str(error) for text in TORCH_SAYS):
                    raise
        return refuse(_first_of([*args, *(kwargs or {}).values()]).source, name)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Pass on views, make real tensors from metadata, raise otherwise."""
        kwargs = kwargs or {}
        effects = effects_of(op)
        if effects.view and type(base := args[0]) is Placeholder:  # the only tensor
            return _views_of(base, op(_meta_twin(base), *args[1:], **kwargs))
        first = _first_of([*args, *kwargs.values()])
        if effects.reshapes:
            return reshape(op, args, kwargs)
        if effects.viewed is not None:
            base = argument(effects.viewed, args, kwargs)
            if isinstance(base, Placeholder):
                return _views_of(base, _on_meta(op, args, kwargs, first))
        if effects.factory:
            device = kwargs.get("device")
            return _on_meta(op, args, {**kwargs, "device": first.device if device is None else device}, first)
        # Where autograd is skipped (inference mode) an op that consists of others comes here whole.
        result = op.decompose(*args, **kwargs)
        return refuse(first.source, str(op)) if result is NotImplemented else result

    def __repr__(self) -> str:  # type: ignore[override]
        """Describe what the placeholder represents."""
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"Placeholder(output {self.source.output!r} of {self.source.region}::{self.source.op}, "
            f"shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}{grad})"
        )

    def as_subclass(self, cls: type[Any]) -> Any:
        """Return itself as a plain tensor; refuse another type, which a tensor of one type cannot become."""
        return super().as_subclass(cls) if issubclass(Placeholder, cls) else refuse(self.source, "as_subclass")

    def __format__(self, spec: str) -> str:
        """Return the text of ``repr``; a format of its own needs the value."""
        return refuse(self.source, f"format {spec!r}") if spec else repr(self)


class Packed(partial[Placeholder]):
    """What autograd saves of a placeholder, which may be an output of the node that saves it: makes one like it."""

    @classmethod
    def of(cls, tensor: Placeholder) -> Packed:
        """Describe a placeholder."""
        with without_torch_function():
            lazy = tensor.is_conj(), tensor.is_neg()
            geometry, dtype, device = geometry_of(tensor), tensor.dtype, tensor.device
        return cls(placeholder_at, geometry, dtype, device, tensor.source, lazy)


def unpack(value: torch.Tensor | Packed) -> torch.Tensor:
    """Unpack hook of a replay: return what was saved."""
    return value() if type(value) is Packed else value  # type: ignore[return-value]


def make_placeholder(like: torch.Tensor, source: Source, device: torch.device | None = None) -> Placeholder:
    """Return a placeholder with the metadata of a tensor (needs no gradient), on its device or another."""
    return placeholder_at(geometry_of(like), like.dtype, device or like.device, source, (like.is_conj(), like.is_neg()))


def placeholder_at(
    geometry: Geometry,
    dtype: torch.dtype,
    device: torch.device,
    source: Source,
    lazy: tuple[bool, bool] = NOT_LAZY,
) -> Placeholder:
    """Return a placeholder with the given metadata; ``lazy``: whether it is a conjugate, and a negative."""
    shape, stride, offset = geometry
    if torch.is_inference_mode_enabled():  # autograd refuses to take views made here for views of others
        with torch.inference_mode(False):
            return placeholder_at(geometry, dtype, device, source, lazy)
    # By position, which takes a sixth less than by keyword.
    placeholder: Placeholder = make_wrapper_subclass(
        Placeholder, shape, stride, offset, None, dtype, torch.strided, device
    )
    placeholder.source = source
    forbid_data_access(placeholder)
    if lazy != NOT_LAZY:
        set_conj(placeholder, lazy[0])
        set_neg(placeholder, lazy[1])
    return placeholder


def reshape(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an op that changes a placeholder's metadata in place; return the placeholder."""
    with without_dispatch_modes():  # also past the placeholder's own refusal
        op(*args, **kwargs)
    return args[0]


def _views_of(base: Placeholder, like: Any) -> Any:
    """Return placeholders for the results of a view op, which are like the given tensors."""
    if isinstance(like, torch.Tensor):
        return make_placeholder(like, base.source, base.device)
    return optree.tree_map(
        lambda leaf: make_placeholder(leaf, base.source, base.device) if isinstance(leaf, torch.Tensor) else leaf, like
    )


def mapped(
    function: Callable[[Any], Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return arguments with a function applied to each value in them."""
    given: Any = (tuple(args), dict(kwargs))
    made: Any = optree.tree_map(function, given)
    return made[0], made[1]


def is_placeholder(tensor: object) -> bool:
    """Whether a value is a placeholder: a tensor without data that stands for a skipped op's output in replay.

    Args:
        tensor: Any value.

    Returns:
        True for placeholders and views of them, which exist only in the replay of a region.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> remat.is_placeholder(torch.zeros(3))
        False
    """
    return isinstance(tensor, Placeholder)


class Refusal(NamedTuple):
    """A use of a placeholder's data that was refused.

    Not the error itself, whose traceback knows frames and their tensors.

    Attributes:
        source: What the placeholder stands for.
        consumer: What needs the data.
        file: The file of the user's code that asked for it.
        line: The line there.
    """

    source: Source
    consumer: str
    file: str
    line: int

    def error(self) -> PlaceholderError:
        """Return the error about it."""
        (region, op, output, _), place = self.source, f"{Path(self.file).name}:{self.line}"
        return PlaceholderError(region=region, op=op, output=output, consumer=self.consumer, line=place)


def refuse(source: Source, consumer: str) -> NoReturn:
    """Raise the error about a use of a placeholder's data.

    Raises:
        PlaceholderError: Always.
    """
    refusal = Refusal(source, consumer, *user_line())
    last_refusal.set(refusal)
    raise refusal.error()


# The latest refusal in this thread, so that a replay finds out about one that user code swallowed.
last_refusal: ContextVar[Refusal | None] = ContextVar("torch_remat_refusal", default=None)


def _on_meta(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], first: Placeholder) -> Any:
    args, kwargs = mapped(_meta_twin, args, kwargs)
    try:
        return op(*args, **kwargs)
    except NotImplementedError:
        refuse(first.source, str(op))


def _meta_twin(leaf: Any) -> Any:
    """Return a tensor on the meta device with a placeholder's metadata; other values as they are."""
    if not isinstance(leaf, Placeholder):
        return leaf
    shape, stride, offset = geometry_of(leaf)
    with without_dispatch_modes():  # no ops of the user's
        if offset:
            extent = sum((size - 1) * step for size, step in zip(shape, stride, strict=True) if size)
            twin = torch.empty(offset + extent + 1, dtype=leaf.dtype, device="meta").as_strided(shape, stride, offset)
        else:
            twin = torch.empty_strided(shape, stride, dtype=leaf.dtype, device="meta")
    if leaf.is_conj():
        twin = twin.conj()
    return negative_view(twin) if leaf.is_neg() else twin


def _zeros_in_place_of(leaf: Any) -> Any:
    """Return an ordinary tensor with a placeholder's metadata; other values as they are."""
    if not isinstance(leaf, Placeholder):
        return leaf
    with without_dispatch_modes(), without_torch_function():
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device).zero_()


# Functions of ATen that run other ops on tensor subclasses than on tensors.
_OTHER_FOR_SUBCLASSES = frozenset(("one_hot",))


def _first_of(arguments: list[Any]) -> Placeholder:
    tree: Any = arguments
    return next(leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, Placeholder))


# What reaches memory without an aten op, and would find none; of all else torch's C++ code says so.
_DATA_ACCESS = frozenset((
    "data_ptr", "const_data_ptr", "mutable_data_ptr", "untyped_storage", "storage", "_typed_storage", "share_memory_",
))  # fmt: skip
# How torch's C++ code refuses missing data, and its higher-order ops a subclass that they do not know.
TORCH_SAYS = (
    "Cannot access data pointer",
    "not supported for tensor subclasses",
    "its data is not allocated",
    "no rule registered for HOP",
)


def is_of_placeholders(error: BaseException) -> bool:
    """Whether an error may be that of code that met a placeholder."""
    if isinstance(error, PlaceholderError):
        return True
    says = (*TORCH_SAYS, Placeholder.__name__)
    return isinstance(error, RuntimeError | TypeError) and any(text in str(error) for text in says)


def add_note(error: Exception, region: str, changes: Sequence[str] = ()) -> None:
    """Add to an error where it was raised, and what C++ code missed: no Python hook saw it ask for data.

    Args:
        error: The error.
        region: The region's name.
        changes: What is not as forward left it, as sentences.
    """
    if not hasattr(error, "add_note"):  # Python 3.11
        return
    note = f"This was raised while region {region!r} was replayed in backward."
    if not isinstance(error, PlaceholderError) and any(text in str(error) for text in TORCH_SAYS):
        note += (
            " C++ code may have needed the data of a placeholder, which has none: the output of a SAVE op that replay "
            "skips. Wrap the code that reads it in remat.native_save_region, move it into a custom autograd Function "
            "with remat.auto_forward, or give the op the policy RECOMPUTE."
        )
    error.add_note(" ".join([note, *(change[0].upper() + change[1:] for change in changes)]))


def _refused(self: Placeholder, name: str, *args: Any, **kwargs: Any) -> NoReturn:
    refuse(self.source, name)


for _name in ("__reduce_ex__", "__deepcopy__", "__copy__", "_typed_storage"):  # not in the torch-function protocol
    setattr(Placeholder, _name, partialmethod(_refused, _name))
Placeholder.__cuda_array_interface__ = property(  # type: ignore[assignment]
    lambda self: refuse(self.source, "__cuda_array_interface__")
)
