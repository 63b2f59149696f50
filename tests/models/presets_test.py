import dataclasses
import json
import math
import os
import pathlib

import keras_hub
import pytest

from routing_tf import models
from routing_tf.layers import Compatibility
from routing_tf.models.release import conversion
from routing_tf.models.release import hparams_sets
from tools import preset_table

REFERENCE = os.environ.get("ROUTING_TF_REFERENCE_DIR")
OWN = ["python_small", "digits_small", "pairs_small", "byte_tiny"]
VOCABULARY_SIZE = 98302


@dataclasses.dataclass(frozen=True)
class Row:
    """A hyperparameter set as the release registers it.

    `lengths` are `max_length` and `max_target_length`, of an image height, width and
    channels; `layers` those of encoder and decoder; `dims` those of the model, the
    embeddings and the feed-forward parts; `heads` local, routed and cluster-strided
    ones; `clusters` their number and window; `block` their shape; `dropouts` are those
    of attention, feed-forward, embeddings and tokens.
    """

    lengths: tuple[int, ...]
    layers: tuple[int, int]
    dims: tuple[int, int | None, int]
    heads: tuple[int, int, int]
    head_dim: int
    clusters: tuple[int, int] | None = None
    skip_first: int = 0
    block: tuple[int, ...] = (256,)
    flange_blocks: int = 1
    max_relative: int = 513
    dropouts: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    residual_dropout: float = 0.1
    input_dropout: float = 0.0
    weight_decay: float = 0.0
    feed_forward: str = "geglu"
    routing: str = "expert_choice"
    share_query_key: bool = True
    batch_tokens: int | None = None  # None: one sequence

    @property
    def kind(self):
        if len(self.lengths) == 3:
            return "image"
        return "seq2seq" if self.layers[0] else "text"


