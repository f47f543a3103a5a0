"""`checkpoint_modules`: which modules become regions, and that nothing else of the model changes."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import torch_remat as remat
from tests.helpers import Attention, Mlp, assert_same, collector_off, no_other_regions, train_step
from tests.offloaders import OFFLOAD, Counting
from torch_remat.errors import UsageError


class Model(nn.Module):
    """Blocks of attention and Mlp with dropout, in a list, and a head."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Attention(), Mlp()) for _ in range(depth))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@pytest.fixture
def model():
    return Model()


INPUT = torch.linspace(-1, 1, 64).reshape(2, 4, 8)


def names_of_regions(model):
    with no_other_regions():
        return [region.name for region in remat.memory_report(model(INPUT)).regions]


def snapshot(model):
    """Return all attributes of all modules, by identity."""
    return [{key: id(value) for key, value in vars(module).items()} for module in model.modules()]


def test_gradients_are_those_of_the_plain_model_and_regions_keep_their_inputs_only(model):
    expected = train_step(model, INPUT)
    for options in ({}, {"policy": remat.policies.save_matmuls}, {"keep_last": 1}):
        with remat.checkpoint_modules(model, "layers.*", **options):
            for _ in range(2):
                assert_same(expected, train_step(model, INPUT))
    remat.checkpoint_modules(model, "layers.*")
    with no_other_regions():
        report = remat.memory_report(model.eval()(INPUT))
    assert [(region.name, region.bytes) for region in report.regions] == [
        (f"layers.{index}", INPUT.nbytes) for index in range(3)
    ]


OF_MLP_AND_NORM = [*(f"layers.{at}.{part}" for at in range(3) for part in ("0.norm", "1")), "norm"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ("layers.[02]", ["layers.0", "layers.2"]),
        (["layers.?", "head"], ["layers.0", "layers.1", "layers.2", "head"]),
        ({"layers.*": {"keep_last": 1}, "layers.2.1": {}}, ["layers.0", "layers.1", "layers.2.1"]),
        ("*", ["layers.0", "layers.1", "layers.2", "norm", "head"]),  # neither the root nor the list of layers
        ("*.qkv", ["layers.0.0.qkv", "layers.1.0.qkv", "layers.2.0.qkv"]),
        (nn.Sequential, ["layers.0", "layers.1", "layers.2"]),
        ((Mlp, nn.LayerNorm), OF_MLP_AND_NORM),
        ([Mlp, "layers.1.0"], ["layers.0.1", "layers.1.0", "layers.1.1", "layers.2.1"]),
        ({Mlp: {"keep_last": 1}, "head": {}}, ["layers.0.1", "layers.1.1", "head"]),
    ],
    ids=str,
)
def test_patterns_and_classes_choose_the_outermost_of_what_they_match(model, patterns, expected):
    remat.checkpoint_modules(model, patterns)
    assert names_of_regions(model) == expected


def test_keep_last_leaves_the_last_matches_of_each_pattern_alone(model):
    with remat.checkpoint_modules(model, ["layers.*.0", "layers.*.1"], keep_last=2):
        assert names_of_regions(model) == ["layers.0.0", "layers.0.1"]
    handle = remat.checkpoint_modules(model, "layers.*", keep_last=5)
    assert names_of_regions(model) == []
    assert str(handle).startswith("0 regions in Model")
    chain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))  # in the order of the model
    assert "unchanged: 10\n    unchanged: 11" in str(remat.checkpoint_modules(chain, "*", keep_last=2))


def test_options_of_a_pattern_come_before_those_of_the_call(model):
    own = {"policy": remat.save_names("1.up.*"), "keep_last": 0}
    handle = remat.checkpoint_modules(model, {"layers.0": own, "layers.[12]": {}}, early_stop=False, keep_last=1)
    assert str(handle) == (
        "2 regions in Model\n"
        "'layers.0': early_stop=False, policy=save_names('1.up.*')\n"
        "    layers.0\n"
        "'layers.[12]': early_stop=False\n"
        "    layers.1\n"
        "    unchanged: layers.2"
    )
    assert "\nMlp: " in str(remat.checkpoint_modules(Model(), [Mlp, "layers.1.0"]))
    with no_other_regions():
        report = remat.memory_report(model.eval()(INPUT))
    assert [region.bytes for region in report.regions] == [3 * INPUT.nbytes, INPUT.nbytes]


