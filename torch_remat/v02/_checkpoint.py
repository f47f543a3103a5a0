"""`checkpoint` and `region` with the options of 0.2.x, and `name_scope`.

In: a function, its options, and calls in it. Kept: what this library's regions keep; the states that
`RecomputeStateHook` objects took, until replay has run for the last time. Out: what the functions return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Token
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.compiler import is_compiling

from torch_remat import _checkpoint as face
from torch_remat import _region as region_face
from torch_remat._compat import top_saved_tensors_hooks
from torch_remat.dispatch.mode import RematMode, current_mode
from torch_remat.dispatch.naming import scope as name_prefix
from torch_remat.dispatch.naming import scope_restored
from torch_remat.errors import UsageError
from torch_remat.v02._hooks import NativePack, checked_hooks, give_names, hand_over, hand_over_outputs
from torch_remat.v02._names import checked
from torch_remat.v02._scope import Call, Hooks, Output, RecomputeStateHook, Run, Scope, scope
from torch_remat.v02._trace import note_region

P = ParamSpec("P")
R = TypeVar("R")


def checkpoint(
    *misplaced: object,
    region_name: str | None = None,
    determinism_check: str = "none",
    preserve_rng_state: bool = True,
    saved_tensors_hooks: tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None = None,
    recompute_state_hooks: Sequence[RecomputeStateHook] = (),
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run a function as a checkpointed region, as `torch_remat.checkpoint` does, with the options of 0.2.x.

    Args:
        *misplaced: Not allowed; catches ``checkpoint(function)``.
        region_name: The region's name in errors and reports; by default the function's or module's.
        determinism_check: ``"none"`` or ``"default"``.
        preserve_rng_state: Whether replay draws the same random numbers as forward. 0.2.x refuses True; here it is the
            default, since without it gradients are wrong wherever numbers are drawn.
        saved_tensors_hooks: A pair for the region's inputs and for what saved calls in it keep; it comes before a pair
            around the region, and after one in it. See `saved_tensors_hooks`.
        recompute_state_hooks: State outside of tensors that replay is to find as forward did.

    Returns:
        A decorator. The decorated function takes and returns what the function does.

    Raises:
        UsageError: An option has a value that it cannot have, or the function was given in the first call. Under
            ``torch.compile``, hooks were given.
        RematError: From the call, or from backward, as of `torch_remat.checkpoint`.
    """
    own = None if saved_tensors_hooks is None else checked_hooks(saved_tensors_hooks)
    for hook in recompute_state_hooks:
        if not isinstance(hook, RecomputeStateHook):
            raise UsageError(f"a {type(hook).__name__} is no RecomputeStateHook: it has no snapshot and restore")
    state_hooks = tuple(recompute_state_hooks)
    options: dict[str, Any] = {
        "region_name": region_name,
        "determinism_check": determinism_check,
        "preserve_rng_state": preserve_rng_state,
    }
    plain = face.checkpoint(*misplaced, **options)

    def bind(function: Callable[P, R]) -> Callable[P, R]:
        run_plainly = plain(function)

        def checkpointed(*args: P.args, **kwargs: P.kwargs) -> R:
            if is_compiling():
                if own is not None or state_hooks:
                    raise UsageError("hooks of checkpoint() cannot be compiled", region=region_name)
                return run_plainly(*args, **kwargs)
            if not torch.is_grad_enabled():
                return function(*args, **kwargs)
            around = top_saved_tensors_hooks()
            hooks = around[0].hooks if own is None and around and isinstance(around[0], NativePack) else own
            run = Run(state_hooks)
            token = scope.set(Scope(run, hooks))
            try:
                if hooks is None and not state_hooks:
                    result = run_plainly(*args, **kwargs)
                else:
                    watched = face.checkpoint(context_fn=lambda: (_Forward(run), _Replay(run)), **options)
                    with _around(own):
                        result = watched(function)(*args, **kwargs)
                if run.outputs:
                    hand_over_outputs(run.outputs)
            finally:
                run.outputs = []
                scope.reset(token)
            return result

        # Without a module's attributes, which are not the wrapper's.
        return checkpointed if is_compiling() else wraps(run_plainly, updated=())(checkpointed)

    return bind


