"""`drop_in`: `checkpoint` with the signature of torch's own, for libraries that are handed such a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, update_wrapper
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from torch.compiler import is_compiling
from torch.nn import Module
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts, noop_context_fn

from torch_remat._checkpoint import checkpoint
from torch_remat._compat import SELECTIVE_CONTEXTS, top_saved_tensors_hooks, torch_checkpoint_switches
from torch_remat._options import CheckpointOptions, checked_options
from torch_remat.dispatch.options import ContextFn, DeterminismCheck, Options
from torch_remat.errors import UsageError
from torch_remat.policies.by_op import PolicyFunction
from torch_remat.policies.given import as_policy
from torch_remat.policies.policy import OpPolicy

if TYPE_CHECKING:
    from typing_extensions import Unpack


_FORM = "The form is drop_in(**options)(function, *args, **kwargs)."


def drop_in(**options: Unpack[CheckpointOptions]) -> DropIn:
    """Return a function that is called as ``torch.utils.checkpoint.checkpoint`` is, and makes regions of ours.

    It is for libraries that take such a function. The options that are given here come before those that the library
    passes; a policy that it makes with ``create_selective_checkpoint_contexts`` is combined with the one given here.
    ``set_checkpoint_early_stop`` and ``set_checkpoint_debug_enabled`` come before both, as in torch.

    Args:
        **options: Those of `checkpoint`.

    Returns:
        ``(function=None, *args, use_reentrant=None, preserve_rng_state=True, context_fn=noop_context_fn,
        determinism_check="default", debug=False, early_stop=True, respect_saved_tensors_hooks=None, **kwargs)``.
        Without ``use_reentrant`` it is not reentrant, and does not warn; with ``use_reentrant=True`` it calls torch's
        own, which no option but ``preserve_rng_state`` fits. Without a function it returns a decorator of functions and
        methods with these options, as torch's does from 2.14 on, with any torch. It can be pickled and copied if the
        options can.

    Raises:
        UsageError: At once, if `checkpoint` has no such option.
        PolicyError: At once, if ``policy`` is not a policy.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> block = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> checkpoint = remat.drop_in(policy=remat.policies.save_matmuls)
        >>> y = checkpoint(block, torch.randn(4, 8), use_reentrant=False)
        >>> y.sum().backward()
    """
    return DropIn(checked_options("drop_in", options, CheckpointOptions, _FORM))


class DropIn:
    """What `drop_in` returns.

    Args:
        options: Those of `checkpoint`, as `checked_options` returns them.
    """

    __slots__ = ("__weakref__", "_bind", "_options")

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._bind = checkpoint(**self._options)

    def __repr__(self) -> str:
        return f"drop_in({', '.join(f'{name}={value!r}' for name, value in self._options.items())})"

    def __reduce__(self) -> tuple[Any, ...]:
        return DropIn, (self._options,)

    def __deepcopy__(self, memo: dict[int, Any]) -> DropIn:
        return self  # nothing in it changes

    def __call__(
        self,
        /,
        function: Callable[..., Any] | None = None,
        *args: Any,
        use_reentrant: bool | None = None,
        preserve_rng_state: bool | None = None,
        context_fn: ContextFn = noop_context_fn,
        determinism_check: DeterminismCheck | None = None,
        debug: bool | None = None,
        early_stop: bool | None = None,
        respect_saved_tensors_hooks: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a function as a region, called as torch's own checkpoint is.

        Args:
            function: What is run; without it and other arguments, a decorator is returned.
            *args: Its arguments.
            use_reentrant: True calls torch's own, reentrant checkpoint.
            preserve_rng_state: As in `checkpoint`, unless `drop_in` was given one; so are the others.
            context_fn: One that makes contexts of selective checkpointing is a policy here.
            determinism_check: See above.
            debug: See above.
            early_stop: See above.
            respect_saved_tensors_hooks: Whether what a policy keeps passes the saved-tensor hooks around the region. It
                always does; False is an error where there are both.
            **kwargs: Keyword arguments of the function.

        Returns:
            What the function returns.

        Raises:
            UsageError: ``use_reentrant=True`` does not fit the options that `drop_in` was given, or
                ``respect_saved_tensors_hooks=False`` the hooks around.
        """
        told = {
            "use_reentrant": use_reentrant,
            "context_fn": context_fn,
            "preserve_rng_state": preserve_rng_state,
            "determinism_check": determinism_check,
            "debug": debug,
            "early_stop": early_stop,
            "respect_saved_tensors_hooks": respect_saved_tensors_hooks,
        }
        if function is not None or args:
            return self.run(function, args, kwargs, told)
        if kwargs:
            raise UsageError(
                f"a checkpoint that is to decorate a function was given {sorted(kwargs)[0]}=, which is no option of it",
                remedy="Give the function's arguments when what it returns is called.",
            )
        return partial(DecoratedFunction, self, told)

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], told: Mapping[str, Any]) -> Any:
        """Run a function as a region, with the options that the caller of torch's checkpoint told."""
        if told["use_reentrant"]:
            return self._run_reentrant(function, args, kwargs, told)
        told = dict(told)
        context_fn, respects = told.pop("context_fn"), told.pop("respect_saved_tensors_hooks")
        del told["use_reentrant"]
        told.update(self._options)
        told.update(torch_checkpoint_switches())
        changed = {name: value for name, value in told.items() if value is not None and value != self._present(name)}
        if context_fn is not noop_context_fn and "context_fn" not in self._options:
            changed.update(self._for_contexts(context_fn))
        if respects is False:
            _require_no_hooks({**self._options, **changed})
        bind = checkpoint(**{**self._options, **changed}) if changed else self._bind
        if type(function) is partial:
            function, args, kwargs = _method_of(function, args, kwargs)
        return bind(function)(*args, **kwargs)

    def _present(self, option: str) -> Any:
        return self._options.get(option, Options._field_defaults[option])

    def _run_reentrant(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        told: Mapping[str, Any],
    ) -> Any:
        if others := self._options.keys() - {"preserve_rng_state"}:
            raise UsageError(
                f"what drop_in({sorted(others)[0]}=...) returned was called with use_reentrant=True: that is another "
                "implementation, torch's own, which has no such option",
                remedy="Let the library pass use_reentrant=False, or leave the option out.",
            )
        options = {name: value for name, value in told.items() if value is not None}
        options.update(self._options)
        # Not looked up in torch.utils.checkpoint, where what `drop_in` returned may stand in its place.
        return torch_checkpoint(function, *args, **options, **kwargs)

    def _for_contexts(self, context_fn: ContextFn) -> dict[str, Any]:
        """Return the options that stand for what makes two contexts for a region."""
        if is_compiling():
            return {"context_fn": context_fn, "policy": None}  # which goes on to torch as it is
        found = _policy_of(context_fn)
        if not isinstance(found, tuple):
            return {"context_fn": found}
        policy, may_mutate = found
        own = self._options.get("policy")
        return {
            "policy": policy if own is None else own | policy,
            "allow_cache_entry_mutation": may_mutate or self._present("allow_cache_entry_mutation"),
        }


