"""Models of other libraries, with layers that are regions in each of three ways, next to torch's own checkpoint."""

from __future__ import annotations

import copy
import fnmatch
import functools
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torch_remat as remat
from tests.helpers import assert_same, collector_off, no_other_regions
from tests.integrations.models import FAMILIES, VOCABULARY, build, train_step
from torch_remat.errors import PolicyError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def llama():
    return build("Llama")


def disable(model):
    newer = getattr(model, "activation_checkpointing_disable", None)
    return model.gradient_checkpointing_disable() if newer is None else newer()


def regions_of(model, inputs):
    with no_other_regions():
        return remat.memory_report(model(**inputs)[0]).regions


def layers_of(model, name):
    """Return the names of the layers of a model, in the order in which its stacks run."""
    found = []
    for pattern in FAMILIES[name].layers:
        for path, _ in model.named_modules():
            if fnmatch.fnmatchcase(path, pattern) and not any(path.startswith(f"{outer}.") for outer in found):
                found.append(path)
    return found


# The ways: each lets layers be regions, and returns what undoes it. The last works for any model.


def by_torch(model, name, options):
    model._set_gradient_checkpointing(True, functools.partial(torch_checkpoint, use_reentrant=False))
    return functools.partial(disable, model)


def by_drop_in(model, name, options):
    model._set_gradient_checkpointing(True, remat.drop_in(**options))
    return functools.partial(disable, model)


def by_model(model, name, options):
    remat.enable_gradient_checkpointing(model, **options)
    return functools.partial(disable, model)


def by_pattern(model, name, options):
    return remat.checkpoint_modules(model, FAMILIES[name].layers, **options).remove


WAYS = (by_drop_in, by_model, by_pattern)
POLICIES = {name: getattr(remat.policies, name) for name in remat.policies.__all__ if name != "memory_budget"}
POLICIES["memory_budget"] = remat.policies.memory_budget(0.5)
SAMPLES = [(False, None), (True, "save_matmuls"), (False, "never_replay_effects")]  # by default, one a family
CASES = [
    pytest.param(
        name,
        autocast,
        policy,
        id=f"{name}-{'bf16' if autocast else 'fp32'}-{policy or 'plain'}",
        marks=() if (autocast, policy) == SAMPLES[index % 3] else pytest.mark.slow,
    )
    for index, name in enumerate(FAMILIES)
    for autocast in (False, True)
    for policy in (None, *POLICIES)
]


def steps_of(model, inputs, autocast):
    """Return a function that makes a step from the same buffers each time: loss, gradients and buffers after it."""
    before = [buffer.clone() for buffer in model.buffers()]

    def step():
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
        return train_step(model, inputs, autocast), [buffer.clone() for buffer in model.buffers()]

    return step


@pytest.mark.parametrize(("name", "autocast", "policy"), CASES)
def test_gradients_are_those_of_torch_and_buffers_change_once(name, autocast, policy):
    model, inputs = build(name)
    options = {} if policy is None else {"policy": POLICIES[policy]}
    step = steps_of(model, inputs, autocast)
    expected, buffers = step()
    layers, own = layers_of(model, name), FAMILIES[name].own
    assert len(layers) >= (1 if name == "Albert" else 2)
    for way in [by_torch, *WAYS] if own else [by_pattern]:
        undo = way(model, name, options)
        actual, after = step()
        assert_same(expected, actual, way.__name__)
        if way is not by_torch:  # which changes running statistics twice
            assert_same(buffers, after, f"buffers, {way.__name__}")
            names = [region.name for region in regions_of(model, inputs)]
            assert len(names) >= len(layers)
            assert way is by_drop_in or list(dict.fromkeys(one for one in names if one in layers)) == layers
        undo()
    assert not regions_of(model, inputs)


@pytest.mark.parametrize("way", WAYS)
def test_names_begin_below_the_layer(llama, way):
    model, inputs = llama
    way(model, "Llama", {"policy": remat.save_names("mlp.up_proj.*", "self_attn.q_proj.mm_0_0")})
    for region in regions_of(model, inputs):
        saved = {tensor.label for tensor in region.tensors if tensor.policy == "save"}
        assert saved == {"self_attn.q_proj.mm_0_0", "mlp.up_proj.mm_0_0"}