def _around(hooks: Hooks | None) -> AbstractContextManager[Any]:
    if hooks is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(NativePack(hooks), hooks.unpack)


class _Forward:
    """The start of a region's forward: its inputs are packed."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __enter__(self) -> None:
        mode = current_mode()
        assert mode is not None
        if mode.region.hooks is not None and isinstance(mode.region.hooks[0], NativePack):
            mode.region.hooks = None  # they get the rest from `region`, which knows more of it
        self._run.begin(mode.region)

    def __exit__(self, *exc_info: object) -> None:
        pass


class _Replay:
    """Each replay of a region: the state that hooks look after is that of forward meanwhile."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._before: list[tuple[Sequence[Any], Token[Scope]]] = []

    def __enter__(self) -> None:
        self._before.append((self._run.present(), scope.set(Scope(self._run))))
        self._run.restore_entry()

    def __exit__(self, *exc_info: object) -> None:
        states, token = self._before.pop()
        scope.reset(token)
        self._run.restore(states)


def region(function: Callable[P, R], name: str, *, recompute: bool) -> Callable[P, R]:
    """Say of one call in a checkpointed function whether replay makes it again.

    Args:
        function: What is called: a module, a function, the ``apply`` of a custom autograd Function.
        name: The call's name, unique within the checkpoint; `name_scope` prefixes it.
        recompute: False keeps what the call saves for backward, and replay leaves the call out; True runs it again.

    Returns:
        A function that takes what ``function`` takes and returns what it returns. Outside of checkpoints it is the
        plain call; so it is in a saved call, whatever ``recompute`` says, and claims no name.

    Raises:
        UsageError: At once, if the function is not callable, the name is no string or empty, or ``recompute`` is no
            bool; from the call, if the checkpoint has another call of this name.
        RematError: From backward, as of `torch_remat.region`.
    """
    if not callable(function):
        raise UsageError(
            f"a {type(function).__name__} cannot be called", remedy="The form is region(function, 'name')."
        )
    checked(name, "a region")
    if not isinstance(recompute, bool):
        raise UsageError(f"recompute={recompute!r} is neither True nor False", op=name)
    made = region_face.region(function, name, recompute=recompute)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        mode = None if is_compiling() else current_mode()
        if mode is None:
            return made(*args, **kwargs)
        full_name = name_prefix.get() + name
        around = scope.get()
        if around.call is not None:
            return made(*args, **kwargs)
        note_region(mode, full_name, recompute)
        if recompute:
            return made(*args, **kwargs)
        if mode.replaying:
            result = made(*args, **kwargs)
            if around.run is not None:
                around.run.restore_exit(mode.region, full_name)
            return result
        return _saved(mode, around, Call(full_name, []), lambda: made(*args, **kwargs))

    return call


def _saved(mode: RematMode, around: Scope, call: Call, make: Callable[[], R]) -> R:
    """Make a saved call in forward, and do for hooks what is to be done after it."""
    region = mode.region
    holders = region.tape.holders
    before = len(holders)
    token = scope.set(around._replace(call=call))
    try:
        result = make()
    finally:
        scope.reset(token)
    if call.named:
        give_names(holders, call.named)
    if around.hooks is not None:
        hand_over(holders[before:], call.name, around.hooks)
        if around.run is not None:
            around.run.outputs.append(Output(region, call.name, around.hooks, around.hooks.context()))
    if around.run is not None:
        around.run.note_exit(region, call.name)
    return result


@contextmanager
def name_scope(prefix: str) -> Iterator[None]:
    """Prefix the names of regions inside with ``prefix/``; scopes nest.

    Args:
        prefix: A non-empty string; here it may contain ``/``.

    Yields:
        None.

    Raises:
        UsageError: The prefix is empty or no string.
    """
    checked(prefix, "a scope")
    if is_compiling():  # where regions have no names
        yield
        return
    with scope_restored(f"{name_prefix.get()}{prefix}/"):
        yield