def test_hooks_of_the_module_run_once_and_those_of_its_children_again(model):
    layer, calls = model.layers[1], []
    layer.register_forward_pre_hook(lambda module, args: calls.append("before layer"))
    layer.register_forward_hook(lambda module, args, output: calls.append("after layer"))
    layer.register_full_backward_hook(lambda module, into, out: calls.append("backward of layer"))
    layer[1].register_forward_hook(lambda module, args, output: calls.append("child"))
    expected = train_step(model, INPUT)
    calls.clear()
    remat.checkpoint_modules(model, "layers.*", early_stop=False)
    assert_same(expected, train_step(model, INPUT))
    assert calls == ["before layer", "child", "after layer", "child", "backward of layer"]


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


NAMES, DICT = remat.policies.save_matmuls | remat.save_names("1.*"), {nn.functional.linear: OFFLOAD}
OPS = {torch.ops.aten.addmm.default: OFFLOAD, torch.ops.aten.gelu: remat.CheckpointPolicy.SAVE}


@pytest.mark.parametrize(
    ("copied", "policy"),
    [(copy.deepcopy, NAMES), (saved_and_loaded, NAMES), (copy.deepcopy, OPS), (saved_and_loaded, DICT)],
)
def test_copies_have_regions_of_their_own(copied, policy):
    model = Model()
    expected = train_step(model, INPUT)
    handle = remat.checkpoint_modules(model, "layers.*", keep_last=1, policy=policy)
    with collector_off(), remat.offload_to(Counting()):
        duplicate = copied(model)
        handle.remove()
        del model, handle
        assert names_of_regions(duplicate) == ["layers.0", "layers.1"]
        assert_same(expected, train_step(duplicate, INPUT))
        assert (remat.memory_report(duplicate(INPUT)).offloaded_bytes > 0) == isinstance(policy, dict)
        again = copied(duplicate)  # after a step
        assert names_of_regions(again) == ["layers.0", "layers.1"]
        assert_same(expected, train_step(again, INPUT))
        layer = copy.deepcopy(duplicate.layers[1])
        assert names_of_regions(layer) == ["layers.1"]
        layer(INPUT).sum().backward()
        modules = [weakref.ref(module) for module in duplicate.modules()]
        del duplicate, layer
        assert [module() for module in modules] == [None] * len(modules)


def test_a_forward_without_its_module_says_so(model):
    remat.checkpoint_modules(model, "layers.*")
    forward = copy.deepcopy(model.layers[0].forward)
    del model
    with pytest.raises(UsageError, match="the module that this function belongs to is gone"):
        forward(INPUT)


def test_regions_keep_what_a_model_consists_of_and_removing_them_makes_it_what_it_was(model):
    def parts():
        return list(model.state_dict()), [*model.named_modules()], [*map(type, model.modules())]

    before, parts_before = snapshot(model), parts()
    with remat.checkpoint_modules(model, ["layers.*", "head"]) as handle:
        assert repr(handle) == "<4 regions in Model>"
        assert snapshot(model) != before
        assert parts() == parts_before
        model.load_state_dict(Model().state_dict())
    assert snapshot(model) == before
    handle.remove()
    assert snapshot(model) == before


def test_a_forward_that_was_set_before_or_later_runs_and_stays(model):
    calls, layer, later = [], model.layers[0], model.layers[1]
    own = type(layer).forward

    def forward(x):
        calls.append(remat.is_recomputing())
        return own(layer, x)

    layer.forward = forward
    expected = train_step(model, INPUT)
    calls.clear()
    handle = remat.checkpoint_modules(model, "layers.[01]", early_stop=False)
    outer = functools.update_wrapper(functools.partial(lambda inner, x: inner(x), later.forward), later.forward)
    later.forward = outer
    assert_same(expected, train_step(model, INPUT))
    assert calls == [False, True]
    assert names_of_regions(model) == ["layers.0", "layers.1"]
    handle.remove()
    assert layer.forward is forward
    assert later.forward is outer
    assert names_of_regions(model) == []


def test_signature_of_a_forward_is_that_of_the_class_and_a_lazy_module_gets_its_class():
    layer = nn.TransformerEncoderLayer(8, 2)
    expected = inspect.signature(layer.forward)
    remat.checkpoint_modules(nn.Sequential(layer), "0")
    assert inspect.signature(layer.forward) == expected
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8))
    remat.checkpoint_modules(model, "0")
    assert names_of_regions(model) == ["0"]
    assert type(model[0]) is nn.Linear


