"""A region's inputs: what replay starts from.

In: the arguments of the call. Kept, until replay has run: every tensor found anywhere in the arguments, detached, so
that the region never pins the graph before it; parameters and other values as they are. Out: fresh arguments.

Inputs go through the saved-tensor hooks around the region, as anything does that is kept for backward: an
enclosing ``save_on_cpu`` moves them, an enclosing region recomputes them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import ref

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
    optree,
    without_dispatch_modes,
    would_run,
)
from torch_remat.dispatch.holder import is_parameter
from torch_remat.dispatch.keys import key_of, keys_of
from torch_remat.errors import MutationError


class Input:
    """One tensor among the arguments.

    Attributes:
        index: Its place among the leaves of the arguments.
        kept: The tensor, detached, or what the hooks around the region or an offloader made of it.
        requires_grad: Whether it needs a gradient; None for a parameter, which is passed as it is.
        version: Its version at the call; -1 where nobody compares it.
        unpack: What turns `kept` into the tensor, if that is needed.
        layout: Its strides, and whether it is a lazy conjugate or negative, if hooks keep it.
        given: The tensor, if it needs no gradient: replay gets the same object, if it is still there.
        origin: The tensor, or what it is a view of, which may reach the function also by a closure.
        attributes: What Python code has set on it.
        has_history: Whether replay's tensor has a `grad_fn`.
        changed: Whether the region itself modified it.
        same: The index of the earlier argument that it is.
    """

    index: int
    kept: Any = None
    requires_grad: bool | None = None
    version: int = -1
    unpack: Callable[[Any], Tensor] | None = None
    layout: tuple[tuple[int, ...], bool, bool] | None = None
    given: ref[Tensor] | None = None
    origin: ref[Tensor] | None = None
    attributes: dict[str, Any] | None = None
    has_history = False
    changed = False
    same: int | None = None


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
        packed: Whether saved-tensor hooks around the region hold the tensors.
        as_given: Whether replay gets the tensors with the strides that forward got: none was packed or offloaded.
        keeps_histories: Whether replay's tensors have a `grad_fn` where forward's have.
        traced: Whether one of them is of a trace.
    """

    _spec: optree.PyTreeSpec | None = None
    _keys: Collection[int] | None = None  # the storages of the tensors, once something asks
    _asked_in = -1  # the backward that was looked at last
    bases: Collection[int] = frozenset()
    others: Sequence[Any] = ()
    packed = keeps_histories = traced = False
    as_given = True

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any], hooks: SavedTensorHooks | None = None) -> None:
        self._leaves: list[Any] = list(args)
        self.given: Sequence[Any] = args
        self.originals: dict[int, int | None] = {}
        if kwargs or not _USUAL.issuperset(map(type, args)):
            self._leaves, self._spec = _flatten((tuple(args), dict(kwargs)))
            self.given = self._leaves.copy()
            self.others = [leaf for leaf in self._leaves if not isinstance(leaf, Tensor)]
        self._inputs: list[Input] = []
        for index, leaf in enumerate(self.given):
            if isinstance(leaf, Tensor):
                self._leaves[index] = None
                self._inputs.append(self._keep(index, leaf, hooks))

    def _keep(self, index: int, leaf: Tensor, hooks: SavedTensorHooks | None) -> Input:
        one = Input()
        one.index = index
        if not (is_inference := leaf.is_inference()):  # no hooks are asked for what autograd cannot save
            one.version = leaf._version
        if type(leaf) is not Tensor:
            if type(leaf) in OF_TRACES:
                self.traced = True
            if is_parameter(leaf):
                one.kept = leaf
                return one
        one.requires_grad = requires_grad = leaf.requires_grad
        if (first := self.originals.get(id(leaf))) is None:
            self.originals[id(leaf)] = index
            if (base := leaf._base) is not None:
                self.originals.setdefault(id(base), None)
                self.bases = {*self.bases, id(base)}
                one.origin = ref(base)
            elif requires_grad:
                one.origin = ref(leaf)
            if leaf.__dict__:  # but not what a subclass keeps of itself in the same place
                own = () if type(leaf) is Tensor else leaf.detach().__dict__
                one.attributes = {name: value for name, value in leaf.__dict__.items() if name not in own}
            if hooks is None or is_inference:
                one.kept = leaf.detach()
                if not requires_grad and type(leaf) is Tensor and leaf.layout is torch.strided:
                    one.given = ref(leaf)
                return one
        else:
            one.same, one.version = first, -1
        if hooks is not None and not is_inference:
            pack, one.unpack = hooks
            self.packed, self.as_given = True, False
            if type(leaf) is Tensor and leaf.layout is torch.strided:
                one.layout = leaf.stride(), leaf.is_conj(), leaf.is_neg()
            with torch.no_grad():
                packed = pack(leaf)  # also for an argument that comes twice: the hooks may be counting
            one.kept = packed if first is None else None
        return one

    def kept(self) -> Iterator[tuple[str, Any]]:
        """Yield each tensor's place in the call, and the tensor, or what stands in for it."""
        return ((self._place(one.index), one.kept) for one in self._inputs if one.same is None)

    def held(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that are held as they are, without parameters."""
        for one in self._inputs:
            if one.requires_grad is not None and isinstance(one.kept, Tensor):
                yield one.kept

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the parameters among the arguments, and those that arguments are views of, if they are still there."""
        for one in self._inputs:
            owner: Any = one.kept if one.requires_grad is None else one.origin and one.origin()
            if owner is not None and is_parameter(owner):
                yield owner

    def modules(self) -> Sequence[Module]:
        """Return the modules among the arguments."""
        return [other for other in self.others if isinstance(other, Module)]

    def was_given(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is an argument of forward, or what one is a view of: replay met it in a closure."""
        return any(one.origin is not None and one.origin() is tensor for one in self._inputs)

    # While forward runs.

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is an argument, or one that an argument is a view of."""
        return id(tensor) in self.originals

    def lies_with(self, key: int) -> bool:
        """Whether a storage is that of an argument."""
        if self._keys is None:
            self._keys = {key for leaf in self.given if isinstance(leaf, Tensor) for key in keys_of(leaf)}
        return key in self._keys

    def shares(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is an argument or its base, or, under hooks, whether its storage is that of an argument.

        The replay of a region or checkpoint around may have two tensors in place of one, as argument and as variable.
        """
        return id(tensor) in self.originals or (self.packed and self.lies_with(key_of(tensor)))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory stays with the inputs."""
        return self.as_given and id(tensor) in self.originals

    def is_made_as(self, tensor: torch.Tensor, node: Any) -> bool:
        """Whether an argument has this history: what autograd unpacks of one that was saved is another object."""
        return any(
            isinstance(leaf, Tensor) and leaf.grad_fn is node and leaf.output_nr == tensor.output_nr
            for leaf in self.given
        )

    def is_left_by_gradient(self, variables: Callable[[], Iterable[Any]]) -> bool:
        """Whether the gradient that is taken now leaves the region and comes back.

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
        if not self.keeps_histories:
            self.keeps_histories = True
            for one in self._inputs:
                one.has_history = node_behind(self.given[one.index]) is not None

    def give_away(self, send: Callable[..., Any]) -> None:
        """Let those tensors leave the device for which a `Sender`'s ``send`` returns what stands in for them."""
        together = object()
        for one in self._inputs:
            if one.requires_grad is None or one.version < 0:
                continue
            away = send(self.given[one.index], None, self._place(one.index), "input", together)
            if away is not None:
                one.kept, one.unpack, one.version = away, type(away).load, -1  # it checks its version itself
                self.as_given = False

    def end_forward(self) -> None:
        """Note what the region itself has modified, and release what only forward needs."""
        for one in self._inputs:
            if one.version > -1 and self.given[one.index]._version != one.version:
                one.changed = True
        self.originals.clear()
        self.given = ()

    # Replay.

    def restore(self, region: str) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return ``(args, kwargs)`` for one replay, with tensors that no earlier replay has touched.

        Args:
            region: The name of the region, for errors.

        Raises:
            MutationError: A tensor was modified in place since the region was called.
        """
        leaves = self._leaves.copy()
        for one in self._inputs:
            leaves[one.index] = leaves[one.same] if one.same is not None else self._restored(one, region)
        if self._spec is None:
            return leaves, {}
        arguments: Any = optree.tree_unflatten(self._spec, leaves)
        args, kwargs = arguments
        return args, kwargs

    def _restored(self, one: Input, region: str) -> Tensor:
        kept: Tensor = one.kept
        if one.unpack is not None:
            if one.changed:
                raise self._modified(one, region)
            with torch.no_grad():
                kept = one.unpack(kept)
            if one.layout is not None and type(kept) is Tensor and kept.layout is torch.strided:
                kept = _laid_as(kept, *one.layout)
        elif one.version >= 0 and kept._version != one.version:
            raise self._modified(one, region)
        if one.requires_grad is None:
            return kept
        same = None if one.given is None else one.given()
        if same is not None and not same.requires_grad and _place(same) == _place(kept):
            return same  # backward of a custom Function may look at what it is
        alias = fresh_alias(kept, one.requires_grad, one.has_history)
        if one.attributes:
            alias.__dict__.update(one.attributes)
        return alias

    def _modified(self, one: Input, region: str) -> MutationError:
        what = "this input was modified in place after the region was called, so replay cannot start from it"
        remedy = "Modify a clone of it, or modify it after backward."
        if one.changed:
            what = (
                "the region itself modified this input in place, and replay would modify it again, so replay cannot "
                "start from it"
            )
            remedy = "Use the out-of-place form there, or modify a clone."
        return MutationError(what, region=region, tensor=self._place(one.index), remedy=remedy)

    def _place(self, index: int) -> str:
        """Return the place of a leaf in the call: ``args[0]``, ``kwargs['mask'][1]``."""
        if self._spec is None:
            return f"args[{index}]"
        root, *path = optree.treespec_accessors(self._spec)[index]
        return optree.PyTreeAccessor(path).codify(("args", "kwargs")[root.entry])


_USUAL = frozenset((Tensor, Parameter))
_LEAVES = frozenset((*_USUAL, int, float, bool, str))


def _laid_as(tensor: Tensor, stride: Sequence[int], is_conjugate: bool, is_negative: bool) -> Tensor:
    """Return a tensor as forward had it, which hooks need not give back: kernels go by strides, a log by laziness."""
    now = tensor.stride()
    if now == stride and (tensor.is_conj(), tensor.is_neg()) == (is_conjugate, is_negative):
        return tensor
    with torch.no_grad(), without_dispatch_modes():
        if all(size < 2 or one == other for size, one, other in zip(tensor.shape, now, stride, strict=True)):
            laid = tensor if now == stride else tensor.as_strided(tensor.shape, stride)
        else:
            laid = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
            each = tuple([slice(0, 1) if step == 0 else slice(None) for step in stride])  # where elements share memory
            laid[each].copy_(tensor[each])
        if (laid.is_conj(), laid.is_neg()) == (is_conjugate, is_negative):
            return laid
        data = laid.resolve_conj().resolve_neg()
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


class _Alias(torch.autograd.Function):
    """Returns a tensor in the memory of another, with a `grad_fn`, so that it may be modified in place."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def fresh_alias(tensor: torch.Tensor, requires_grad: bool, has_history: bool) -> torch.Tensor:
    """Return an argument for one replay: a leaf, unless it must not be one, as where the function writes it."""
    alias = tensor.detach()
    if requires_grad:
        alias.requires_grad_()
        if has_history:
            with torch.enable_grad():
                alias = _Alias.apply(alias)
    return alias


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
        if type(leaf) not in _LEAVES and not isinstance(leaf, torch.Tensor) and adopt_pytree_node(type(leaf)):
            return _flatten(tree)
    return leaves, spec
