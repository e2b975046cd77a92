"""What ``autograd_function_apply`` and ``tag_activation_checkpoint`` do under each dispatch key.

One module per key; each holds that key's rule for both operators and lists
them in ``RULES``.  :data:`TABLE` is operator name x key -> rule, as it is
registered by ``hops._patches``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dispatch_rules import (
    autograd,
    composite_explicit_autograd,
    fake_tensor_mode,
    functionalize,
    proxy_torch_dispatch_mode,
    selective_checkpoint,
    torch_func,
)

MODULES = (
    autograd,
    composite_explicit_autograd,
    proxy_torch_dispatch_mode,
    fake_tensor_mode,
    functionalize,
    selective_checkpoint,
    torch_func,
)

TABLE: dict[str, dict[Any, Callable[..., Any]]] = {
    name: {key: rule for module in MODULES for key, rule in module.RULES[name].items()}
    for name in ("autograd_function_apply", "tag_activation_checkpoint")
}
