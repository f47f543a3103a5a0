"""Placeholders handed to custom ops, in Python and in C++: they raise, and no kernel runs."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch.utils.cpp_extension import load_inline

import torch_remat as remat
from torch_remat.dispatch.log.schema import effects_of
from torch_remat.dispatch.placeholder import Source, make_placeholder

SOURCE = Source("block", "op", "out")
OTHER = torch.arange(6.0).view(2, 3)


def matrix():
    return make_placeholder(torch.ones(2, 3), SOURCE)


def assert_refused(consume, given, consumer):
    """Assert that a call on a placeholder is refused by an error that names what was placed and what consumed it."""
    with pytest.raises(remat.PlaceholderError) as caught:
        consume(given)
    error = caught.value
    assert (error.region, error.op, error.tensor) == SOURCE[:3]
    assert consumer in error.consumer
    assert error.line.startswith("test_placeholder_custom_ops.py:")


DEFINE = {
    "value": "(Tensor x) -> Tensor",
    "view": "(Tensor(a) x) -> Tensor(a)",
    "write": "(Tensor(a!) x) -> ()",
    "number": "(Tensor x) -> float",
    "many": "(Tensor[] x) -> Tensor",
    "maybe": "(Tensor? x, *, Tensor? y=None) -> Tensor",
}


@pytest.fixture(scope="module")
def library():
    """Define ops with a CPU kernel that reads memory; the view has no other kernel."""
    library = torch.library.Library("remat_placeholder", "DEF")
    for name, schema in DEFINE.items():
        library.define(name + schema)
        library.impl(name, lambda *args, **kwargs: pytest.fail("the kernel ran"), "CPU")
    yield torch.ops.remat_placeholder
    library._destroy()


@pytest.mark.parametrize("name", DEFINE)
@pytest.mark.filterwarnings("ignore")  # an op without autograd kernel warns
def test_custom_op_of_a_library_raises(library, name):
    op = getattr(library, name)
    given = matrix()
    assert_refused(lambda x: op([OTHER, x] if name == "many" else x), given, f"remat_placeholder.{name}")
    if name == "maybe":
        assert_refused(lambda x: op(None, y=x), given, "remat_placeholder.maybe")


def test_custom_op_with_a_fake_kernel_raises():
    @torch.library.custom_op("remat_placeholder::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        pytest.fail("the kernel ran")

    @doubled.register_fake
    def _(x):
        pytest.fail("a value was invented")

    assert_refused(doubled, matrix(), "remat_placeholder.doubled")


CPP = """
#include <torch/extension.h>
double dispatched(const at::Tensor& x) { return x.sum().item<double>(); }
double typed(const at::Tensor& x) { return x.const_data_ptr<float>()[0]; }
double untyped(const at::Tensor& x) { return static_cast<const float*>(x.data_ptr())[0]; }
double written(const at::Tensor& x) { x.mutable_data_ptr<float>()[0] = 1; return 1; }
double accessed(const at::Tensor& x) { return x.accessor<float, 2>()[0][0]; }
"""
NAMES = ["dispatched", "typed", "untyped", "written", "accessed"]


@pytest.fixture(scope="module")
def extension(tmp_path_factory):
    """Compile functions in C++ that reach for the data, past every hook of Python."""
    if not (shutil.which("g++") and shutil.which("ninja")):
        pytest.skip("no compiler")
    folder = str(tmp_path_factory.mktemp("extension"))
    return load_inline("remat_placeholder_access", CPP, functions=NAMES, build_directory=folder, extra_cflags=["-O0"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_function_in_c_plus_plus_raises_and_does_not_crash(extension, name):
    with pytest.raises(RuntimeError):
        getattr(extension, name)(matrix())


def test_op_that_takes_the_place_of_one_of_a_library_that_is_gone_is_taken_for_what_it_is():
    """By their addresses ops are told apart faster than by their hashes."""

    def define(name, schema):
        library = torch.library.Library("remat_short_lived", "FRAGMENT")
        library.define(name + schema)
        return library, getattr(torch.ops.remat_short_lived, name).default

    for round in range(50):
        library, op = define(f"view{round}", "(Tensor(a) x) -> Tensor(a)")
        assert effects_of(op).viewed == (0, "x")
        del op
        library._destroy()
        library, op = define(f"value{round}", "(Tensor x) -> Tensor")
        assert effects_of(op).viewed is None
        del op
        library._destroy()
