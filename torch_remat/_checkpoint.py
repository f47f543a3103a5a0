"""`checkpoint`, `checkpoint_sequential` and `is_recomputing`: the public face of regions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from types import MethodType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import torch
from torch.compiler import is_compiling

from torch_remat._compiled import compiled_region
from torch_remat._options import CheckpointOptions, checked_options, read_policy, require_values, says_form
from torch_remat.dispatch.mode import RematMode, current_mode, watch_by
from torch_remat.dispatch.options import DEFAULTS, ContextFn, DeterminismCheck, Options, Watch
from torch_remat.dispatch.region.forward import run_region
from torch_remat.errors import UsageError, shown
from torch_remat.offload.protocol import Offloader
from torch_remat.policies.policy import OpPolicy, split

if TYPE_CHECKING:
    from typing_extensions import Unpack

P = ParamSpec("P")
R = TypeVar("R")

_FORM = "The form is checkpoint(**options)(function)(*args, **kwargs), with empty parentheses if there are no options."
_SEQUENTIAL_FORM = "The form is checkpoint_sequential(functions, segments, input, **options)."


@says_form(_FORM)
def checkpoint(
    *,
    region_name: str | None = None,
    preserve_rng_state: bool = True,
    determinism_check: DeterminismCheck = "default",
    early_stop: bool = True,
    debug: bool = False,
    context_fn: ContextFn | None = None,
    offloader: Offloader | None = None,
    offload_inputs: bool = False,
    policy: OpPolicy | Iterable[Any] | Mapping[Any, Any] | Callable[..., Any] | None = None,
    allow_cache_entry_mutation: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run a function as a checkpointed region: its activations are recomputed in backward instead of kept.

    What is kept from forward to backward is the tensors among the arguments (anywhere in them), and nothing else.
    Backward runs the function once more when it needs the first of the region's tensors. The gradients equal those of
    the same code without checkpointing, bit for bit where the ops are deterministic.

    The three calls keep the options, the function and its arguments apart, so that no name can collide.

    Args:
        region_name: The region's name in errors and reports; by default the function's or module's.
        preserve_rng_state: Whether replay draws the same random numbers as forward, from the default generators of all
            devices in use and from each ``torch.Generator`` among the arguments, in what the function closes over
            (its globals too), and among the attributes of the modules that it runs. State is kept only if the region
            drew from it.
        determinism_check: What is compared between forward and replay for each saved tensor. ``"default"``: shape,
            dtype, device, and which op of torch made it, and values of a few small tensors (docs/limits.md);
            ``"bitwise"``: these and a checksum of all values; ``"none"``: nothing.
        early_stop: Whether replay ends as soon as backward has all that it needs.
        debug: Whether an error about differing phases shows the ops of both, with source lines. Every op then
            passes a dispatch mode, which costs microseconds an op.
        context_fn: A callable that returns two context managers, one for forward and one for replay.
        offloader: What takes the tensors of OFFLOAD ops, and inputs, off the device; by default that of
            `offload_to`, or else a `CpuOffloader` that all share.
        offload_inputs: Whether the region's inputs leave the device too. With long sequences they are most of
            what is kept.
        policy: What is saved, instead of recomputing all: a list of functions of torch, such as ``F.linear``, whose
            calls are kept, or a dict from these to decisions, such as ``{F.linear: CheckpointPolicy.OFFLOAD}``;
            `save_modules`; one of `torch_remat.policies`; or several of these with ``|`` between them. Also by op, for
            which every op of the region passes a dispatch mode: a list or dict of ops, `save_names`, or a function with
            the signature of selective activation checkpointing, ``(ctx, op, *args, **kwargs)``. A saved result is kept
            only if replay or backward needs it.
        allow_cache_entry_mutation: Whether what the policy keeps may be modified in place: no error says so then.

    Returns:
        A decorator. The decorated function takes and returns what the function does, and can be pickled and copied if
        the function can.

    Raises:
        UsageError: At once, if an option is unknown or has a value that it cannot have, or if the function was given
            in the first call.
        PolicyError: At once, if ``policy`` is not a policy; from the call of the decorated function, if a name pattern
            matched nothing, or a policy function returned something else than a policy.
        MutationError: From backward, if a tensor that is needed was modified in place.
        MismatchError: From backward, if replay did something else than forward.
        OffloadError: From backward, if an offloaded tensor could not be brought back.
        ReleasedError: From backward, if an earlier backward without ``retain_graph=True`` freed what replay needs.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> block = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> x = torch.randn(4, 8, requires_grad=True)
        >>> y = remat.checkpoint(region_name="block")(block)(x)
        >>> y.sum().backward()
    """
    if (
        region_name is None
        and preserve_rng_state is True
        and determinism_check == "default"
        and early_stop is True
        and debug is False
        and context_fn is None
        and policy is None
        and allow_cache_entry_mutation is False
        and offloader is None
        and offload_inputs is False
    ):
        usual: Callable[[Callable[P, R]], Callable[P, R]] = _bind_defaults
        return usual
    options = _with_parts(Options(
        region_name, preserve_rng_state, determinism_check, early_stop, debug, context_fn, read_policy(policy),
        allow_cache_entry_mutation, offloader, offload_inputs,
    ))  # fmt: skip
    require_values(options, "checkpoint", _FORM)
    if debug and policy is None:  # with a policy, errors name the ops that differ
        from torch_remat.reports.debug_log import OPS  # loaded only where it is used

        options = options._replace(op_log=OPS)
    return _binder(options)


