"""SavedModels of language and image models, with the signatures `score` and `generate`.

Of the models, only this module and those that it calls are written for TensorFlow.
"""

import inspect

import keras
import tensorflow as tf

from routing_tf.layers.support.data_shapes import static_shapes
from routing_tf.models import saved_images
from routing_tf.models import saved_texts
from routing_tf.models import signatures
from routing_tf.models.export_formats import check_format
from routing_tf.models.token_scorer import scope_to_score

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

        See `routing_tf.models.saved_model.export` for its functions.

        Args:
            filepath: folder to write into.
            format: `"tf_saved_model"` (the default) for these functions;
                `keras.Model.export` handles all others.
            verbose: whether to print the functions. None (the default) means no.
            input_signature: None (the default); with any other signature,
                `keras.Model.export` writes a SavedModel of only the call of the model.
            **kwargs: `routing_scope` and, for texts, `max_length` of
                `routing_tf.models.saved_model.export`; otherwise arguments of
                `keras.Model.export`.

        Raises:
            ValueError: as in `routing_tf.models.saved_model.export`, or if the format
                cannot have the heads of the model.
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
    number of rows. No function changes a variable. Ids are those of the tokenizer,
    without the leading id 0.

    Models of text without an encoder:

    - `score(texts)`: a dict of `log_likelihood` `<float32>[batch]`, the natural
      logarithm of the probability of each text; `log_likelihoods`
      `<float32>[batch, tokens]` and `token_ids`, of its tokens, where `padding_mask` is
      True; `num_tokens` and `num_bytes` `<int32>[batch]`.
    - `score_ids(token_ids, padding_mask)`: the same for `<int32>[batch, tokens]`, with
      `log_likelihood`, `log_likelihoods` and `num_tokens`; in each row real tokens come
      first.
    - `generate(texts, temperature, top_k, top_p, seed, length)`: `texts`, the prompts
      with their continuations, and their `token_ids` `<int32>[batch, length]` and
      `padding_mask`, True up to and including the end id.
    - `generate_ids(token_ids, padding_mask, temperature, ...)`: ids and mask of these.

    Without a preprocessor, `score` and `generate` are `score_ids` and `generate_ids`.
    With an encoder, there are only `generate` and `generate_ids`, which take the inputs
    of the encoder (as ids, with the end id) and return the texts of the decoder.

    The signature `serving_default`, which servers use if a request names none, is
    `score`: texts in, scores out. With an encoder, it is `generate` with its defaults,
    and without settings among its inputs: texts in, texts out.

    Models of images:

    - `score(images)`: for `<uint8>[batch, height, width, channels]`, `log_likelihood`
      `<float32>[batch]`, and `log_likelihoods` of the shape of the images.
    - `generate(num_images, temperature, top_k, top_p, seed)`: `images` `<uint8>`.
    - Models with `num_classes` take `labels` `<int32>[batch]`: `score(images, labels)`
      and `generate(labels, ...)`.

    `temperature` (default 1; 0 is greedy), `top_k` (default 0, all), `top_p` (default
    1, all), `seed` (default 0) and `length` (tokens of a row, including the prompt;
    default `max_length`) are scalars. The functions have these defaults; of
    `signatures`, only TensorFlow Serving knows them. Draws depend only on the seed, the
    row and the position. Generating has the routing scope `"prefix"`; models in which
    later tokens decide who is a member, by a flaw of the release, compute the whole row
    for each token.

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

    Raises:
        ValueError: on another backend than TensorFlow, if an argument is invalid, or if
            a SavedModel cannot have the model's inputs.

    Example:

    ```python
    import keras
    import tensorflow as tf
    from routing_tf import models

    lm = models.RoutingTransformerCausalLM.from_preset("byte_tiny")
    if keras.backend.backend() == "tensorflow":
        lm.export("byte_tiny", max_length=32)
        served = tf.saved_model.load("byte_tiny")
        print(served.score(["It was a dark night"])["log_likelihood"])
        print(served.generate(["It was"], temperature=0.8, seed=1)["texts"])
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
        functions = saved_images.image_functions(model, scope)
    else:
        functions = saved_texts.text_functions(model, scope, max_length)
        # A captured table must be tracked.
        module.table = getattr(saved_texts.tokenizer_of(model), "table", None)
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
    return signatures.function(lambda *inputs: generate(*inputs), *required)


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
