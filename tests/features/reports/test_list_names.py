"""`list_names`: the table from which a user chooses what to save."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.nn import functional as F

import torch_remat as remat
from tests.helpers import LiveStorages, assert_clean_state, collector_off, leaf

aten = torch.ops.aten


class Block(nn.Module):
    """Two layers of other widths, the second of them in a module of its own."""

    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 16)
        self.mlp = nn.Sequential(nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        return x + self.mlp(self.up(self.norm(x))).sin()


def chain(x, w):
    for _ in range(3):
        x = (x @ w).sin()
    return x


def kept_bytes(function, policy, inputs):
    """Return the bytes that the graph of a region keeps of what its forward made."""
    with collector_off(), LiveStorages() as live:
        node = remat.checkpoint(policy=policy)(function)(*inputs).grad_fn
        count = live.bytes()
    assert node is not None
    return count


def rows_of(function, *inputs, policy=None):
    """Return the table's rows by name."""
    rows = list(remat.list_names(function, policy)(*inputs))
    assert len({row.name for row in rows}) == len(rows)
    return {row.name: row for row in rows}


def rows_for(rows, op):
    """Return the rows of one op, in order."""
    return [row for name, row in rows.items() if name.rsplit(".", 1)[-1].rsplit("_", 2)[0] == op]


def test_each_name_saves_its_row():
    block, x = Block(), leaf(3, 8)
    for name, row in rows_of(block, x).items():
        listed = rows_of(block, x, policy=remat.save_names(name))
        kept_names = {other for other, row in listed.items() if row.kept}
        assert kept_names <= {name}
        assert kept_names or not row.needed


def test_flops():
    rows = rows_of(chain, leaf(2, 4), leaf(4, 4))
    assert [row.flops for row in rows_for(rows, "mm")] == [2 * 2 * 4 * 4] * 3
    assert all(not row.flops for row in rows_for(rows, "sin"))
    by_path = {row.name: row.flops for row in rows_for(rows_of(Block(), leaf(2, 3, 8)), "addmm")}
    assert by_path == {"up.addmm_0_0": 2 * 6 * 8 * 16, "mlp.1.addmm_0_0": 2 * 6 * 16 * 8}
    attends = lambda x: F.scaled_dot_product_attention(x @ x, x @ x, x @ x)  # noqa: E731
    x = leaf(1, 2, 4, 4)
    listed = sum(row.flops for row in remat.list_names(attends)(x))
    assert listed == 5 * 2 * 2 * 4**3  # three products outside of the attention, and two inside


def test_needed_tells_what_backward_needs():
    rows = rows_of(chain, leaf(2, 4), leaf(4, 4))
    assert [row.needed for row in rows_for(rows, "mm")] == [True] * 3
    assert [row.needed for row in rows_for(rows, "sin")] == [True, True, False]

    def function(x, w):
        h = (x * 2 + 1) @ w
        _ = h.detach().cos()
        return h.exp()

    rows = rows_of(function, leaf(4, 4), torch.randn(4, 4))
    needed = {name.rsplit("_", 2)[0]: row.needed for name, row in rows.items()}
    assert needed == {"mul": False, "add": False, "mm": False, "cos": False, "exp": True}


def test_kept_tells_what_a_policy_keeps():
    inputs = leaf(4, 4), leaf(4, 4)
    for policy, expected in (
        ([aten.mm.default], ["mm_0_0", "mm_1_0", "mm_2_0"]),
        (remat.save_names("sin_*"), ["sin_0_0", "sin_1_0"]),
        (lambda ctx, op, *args, **kwargs: False, []),
    ):
        rows = rows_of(chain, *inputs, policy=policy)
        assert [row.name for row in rows.values() if row.kept] == expected
        assert kept_bytes(chain, policy, inputs) == 64 * len(expected)


def test_table_as_text():
    assert_expected_inline(
        str(remat.list_names(Block(), remat.save_names("mlp.*"))(leaf(3, 8))),
        """\
name                          op                              shape  dtype    bytes  FLOPs  needed  kept
----------------------------  ------------------------------  -----  -------  -----  -----  ------  ----
norm.layer_norm_0             torch.layer_norm
  norm.native_layer_norm_0_0  aten.native_layer_norm.default  3x8    float32     96            yes
  norm.native_layer_norm_0_1  aten.native_layer_norm.default  3x1    float32     12            yes
  norm.native_layer_norm_0_2  aten.native_layer_norm.default  3x1    float32     12            yes
up.linear_0                   F.linear
  up.t_0_0                    aten.t.default                  8x16   float32      0
  up.addmm_0_0                aten.addmm.default              3x16   float32    192    768     yes
mlp.0.gelu_0                  F.gelu
  mlp.0.gelu_0_0              aten.gelu.default               3x16   float32    192            yes   yes
mlp.1.linear_0                F.linear
  mlp.1.t_0_0                 aten.t.default                  16x8   float32      0
  mlp.1.addmm_0_0             aten.addmm.default              3x8    float32     96    768     yes   yes
sin_0                         torch.Tensor.sin
  sin_0_0                     aten.sin.default                3x8    float32     96
add_0                         torch.Tensor.add
  add_0_0                     aten.add.Tensor                 3x8    float32     96
10 results; needed by backward: 600 bytes; kept: 288 bytes""",
    )


