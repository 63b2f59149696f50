"""The functions of SavedModels of language and image models."""

import typing

import keras
import keras_hub
import numpy as np
import tensorflow as tf
from keras import ops

from routing_tf.layers.support import tensors
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.models import steps

_MAX_INTENSITIES = 256

MAX_LENGTH = 2**20
_TEXTS = tf.TensorSpec((None,), tf.string, "texts")
_IDS = (
    tf.TensorSpec((None, None), tf.int32, "token_ids"),
    tf.TensorSpec((None, None), tf.bool, "padding_mask"),
)

# Positive, for logarithms.
_SMALLEST_UNIFORM = np.finfo("float32").tiny


def filtered_probabilities(logits, temperature=1.0, top_k=0, top_p=1.0):
    """Returns the probabilities of the next token that a sampler draws from.

    First, the logits `<float>[batch, vocabulary_size]` are divided by the temperature
    (0 keeps only the most probable token). Then only the `top_k` most probable tokens
    are kept (0 keeps all). Then only the first tokens are kept whose probabilities,
    before tokens were dropped, sum to more than `top_p`. The rest, at least one token,
    sums to 1. The settings are numbers or scalars.

    Reference: `TopKSampler` and `TopPSampler` of keras_hub.
    """
    logits = ops.cast(logits, "float32")
    vocabulary_size = logits.shape[-1]
    temperature = ops.cast(temperature, "float32")
    is_drawn = temperature > 0
    # A small temperature must not make the largest logit infinite.
    logits -= tensors.largest(logits, axis=-1, keepdims=True)
    probabilities = ops.softmax(logits / ops.where(is_drawn, temperature, 1.0))
    values, order = ops.top_k(probabilities, k=vocabulary_size, sorted=True)
    ranks = ops.argsort(order, axis=-1)
    top_p = ops.cast(top_p, "float32")
    # Sums may be rounded to more than 1.
    in_top_p = ops.logical_or(ops.cumsum(values, axis=-1) <= top_p, top_p >= 1.0)
    # The token that exceeds `top_p` also stays.
    limit = 1 + ops.sum(ops.cast(in_top_p, "int32"), axis=-1, keepdims=True)
    top_k = ops.cast(top_k, "int32")
    limit = ops.minimum(limit, ops.where(top_k > 0, top_k, vocabulary_size))
    limit = ops.where(is_drawn, limit, 1)
    kept = ops.where(ops.cast(ranks, "int32") < limit, probabilities, 0.0)
    return kept / ops.sum(kept, axis=-1, keepdims=True)


def draw(probabilities, uniform):
    """Draws a token `<int32>[batch]` for each row; equal numbers draw equal tokens.

    `uniform` are independent and uniform in (0, 1), of the shape of `probabilities`.
    """
    # The largest of Gumbel variables, because a rounded sum of probabilities could end
    # in a dropped token.
    noise = -ops.log(-ops.log(uniform))
    return ops.cast(ops.argmax(ops.log(probabilities) + noise, axis=-1), "int32")


def function(python_function, *specs):
    """Compiles a function of tensors; specs have the names of its arguments."""
    return tf.function(python_function, input_signature=specs, autograph=False)


def check(condition, message, *data):
    """Refuses inputs when the function runs."""
    return tf.debugging.Assert(tf.reduce_all(condition), [message, *data])


def checked(values, condition, message, *data):
    """Returns values if a condition holds when the function runs."""
    # Otherwise an operation on them could fail first, with a less helpful message.
    with tf.control_dependencies([check(condition, message, *data)]):
        return tf.identity(values)


def in_range(name, values, limit):
    """Returns integers, which must be from 0 to below a limit."""
    is_valid = (values >= 0) & (values < limit)
    message = f"{name} must be from 0 to {limit - 1}. Received:"
    return checked(values, is_valid, message, values)


class Settings(typing.NamedTuple):
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
        check(
            (self.temperature >= 0) & (self.top_k >= 0),
            "`temperature` and `top_k` must not be negative. Received:",
            self.temperature,
            self.top_k,
        )
        check(
            (self.top_p > 0) & (self.top_p <= 1),
            "`top_p` must be more than 0, and at most 1. Received:",
            self.top_p,
        )