class Checkpointed(Generic[P, R]):
    """A function that runs as a region: what `checkpoint` makes of one, also as a decorator of methods.

    A copy, a deep one or an unpickled one, runs the copy of the function.
    """

    __slots__ = ("__dict__", "__weakref__", "__wrapped__", "_options")
    __name__: str
    __wrapped__: Callable[P, R]

    def __init__(self, function: Callable[P, R], options: Options) -> None:
        self.__wrapped__, self._options = function, options
        name = getattr(function, "__name__", None)
        if name is not None:  # what functools.wraps does; but a module's attributes are not the wrapper's
            self.__name__ = name
            self.__qualname__ = getattr(function, "__qualname__", name)
            self.__module__ = getattr(function, "__module__", type(self).__module__)
        self.__doc__ = function.__doc__

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function as a region, or as it is where no gradient is asked for, or `torch.jit` traces it."""
        if is_compiling():
            traced: R = compiled_region(self._options, self.__wrapped__, args, kwargs)
            return traced
        if not torch.is_grad_enabled() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            return self.__wrapped__(*args, **kwargs)
        output: R = run_region(self.__wrapped__, args, kwargs, self._options)
        return output

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __repr__(self) -> str:
        return f"checkpoint()({self.__wrapped__!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Checkpointed[P, R]:
        return Checkpointed(deepcopy(self.__wrapped__, memo), self._options)

    def __reduce__(self) -> Any:
        known: Any = sys.modules.get(self.__module__)
        for part in getattr(self, "__qualname__", "").split("."):
            known = getattr(known, part, None)
        if known is self:
            return self.__qualname__  # a decorated function is found by its name, as functions are
        options = self._options
        if options is DEFAULTS:
            return _unpickled, (self.__wrapped__, None)
        whole = options.policy if options.chosen is None else options.chosen
        plain = options._replace(policy=whole, functions=None, modules=(), price=None, chosen=None)
        return _unpickled, (self.__wrapped__, plain)


def _unpickled(function: Callable[P, R], options: Options | None) -> Checkpointed[P, R]:
    return Checkpointed(function, DEFAULTS if options is None else _with_parts(options))


def _with_parts(options: Options) -> Options:
    """Return options whose policy is taken apart into what it says of ops, of functions and of modules."""
    if (policy := options.policy) is None or is_compiling():
        return options._replace(chosen=policy)
    ops, functions, modules, price = split(policy)
    return options._replace(policy=ops, functions=functions, modules=modules, price=price, chosen=policy)


def _binder(options: Options) -> Callable[[Callable[P, R]], Callable[P, R]]:
    def bind(function: Callable[P, R]) -> Callable[P, R]:
        if not callable(function):
            raise UsageError(f"checkpoint() cannot run a {type(function).__name__}", remedy=_FORM)
        if is_compiling():  # for whose trace a function is easier than an object

            def traced(*args: P.args, **kwargs: P.kwargs) -> R:
                output: R = compiled_region(options, function, args, kwargs)
                return output

            return traced
        owner = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
        if options.modules and isinstance(owner, torch.nn.Module):
            for chosen in options.modules:  # code that is compiled before it ever runs does not look for them
                chosen.enter(function)
        return Checkpointed(function, options)

    return bind


_bind_defaults: Any = _binder(DEFAULTS)


def checkpoint_sequential(
    functions: torch.nn.Sequential | Iterable[Callable[..., Any]],
    segments: int,
    input: Any,
    **options: Unpack[CheckpointOptions],
) -> Any:
    """Run functions one after another, in segments of which all but the last are checkpointed regions.

    The last segment is not a region: backward needs its activations first, so that recomputing them would save nothing.

    Args:
        functions: A ``torch.nn.Sequential`` or an iterable of functions or modules, each of which takes what the one
            before it returns.
        segments: How many segments; at least 1, at most the number of functions.
        input: What the first function takes.
        **options: Those of `checkpoint`. ``region_name`` is followed by the numbers of the segment's functions.

    Returns:
        What the last function returns.

    Raises:
        UsageError: ``segments`` is out of range, or an option is unknown.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))
        >>> y = remat.checkpoint_sequential(model, 3, torch.randn(2, 8))
    """
    chain = list(functions)
    if not isinstance(segments, int) or not 1 <= segments <= max(len(chain), 1):
        raise UsageError(
            f"checkpoint_sequential() cannot make {shown(segments)} segments of {len(chain)} functions",
            remedy="Choose a whole number from 1 to the number of functions.",
        )
    # A wrong value is an error even where no segment is a region.
    chosen = checked_options("checkpoint_sequential", options, CheckpointOptions, _SEQUENTIAL_FORM)
    name = chosen.get("region_name") or "sequential"
    size = len(chain) // segments
    start = 0
    for _ in range(segments - 1):
        part = chain[start : start + size]
        chosen["region_name"] = f"{name}[{start}:{start + size}]"
        input = checkpoint(**chosen)(_chained(part))(input)
        start += size
    return _chained(chain[start:])(input)


def is_recomputing() -> bool:
    """Whether the code that calls this runs in the replay of a region (of any enclosing region).

    Returns:
        True in replay; False in forward and outside of regions.

    Example:
        >>> import torch_remat as remat
        >>> remat.is_recomputing()
        False
    """
    mode = None if is_compiling() else current_mode()
    return mode is not None and mode.recomputing


def _watch(mode: RematMode) -> Watch:
    from torch_remat.reports.watch import PhaseWatch  # loaded only where it is used

    return PhaseWatch(mode)


watch_by(_watch)


def _chained(functions: list[Callable[..., Any]]) -> Callable[[Any], Any]:
    def chain(value: Any) -> Any:
        for function in functions:
            value = function(value)
        return value

    return chain
