"""Makes `lm_eval` know the model `hpcgen` wherever this file has been run before it: see `registration`.

It is run at the start of every Python of an environment, so it imports nothing of the package and nearly nothing else.
"""

import sys

REGISTRY = "lm_eval.models"
"""The module that lists the harness' models."""


class ModelsFinder:
    """Asked for every module that is imported; lets the others find it, and adds our model to the harness' list."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != REGISTRY:
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):  # type: ignore[no-untyped-def]
                execute(module)
                from lm_eval.api.registry import model_registry

                model_registry.register("hpcgen", target="hpcgen.evaluation.harness:HpcgenLM")

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, ModelsFinder())