def test_layers_are_regions_in_training_only_and_a_model_in_eval_mode_is_told_so_once(llama):
    model, inputs = llama
    with pytest.warns(remat.RematWarning, match=r"is in eval mode.*call model\.train\(\)") as caught:
        remat.enable_gradient_checkpointing(model.eval())
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        remat.enable_gradient_checkpointing(model)
    assert not regions_of(model, inputs)
    assert len(regions_of(model.train(), inputs)) == 2


def test_the_model_itself_undoes_it(llama):
    model, inputs = llama
    remat.enable_gradient_checkpointing(model, policy=remat.policies.save_matmuls)
    remat.enable_gradient_checkpointing(model)  # the second call changes the options
    assert not any(tensor.policy for region in regions_of(model, inputs) for tensor in region.tensors)
    for undo in (disable, lambda model: by_torch(model, "Llama", {})):
        undo(model)
        assert not regions_of(model, inputs)


def enable_own(model):
    newer = getattr(model, "activation_checkpointing_enable", None)
    return model.gradient_checkpointing_enable() if newer is None else newer()


@pytest.mark.parametrize("is_off_before", [False, True])
def test_regions_stay_where_the_model_is_told_to_use_torchs_checkpoint_and_it_says_so_once(llama, is_off_before):
    model, inputs = llama
    expected = train_step(model, inputs)
    remat.enable_gradient_checkpointing(model, policy=remat.policies.save_matmuls)
    kept = regions_of(model, inputs)
    for copied in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        if is_off_before:  # as TRL does around what it generates
            disable(copied)
            assert not regions_of(copied, inputs)
        with pytest.warns(remat.RematWarning, match=r"gradient_checkpointing=False.*TRL.*remove\(\)") as caught:
            _ = [enable_own(copied) for _ in range(2)]
        assert len([one for one in caught if one.category is remat.RematWarning]) == 1
        assert regions_of(copied, inputs) == kept
        assert_same(expected, train_step(copied, inputs))
    with collector_off():
        parameters = [weakref.ref(parameter) for parameter in copied.layers.parameters()]
        del copied
        assert not any(parameter() is not None for parameter in parameters)


def test_a_removed_handle_gives_the_model_its_own_checkpointing_back(llama):
    model, inputs = llama
    handle = remat.enable_gradient_checkpointing(model)
    assert "LlamaModel" in repr(handle)
    for _ in range(2):
        handle.remove()
    assert not regions_of(model, inputs)
    enable_own(model)
    report = remat.memory_report(model(**inputs)[0])
    assert not report.regions
    assert "torch.utils.checkpoint" in {node.node for node in report.outside}
    handle = remat.enable_gradient_checkpointing(Older(the_call))
    handle.remove()  # of a model that is gone


