"""Checkpoints of the original release: TF1 files as models.

Names and shapes in a checkpoint decide; settings only add the rest.
"""

import functools
import glob
import math
import pathlib
import re
import warnings

import numpy as np
import tensorflow as tf

from routing_tf.files import safe_loading
from routing_tf.files.names import did_you_mean
from routing_tf.models import preprocessing
from routing_tf.models.presets import preset_hyperparameters
from routing_tf.models.release import variable_names
from routing_tf.models.release.conversion import hyperparameters_from_release
from routing_tf.models.release.conversion import read_hparams
from routing_tf.settings.presets import RELEASE_SETS
from routing_tf.tokenizers import SubwordTokenizer

_SCOPES = {
    variable_names.MODEL_SCOPE: "text",
    variable_names.IMAGE_MODEL_SCOPE: "image",
}
_STACKS = ("encoder", "decoder")
# A setting of tensor2tensor is the number of parts of the table of an encoder's ids.
_ENCODER_TABLE = re.compile(
    r"sparse_transformer/symbol_modality_\d+_\d+/shared/weights_(\d+)"
)
# Slots that optimizers keep for each variable.
_SLOT = re.compile(r"/(Adafactor|Adam|Momentum)(_\d+)?$")


class ReleaseCheckpoint:
    """The variables of a model in a TF1 checkpoint of the release.

    Optimizer slots, the global step and everything else outside of the model are
    ignored. `prefix` is the path without `.index`, such as `DIR/model.ckpt-3530000`;
    `kind` is "text", "seq2seq" or "image", `shapes` are those of the variables by the
    release's names, and `num_bytes` is the size of the data files.
    """

    def __init__(self, prefix):
        self.prefix = str(prefix).removesuffix(".index")
        try:
            self._reader = tf.train.load_checkpoint(self.prefix)
        except (ValueError, tf.errors.OpError) as error:
            raise ValueError(
                "`prefix` must be the path of a TF1 checkpoint without `.index`, such "
                f"as DIR/model.ckpt-3530000. Received: {self.prefix!r}: {error}"
            ) from error
        shapes = self._reader.get_variable_to_shape_map()
        self._check_size(shapes)
        scopes = [s for s in _SCOPES if any(n.startswith(f"{s}/") for n in shapes)]
        if len(scopes) != 1:
            raise ValueError(
                "The checkpoint must contain one model of the release, below one of "
                f"{', '.join(_SCOPES)}. Received: {self.prefix!r} with variables such "
                f"as {sorted(shapes)[:3]}"
            )
        self.scope = scopes[0]
        self.shapes = {
            name: tuple(shape)
            for name, shape in sorted(shapes.items())
            if name.startswith(f"{self.scope}/") and not _SLOT.search(name)
        }
        self.kind = _SCOPES[self.scope]
        if any("/encoder_layer_" in name for name in self.shapes):
            self.kind = "seq2seq"
            self._add_encoder_table(shapes)
        numbers = {f"{stack}_layers": self._number(stack) for stack in _STACKS}
        safe_loading.check_hyperparameters(numbers, self.prefix)

    def _check_size(self, shapes):
        """Refuses an index that claims too much, before memory is allocated."""
        path = pathlib.Path(self.prefix)
        files = path.parent.glob(f"{glob.escape(path.name)}.data-*")
        self.num_bytes = sum(file.stat().st_size for file in files)
        dtypes = self._reader.get_variable_to_dtype_map()
        declared = sum(
            math.prod(shape) * (1 if dtypes[name] == tf.string else dtypes[name].size)
            for name, shape in shapes.items()
        )
        # An empty variable may have an axis of any length.
        longest = max((max(shape, default=0) for shape in shapes.values()), default=0)
        if max(declared, longest) > self.num_bytes:
            raise ValueError(
                "The index of a checkpoint must not claim more than its data files "
                f"contain. Received: {self.prefix!r} with variables of {declared:,} "
                f"bytes and axes of up to {longest:,} in files of {self.num_bytes:,} "
                "bytes. Copy all of its .data-* files again"
            )

    def _add_encoder_table(self, shapes):
        """Adds the table of the encoder's ids, which is outside of the scope."""
        found = {int(m[1]): n for n in shapes if (m := _ENCODER_TABLE.fullmatch(n))}
        self._encoder_table = [found[number] for number in sorted(found)]
        if found:
            rows = sum(shapes[name][0] for name in self._encoder_table)
            depth = shapes[self._encoder_table[0]][1]
            name = variable_names.encoder_table_name(rows, depth)
            self.shapes[name] = (rows, depth)

    def value(self, name):
        """Returns the variable of a name in `shapes`, a NumPy array."""
        names = [name]
        if not name.startswith(f"{self.scope}/"):
            names = self._encoder_table
        try:
            parts = [self._reader.get_tensor(part) for part in names]
        # TensorFlow makes an `IndexError` of a file that ends too early.
        except (ValueError, IndexError, tf.errors.OpError) as error:
            raise ValueError(
                f"The data files of a checkpoint must be complete. Received: {name} of "
                f"{self.prefix!r}: {str(error).splitlines()[0]}. Copy them again"
            ) from error
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def settings(self):
        """Returns the settings that the variables show, by the release's names."""
        layers = self._attention_layers()
        shown = {
            **self._sizes(),
            **self._heads(layers),
            **self._relative(layers),
        }
        if self.kind == "image":
            shown |= self._image()
        return shown

    def _shape(self, name):
        return self.shapes.get(f"{self.scope}/{name}")

    def _needed_shape(self, name, axes=2):
        shape = self._shape(name)
        if shape is None or len(shape) != axes:
            raise ValueError(
                "The checkpoint must contain every variable of its model. Received: "
                f"{self.prefix!r}, missing: {self.scope}/{name}"
            )
        return shape

    def _number(self, stack):
        pattern = re.compile(rf"{self.scope}/{stack}_layer_(\d+)/")
        found = [pattern.match(name) for name in self.shapes]
        return 1 + max((int(match[1]) for match in found if match), default=-1)

    def _attention_layers(self):
        """Shapes of each decoder layer's self-attention, by the end of their names."""
        layers = []
        for index in range(self._number("decoder")):
            start = f"{self.scope}/decoder_layer_{index}/self_attention/"
            start += "self_attention/"
            layers.append(
                {
                    name.removeprefix(start): shape
                    for name, shape in self.shapes.items()
                    if name.startswith(start)
                }
            )
        return layers

    def _sizes(self):
        first = "decoder_layer_0/self_attention"
        shown = {"num_decoder_layers": self._number("decoder")}
        if self.kind != "image":
            shown["num_encoder_layers"] = self._number("encoder")
            shown["embedding_dims"] = self._needed_shape("embeddings/embedding")[1]
        hidden, key_depth = self._needed_shape(f"{first}/self_attention/q/kernel")
        value_depth = self._needed_shape(f"{first}/self_attention/v/kernel")[1]
        shown["hidden_size"] = hidden
        shown["attention_key_channels"] = 0 if key_depth == hidden else key_depth
        shown["attention_value_channels"] = 0 if value_depth == hidden else value_depth
        shown |= self._feed_forward(f"{first}/ffn")
        post = self._shape(f"{first}/layer_postprocess/layer_norm/layer_norm_scale")
        before, after = ("none", "dan") if post else ("n", "da")
        shown["layer_preprocess_sequence"] = before
        shown["layer_postprocess_sequence"] = after
        return shown

    def _feed_forward(self, scope):
        """Any variable tells the kind, and the first one the size."""
        names = [n for n in self.shapes if n.startswith(f"{self.scope}/{scope}/")]
        if not names:
            return {"ffn_layer": "none"}
        if any("/conv" in name for name in names):
            size = self._needed_shape(f"{scope}/conv1/kernel")[1]
            return {"ffn_layer": "conv_hidden_relu", "filter_size": size}
        size = self._needed_shape(f"{scope}/weight1/kernel")[1]
        return {"ffn_layer": "geglu", "filter_size": size}

    def _heads(self, layers):
        first = "decoder_layer_0/self_attention/self_attention"
        head_dim = self._needed_shape(f"{first}/attention_nd/dense/kernel")[0]
        total = self._needed_shape(f"{first}/v/kernel")[1] // head_dim
        cluster, strided = (
            f"attention_nd/{variable_names.HEAD_SCOPES[kind]}"
            for kind in ("sparsity_cluster", "sparsity_cluster_strided")
        )
        shown = {
            "sparsity_cluster_num_heads": 0,
            "sparsity_cluster_strided_num_heads": 0,
            "total_heads": total,
        }
        for index, layer in enumerate(layers):
            means = layer.get(f"{cluster}/means")
            projections = layer.get(f"{cluster}/projection_tensors")
            clustered = means or projections
            if clustered and not shown["sparsity_cluster_num_heads"]:
                shown["sparsity_cluster_num_heads"] = clustered[0]
                shown["sparsity_skip_first"] = index
                shown["hash_items"] = means is None
                shown["ema"] = means is None or f"{cluster}/ema_count" in layer
                name = "hash_bits" if means is None else "sparsity_cluster_size"
                shown[name] = clustered[1]
            if f"{strided}/means" in layer:
                heads = layer[f"{strided}/means"][0]
                shown["sparsity_cluster_strided_num_heads"] = heads
        return shown

    def _relative(self, layers):
        shown = {}
        for kind, scope in variable_names.HEAD_SCOPES.items():
            name = f"attention_nd/{scope}/relative_positions_keys/embeddings"
            tables = [layer[name] for layer in layers if name in layer]
            shown[f"{kind}_relative"] = bool(tables)
            if tables:
                shown["max_relative_position"] = tables[0][0] // 2
        return shown

    def _image(self):
        shown = {"add_positional_emb": self._shape("pos_emb_0") is not None}
        classes = self._shape("class_conditional_embedding/embedding")
        shown["unconditional"] = classes is None
        return shown

    @property
    def has_encoder_table(self):
        """Whether there is a table of the encoder's ids."""
        return self.kind == "seq2seq" and bool(self._encoder_table)

    def outside_settings(self):
        """Returns settings that the release takes from its problem, by our names."""
        if self.kind != "image":
            return {"vocabulary_size": self._needed_shape("embeddings/embedding")[0]}
        classes = self._shape("class_conditional_embedding/embedding")
        return {
            "vocabulary_size": self._needed_shape("final_dense/kernel")[1],
            "num_channels": self._needed_shape("rgb_target_emb_channel")[0] // 256,
            "num_classes": classes and classes[0],
        }


