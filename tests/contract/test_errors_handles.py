"""Wrong uses of handles: an error that names the region and the op, and a clean state after it."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.autograd import Function
from torch.utils.checkpoint import CheckpointPolicy as TorchPolicy

import torch_remat as remat
from tests.handle_ops import POLICIES, RECOMPUTE, SAVE, STYLES, Both, Inner, Kernel, Trace, call, policy_ids
from tests.helpers import assert_same, chain, checkpointed, leaf, pairwise, plain, run_with_gradients


class Scripted(Function):
    """Does with its handle what the script says."""

    @staticmethod
    def forward(ctx, x, script, op_name, policy):
        return script(ctx, remat.get_handle(ctx, op_name, policy), x)

    @staticmethod
    def backward(ctx, grad, *_):
        return grad * sum(tensor.cos() for tensor in ctx.saved_tensors if tensor is not None), None, None, None


def right(ctx, handle, x):
    if (ret := handle.maybe_load_saved()) is not None:
        return ret
    x = handle.save_or_load_inputs(x)
    y = x.sin()
    handle.save_for_backward({"x": x, "y": y})
    return handle.record_outputs(y)


def script_of(*steps):
    """Return a script that takes the steps in turn; only after `load` may it end early, and it ends with `y`."""

    def script(ctx, handle, x):
        y = out = x.sin()
        for step in steps:
            if step == "load":
                if (ret := handle.maybe_load_saved()) is not None:
                    return ret
            elif step == "load and go on":
                handle.maybe_load_saved()
            elif step == "inputs":
                handle.save_or_load_inputs(x)
            elif step == "save":
                handle.save_for_backward({"x": x, "y": y})
            elif step == "outputs":
                out = handle.record_outputs(y)
        return out

    return script


def raised_by(block, kind, **options):
    """Run forward and backward of a region around the block; return the error, which must be of this kind."""
    x = leaf(3)
    with pytest.raises(kind) as caught:
        checkpointed(block, region_name="block", **options)(x).sum().backward()
    assert x.grad is None
    assert caught.value.region == "block"
    assert str(caught.value).startswith("block::")
    assert not remat.is_recomputing()
    x = leaf(3)
    assert_same(torch.autograd.grad(chain(x).sum(), x), torch.autograd.grad(checkpointed(chain)(x).sum(), x))
    return caught.value


def with_replay(function):
    """Return a region's function that replays whole: what it runs stands between native ops that save."""

    def block(x):
        h = function(x.sin())
        return call("handle", Both, Trace(), "reader", RECOMPUTE, h)

    return block


BAD_STEPS = {
    "load twice": ("load", "load", "inputs", "save", "outputs"),
    "outputs twice": ("load", "inputs", "save", "outputs", "outputs"),
    "load forgotten": ("inputs", "save", "outputs"),
    "load forgotten before outputs": ("outputs",),
    "save after outputs": ("load", "inputs", "outputs", "save"),
    "outputs forgotten": ("load", "inputs", "save"),
    "outputs forgotten, nothing saved": ("load", "inputs"),
    "all forgotten but load": ("load",),
    "all forgotten": (),
}


@pairwise(name=BAD_STEPS, policy=POLICIES)
def test_method_called_twice_out_of_turn_or_not_at_all_is_an_error(name, policy):
    script = script_of(*BAD_STEPS[name])
    error = raised_by(with_replay(lambda x: Scripted.apply(x, script, "it", policy)), remat.UsageError)
    assert error.op == "it"
    assert "it" in str(error)


def test_method_called_after_saved_values_were_loaded_is_an_error():
    for steps in [("inputs", "save", "outputs"), ("save", "outputs"), ("outputs",)]:
        script = script_of("load and go on", *steps)
        error = raised_by(with_replay(lambda x, s=script: Scripted.apply(x, s, "it", SAVE)), remat.UsageError)
        assert error.op == "it", steps


def doing(save, record):
    """Return a script that saves one thing and records another."""

    def script(ctx, handle, x):
        if (ret := handle.maybe_load_saved()) is not None:
            return ret
        handle.save_for_backward(save(x))
        return handle.record_outputs(*record(x))

    return script


