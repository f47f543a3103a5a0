"""A region's inputs: what replay starts from.

In: the arguments of the call. Kept, until replay has run: every tensor found anywhere in the arguments, detached, so
that the region never pins the graph before it; parameters and other values as they are. Out: fresh arguments.

Inputs go through the saved-tensor hooks around the region, as anything does that is kept for backward: an
enclosing ``save_on_cpu`` moves them, an enclosing region recomputes them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from weakref import ref

import optree
import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import Module, Parameter

from torch_remat._compat import (
    OF_TRACES,
    PYTREE_NAMESPACE,
    SavedTensorHooks,
    adopt_pytree_node,
    graph_task,
    negative_view,
    node_behind,
    without_dispatch_modes,
    would_run,
)
from torch_remat.dispatch.holder import RegionLike, is_parameter, metadata_of
from torch_remat.dispatch.log.meta import key_of, keys_of
from torch_remat.errors import MutationError


class RegionInputs:
    """The arguments of one region's call, as replay needs them.

    Args:
        args: The positional arguments of the region's function.
        kwargs: Its keyword arguments.
        hooks: The saved-tensor hooks around the region, if any.

    Attributes:
        originals: The id of each tensor argument, with its first leaf, and of each tensor that one is a view of;
            filled only while forward runs.
        bases: The ids of the latter.
        others: The leaves that are no tensors.
        given: The leaves as they came, while forward runs, which may take them out of containers: ids are used again.
    """

    _spec: optree.PyTreeSpec | None = None
    _unpack: Callable[[Any], torch.Tensor] | None = None
    _strides: Mapping[int, tuple[int, ...]] = MappingProxyType({})  # by leaf: of those that hooks hold
    _lazy: Mapping[int, tuple[bool, bool]] = MappingProxyType({})  # by leaf: lazy conjugates and negatives of these
    _restored: Sequence[ref[torch.Tensor]] = ()  # what the latest replay was given, if hooks or an offloader had it
    _away: dict[int, Any] | None = None  # by index of the leaf; set only if inputs are offloaded
    _owners: tuple[ref[torch.Tensor], ...] = ()  # the parameters that arguments are views of
    _given: Mapping[int, ref[torch.Tensor]] = MappingProxyType({})  # those that need no gradient, by leaf
    _attributes: dict[int, dict[str, Any]] | None = None  # by leaf: what Python code set on it
    _storages: Collection[int] = frozenset()  # of the tensors that hooks hold
    _inside: Collection[int] = ()  # the leaves that the region itself has changed, and replay would change again
    _written: Collection[int] = ()  # the leaves that it has changed where replay leaves that out
    _made: Collection[int] | None = None  # the leaves with a `grad_fn`, if something looks at that
    traced = False  # whether one of them is of a trace
    given: Sequence[Any] = ()
    others: Sequence[Any] = ()
    bases: Collection[int] = frozenset()
    _asked_in = -1  # the backward that was looked at last

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any], hooks: SavedTensorHooks | None = None) -> None:
        self._leaves: list[Any] = list(args)
        self.given = args
        # (index of the leaf, requires_grad, version); None for requires_grad marks a parameter, passed on as it is.
        self._tensors: list[tuple[int, bool | None, int]] = []
        self.originals: dict[int, int | None] = {}
        if kwargs or not _USUAL.issuperset(map(type, args)):
            self._leaves, self._spec = _flatten((tuple(args), dict(kwargs)))
            self.given = self._leaves.copy()
            self.others = [leaf for leaf in self._leaves if not isinstance(leaf, Tensor)]
        leaves, originals = self._leaves, self.originals
        for index, leaf in enumerate(leaves):
            if type(leaf) is not Tensor:
                if not isinstance(leaf, Tensor):
                    continue
                if type(leaf) in OF_TRACES:
                    self.traced = True
                if is_parameter(leaf):
                    self._tensors.append((index, None, leaf._version))
                    continue
            is_inference = leaf.is_inference()
            first = originals.get(id(leaf))
            if first is None:
                first = originals[id(leaf)] = index
                if (base := leaf._base) is not None:
                    originals.setdefault(id(base), None)
                    self.bases = {*self.bases, id(base)}
                    if is_parameter(base):
                        self._owners += (ref(base),)
                version = (_UNPACKED if hooks else -1) if is_inference else leaf._version
                self._tensors.append((index, leaf.requires_grad, version))
                if leaf.__dict__:
                    self._keep_attributes(index, leaf)
            if hooks is None or is_inference:  # no hooks are asked for what autograd cannot save
                leaves[index] = leaf.detach()
                if type(leaf) is Tensor and not leaf.requires_grad and leaf.layout is torch.strided:
                    self._given = {**self._given, index: ref(leaf)}
            else:
                # Once for each argument, also for one that comes twice: the hooks may be counting.
                pack, self._unpack = hooks
                self._storages = {*self._storages, key_of(leaf)}
                if type(leaf) is Tensor and leaf.layout is torch.strided:
                    self._strides = {**self._strides, index: leaf.stride()}
                    if leaf.is_conj() or leaf.is_neg():
                        self._lazy = {**self._lazy, index: (leaf.is_conj(), leaf.is_neg())}
                with torch.no_grad():
                    leaves[index] = pack(leaf)
            if first != index:
                leaves[index] = _SameAs(first)

    def _keep_attributes(self, index: int, tensor: torch.Tensor) -> None:
        """Note what Python code has set on a tensor, but not what a subclass keeps of itself in the same place."""
        attributes = tensor.__dict__.copy()
        if type(tensor) is not Tensor:
            for own in tensor.detach().__dict__:
                attributes.pop(own, None)
        if attributes:
            self._attributes = {**(self._attributes or {}), index: attributes}

    @property
    def packed(self) -> bool:
        """Whether saved-tensor hooks around the region hold the tensors."""
        return self._unpack is not None

    @property
    def as_given(self) -> bool:
        """Whether replay gets the tensors with the strides that forward got: none was packed or offloaded."""
        return self._unpack is None and not self._away

    def kept(self) -> Iterator[tuple[str, Any]]:
        """Yield each tensor's place in the call, and the tensor, or what stands in for it."""
        away = self._away or {}
        for index, _, _ in self._tensors:
            leaf = away.get(index, self._leaves[index])
            if type(leaf) is not _SameAs:
                yield self._place(index), leaf

    def held(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that are held as they are, without parameters."""
        for index, requires_grad, _ in self._tensors:
            if requires_grad is not None and isinstance(leaf := self._leaves[index], Tensor):
                yield leaf

    def offloaded(self) -> Collection[int]:
        """Return the indices, among the leaves of the arguments, of the tensors that are offloaded."""
        return () if self._away is None else self._away.keys()

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is an argument, or one that an argument is a view of; asked only while forward runs."""
        return id(tensor) in self.originals

    def lies_with(self, key: int) -> bool:
        """Whether a storage is that of an argument; asked only while forward runs."""
        return any(isinstance(leaf, Tensor) and key in keys_of(leaf) for leaf in self.given)

    def is_packed(self, key: int) -> bool:
        """Whether a storage is that of an argument which saved-tensor hooks around the region hold."""
        return key in self._storages

    def is_made_as(self, tensor: torch.Tensor, node: Any) -> bool:
        """Whether an argument has this history: what autograd unpacks of one that was saved is another object."""
        return any(
            isinstance(leaf, Tensor) and leaf.grad_fn is node and leaf.output_nr == tensor.output_nr
            for leaf in self.given
        )

    def shares(self, tensor: torch.Tensor) -> bool:
        """Whether that is so, or, under hooks, whether its storage is that of an argument.

        The replay of a region or checkpoint around may have two tensors in place of one, as argument and as variable.
        """
        return id(tensor) in self.originals or (bool(self._storages) and key_of(tensor) in self._storages)

    def is_left_by_gradient(self, variables: Callable[[], Iterable[Any]]) -> bool:
        """Whether the gradient that is taken now leaves the region and comes back; asked while forward runs.

        Replay has arguments without what comes before them: such a gradient would have fewer terms there.

        Args:
            variables: Returns the variables that the region's function reaches besides.
        """
        if self._asked_in == (task := graph_task()):
            return False
        self._asked_in = task
        with without_dispatch_modes():
            arguments, others = _nodes_of(self.given), _nodes_of(variables())
        return _leads_on(arguments, None) or _leads_on(others - arguments, arguments)

    def note_histories(self) -> None:
        """Let replay find no other leaves: an inner region begins, which keeps none, or autocast, which keeps casts."""
        if self._made is None:
            tensors = [(index, leaf) for index, leaf in enumerate(self.given) if isinstance(leaf, Tensor)]
            self._made = {index for index, leaf in tensors if node_behind(leaf) is not None}

    @property
    def keeps_histories(self) -> bool:
        """Whether that was noted."""
        return self._made is not None

    def end_forward(self) -> None:
        """Note what the region itself has modified, and release what only forward needs.

        What recomputes an input under hooks may have run the region too, as torch's checkpoint does up to the last
        tensor that it needs: whether the input is changed then, nobody says.
        """
        for index, _, version in self._tensors:
            if version > -1 and self.given[index]._version != version:
                self._inside = {*self._inside, index}
        self.originals.clear()
        self.given = ()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory stays with the inputs; asked only while forward runs."""
        return self._away is None and id(tensor) in self.originals

    def give_away(self, send: Callable[..., Any]) -> None:
        """Let those tensors leave the device for which a `Sender`'s ``send`` returns what stands in for them."""
        self._away, together = {}, object()
        for entry, (index, requires_grad, version) in enumerate(self._tensors):
            if requires_grad is None or version < 0:
                continue
            if (away := send(self.given[index], None, self._place(index), "input", together)) is not None:
                self._away[index] = away
                self._leaves[index] = None
                self._tensors[entry] = (index, requires_grad, -1)  # it checks its version itself

    def accept_changes(self, is_left_out: Callable[[torch.Tensor, int], bool]) -> None:
        """At the end of forward: let tensors be as the region has left them, if replay does not change them again.

        Args:
            is_left_out: Takes a tensor, and how many times it was changed; whether replay skips all of these changes.
        """
        if self._unpack is not None:
            return  # replay gets them from elsewhere
        for entry, (index, requires_grad, version) in enumerate(self._tensors):
            kept = self._leaves[index]
            times = kept._version - version if version >= 0 and isinstance(kept, Tensor) else 0
            if times and is_left_out(kept, times):
                self._tensors[entry] = (index, requires_grad, kept._version)
                self._written = {*self._written, index}

    def parameters(self) -> Iterator[Any]:
        """Yield the parameters among the arguments."""
        for index, requires_grad, _ in self._tensors:
            if requires_grad is None:
                yield self._leaves[index]

    def viewed_parameters(self) -> Iterator[torch.Tensor]:
        """Yield the parameters that arguments are views of, if they are still there."""
        for owner in self._owners:
            if (parameter := owner()) is not None:
                yield parameter

    def modules(self) -> Sequence[Module]:
        """Return the modules among the arguments."""
        return [other for other in self.others if isinstance(other, Module)]

    def restore(self, region: RegionLike) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return ``(args, kwargs)`` for one replay, with tensors that no earlier replay has touched.

        Args:
            region: The region, for errors.

        Raises:
            MutationError: A tensor was modified in place since the region was called.
        """
        leaves = self._leaves.copy()
        restored = []
        if self._away is not None:
            for index, away in self._away.items():
                leaves[index] = away.load()
        for index, requires_grad, version in self._tensors:
            kept = leaves[index]
            if requires_grad is None:
                if kept._version != version:
                    raise self._changed(region.name, index)
                continue
            if self._unpack is not None and version != _UNPACKED:
                with torch.no_grad():
                    kept = self._unpack(kept)
                if index in self._inside and kept._version != version:
                    raise self._changed(region.name, index)
                if index in self._strides and type(kept) is Tensor and kept.layout is torch.strided:
                    kept = _with_strides(kept, self._strides[index])
                    if index in self._lazy:
                        kept = _as_lazy_as(kept, *self._lazy[index])
            elif version >= 0 and kept._version != version:
                raise self._changed(region.name, index)
            same = self._given[index]() if index in self._given else None
            if same is not None and not same.requires_grad and _place(same) == _place(kept):
                leaves[index] = same  # backward of a custom Function may look at what it is
                continue
            is_written = index in self._written or index in self._inside  # a leaf cannot be modified in place
            if requires_grad and (is_written or (self._made is not None and index in self._made)):
                leaves[index] = with_history(kept)
            else:
                leaves[index] = alias = kept.detach()
                if requires_grad:
                    alias.requires_grad_()
            if self._unpack is not None or self._away:
                restored.append(ref(leaves[index]))
        self._restored = restored
        if self._attributes is not None:
            for index, attributes in self._attributes.items():
                if index not in self._given or leaves[index] is not self._given[index]():
                    leaves[index].__dict__.update(attributes)
        if len(self._tensors) != len(leaves):
            for index, leaf in enumerate(leaves):
                if type(leaf) is _SameAs:
                    leaves[index] = leaves[leaf.index]
        if self._spec is None:
            return leaves, {}
        arguments: Any = optree.tree_unflatten(self._spec, leaves)
        args, kwargs = arguments
        return args, kwargs

    def has_values_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is an argument that came past the call, as in a closure: asked while replay runs."""
        here = [kept for _, kept in self.kept()] if self.as_given else [given() for given in self._restored]
        with without_dispatch_modes():
            return any(
                type(kept) is Tensor
                and (
                    (self.bases and tensor._base is None and key_of(kept) == key_of(tensor))  # it is a view of this
                    or (
                        metadata_of(kept)[1:] == metadata_of(tensor)[1:]
                        and (kept.is_set_to(tensor) or (not self.as_given and torch.equal(kept, tensor)))
                    )
                )
                for kept in here
            )

    def _changed(self, region_name: str, index: int) -> MutationError:
        if index in self._inside:
            return MutationError(
                "the region itself modified this input in place, and replay would modify it again, so replay cannot "
                "start from it",
                region=region_name,
                tensor=self._place(index),
                remedy="Use the out-of-place form there, modify a clone, or modify it only inside native regions.",
            )
        return MutationError(
            "this input was modified in place after the region was called, so replay cannot start from it",
            region=region_name,
            tensor=self._place(index),
            remedy="Modify a clone of it, or modify it after backward.",
        )

    def _place(self, index: int) -> str:
        """Return the place of a leaf in the call: ``args[0]``, ``kwargs['mask'][1]``."""
        if self._spec is None:
            return f"args[{index}]"
        root, *path = optree.treespec_accessors(self._spec)[index]
        return optree.PyTreeAccessor(path).codify(("args", "kwargs")[root.entry])


_USUAL = frozenset((Tensor, Parameter))
_UNPACKED = -2  # the version of an input that did not go through the hooks around the region


def _with_strides(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """Return a tensor with the strides of forward, which hooks need not give back: kernels go by them."""
    now = tensor.stride()
    if now == stride:
        return tensor
    with torch.no_grad(), without_dispatch_modes():
        if all(size < 2 or one == other for size, one, other in zip(tensor.shape, now, stride, strict=True)):
            return tensor.as_strided(tensor.shape, stride)
        made = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
        each = tuple([slice(0, 1) if step == 0 else slice(None) for step in stride])  # where elements share memory
        made[each].copy_(tensor[each])
    return made


def _as_lazy_as(tensor: Tensor, is_conjugate: bool, is_negative: bool) -> Tensor:
    """Return a tensor as a lazy conjugate or negative, which hooks need not give back: a log shows what resolves it."""
    if (tensor.is_conj(), tensor.is_neg()) == (is_conjugate, is_negative):
        return tensor
    with torch.no_grad(), without_dispatch_modes():
        data = tensor.resolve_conj().resolve_neg()
        data = data.conj_physical() if is_conjugate else data
        data = data.neg() if is_negative else data
        view = data.conj() if is_conjugate else data
        return negative_view(view) if is_negative else view


def _nodes_of(values: Iterable[Any]) -> set[Node]:
    return {get_gradient_edge(leaf).node for leaf in values if isinstance(leaf, Tensor) and leaf.requires_grad}


def _leads_on(nodes: Collection[Node], ends: Collection[Node] | None) -> bool:
    """Whether the present backward goes on from nodes to certain others, by default to any.

    Not so where it is ``backward()``, which comes to leaves: replay must not add to their gradients once more.
    """
    todo = [node for node in nodes if _runs(node)]
    seen, leads = set(todo), False
    for node in todo:  # grows meanwhile
        if not node.next_functions:
            return False
        for child, _ in node.next_functions:
            if child is not None and (runs := _runs(child)) is not False:
                leads = leads or ends is None or child in ends
                if runs and child not in seen:
                    seen.add(child)
                    todo.append(child)
    return leads


def _runs(node: Node) -> bool | None:
    """Whether a node runs in the present backward; None for that of a leaf for which the gradient is taken."""
    try:
        return would_run(node)
    except RuntimeError:
        return None


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


class _SameAs:
    """Stands for an argument that is the same tensor as an earlier one."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Alias(torch.autograd.Function):
    """Returns a tensor in the memory of another, with a `grad_fn`, so that it may be modified in place."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def with_history(tensor: torch.Tensor) -> torch.Tensor:
    """Return an argument for one replay that is no leaf, as where the function writes it."""
    with torch.enable_grad():
        made: torch.Tensor = _Alias.apply(tensor.detach().requires_grad_())
    return made


def fresh_alias(tensor: torch.Tensor, requires_grad: bool, has_history: bool) -> torch.Tensor:
    """Return an argument for one replay: a leaf, unless it must not be one."""
    return with_history(tensor) if requires_grad and has_history else tensor.detach().requires_grad_(requires_grad)


def leaves_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the leaves of a call's arguments."""
    if not kwargs and _USUAL.issuperset(map(type, args)):
        return list(args)
    return _flatten((tuple(args), dict(kwargs)))[0]


def with_leaves(
    args: Sequence[Any], kwargs: Mapping[str, Any], leaves: list[Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return a call's arguments with other leaves."""
    rebuilt: Any = optree.tree_unflatten(_flatten((tuple(args), dict(kwargs)))[1], leaves)
    new_args, new_kwargs = rebuilt
    return new_args, new_kwargs


def _flatten(tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    leaves, spec = optree.tree_flatten(tree, namespace=PYTREE_NAMESPACE)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) and adopt_pytree_node(type(leaf)):
            return _flatten(tree)
    return leaves, spec