def complete_settings(checkpoint, preset=None, hparams=None):
    """Joins the settings that a `ReleaseCheckpoint` shows with those for the rest.

    The checkpoint takes precedence over `hparams`, a dict by the release's names or the
    path of an `hparams.json`, and these over the set of the release named `preset`.
    Returns a dict by the release's names, and a list of lines that say where settings
    and checkpoint disagree, and which settings are missing though no variable shows
    them.
    """
    given = _given_settings(checkpoint, preset, hparams)
    shown = _with_heads(checkpoint.settings(), given)
    _check_complete(checkpoint, preset, given, shown)
    lines = [
        f"{name} is not given; {value} is used"
        for name, value in _defaults(checkpoint, shown).items()
        if name not in given
    ]
    lines += [
        f"{name} is {value!r} in the checkpoint, {given[name]!r} in the settings"
        for name, value in shown.items()
        if name in given and not _agree(name, value, given[name], shown)
    ]
    return {**given, **shown}, lines


def _given_settings(checkpoint, preset, hparams):
    hparams = {} if hparams is None else read_hparams(hparams)
    if preset is None:
        return hparams
    if preset not in RELEASE_SETS:
        raise ValueError(
            f"`preset` must be a set of the release. Received: preset={preset!r}."
            f"{did_you_mean(preset, RELEASE_SETS)} Valid names are: "
            f"{', '.join(RELEASE_SETS)}"
        )
    if preset_hyperparameters(preset).kind != checkpoint.kind:
        raise ValueError(
            f"`preset` must be a set of a {checkpoint.kind!r} model, as the checkpoint "
            f"holds. Received: preset={preset!r}"
        )
    return {**RELEASE_SETS[preset][1], **hparams}