def test_listing_holds_no_tensor_and_leaves_no_state():
    block, x = Block(), leaf(3, 8)
    with collector_off():
        remat.list_names(block)(x)
        with LiveStorages() as live:
            table = remat.list_names(block, remat.save_names("mlp.*"))(x)
        assert live.bytes() == 0
    assert len(list(table)) > 5
    assert x.grad is None
    assert all(parameter.grad is None for parameter in block.parameters())
    with pytest.raises(remat.RematError, match="nowhere"):
        remat.list_names(block, remat.save_names("nowhere.*"))(x)
    assert_clean_state()


@pytest.mark.parametrize("tool", [remat.list_names, remat.explain])
def test_inference_mode_where_nothing_is_saved_is_an_error(tool):
    with torch.inference_mode(), pytest.raises(remat.UsageError, match=r"was called under torch.inference_mode\(\)"):
        tool(nn.Linear(4, 4))(torch.randn(3, 4))
    with torch.no_grad():
        assert remat.list_names(nn.Linear(4, 4))(torch.randn(3, 4)).names == ["t_0_0", "addmm_0_0"]


class NeedsMore(nn.Module):
    """A layer that takes a mask and a position, as those of many models do."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(8, 8)
        self.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))

    def forward(self, x, mask, *, position):
        return torch.softmax(self.query(x) + mask, -1) * position


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList(NeedsMore() for _ in range(2))

    def forward(self, x):
        h = self.first(x)
        for layer in self.layers:
            h = layer(h, torch.zeros(8), position=torch.ones(8))
        return h.sum()


def test_layer_is_listed_by_a_run_of_its_model_and_its_names_can_be_pasted():
    model, x = Model(), torch.randn(2, 8)
    table = remat.list_names(model, layer=model.layers[1])(x)
    assert table.names == ["query.t_0_0", "query.addmm_0_0", "add_0_0", "_softmax_0_0", "mul_0_0"]
    assert [row.name for row in table if row.needed] == ["_softmax_0_0"]
    with remat.checkpoint_modules(model, "layers.*", policy=remat.save_names("_softmax_0_0", "query.addmm_0_0")):
        kept = remat.list_names(model, remat.save_names("_softmax_0_0"), layer=model.layers[0])(x)
        assert [row.name for row in kept if row.kept] == ["_softmax_0_0"]
        loss = model(x)
        names = [one.label for one in remat.memory_report(loss).regions[0].tensors if one.kind == "saved"]
        assert names == ["_softmax_0_0"]
        loss.backward()
    assert all(len(layer._forward_pre_hooks) == 1 for layer in model.layers)
    assert_clean_state()


def test_layer_that_does_not_run_is_an_error():
    with pytest.raises(remat.UsageError, match="does not call the layer, a Linear"):
        remat.list_names(Model(), layer=nn.Linear(1, 1))(torch.randn(2, 8))
    with pytest.raises(remat.UsageError, match="layer takes a module, not a int"):
        remat.list_names(Model(), layer=3)


@pytest.mark.parametrize("tool", [remat.list_names, remat.explain])
def test_arguments_beside_the_function_are_an_error_that_says_the_form(tool):
    x = torch.full((2, 8), 12345.0)
    for wrong in (
        lambda: tool(chain, x),
        lambda: tool(chain, x, x),
        lambda: tool(chain, x=x),
        lambda: tool(3),
        lambda: tool(chain, [x]),
    ):
        with pytest.raises(remat.UsageError) as caught:
            wrong()
        assert f"The form is remat.{tool.__name__}(function" in str(caught.value)
        assert ")(*args, **kwargs)" in str(caught.value)
        assert "12345" not in str(caught.value)


def test_calls_of_functions_have_the_names_that_a_policy_by_function_gives_them():
    block, x = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)
    table = remat.list_names(block)(x)
    assert [(call.name, call.function) for call in table.calls] == [
        ("0.linear_0", "F.linear"),
        ("1.gelu_0", "F.gelu"),
        ("2.linear_0", "F.linear"),
        ("3.tanh_0", "torch.tanh"),
    ]
    assert table.calls[2].results == ("2.t_0_0", "2.addmm_0_0")
    y = remat.checkpoint(policy=[nn.functional.linear, nn.functional.gelu])(block)(x.requires_grad_())
    assert {op.name for op in remat.memory_report(y).regions[0].ops} <= {call.name for call in table.calls}


def test_calls_with_names_of_their_own_are_no_rows():
    def function(x):
        return (remat.op(torch.sin, "call")(x) * x).cos()

    assert list(rows_of(function, leaf(3))) == ["mul_0_0", "cos_0_0"]