BAD_SAVES = {
    "dotted key": lambda x: {"a.b": x},
    "number as key": lambda x: {1: x},
    "number": lambda x: {"x": x, "n": 3},
    "list of tensors": lambda x: {"x": [x]},
    "tensor": lambda x: x,
}
BAD_OUTPUTS = {
    "number": lambda x: (x.sin(), 3),
    "tuple": lambda x: ((x.sin(), x.cos()),),
}


@pytest.mark.parametrize("policy", POLICIES, ids=policy_ids)
def test_saving_or_returning_what_is_no_tensor_is_an_error(policy):
    scripts = {name: doing(save, lambda x: (x.sin(),)) for name, save in BAD_SAVES.items()}
    scripts.update({f"output: {name}": doing(lambda x: {"x": x}, record) for name, record in BAD_OUTPUTS.items()})
    for name, script in scripts.items():
        error = raised_by(lambda x, s=script: Scripted.apply(x.sin(), s, "it", policy), remat.UsageError)
        assert error.op == "it", name
        assert not isinstance(error, remat.MismatchError), name


def test_wrong_name_or_policy_is_an_error():
    for name in ("", None, 3):
        raised_by(lambda x, name=name: Scripted.apply(x, right, name, SAVE), remat.UsageError)
        raised_by(lambda x, name=name: call("auto", Both, Trace(), name, SAVE, x), remat.UsageError)
    for policy in ("SAVE", None, True, TorchPolicy.MUST_SAVE):
        for function in (Scripted, Refuses):
            given = right if function is Scripted else [True]
            error = raised_by(lambda x, f=function, g=given, p=policy: f.apply(x, g, "it", p), remat.UsageError)
            assert error.op == "it"
            assert "CheckpointPolicy" in str(error)


@pairwise(first=POLICIES, second=POLICIES, style=STYLES, replay_only=[False, True], ids=str)
def test_name_used_twice_in_a_region_is_an_error_that_names_it(first, second, style, replay_only):
    def block(x):
        h = call(style, Both, Trace(), "twice", first, x)
        h = call(style, Both, Trace(), "other", SAVE, h)
        if remat.is_recomputing() or not replay_only:
            h = call(style, Both, Trace(), "twice", second, h)
        return call(style, Both, Trace(), "last", RECOMPUTE, h)

    error = raised_by(block, remat.RematError if replay_only else remat.UsageError)
    assert error.op == "twice"


def dirty(ctx, handle, x):
    if (ret := handle.maybe_load_saved()) is not None:
        return ret
    x = handle.save_or_load_inputs(x)
    x.mul_(2)
    ctx.mark_dirty(x)
    handle.save_for_backward({"x": x})
    return handle.record_outputs(x)


class Dirty(Function):
    """`dirty` in the form of `auto_forward`."""

    @staticmethod
    @remat.auto_forward("x")
    def forward(ctx, x, op_name, remat_policy):
        x.mul_(2)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    backward = Scripted.backward


def test_mark_dirty_is_an_error_under_save_and_on_a_saved_output_and_is_equal_under_recompute():
    for function in (lambda x: Scripted.apply(x * 1, dirty, "it", SAVE), lambda x: Dirty.apply(x * 1, "it", SAVE)):
        error = raised_by(with_replay(function), remat.UsageError)
        assert error.op == "it"
        assert "dirty" in str(error)
    kept = with_replay(lambda x: Scripted.apply(call("handle", Both, Trace(), "a", SAVE, x), dirty, "b", RECOMPUTE))
    assert raised_by(kept, remat.MutationError).op == "a"

    def block(x):
        return call("handle", Both, Trace(), "b", SAVE, Scripted.apply(x.sin() * 1, dirty, "a", RECOMPUTE))

    x = leaf(3)
    assert_same(*(torch.autograd.grad(wrap(block)(x).sum(), x) for wrap in (plain, checkpointed)))


