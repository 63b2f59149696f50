import keras
import keras_hub
import numpy as np
import pytest

from routing_tf import models
from routing_tf import tokenizers
from routing_tf.layers.support.keras_internals import layers_inside
from routing_tf.models import release
from tests import golden_cases
from tests.models import small_models
from tests.models import small_seq2seq
from tests.models.small_seq2seq import LOCAL
from tests.models.small_seq2seq import language_model

ON_JAX = small_models.ON_JAX
INPUTS = small_seq2seq.inputs()
BUFFER = 8
TWO_LAYERS = {"num_encoder_layers": 2, "num_layers": 2}


def preprocessor(encoder_sequence_length=12, decoder_sequence_length=BUFFER):
    return models.RoutingTransformerSeq2SeqLMPreprocessor(
        tokenizers.ByteTokenizer(),
        encoder_sequence_length=encoder_sequence_length,
        decoder_sequence_length=decoder_sequence_length,
    )


def test_every_weight_has_a_gradient():
    lm = language_model(embedding_dim=6)
    result = golden_cases.gradients(
        lm,
        lambda logits, losses: keras.ops.sum(logits[..., 0]) + sum(losses),
        {"inputs": INPUTS, "training": True},
    )
    assert len(result.variables) == len(lm.trainable_variables)
    for path, gradient in result.variables.items():
        assert np.abs(gradient).max() > 0, path


def test_the_preprocessor_makes_inputs_targets_and_weights():
    made = preprocessor(6, 5)({"encoder_text": ["abc"], "decoder_text": ["de"]})
    x, y, weights = keras.tree.map_structure(small_models.array, made)
    assert x["encoder_token_ids"].tolist() == [[99, 100, 101, 1, 0, 0]]
    assert x["encoder_padding_mask"].tolist() == [[True] * 4 + [False] * 2]
    assert x["decoder_token_ids"].tolist() == [[0, 102, 103, 1, 0]]
    assert x["decoder_padding_mask"].tolist() == [[True] * 4 + [False]]
    assert y.tolist() == [[102, 103, 1, 0, 0]]
    assert weights.tolist() == [[True] * 3 + [False] * 2]


@pytest.mark.parametrize(
    "source, prompt, name",
    [("abcdef", "", "encoder_sequence_length=6"), ("abcde", "abcde", "max_length=5")],
)
def test_sources_and_prompts_are_never_cut(source, prompt, name):
    lm = language_model(
        vocabulary_size=258, preprocessor=preprocessor(6, 9), num_layers=1
    )
    texts = {"encoder_text": [source], "decoder_text": [prompt]}
    with pytest.raises(ValueError, match=f"Received: .* {name}"):
        lm.generate(texts, max_length=5)


def generate(lm, x, stop_token_ids=None):
    output = lm.generate(dict(x), stop_token_ids=stop_token_ids)
    token_ids, mask = output["decoder_token_ids"], output["decoder_padding_mask"]
    assert (token_ids == x["decoder_token_ids"])[x["decoder_padding_mask"]].all()
    return token_ids, mask


@pytest.fixture(scope="module")
def greedy():
    """A model, prompts of different lengths, and their greedy continuations."""
    lm = language_model(seed=3, **TWO_LAYERS, **small_models.GENERATING)
    lm.compile(sampler="greedy")
    # Behind the prompts the buffer holds other ids, which nothing must see.
    x = small_seq2seq.inputs((12, 9), (1, 3), (12, BUFFER), seed=1)
    token_ids, mask = generate(lm, x)
    assert mask.all()
    return lm, x, token_ids


