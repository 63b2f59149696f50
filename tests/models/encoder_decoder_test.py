import keras
import numpy as np
import pytest

from routing_tf import models
from tests.models import small_models
from tests.models import small_seq2seq
from tests.models.small_models import FURTHER
from tests.models.small_models import copy_weights
from tests.models.small_models import output
from tests.models.small_seq2seq import INPUT_LENGTH
from tests.models.small_seq2seq import LENGTH
from tests.models.small_seq2seq import LOCAL

INPUTS = small_seq2seq.inputs()


def backbone(seed=0, **changes):
    return small_seq2seq.language_model(seed, **changes).backbone


def test_queries_read_several_clusters_where_tokens_choose():
    model = backbone(routing="token_choice", clusters_per_query=2)
    own, memory = (
        attention.head_groups[0].clusters_per_query
        for attention in (model.blocks[0].attention, model.blocks[0].cross_attention)
    )
    assert (own, memory) == (2, 1)


@pytest.mark.parametrize("routing", [None, "full", "hashed"])
def test_keys_are_shifted_in_the_self_attention_of_decoders_alone(routing):
    """And attention to an encoder's output has no rotary positions."""
    model = backbone(
        routing=routing,
        rotary_positions=True,
        routed_key_shift=1,
        local_key_shift=1,
        num_cluster_strided_heads=1,
        num_strided_heads=1,
        key_dim=4,
    )
    found = {
        name: {
            (group.key_shift, group.rotary_positions)
            for attention in attentions
            for group in attention.head_groups
        }
        for name, attentions in {
            "encoder": [block.attention for block in model.encoder_blocks],
            "decoder": [block.attention for block in model.blocks],
            "cross": [block.cross_attention for block in model.blocks],
        }.items()
    }
    assert found == {
        "encoder": {(0, True)},
        "decoder": {(1, True)},
        "cross": {(0, False)},
    }


@pytest.mark.parametrize("position", ["pre", pytest.param("post", marks=FURTHER)])
def test_both_stacks_end_with_a_normalization(position):
    model = backbone(norm_position=position, **LOCAL)
    for norm in (model.encoder_final_norm, model.final_norm):
        assert (norm is None) == (position == "post")
    # Without the random scales of the test's model.
    for variable in model.trainable_variables:
        if variable.name in ("gamma", "beta"):
            variable.assign(np.full(variable.shape, variable.name == "gamma"))
    x = {name: keras.ops.convert_to_tensor(value) for name, value in INPUTS.items()}
    memory, _ = model.encode(x)
    for hidden in (small_models.array(memory), output(model, INPUTS)):
        np.testing.assert_allclose(hidden.mean(-1), 0.0, atol=1e-5)
        np.testing.assert_allclose(hidden.std(-1), 1.0, atol=1e-3)


