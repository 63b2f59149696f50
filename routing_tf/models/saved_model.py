"""SavedModels of language and image models, with the signatures `score` and `generate`.

The one module of the models that is written for TensorFlow alone.
"""

import typing

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from routing_tf.layers.heads.routed import ROUTING_SCOPES
from routing_tf.layers.validation import check_choice
from routing_tf.layers.validation import check_positive_integer
from routing_tf.models import sampling

# Positive, for logarithms.
_SMALLEST_UNIFORM = np.finfo("float32").tiny
_MAX_INTENSITIES = 256
MAX_LENGTH = 2**20
_TEXTS = tf.TensorSpec((None,), tf.string, "texts")
_IDS = (
    tf.TensorSpec((None, None), tf.int32, "token_ids"),
    tf.TensorSpec((None, None), tf.bool, "padding_mask"),
)


def export(model, directory, routing_scope=None, max_length=None, verbose=None):
    """Writes a SavedModel that TensorFlow loads without Keras or this package.

    `tf.saved_model.load(directory)` has these functions, also as `signatures`, for any
    number of rows. No function changes a variable. Ids are those of the tokenizer,
    without the id 0 that sequences start behind.

    Models of text without an encoder:

    - `score(texts)`: a dict of `log_likelihood` `<float32>[batch]`, the natural
      logarithm of the probability of each text; `log_likelihoods` `<float32>[batch,
      tokens]` and `token_ids`, of its tokens, where `padding_mask` is True;
      `num_tokens` and `num_bytes` `<int32>[batch]`.
    - `score_ids(token_ids, padding_mask)`: the same of `<int32>[batch, tokens]`, with
      `log_likelihood`, `log_likelihoods` and `num_tokens`; in each row real tokens come
      first.
    - `generate(texts, temperature, top_k, top_p, seed, length)`: `texts`, prompts with
      what follows, and their `token_ids` `<int32>[batch, length]` and `padding_mask`,
      True up to the end id, included.
    - `generate_ids(token_ids, padding_mask, temperature, ...)`: ids and mask of these.

    Without a preprocessor `score` and `generate` are `score_ids` and `generate_ids`.
    With an encoder there are `generate` and `generate_ids` alone, which take what the
    encoder reads, as ids with the end id, and return what the decoder writes.

    Models of images:

    - `score(images)`: of `<uint8>[batch, height, width, channels]`, `log_likelihood`
      `<float32>[batch]`, and `log_likelihoods` of the shape of the images.
    - `generate(num_images, temperature, top_k, top_p, seed)`: `images` `<uint8>`.
    - Models with `num_classes` take `labels` `<int32>[batch]`: `score(images, labels)`
      and `generate(labels, ...)`.

    `temperature` (default 1; 0 is greedy), `top_k` (default 0, all), `top_p` (default
    1, all), `seed` (default 0) and `length` (tokens of a row, the prompt included;
    default `max_length`) are scalars. The functions have these defaults; of
    `signatures` only TensorFlow Serving knows them. What is drawn depends on the seed,
    the row and the position alone. Generating has the routing scope `"prefix"`; models
    that let later tokens decide who is a member by a flaw of the release compute the
    whole row anew for each token.

    Args:
        model: a `RoutingTransformerCausalLM`, `RoutingTransformerSeq2SeqLM` or
            `RoutingImageTransformer`.
        directory: folder to write into, which is made.
        routing_scope: that of `score`, `"full"` or `"prefix"`; None (the default) for
            that of the hyperparameters.
        max_length: tokens a text may have; longer ones are refused by the saved
            functions, which compute with this length whatever a text has. At most
            2**20; None (the default) for that of the model's sequences. Not for images.
        verbose: whether to print the functions. Defaults to None, not to.

    Raises:
        ValueError: on another backend than TensorFlow, if an argument is not valid, or
            a model's inputs cannot be those of a SavedModel.

    Example:

    ```python
    import keras
    import tensorflow as tf
    from routing_tf import models
    from routing_tf.tokenizers import ByteTokenizer

    lm = models.RoutingTransformerCausalLM.from_preset(
        "byte_tiny",
        preprocessor=models.RoutingTransformerCausalLMPreprocessor(ByteTokenizer()),
    )
    if keras.backend.backend() == "tensorflow":
        lm.export("byte_tiny", max_length=32)
        served = tf.saved_model.load("byte_tiny")
        print(served.score(["It was a dark night"])["log_likelihood"])
        print(served.generate(["It was"], temperature=0.8, seed=1)["texts"])
    ```
    """
    check_backend(export_dir=directory)
    scope = model.hyperparameters.routing_scope
    scope = scope if routing_scope is None else routing_scope
    _check_scope(model.hyperparameters, scope)
    module = tf.Module()
    # Plain variables: a Keras model would bring its classes along.
    module.weights = [variable.value for variable in model.weights]
    if model.hyperparameters.kind == "image":
        if max_length is not None:
            raise ValueError(
                "`max_length` is for models of texts. Received: "
                f"max_length={max_length} for a model of images"
            )
        functions = _image_functions(model, scope)
    else:
        functions = _text_functions(model, scope, max_length)
        # Where its table is captured it must be tracked.
        module.table = getattr(_tokenizer(model), "table", None)
    for name, function in functions.items():
        setattr(module, name, function)
    tf.saved_model.save(module, str(directory), signatures=functions)
    if verbose:
        for name, function in functions.items():
            print(_describe(name, function.get_concrete_function()))


