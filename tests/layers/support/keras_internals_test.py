"""Private names of Keras, which a new version may change, are in two modules.

One is for layers and all that is made of them, one for changing models of others.
"""

import ast

import keras
import keras_hub

from tools import rooms

OWNERS = {
    rooms.PACKAGE / "layers" / "support" / "keras_internals.py",
    rooms.PACKAGE / "retrofit" / "keras_hub_internals.py",
}


def private_names_of_keras():
    objects = keras.layers.Dense(1), keras.optimizers.SGD()
    names = {name for each in objects for name in vars(each)}
    for base in (
        keras.Model,
        keras.layers.Dense,
        keras.optimizers.LossScaleOptimizer,
        keras_hub.models.CausalLM,
        keras_hub.models.Backbone,
        keras_hub.samplers.Sampler,
    ):
        names.update(*(vars(each) for each in base.__mro__))
    return {name for name in names if name[0] == "_" and name[:2] != "__"}


def test_private_names_of_keras_are_in_two_modules():
    own, used, imports = set(), {}, set()
    for path in rooms.PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own.add(node.attr)
            elif isinstance(node, ast.Attribute):
                used.setdefault(node.attr, set()).add(path)
                if ast.unparse(node).startswith(("keras.src", "keras_hub.src")):
                    imports.add(path)
            elif isinstance(node, ast.ImportFrom) and ".src" in (node.module or ""):
                imports.add(path)
    assert imports <= OWNERS
    private = private_names_of_keras() - own
    assert not {x: used[x] for x in private & used.keys() if not used[x] <= OWNERS}
