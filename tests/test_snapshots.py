"""The text of captured graphs: one for all supported torch versions.

Run with EXPECTTEST_ACCEPT=1 to update.  Comments (file and line of the user's
code), blank lines and the order of parameter placeholders, in which torch
differs between releases and front ends, are left out.
"""

import re

import torch
from expecttest import TestCase
from models import CheckpointModel, FunctionModel, Scale, text
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint


def exported(model, strict):
    return torch.export.export(model, (torch.randn(2, 3),), strict=strict).graph_module


FUNCTION = """\
class body:
    def forward(self, p_linear_bias: "f32[3]", p_linear_weight: "f32[3, 3]", p_weight: "f32[3]", x: "f32[2, 3]"):
        linear: "f32[2, 3]" = torch.ops.aten.linear.default(x, p_linear_weight, p_linear_bias)
        fwd_body_0 = self.fwd_body_0
        bwd_body_0 = self.bwd_body_0
        autograd_function_apply = torch.ops.higher_order.autograd_function_apply(fwd_body_0, bwd_body_0, linear, p_weight, name = 'models.Scale', num_outputs = 1, num_inputs = 2, saved_for_backward_idx = [0, 1])
        getitem: "f32[2, 3]" = autograd_function_apply[0]
        sin: "f32[2, 3]" = torch.ops.aten.sin.default(getitem)
        return (sin,)
    class fwd_body_0(torch.nn.Module):
        def forward(self, arg0_1: "f32[2, 3]", arg1_1: "f32[3]"):
            mul: "f32[2, 3]" = torch.ops.aten.mul.Tensor(arg0_1, arg1_1)
            return (mul, arg1_1, arg0_1)
    class bwd_body_0(torch.nn.Module):
        def forward(self, arg0_1: "f32[2, 3]", arg1_1: "f32[3]", arg2_1: "f32[2, 3]"):
            mul: "f32[2, 3]" = torch.ops.aten.mul.Tensor(arg0_1, arg1_1)
            mul_1: "f32[2, 3]" = torch.ops.aten.mul.Tensor(mul, 2)
            mul_2: "f32[2, 3]" = torch.ops.aten.mul.Tensor(arg0_1, arg2_1)
            sum_1: "f32[3]" = torch.ops.aten.sum.dim_IntList(mul_2, [0])
            return (mul_1, sum_1)"""  # noqa: E501

CHECKPOINT = """\
class body:
    def forward(self, p_linear_bias: "f32[3]", p_linear_weight: "f32[3, 3]", x: "f32[2, 3]"):
        wrap_body_0 = self.wrap_body_0
        tag_activation_checkpoint = torch.ops.higher_order.tag_activation_checkpoint(wrap_body_0, x, p_linear_weight, p_linear_bias, use_reentrant = False, preserve_rng_state = True, determinism_check = 'default', debug = False, early_stop = True, form = 1)
        getitem: "f32[2, 3]" = tag_activation_checkpoint[0]
        cos: "f32[2, 3]" = torch.ops.aten.cos.default(getitem)
        return (cos,)
    class wrap_body_0(torch.nn.Module):
        def forward(self, arg0_1: "f32[2, 3]", arg1_1: "f32[3, 3]", arg2_1: "f32[3]"):
            linear: "f32[2, 3]" = torch.ops.aten.linear.default(arg0_1, arg1_1, arg2_1)
            sin: "f32[2, 3]" = torch.ops.aten.sin.default(linear)
            dropout: "f32[2, 3]" = torch.ops.aten.dropout.default(sin, 0.5, True)
            return (dropout,)"""  # noqa: E501


class Snapshots(TestCase):
    maxDiff = None

    def test_function_is_the_same_text_on_both_export_front_ends(self):
        for strict in (False, True):
            self.assertExpectedInline(text(exported(FunctionModel(), strict)), FUNCTION)

    def test_checkpoint_is_the_same_text_on_both_export_front_ends(self):
        for strict in (False, True):
            self.assertExpectedInline(text(exported(CheckpointModel(), strict)), CHECKPOINT)

    def test_make_fx(self):
        def call(x, weight):
            return checkpoint(lambda h: Scale.apply(h, weight).sin(), x, use_reentrant=False)

        arguments = (torch.randn(2, 3, requires_grad=True), torch.randn(3, requires_grad=True))
        for mode in ("real", "fake", "symbolic"):
            graph = make_fx(call, pre_dispatch=True, tracing_mode=mode)(*arguments)
            printed = re.sub(r': "[^"]*"', "", text(graph))
            printed = re.sub(r"\n.*sym_size.*", "", printed)
            if mode == "symbolic":
                continue
            self.assertExpectedInline(
                printed,
                """\
class body:
    def forward(self, weight_1, x_1):
        wrap_body_0 = self.wrap_body_0
        tag_activation_checkpoint = torch.ops.higher_order.tag_activation_checkpoint(wrap_body_0, x_1, weight_1, use_reentrant = False, preserve_rng_state = True, determinism_check = 'default', debug = False, early_stop = True, form = 1)
        getitem = tag_activation_checkpoint[0]
        return getitem
    class wrap_body_0(torch.nn.Module):
        def forward(self, arg0_1, arg1_1):
            fwd_body_0 = self.fwd_body_0
            bwd_body_0 = self.bwd_body_0
            autograd_function_apply = torch.ops.higher_order.autograd_function_apply(fwd_body_0, bwd_body_0, arg0_1, arg1_1, name = 'models.Scale', num_outputs = 1, num_inputs = 2, saved_for_backward_idx = [0, 1])
            getitem = autograd_function_apply[0]
            sin = torch.ops.aten.sin.default(getitem)
            return (sin,)
        class fwd_body_0(torch.nn.Module):
            def forward(self, arg0_1, arg1_1):
                mul = torch.ops.aten.mul.Tensor(arg0_1, arg1_1)
                return (mul, arg1_1, arg0_1)
        class bwd_body_0(torch.nn.Module):
            def forward(self, arg0_1, arg1_1, arg2_1):
                mul = torch.ops.aten.mul.Tensor(arg0_1, arg1_1)
                mul_1 = torch.ops.aten.mul.Tensor(mul, 2)
                mul_2 = torch.ops.aten.mul.Tensor(arg0_1, arg2_1)
                sum_1 = torch.ops.aten.sum.dim_IntList(mul_2, [0])
                return (mul_1, sum_1)""",  # noqa: E501
            )

    def test_compile_backends_see_what_stock_gives_them(self):
        """torch.compile is not a capture: stock's text, with and without hops."""
        import hops

        def backend_text():
            graphs = []

            def backend(graph, inputs):
                graphs.append(text(graph))
                return graph.forward

            torch._dynamo.reset()
            torch.compile(FunctionModel(), backend=backend)(torch.randn(2, 3))
            torch.compile(CheckpointModel(), backend=backend)(torch.randn(2, 3))
            return graphs

        with_hops = backend_text()
        hops.uninstall()
        try:
            stock = backend_text()
        finally:
            hops.install()
        assert with_hops == stock
        assert "autograd_function_apply(fwd_body_0, bwd_body_0, " in with_hops[0]
        assert "tag_activation_checkpoint(wrap_body_0, " in with_hops[1]