BYTES = {
    "layers": (0, 22),
    "dims": (1024, 1024, 3072),
    "heads": (8, 0, 0),
    "head_dim": 128,
}
ROUTED_BYTES = {**BYTES, "layers": (0, 12), "heads": (4, 4, 0)}
WORDS = {
    "dims": (1024, 256, 3072),
    "head_dim": 64,
    "dropouts": (0.4, 0.4, 0.4, 0.25),
    "weight_decay": 2e-5,
}
WORDS_4K = {
    **WORDS,
    "lengths": (4096, 4096),
    "layers": (0, 14),
    "heads": (8, 8, 0),
    "clusters": (8, 512),
}
WORDS_1K = {
    **WORDS,
    "lengths": (1024, 4096),
    "layers": (0, 20),
    "heads": (8, 8, 0),
    "clusters": (2, 512),
    "dropouts": (0.4, 0.4, 0.4, 0.2),
}
BOOKS = {"lengths": (8192, 8192), "dims": (1032, 1032, 4096), "head_dim": 129}
ROUTED_BOOKS = {
    **BOOKS,
    "layers": (0, 22),
    "heads": (6, 2, 0),
    "clusters": (16, 512),
}
DROPOUTS = (0.4, 0.4, 0.0, 0.0)
MEENA = {
    "lengths": (2048, 512),
    "layers": (6, 15),
    "head_dim": 128,
    "dropouts": (0.1, 0.1, 0.0, 0.0),
}
ARXIV = {"layers": (4, 8), "dropouts": (0.1, 0.1, 0.0, 0.0)}
PUBMED = {
    "lengths": (10240, 512),
    "layers": (4, 10),
    "dims": (256, 256, 3072),
    "head_dim": 32,
    "block": (128,),
    "max_relative": 257,
    "dropouts": (0.1, 0.1, 0.0, 0.0),
    "input_dropout": 0.1,
}
TRANSLATE = {
    "layers": (6, 6),
    "dims": (1024, 1024, 4096),
    "head_dim": 64,
    "residual_dropout": 0.3,
    "batch_tokens": 8192,
}
ROUTED_TRANSLATE = {**TRANSLATE, "heads": (14, 2, 0), "skip_first": 4}
TEXTS = {
    "sparse_transformer_local": Row(
        (4096, 4096),
        (0, 24),
        (512, 512, 2048),
        (8, 0, 0),
        64,
        block=(512,),
        max_relative=1024,
    ),
    "enwik8_local8k": Row((8192, 4096), **BYTES, dropouts=DROPOUTS),
    "enwik8_local_cluster8k": Row((8192, 4096), **ROUTED_BYTES, clusters=(16, 512)),
    "enwik8_local12k": Row(
        (12288, 4096), **BYTES, block=(128,), max_relative=257, dropouts=DROPOUTS
    ),
    "enwik8_local_cluster12k": Row(
        (12288, 4096),
        **ROUTED_BYTES,
        clusters=(48, 256),
        block=(128,),
        max_relative=257,
    ),
    "wikitext103_local4k": Row((4096, 4096), (0, 14), heads=(16, 0, 0), **WORDS),
    "wikitext103_local_cluster4k": Row(**WORDS_4K),
    "wikitext103_local_cluster1k": Row(**WORDS_1K),
    "pg19_local8k": Row(layers=(0, 24), heads=(8, 0, 0), **BOOKS),
    "pg19_local_cluster8k": Row(skip_first=21, **ROUTED_BOOKS),
    "wikitext103_local_hash4k": Row(routing="hashed", **WORDS_4K),
    "wikitext103_local_hash1k": Row(routing="hashed", **WORDS_1K),
    # The model that was trained and published is not the one registered.
    "pg19_rt_base": Row(skip_first=20, feed_forward="relu", **ROUTED_BOOKS),
}
PAIRS = {
    "meena_local2k": Row(dims=(1024, 256, 3072), heads=(8, 0, 0), **MEENA),
    "meena_local_cluster2k": Row(
        dims=(1024, 512, 3072),
        heads=(6, 2, 0),
        clusters=(8, 512),
        skip_first=5,
        **MEENA,
    ),
    "arxiv_local24k": Row(
        (24000, 512), dims=(256, 256, 3072), heads=(8, 0, 0), head_dim=32, **ARXIV
    ),
    "arxiv_local_cluster24k": Row(
        (24064, 512),
        dims=(1024, 1024, 4096),
        heads=(6, 2, 0),
        head_dim=128,
        clusters=(47, 512),
        max_relative=257,
        **ARXIV,
    ),
    "pubmed_local10k": Row(heads=(8, 0, 0), **PUBMED),
    "pubmed_local_cluster10k": Row(
        heads=(4, 4, 0), clusters=(40, 256), skip_first=2, **PUBMED
    ),
    "translate_local_cluster512": Row(
        (512, 512), clusters=(1, 512), **ROUTED_TRANSLATE
    ),
    "translate_local_cluster1k": Row(
        (1024, 1024), clusters=(2, 512), **ROUTED_TRANSLATE
    ),
    "translate_local_cluster2k": Row(
        (2048, 2048), clusters=(4, 512), **ROUTED_TRANSLATE
    ),
    "translate_local_cluster4k": Row(
        (4096, 4096), clusters=(8, 512), **ROUTED_TRANSLATE
    ),
    "translate_local_cluster8k": Row(
        (8192, 8192), clusters=(16, 512), **ROUTED_TRANSLATE
    ),
    # It registers 16 clusters, and 4 layers to skip, for no routed heads.
    "translate_local8k": Row(
        (8192, 8192), heads=(16, 0, 0), share_query_key=False, **TRANSLATE
    ),
}
SMALL = {
    "lengths": (32, 32, 3),
    "layers": (0, 12),
    "dims": (256, None, 256),
    "heads": (8, 0, 0),
    "head_dim": 32,
    "feed_forward": "relu",
    "residual_dropout": 0.0,
}
BIG = {"feed_forward": "relu", "residual_dropout": 0.3}
MNIST = {**BIG, "lengths": (28, 28, 1), "layers": (0, 12), "dims": (512, None, 2048)}
CIFAR10 = {**BIG, "lengths": (32, 32, 3), "layers": (0, 12), "dims": (1024, None, 2048)}
IMAGENET = {
    **BIG,
    "lengths": (64, 64, 3),
    "layers": (0, 24),
    "dims": (1024, None, 2048),
    "head_dim": 64,
}
IMAGES = {
    "sparse_imagetransformer_base": Row(block=(128,), **SMALL),
    "sparse_imagetransformer_local2d": Row(block=(16, 48), **SMALL),
    "mnist_local1d": Row(heads=(4, 0, 0), head_dim=128, block=(56,), **MNIST),
    # As meant: the release fails to build it and imagenet_full.
    "mnist_full": Row(
        heads=(4, 0, 0), head_dim=128, block=(784,), flange_blocks=0, **MNIST
    ),
    "mnist_cluster_local": Row(
        heads=(2, 2, 0), head_dim=128, clusters=(7, 112), block=(56,), **MNIST
    ),
    "mnist_local_cluster_strided": Row(
        heads=(4, 2, 2), head_dim=64, clusters=(7, 112), block=(56,), **MNIST
    ),
    "cifar10_local1d": Row(heads=(8, 0, 0), head_dim=128, **CIFAR10),
    "cifar10_full": Row(
        heads=(8, 0, 0), head_dim=128, block=(3072,), flange_blocks=0, **CIFAR10
    ),
    "cifar10_local_cluster": Row(
        heads=(4, 4, 0), head_dim=128, clusters=(6, 512), **CIFAR10
    ),
    "cifar10_local_cluster_strided": Row(
        heads=(4, 2, 2), head_dim=128, clusters=(6, 512), **CIFAR10
    ),
    "imagenet_local1d": Row(heads=(16, 0, 0), **IMAGENET),
    "imagenet_full": Row(heads=(16, 0, 0), block=(12288,), flange_blocks=0, **IMAGENET),
    "imagenet_local_cluster": Row(heads=(12, 4, 0), clusters=(8, 2048), **IMAGENET),
    "imagenet_local_cluster_strided": Row(
        heads=(6, 5, 5), clusters=(8, 2048), **IMAGENET
    ),
}
RELEASE = {**TEXTS, **PAIRS, **IMAGES}
CLASSES = {
    "text": [models.RoutingTransformer, models.RoutingTransformerCausalLM],
    "seq2seq": [
        models.RoutingTransformerEncoderDecoder,
        models.RoutingTransformerSeq2SeqLM,
    ],
    "image": [models.RoutingImageTransformer],
}
BY_KIND = {
    "text": ["python_small", "byte_tiny", *TEXTS],
    "seq2seq": ["pairs_small", *PAIRS],
    "image": ["digits_small", *IMAGES],
}


