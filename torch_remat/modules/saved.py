"""`save_modules`: what a region keeps, chosen by module.

In: patterns on paths below the region's module, or classes. Kept: by policy the modules found, with their paths; on
each of these a ``forward`` of its own, which is plain code where no region with such a policy runs. Out: in a region a
call of such a module is one as of `remat.op`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch.compiler import is_compiling
from torch.nn import Module

from torch_remat._compat import WRAPPED_BY_COMPILE
from torch_remat._compiled import compiled_part
from torch_remat.dispatch.mode import current_mode
from torch_remat.errors import PolicyError, shown
from torch_remat.modules.patterns import (
    ForwardOfModule,
    OfModule,
    Pattern,
    callable_modules,
    is_pattern,
    matches,
    near,
    told,
)
from torch_remat.policies.decision import CheckpointPolicy
from torch_remat.policies.given import as_policy
from torch_remat.policies.policy import OpPolicy

_FORM = 'The form is save_modules("*.self_attn", "mlp.down_proj", torch.nn.Linear), with one pattern or class, or more.'

_IN_OTHERS = (
    " If it matches in other layers only, make all of them regions by one remat.checkpoint_modules(model, patterns, "
    "policy=...), where it need match in one of them."
)


def save_modules(*patterns: Pattern) -> OpPolicy:
    """Return a policy that saves what calls of certain modules save and return.

    In a region with this policy a call of such a module is one as of `remat.op`, with the module's path as its name:
    replay skips it. Outside of such regions the module runs as it is, and other modules never notice. The modules'
    ``forward`` becomes an attribute of theirs, which copies of the model have, too.

    Args:
        *patterns: Shell patterns (``*``, ``?``, ``[...]``) that are compared with the whole path of a module below that
            of the region, case included; ``*`` also stands for dots, and a first ``*.`` for nothing too. Or classes:
            all their instances match.

    Returns:
        A policy for ``checkpoint(policy=...)`` and `checkpoint_modules`; ``|`` combines it with others.

    Raises:
        PolicyError: There is no pattern, or one is neither a string nor a class of modules. From `checkpoint` or
            `checkpoint_modules`: one matches no module. From the region: its function is no module's and reaches none.
        UsageError: From the region, if a call of such a module has effects other than its result; see `op`.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
        >>> x = torch.randn(4, 8, requires_grad=True)
        >>> y = remat.checkpoint(policy=remat.save_modules("0"))(block)(x)
        >>> [op.name for op in remat.memory_report(y).regions[0].ops]
        ['0']
    """
    for pattern in patterns:
        if not is_pattern(pattern):
            raise PolicyError(f"save_modules() cannot use the pattern {shown(pattern)}", remedy=_FORM)
    if not patterns:
        raise PolicyError("save_modules() got no pattern", remedy=_FORM)
    return ModulesPolicy(patterns)


class ModulesPolicy(OpPolicy):
    """Saves what calls of certain modules save and return.

    Attributes:
        names: The paths of the modules found so far.
    """

    def __init__(self, patterns: Sequence[Pattern]) -> None:
        self._patterns = tuple(patterns)
        self._roots: WeakSet[Module] = WeakSet()
        self._matched: set[Pattern] = set()
        self.names: WeakKeyDictionary[Module, str] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"save_modules({', '.join(map(told, self._patterns))})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ModulesPolicy, (self._patterns,)

    def modules(self) -> Sequence[ModulesPolicy]:
        """Return it, since it chooses modules."""
        return (self,)

    def name_of(self, module: Module) -> str | None:
        """Return the path of a module that it chooses; None for another."""
        return self.names.get(module)

    def look_for(self, roots: Iterable[Module]) -> None:
        """Note which patterns match something below some modules; they need not below others, such as dense layers."""
        named = [one for root in roots for one in callable_modules(root)]
        for pattern in self._patterns:
            if any(_chosen(name, module, pattern) for name, module in named):
                self._matched.add(pattern)

    def take(self, roots: Mapping[str, Module], advice: str = "") -> None:
        """Find the modules below those of some regions, by the regions' names.

        Args:
            roots: The modules of the regions.
            advice: What else the error says about what to do.

        Raises:
            PolicyError: A pattern matches none of them, nor any before.
        """
        self.look_for(roots.values())
        for pattern in self._patterns:
            if pattern not in self._matched:
                named = [one for root in roots.values() for one in callable_modules(root)]
                kinds = " and ".join(dict.fromkeys(type(root).__name__ for root in roots.values()))
                raise PolicyError(
                    f"{self!r}: the pattern {told(pattern)} matches no module with a forward in {kinds}",
                    remedy=near(pattern, named) + advice,
                )
        for root in roots.values():
            self._roots.add(root)
            compiled = _compiled_in(root)
            for name, module in callable_modules(root):
                if any(_chosen(name, module, pattern) for pattern in self._patterns):
                    called = compiled.get(module, module)
                    self.names[called] = name
                    _keep_calls_of(called)

    def enter(self, function: Callable[..., Any], args: Sequence[Any] = ()) -> None:
        """Find the modules of a region that begins, unless its module is known."""
        roots = {str(at): root for at, root in enumerate(_modules_of(function, args))}
        if new := {name: root for name, root in roots.items() if root not in self._roots}:
            self.take(new, _IN_OTHERS)
        elif not roots:
            raise PolicyError(
                f"{self!r} is the policy of a region whose function is no module's and reaches none",
                remedy="Checkpoint a module, or its forward; or keep a call by remat.op(module, 'name')(x).",
            )

    def forget(self, roots: Sequence[Module]) -> None:
        """Make the modules below those of some regions what they were."""
        for root in roots:
            self._roots.discard(root)
            for module in root.modules():
                if self.names.pop(module, None) is not None and isinstance(kept := module.forward, KeptForward):
                    kept.remove()


class KeptForward(ForwardOfModule):
    """The ``forward`` of a module that regions may keep."""

    __slots__ = ()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, as a call that is kept if the region's policy says so."""
        forward = self.__wrapped__
        if is_compiling():
            return compiled_part(CheckpointPolicy.SAVE, forward, args, kwargs)
        mode = current_mode()
        chosen = () if mode is None else mode.region.options.modules
        for policy in chosen:
            if mode is not None and (name := policy.name_of(self.module)) is not None:
                return mode.run_named(name, CheckpointPolicy.SAVE, forward, args, kwargs)
        return forward(*args, **kwargs)


