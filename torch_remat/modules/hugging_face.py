"""`enable_gradient_checkpointing`: the layers of a Hugging Face model as regions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet, ref

from torch.nn import Module

from torch_remat._drop_in import DropIn
from torch_remat._options import LayerOptions, checked_options
from torch_remat.errors import UsageError, warn
from torch_remat.modules.patterns import OfModule
from torch_remat.modules.saved import modules_policies

if TYPE_CHECKING:
    from typing_extensions import Unpack

_FORM = "The form is enable_gradient_checkpointing(model, **options); regions have the qualified names of the layers."
_told: WeakSet[Any] = WeakSet()  # models in eval mode that were warned of
_told_of_own: WeakSet[Any] = WeakSet()  # models that were warned of their own switch
_FUNCTION = "_gradient_checkpointing_func"  # where models of Hugging Face have the function that they call
# Methods of models; newer releases of transformers have the first name, and call it by the second.
_ENABLE = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
_DISABLE = ("activation_checkpointing_disable", "gradient_checkpointing_disable")


def enable_gradient_checkpointing(model: Any, **options: Unpack[LayerOptions]) -> CheckpointedLayers:
    """Make the layers of a Hugging Face model checkpointed regions, as its own gradient checkpointing would.

    Which layers those are is up to the model, and they are regions in training mode only. Each region has the
    qualified name of its layer, and automatic names begin below it: ``save_names("mlp.*")``. Deep copies and pickled
    models have the same regions. A model that keeps the function elsewhere than in ``_gradient_checkpointing_func`` of
    its modules has regions that are named after what it runs.

    Call it instead of the model's own ``activation_checkpointing_enable()`` (``gradient_checkpointing_enable()`` in
    earlier releases). Where that is called afterwards, as by ``Trainer`` with ``gradient_checkpointing=True``, which
    TRL has by default, the regions stay, with their options, and a `RematWarning` says so, once. The model's own
    ``activation_checkpointing_disable()`` switches the regions off, and its enable method on again; ``remove()`` on
    what is returned gives the model its own checkpointing back. For a model in eval mode a `RematWarning` says, once,
    that nothing is recomputed there.

    Args:
        model: A model of ``transformers``, ``diffusers`` or ``peft``, or any object with ``named_modules()`` and either
            ``_set_gradient_checkpointing(enable, gradient_checkpointing_func)`` or ``gradient_checkpointing_enable()``.
        **options: Those of `checkpoint` without ``region_name``.

    Returns:
        A handle, which keeps no model alive.

    Raises:
        UsageError: The model has no gradient checkpointing, or none that takes a function; or an option is not one of
            `checkpoint`. Then nothing has changed.
        PolicyError: ``policy`` is not a policy.

    Example:
        >>> import torch
        >>> import torch_remat as remat
        >>> from transformers import LlamaConfig, LlamaModel
        >>> sizes = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=16)
        >>> model = LlamaModel(LlamaConfig(**sizes))
        >>> handle = remat.enable_gradient_checkpointing(model, policy=remat.save_names("mlp.up_proj.*"))
        >>> y = model(torch.arange(8)[None], use_cache=False).last_hidden_state
        >>> y.sum().backward()
    """
    chosen = checked_options("enable_gradient_checkpointing", options, LayerOptions, _FORM)
    if not getattr(model, "supports_gradient_checkpointing", True):
        raise _unsupported(model)
    _make_regions(model, chosen)
    if (name := next((name for name in _ENABLE if hasattr(model, name)), None)) is not None:
        setattr(model, name, KeepRegions(model, name, chosen))
    if getattr(model, "training", True) is False and model not in _told:
        _told.add(model)
        warn(
            f"this {type(model).__name__} is in eval mode, where its layers are no regions and nothing is recomputed; "
            "call model.train() before training",
        )
    return CheckpointedLayers(model)


def _make_regions(model: Any, options: Mapping[str, Any]) -> None:
    """Let the modules of a model that call a checkpoint function call one of ours."""
    function = DropIn(options)
    setter = getattr(model, "_set_gradient_checkpointing", None)
    kept = ref(function)
    if setter is not None and "gradient_checkpointing_func" in signature(setter).parameters:
        setter(enable=True, gradient_checkpointing_func=function)
    elif (enable := next(filter(None, (_own(model, name) for name in _ENABLE)), None)) is not None:
        enable()
    else:
        raise _unsupported(model)
    del function
    owners = [(name, module) for name, module in model.named_modules() if _FUNCTION in vars(module)]
    if not owners and kept() is None:  # else the model has it under a name of its own
        _disable(model)
        raise _unsupported(model)
    for chosen in modules_policies(options.get("policy")):
        chosen.look_for(module for _, module in owners)
    for name, module in owners:
        setattr(module, _FUNCTION, LayerCheckpoint(module, name, options))


def _own(model: Any, name: str) -> Any:
    """Return a method of a model as it was before `KeepRegions`, or None."""
    if not isinstance(getattr(model, "__dict__", {}).get(name), KeepRegions):
        return getattr(model, name, None)
    method: Any = getattr(type(model), name, None)
    # A model of peft has no such method, but finds that of the model inside it.
    return model.__getattr__(name) if method is None else method.__get__(model)


def _disable(model: Any) -> None:
    for name in _DISABLE:
        if (disable := getattr(model, name, None)) is not None:
            disable()
            return
    if (setter := getattr(model, "_set_gradient_checkpointing", None)) is not None:
        setter(enable=False)


def _unsupported(model: object) -> UsageError:
    return UsageError(
        f"{type(model).__name__} has no gradient checkpointing that takes a function",
        remedy="remat.checkpoint_modules(model, patterns) makes regions of the modules of any model.",
    )


class CheckpointedLayers:
    """What `enable_gradient_checkpointing` returns.

    Args:
        model: The model; it is not kept alive.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._text = ref(model), f"<the layers of a {type(model).__name__} are regions>"

    def __repr__(self) -> str:
        return self._text

    def remove(self) -> None:
        """Switch the regions off, and give the model its own checkpointing back."""
        if (model := self._model()) is None:
            return
        _disable(model)
        for name in _ENABLE:
            if isinstance(getattr(model, "__dict__", {}).get(name), KeepRegions):
                delattr(model, name)