def test_names():
    assert models.preset_names() == [*OWN, *RELEASE]
    for name in models.preset_names():
        assert models.preset_description(name).endswith(".")


@pytest.mark.parametrize("kind", BY_KIND)
def test_names_of_a_kind(kind):
    assert models.preset_names(kind) == BY_KIND[kind]
    for cls in CLASSES[kind]:
        assert cls.presets == {
            name: {"metadata": {"description": models.preset_description(name)}}
            for name in BY_KIND[kind]
        }


@pytest.mark.parametrize("name", RELEASE)
def test_settings_of_the_release(name):
    row, h = RELEASE[name], models.preset_hyperparameters(name)
    assert h.kind == row.kind
    assert (h.num_encoder_layers, h.num_layers) == row.layers
    assert (h.hidden_dim, h.embedding_dim, h.intermediate_dim) == row.dims
    assert (
        h.num_local_heads,
        h.num_routed_heads,
        h.num_cluster_strided_heads,
    ) == row.heads
    assert h.key_dim == h.value_dim == row.head_dim
    if row.clusters:
        assert (h.num_clusters, h.attention_window) == row.clusters
    assert h.num_local_only_layers == row.skip_first
    assert h.local_block_shape == row.block
    assert h.local_flange_blocks == row.flange_blocks
    assert (
        h.attention_dropout,
        h.feed_forward_dropout,
        h.embedding_dropout,
        h.token_dropout,
    ) == row.dropouts
    assert h.residual_dropout == row.residual_dropout
    assert h.input_dropout == row.input_dropout
    assert h.weight_decay == row.weight_decay
    assert h.feed_forward == row.feed_forward
    assert h.routing == row.routing
    assert h.share_query_key == row.share_query_key


@pytest.mark.parametrize("name", RELEASE)
def test_lengths_of_the_release(name):
    row, h = RELEASE[name], models.preset_hyperparameters(name)
    length = row.lengths[0]
    if row.kind == "image":
        assert (h.image_height, h.image_width, h.num_channels) == row.lengths
        length = math.prod(row.lengths)
        assert h.max_sequence_length == length
        if len(row.block) == 1:
            assert length % row.block[0] == 0
    elif row.kind == "seq2seq":
        assert (h.max_input_length, h.max_sequence_length) == row.lengths
    else:
        assert h.max_sequence_length == length
    assert h.batch_tokens == (row.batch_tokens or length)


@pytest.mark.parametrize("name", RELEASE)
def test_what_all_sets_of_the_release_share(name):
    h = models.preset_hyperparameters(name)
    assert h.norm_position == "post"
    assert h.num_strided_heads == 0 and not h.strided_relative_positions
    assert h.ema
    assert not h.timing_signal and not h.scale_embeddings and not h.relative_key_stddev
    assert (h.centroid_decay, h.commitment_weight) == (0.999, 1e-4)
    assert (h.initializer_gain, h.gradient_clip_norm) == (0.2, 0.0)
    assert h.shared_head_projection and h.project_shared_keys
    assert h.encoder_inputs == "tokens" and h.memory_block_length is None


