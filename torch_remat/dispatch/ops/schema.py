"""What an op does with its arguments, told by its schema and never by its name.

In: an op of the dispatcher. Kept: nothing. Out: which argument its results alias, which arguments it writes, and
whether it may draw random numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torch_remat._compat import COLLECTIVES, ZERO_TENSOR

Argument = tuple[int, str]  # where an argument stands, by place and by name


class Effects(NamedTuple):
    """What an op does besides computing.

    Attributes:
        viewed: The argument that all results are views of; None if the results are new or written arguments.
        reshapes: Whether the op changes the metadata of its one tensor in place, as ``squeeze_`` does.
        factory: Whether the op needs nothing but the metadata of its one tensor.
        written: The arguments that the op writes.
        returned: For each result, which of the written arguments it is; -1 for a new one.
        random: Whether the op may draw random numbers; of ops that are not torch's own nobody knows.
        ignored: Whether the op is part of bookkeeping, which may differ between the phases.
        namespace: The library that the op belongs to; ``aten`` for torch's own.
        name: The op's name without its overload: ``mm``, ``flex_attention``; ``lib.op`` for one that is not torch's.
        cast: Whether it is the cast of which autocast may have kept the result, if its tensor is a parameter.
        plain: Whether it is one of torch's own that computes new tensors and does nothing else, its tensors being
            positional arguments.
        view: Whether it is one of torch's own that returns views of its one tensor, the first argument, and does
            nothing else.
        foreign: Whether it is neither torch's own nor a higher-order op, so that it may return what it has written.
        higher: Whether it is a higher-order op, which has no schema.
    """

    viewed: Argument | None
    reshapes: bool
    factory: bool
    written: tuple[Argument, ...]
    returned: tuple[int, ...]
    random: bool
    ignored: bool
    namespace: str
    name: str
    cast: bool
    plain: bool
    view: bool
    foreign: bool = False
    higher: bool = False


_ALL_OF_KERNEL = (9, "kwargs")  # by name alone: this op has no positional arguments

# Those of what has no schema: a higher-order op, or a body that is skipped.
UNKNOWN = Effects(None, False, False, (), (), True, False, "aten", "", False, False, False)


def argument(where: Argument, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return one argument of a call, None if it was not given."""
    place, name = where
    return args[place] if place < len(args) else kwargs.get(name)


def effects_of(op: Any) -> Effects:
    """Return what an op does besides computing."""
    # By identity, since ops hash themselves in Python.
    effects = _effects.get(id(op))
    if effects is None:
        _known.append(op)  # an op dies with its library, and the next one may lie where it lay
        effects = _effects[id(op)] = _read(op)
    return effects


_effects: dict[int, Effects] = {}
_known: list[Any] = []