class Adapter(nn.Module):
    """A model around another, whose methods it has, as those of peft."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model

    def forward(self, **inputs):
        return self.base_model(**inputs)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)


@pytest.mark.parametrize("is_around", [False, True])
def test_regions_stay_in_a_model_that_an_adapter_is_around(llama, is_around):
    model, inputs = llama
    adapted = Adapter(model)
    remat.enable_gradient_checkpointing(adapted if is_around else model)
    kept = [region.name for region in regions_of(adapted, inputs)]
    with pytest.warns(remat.RematWarning, match="stay"):
        enable_own(adapted)
    assert [region.name for region in regions_of(adapted, inputs)] == kept
    assert len(kept) == 2


def test_wrong_options_leave_the_model_as_it_was(llama):
    model, _ = llama
    before = [dict(vars(module)) for module in model.modules()]
    for options, error in [
        ({"polcy": 1}, UsageError),
        ({"region_name": "x"}, UsageError),
        ({"policy": 3}, PolicyError),
    ]:
        with pytest.raises(error):
            remat.enable_gradient_checkpointing(model, **options)
    assert [vars(module) for module in model.modules()] == before


class Layer(nn.Linear):
    """A layer that takes a keyword argument."""

    def forward(self, x, factor=1.0):
        return super().forward(x) * factor


class Encoder(nn.Module):
    """Runs its layers as models of `transformers` did before 4.53, and those of `diffusers` do."""

    gradient_checkpointing = False

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.layer = nn.ModuleList(Layer(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layer:
            if self.gradient_checkpointing and self.training:
                x = self._gradient_checkpointing_func(self.how(layer), x, 2.0)
            else:
                x = layer(x, 2.0)
        return (x.tanh(),)


class Outer(nn.Module):
    """A model that has gradient checkpointing in its inner module."""

    def __init__(self, how):
        super().__init__()
        self.encoder = Encoder(how)

    def forward(self, x):
        return self.encoder(x)

    def gradient_checkpointing_disable(self):
        self.encoder.gradient_checkpointing = False


class Older(Outer):
    """A model whose method takes the function."""

    def _set_gradient_checkpointing(self, enable=True, gradient_checkpointing_func=None):
        self.encoder._gradient_checkpointing_func = gradient_checkpointing_func
        self.encoder.gradient_checkpointing = enable


class Foreign(Outer):
    """A model that has the public method alone."""

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs=None):
        self.encoder.gradient_checkpointing = True
        if self.encoder.how is not None:
            self.encoder._gradient_checkpointing_func = torch_checkpoint


class Dropping(Outer):
    """A model that drops the function."""

    def _set_gradient_checkpointing(self, enable=True, gradient_checkpointing_func=None):
        self.encoder.gradient_checkpointing = enable


def the_call(layer):
    return layer.__call__


def itself(layer):
    return layer


@pytest.mark.parametrize("kind", [Older, Foreign])
@pytest.mark.parametrize("how", [the_call, itself])
def test_layers_that_their_parent_checkpoints_have_their_names(kind, how):
    model, inputs = kind(how), {"x": torch.ones(2, 8)}
    expected = train_step(model, inputs)
    remat.enable_gradient_checkpointing(model, policy=remat.save_names("addmm_0_0"))
    for copied in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(expected, train_step(copied, inputs))
        names = [region.name for region in regions_of(copied, inputs)]
        assert names == ["encoder.layer.0", "encoder.layer.1", "encoder.layer.2"]
    model.gradient_checkpointing_disable()
    assert not regions_of(model, inputs)


def test_modules_are_kept_that_only_some_layers_have():
    """Jamba's first layer has no attention, but a state space."""
    model, inputs = build("Jamba")
    expected = train_step(model, inputs)
    for _ in range(2):
        handle = remat.enable_gradient_checkpointing(model, policy=remat.save_modules("self_attn"))
        assert_same(expected, train_step(model, inputs))
        assert {op.name for region in regions_of(model, inputs) for op in region.ops} == {"self_attn"}
        handle.remove()
    assert_same(expected, train_step(model, inputs))


def test_models_without_gradient_checkpointing_are_an_error_and_as_before(llama):
    llama[0].supports_gradient_checkpointing = False
    outers = Foreign(None), Dropping(None)
    for model in (nn.Linear(8, 8), *outers, llama[0]):
        with pytest.raises(UsageError, match=rf"{type(model).__name__} has no gradient checkpointing"):
            remat.enable_gradient_checkpointing(model)
    assert not any(model.encoder.gradient_checkpointing for model in outers)


def test_trainer_trains_the_same(tmp_path):
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")

    def trained(prepare, **switches):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**FAMILIES["Llama"].sizes))
        tokens = [torch.randint(VOCABULARY, (6,)) for _ in range(8)]
        prepare(model)
        with remat.trace() as trace:
            options = {"per_device_train_batch_size": 2, "max_steps": 2, "report_to": [], "save_strategy": "no"}
            quiet = {"use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"}
            settings = transformers.TrainingArguments(output_dir=str(tmp_path), **options, **quiet, **switches)
            data = [{"input_ids": row, "labels": row} for row in tokens]
            transformers.Trainer(model=model, args=settings, train_dataset=data).train()
        return list(model.parameters()), {span.region for span in trace.spans}

    expected, none = trained(lambda model: None)
    actual, regions = trained(remat.enable_gradient_checkpointing)
    assert_same(expected, actual)
    assert (none, regions) == (set(), {"model.layers.0", "model.layers.1"})
    with pytest.warns(remat.RematWarning, match="gradient_checkpointing=False"):
        actual, of_both = trained(remat.enable_gradient_checkpointing, gradient_checkpointing=True)
    assert_same(expected, actual)
    assert of_both == regions
