"""SavedModels of language and image models, with the signatures `score` and `generate`.

Of the models, only this module and those that it calls are written for TensorFlow.
"""

import inspect

import keras
import tensorflow as tf

from routing_tf.layers.support.backends import static_shapes
from routing_tf.models import saved_functions
from routing_tf.models.preset_backbone import check_format
from routing_tf.models.score import scope_to_score

# The name that TensorFlow Serving and its clients use by default.
SERVING_DEFAULT = "serving_default"


class Exportable:
    """A model that is exported as a SavedModel with its own functions."""

    def export(
        self,
        filepath,
        format="tf_saved_model",
        verbose=None,
        input_signature=None,
        **kwargs,
    ):
        """Writes a SavedModel with `score` and `generate`, or exports as Keras does.

        Args:
            filepath: folder to write into.
            format: `"tf_saved_model"` (the default) for these functions, see
                `routing_tf.models.saved_model.export`; otherwise as in Keras.
            verbose: whether to print the functions. None (the default) means no.
            input_signature: None (the default), or that of a SavedModel of only the
                call.
            **kwargs: arguments of either function, such as `max_length`.
        """
        if format == "tf_saved_model" and input_signature is None:
            export(self, filepath, verbose=verbose, **kwargs)
        else:
            check_format(self, format)
            with static_shapes():
                super().export(filepath, format, verbose, input_signature, **kwargs)


# A server may compile it with XLA.
@static_shapes()
def export(model, directory, routing_scope=None, max_length=None, verbose=None):
    """Writes a SavedModel that TensorFlow loads without Keras or this package.

    `tf.saved_model.load(directory)` has these functions, also as `signatures`, for any
    number of rows; see [TensorFlow Serving](docs/serving.md).

    - Texts: `score(texts)`, unless there is an encoder, `generate(texts, ...)`, and
      `score_ids` and `generate_ids` of `token_ids` and `padding_mask`.
    - Images: `score(images, labels)`, and `generate(num_images, ...)` or
      `generate(labels, ...)`; `labels` only for models with `num_classes`.

    `score` returns natural logarithms of probabilities. The settings of `generate` are
    scalars: `temperature` (default 1; 0 is greedy), `top_k` (default 0, all), `top_p`
    (default 1, all), `seed` (default 0) and, for texts, `length` (default
    `max_length`).

    Args:
        model: a `RoutingTransformerCausalLM`, `RoutingTransformerSeq2SeqLM` or
            `RoutingImageTransformer`.
        directory: folder to write into, which is made if missing.
        routing_scope: scope of `score`, `"full"` or `"prefix"`; None (the default) for
            that of the hyperparameters.
        max_length: number of tokens a text may have. The saved functions refuse longer
            texts, and always compute with this length. At most 2**20; None (the
            default) for that of the model's sequences. Not for images.
        verbose: whether to print the functions. None (the default) means no.

    Example:

    ```python
    import keras
    from routing_tf import models

    lm = models.RoutingTransformerCausalLM.from_preset("byte_tiny")
    if keras.backend.backend() == "tensorflow":
        lm.export("byte_tiny", max_length=32)
    ```
    """
    check_backend(export_dir=directory)
    scope = scope_to_score(model.hyperparameters, routing_scope)
    module = tf.Module()
    # Plain variables, because a Keras model would add its classes.
    module.weights = [variable.value for variable in model.weights]
    if model.hyperparameters.kind == "image":
        if max_length is not None:
            raise ValueError(
                "`max_length` is for models of texts. Received: "
                f"max_length={max_length} for a model of images"
            )
        functions = saved_functions.image_functions(model, scope)
    else:
        functions = saved_functions.text_functions(model, scope, max_length)
        # A captured table must be tracked.
        module.table = getattr(saved_functions.tokenizer_of(model), "table", None)
    for name, function in functions.items():
        setattr(module, name, function)
    served = {**functions, SERVING_DEFAULT: _default_of(functions)}
    tf.saved_model.save(module, str(directory), signatures=served)
    if verbose:
        for name, function in served.items():
            print(_describe(name, function.get_concrete_function()))


def _default_of(functions):
    """Returns the function of `serving_default`: `score`, or else `generate`."""
    if "score" in functions:
        return functions["score"]
    generate = functions["generate"]
    arguments = inspect.signature(generate.python_function).parameters.values()
    number = sum(argument.default is argument.empty for argument in arguments)
    required = generate.input_signature[:number]
    return saved_functions.function(lambda *inputs: generate(*inputs), *required)


def check_backend(model_dir="model.keras", export_dir="DIR"):
    """Refuses other backends than TensorFlow, and names a command to run instead."""
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            "SavedModels are made on the TensorFlow backend, which has the same "
            f"weights. Received: KERAS_BACKEND={keras.backend.backend()}. Run "
            "`KERAS_BACKEND=tensorflow python -m routing_tf.export "
            f"--model_dir={model_dir} --export_dir={export_dir}`, where --model_dir is "
            'the folder of a run or a file that model.save("model.keras") wrote'
        )


def _describe(name, function):
    """Returns a line with the inputs and outputs of a function."""

    def fields(specs):
        return ", ".join(
            f"{key}: {spec.dtype.name}{spec.shape.as_list()}".replace("None", "?")
            for key, spec in specs.items()
        )

    inputs = {spec.name: spec for spec in function.structured_input_signature[0]}
    return f"{name}({fields(inputs)}) -> {fields(function.structured_outputs)}"
