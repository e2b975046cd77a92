"""Files of exported programs: frozen parameters stay frozen, bodies may have empty inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any


def forgets_frozen_parameters(package: ModuleType) -> bool:
    """Whether this torch makes every loaded parameter require grad (2.9)."""
    load = getattr(package, "_load_state_dict", None)
    return load is not None and "Parameter(weight_tensor)" in inspect.getsource(load)


def keeping_frozen(package: ModuleType) -> Callable[[Any], Any]:
    """``torch.export.pt2_archive._package._load_state_dict``, minding what the file says
    of ``requires_grad``: a frozen parameter would get a gradient that eager does not give."""

    def wrap(load: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(load)
        def _load_state_dict(archive_reader: Any, model_name: str) -> Any:
            state_dict = load(archive_reader, model_name)
            if isinstance(state_dict, dict):
                name = package.WEIGHTS_CONFIG_FILENAME_FORMAT.format(model_name)
                config = package._load_payload_config(archive_reader, name).config
                for key, payload in config.items():
                    if payload.is_param and payload.tensor_meta is not None:
                        state_dict[key].requires_grad_(payload.tensor_meta.requires_grad)
            return state_dict

        return _load_state_dict

    return wrap


def reading_empty_inputs(deserialize_graph: Callable[..., Any]) -> Callable[..., Any]:
    """``GraphModuleDeserializer.deserialize_graph``, for bodies with an input that is None.

    A backward has one for every output that is no tensor.  torch looks up the
    name of such an input among those of the whole program, by its position in
    the body; so it fails where the body has more inputs than the program.
    """

    @wraps(deserialize_graph)
    def read(self: Any, serialized_graph: Any) -> Any:
        outermost = not hasattr(self, "_hops_reads_body")
        signature, self._hops_reads_body = self.signature, True
        if not outermost:
            names = [f"none_{i}" for i in range(len(serialized_graph.inputs))]
            specs = [SimpleNamespace(arg=SimpleNamespace(name=name)) for name in names]
            self.signature = SimpleNamespace(input_specs=specs)
        try:
            return deserialize_graph(self, serialized_graph)
        finally:
            self.signature = signature
            if outermost:
                del self._hops_reads_body

    return read
