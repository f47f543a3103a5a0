"""`checkpoint_modules`: submodules that are regions, chosen by patterns on their qualified names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch.compiler import is_compiling
from torch.nn import Module

from torch_remat._checkpoint import checkpoint
from torch_remat._options import ModulesOptions, checked_options, says_form
from torch_remat.errors import UsageError, shown
from torch_remat.modules.patterns import ForwardOfModule, Pattern, callable_modules, is_pattern, matches, near, told
from torch_remat.modules.saved import ModulesPolicy, modules_policies

if TYPE_CHECKING:
    from typing_extensions import Unpack

Patterns = Pattern | Iterable[Pattern] | Mapping[Pattern, Mapping[str, Any]]

_FORM = (
    'The form is checkpoint_modules(model, "layers.*", keep_last=1, **options), with a pattern or a class of modules, '
    "a list of them, or a dict {pattern: {option: value}}. Regions have the qualified names of the modules."
)


class Plan(Protocol):
    """What says, by region name, which saved tensors are kept: `torch_remat.budgets.Plan`."""

    def __contains__(self, name: object) -> bool: ...

    def __iter__(self) -> Iterator[str]: ...

    def bind(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose regions keep what it says."""


@says_form(_FORM)
def checkpoint_modules(
    model: Module, patterns: Patterns, *, plan: Plan | None = None, **options: Unpack[ModulesOptions]
) -> CheckpointedModules:
    """Make submodules of a model checkpointed regions, chosen by their qualified names or by their class.

    From then on each of them runs as if it were called through `checkpoint`, with its qualified name as the region's
    name. It is the module's ``forward`` that is the region, an attribute of the module itself: there are no wrapper
    modules, and names, ``state_dict`` and classes are what they were. Hooks of the module run once a step, those of
    its children again in replay. A deep copy of the model, and a pickled one, has the same regions.

    Args:
        model: The model. It is not a region itself.
        patterns: Shell patterns (``*``, ``?``, ``[...]``) that are compared with the whole name, case included; ``*``
            also stands for dots. Or classes: all their instances match. One, several, or a dict with options for each.
            Of nested modules that one pattern matches the outermost is taken: ``"layers.*"`` means ``layers.0``, not
            ``layers.0.up``. Modules without a ``forward``, such as ``ModuleList``, are skipped.
        plan: A plan, by region name, of which saved tensors are kept: see `Budget.plan`. A module that it does not
            name recomputes everything.
        **options: Those of `checkpoint` without ``region_name``, and ``keep_last=n``: the last n matches of a pattern,
            in the order of the model's definition, stay as they are, since backward needs their activations first. The
            options of a pattern come before those of the call.

    Returns:
        A handle, whose ``remove()`` makes the modules what they were, and whose text shows the options of each.

    Raises:
        UsageError: At once, and then nothing has changed: a pattern matches nothing, a module is in a region of
            another pattern or of an earlier call, or `checkpoint` has no such option.
        PolicyError: At once, if ``policy`` is not a policy.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        >>> handle = remat.checkpoint_modules(model, "*", keep_last=1)
        >>> print(handle)
        3 regions in Sequential
        '*': no options
            0
            1
            2
            unchanged: 3
        >>> model(torch.randn(2, 8)).sum().backward()
        >>> handle.remove()
    """
    if not isinstance(model, Module):
        raise UsageError(f"checkpoint_modules() takes no {type(model).__name__}", remedy=f"model is a Module. {_FORM}")
    named = list(callable_modules(model))
    matches = [_match(model, named, pattern, {**options, **own}) for pattern, own in _checked(patterns)]
    regions = [
        (match, RegionForward(module, name, match.options, vars(module).get("forward"), plan=plan))
        for match in matches
        for name, module in match.regions
    ]
    _raise_if_they_meet(model, matches)
    if plan is not None:
        _raise_unless_it_fits(plan, [region.name for _, region in regions])
    handle = CheckpointedModules(type(model).__name__, matches, [region for _, region in regions])
    try:
        for match in matches:
            for chosen in match.modules():
                chosen.look_for(module for _, module in match.regions)
        for match in matches:
            match.take_modules()
        for _, region in regions:
            region.module.forward = region
    except BaseException:
        handle.remove()
        raise
    return handle


