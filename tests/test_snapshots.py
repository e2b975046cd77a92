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
from version_differences import VERSION


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


#: What Dynamo of torch 2.11 on writes of a Function; 2.6 to 2.10 wrote it with a placeholder for
#: ``ctx``, a mask of the tensor arguments and other names, and the saved values in a list.
#: hops keeps stock's text of these graphs, so this one differs between versions.
FUNCTION_IN_TORCH_IR = """\
class body:
    def forward(self, L_self_modules_linear_parameters_bias_, L_self_modules_linear_parameters_weight_, L_self_parameters_weight_, L_x_):
        l_self_modules_linear_parameters_weight_ = L_self_modules_linear_parameters_weight_
        l_self_modules_linear_parameters_bias_ = L_self_modules_linear_parameters_bias_
        l_x_ = L_x_
        l_self_parameters_weight_ = L_self_parameters_weight_
        arg = torch._C._nn.linear(l_x_, l_self_modules_linear_parameters_weight_, l_self_modules_linear_parameters_bias_)
        fwd_body_0 = self.fwd_body_0
        bwd_body_0 = self.bwd_body_0
        autograd_function_apply = torch.ops.higher_order.autograd_function_apply(fwd_body_0, bwd_body_0, arg, l_self_parameters_weight_, non_differentiable_idx = [], saved_for_backward_idx = [0, 1])
        getitem = autograd_function_apply[0]
        sin = getitem.sin()
        return (sin,)
    class fwd_body_0(torch.nn.Module):
        def forward(self, linear, l_self_parameters_weight_):
            _set_grad_enabled = torch._C._set_grad_enabled(False)
            outs = linear * l_self_parameters_weight_
            _set_grad_enabled_1 = torch._C._set_grad_enabled(True)
            return ((outs,), (l_self_parameters_weight_, linear))
    class bwd_body_0(torch.nn.Module):
        def forward(self, grad, l_self_parameters_weight_, arg):
            _set_grad_enabled = torch._C._set_grad_enabled(False)
            mul = grad * l_self_parameters_weight_
            mul_1 = mul * 2
            mul_2 = grad * arg
            sum_1 = mul_2.sum(0)
            _set_grad_enabled_1 = torch._C._set_grad_enabled(True)
            return (mul_1, sum_1)"""  # noqa: E501

OLD_FUNCTION_IN_TORCH_IR = """\
class body:
    def forward(self, L_self_modules_linear_parameters_bias_, L_self_modules_linear_parameters_weight_, L_self_parameters_weight_, L_x_):
        l_self_modules_linear_parameters_weight_ = L_self_modules_linear_parameters_weight_
        l_self_modules_linear_parameters_bias_ = L_self_modules_linear_parameters_bias_
        l_x_ = L_x_
        l_self_parameters_weight_ = L_self_parameters_weight_
        linear = torch._C._nn.linear(l_x_, l_self_modules_linear_parameters_weight_, l_self_modules_linear_parameters_bias_)
        fwd_body_0 = self.fwd_body_0
        bwd_body_0 = self.bwd_body_0
        autograd_function_apply = torch.ops.higher_order.autograd_function_apply(fwd_body_0, bwd_body_0, linear, l_self_parameters_weight_, args_tensor_mask = [True, True], non_differentiable_idx = [])
        sin = autograd_function_apply.sin()
        return (sin,)
    class fwd_body_0(torch.nn.Module):
        def forward(self, ctx : torch.autograd.function.Function, x, weight):
            _set_grad_enabled = torch._C._set_grad_enabled(False)
            mul = x * weight
            _set_grad_enabled_1 = torch._C._set_grad_enabled(True)
            return (mul, [weight, x])
    class bwd_body_0(torch.nn.Module):
        def forward(self, ctx : torch.autograd.function.Function, grad, weight, x):
            _set_grad_enabled = torch._C._set_grad_enabled(False)
            mul = grad * weight
            mul_1 = mul * 2
            mul_2 = grad * x
            sum_1 = mul_2.sum(0)
            _set_grad_enabled_1 = torch._C._set_grad_enabled(True)
            return (mul_1, sum_1)"""  # noqa: E501

CHECKPOINT_IN_TORCH_IR = """\
class body:
    def forward(self, L_self_modules_linear_parameters_bias_, L_self_modules_linear_parameters_weight_, L_x_):
        l_x_ = L_x_
        l_self_modules_linear_parameters_weight_ = L_self_modules_linear_parameters_weight_
        l_self_modules_linear_parameters_bias_ = L_self_modules_linear_parameters_bias_
        wrap_body_0 = self.wrap_body_0
        tag_activation_checkpoint = torch.ops.higher_order.tag_activation_checkpoint(wrap_body_0, l_x_, l_self_modules_linear_parameters_weight_, l_self_modules_linear_parameters_bias_, use_reentrant = False)
        getitem = tag_activation_checkpoint[0]
        cos = getitem.cos()
        return (cos,)
    class wrap_body_0(torch.nn.Module):
        def forward(self, l_x_, l_self_modules_linear_parameters_weight_, l_self_modules_linear_parameters_bias_):
            linear = torch._C._nn.linear(l_x_, l_self_modules_linear_parameters_weight_, l_self_modules_linear_parameters_bias_)
            sin = linear.sin()
            dropout = torch.dropout(sin, 0.5, True)
            return (dropout,)"""  # noqa: E501


def untyped(printed):
    """A graph's text without shapes: torch 2.6 notes none at the attributes of a module."""
    return re.sub(r': "[^"]*"', "", printed)


def torch_ir(model):
    """What a backend of torch.compile sees, untyped, less a node of torch 2.6 that nothing uses."""
    seen = []

    def backend(graph, inputs):
        seen.append(re.sub(r"\n *function_ctx = .*", "", untyped(text(graph))))
        return graph.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(torch.randn(2, 3))
    return seen[0]


def bodies_and_keywords(printed):
    """The bodies of a model's one operator, and the keywords of its call, untyped."""
    around, _, bodies = untyped(printed).partition("\n    class ")
    (call,) = [line for line in around.split("\n") if "torch.ops.higher_order." in line]
    return bodies, re.search(r"\w+ = .*", call.partition("higher_order.")[2])[0]


class Snapshots(TestCase):
    maxDiff = None

    def test_function_is_the_same_text_on_both_export_front_ends(self):
        for strict in (False, True):
            self.assertExpectedInline(text(exported(FunctionModel(), strict)), FUNCTION)

    def test_checkpoint_is_the_same_text_on_both_export_front_ends(self):
        for strict in (False, True):
            self.assertExpectedInline(text(exported(CheckpointModel(), strict)), CHECKPOINT)

    def test_dynamo_export_differs_in_the_names_of_parameters_only(self):
        for model, expected in ((FunctionModel(), FUNCTION), (CheckpointModel(), CHECKPOINT)):
            export = torch._dynamo.export(
                model, aten_graph=True, pre_dispatch=True, assume_static_by_default=True
            )
            printed = text(export(torch.randn(2, 3)).graph_module)
            assert bodies_and_keywords(printed) == bodies_and_keywords(expected)

    def test_function_in_torch_ir(self):
        has_ctx = VERSION < (2, 11)
        expected = OLD_FUNCTION_IN_TORCH_IR if has_ctx else FUNCTION_IN_TORCH_IR
        self.assertExpectedInline(torch_ir(FunctionModel()), expected)

    def test_checkpoint_in_torch_ir(self):
        self.assertExpectedInline(torch_ir(CheckpointModel()), CHECKPOINT_IN_TORCH_IR)

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
