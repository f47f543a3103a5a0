"""The options of regions as users write them: their types, and the errors about calls of another form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, ParamSpec, TypedDict, TypeVar

from torch_remat._offload import OFFLOADER, is_offloader
from torch_remat.dispatch.options import ContextFn, DeterminismCheck, Options
from torch_remat.errors import UsageError, shown

if TYPE_CHECKING:
    from torch_remat.offload.protocol import Offloader
    from torch_remat.policies.policy import OpPolicy

P = ParamSpec("P")
R = TypeVar("R")


class LayerOptions(TypedDict, total=False):
    """The options of `torch_remat.checkpoint` for regions that have names already; see there."""

    preserve_rng_state: bool
    determinism_check: DeterminismCheck
    early_stop: bool
    debug: bool
    context_fn: ContextFn | None
    offloader: Offloader | None
    offload_inputs: bool
    policy: OpPolicy | Iterable[Any] | Mapping[Any, Any] | Callable[..., Any] | None
    allow_cache_entry_mutation: bool


class CheckpointOptions(LayerOptions, total=False):
    """All options of `torch_remat.checkpoint`."""

    region_name: str | None


class ModulesOptions(LayerOptions, total=False):
    """The options of `torch_remat.checkpoint_modules`: ``keep_last`` matches stay as they are, besides the others."""

    keep_last: int


def says_form(form: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator: a call that does not fit the signature is a `UsageError` that shows the right form."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise  # it comes from inside
            raise _of_another_form(function, args, kwargs, form)

        return checked

    return decorate


def _of_another_form(function: Any, args: tuple[Any, ...], options: dict[str, Any], form: str) -> UsageError:
    parameters = list(signature(function).parameters.values())
    known = [one.name for one in parameters if one.kind is not one.POSITIONAL_ONLY]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    for option in () if takes_any else options:
        if option not in known:
            return unknown_option(function.__name__, option, known, form)
    if all(one.kind is one.KEYWORD_ONLY for one in parameters):
        what = f"{function.__name__}() takes no function and no positional arguments"
        return UsageError(what, remedy=f"{form} {_DROP_IN}")
    try:
        signature(function).bind(*args, **options)
    except TypeError as error:
        return UsageError(f"{function.__name__}(): {error}", remedy=form)
    raise AssertionError("the call fits")


_DROP_IN = "remat.drop_in(**options) returns a function that is called as torch.utils.checkpoint.checkpoint is."


def unknown_option(function: str, option: str, known: Iterable[str], form: str) -> UsageError:
    """Return the error about an option that a function does not have: it names the near one, and all that there are."""
    known = list(known)
    if option == "use_reentrant":
        advice = f"Leave it out: a region is never reentrant. {_DROP_IN}"
    elif near := get_close_matches(option, known, n=1):
        advice = f"Did you mean {near[0]!r}? The options are {', '.join(known)}."
    else:
        advice = f"The options are {', '.join(known)}."
    return UsageError(f"{function}() has no option {option!r}", remedy=f"{advice} {form}")


def checked_options(function: str, options: Mapping[str, Any], known: type, form: str) -> dict[str, Any]:
    """Return options of regions that another function than `checkpoint` was given.

    They can be pickled: a policy is in place of a list of ops, of which pickle knows nothing.

    Args:
        function: The function's name.
        options: What it was given.
        known: The `TypedDict` that has all its options.
        form: What its errors show as the right form of a call.

    Raises:
        UsageError: One is not among the known, or has a value that it cannot have.
        PolicyError: The policy is not one.
    """
    for option in options:
        if option not in known.__annotations__:
            raise unknown_option(function, option, known.__annotations__, form)
    require_values(Options(**options), function, form)
    return {**options, "policy": read_policy(options["policy"])} if "policy" in options else dict(options)


def read_policy(given: OpPolicy | Iterable[Any] | Mapping[Any, Any] | Callable[..., Any] | None) -> OpPolicy | None:
    """Return what a user gave as a policy in the form that the runtime asks."""
    if given is None:
        return None
    from torch_remat.policies.given import as_policy  # loaded only where it is used

    return as_policy(given)


def require_values(options: Options, function: str, form: str) -> None:
    """Raise `UsageError` about a value that an option cannot have."""
    check = options.determinism_check
    rules = (
        (options.region_name is None or (isinstance(options.region_name, str) and options.region_name != ""),
         "region_name", "a non-empty string or None"),
        (isinstance(options.preserve_rng_state, bool), "preserve_rng_state", "True or False"),
        (isinstance(check, str) and check in ("default", "none", "bitwise"), "determinism_check",
         "'default', 'none' or 'bitwise'"),
        (isinstance(options.early_stop, bool), "early_stop", "True or False"),
        (isinstance(options.debug, bool), "debug", "True or False"),
        (isinstance(options.allow_cache_entry_mutation, bool), "allow_cache_entry_mutation", "True or False"),
        (options.context_fn is None or callable(options.context_fn), "context_fn",
         "a callable that returns two context managers, or None"),
        (options.offloader is None or is_offloader(options.offloader), "offloader", OFFLOADER),
        (isinstance(options.offload_inputs, bool), "offload_inputs", "True or False"),
    )  # fmt: skip
    for holds, option, wanted in rules:
        if not holds:
            raise UsageError(
                f"{function}({option}={shown(getattr(options, option))}) is not possible",
                remedy=f"{option} is {wanted}. {form}",
            )
