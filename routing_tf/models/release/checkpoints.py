"""Checkpoints of the original release: TF1 files as models.

Names and shapes in a checkpoint decide; settings only add the rest.
"""

import functools
import warnings

import numpy as np

from routing_tf.files import safe_loading
from routing_tf.files.names import did_you_mean
from routing_tf.models import preprocessing
from routing_tf.models.presets import preset_hyperparameters
from routing_tf.models.release import variable_names
from routing_tf.models.release.checkpoint_file import ReleaseCheckpoint
from routing_tf.models.release.conversion import hyperparameters_from_release
from routing_tf.models.release.conversion import read_hparams
from routing_tf.settings.release_sets import RELEASE_SETS
from routing_tf.tokenizers import SubwordTokenizer


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
