"""Models and problems with rows that pack several documents."""

import keras
import numpy as np
import pytest

from routing_tf import models
from routing_tf import problems
from routing_tf.models.preprocessing import inputs_of
from routing_tf.models.score import TokenScorer
from routing_tf.training import evaluation
from tests import golden_cases
from tests.layers import helpers
from tests.layers import kinds
from tests.models import small_models
from tests.models import small_seq2seq
from tests.models.small_models import output

LENGTHS = 7, 12, 5
BORDERS = np.cumsum((0, *LENGTHS))
# The last document has the id of the first one.
ROW = np.repeat((5, 2, 5), LENGTHS).astype("int32")
ROUTED = {"num_local_heads": 0, "num_routed_heads": 4, "routing": "token_choice"}


def packed(**changes):
    """Returns inputs of two rows with three documents each."""
    x = small_models.inputs()
    return {**x, "segment_ids": np.stack([ROW] * len(x["token_ids"])), **changes}


def part(x, start, end):
    """Returns the inputs of one document alone."""
    return {name: x[name][:, start:end] for name in ("token_ids", "padding_mask")}


# Where the first pair of a row ends.
BORDER_OF_PAIRS = {"encoder": 15, "decoder": 9}


def packed_pairs(seed=0):
    """Returns inputs of two rows with two pairs each."""
    x = small_seq2seq.inputs((40, 40), (24, 24), seed=seed)
    for side, border in BORDER_OF_PAIRS.items():
        ids = x[f"{side}_token_ids"]
        x[f"{side}_segment_ids"] = np.full(ids.shape, 3, "int32")
        x[f"{side}_segment_ids"][:, border:] = 2
    return x


def pair_alone(x, is_second):
    """Returns the inputs of one pair of each row."""
    found = {}
    for side, border in BORDER_OF_PAIRS.items():
        place = slice(border, None) if is_second else slice(border)
        for name in (f"{side}_token_ids", f"{side}_padding_mask"):
            found[name] = x[name][:, place]
    return found


OF_EACH_KIND_OF_POSITIONS = pytest.mark.parametrize(
    "positions",
    kinds.some(("timing_signal", "coordinate_embeddings"), ["timing_signal"]),
)


@OF_EACH_KIND_OF_POSITIONS
def test_a_document_is_scored_as_it_is_alone(positions):
    settings = {**ROUTED, positions: True}
    lm = small_models.language_model(restart_positions=True, **settings)
    x = packed()
    found = output(lm, x)
    for start, end in zip(BORDERS, BORDERS[1:]):
        alone = output(lm, part(x, start, end))
        np.testing.assert_allclose(found[:, start:end], alone, rtol=1e-3, atol=1e-4)
    # Positions go on by default.
    going_on = output(small_models.language_model(**settings), x)
    second = slice(*BORDERS[1:3])
    np.testing.assert_allclose(going_on[:, :7], found[:, :7], rtol=1e-3, atol=1e-4)
    assert np.abs(going_on - found)[:, second].max() > 1e-2


@pytest.mark.parametrize(
    "routing",
    [
        "token_choice",
        *(
            pytest.param(routing, marks=pytest.mark.thorough)
            for routing in ("expert_choice", "hashed", "random", "full")
        ),
    ],
)
def test_a_pair_has_the_logits_it_has_alone(routing):
    lm = small_seq2seq.language_model(
        **{**ROUTED, "routing": routing}, timing_signal=True, restart_positions=True
    )
    x, other = packed_pairs(), packed_pairs(seed=1)
    found = output(lm, x)
    border = BORDER_OF_PAIRS["decoder"]
    alone = [output(lm, pair_alone(x, is_second)) for is_second in (False, True)]
    alone = np.concatenate(alone, axis=1)
    np.testing.assert_allclose(found, alone, rtol=1e-3, atol=1e-4)
    changed = {
        name: np.where(x[f"{name[:7]}_segment_ids"] == 3, other[name], x[name])
        for name in x
    }
    after = output(lm, changed)
    # Members of clusters may be summed in another order.
    tolerance = 0 if routing == "full" else 1e-5
    np.testing.assert_allclose(
        after[:, border:], found[:, border:], rtol=0, atol=tolerance
    )
    assert np.abs(after - found)[:, :border].max() > 1e-2


