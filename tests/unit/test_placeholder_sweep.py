"""Every op of torch's own op database on placeholders: a view, a result of metadata alone, or a PlaceholderError.

Torch itself is the reference. For each sample the true call runs on real tensors, again on other data, and then with
some tensors replaced by placeholders of the same metadata. What comes back must be one of

(a) a placeholder with the true result's metadata, where the true result is a view of what was replaced;
(b) a real value that equals the true one, which is then the same whatever the data is;
(c) `PlaceholderError`, before any real tensor was written.

Where the op writes to what was replaced, only (c) will do; where all that it returns is a view of it, only (a).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor

import torch_remat as remat
from torch_remat.dispatch.placeholder import Source, make_placeholder

pytest.importorskip("numpy", reason="torch's op database needs it")

SOURCE = Source("block", "op", "out")
DTYPES = (torch.float32, torch.int64, torch.complex64, torch.bool)


def op_database() -> list[Any]:
    """Return torch's op database; its import freezes `torch.backends` flags, which other tests may want to set."""
    frozen = torch.backends.flags_frozen()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    torch.backends.__allow_nonbracketed_mutation_flag = not frozen
    return [op for op in op_db if not op.name.startswith("jiterator")]  # those compile for a GPU


OPS = op_database()


class Call(NamedTuple):
    """One way to call an op on one sample: its name, the way, the function, all arguments as one tree."""

    op: str
    form: str
    function: Callable
    tree: tuple[tuple, dict]

    def run(self, tree: tuple[tuple, dict] | None = None) -> Any:
        """Run the function from a fixed seed, on these arguments or its own."""
        args, kwargs = self.tree if tree is None else tree
        torch.default_generator.manual_seed(0)  # torch.manual_seed takes 0.5 ms where there is no GPU
        return self.function(*args, **kwargs)


def metadata(tensor: Tensor) -> tuple:
    """Return what a caller can ask of a tensor without reading its data."""
    place = (tensor.stride(), tensor.storage_offset()) if tensor.layout is torch.strided else ()
    flags = (tensor.is_conj(), tensor.is_neg(), tensor.requires_grad)
    return (tuple(tensor.shape), tensor.dtype, tensor.device, tensor.layout, flags, *place)