@pytest.mark.parametrize("name", RELEASE)
def test_relative_positions_of_the_release(name):
    row, h = RELEASE[name], models.preset_hyperparameters(name)
    relative = row.kind != "image"
    assert h.local_relative_positions == relative
    assert h.routed_relative_positions == relative
    assert h.cluster_strided_relative_positions == relative
    if relative:
        assert h.max_relative_position == row.max_relative


@pytest.mark.parametrize("name", RELEASE)
def test_tokens_of_the_release(name):
    h = models.preset_hyperparameters(name)
    if RELEASE[name].kind == "image":
        assert h.vocabulary_size == 256 and h.channel_vocabulary_size is None
        assert h.position_embeddings and h.num_classes is None
    else:
        assert h.vocabulary_size == VOCABULARY_SIZE


@pytest.mark.parametrize("name", RELEASE)
def test_optimizers_of_the_release(name):
    h = models.preset_hyperparameters(name)
    if name.startswith("translate"):
        assert (h.optimizer, h.learning_rate, h.warmup_steps) == ("adam", 0.1, 4000)
        assert h.learning_rate_schedule == "noam"
        assert (h.adam_beta_1, h.adam_beta_2, h.adam_epsilon) == (0.9, 0.98, 1e-9)
    else:
        assert h.optimizer == "adafactor"
        assert (h.learning_rate, h.warmup_steps) == (0.01, 10000)
        assert h.learning_rate_schedule == "constant*rsqrt_normalized_decay"


@pytest.mark.parametrize("name", RELEASE)
def test_flaws_of_the_release_come_only_on_request(name):
    row, hparams = RELEASE[name], hparams_sets.RELEASE_SETS[name][1]
    sound = models.preset_hyperparameters(name)
    assert sound.compatibility == Compatibility()
    assert sound.truncate_length is None
    flawed = conversion.hyperparameters_from_release(hparams, faithful=True)
    image = row.kind == "image"
    assert flawed.compatibility == Compatibility.release(padding_of_first_row=image)
    asked_for = {"compatibility": None}
    if image:
        assert flawed.channel_vocabulary_size == 256
        asked_for |= {"channel_vocabulary_size": None}
    else:
        assert flawed.truncate_length == row.lengths[1]
        asked_for |= {"truncate_length": None}
    if row.kind == "seq2seq":
        assert flawed.encoder_inputs == "embeddings"
        assert (flawed.memory_block_length,) == row.block
        assert flawed.memory_flange_blocks == 1
        asked_for |= {
            "encoder_inputs": "tokens",
            "memory_block_length": None,
            "memory_flange_blocks": None,
        }
    assert sound == flawed.replace(**asked_for)


def test_rt_base_is_the_registered_set_with_two_changes():
    assert models.preset_hyperparameters("pg19_rt_base") == (
        models.preset_hyperparameters("pg19_local_cluster8k").replace(
            feed_forward="relu", num_local_only_layers=20
        )
    )


@pytest.mark.skipif(not REFERENCE, reason="needs ROUTING_TF_REFERENCE_DIR")
def test_rt_base_has_the_published_settings():
    path = pathlib.Path(REFERENCE, "golden/pg19/hparams.json")
    published = conversion.hyperparameters_from_release(json.loads(path.read_text()))
    assert models.preset_hyperparameters("pg19_rt_base") == published


@pytest.mark.parametrize(
    "hparams",
    [
        {"frame_height": 4, "frame_width": 6, "batch_size": 5},
        {"frame_height": 4, "frame_width": 6, "batch_size": 5, "num_channels": 2},
    ],
)
def test_channels_of_an_image_come_from_elsewhere(hparams):
    h = conversion.hyperparameters_from_release(hparams, num_channels=1, num_classes=7)
    assert (h.image_height, h.image_width, h.num_channels) == (4, 6, 1)
    assert (h.max_sequence_length, h.batch_tokens, h.num_classes) == (24, 5 * 24, 7)
    with_its_own = conversion.hyperparameters_from_release(hparams)
    channels = hparams.get("num_channels", 3)
    assert with_its_own.num_channels == channels
    assert with_its_own.max_sequence_length == 24 * channels


def test_settings_that_are_missing_are_those_of_the_base_sets():
    for hparams, base in (
        ({}, "sparse_transformer_local"),
        ({"frame_height": 32}, "sparse_imagetransformer_base"),
    ):
        settings = conversion.hyperparameters_from_release(hparams)
        assert settings == models.preset_hyperparameters(base)