def _read(op: Any) -> Effects:
    packet: str = getattr(getattr(op, "overloadpacket", op), "__name__", str(op))
    namespace = getattr(op, "namespace", "aten")
    name = packet if namespace == "aten" else f"{namespace}.{packet}"
    schema = getattr(op, "_schema", None)
    if schema is None:  # a higher-order op
        # Nothing says which of its tensors a kernel of Triton writes; torch itself wraps what it must not.
        written: tuple[Argument, ...] = (_ALL_OF_KERNEL,) if packet == "triton_kernel_wrapper_mutation" else ()
        return UNKNOWN._replace(namespace=namespace, name=packet, written=written, higher=True)
    arguments = list(enumerate(schema.arguments))
    writes = [
        (place, value) for place, value in arguments if value.alias_info is not None and value.alias_info.is_write
    ]
    if namespace == "c10d" and name.endswith("_") and not writes:
        writes = arguments[:1]  # the result, or what is reduced, comes first, though the schemas do not say so
    tensors = [value.name for value in schema.arguments if "Tensor" in str(value.type)]
    # All ops with the tag that take no other tensor, but for those that may give theirs another storage.
    reshapes = torch.Tag.inplace_view in op.tags and tensors == ["self"] and packet not in ("set_", "resize_")
    if reshapes:
        writes = []
    written = tuple((place, value.name) for place, value in writes)
    sets = [value.alias_info.before_set if value.alias_info else set() for _, value in writes]
    returned = tuple(
        next((at for at, names in enumerate(sets) if value.alias_info and value.alias_info.before_set & names), -1)
        for value in schema.returns
    )
    names = {value.name for value in schema.arguments}
    foreign = namespace != "aten"  # nobody knows whether it draws, or returns its argument
    random = torch.Tag.nondeterministic_seeded in op.tags or (foreign and namespace not in COLLECTIVES)
    ignored = op in _IGNORED or namespace == "profiler"  # a named range: FSDP has some in one phase only
    viewed = None if written else _viewed(schema)
    factory = (
        viewed is None and not written
        and tensors == ["self"] and names >= _TENSOR_OPTIONS and "non_blocking" not in names
    )  # fmt: skip
    cast = name == "_to_copy"
    pure = not (written or reshapes or random or foreign or ignored or cast or name in WRITES_WITHOUT_SAYING)
    positional = not any("Tensor" in str(value.type) and value.kwarg_only for value in schema.arguments)
    new = bool(returned) and all(str(value.type) == "Tensor" for value in schema.returns)
    plain = pure and positional and viewed is None and new
    view = pure and positional and viewed is not None and viewed[0] == 0 and len(tensors) == 1 and len(returned) == 1
    return Effects(
        viewed,
        reshapes,
        factory,
        written,
        returned,
        random,
        ignored,
        namespace,
        name,
        cast,
        plain,
        view,
        foreign,
    )


def without_statistics(effects: Effects, args: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments of an op that runs again, so that running statistics count once."""
    if effects.name not in WRITES_WITHOUT_SAYING or not args[5]:
        return args
    return [*args[:3], None, None, *args[5:]]


def _viewed(schema: Any) -> Argument | None:
    aliases = {name for value in schema.returns if value.alias_info is not None for name in value.alias_info.before_set}
    for place, value in enumerate(schema.arguments):
        # `Tensor(a -> *) self`: the results, in a list, are views.
        if value.alias_info is not None and "*" in value.alias_info.after_set:
            return place, value.name
    for place, value in enumerate(schema.arguments):
        if value.alias_info is not None and value.alias_info.before_set & aliases:
            return place, value.name
    return None


# In training (argument 5) batch norms change their running statistics, arguments 3 and 4, which they do not read then,
# and their schemas do not tell.
WRITES_WITHOUT_SAYING = frozenset(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"))
# What a mode sees of a tensor made from Python values (``torch.tensor``): its memory is new, though no op has made it.
LIFT = torch.ops.aten.lift_fresh.default
_TENSOR_OPTIONS = {"dtype", "layout", "device", "pin_memory"}
# The hooks of checkpointing detach tensors, not equally often in both phases; the others only ask for metadata, or make
# a zero without memory, which forward-mode derivatives know by its dispatch key.
_IGNORED = frozenset(
    op
    for op in (
        torch.ops.aten.detach.default,
        ZERO_TENSOR,
        torch.ops.prim.device.default,
        torch.ops.aten.is_contiguous.default,
        torch.ops.aten.is_contiguous.memory_format,
        torch.ops.aten.is_strides_like_format.default,
        torch.ops.aten.is_non_overlapping_and_dense.default,
        torch.ops.aten.size.default,
        torch.ops.aten.sym_size.default,
        torch.ops.aten.stride.default,
        torch.ops.aten.sym_stride.default,
        torch.ops.aten.storage_offset.default,
        torch.ops.aten.sym_storage_offset.default,
        torch.ops.aten.numel.default,
        torch.ops.aten.sym_numel.default,
        torch.ops.aten.dim.default,
        torch.ops.prim.layout.default,
    )
)
