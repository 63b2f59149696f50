"""The common part of language models with and without an encoder."""

import contextlib

import keras
import numpy as np
from keras import ops

from routing_tf.layers.support.keras_internals import declare_call_argument
from routing_tf.layers.support.validation import check_positive_integer
from routing_tf.layers.support.validation import is_integer
from routing_tf.models import initializers
from routing_tf.models import preprocessing
from routing_tf.models import presets
from routing_tf.models import steps
from routing_tf.models.compiled import compiled
from routing_tf.models.compiled import way_of
from routing_tf.models.preprocessing import ChecksSegmentIds
from routing_tf.models.preprocessing import known_ids
from routing_tf.models.preprocessing import without_segment_ids
from routing_tf.models.preset_backbone import preset_from_elsewhere
from routing_tf.models.saved_model import Exportable


class TextLanguageModel(ChecksSegmentIds, Exportable):
    """The common part of language models with and without an encoder.

    Subclasses are also tasks of keras_hub, and set `presets`, `backbone_cls` and
    `preprocessor_cls`.
    """

    # It is not a task itself, because Keras cannot make a model that has one base class
    # twice.

    def __init__(self, backbone, preprocessor=None, dtype_policies=None, **kwargs):
        # === Layers ===
        self.backbone = backbone
        self.preprocessor = preprocessor
        h = backbone.hyperparameters
        # Layers are built in the form in which they were saved, such as quantized ones.
        policies = dtype_policies or {}
        policies = {
            name: keras.dtype_policies.get(policies.get(name, backbone.dtype_policy))
            for name in ("output", "logits")
        }
        self.output_projection = None
        if h.embedding_dim not in (None, h.hidden_dim):
            self.output_projection = _dense(
                initializers.of_kernels(h), h.embedding_dim, "output", policies
            )
        self.logits_dense = _dense(
            initializers.of_logits(h), h.vocabulary_size, "logits", policies
        )
        # === Functional model ===
        logits = self.logits_of(backbone(backbone.input))
        super().__init__(inputs=backbone.input, outputs=logits, **kwargs)
        declare_call_argument(self, "routing_scope", "segment_ids")

    def call(self, inputs, training=None, mask=None, **kwargs):
        names = self.backbone.segment_names
        inputs, segment_ids = without_segment_ids(inputs, names)
        if segment_ids is not None:
            mask, _ = without_segment_ids(mask, names)
            kwargs["segment_ids"] = segment_ids
        return super().call(inputs, training=training, mask=mask, **kwargs)

    def get_config(self):
        config = super().get_config()
        own = [self.output_projection, self.logits_dense]
        policies = {
            layer.name: keras.dtype_policies.serialize(layer.dtype_policy)
            for layer in own
            if layer is not None and layer.dtype_policy != self.backbone.dtype_policy
        }
        return {**config, "dtype_policies": policies} if policies else config

    def preprocess_samples(self, x, y=None, sample_weight=None):
        """Turns texts into inputs, targets and weights; keeps a dict of ids."""
        if preprocessing.takes(self, x):
            return keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
        if self.preprocessor is None and preprocessing.has_texts(x):
            preprocessing.refuse(self, x)
        return super().preprocess_samples(x, y, sample_weight)

    def generate(
        self, inputs, max_length=None, stop_token_ids="auto", strip_prompt=False
    ):
        """Continues texts or ids; see `keras_hub.models.CausalLM.generate`.

        Args:
            inputs: inputs of the preprocessor, such as a string or a list of strings;
                or a dict of ids and masks as for a call, which needs no preprocessor.
            max_length: length of the sequences, in tokens; None (the default) for that
                of the preprocessor. Sequences of ids have the length of their rows.
            stop_token_ids: ids that end a sequence; `"auto"` (the default) for the
                tokenizer's end id; None or an empty list for no such ids.
            strip_prompt: whether to return only the new text. Defaults to False.

        Returns:
            A text, or a list of them; for ids a dict of ids and mask. For no text, or
            no batch, an empty list.

        Raises:
            ValueError: if there is no preprocessor, for texts or for
                `stop_token_ids="auto"`, `max_length` is not a positive integer or
                shorter than a prompt, which is never cut, or `stop_token_ids` is
                something else.
        """
        if preprocessing.holds_nothing(self, inputs):
            return []
        if isinstance(inputs, bytes):
            rest = max_length, stop_token_ids, strip_prompt
            return self.generate([inputs], *rest)[0]
        stop_token_ids = _checked_stops(stop_token_ids)
        if max_length is not None:
            check_positive_integer("max_length", max_length)
        sample = getattr(inputs, "element_spec", inputs)
        names = self.backbone.segment_names
        if without_segment_ids(sample, names)[1] is not None:
            raise ValueError(
                f"`{names[0]}` cannot be used with `generate`, which continues one "
                f"document in each row. Received: inputs with {', '.join(names)}. Give "
                "each prompt a row and leave them out"
            )
        if not preprocessing.takes(self, sample):
            if self.preprocessor is None:
                preprocessing.refuse(self, sample)
            return super().generate(inputs, max_length, stop_token_ids, strip_prompt)
        if self.preprocessor is not None and stop_token_ids == "auto":
            stop_token_ids = [self.preprocessor.tokenizer.end_token_id]
        with _without_preprocessor(self):
            return super().generate(inputs, max_length, stop_token_ids, strip_prompt)

    def make_generate_function(self):
        """Compiles `generate_step`, again if it must now be done in another way.

        A compiled function does not know weights that LoRA or `quantize` add later.
        """
        made_for = (len(self.weights), way_of(self))
        if getattr(self, "_generate_is_made_for", made_for) != made_for:
            self.generate_function = None
        self._generate_is_made_for = made_for
        if self.generate_function is None:
            generate = self._compiled_generate_step()

            def generate_checked(inputs, stop_token_ids=None):
                # A compiled function cannot check values.
                inputs = _checked(inputs, self.hyperparameters.vocabulary_size)
                prefix = "decoder_" if "decoder_token_ids" in inputs else ""
                names = f"{prefix}token_ids", f"{prefix}padding_mask"
                if inputs[names[0]].shape[0] == 0:
                    return {name: inputs[name] for name in names}
                return generate(inputs, stop_token_ids=stop_token_ids)

            self.generate_function = generate_checked
        return self.generate_function

    def _compiled_generate_step(self):
        backend = keras.backend.backend()
        if backend == "jax" and way_of(self) == "eager":
            # keras_hub looks only at `run_eagerly`.
            return self.generate_step
        is_of_keras_hub = type(self.sampler).__module__.startswith("keras_hub.")
        if backend == "tensorflow" and is_of_keras_hub:
            # They do without AutoGraph, which would take longer than all of the rest.
            return compiled(self, self.generate_step)
        return super().make_generate_function()

    def continue_prompts(self, inputs, stop_token_ids, prefix="", memory=()):
        """Continues one batch of prompts with the sampler of the model.

        `inputs` contain ids and mask of the prompts, under names that begin with
        `prefix`; `memory` is the output of an encoder and its padding mask, or empty.
        Returns a dict of the ids and the mask, now True for prompt and new tokens. Rows
        that the model would cut are refused.
        """
        names = f"{prefix}token_ids", f"{prefix}padding_mask"
        token_ids, mask = (inputs[name] for name in names)
        token_ids = ops.cast(token_ids, "int32")
        steps.check_prompt_mask(names[1], mask)
        batch, length = ops.shape(token_ids)
        steps.check_not_cut(self.hyperparameters, length)
        # Models with coordinate embeddings have none for the last token, which nobody
        # reads.
        has_end = self.hyperparameters.coordinate_embeddings
        num_inputs = max(length - 1, 1) if has_end else None
        decoder = steps.TextSteps(self)
        state = decoder.begin(batch, length, memory)
        found = steps.continue_rows(
            decoder,
            self.sampler,
            token_ids,
            mask,
            state,
            stop_token_ids,
            num_inputs,
        )
        return dict(zip(names, found))

    def logits_of(self, hidden):
        """Returns the logits of hidden states of the backbone."""
        if self.output_projection is not None:
            hidden = self.output_projection(hidden)
        return self.logits_dense(hidden)

    @property
    def hyperparameters(self):
        """`Hyperparameters` of the backbone."""
        return self.backbone.hyperparameters

    @classmethod
    def from_preset(cls, preset, load_weights=True, **kwargs):
        """Builds the model of a preset; see `from_preset` of the backbone.

        Args:
            preset: name of a preset or a preset directory.
            load_weights: whether keras_hub loads the weights of its preset. Defaults to
                True.
            **kwargs: changes of hyperparameters, `preprocessor`, `compile` (whether to
                compile with defaults), and arguments of the backbone. By default,
                presets of bytes have the preprocessor of a `ByteTokenizer`, unless
                `vocabulary_size` is changed; `preprocessor=None` for a model of ids.
        """
        if preset not in cls.presets:
            with preset_from_elsewhere(cls, preset, kwargs):
                return super().from_preset(preset, load_weights=load_weights, **kwargs)
        own = {
            key: kwargs.pop(key) for key in ("preprocessor", "compile") if key in kwargs
        }
        backbone = cls.backbone_cls.from_preset(preset, **kwargs)
        if "preprocessor" not in own:
            own["preprocessor"] = preprocessing.byte_preprocessor(
                cls, preset, backbone.hyperparameters
            )
        return cls(backbone, **own)

    @classmethod
    def from_release_checkpoint(
        cls, prefix, preset=None, hparams=None, vocabulary=None
    ):
        """Builds a model with the weights of a checkpoint of the original release.

        The checkpoint decides what its names and shapes show, and a warning says where
        `hparams` or the preset disagree; see [The release](docs/release.md).

        Args:
            prefix: path of the TF1 checkpoint without `.index`.
            preset: name of the set of the release that was trained, such as
                `"pg19_rt_base"`; None (the default) if `hparams` has all settings.
            hparams: dict of the release's hyperparameters or the path of its
                `hparams.json`, which override the preset; None (the default) for those
                of the preset.
            vocabulary: path of the release's subword vocabulary; None (the default) for
                a model of ids.
        """
        load = presets.release().load_checkpoint
        return load(cls, prefix, preset, hparams, vocabulary)

    def compile(self, optimizer="auto", loss="auto", **kwargs):
        """Compiles the model as keras_hub does, with a loss that leaves out padding.

        `loss="auto"`, the default, is the mean cross-entropy of the tokens of a batch,
        by their weights; keras_hub divides by the number of all positions.
        """
        if isinstance(loss, str) and loss == "auto":
            loss = keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction="mean_with_sample_weight"
            )
        super().compile(optimizer, loss, **kwargs)

    def compile_from_config(self, config):
        """Compiles a loaded model as it was saved; the sampler is the default one."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is not None:
            self.optimizer.build(self.trainable_variables)

    def make_cache(self, batch_size, max_length, memory=None, memory_mask=None):
        """Makes an empty cache, for `call_with_cache`.

        Args:
            batch_size: number of sequences.
            max_length: number of tokens a sequence may have, including the leading id
                0. Models whose heads all remember a bounded number of tokens can go
                beyond it.
            memory: output of the encoder; None (the default) without one.
            memory_mask: its padding mask; None (the default) for no padding.

        Returns:
            A structure of tensors of fixed sizes with the batch on axis 0.
        """
        return self.backbone.make_cache(batch_size, max_length, memory, memory_mask)

    def call_with_cache(
        self, token_ids, cache, cache_index, padding_mask=None, segment_ids=None
    ):
        """Computes the logits after tokens that follow those in a cache.

        Args:
            token_ids: `<int>[batch, length]`; each token is fed once.
            cache: as returned by `make_cache` or this method.
            cache_index: position of the first token, which is the number of tokens that
                the cache was fed: an integer or a scalar tensor. The integer 0 starts
                the cache anew.
            padding_mask: `<bool>[batch, length]`, True for real tokens; others are not
                remembered. None (the default) for no padding.
            segment_ids: `<int32>[batch, length]`, ids of packed documents: the cache
                restarts with each. None (the default) for one document in each row.

        Returns:
            Logits of the next tokens `<float>[batch, length, vocabulary_size]`, hidden
            states `<float>[batch, length, hidden_dim]`, and the cache with these
            tokens.
        """
        hidden, cache = self.backbone.decode_with_cache(
            token_ids, cache, cache_index, padding_mask, segment_ids
        )
        return self.logits_of(hidden), hidden, cache


def _checked(inputs, vocabulary_size):
    """Returns inputs as tensors, ids as `<int32>`; refuses ids that are unknown."""
    found = {name: ops.convert_to_tensor(x) for name, x in inputs.items()}
    for name in filter(lambda name: name.endswith("token_ids"), inputs):
        mask_name = name.replace("token_ids", "padding_mask")
        shapes = [tuple(found[key].shape) for key in (name, mask_name)]
        if len(shapes[0]) != 2 or shapes[0] != shapes[1]:
            raise ValueError(
                f"`{name}` and `{mask_name}` must both be (batch, length). Received: "
                f"shapes {shapes[0]} and {shapes[1]}"
            )
        if not name.startswith("encoder_"):
            steps.check_prompt_mask(mask_name, inputs[mask_name])
        # The tensor of other integers may have lost the upper ones of their bits.
        ids = known_ids(inputs[name], vocabulary_size, f"`{name}`", inputs[mask_name])
        if keras.backend.standardize_dtype(found[name].dtype) != "int32":
            found[name] = ops.convert_to_tensor(ids)
    return found


def _checked_stops(stop_token_ids):
    """Returns `"auto"`, None or a list of ids."""
    is_word = isinstance(stop_token_ids, str)
    if stop_token_ids is None or (is_word and stop_token_ids == "auto"):
        return stop_token_ids
    is_list = not is_word and np.ndim(stop_token_ids) == 1
    if not is_list or not all(map(is_integer, stop_token_ids)):
        raise ValueError(
            '`stop_token_ids` must be "auto", None or a list of ids. Received: '
            f"stop_token_ids={stop_token_ids!r}. Write for example [1]"
        )
    return list(stop_token_ids) or None


@contextlib.contextmanager
def _without_preprocessor(lm):
    preprocessor, lm.preprocessor = lm.preprocessor, None
    try:
        yield
    finally:
        lm.preprocessor = preprocessor


def _dense(initializer, units, name, policies):
    return keras.layers.Dense(
        units,
        kernel_initializer=initializer,
        name=name,
        dtype=policies[name],
    )