def test_a_module_under_two_names_is_one_region():
    shared = Mlp()
    model = nn.Sequential(shared, nn.Sequential(shared))
    handle = remat.checkpoint_modules(model, "1.0")
    assert names_of_regions(model) == ["1.0", "1.0"]
    handle.remove()
    assert "1 region in" in str(remat.checkpoint_modules(model, ["0"]))


ERRORS = {
    "no such name": (
        "layer.*",
        "the pattern 'layer.*' matches no module with a forward in this Model.\n"
        "Did you mean 'layers.*'? Near names: layers.0, layers.1, layers.2",
    ),
    "no such class": (
        nn.Conv2d,
        "the pattern Conv2d matches no module with a forward in this Model.\nClasses in it: Seq",
    ),
    "a class of others": (dict, "cannot use the pattern <class 'dict'>"),
    "a class and a name inside": ([Attention, "layers.?"], "the patterns 'layers.?' and Attention meet: layers.0.0"),
    "a container": ("layers", "'layers' matches no module with a forward"),
    "the root": ("", "cannot use the pattern ''"),
    "inside one another": (["layers.*", "layers.0.1"], "'layers.0.1' meet: layers.0.1 is inside layers.0"),
    "the same": (["layers.?", "layers.*"], "meet: layers.0 is matched by both"),
    "no pattern": ([], "got no pattern"),
    "no string": ([3], "cannot use the pattern 3"),
    "nothing": (None, "cannot use None as patterns"),
    "options that are none": ({"layers.*": 1}, "cannot use 1 as the options of 'layers.*'"),
    "unknown option": ({"layers.*": {"polcy": 1}}, "no option 'polcy'"),
    "a name": ({"layers.*": {"region_name": "x"}}, "no option 'region_name'"),
    "negative keep_last": ({"layers.*": {"keep_last": -1}}, "keep_last=-1"),
    "keep_last that is no number": ({"layers.*": {"keep_last": True}}, "keep_last=True"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_leave_the_model_as_it_was(model, case):
    patterns, text = ERRORS[case]
    before = snapshot(model)
    with pytest.raises(UsageError) as caught:
        remat.checkpoint_modules(model, patterns)
    assert text in str(caught.value)
    assert snapshot(model) == before


def test_regions_of_an_earlier_call_are_an_error(model):
    remat.checkpoint_modules(model, "layers.0")
    before = snapshot(model)
    for patterns in ("layers.*", "layers.0.1", "layers.0"):  # around, inside, the same
        with pytest.raises(UsageError, match="of an earlier checkpoint_modules"):
            remat.checkpoint_modules(model, patterns)
        assert snapshot(model) == before
    with pytest.raises(UsageError, match=r"1 meets the region layers\.0 of an earlier"):
        remat.checkpoint_modules(model.layers[0], "1")
    remat.checkpoint_modules(model, "layers.[12]")


def test_a_module_that_takes_no_attribute_leaves_the_others_as_they_were(model):
    class Fixed(nn.Linear):
        def __setattr__(self, name, value):
            if name == "forward":
                raise AttributeError("this module is as it is")
            super().__setattr__(name, value)

    model.head = Fixed(8, 2)
    before = snapshot(model)
    with pytest.raises(AttributeError, match="as it is"):
        remat.checkpoint_modules(model, ["layers.*", "head"])
    assert snapshot(model) == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch")
@pytest.mark.parametrize("how", ["torch.compile", "compile", "regions of the compiled", "a layer compiled before"])
def test_compiled_before_or_after_is_one_graph_with_regions(model, how):
    torch._dynamo.reset()
    model.eval()
    expected = train_step(model, INPUT)
    backend = CompileCounterWithBackend("eager")
    compiled = model
    if how == "regions of the compiled":
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        assert "\n    layers.0\n" in str(remat.checkpoint_modules(compiled, "layers.*"))
    elif how == "a layer compiled before":
        model.layers[0] = torch.compile(model.layers[0], backend=backend, fullgraph=True)
        remat.checkpoint_modules(model, "layers.0")
    else:
        remat.checkpoint_modules(model, "layers.*")
        if how == "torch.compile":
            compiled = torch.compile(model, backend=backend, fullgraph=True)
        else:
            model.compile(backend=backend, fullgraph=True)
    assert_same(expected, train_step(compiled, INPUT))
    assert backend.frame_count == 1
    checkpoints = ["checkpoint" in str(node.target) for graph in backend.graphs for node in graph.graph.nodes]
    assert sum(checkpoints) == (1 if "layer" in how else 3)