def _check_complete(checkpoint, preset, given, shown):
    needed = ["query_shape", "memory_flange"]
    if shown["sparsity_cluster_num_heads"]:
        needed.append("sparsity_cluster_attention_window")
    if checkpoint.kind == "image":
        needed += ["frame_height", "frame_width"]
    missing = [name for name in needed if not given.get(name)]
    if missing:
        raise ValueError(
            "`hparams` or `preset` must give the settings that no variable shows. "
            f"Received: preset={preset!r}, and hparams without {', '.join(missing)}. "
            "Pass the release's hparams.json, or the name of the set that was trained"
        )


def _defaults(checkpoint, shown):
    """Defaults of settings that no variable shows and few sets change."""
    defaults = {}
    if shown["sparsity_cluster_num_heads"]:
        defaults["share_qk"] = True
    if checkpoint.kind != "image":
        defaults["add_timing_signal"] = False
    return defaults


def _with_heads(shown, given):
    """Adds the numbers of heads that follow from the others."""
    shown = dict(shown)
    bits = shown.pop("hash_bits", None)
    if bits is not None:
        size = given.get("sparsity_cluster_size", 0)
        fits = size and size.bit_length() - 1 == bits
        shown["sparsity_cluster_size"] = size if fits else 2**bits
    # Strided heads have variables only if they have relative positions.
    strided = given.get("sparsity_strided_num_heads", 0)
    shown["sparsity_strided_num_heads"] = strided
    clustered = shown["sparsity_cluster_num_heads"]
    clustered += shown["sparsity_cluster_strided_num_heads"]
    shown["local_num_heads"] = shown.pop("total_heads") - clustered - strided
    for kind in variable_names.HEAD_SCOPES:
        if not shown[f"{kind}_num_heads"]:
            del shown[f"{kind}_relative"]
    return shown


