"""What `checkpoint` returns and what its errors are: names kept, methods, copies, contexts, one tree of errors."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

import torch_remat as remat
from tests.helpers import assert_same, chain, checkpointed, leaf, no_other_regions


def test_offloaders_show_what_they_were_made_with(tmp_path):
    assert repr(remat.CpuOffloader(max_bytes=8)) == "CpuOffloader(max_bytes=8, min_bytes=65536)"
    assert repr(remat.DiskOffloader(tmp_path)) == f"DiskOffloader({str(tmp_path)!r}, max_bytes=None, min_bytes=65536)"


def test_type_error_of_ones_own_stays_what_it_is():
    def broken():
        raise TypeError("of the user")

    with pytest.raises(TypeError, match=r"^of the user$"):
        remat.checkpoint(context_fn=broken)(chain)(leaf(3))


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


DECORATORS = {
    "checkpoint": remat.checkpoint(region_name="method"),
    "drop_in": remat.drop_in()(),
    "drop_in with options": remat.drop_in()(use_reentrant=False, debug=True),
    "op": remat.op(name="method"),
}


@pytest.mark.parametrize("how", DECORATORS)
def test_decorated_method_gets_its_object_and_its_arguments(how):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        @DECORATORS[how]
        def run(self, x, *, debug):  # as an option of torch's checkpoint is named
            """Scale, then bend."""
            return (x * self.w * debug).sin().exp()

    model, x, scale = Model(), leaf(3), torch.tensor(2.0)
    expected = torch.autograd.grad((x * model.w * 2.0).sin().exp().sum(), [x, model.w])
    y = model.run(x, debug=scale)
    with no_other_regions():
        regions = remat.memory_report(model.run(x, debug=scale)).regions
    assert_same(expected, torch.autograd.grad(y.sum(), [x, model.w]))
    assert [len(region.tensors) for region in regions] == ([] if how == "op" else [2])
    assert (Model.run.__name__, Model.run.__doc__) == ("run", "Scale, then bend.")


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