class KeepRegions(OfModule):
    """A model's own enable method while its layers are regions: they stay.

    Args:
        module: The model.
        name: The method.
        options: Those of `checkpoint`.
    """

    __slots__ = ("_name", "_options")

    def __init__(self, module: Module | None, name: str, options: Mapping[str, Any]) -> None:
        super().__init__(module)
        self._name, self._options = name, options

    def parts(self, memo: dict[int, Any] | None) -> tuple[Any, ...]:
        """Return the name and the options, which copies share."""
        return self._name, self._options

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Do all else that the method does, such as letting inputs require a gradient."""
        model = self.module
        _own(model, self._name)(*args, **kwargs)
        _make_regions(model, self._options)
        if model not in _told_of_own:
            _told_of_own.add(model)
            warn(
                f"something switched on the checkpointing of this {type(model).__name__} itself, as Trainer does with "
                "gradient_checkpointing=True (activation_checkpointing); the regions of "
                "remat.enable_gradient_checkpointing stay, with their options. Set gradient_checkpointing=False: TRL "
                "has True by default. To have torch's, call remove() on what enable_gradient_checkpointing returned."
            )


class LayerCheckpoint(OfModule):
    """What a module of a Hugging Face model calls to run a layer: itself, or one that is inside it.

    Args:
        module: The module.
        name: Its qualified name.
        options: Those of `checkpoint`.
    """

    __slots__ = ("_function", "_name", "_named", "_options")

    def __init__(self, module: Module | None, name: str, options: Mapping[str, Any]) -> None:
        super().__init__(module)
        self._name, self._options = name, options
        self._function = DropIn({**options, "region_name": name or type(module).__name__})
        self._named: WeakKeyDictionary[Module, DropIn] = WeakKeyDictionary()  # of the layers inside it that ran

    def __repr__(self) -> str:
        return f"{self._function!r}"

    def parts(self, memo: dict[int, Any] | None) -> tuple[Any, ...]:
        """Return the name and the options, which copies share."""
        return self._name, self._options

    def __call__(self, /, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer as `drop_in` does, by its name."""
        layer = _layer_of(function)
        run = self._function if layer is None or layer is self._reference() else self._named_for(layer)
        return run(function, *args, **kwargs)

    def _named_for(self, layer: Module) -> DropIn:
        run = self._named.get(layer)
        if run is None:
            path = next((path for path, inner in self.module.named_modules() if inner is layer), type(layer).__name__)
            name = f"{self._name}.{path}" if self._name else path
            run = self._named[layer] = DropIn({**self._options, "region_name": name})
        return run


def _layer_of(function: Any) -> Module | None:
    """Return the module whose forward, or call, a function is."""
    if type(function) is partial:
        function = function.args[0] if function.args else function.func
    layer = getattr(function, "__self__", function)
    return layer if isinstance(layer, Module) else None
