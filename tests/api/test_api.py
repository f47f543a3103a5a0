"""The form of `checkpoint`: three calls, names kept, misuse that shows the right form."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
import re

import pytest
import torch
from torch import nn

import torch_remat as remat
from tests.helpers import assert_same, chain, checkpointed, leaf

FORM = r"checkpoint\([^)]*\)\([a-z]+\)\("


def test_wrong_first_call_is_a_type_error_that_shows_the_right_form():
    for argument in (chain, nn.Linear(2, 2), 3, None):
        with pytest.raises(remat.UsageError, match=FORM):
            remat.checkpoint(argument)
    for option in ("use_reentrant", "fn", "early_stopp"):
        with pytest.raises(TypeError, match=option) as caught:
            remat.checkpoint(**{option: False})
        assert isinstance(caught.value, remat.UsageError)
        assert re.search(FORM, str(caught.value))
    for wrong in (lambda: remat.checkpoint(chain, leaf(3)), lambda: remat.checkpoint(use_reentrant=False)):
        with pytest.raises(remat.UsageError, match=r"remat\.drop_in\(\*\*options\) returns"):
            wrong()
    with pytest.raises(remat.UsageError, match="Leave it out"):
        remat.checkpoint(use_reentrant=False)
    with pytest.raises(TypeError):
        remat.checkpoint()(leaf(3))(leaf(3))


TAKES_OPTIONS = {
    "checkpoint": remat.checkpoint,
    "checkpoint_sequential": lambda **options: remat.checkpoint_sequential([chain], 1, leaf(3), **options),
    "checkpoint_modules": lambda **options: remat.checkpoint_modules(nn.Sequential(nn.Tanh()), "0", **options),
    "drop_in": remat.drop_in,
    "enable_gradient_checkpointing": lambda **options: remat.enable_gradient_checkpointing(nn.Tanh(), **options),
}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"polcy": []}, "() has no option 'polcy'.\nDid you mean 'policy'? The options are "),
        ({"offloader": "/path"}, "(offloader='/path') is not possible.\noffloader is an object with"),
    ],
)
@pytest.mark.parametrize("name", TAKES_OPTIONS)
def test_wrong_option_is_an_error_in_the_form_of_the_function_that_was_called(name, options, says):
    with pytest.raises(remat.UsageError) as caught:
        TAKES_OPTIONS[name](**options)
    text = str(caught.value)
    assert text.startswith(name + says)
    assert f"The form is {name}(" in text
    assert "polcy" not in options or "determinism_check, early_stop, debug" in text


def test_op_without_a_name_is_an_error_that_gives_one():
    with pytest.raises(remat.UsageError, match=r"remat\.op\(\) got no name\.\nremat\.op\(function, 'attention'\)"):
        remat.op(torch.sin)


def test_name_of_a_policy_is_found_where_it_is():
    with pytest.raises(AttributeError, match=r"'save_attention'; it is torch_remat\.policies\.save_attention"):
        remat.save_attention  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute 'chekpoint'$"):
        remat.chekpoint  # noqa: B018


def test_offloaders_show_what_they_were_made_with(tmp_path):
    assert repr(remat.CpuOffloader(max_bytes=8)) == "CpuOffloader(max_bytes=8, min_bytes=65536)"
    assert repr(remat.DiskOffloader(tmp_path)) == f"DiskOffloader({str(tmp_path)!r}, max_bytes=None, min_bytes=65536)"


def test_type_error_of_ones_own_stays_what_it_is():
    def broken():
        raise TypeError("of the user")

    with pytest.raises(TypeError, match=r"^of the user$"):
        remat.checkpoint(context_fn=broken)(chain)(leaf(3))


VALUES = {
    "policy": lambda t: remat.checkpoint(policy=t),
    "determinism_check": lambda t: remat.checkpoint(determinism_check=t),
    "policy of a call": lambda t: remat.op(chain, "x", policy=t),
    "name": lambda t: remat.op(chain, t),
    "scope": lambda t: remat.name_scope(t).__enter__(),
    "patterns": lambda t: remat.checkpoint_modules(nn.Sequential(nn.Tanh()), [t]),
    "names": lambda t: remat.save_names("a", t),
    "offloader": lambda t: remat.checkpoint(offloader=t),
    "budget": lambda t: remat.budget(t),
    "device share": lambda t: remat.budget(device_share=t),
    "segments": lambda t: remat.checkpoint_sequential([chain], t, leaf(3)),
}


@pytest.mark.parametrize("place", VALUES)
def test_error_shows_no_values_of_a_tensor(place):
    for given in (torch.full((3, 2), 7.25), [torch.full((3, 2), 7.25)]):
        with pytest.raises(remat.UsageError) as caught:
            VALUES[place](given)
        assert "7.25" not in str(caught.value), str(caught.value)


def test_public_signature_is_the_documented_one():
    parameters = inspect.signature(remat.checkpoint).parameters
    named = {name: p.default for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert named == {
        "region_name": None,
        "preserve_rng_state": True,
        "determinism_check": "default",
        "early_stop": True,
        "debug": False,
        "context_fn": None,
        "policy": None,
        "allow_cache_entry_mutation": False,
        "offloader": None,
        "offload_inputs": False,
    }


@remat.checkpoint(region_name="module level")
def decorated(x):
    """Do it."""
    return x.sin().exp()


def test_decorated_function_keeps_its_name_and_docstring_and_is_pickled_by_its_name():
    assert (decorated.__name__, decorated.__qualname__, decorated.__module__) == ("decorated", "decorated", __name__)
    assert decorated.__doc__ == "Do it."
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    assert "decorated" in repr(decorated)


@pytest.mark.parametrize("options", [{}, {"policy": [torch.ops.aten.sin.default], "region_name": "block"}])
@pytest.mark.parametrize("again", [lambda f: pickle.loads(pickle.dumps(f)), copy.deepcopy], ids=["pickle", "deepcopy"])
def test_checkpointed_function_is_pickled_and_copied_with_what_it_runs(again, options):
    model = nn.Module()
    model.layer = nn.Linear(3, 3)
    model.region = remat.checkpoint(**options)(model.layer)
    made = again(model)
    assert made.region.__wrapped__ is made.layer
    assert made.layer is not model.layer
    made.region(leaf(2, 3)).sin().sum().backward()
    assert made.layer.weight.grad is not None
    assert model.layer.weight.grad is None


def test_decorated_method_gets_its_object():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        @remat.checkpoint(region_name="method")
        def forward(self, x, *, scale=1.0):
            """Scale, then bend."""
            return (x * self.w * scale).sin().exp()

    model, x = Model(), leaf(3)
    model(x, scale=2.0).sum().backward()
    expected = torch.autograd.grad((x * model.w * 2.0).sin().exp().sum(), [x, model.w])
    assert_same(expected, [x.grad, model.w.grad])
    assert Model.forward.__name__ == "forward"


class Empty(nn.ModuleList):
    def forward(self, x):
        return x.sin().exp()


@pytest.mark.parametrize("make", [Empty, lambda: torch.compile(Empty(), backend="eager")])
def test_module_that_is_false_or_has_no_truth_can_be_a_region(make):
    x = leaf(3)
    expected = torch.autograd.grad(x.sin().exp().sum(), x)
    assert_same(expected, torch.autograd.grad(remat.checkpoint()(make())(x).sum(), x))


@pytest.mark.parametrize("early_stop", [True, False])
def test_context_fn_gives_a_context_to_each_phase(early_stop):
    log = []

    @contextlib.contextmanager
    def noted(phase):
        log.append(f"enter {phase}")
        try:
            yield
        finally:
            log.append(f"exit {phase}")

    def block(x):
        log.append("run")
        return x.sin().exp()

    y = checkpointed(block, context_fn=lambda: (noted("forward"), noted("replay")), early_stop=early_stop)(leaf(3))
    assert log == ["enter forward", "run", "exit forward"]
    y.sum().backward()
    assert log[3:] == ["enter replay", "run", "exit replay"]


def test_errors_form_one_tree_with_fields():
    kinds = [remat.UsageError, remat.MismatchError, remat.MutationError, remat.ReleasedError]
    assert all(issubclass(kind, remat.RematError) for kind in kinds)
    assert issubclass(remat.RematError, RuntimeError)
    assert issubclass(remat.UsageError, TypeError)
    error = remat.RematError("it broke", region="block", op="mm", tensor="x", remedy="Mend it.")
    assert (error.region, error.op, error.tensor) == ("block", "mm", "x")
    assert str(error).startswith("block::mm.x: it broke")
    assert "Mend it." in str(error)


@pytest.mark.parametrize("again", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
@pytest.mark.parametrize(
    "error",
    [
        remat.MismatchError("other", region="r", op="o", tensor="t", remedy="Look."),
        remat.PolicyError("none", remedy="Look."),
        remat.OffloadError("lost", region="r", op="o", tensor="t", file="f", remedy="Look."),
        remat.PlaceholderError(region="r", op="o", output="out", consumer="data_ptr", line="model.py:3"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_can_be_pickled_and_copied(error, again):
    other = again(error)
    assert type(other) is type(error)
    assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))
