"""What language models promise alike, without an encoder and with one."""

import keras
import keras_hub.models as hub
import numpy as np
import pytest

from routing_tf.tokenizers import ByteTokenizer
from tests import golden_cases
from tests.models import small_models
from tests.models import small_seq2seq


def text(**changes):
    return small_models.language_model(num_layers=1, **changes)


def pairs(**changes):
    return small_seq2seq.language_model(**changes)


# Of the inputs the mask of the decoder is the last one.
of_each_kind = pytest.mark.parametrize(
    "make, x",
    [(text, small_models.inputs((24, 9))), (pairs, small_seq2seq.inputs())],
    ids=["text", "pairs"],
)


@of_each_kind
def test_padding_does_not_take_part_in_training(make, x):
    changed, (*_, real) = dict(x), x.values()
    for name in x:
        if name.endswith("token_ids"):
            mask = x[name.replace("token_ids", "padding_mask")]
            changed[name] = np.where(mask, x[name], x[name] % 29 + 1)
    results = []
    for inputs in (x, changed):
        lm = make()
        logits, losses = golden_cases.run(lm, inputs, training=True)
        state = small_models.arrays(lm.non_trainable_variables)
        results.append((logits[real], losses, state))
    (logits, losses, state), (other_logits, other_losses, other_state) = results
    np.testing.assert_array_equal(logits, other_logits)
    assert losses == other_losses
    small_models.assert_equal(state, other_state)


PAIR_LENGTHS = {"encoder_sequence_length": 12, "decoder_sequence_length": 9}


@pytest.mark.parametrize(
    "make, x, base, lengths",
    [
        (text, small_models.inputs(), hub.CausalLM, {"sequence_length": 10}),
        pytest.param(
            *(pairs, small_seq2seq.inputs(), hub.Seq2SeqLM, PAIR_LENGTHS),
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["text", "pairs"],
)
def test_round_trip_through_a_preset_folder(make, x, base, lengths, tmp_path):
    preprocessor = type(make()).preprocessor_cls(ByteTokenizer(), **lengths)
    lm = make(vocabulary_size=258, preprocessor=preprocessor)
    golden_cases.run(lm, x, training=True)
    lm.save_to_preset(tmp_path / "preset")
    values = small_models.arrays(lm.variables)
    for cls in (type(lm), base):
        copy = cls.from_preset(str(tmp_path / "preset"))
        assert type(copy) is type(lm)
        assert copy.backbone.hyperparameters == lm.backbone.hyperparameters
        found = {name: getattr(copy.preprocessor, name) for name in lengths}
        assert found == lengths
        small_models.assert_equal(small_models.arrays(copy.variables), values)
    empty = base.from_preset(str(tmp_path / "preset"), load_weights=False)
    kernel = small_models.arrays(empty.variables)["logits/kernel"]
    assert not np.array_equal(kernel, values["logits/kernel"])


@of_each_kind
def test_tokenizers_that_cut_and_pad_are_refused(make, x):
    preprocessor = type(make()).preprocessor_cls
    with pytest.raises(ValueError, match=r"Received: ByteTokenizer\(sequence_length=4"):
        preprocessor(ByteTokenizer(sequence_length=4))


@of_each_kind
@pytest.mark.parametrize("start", [[0, 1, 1], [1, 0, 1]], ids=["in front", "between"])
def test_padding_that_is_not_behind_the_prompt_is_refused(make, x, start):
    lm, (*_, name) = make(), x
    mask = np.zeros_like(x[name])
    mask[:, :3] = start
    x = {**x, name: mask}
    message = rf"`{name}`.*Received: {name}=\[[01], [01], "
    with pytest.raises(ValueError, match=message):
        lm.generate(x, stop_token_ids=None)
    with pytest.raises(ValueError, match=message):
        lm.generate_step(keras.tree.map_structure(keras.ops.convert_to_tensor, x))


@of_each_kind
def test_generation_ends_where_inputs_are_cut(make, x):
    lm, (*_, name) = make(truncate_length=16), x
    message = r"`max_length`.* 16\. .*max_length=24"
    with pytest.raises(ValueError, match=message):
        lm.generate({**x, name: np.arange(24) < [[2], [1]]}, stop_token_ids=None)