class SettingsSampler(keras_hub.samplers.Sampler):
    """A sampler whose settings are tensors, so that they can be inputs.

    Draws depend only on the seed, the row and the position. It ends at `length` tokens,
    including the leading id.
    """

    def __init__(self, settings, length):
        super().__init__()
        self.settings = settings
        self.length = length

    def __call__(self, next, prompt, **options):
        def next_at(prompt, cache, index):
            # Those of the step that is being traced, whose draws follow at once.
            self.index = index
            return next(prompt, cache, index)

        return super().__call__(next_at, prompt, **options)

    def run_loop(self, cond, body, model=None, loop_vars=None, **options):
        index = loop_vars[2]
        return super().run_loop(cond, body, model, loop_vars, self.length - index)

    def compute_probabilities(self, logits):
        s = self.settings
        return filtered_probabilities(logits, s.temperature, s.top_k, s.top_p)

    def get_next_token(self, probabilities):
        # Numbers of a row do not depend on how many rows follow.
        uniform = tf.random.stateless_uniform(
            tf.shape(probabilities),
            seed=tf.stack([self.settings.seed, self.index - 1]),
            minval=_SMALLEST_UNIFORM,
        )
        return draw(probabilities, uniform)


class TextModel:
    """The computations of a text model's saved functions; sequences are ragged ids."""

    def __init__(self, lm, routing_scope, max_length):
        self.lm = lm
        self.steps = steps.TextSteps(lm)
        self.hyperparameters = lm.hyperparameters
        self.routing_scope = routing_scope
        self.max_length = max_length
        self.tokenizer = tokenizer_of(lm)
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
        padding_mask = checked(
            padding_mask,
            tf.shape(padding_mask) == tf.shape(token_ids),
            "`padding_mask` must have the shape of `token_ids`. Received shapes:",
            tf.shape(padding_mask),
            tf.shape(token_ids),
        )
        lengths = tf.reduce_sum(tf.cast(padding_mask, tf.int32), axis=-1)
        check(
            tf.sequence_mask(lengths, tf.shape(token_ids)[1]) == padding_mask,
            "`padding_mask` must be True for the first tokens of each row, and False "
            "after them. Received:",
            padding_mask,
        )
        sequences = tf.RaggedTensor.from_tensor(token_ids, lengths=lengths)
        size = self.hyperparameters.vocabulary_size
        return sequences.with_values(in_range("Ids", sequences.values, size))

    def to_texts(self, token_ids, padding_mask):
        """Returns the texts of ids."""
        keep = padding_mask
        for special in getattr(self.tokenizer, "special_token_ids", ()):
            keep &= token_ids != special
        return self.tokenizer.detokenize(tf.ragged.boolean_mask(token_ids, keep))

    def behind_start(self, sequences, limit, name="length"):
        """Returns the sequences with a leading id 0, and their lengths."""
        lengths = tf.cast(sequences.row_lengths(), tf.int32)
        check(
            lengths <= limit,
            f"Inputs must not be longer than `{name}` tokens, which must not exceed "
            f"the {self.max_length} of this SavedModel; export it with another "
            "max_length. Received these numbers of tokens:",
            lengths,
        )
        ids = sequences.to_tensor(0, shape=(None, self.max_length))
        return tf.pad(ids, [(0, 0), (1, 0)]), lengths

    def score(self, sequences):
        """Returns the log-likelihoods `<float32>[batch, max_length]`, and the mask."""
        tokens, lengths = self.behind_start(sequences, self.max_length, "max_length")
        if self.hyperparameters.padding_has_influence:
            check(
                lengths == self.max_length,
                "Padding influences the results of this model, so all rows must have "
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

    def generate(self, sequences, settings, length, memory=()):
        """Returns ids `<int32>[batch, length]` that continue rows, and their mask."""
        settings.check()
        length = checked(
            length,
            (length >= 1) & (length <= self.max_length),
            f"`length` must be from 1 to {self.max_length}. Received:",
            length,
        )
        rows = self.behind_start(sequences, length)
        return self._generate_rows(*rows, settings, length, memory)

    def _generate_rows(self, tokens, lengths, settings, length, memory):
        tokens, mask = steps.continue_rows(
            self.steps,
            SettingsSampler(settings, length + 1),
            tokens,
            tf.sequence_mask(lengths + 1, self.max_length + 1),
            self.steps.begin(tf.shape(tokens)[0], self.max_length, memory),
            None if self.end_id is None else [self.end_id],
            num_inputs=self.max_length,
        )
        return tokens[:, 1 : length + 1], mask[:, 1 : length + 1]


class Seq2SeqModel(TextModel):
    """The same with an encoder, which reads the sequences, and an empty decoder."""

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

    def generate(self, sequences, settings, length):
        lengths = sequences.row_lengths()
        check(
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
        return super().generate(nothing, settings, length, memory)


def default_max_length(lm):
    """Returns the default `max_length` of a SavedModel of texts."""
    h = lm.hyperparameters
    if h.kind == "seq2seq" and lm.preprocessor is not None:
        # Local heads pair blocks of both sequences, so their lengths matter.
        length = lm.preprocessor.decoder_sequence_length
        return min(length, h.truncate_length or length)
    return steps.longest_input(h)


def tokenizer_of(lm):
    """Returns the tokenizer of a language model; None if it takes ids."""
    return None if lm.preprocessor is None else lm.preprocessor.tokenizer


def text_functions(lm, routing_scope, max_length):
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
    steps.check_not_cut(h, max_length)
    if h.kind == "seq2seq":
        functions = _generate_functions(Seq2SeqModel(lm, routing_scope, max_length))
    else:
        model = TextModel(lm, routing_scope, max_length)
        functions = {**_score_functions(model), **_generate_functions(model)}
    if tokenizer_of(lm) is None:
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

    functions = {"score_ids": function(score_ids, *_IDS)}
    if model.tokenizer is not None:
        functions["score"] = function(score, _TEXTS)
    return functions


def _generate_functions(model):
    t, k, p, s = Settings.defaults()
    n = tf.constant(model.max_length)
    specs = [*Settings.specs(), tf.TensorSpec((), tf.int32, "length")]

    def generate(texts, temperature=t, top_k=k, top_p=p, seed=s, length=n):
        settings = Settings(temperature, top_k, top_p, seed)
        ids, mask = model.generate(model.from_texts(texts), settings, length)
        texts = model.to_texts(ids, mask)
        return {"texts": texts, "token_ids": ids, "padding_mask": mask}

    def generate_ids(
        token_ids, padding_mask, temperature=t, top_k=k, top_p=p, seed=s, length=n
    ):
        settings = Settings(temperature, top_k, top_p, seed)
        sequences = model.from_ids(token_ids, padding_mask)
        ids, mask = model.generate(sequences, settings, length)
        return {"token_ids": ids, "padding_mask": mask}

    functions = {"generate_ids": function(generate_ids, *_IDS, *specs)}
    if model.tokenizer is not None:
        functions["generate"] = function(generate, _TEXTS, *specs)
    return functions


class ImageModel:
    """The computations of an image model's saved functions."""

    def __init__(self, model, routing_scope):
        self.model = model
        self.routing_scope = routing_scope
        self.steps = steps.ImageSteps(model)

    def score(self, images, **labels):
        """Returns the log-likelihoods of sub-pixels."""
        labels = self._checked(labels)
        size = self.model.hyperparameters.vocabulary_size
        targets = in_range("`images`", tf.cast(images, tf.int32), size)
        inputs = {"images": targets, **labels}
        logits = self.model(inputs, routing_scope=self.routing_scope)
        nats = keras.losses.sparse_categorical_crossentropy(
            targets, tf.cast(logits, tf.float32), from_logits=True
        )
        sums = tf.reduce_sum(nats, axis=[1, 2, 3])
        return {"log_likelihood": -sums, "log_likelihoods": -nats}

    def generate(self, num_images, *settings, **labels):
        """Returns `<uint8>[num_images, height, width, channels]`."""
        settings = Settings(*settings)
        settings.check()
        length = self.model.num_subpixels + 1
        values, _ = steps.continue_rows(
            self.steps,
            SettingsSampler(settings, length),
            tf.zeros((num_images, length), tf.int32),
            tf.broadcast_to(tf.range(length) < 1, (num_images, length)),
            self.steps.begin(num_images, **self._checked(labels)),
            reads=False,
        )
        return {"images": tf.cast(self.steps.images_of(values), tf.uint8)}

    def _checked(self, labels):
        size = self.model.hyperparameters.num_classes
        return {
            name: in_range(f"`{name}`", values, size) for name, values in labels.items()
        }


def image_functions(model, routing_scope):
    """Returns the functions of a model of images by their names."""
    h = model.hyperparameters
    if h.vocabulary_size > _MAX_INTENSITIES:
        raise ValueError(
            f"Images must have at most {_MAX_INTENSITIES} intensities to be exported. "
            f"Received: vocabulary_size={h.vocabulary_size}"
        )
    image = ImageModel(model, routing_scope)
    t, k, p, s = Settings.defaults()

    def score(images):
        return image.score(images)

    def score_of_class(images, labels):
        return image.score(images, labels=labels)

    def generate(num_images, temperature=t, top_k=k, top_p=p, seed=s):
        return image.generate(num_images, temperature, top_k, top_p, seed)

    def generate_of_class(labels, temperature=t, top_k=k, top_p=p, seed=s):
        number = tf.shape(labels)[0]
        return image.generate(number, temperature, top_k, top_p, seed, labels=labels)

    images = tf.TensorSpec((None, *model.image_shape), tf.uint8, "images")
    specs = Settings.specs()
    if h.num_classes is None:
        number = tf.TensorSpec((), tf.int32, "num_images")
        return {
            "score": function(score, images),
            "generate": function(generate, number, *specs),
        }
    labels = tf.TensorSpec((None,), tf.int32, "labels")
    return {
        "score": function(score_of_class, images, labels),
        "generate": function(generate_of_class, labels, *specs),
    }