def _agree(name, shown, given, settings):
    if name == "ffn_layer" and given not in ("geglu", "none"):
        given = "conv_hidden_relu"
    if name in ("attention_key_channels", "attention_value_channels"):
        given = 0 if given == settings["hidden_size"] else given
    return shown == given


def load(cls, prefix, preset=None, hparams=None, vocabulary=None):
    """Builds a model with the weights of a checkpoint of the release.

    `cls` is its class. `vocabulary` is the path of the release's subword vocabulary;
    `None` makes a model of ids. `preset` and `hparams` are as for `complete_settings`.
    """
    checkpoint = ReleaseCheckpoint(prefix)
    if checkpoint.kind != cls.kind:
        raise ValueError(
            f"`prefix` must be a checkpoint of a {cls.kind!r} model for "
            f"{cls.__name__}. Received: {checkpoint.prefix!r}, which holds a "
            f"{checkpoint.kind!r} model"
        )
    hparams, differences = complete_settings(checkpoint, preset, hparams)
    if differences:
        warnings.warn(
            f"Settings disagree with the checkpoint {checkpoint.prefix!r}, which takes "
            f"precedence: {'; '.join(differences)}",
            stacklevel=3,
        )
    settings = hyperparameters_of(checkpoint, hparams)
    _check_fits(cls, settings, checkpoint)
    model = _build(cls, settings, vocabulary)
    load_into(model, checkpoint)
    return model


def _check_fits(cls, settings, checkpoint):
    """Refuses settings of a larger model than the checkpoint's, before building it."""
    safe_loading.check_hyperparameters(settings.to_dict(), checkpoint.prefix)
    build = functools.partial(getattr(cls, "backbone_cls", cls), settings)
    safe_loading.check_fits(build, checkpoint.num_bytes, checkpoint.prefix)


def _build(cls, settings, vocabulary):
    if settings.kind == "image":
        return cls(settings)
    preprocessor = None
    if vocabulary is not None:
        tokenizer = SubwordTokenizer(vocabulary)
        _check_vocabulary(tokenizer, settings)
        lengths = preprocessing.sequence_lengths(settings)
        preprocessor = cls.preprocessor_cls(tokenizer, **lengths)
    return cls(cls.backbone_cls(settings), preprocessor=preprocessor)


def _check_vocabulary(tokenizer, settings):
    if tokenizer.vocabulary_size() > settings.vocabulary_size:
        raise ValueError(
            "`vocabulary` must not be larger than the model's. Received: "
            f"{tokenizer.vocabulary_size()} subwords for a model of "
            f"{settings.vocabulary_size} ids"
        )
    if settings.encoder_inputs == "embeddings" and settings.kind == "seq2seq":
        raise ValueError(
            "`vocabulary` needs the table of the encoder's ids, sparse_transformer/"
            "symbol_modality_*/shared/weights_*, in the checkpoint. Received: one "
            "without; its model takes `encoder_embeddings`"
        )


def hyperparameters_of(checkpoint, hparams):
    """Translates the complete settings of a checkpoint, by the release's names.

    The model keeps the flaws that the weights rely on and, like the release, cuts its
    inputs to the length that it was trained on. An encoder that reads embeddings, whose
    padding is zeros, keeps all flaws of the release.
    """
    settings = hyperparameters_from_release(
        hparams, faithful=True, **checkpoint.outside_settings()
    )
    if checkpoint.has_encoder_table:
        # Ids come with a mask, so padding need not be zeros.
        settings = settings.replace(encoder_inputs="tokens")
    elif checkpoint.kind == "seq2seq":
        return settings
    return settings.replace(compatibility="trained")


def load_into(model, checkpoint):
    """Writes the variables of a checkpoint into a model, one at a time.

    If names and shapes do not match one to one, nothing is written.
    """
    variables = variable_names.variables_by_name(model)
    variable_names.check_shapes(variables, checkpoint.shapes)
    for name, variable in variables.items():
        value = checkpoint.value(name)
        if not np.isfinite(value).all():
            raise ValueError(
                "All values of a checkpoint must be finite. Received: "
                f"{checkpoint.prefix!r} with others in {name}"
            )
        variable.assign(value)