class DecoratedFunction:
    """What the decorator that a call without a function returns makes of a function, or of a method in a class.

    Args:
        drop_in: What was called.
        told: The options of that call.
        function: The function.
    """

    def __init__(self, drop_in: DropIn, told: Mapping[str, Any], function: Callable[..., Any]) -> None:
        self.drop_in, self.told, self.function = drop_in, told, function
        update_wrapper(self, function, updated=())

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the function as a region; all arguments are its own."""
        return self.drop_in.run(self.function, args, kwargs, self.told)

    def __reduce__(self) -> tuple[Any, ...]:
        return DecoratedFunction, (self.drop_in, self.told, self.function)

    def __get__(self, instance: object, owner: type | None = None) -> DecoratedFunction:
        bind = getattr(self.function, "__get__", None)
        if instance is None or bind is None:
            return self
        return DecoratedFunction(self.drop_in, self.told, bind(instance, owner))


def _require_no_hooks(options: Mapping[str, Any]) -> None:
    """Refuse hooks around a region with a policy: what it keeps passes them.

    Those of an enclosing region, ours or torch's, are no hooks of the user's.
    """
    if is_compiling() or options.get("policy") is None or (hooks := top_saved_tensors_hooks()) is None:
        return
    if not (getattr(hooks[0], "__module__", None) or "").startswith(("torch_remat.", "torch.utils.checkpoint")):
        raise UsageError(
            "respect_saved_tensors_hooks=False, but there are saved-tensor hooks around the region, and what its "
            "policy keeps passes them",
            remedy="Leave the option out, or run the region outside of the hooks.",
        )


def _method_of(function: partial[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return a partial of a module's forward, or of its call, as the method that it is, and the call's arguments.

    Names of ops begin below the module, and tensors in the partial are inputs of the region.
    """
    method, first = function.func, function.args
    if type(method) is FunctionType and first and isinstance(first[0], Module):
        method, first = method.__get__(first[0]), first[1:]
    elif not (type(method) is MethodType and isinstance(method.__self__, Module)):
        return function, args, kwargs
    return method, (*first, *args), {**function.keywords, **kwargs}


def _policy_of(context_fn: ContextFn) -> tuple[OpPolicy, bool] | ContextFn:
    """Return a policy and ``allow_cache_entry_mutation`` for contexts of selective checkpointing; else a ContextFn."""
    if type(context_fn) is partial and context_fn.func is create_selective_checkpoint_contexts:
        return _as_told(*context_fn.args, **context_fn.keywords)
    contexts: Any = context_fn()
    if (type(contexts[0]), type(contexts[1])) == SELECTIVE_CONTEXTS:
        return PolicyFunction(contexts[0].policy_fn), contexts[1].allow_cache_entry_mutation
    return lambda: contexts


def _as_told(policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False) -> tuple[OpPolicy, bool]:
    return as_policy(policy_fn_or_list), allow_cache_entry_mutation