def test_greedy_generation_is_that_of_recomputed_passes(greedy):
    lm, x, token_ids = greedy
    # One row for each row and length of its prefix.
    lengths = np.repeat(np.arange(1, BUFFER), 2)
    prefixes = {name: np.tile(array, (BUFFER - 1, 1)) for name, array in x.items()}
    prefixes["decoder_padding_mask"] = np.arange(BUFFER) < lengths[:, None]
    # Other ids behind the prefix are padding, in the buffer of the same length.
    prefixes["decoder_token_ids"] = np.where(
        prefixes["decoder_padding_mask"],
        np.tile(token_ids, (BUFFER - 1, 1)),
        prefixes["decoder_token_ids"],
    )
    logits, _ = golden_cases.run(lm, prefixes)
    chosen = []
    for index, length in enumerate(lengths):
        row = index % 2
        if not x["decoder_padding_mask"][row, length]:
            last = logits[index, length - 1]
            first, second = np.sort(last)[:-3:-1]
            assert first > second + 1e-3, "no clear winner: take another seed"
            assert token_ids[row, length] == last.argmax()
            chosen.append(token_ids[row, length])
    assert len(chosen) == 7 + 5
    assert len(set(chosen)) > 4


def test_generation_reads_the_input_and_not_its_padding(greedy):
    """Padding may stand before tokens and among them; what follows is read."""
    lm, x, _ = greedy
    mask = x["encoder_padding_mask"].copy()
    mask[:, [0, 4]] = False
    x = {**x, "encoder_padding_mask": mask}
    same = small_seq2seq.change(x, "encoder_token_ids", ~mask)
    other = small_seq2seq.change(x, "encoder_token_ids", mask)
    rows = {
        name: np.concatenate([each[name] for each in (x, same, other)]) for name in x
    }
    first, second, third = np.split(generate(lm, rows)[0], 3)
    np.testing.assert_array_equal(second, first)
    assert (third != first).any(1).all()


@small_models.FURTHER
def test_each_beam_sees_the_input_of_its_row():
    lm = language_model(seed=3, **LOCAL)
    sampler = keras_hub.samplers.BeamSampler(num_beams=2)
    lm.compile(sampler=sampler, run_eagerly=not ON_JAX)
    x = small_seq2seq.inputs((12, 12), (1, 1), (12, 5), seed=1)
    token_ids, _ = generate(lm, x)
    assert (token_ids[0] != token_ids[1]).any()
    # With the rows the other way round each is continued alike.
    turned = {name: value[::-1] for name, value in x.items()}
    np.testing.assert_array_equal(generate(lm, turned)[0], token_ids[::-1])


@small_models.FURTHER
def test_generation_from_embeddings():
    lm = language_model(encoder_inputs="embeddings", **LOCAL)
    lm.compile(sampler="greedy", run_eagerly=not ON_JAX)
    x = small_seq2seq.embeddings((12, 9), (1, 3))
    for name in ("decoder_token_ids", "decoder_padding_mask"):
        x[name] = x[name][:, :6]
    token_ids, _ = generate(lm, x)
    other = {**x, "encoder_embeddings": -x["encoder_embeddings"]}
    assert (generate(lm, other)[0] != token_ids).any(1).all()


def test_prompts_are_not_stripped(greedy):
    with pytest.raises(ValueError, match="Received: strip_prompt=True"):
        greedy[0].generate({}, strip_prompt=True)


@pytest.mark.thorough
def test_text_in_text_out():
    lm = language_model(vocabulary_size=258, preprocessor=preprocessor(), **LOCAL)
    lm.compile(sampler="greedy", run_eagerly=not ON_JAX, weighted_metrics=None)
    # Keras traces a model anew at every step while a layer of it is unbuilt.
    assert all(layer.built for layer in layers_inside(lm))
    text = lm.generate("hello")
    assert isinstance(text, str)
    (alone,) = lm.generate(["hello"])
    assert alone == text
    pair = {"encoder_text": ["hello", "you"], "decoder_text": ["ab", ""]}
    prompted, _ = lm.generate(pair)
    assert prompted.startswith("ab")
    texts = {"encoder_text": ["ab", "cd"], "decoder_text": ["ef", "gh"]}
    history = lm.fit(texts, batch_size=2, shuffle=False, verbose=0).history
    assert np.isfinite(history["loss"][0])


def test_the_table_of_the_encoder_has_the_name_of_tensor2tensor():
    lm = language_model(shared_head_projection=True, project_shared_keys=True)
    variables = release.variables_by_name(lm)
    name = "sparse_transformer/symbol_modality_31_16/shared/weights_0"
    assert variables[name] is lm.backbone.encoder_embedding_layers[0].embeddings
    assert len(variables) == len(lm.variables)