def is_strided(leaf: Any) -> bool:
    """Whether a placeholder can take this leaf's place."""
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and not (leaf.is_conj() or leaf.is_neg())


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's whole storage as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def elements_of(tensor: Tensor) -> Tensor:
    """Return a tensor's whole storage as its elements."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return whole[: whole.numel()]


def copied(tree: Any, other: str | None = None, places: frozenset[int] = frozenset()) -> Any:
    """Return a copy of the arguments, with `other` data ("zeros", "reversed") at some places."""
    leaves, structure = optree.tree_flatten(tree)
    memo: dict[int, Any] = {}
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        leaves[place] = copy.deepcopy(leaf, memo)
        if place in places and other == "zeros":
            elements_of(leaves[place]).zero_()
        elif place in places and other == "reversed":
            elements_of(leaves[place]).copy_(elements_of(leaf).flip(0))
    return optree.tree_unflatten(structure, leaves)


def replaced(tree: Any, places: frozenset[int]) -> Any:
    """Return a copy of the arguments with placeholders at some places."""
    leaves, structure = optree.tree_flatten(copied(tree))
    leaves = [make_placeholder(leaf, SOURCE) if place in places else leaf for place, leaf in enumerate(leaves)]
    return optree.tree_unflatten(structure, leaves)


def choices(tree: Any) -> dict[str, frozenset[int]]:
    """Return which places to replace: the first tensor, the others, all of them."""
    places = [place for place, leaf in enumerate(optree.tree_leaves(tree)) if is_strided(leaf)]
    ways = {"first": places[:1], "others": places[1:], "all": places if len(places) > 1 else []}
    return {way: frozenset(chosen) for way, chosen in ways.items() if chosen}


def calls_of(op: Any, sample: Any) -> Iterator[tuple[Call, dict[str, frozenset[int]]]]:
    """Return the calls that a sample allows, each with the places to replace: as function, in place."""
    args, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
    function = Call(op.name, "function", op.op, (args, kwargs))
    try:
        function.run(copied(function.tree))
    except Exception:  # the sample is not for this form, or not for this build of torch
        return
    yield function, choices(function.tree)
    if op.inplace_variant is not None:
        yield Call(op.name, "inplace", op.inplace_variant, function.tree), choices(function.tree)


def judge(call: Call, places: frozenset[int]) -> str | None:
    """Run a call with placeholders at some places; return what is wrong with what it does, or None.

    Where the true call raises, nothing is asked.
    """
    tree = copied(call.tree)
    leaves = optree.tree_leaves(tree)
    try:
        expected = call.run(tree)
    except Exception:
        return None
    given = optree.tree_leaves(call.tree)
    owners = {leaves[place].untyped_storage()._cdata for place in places}
    writes = any(not torch.equal(bytes_of(given[place]), bytes_of(leaves[place])) for place in places)
    tree = replaced(call.tree, places)
    leaves = optree.tree_leaves(tree)
    try:
        actual = call.run(tree)
    except remat.PlaceholderError as error:
        only = call.form == "function" and len(places) == 1 and "unsafe" not in call.op  # torch denies that those alias
        must_pass = only and not writes and only_views(expected, owners)
        return "raises, though all that it returns is a view" if must_pass else wrong_with_error(error, call, leaves)
    except Exception as error:
        return f"raises {type(error).__name__}: {str(error)[:200]}"
    if writes:
        return "writes to a placeholder without an error"
    return wrong_with_result(actual, expected, owners) or wrong_with_values(actual, expected, call, places)


def wrong_with_error(error: remat.PlaceholderError, call: Call, left: list) -> str | None:
    """Return what is wrong with an error, and with the real tensors that the failed call leaves behind."""
    if (error.region, error.op, error.tensor) != SOURCE[:3] or not error.consumer or not error.line:
        return f"the error does not say what was consumed: {error}"
    for place, (old, new) in enumerate(zip(optree.tree_leaves(call.tree), left, strict=True)):
        if not is_strided(old) or remat.is_placeholder(new):
            continue
        if metadata(old) != metadata(new) or not torch.equal(bytes_of(old), bytes_of(new)):
            return f"raises only after it changed argument {place}"
    return None


def views(value: Any, owners: set[int]) -> bool:
    """Whether a value is a tensor in one of the storages."""
    strided = isinstance(value, Tensor) and value.layout is torch.strided
    return strided and value.untyped_storage()._cdata in owners


def only_views(expected: Any, owners: set[int]) -> bool:
    """Whether all that the true call returns is in these storages."""
    leaves = optree.tree_leaves(expected)
    return bool(leaves) and all(views(leaf, owners) for leaf in leaves)


def wrong_with_result(actual: Any, expected: Any, owners: set[int]) -> str | None:
    """Return what is wrong with what a call on placeholders returned, its values aside."""
    found, structure = optree.tree_flatten(actual)
    wanted, wanted_structure = optree.tree_flatten(expected)
    if structure != wanted_structure:
        return f"returns {structure} for {wanted_structure}"
    for one, other in zip(found, wanted, strict=True):
        if type(other) is not type(one) and not remat.is_placeholder(one):
            return f"returns {type(one)} for {type(other)}"
        if isinstance(other, Tensor) and metadata(one) != metadata(other):
            return f"returns metadata {metadata(one)} for {metadata(other)}"
        if remat.is_placeholder(one) != views(other, owners):
            return f"returns {'a placeholder for a new tensor' if remat.is_placeholder(one) else 'data for a view'}"
    return None


def wrong_with_values(actual: Any, expected: Any, call: Call, places: frozenset[int]) -> str | None:
    """Return whether the real values of a result differ from the true ones, or from those on other data."""
    found, wanted = optree.tree_leaves(actual), optree.tree_leaves(expected)
    real = [place for place, value in enumerate(found) if not remat.is_placeholder(value)]
    if not real or "empty" in call.op:
        return None
    references = [wanted]
    for other in ("zeros", "reversed"):
        with contextlib.suppress(Exception):  # the op may not take other data
            references.append(optree.tree_leaves(call.run(copied(call.tree, other, places))))
    if len(references) == 1:
        return "returns a value, though the op refuses other data"
    for reference, place in itertools.product(references, real):
        if not same(found[place], reference[place]):
            return f"returns {found[place]} where the data gives {reference[place]}"
    return None


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, NaN to NaN."""
    try:
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        return False
    return True


def sweep(op: Any, dtypes: tuple[torch.dtype, ...], samples: int) -> list[str]:
    """Return what is wrong with one op on placeholders, for some dtypes and samples each."""
    wrong = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about what the true call does
        for dtype in op.supported_dtypes("cpu").intersection(dtypes):
            for number, sample in enumerate(itertools.islice(op.sample_inputs_func(op, "cpu", dtype, False), samples)):
                for call, chosen in calls_of(op, sample):
                    for which, places in chosen.items():
                        what = judge(call, places)
                        if what:
                            wrong.append(f"{call.form}, {dtype}, sample {number}, {which} replaced: {what}")
    return wrong


@pytest.mark.parametrize("part", range(8))
def test_each_op_passes_on_a_view_or_needs_only_metadata_or_raises(part):
    wrong = {op.formatted_name: found for op in OPS[part::8] if (found := sweep(op, DTYPES, samples=3))}
    assert wrong == {}
