"""Wrong uses of public names: each is an error at once, that says what is wrong and what to write."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import torch_remat as remat
from tests.helpers import chain, leaf
from torch_remat import policies
from torch_remat.errors import PolicyError, UsageError

SAVE, OFFLOAD, RECOMPUTE = remat.CheckpointPolicy.SAVE, remat.CheckpointPolicy.OFFLOAD, remat.CheckpointPolicy.RECOMPUTE
X, MODEL, A = leaf(3), nn.Sequential(nn.Tanh()), remat.save_names("a")
FORM = r"checkpoint\([^)]*\)\([a-z]+\)\("
DROP_IN = r"remat\.drop_in\(\*\*options\) returns"
EXCLUDE = r"policy & ~remat.save_names"
OF_WORDS = functools.partial(create_selective_checkpoint_contexts, ["mm"])


def name(value):
    """Give a name by hand to a result in a region."""
    return remat.checkpoint()(lambda x: remat.checkpoint_name(x * 2, value))(X)


def sequential(segments, **options):
    return remat.checkpoint_sequential([chain, chain], segments, X, **options)


# What is called, the error, and what it says.
WRONG = {
    "a function": (lambda: remat.checkpoint(chain), UsageError, FORM),
    "a module": (lambda: remat.checkpoint(MODEL), UsageError, FORM),
    "a number": (lambda: remat.checkpoint(3), UsageError, FORM),
    "None": (lambda: remat.checkpoint(None), UsageError, FORM),
    "as torch's is called": (lambda: remat.checkpoint(chain, X), UsageError, DROP_IN),
    "use_reentrant": (lambda: remat.checkpoint(use_reentrant=False), UsageError, DROP_IN),
    "use_reentrant, the remedy": (lambda: remat.checkpoint(use_reentrant=False), UsageError, "Leave it out"),
    "use_reentrant, the form": (lambda: remat.checkpoint(use_reentrant=False), UsageError, FORM),
    "another option": (lambda: remat.checkpoint(fn=False), UsageError, rf"(?s)fn.*{FORM}"),
    "a misspelt option": (lambda: remat.checkpoint(early_stopp=False), UsageError, rf"(?s)early_stopp.*{FORM}"),
    "a tensor for a function": (lambda: remat.checkpoint()(X)(X), UsageError, r"cannot run a Tensor\.\nThe form is"),
    "op without a name": (
        lambda: remat.op(torch.sin),
        UsageError,
        r"remat\.op\(\) got no name\.\nremat\.op\(function, 'attention'\)",
    ),
    "a policy of the package": (
        lambda: remat.save_attention,
        AttributeError,
        r"'save_attention'; it is torch_remat\.policies\.save_attention",
    ),
    "no such name": (lambda: remat.chekpoint, AttributeError, r"has no attribute 'chekpoint'$"),
    "an option of torch, in sequence": (lambda: sequential(2, use_reentrant=False), UsageError, "use_reentrant"),
    **{
        f"{count} segments": (lambda count=count: sequential(count), UsageError, f"cannot make {count} segments of 2")
        for count in (0, -1, 5)
    },
    "modules of a dict": (lambda: remat.checkpoint_modules({}, "*"), UsageError, "takes no dict"),
    "modules without patterns": (
        lambda: remat.checkpoint_modules(MODEL, keep_last=1),
        UsageError,
        r"missing a required argument: 'patterns'\.\nThe form is checkpoint_modules\(",
    ),
    "modules with a policy that is none": (
        lambda: remat.checkpoint_modules(MODEL, "*", policy=3),
        PolicyError,
        "is not a policy",
    ),
    "drop_in with a wrong value": (lambda: remat.drop_in(early_stop=1), UsageError, "early_stop=1"),
    "a call of drop_in with a wrong value": (
        lambda: remat.drop_in()(chain, X, determinism_check="some"),
        UsageError,
        "determinism_check='some'",
    ),
    "a decorator with another option": (
        lambda: remat.drop_in()(use_reentrant=False, scale=2.0),
        UsageError,
        "scale=",
    ),
    "drop_in without a function": (lambda: remat.drop_in()(None, X), UsageError, "cannot run a NoneType"),
    "contexts of words": (
        lambda: remat.drop_in()(chain, X, context_fn=OF_WORDS),
        PolicyError,
        "neither an op nor a function",
    ),
    **{
        f"the name {given!r}": (lambda given=given: name(given), UsageError, r"The form is tensor = checkpoint_name\(")
        for given in ("", None, 3)
    },
    **{
        f"patterns {given!r}": (
            lambda given=given: remat.save_names(*given),
            PolicyError,
            r'is not possible\.\nThe form is save_names\("attention',
        )
        for given in ((), ("",), (3,), (["mm_*"],))
    },
    **{
        f"{maker.__name__} that nobody called": (
            lambda maker=maker: remat.checkpoint(policy=maker),
            PolicyError,
            rf"(?s){maker.__name__} makes policies.*Call it",
        )
        for maker in (remat.save_names, remat.save_modules, policies.memory_budget)
    },
    "exclusion alone": (lambda: remat.checkpoint(policy=~A), PolicyError, EXCLUDE),
    "exclusion by |": (lambda: policies.save_matmuls | ~A, PolicyError, EXCLUDE),
    "exclusion first": (lambda: ~A | policies.save_matmuls, PolicyError, EXCLUDE),
    "exclusion of what is offloaded": (lambda: A & ~remat.offload_names("a"), PolicyError, EXCLUDE),
    "exclusion from a number": (lambda: 3 & ~A, PolicyError, EXCLUDE),
    "& of two policies": (lambda: policies.save_matmuls & A, TypeError, "for &"),
    "~ of ops": (lambda: ~policies.save_matmuls, TypeError, "unary ~"),
    "~ twice": (lambda: ~~A, TypeError, "unary ~"),
    "| of a number": (lambda: policies.save_matmuls | 3, PolicyError, "3 is not a policy"),
    "| of a word": (lambda: "mm" | policies.save_matmuls, PolicyError, "'mm' is not a policy"),
}


@pytest.mark.parametrize("use", WRONG)
def test_wrong_use_is_an_error_at_once(use):
    call, kind, says = WRONG[use]
    with pytest.raises(kind, match=says):
        call()


TAKES_OPTIONS = {
    "checkpoint": remat.checkpoint,
    "checkpoint_sequential": lambda **options: remat.checkpoint_sequential([chain], 1, X, **options),
    "checkpoint_modules": lambda **options: remat.checkpoint_modules(MODEL, "0", **options),
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
    with pytest.raises(UsageError) as caught:
        TAKES_OPTIONS[name](**options)
    text = str(caught.value)
    assert text.startswith(name + says)
    assert f"The form is {name}(" in text
    assert "polcy" not in options or "determinism_check, early_stop, debug" in text


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ({F.linear: "save"}, r"(?s)says 'save' of .*linear.*CheckpointPolicy\.SAVE, OFFLOAD"),
        ({F.linear: [SAVE]}, "which is no decision"),
        ({"up.*": SAVE}, "neither an op nor a function"),
        ({nn.Linear: OFFLOAD}, r"remat\.save_modules\(Linear\)"),
        ({F.linear: SAVE, torch.Tensor.add_: OFFLOAD}, "never kept"),
        ({chain: RECOMPUTE}, r"remat\.op"),
    ],
)
@pytest.mark.parametrize("name", ["checkpoint", "checkpoint_modules", "drop_in"])
def test_dict_with_what_is_no_function_or_no_decision_is_an_error(name, policy, says):
    with pytest.raises(PolicyError, match=says):
        TAKES_OPTIONS[name](policy=policy)


VALUES = {
    "policy": lambda t: remat.checkpoint(policy=t),
    "determinism_check": lambda t: remat.checkpoint(determinism_check=t),
    "policy of a call": lambda t: remat.op(chain, "x", policy=t),
    "name": lambda t: remat.op(chain, t),
    "scope": lambda t: remat.name_scope(t).__enter__(),
    "patterns": lambda t: remat.checkpoint_modules(MODEL, [t]),
    "names": lambda t: remat.save_names("a", t),
    "offloader": lambda t: remat.checkpoint(offloader=t),
    "budget": lambda t: remat.budget(t),
    "device share": lambda t: remat.budget(device_share=t),
    "segments": sequential,
}


@pytest.mark.parametrize("place", VALUES)
def test_error_shows_no_values_of_a_tensor(place):
    for given in (torch.full((3, 2), 7.25), [torch.full((3, 2), 7.25)]):
        with pytest.raises(UsageError) as caught:
            VALUES[place](given)
        assert "7.25" not in str(caught.value), str(caught.value)