def _compiled_in(root: Module) -> dict[Module, Module]:
    """Return what `torch.compile` has wrapped below a module, each with its wrapper, which is what is called."""
    wrappers = [(module._modules.get(WRAPPED_BY_COMPILE), module) for module in root.modules()]
    return {module: wrapper for module, wrapper in wrappers if module is not None}


def modules_policies(policy: Any) -> Sequence[ModulesPolicy]:
    """Return what chooses modules, of what a user gave as a policy; nothing of None."""
    kinds = () if policy is None else as_policy(policy).kinds()
    return [kind for kind in kinds if isinstance(kind, ModulesPolicy)]


def _chosen(name: str, module: Module, pattern: Pattern) -> bool:
    """Whether a pattern is for a module; ``*.self_attn`` is for ``self_attn`` too, whose path begins in the region."""
    at_top = isinstance(pattern, str) and pattern.startswith("*.") and matches(name, module, pattern[2:])
    return at_top or matches(name, module, pattern)


def _keep_calls_of(module: Module) -> None:
    forward = vars(module).get("forward")
    while isinstance(forward, ForwardOfModule):
        if isinstance(forward, KeptForward):
            return
        forward = forward.earlier
    module.forward = KeptForward(module, vars(module).get("forward"))


def _modules_of(function: Any, args: Sequence[Any]) -> Iterator[Module]:
    """Yield the module of a region's function, or those that a function closes over, names or is given first."""
    while isinstance(function, partial):
        args, function = (*function.args, *args), function.func
    if isinstance(function, OfModule):
        function = function.module
    owner = function if isinstance(function, Module) else getattr(function, "__self__", None)
    if isinstance(owner, Module):
        yield owner
        return
    found: list[Any] = [*args[:1]]
    if isinstance(function, FunctionType):
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # not set yet
                found.append(cell.cell_contents)
        names = function.__code__.co_names
        found += [function.__globals__[name] for name in names if name in function.__globals__]
    yield from {id(one): one for one in found if isinstance(one, Module)}.values()