class Refuses(Function):
    """Raises as long as the given list is empty."""

    @staticmethod
    @remat.auto_forward("x")
    def forward(ctx, x, allowed, op_name, remat_policy):
        if not allowed:
            raise ValueError("refused")
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None, None, None


def with_refusals(trace, allowed, style, policy):
    def function(x):
        for count in range(4):
            y = None
            with contextlib.suppress(ValueError):
                y = Refuses.apply(x, allowed, f"refuses.{count}", policy)
            x = call(style, Inner, trace, f"instead.{count}", RECOMPUTE, x) if y is None else y
            x = call(style, Both, trace, f"after.{count}", SAVE, x)
        return x

    return function


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("policy", POLICIES, ids=policy_ids)
def test_op_that_raised_raises_again_and_the_next_ones_are_saved(policy, style):
    traces = Trace(), Trace()
    x = leaf(3)
    expected = run_with_gradients(with_refusals(traces[0], [], style, policy), [x])
    with remat.trace():  # more that knows the ops
        found = run_with_gradients(checkpointed(with_refusals(traces[1], [], style, policy)), [x])
    assert_same(expected, found)
    assert {op: runs for op, runs in traces[1].runs.items() if "after" in op} == {f"after.{i}": 1 for i in range(4)}


@pytest.mark.parametrize("style", STYLES)
def test_op_inside_the_branch_that_handles_the_error_of_a_saved_one_is_a_mismatch(style):
    """As long as the error is there, so is the body, and what runs may be part of it."""

    def block(x):
        try:
            x = Refuses.apply(x, [], "refuses", SAVE)
        except ValueError:
            x = call(style, Inner, Trace(), "instead", RECOMPUTE, x)
        return x

    assert raised_by(with_replay(block), remat.MismatchError).op == "instead"


def test_op_that_raised_in_forward_and_returns_in_replay():
    allowed = []
    y = checkpointed(with_refusals(Trace(), allowed, "auto", SAVE), region_name="caught")(leaf(3))
    allowed.append(True)
    with pytest.raises(remat.MismatchError, match=r"refuses\.0.*raised an exception in forward but returned in replay"):
        y.sum().backward()


def test_saved_op_that_modifies_an_input_that_the_region_made_is_an_error_in_forward():
    adds = Kernel("adds", (), lambda ctx, x, t: (x + t.add_(1), {}), lambda ctx, saved, grad: (grad, None))
    x, outside = leaf(3), torch.zeros(3)
    checkpointed(lambda x: call("handle", adds, Trace(), "a", SAVE, x.sin(), outside))(x).sum().backward()
    assert_same([torch.ones(3)], [outside])
    with pytest.raises(remat.UsageError, match="a: this saved op modified an input in place"):
        checkpointed(lambda x: call("handle", adds, Trace(), "a", SAVE, x, outside * 1))(x)


@pytest.mark.parametrize("only", ["forward", "replay"])
def test_inner_region_that_only_one_phase_runs_does_not_give_another_one_its_input(only):
    def block(x):
        one = call("handle", Both, Trace(), "one", SAVE, x)
        if remat.is_recomputing() == (only == "replay"):
            checkpointed(torch.sin)(x.detach().requires_grad_())
        one = checkpointed(lambda h: call("handle", Inner, Trace(), "reader", RECOMPUTE, h))(one)
        two = call("handle", Both, Trace(), "two", SAVE, x.cos())
        return one, checkpointed(lambda h: call("handle", Inner, Trace(), "reader", RECOMPUTE, h))(two)

    with pytest.raises(remat.RematError):
        sum(y.sum() for y in checkpointed(block)(leaf(3))).backward()


def test_inner_region_after_the_error_of_a_saved_op_has_its_input():
    def block(x):
        try:
            with torch.enable_grad():
                x = Refuses.apply(x, [], "refuses", SAVE)
        except ValueError:
            x = checkpointed(torch.sin)(x)
        for name in "ab":
            x = checkpointed(torch.exp)(call("handle", Both, Trace(), name, SAVE, x))
        return x

    x = leaf(3)
    assert_same(*(torch.autograd.grad(wrap(block)(x).sum(), x) for wrap in (plain, checkpointed)))