def check_backend(model_dir="model.keras", export_dir="DIR"):
    """Refuses other backends than TensorFlow, with a way out.

    Args:
        model_dir: what to export. Defaults to the name of a file to save.
        export_dir: where to. Defaults to a name that stands for a folder.

    Raises:
        ValueError: if the backend is another one.
    """
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            "SavedModels are made on the TensorFlow backend, which has the same "
            f"weights. Received: KERAS_BACKEND={keras.backend.backend()}. Run "
            "`KERAS_BACKEND=tensorflow python -m routing_tf.export "
            f"--model_dir={model_dir} --export_dir={export_dir}`, where --model_dir is "
            'the folder of a run or a file that model.save("model.keras") has written'
        )


def _check_scope(hyperparameters, routing_scope):
    check_choice("routing_scope", routing_scope, ROUTING_SCOPES)
    leak = hyperparameters.sees_later_tokens(routing_scope)
    if routing_scope == "prefix" and leak:
        raise ValueError(
            "Prefixes can only be scored if no output depends on later tokens. "
            f'Received: routing_scope="prefix" for a model with {leak}='
            f'{getattr(hyperparameters, leak)!r}. Use "full"'
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


def _function(function, *specs):
    """Compiles a function of tensors, whose specs have the names of its arguments."""
    return tf.function(function, input_signature=specs, autograph=False)


def _check(condition, message, *data):
    """Refuses inputs when the function runs."""
    return tf.debugging.Assert(tf.reduce_all(condition), [message, *data])


def _checked(values, condition, message, *data):
    """Returns values, if a condition holds when the function runs."""
    # Else an operation on them could fail first, and say less.
    with tf.control_dependencies([_check(condition, message, *data)]):
        return tf.identity(values)


def _in_range(name, values, limit):
    """Returns integers that must be from 0 to below a limit."""
    is_valid = (values >= 0) & (values < limit)
    message = f"{name} must be from 0 to {limit - 1}. Received:"
    return _checked(values, is_valid, message, values)


# ======================================================================================
# What samples
# ======================================================================================


class _Sampler(typing.NamedTuple):
    """Settings of sampling, scalars that are inputs of a saved function."""

    temperature: tf.Tensor
    top_k: tf.Tensor
    top_p: tf.Tensor
    seed: tf.Tensor

    @staticmethod
    def specs():
        dtypes = {"temperature": tf.float32, "top_k": tf.int32, "top_p": tf.float32}
        dtypes["seed"] = tf.int32
        return [tf.TensorSpec((), dtype, name) for name, dtype in dtypes.items()]

    @classmethod
    def defaults(cls):
        return cls(*map(tf.constant, (1.0, 0, 1.0, 0)))

    def check(self):
        """Refuses settings out of range when the function runs."""
        _check(
            (self.temperature >= 0) & (self.top_k >= 0),
            "`temperature` and `top_k` must not be negative. Received:",
            self.temperature,
            self.top_k,
        )
        _check(
            (self.top_p > 0) & (self.top_p <= 1),
            "`top_p` must be more than 0, and at most 1. Received:",
            self.top_p,
        )

    def draw(self, logits, index):
        """Draws the next tokens at a position: `<int32>[batch]`."""
        probabilities = sampling.filtered_probabilities(
            logits, self.temperature, self.top_k, self.top_p
        )
        # Numbers of a row do not depend on how many rows follow.
        uniform = tf.random.stateless_uniform(
            tf.shape(probabilities),
            seed=tf.stack([self.seed, index]),
            minval=_SMALLEST_UNIFORM,
        )
        return sampling.draw(probabilities, uniform)


def _continue(sampler, step, cache, tokens, lengths, first, length, end_id=None):
    """Continues rows of tokens behind their own starts.

    Args:
        sampler: `_Sampler`.
        step: function of `tokens`, the cache and a position; returns the logits of the
            token behind this position `<float>[batch, vocabulary_size]`, and the cache.
        cache: of the tokens before the position `first`.
        tokens: `<int32>[batch, buffer + 1]`, the id 0 and a given start.
        lengths: `<int32>[batch]`, tokens that are given, without the id 0.
        first: position at which the loop begins, where all are given.
        length: number of tokens wanted, without the id 0.
        end_id: id that ends a row; None (the default) for none.

    Returns:
        `tokens`, 0 behind the end ids.
    """

    def condition(tokens, ended, cache, index):
        return (index < length) & ~tf.reduce_all(ended)

    def body(tokens, ended, cache, index):
        logits, cache = step(tokens, cache, index)
        chosen = tf.where(ended, 0, sampler.draw(logits, index))
        is_given = index < lengths
        chosen = tf.where(is_given, ops.take(tokens, index + 1, axis=1), chosen)
        if end_id is not None:
            ended |= ~is_given & (chosen == end_id)
        tokens = ops.slice_update(tokens, [0, index + 1], chosen[:, None])
        return tokens, ended, cache, index + 1

    ended = tf.zeros_like(lengths, tf.bool)
    start = (tokens, ended, cache, ops.cast(first, "int32"))
    return ops.while_loop(condition, body, start)[0]


# ======================================================================================
# Texts
# ======================================================================================


class _TextModel:
    """What saved functions of a text model compute; sequences are ragged ids."""

    def __init__(self, lm, routing_scope, max_length):
        self.lm = lm
        self.hyperparameters = lm.hyperparameters
        self.routing_scope = routing_scope
        self.max_length = max_length
        self.tokenizer = _tokenizer(lm)
        self.end_id = getattr(self.tokenizer, "end_token_id", None)
        # Functions for texts and for ids share one trace.
        self._score_rows = tf.function(self._score_rows, autograph=False)
        self._generate_rows = tf.function(self._generate_rows, autograph=False)

    def from_texts(self, texts):
        """Returns the sequences of a batch of texts."""
        ids = self.tokenizer.tokenize(texts)
        if not isinstance(ids, tf.RaggedTensor):
            ids = tf.RaggedTensor.from_tensor(ids, padding=self.tokenizer.pad_token_id)
        return ids

    def from_ids(self, token_ids, padding_mask):
        """Returns the sequences of ids with padding."""
        padding_mask = _checked(
            padding_mask,
            tf.shape(padding_mask) == tf.shape(token_ids),
            "`padding_mask` must have the shape of `token_ids`. Received shapes:",
            tf.shape(padding_mask),
            tf.shape(token_ids),
        )
        lengths = tf.reduce_sum(tf.cast(padding_mask, tf.int32), axis=-1)
        _check(
            tf.sequence_mask(lengths, tf.shape(token_ids)[1]) == padding_mask,
            "`padding_mask` must be True on the first tokens of each row, and False "
            "behind them. Received:",
            padding_mask,
        )
        sequences = tf.RaggedTensor.from_tensor(token_ids, lengths=lengths)
        size = self.hyperparameters.vocabulary_size
        return sequences.with_values(_in_range("Ids", sequences.values, size))

    def to_texts(self, token_ids, padding_mask):
        """Returns the texts of ids."""
        keep = padding_mask
        for special in getattr(self.tokenizer, "special_token_ids", ()):
            keep &= token_ids != special
        return self.tokenizer.detokenize(tf.ragged.boolean_mask(token_ids, keep))

    def behind_start(self, sequences, limit, name="length"):
        """Returns the id 0 with the sequences behind it, and their lengths."""
        lengths = tf.cast(sequences.row_lengths(), tf.int32)
        _check(
            lengths <= limit,
            f"Inputs must not be longer than `{name}` tokens, and that at most the "
            f"{self.max_length} of this SavedModel; export it with another max_length. "
            "Received these numbers of tokens:",
            lengths,
        )
        ids = sequences.to_tensor(0, shape=(None, self.max_length))
        return tf.pad(ids, [(0, 0), (1, 0)]), lengths

    def score(self, sequences):
        """Returns the log-likelihoods `<float32>[batch, max_length]`, and the mask."""
        tokens, lengths = self.behind_start(sequences, self.max_length, "max_length")
        if self.hyperparameters.padding_has_influence:
            _check(
                lengths == self.max_length,
                "Padding has influence on what this model computes: all rows must have "
                f"{self.max_length} tokens. Received:",
                lengths,
            )
        return self._score_rows(tokens, lengths)

    def _score_rows(self, tokens, lengths):
        mask = tf.sequence_mask(lengths, self.max_length)
        token_ids = tf.where(mask, tokens[:, :-1], 0)
        inputs = {"token_ids": token_ids, "padding_mask": mask}
        logits = self.lm(inputs, routing_scope=self.routing_scope)
        nats = keras.losses.sparse_categorical_crossentropy(
            tokens[:, 1:], tf.cast(logits, tf.float32), from_logits=True
        )
        return tf.where(mask, -nats, 0.0), mask

    def generate(self, sequences, sampler, length, memory=()):
        """Returns ids `<int32>[batch, length]` behind the sequences, and their mask."""
        sampler.check()
        length = _checked(
            length,
            (length >= 1) & (length <= self.max_length),
            f"`length` must be from 1 to {self.max_length}. Received:",
            length,
        )
        rows = self.behind_start(sequences, length)
        return self._generate_rows(*rows, sampler, length, memory)

    def _generate_rows(self, tokens, lengths, sampler, length, memory):
        first = tf.minimum(tf.reduce_min(lengths), length)
        start = self._steps
        if self.hyperparameters.sees_later_tokens("prefix"):
            start = self._recompute
        step, cache, first = start(tokens, first, memory)
        tokens = _continue(
            sampler, step, cache, tokens, lengths, first, length, self.end_id
        )
        tokens = tokens[:, 1 : length + 1]
        if self.end_id is None:
            return tokens, tf.ones_like(tokens, tf.bool)
        is_new = tf.range(length) >= lengths[:, None]
        ends = tf.cast((tokens == self.end_id) & is_new, tf.int32)
        return tokens, tf.cumsum(ends, axis=-1, exclusive=True) == 0

    def _steps(self, tokens, first, memory):
        """Returns the step with a cache, the cache, and where the loop begins."""
        batch = tf.shape(tokens)[0]
        cache = self.lm.make_cache(batch, self.max_length, *memory)
        influence = self.hyperparameters.padding_has_influence
        if memory or influence:
            first = tf.zeros_like(first)
        else:
            mask = tf.range(self.max_length) <= first
            mask = tf.broadcast_to(mask, (batch, self.max_length))
            # The loop feeds the last of these tokens again: the cache replaces it.
            _, _, cache = self.lm.call_with_cache(tokens[:, :-1], cache, 0, mask)

        def step(tokens, cache, index):
            token = ops.take(tokens, index, axis=1)[:, None]
            logits, _, cache = self.lm.call_with_cache(token, cache, index)
            return logits[:, 0], cache

        return step, cache, first

    def _recompute(self, tokens, first, memory):
        """Returns what `_steps` does, with a step that computes the whole buffer."""
        positions = tf.range(self.max_length)

        def step(tokens, cache, index):
            token_ids = tokens[:, :-1]
            mask = tf.broadcast_to(positions <= index, tf.shape(token_ids))
            hidden = self.lm.backbone.decode(
                token_ids, mask, *memory, routing_scope="prefix"
            )
            return self.lm.logits_of(ops.take(hidden, index, axis=1)), cache

        return step, (), first


class _Seq2SeqModel(_TextModel):
    """The same with an encoder, which reads the sequences; the decoder starts anew."""

    def __init__(self, lm, routing_scope, max_length):
        super().__init__(lm, routing_scope, max_length)
        if self.hyperparameters.encoder_inputs != "tokens":
            raise ValueError(
                "The encoder must read ids to be exported. Received: a model with "
                f"encoder_inputs={self.hyperparameters.encoder_inputs!r}"
            )
        self.input_length = self.hyperparameters.max_input_length
        if lm.preprocessor is not None:
            self.input_length = lm.preprocessor.encoder_sequence_length

    def from_texts(self, texts):
        sequences = super().from_texts(texts)
        ends = tf.fill((sequences.nrows(), 1), self.end_id)
        return tf.concat([sequences, ends], axis=1)

    def generate(self, sequences, sampler, length):
        lengths = sequences.row_lengths()
        _check(
            lengths <= self.input_length,
            f"Inputs must not be longer than {self.input_length} tokens, the end id "
            "included. Received these numbers of tokens:",
            lengths,
        )
        memory = self.lm.backbone.encode(
            {
                "encoder_token_ids": sequences.to_tensor(
                    0, shape=(None, self.input_length)
                ),
                "encoder_padding_mask": tf.sequence_mask(lengths, self.input_length),
            }
        )
        nothing = tf.zeros((sequences.nrows(), 0), tf.int32)
        nothing = tf.RaggedTensor.from_tensor(nothing)
        return super().generate(nothing, sampler, length, memory)


def default_max_length(lm):
    """Returns the `max_length` of a SavedModel of texts for which none is given."""
    h = lm.hyperparameters
    limits = [h.max_sequence_length, h.truncate_length]
    if h.kind == "seq2seq" and lm.preprocessor is not None:
        # Local heads pair blocks of both sides, so their lengths matter.
        limits = [lm.preprocessor.decoder_sequence_length, h.truncate_length]
    return min(limit for limit in limits if limit is not None)


def _tokenizer(lm):
    return None if lm.preprocessor is None else lm.preprocessor.tokenizer


def _text_functions(lm, routing_scope, max_length):
    """Returns the functions of a model of texts by their names."""
    h = lm.hyperparameters
    if max_length is None:
        max_length = default_max_length(lm)
    check_positive_integer("max_length", max_length)
    if max_length > MAX_LENGTH:
        raise ValueError(
            f"`max_length` must be at most {MAX_LENGTH:,}: every call computes with "
            f"this length. Received: max_length={max_length:,}. Pass a smaller one"
        )
    if h.truncate_length is not None and max_length > h.truncate_length:
        raise ValueError(
            "`max_length` must not exceed the length to which this model cuts its "
            f"inputs, {h.truncate_length}. Received: max_length={max_length}"
        )
    if h.kind == "seq2seq":
        functions = _generate_functions(_Seq2SeqModel(lm, routing_scope, max_length))
    else:
        model = _TextModel(lm, routing_scope, max_length)
        functions = {**_score_functions(model), **_generate_functions(model)}
    if _tokenizer(lm) is None:
        functions |= {
            name.removesuffix("_ids"): function for name, function in functions.items()
        }
    return functions


def _score_functions(model):
    def sums(values, mask):
        return {
            "log_likelihood": tf.reduce_sum(values, axis=-1),
            "num_tokens": tf.reduce_sum(tf.cast(mask, tf.int32), axis=-1),
        }

    def score(texts):
        sequences = model.from_texts(texts)
        values, mask = model.score(sequences)
        width = tf.cast(tf.reduce_max(sequences.row_lengths()), tf.int32)
        width = tf.maximum(width, 0)
        return {
            "log_likelihoods": values[:, :width],
            "token_ids": sequences.to_tensor(0),
            "padding_mask": mask[:, :width],
            "num_bytes": tf.strings.length(texts),
            **sums(values, mask),
        }

    def score_ids(token_ids, padding_mask):
        values, mask = model.score(model.from_ids(token_ids, padding_mask))
        width = tf.shape(token_ids)[1]
        padding = [(0, 0), (0, tf.maximum(0, width - model.max_length))]
        values = tf.pad(values, padding)[:, :width]
        return {"log_likelihoods": values, **sums(values, mask)}

    functions = {"score_ids": _function(score_ids, *_IDS)}
    if model.tokenizer is not None:
        functions["score"] = _function(score, _TEXTS)
    return functions


def _generate_functions(model):
    t, k, p, s = _Sampler.defaults()
    n = tf.constant(model.max_length)
    specs = [*_Sampler.specs(), tf.TensorSpec((), tf.int32, "length")]

    def generate(texts, temperature=t, top_k=k, top_p=p, seed=s, length=n):
        sampler = _Sampler(temperature, top_k, top_p, seed)
        ids, mask = model.generate(model.from_texts(texts), sampler, length)
        texts = model.to_texts(ids, mask)
        return {"texts": texts, "token_ids": ids, "padding_mask": mask}

    def generate_ids(
        token_ids, padding_mask, temperature=t, top_k=k, top_p=p, seed=s, length=n
    ):
        sampler = _Sampler(temperature, top_k, top_p, seed)
        sequences = model.from_ids(token_ids, padding_mask)
        ids, mask = model.generate(sequences, sampler, length)
        return {"token_ids": ids, "padding_mask": mask}

    functions = {"generate_ids": _function(generate_ids, *_IDS, *specs)}
    if model.tokenizer is not None:
        functions["generate"] = _function(generate, _TEXTS, *specs)
    return functions


# ======================================================================================
# Images
# ======================================================================================


class _ImageModel:
    """What saved functions of an image model compute."""

    def __init__(self, model, routing_scope):
        self.model = model
        self.routing_scope = routing_scope
        self.places = model.places().reshape(-1).astype("int32")

    def score(self, images, labels=()):
        """Returns the log-likelihoods of sub-pixels; `labels` has one or no tensor."""
        labels = self._checked(labels)
        size = self.model.hyperparameters.vocabulary_size
        targets = _in_range("`images`", tf.cast(images, tf.int32), size)
        inputs = {"images": targets, **self._named(labels)}
        logits = self.model(inputs, routing_scope=self.routing_scope)
        nats = keras.losses.sparse_categorical_crossentropy(
            targets, tf.cast(logits, tf.float32), from_logits=True
        )
        sums = tf.reduce_sum(nats, axis=[1, 2, 3])
        return {"log_likelihood": -sums, "log_likelihoods": -nats}

    def generate(self, num_images, sampler, labels=()):
        """Returns `<uint8>[num_images, height, width, channels]`."""
        sampler.check()
        labels = self._checked(labels)
        length = self.model.num_subpixels
        values = tf.zeros((num_images, length + 1), tf.int32)
        step, cache = self._step, ()
        if self.model.hyperparameters.sees_later_tokens("prefix"):
            step = self._recompute
        else:
            cache = self.model.make_cache(num_images)
        given = tf.zeros((num_images,), tf.int32)
        values = _continue(
            sampler,
            lambda *state: step(*state, labels),
            cache,
            values,
            lengths=given,
            first=0,
            length=length,
        )
        return {"images": tf.cast(self._arrange(values), tf.uint8)}

    def _step(self, values, cache, index, labels):
        before = ops.take(values, index, axis=1)
        return self.model.call_with_cache(before, cache, index, *labels)

    def _recompute(self, values, cache, index, labels):
        visible = tf.reshape(self.places <= index, (1, *self.model.image_shape))
        images = self._arrange(values)
        inputs = {
            "images": images,
            "padding_mask": tf.broadcast_to(visible, tf.shape(images)),
            **self._named(labels),
        }
        logits = self.model(inputs, routing_scope="prefix")
        size = self.model.hyperparameters.vocabulary_size
        logits = tf.reshape(logits, (-1, self.model.num_subpixels, size))
        return ops.take(logits, tf.gather(np.argsort(self.places), index), axis=1), ()

    def _arrange(self, values):
        """Returns images of values in the order of the model, behind a 0."""
        images = tf.gather(values, self.places + 1, axis=1)
        return tf.reshape(images, (-1, *self.model.image_shape))

    def _named(self, labels):
        return dict(zip(["labels"], labels))

    def _checked(self, labels):
        size = self.model.hyperparameters.num_classes
        return [_in_range("`labels`", values, size) for values in labels]


def _image_functions(model, routing_scope):
    """Returns the functions of a model of images by their names."""
    h = model.hyperparameters
    if h.vocabulary_size > _MAX_INTENSITIES:
        raise ValueError(
            f"Images must have at most {_MAX_INTENSITIES} intensities to be exported. "
            f"Received: vocabulary_size={h.vocabulary_size}"
        )
    image = _ImageModel(model, routing_scope)
    t, k, p, s = _Sampler.defaults()

    def score(images):
        return image.score(images)

    def score_of_class(images, labels):
        return image.score(images, (labels,))

    def generate(num_images, temperature=t, top_k=k, top_p=p, seed=s):
        return image.generate(num_images, _Sampler(temperature, top_k, top_p, seed))

    def generate_of_class(labels, temperature=t, top_k=k, top_p=p, seed=s):
        sampler = _Sampler(temperature, top_k, top_p, seed)
        return image.generate(tf.shape(labels)[0], sampler, (labels,))

    images = tf.TensorSpec((None, *model.image_shape), tf.uint8, "images")
    specs = _Sampler.specs()
    if h.num_classes is None:
        number = tf.TensorSpec((), tf.int32, "num_images")
        return {
            "score": _function(score, images),
            "generate": _function(generate, number, *specs),
        }
    labels = tf.TensorSpec((None,), tf.int32, "labels")
    return {
        "score": _function(score_of_class, images, labels),
        "generate": _function(generate_of_class, labels, *specs),
    }
