"""Judges a program: equal to plain autograd bit for bit, or an error of the contract; nothing is left behind."""

from __future__ import annotations

import gc
import threading
import time
import warnings
from typing import Any

import torch
from torch import Tensor

import torch_remat as remat
from tests.helpers import assert_clean_state
from tests.programs.kept import check_kept, check_let_go, check_recomputed, is_modelled
from tests.programs.priced import PRICED, starts_over, with_ladders
from tests.programs.program import RECOMPUTE, Program, calls_of, draws, policies_of, without, writes
from tests.programs.running import Found, Injected, State, copying, run
from torch_remat.dispatch.region.region import live_regions


def allowed_errors(program: Program) -> tuple[type[Exception], ...]:
    """Return the errors by which regions may refuse a program that plain autograd runs."""
    allowed: list[type[Exception]] = []
    calls = calls_of(program)
    if writes(program):
        allowed.append(remat.MutationError)
    has_seeds = any(step.what in ("seed", "named seed") and step.policy != RECOMPUTE for step in calls)
    skips = calls or policies_of(program)
    if has_seeds or (skips and (writes(program) or draws(program))):  # from which a replay cannot start over
        allowed.append(remat.PlaceholderError)
    if program.later is not None:
        allowed += [remat.MutationError, remat.MismatchError]
    if "names" in policies_of(program):
        allowed.append(remat.PolicyError)  # for a pattern that matches nothing
    if calls:
        allowed.append(remat.UsageError)
    return tuple(allowed)


def outcome(program: Program) -> str:
    """Run a program in every way and judge it.

    Returns:
        What happened: `equal`, `refused by autograd`, `injected`, or the name of the error of ours.

    Raises:
        AssertionError: A result is wrong, an error is none of the contract, or something is left behind.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda *given, **named: None
        threads, regions = threading.active_count(), len(live_regions())
        with with_ladders():
            found = _judge(program) if policies_of(program).isdisjoint(PRICED) else _judge_priced(program)
        _check_nothing_left(threads)
        if len(live_regions()) > regions:
            gc.collect()
            # A thread that was joined is gone a little later, and so are the nodes that it left in autograd's engine.
            end = time.monotonic() + 1
            while program.backward == "thread" and len(live_regions()) > regions and time.monotonic() < end:
                time.sleep(0.01)
        left = len(live_regions()) - regions
        if left > 0 and _is_refused_by_price(program, found):
            left = 0  # an error of autograd's own may leave the graph around its node
        assert left <= 0, f"{left} regions are left after: {found}"
    return found


def _is_refused_by_price(program: Program, found: str) -> bool:
    """Whether autograd refuses a program, or a step before it in its budget, while ops are recorded for a ladder."""
    if program.budget is not None:
        return isinstance(_run(program._replace(budget=None, fault=None, later=None, backward="once"), True), str)
    return found == "refused by autograd" and not policies_of(program).isdisjoint(PRICED)


def _judge(program: Program) -> str:
    expected = _run(program, False)
    found = _run(program, True)
    if isinstance(expected, str):
        return _judge_refused(program, found)
    if isinstance(found, str):
        return found
    _assert_same(expected.all(), found.all())
    if is_modelled(program):
        check_kept(program)
        check_let_go(program)
        check_recomputed(program)
    if program.fault is not None and _run(program, True, faulty=True) == "injected":
        _assert_same(expected.all(), _run(program, True).all())
        return f"injected in {program.fault.phase}"
    return "equal"


def _judge_priced(program: Program) -> str:
    """Judge a program whose policies go by price: the ladders are those of a step with other data.

    A plain region may refuse a program; a policy by price must not refuse others.
    """
    if isinstance(_run(program, False), str):
        return _judge(program)
    plain = without(program, PRICED)
    _run(program, True, seed=2)
    if program.budget is None and not isinstance(_run(plain, True), str):  # a budget may keep other regions
        found = _run(program, True)
        # Replay may go further than that of a plain region, to what was modified meanwhile.
        may_come_later = program.later is not None and found == "MutationError"
        assert may_come_later or not isinstance(found, str), f"a policy by price brings {found}"
    found = _judge(program)
    return f"{found} after a start over" if starts_over() else found


def _judge_refused(program: Program, found: Found | str) -> str:
    """Judge a program that plain autograd refuses, most of them for what was modified after autograd saved it.

    A region may refuse it, too. If it does not, its gradients are those of a plain run with copies of what is saved.
    """
    if isinstance(found, Found):
        has_copies = program.hooks is not None or program.later is not None  # by recomputing, what was changed later
        must_raise = not calls_of(program) and not policies_of(program) and not has_copies
        assert not must_raise, "plain autograd refuses it"
        with copying():
            copied = _run(program._replace(hooks=None), False)
        if isinstance(copied, Found):
            _assert_same(copied.gradients, found.gradients, "of what plain autograd refuses, gradient")
    return "refused by autograd"


def _run(program: Program, wraps: bool, faulty: bool = False, seed: int = 1) -> Found | str:
    """Return a program's results, or which error it raised; one that it must not raise goes on."""
    state = State(wraps, program)
    try:
        found: Found | str = run(state, program.fault if faulty else None, seed)
    except Injected:
        if program.fault.phase != "forward":
            _assert_same(state.after_forward, state.changing(), "after an error in backward, buffer or generator")
        found = "injected"
    except remat.RematError as error:
        if not isinstance(error, allowed_errors(program)) and not _is_refused(program, wraps):
            raise AssertionError(f"{type(error).__name__} is not allowed here: {error}") from error
        found = type(error).__name__
    except (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError) as error:
        if wraps and not _is_refused(program, wraps):
            raise
        found = f"{type(error).__name__}: {error}"
    if isinstance(found, str):  # after an error autograd's engine holds what was to run next until the next backward
        torch.ones((), requires_grad=True).backward()
    if state.offloader is not None:
        gc.collect()
        state.offloader.assert_all_released_once()
    return found


def _is_refused(program: Program, wraps: bool) -> bool:
    """Return whether plain autograd refuses a program, so that a region may raise what it likes."""
    return wraps and isinstance(_run(program, False), str)


def _assert_same(expected: list[Any], found: list[Any], what: str = "result") -> None:
    assert len(expected) == len(found)
    wrong = [place for place, pair in enumerate(zip(expected, found, strict=True)) if not _is_same(*pair)]
    assert not wrong, f"{what} {wrong} of {len(expected)} differ from plain autograd's"


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if type(one) is not type(other) or one.dtype != other.dtype or one.shape != other.shape:
        return False
    if hasattr(one, "__tensor_flatten__"):
        names, _ = one.__tensor_flatten__()
        return all(_is_same(getattr(one, name), getattr(other, name)) for name in names)
    return torch.equal(one, other) or (one.is_floating_point() and torch.equal(one.nan_to_num(7), other.nan_to_num(7)))


def _check_nothing_left(threads: int) -> None:
    assert_clean_state()
    assert not remat.is_recomputing(), "a replay did not end"
    assert threading.active_count() == threads, "a thread is left"