@pytest.mark.parametrize("faithful", [False, True])
def test_fields_come_before_settings_of_the_release(faithful):
    h = conversion.hyperparameters_from_release({}, faithful, vocabulary_size=300)
    assert h.vocabulary_size == 300


@pytest.mark.parametrize(
    "change, message",
    [
        ({"query_shape": (4, 4, 3)}, "one or two in an image model"),
        ({"query_shape": (), "memory_flange": ()}, "one or two in an image model"),
        ({"query_shape": (16, 48)}, "one or two in an image model"),
        (
            {"query_shape": (8, 8), "memory_flange": (8, 16)},
            r"the same one on each axis. Received: memory_flange=\(8, 16\)",
        ),
        (
            {"query_shape": (8, 8), "memory_flange": (8, 12)},
            "`memory_flange` must be a multiple of `query_shape`",
        ),
        ({"optimizer": "sgd"}, "must be those of the release's sets.*'sgd'"),
        ({"initializer": "orthogonal"}, "must be those of.*'orthogonal'"),
    ],
)
def test_unsupported_settings_of_images(change, message):
    with pytest.raises(ValueError, match=message):
        conversion.hyperparameters_from_release({"frame_height": 32, **change})


@pytest.mark.parametrize("name", OWN)
def test_own_presets(name):
    h = models.preset_hyperparameters(name)
    assert h.vocabulary_size == (17 if h.kind == "image" else 258)
    assert h.compatibility == Compatibility()
    assert h.num_local_heads and h.num_routed_heads
    assert h.num_local_only_layers < h.num_layers
    assert h.attention_window <= h.max_sequence_length
    assert h.batch_tokens % h.max_sequence_length == 0


@pytest.mark.parametrize(
    "function", [models.preset_hyperparameters, models.preset_description]
)
def test_unknown_names(function):
    with pytest.raises(ValueError, match="Unknown preset. Received: 'pg19'") as error:
        function("pg19")
    listed = str(error.value).partition("Valid names are: ")[2]
    assert listed.split(", ") == models.preset_names()


@pytest.mark.parametrize("cls", sum(CLASSES.values(), []))
def test_other_names_go_to_keras_hub(cls, monkeypatch):
    calls = []

    def from_preset(cls, preset, load_weights=True, **kwargs):
        calls.append((cls, preset, load_weights, kwargs))
        return "loaded"

    for base in (keras_hub.models.Backbone, keras_hub.models.Task):
        monkeypatch.setattr(base, "from_preset", classmethod(from_preset))
    assert cls.from_preset("some/folder", dtype="bfloat16") == "loaded"
    assert cls.from_preset("pg19", load_weights=False) == "loaded"
    assert calls == [
        (cls, "some/folder", True, {"dtype": "bfloat16"}),
        (cls, "pg19", False, {}),
    ]


def test_backbone_from_preset():
    with preset_table.shapes_alone():
        backbone = models.RoutingTransformer.from_preset(
            "byte_tiny", load_weights=False, vocabulary_size=300, name="mine"
        )
    assert backbone.name == "mine"
    assert backbone.hyperparameters == models.preset_hyperparameters(
        "byte_tiny"
    ).replace(vocabulary_size=300)
    table = backbone.get_layer("token_embedding").embeddings
    assert tuple(table.shape) == (300, 32)


def test_language_model_from_preset():
    lm = models.RoutingTransformerCausalLM.from_preset("byte_tiny")
    assert lm.backbone.hyperparameters == models.preset_hyperparameters("byte_tiny")
    assert lm.compiled
    assert lm.preprocessor is None
    assert tuple(lm.output.shape) == (None, None, 258)


def test_changes_of_a_language_model_from_preset():
    preprocessor = object()
    lm = models.RoutingTransformerCausalLM.from_preset(
        "byte_tiny",
        vocabulary_size=300,
        dtype="mixed_bfloat16",
        preprocessor=preprocessor,
        compile=False,
    )
    assert not lm.compiled
    assert lm.preprocessor is preprocessor
    assert lm.backbone.dtype_policy.name == "mixed_bfloat16"
    assert tuple(lm.output.shape) == (None, None, 300)


@pytest.mark.parametrize(
    "kind, cls", [(kind, cls) for kind in CLASSES for cls in CLASSES[kind]]
)
def test_unknown_changes_are_refused(kind, cls):
    with pytest.raises(ValueError, match="Unknown hyperparameters: num_layer. Valid"):
        cls.from_preset(BY_KIND[kind][0], num_layer=3)
