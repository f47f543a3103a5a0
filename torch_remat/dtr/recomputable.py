"""Tensors that keep a recipe and no data.

In: a function and its arguments. Kept: those, the autocast of the call, and the random state if the function draws.
Out: tensors that are computed when an op reads them, and forgotten after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import optree
import torch

from torch_remat._checkpoint import checkpoint
from torch_remat.dispatch.ambient import RngState, capture_ambient
from torch_remat.dispatch.ops.schema import argument
from torch_remat.dtr._ops import Const, kind_of
from torch_remat.dtr._tensor import EvictableTensor, make_tensor
from torch_remat.dtr.budget import active_runtime
from torch_remat.errors import RematError


class Recipe:
    """How the results of one call are computed again."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        self.function = function
        self.args = tuple(args)
        tree: Any = self.args
        leaves: list[Any] = optree.tree_leaves(tree)
        self._tensors = [Const(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._ambient = capture_ambient()
        self._random: RngState | None = RngState([leaf for leaf in leaves if isinstance(leaf, torch.Generator)])

    def has_run(self) -> None:
        """Forget the random state if the function, which has just run, has drawn nothing: it is 5 KB on a CPU."""
        if self._random is not None and not self._random.keep_drawn():
            self._random = None

    def results(self) -> list[Any]:
        """Run the function again; random state stands as it stood.

        Raises:
            MutationError: An argument was changed since the call.
        """
        name = getattr(self.function, "__name__", str(self.function))
        for const in self._tensors:
            const.value(name, "Pass a copy of it, or read the recomputable tensor (.clone()) before the change.")
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for context in self._ambient.contexts():
                stack.enter_context(context)
            if self._random is not None:
                stack.enter_context(self._random.replayed())
            result: Any = self.function(*self.args)
        return optree.tree_leaves(result)


class RecomputableTensor(EvictableTensor):
    """A tensor that is computed by whatever op reads it; see `recomputable`."""

    _recipe: Recipe
    _index: int

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an op on the computed data, and forget them."""
        if func is torch.ops.aten.detach.default:
            return _make(args[0], args[0]._recipe, args[0]._index)
        given: Any = (tuple(args), dict(kwargs or {}))
        kind = kind_of(func)
        if any(type(argument(where, args, kwargs or {})) is cls for where in kind.written):
            raise RematError(
                f"{kind.name} would write to a recomputable tensor, which has no data to change",
                remedy="Write to a .clone() of it.",
            )
        computed: dict[Recipe, list[Any]] = {}

        def value(leaf: Any) -> Any:
            if type(leaf) is not cls:
                return leaf
            if leaf._recipe not in computed:
                computed[leaf._recipe] = leaf._recipe.results()
            return computed[leaf._recipe][leaf._index]

        values: Any = optree.tree_map(value, given)
        with torch.no_grad():
            return func(*values[0], **values[1])

    def _read(self, reader: str, *, share: bool) -> torch.Tensor:
        data: torch.Tensor = self._recipe.results()[self._index]
        return data.detach()


def recomputable(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns, as tensors that keep the recipe and no data.

    The function runs once, to learn what the tensors look like; random state stands as after a call. An op that reads
    one of the tensors computes it and, outside of a budget, forgets it again. Gradients flow as if the function had
    been called.

    Args:
        function: Returns tensors, alone or in containers. It must depend on its arguments only. It may draw from the
            default generators and from generators among its arguments.
        args: Its arguments, which live as long as the results do. One that was modified in place since is an error
            when a result is read.

    Returns:
        The same form, with `RecomputableTensor`s, or in the block of a budget with evicted `EvictableTensor`s.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> x = torch.ones(3, requires_grad=True)
        >>> y = remat.dtr.recomputable(torch.exp, x)
        >>> y.sum().backward()
        >>> torch.equal(x.grad, torch.exp(x))
        True
    """
    runtime = active_runtime()
    if runtime is not None:
        result = function(*args)
        runtime._block.evict_all(leaf for leaf in optree.tree_leaves(result) if type(leaf) is EvictableTensor)
        return result
    recipe = Recipe(function, args)
    called: Callable[..., Any] = function
    if torch.is_grad_enabled():
        called = checkpoint(region_name=getattr(function, "__name__", None))(function)
    flat, form = optree.tree_flatten(called(*args))
    recipe.has_run()
    for index, leaf in enumerate(flat):
        if isinstance(leaf, torch.Tensor):
            graph = leaf.requires_grad and torch.is_grad_enabled()
            flat[index] = (_Emptied.apply if graph else _make)(leaf, recipe, index)
    return optree.tree_unflatten(form, flat)


def _make(like: torch.Tensor, recipe: Recipe, index: int) -> RecomputableTensor:
    made = make_tensor(like, RecomputableTensor)
    made._recipe = recipe
    made._index = index
    return made


class _Emptied(torch.autograd.Function):
    """Stands between the function's graph and a tensor without its data."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, recipe: Recipe, index: int) -> torch.Tensor:
        return _make(tensor, recipe, index)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None, None