@pytest.mark.parametrize(
    "make, make_inputs, targets",
    [
        (small_models.language_model, packed, "token_ids"),
        pytest.param(
            *(small_seq2seq.language_model, packed_pairs, "decoder_token_ids"),
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_models_around_it_and_scorers_hand_the_ids_on(
    tmp_path, make, make_inputs, targets
):
    lm, x = make(**ROUTED), make_inputs()
    targets = x[targets]
    expected = output(lm, x)
    outer_inputs = {
        name: keras.Input(array.shape[1:], dtype=array.dtype, name=name)
        for name, array in x.items()
    }
    outer = keras.Model(outer_inputs, lm(outer_inputs))
    variables = [
        [variable.value for variable in kind]
        for kind in (lm.trainable_variables, lm.non_trainable_variables)
    ]
    inputs = inputs_of(lm, {**x, "other": 0})
    stateless = helpers.compiled(
        lambda inputs: lm.stateless_call(*variables, inputs)[0], jit_compile=None
    )(inputs)
    of_hidden = lm.logits_of(output(lm.backbone, x))
    of_hidden, predicted = golden_cases.to_numpy(of_hidden), lm.predict(x, verbose=0)
    for found in (output(outer, x), stateless, of_hidden, predicted):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    nats = TokenScorer(lm).score(x, targets)
    shifted = expected - np.log(np.exp(expected).sum(-1, keepdims=True))
    wanted = -np.take_along_axis(shifted, targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(nats, wanted, rtol=1e-3, atol=1e-3)
    path = tmp_path / "model.keras"
    lm.save(path)
    loaded = keras.saving.load_model(path)
    np.testing.assert_allclose(output(loaded, x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "remat", ["remat", pytest.param("remat_attention", marks=pytest.mark.thorough)]
)
def test_activations_that_are_computed_again(remat):
    results = []
    for value in (False, True):
        lm = small_models.language_model(**ROUTED, **{remat: value})
        results.append(output(lm, packed(), training=True))
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-5)


@OF_EACH_KIND_OF_POSITIONS
def test_steps_start_anew_with_a_document(positions):
    settings = {"restart_positions": True, positions: True}
    lm = small_models.language_model(**ROUTED, **settings)
    x = packed()
    whole = output(lm, x)
    last = slice(BORDERS[-2], None)

    def steps(ids, segments):
        cache, outputs = lm.make_cache(len(ids), small_models.LENGTH), []
        for start, end in ((0, 10), (10, 11), (11, small_models.LENGTH)):
            now = slice(start, end)
            output, _, cache = lm.call_with_cache(
                ids[:, now], cache, start, segment_ids=segments[:, now]
            )
            outputs.append(output)
        # An integer of NumPy starts the cache anew, too, here with the id of its newest
        # document.
        again, _, _ = lm.call_with_cache(
            ids[:, last], cache, np.int64(0), segment_ids=segments[:, last]
        )
        return keras.ops.concatenate(outputs, axis=1), again

    steps = helpers.compiled(steps, jit_compile=None)
    found, again = steps(x["token_ids"], x["segment_ids"])
    np.testing.assert_allclose(found, whole, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(again, whole[:, last], rtol=1e-3, atol=1e-4)


@helpers.further_on_jax
def test_ids_may_be_lists():
    lm, x = small_models.language_model(**ROUTED), packed()
    lists = {**x, "segment_ids": x["segment_ids"].tolist()}
    np.testing.assert_allclose(small_models.array(lm(lists)), output(lm, x), atol=1e-5)


def test_refusals():
    lm = small_models.language_model(**ROUTED)
    with pytest.raises(ValueError, match="`segment_ids`.*`generate`"):
        lm.generate(packed())
    with pytest.raises(ValueError, match=r"`segment_ids`.*shape=\(24,\)"):
        lm(packed(segment_ids=ROW))
    lm, x = small_seq2seq.language_model(), packed_pairs()
    with pytest.raises(ValueError, match="`decoder_segment_ids`.*`generate`"):
        lm.generate(x)
    names = "must be `decoder_segment_ids` and `encoder_segment_ids`. Received: "
    plain = small_seq2seq.inputs()
    for name in ("segment_ids", "encoder_segment_ids"):
        with pytest.raises(ValueError, match=f"{names}{name}. "):
            lm({**plain, name: x["encoder_segment_ids"]})
    with pytest.raises(ValueError, match="`restart_positions`.*restart_positions=True"):
        models.preset_hyperparameters("digits_small").replace(restart_positions=True)


def test_text_problems_tell_documents_apart():
    class Texts(problems.TextProblem):
        def load_split(self, split):
            return [b"abc", b"de", b"fghijk"]

    problem = Texts(sequence_length=10, segment_ids="true")
    batches = problem.dataset("validation", batch_size=2).as_numpy_iterator()
    inputs, targets, _ = next(batches)
    # An end id, the last target of a text, is the input in front of the next one.
    assert targets[0, [3, 6]].tolist() == [1, 1]
    assert inputs["token_ids"][0, [0, 4, 7]].tolist() == [0, 1, 1]
    expected = [[1, 1, 1, 1, 2, 2, 2, 3, 3, 3], [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]]
    assert inputs["segment_ids"].tolist() == expected
    plain, _, _ = next(iter(Texts(sequence_length=10).dataset("validation", 2)))
    assert "segment_ids" not in plain
    with pytest.raises(ValueError, match="`segment_ids`.*packing='release'"):
        Texts(packing="release", segment_ids=True)


def test_packed_pairs_have_the_scores_they_have_alone():
    class Squares(problems.Seq2SeqProblem):
        default_vocabulary = "bytes"

        def load_split(self, split):
            return [(str(number), str(number**2)) for number in range(12)]

    settings = {"timing_signal": True, "restart_positions": True}
    lm = small_seq2seq.language_model(vocabulary_size=258, **ROUTED, **settings)
    plain, packed = (
        evaluation.evaluate(
            lm,
            Squares(input_length=12, sequence_length=12, segment_ids=packs),
            "test",
            batch_size=4,
        )
        for packs in (False, True)
    )
    assert packed.num_tokens == plain.num_tokens
    np.testing.assert_allclose(packed.nats, plain.nats, rtol=1e-4)


def test_ids_of_64_bits_reach_the_layers_or_are_refused():
    lm = small_models.language_model(**ROUTED)
    ids = np.random.default_rng(0).integers(1, 9, size=(1, 12))
    small = np.repeat([[1, 2]], 6, axis=1)
    large = np.where(small == 2, 2**32 + 1, 1)

    def by_call(segment_ids):
        mask = np.ones_like(ids, "bool")
        inputs = {"token_ids": ids, "padding_mask": mask}
        return lm({**inputs, "segment_ids": segment_ids})

    def by_score(segment_ids):
        return lm.score(ids, segment_ids=segment_ids)

    for call in (by_call, by_score):
        if keras.backend.backend() == "jax":
            with pytest.raises(ValueError, match="`segment_ids` .* 32 "):
                call(large)
        else:
            found, expected = golden_cases.to_numpy([call(large), call(small)])
            np.testing.assert_array_equal(found, expected)