class RegionForward(ForwardOfModule):
    """The ``forward`` of a module that is a region.

    Args:
        module: The module.
        name: Its qualified name.
        options: Those of `checkpoint`.
        earlier: What was the module's ``forward`` before, unless that is the one of its class.
        active: Whether it still is a region.
        plan: What it keeps; None where that is asked of nobody.
    """

    __slots__ = ("_bind", "active", "name", "options", "plan")

    def __init__(
        self,
        module: Module | None,
        name: str,
        options: Mapping[str, Any],
        earlier: Callable[..., Any] | None = None,
        active: bool = True,
        plan: Plan | None = None,
    ) -> None:
        super().__init__(module, earlier)
        self.name, self.options, self.active, self.plan = name, options, active, plan
        self._bind = checkpoint(region_name=name, **options)

    def parts(self, memo: dict[int, Any] | None) -> tuple[Any, ...]:
        """Return all but the module; options are shared by copies."""
        return self.name, self.options, *super().parts(memo), self.active, self.plan

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward as a region."""
        function = self.__wrapped__
        if self.active:
            function = self._bind(function)
            if self.plan is not None and not is_compiling():
                function = self.plan.bind(function)
        return function(*args, **kwargs)

    def remove(self) -> None:
        """Make the module what it was."""
        self.active = False  # for code that has put a function of its own around this one
        super().remove()


class CheckpointedModules:
    """What `checkpoint_modules` has made regions; it keeps no module alive.

    Its text lists these modules, with their options. In a ``with`` statement it is removed at the end.
    """

    def __init__(self, model: str, matches: Sequence[_Match], regions: Sequence[RegionForward]) -> None:
        lines = [f"{len(regions)} region{'s' * (len(regions) != 1)} in {model}"]
        for match in matches:
            options = ", ".join(f"{name}={shown(value)}" for name, value in match.options.items())
            lines.append(f"{told(match.pattern)}: {options or 'no options'}")
            lines += [f"    {name}" for name, _ in match.regions]
            lines += [f"    unchanged: {name}" for name in match.left]
        self._text = "\n".join(lines)
        self._regions = regions
        self._chosen = [chosen for match in matches for chosen in match.modules()]

    def __str__(self) -> str:
        """Return one line for each pattern, and below it one for each module."""
        return self._text

    def __repr__(self) -> str:
        return f"<{self._text.partition(chr(10))[0]}>"

    def remove(self) -> None:
        """Make the modules what they were, and do nothing where that is done; copies of them stay regions."""
        roots = [module for region in self._regions if (module := region.module_if_there()) is not None]
        for chosen in self._chosen:
            chosen.forget(roots)
        for region in self._regions:
            region.remove()

    def __enter__(self) -> CheckpointedModules:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


class _Match(NamedTuple):
    """What one pattern matches."""

    pattern: Pattern
    options: Mapping[str, Any]
    regions: Sequence[tuple[str, Module]]
    left: Sequence[str]  # by keep_last

    def modules(self) -> Sequence[ModulesPolicy]:
        """Return what chooses modules below the regions, if the policy does."""
        return modules_policies(self.options.get("policy"))

    def take_modules(self) -> None:
        """Find the modules below the regions that the policy chooses."""
        for chosen in self.modules():
            chosen.take(dict(self.regions))


def _checked(patterns: Any) -> list[tuple[Pattern, Mapping[str, Any]]]:
    """Return patterns, each with its own options."""
    if isinstance(patterns, (str, type)):
        patterns = [patterns]
    if not isinstance(patterns, Iterable):
        raise UsageError(f"checkpoint_modules() cannot use {shown(patterns)} as patterns", remedy=_FORM)
    found = list(patterns.items() if isinstance(patterns, Mapping) else ((pattern, {}) for pattern in patterns))
    for pattern, own in found:
        if not is_pattern(pattern):
            raise UsageError(f"checkpoint_modules() cannot use the pattern {shown(pattern)}", remedy=_FORM)
        if not isinstance(own, Mapping):
            raise UsageError(
                f"checkpoint_modules() cannot use {shown(own)} as the options of {told(pattern)}", remedy=_FORM
            )
    if not found:
        raise UsageError("checkpoint_modules() got no pattern", remedy=_FORM)
    return found


def _match(model: Module, named: Sequence[tuple[str, Module]], pattern: Pattern, options: dict[str, Any]) -> _Match:
    keep_last = options.pop("keep_last", 0)
    if type(keep_last) is not int or keep_last < 0:
        raise UsageError(
            f"checkpoint_modules(keep_last={shown(keep_last)}) is not possible",
            remedy=f"It is a number from 0 on. {_FORM}",
        )
    options = checked_options("checkpoint_modules", options, ModulesOptions, _FORM)
    found = {id(module): (name, module) for name, module in reversed(named) if matches(name, module, pattern)}
    if not found:
        raise UsageError(
            f"the pattern {told(pattern)} matches no module with a forward in this {type(model).__name__}",
            remedy=near(pattern, named),
        )
    within = {id(inner) for _, module in found.values() for inner in _inside(module)}
    outermost = [entry for key, entry in reversed(found.items()) if key not in within]
    count = max(len(outermost) - keep_last, 0)
    return _Match(pattern, options, outermost[:count], [name for name, _ in outermost[count:]])


def _inside(module: Module) -> Iterator[Module]:
    modules = module.modules()
    next(modules)
    return modules


def _raise_if_they_meet(model: Module, matches: Sequence[_Match]) -> None:
    taken = {id(module): (match.pattern, name) for match in matches for name, module in match.regions}
    for match in matches:
        for name, module in match.regions:
            for inner in module.modules():
                pattern, other = taken.get(id(inner), (match.pattern, ""))
                if pattern != match.pattern:
                    raise UsageError(
                        f"the patterns {told(match.pattern)} and {told(pattern)} meet: {other} is "
                        + (f"inside {name}" if inner is not module else "matched by both"),
                        remedy="Choose patterns of which no one matches a module inside those of another.",
                    )
                if (earlier := _region_of(inner)) is not None:
                    raise _meets_earlier(name, earlier)
    for module in model.modules():
        if (earlier := _region_of(module)) is not None:
            for inner in module.modules():
                if id(inner) in taken:
                    raise _meets_earlier(taken[id(inner)][1], earlier)


def _region_of(module: Module) -> RegionForward | None:
    forward = vars(module).get("forward")
    return forward if isinstance(forward, RegionForward) and forward.active else None


def _raise_unless_it_fits(plan: Plan, names: Sequence[str]) -> None:
    if not (isinstance(plan, Mapping) and hasattr(plan, "bind")):
        raise UsageError(
            f"checkpoint_modules() cannot use {shown(plan)} as a plan",
            remedy="It is a plan of budget.plan(), or Plan.from_json(text). A policy for ops is the option policy.",
        )
    if not any(name in plan for name in names):
        raise UsageError(
            f"the plan names none of these regions: it has {', '.join([*plan][:5]) or 'no name'}",
            remedy=f"The regions are {', '.join(names[:5])}: they have the qualified names of the modules.",
        )


def _meets_earlier(name: str, earlier: RegionForward) -> UsageError:
    return UsageError(
        f"{name} meets the region {earlier.name} of an earlier checkpoint_modules(): one is the other, or inside it",
        remedy="Call remove() on the handle that the earlier call returned, or choose other patterns.",
    )