@pytest.mark.parametrize(
    "flange", [0, *(pytest.param(n, marks=FURTHER) for n in (1, None))]
)
def test_blocks_of_the_decoder_are_paired_with_those_of_the_encoder(flange):
    # 24 tokens in three blocks of 8 see 40 in three blocks of 14.
    model = backbone(local_flange_blocks=0, memory_flange_blocks=flange, **LOCAL)
    x = small_seq2seq.inputs((40,), (24,))
    expected = output(model, x)
    block, memory_block, seen = 8, 14, flange or 0
    target = np.arange(LENGTH) // block
    for place in (0, 13, 14, 27, 39):
        # The blocks of the memory that hold tokens of the place's own block.
        own = range(place // block * block, (place // block + 1) * block)
        blocks = np.unique(np.array(own) // memory_block)
        reached = (np.abs(target[:, None] - blocks) <= seen).any(-1)
        changed = small_seq2seq.change(
            x, "encoder_token_ids", np.arange(INPUT_LENGTH) == place
        )
        differs = (output(model, changed) != expected).any(-1)
        np.testing.assert_array_equal(differs, reached[None])


@FURTHER
def test_blocks_of_the_encoder_may_be_given():
    given = {"memory_block_length": 14, "num_routed_heads": 1, "num_local_heads": 3}
    proportional = given | {"memory_block_length": None}
    model, other = backbone(**given), backbone(**proportional)
    # Proportional blocks are cut without padding, so rows that have none are compared.
    is_whole = INPUTS["encoder_padding_mask"].all(axis=1)
    outputs = [output(each, INPUTS)[is_whole] for each in (model, other)]
    assert len(outputs[0]) == 1
    np.testing.assert_array_equal(*outputs)
    short = {
        name: value[:, :26] if name.startswith("encoder") else value
        for name, value in INPUTS.items()
    }
    assert np.isfinite(output(other, short)).all()
    with pytest.raises(ValueError, match="`query`.*`value`.*`memory_block_shape`"):
        output(model, short)


@pytest.fixture(scope="module")
def with_embeddings():
    return backbone(
        encoder_inputs="embeddings",
        local_block_length=LENGTH,
        local_flange_blocks=2,
        timing_signal=True,
    )


def test_rows_of_zeros_are_padding(with_embeddings):
    x = small_seq2seq.embeddings((40, 26), (24, 24))
    alone = {name: value[1:] for name, value in x.items()}
    alone["encoder_embeddings"] = alone["encoder_embeddings"][:, :26]
    expected = output(with_embeddings, alone)
    np.testing.assert_allclose(output(with_embeddings, x)[1:], expected, atol=1e-5)
    almost = alone["encoder_embeddings"].copy()
    almost[:, -1] = 0.0
    almost[:, -1, 3] = 1e-3  # No padding: one element is not zero.
    shorter = {**alone, "encoder_embeddings": almost[:, :-1]}
    with_token = output(with_embeddings, {**alone, "encoder_embeddings": almost})
    assert np.abs(with_token - output(with_embeddings, shorter)).max() > 1e-3


@FURTHER
def test_dropped_elements_of_the_inputs_are_no_padding(with_embeddings):
    dropping = backbone(
        **{**with_embeddings.hyperparameters.to_dict(), "input_dropout": 0.999999}
    )
    copy_weights(with_embeddings, dropping)
    x = small_seq2seq.embeddings()
    np.testing.assert_array_equal(output(dropping, x), output(with_embeddings, x))
    # All elements are dropped, so the values of real tokens say nothing any more;
    # but that there are tokens does.
    other = {**x, "encoder_embeddings": 2.0 * x["encoder_embeddings"]}
    nothing = {**x, "encoder_embeddings": 0.0 * x["encoder_embeddings"]}
    states = small_models.arrays(dropping.non_trainable_variables)
    results = []
    for inputs in (x, other, nothing):
        results.append(output(dropping, inputs, training=True))
        for variable in dropping.non_trainable_variables:
            variable.assign(states[variable.path])
    np.testing.assert_array_equal(results[0], results[1])
    assert np.abs(results[0] - results[2]).max() > 1e-3


@pytest.mark.parametrize(
    "rate, name",
    [
        ("input_dropout", "encoder_element_dropout"),
        ("residual_dropout", "encoder_input_dropout"),
    ],
)
@FURTHER
def test_dropout_of_the_encoder_is_on_in_training(rate, name):
    model = models.RoutingTransformerEncoderDecoder(
        small_seq2seq.hyperparameters(**LOCAL, **{rate: 0.5})
    )
    names = [layer.name for layer in model.encoder_embedding_layers]
    assert names == ["encoder_token_embedding", name]
    first, second = (output(model, INPUTS, training=True) for _ in range(2))
    assert not np.allclose(first, second, atol=1e-2)


def test_initial_embeddings_of_the_encoder_have_a_variance_of_1():
    settings = small_seq2seq.hyperparameters(vocabulary_size=200)
    model = models.RoutingTransformerEncoderDecoder(settings)
    embedding = model.encoder_embedding_layers[0]
    vectors = small_models.array(embedding(np.arange(200)[None]))
    assert vectors.shape == (1, 200, 16)
    assert 0.9 < vectors.std() < 1.1
    table = model.get_layer("token_embedding").embeddings
    assert table is not embedding.embeddings


def test_longer_targets_are_cut_and_inputs_are_not():
    whole, cut = backbone(**LOCAL), backbone(truncate_length=16, **LOCAL)
    first = {
        name: value[:, :16] if name.startswith("decoder") else value
        for name, value in INPUTS.items()
    }
    np.testing.assert_array_equal(output(cut, INPUTS), output(whole, first))


@FURTHER
def test_low_precision():
    settings = small_seq2seq.hyperparameters(
        **LOCAL, encoder_inputs="embeddings", input_dropout=0.1
    )
    model = models.RoutingTransformerEncoderDecoder(settings, dtype="mixed_bfloat16")
    hidden = output(model, small_seq2seq.embeddings(), training=True)
    assert hidden.dtype.name == "bfloat16"
