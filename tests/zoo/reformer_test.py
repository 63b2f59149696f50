"""Tests of hashed heads in the manner of the Reformer."""

import numpy as np
import pytest

from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers
from tests.layers import kinds
from tests.layers import patterns

BATCH, HEADS, LENGTH, DIM = 2, 2, 23, 6
REFORMER = {**kinds.REFORMER, "num_rounds": 2}


def built_group(num_buckets=4, window=5, **options):
    options = {"embeddings_initializer": "zeros", **options}
    group = zoo.ReformerHeads(HEADS, num_buckets, window, **options)
    return helpers.built(group)


def vectors(group, query, key):
    """Queries and keys as they are compared."""
    if group.normalization == "layer":
        return helpers.normalize(query), helpers.normalize(key)
    query, key = (np.asarray(x, "float64") for x in (query, key))
    return query, key / np.linalg.norm(key, axis=-1, keepdims=True)


def buckets(group, x):
    """Numbers of buckets, `[rounds, batch, heads, length]`."""
    projections = golden_cases.to_numpy(group.projections)
    projections = projections.reshape(-1, HEADS, *projections.shape[1:])
    products = np.einsum("bhld,rhnd->rbhln", x, projections)
    if group.hash == "rotation":
        return np.concatenate([products, -products], axis=-1).argmax(axis=-1)
    return patterns.bucket_numbers(products)


def seen_in_a_round(read, offered, real, window, causal, shift):
    """What the queries of one head see in one round, and the distances.

    `read` and `offered` are the buckets of queries and of keys.
    """
    if causal:
        sees, distances = helpers.last_members(
            offered[None, None], real[None], window, read[None, None], shift
        )
        return sees[0, 0], distances[0, 0]
    length = len(read)
    order = np.lexsort((np.arange(length), read, ~real))[: real.sum()]
    place = np.full(length, -10 * length)
    place[order] = np.arange(len(order))
    chunks = place // window
    back = chunks[:, None] - chunks[None]
    sees = real & real[:, None] & (back >= 0) & (back <= 1)
    return sees, place[None] - place[:, None]


def expected_output(group, query, key, value, real, bias, causal):
    """The formula: a softmax over the keys of all rounds, each divided by N."""
    query, key = vectors(group, query, key)
    read, offered = buckets(group, query), buckets(group, key)
    if group.qk_norm:  # buckets are those of vectors without it
        size, scales = DIM**0.5, [group.query_scale, group.key_scale]
        query_scale, key_scale = golden_cases.to_numpy(scales)
        query = helpers.mean_square_norm(query * size) / size * query_scale
        key = helpers.mean_square_norm(key) * key_scale
    output, readable, itself = np.zeros(value.shape), real, np.eye(real.shape[1]) > 0
    if group.key_shift:
        value, bias = helpers.one_earlier(value, 2), helpers.one_earlier(bias, 1)
        readable = real & helpers.one_earlier(real, 1)
    for b, h in np.ndindex(query.shape[:2]):
        about = real[b], group.attention_window, causal, group.key_shift
        pairs = zip(read[:, b, h], offered[:, b, h], strict=True)
        rounds = [seen_in_a_round(*pair, *about) for pair in pairs]
        sees, distances = (np.concatenate(x, axis=-1) for x in zip(*rounds))
        number = sum(sees for sees, _ in rounds)
        shown = readable[b] & (group.attends_to_self | ~itself)
        output[b, h], _ = helpers.dense_attention(
            query[b, h],
            np.tile(key[b, h], (len(rounds), 1)),
            np.tile(value[b, h], (len(rounds), 1)),
            sees & np.tile(shown, len(rounds)),
            np.tile(bias[b] - np.log(np.maximum(number, 1)), len(rounds)),
            helpers.relative_tables(group),
            distances,
        )
        if not group.attends_to_self:
            alone = np.where(itself, 0, number).sum(axis=-1) == 0
            output[b, h] = np.where(alone[:, None], value[b, h], output[b, h])
    return np.where(real[:, None, :, None], output, 0.0)


CASES = {
    "signs, one round": {"attends_to_self": False},
    "signs": {"num_rounds": 3},
    "rotation, one round": {"hash": "rotation"},
    "rotation": {"hash": "rotation", "num_rounds": 2, "num_buckets": 6},
    "unit keys": {"normalization": "unit_keys", "num_rounds": 2},
    "reformer": REFORMER,
    "normalised": {**REFORMER, "qk_norm": True},
    "many buckets": {**REFORMER, "num_buckets": 16},
    "window of 1": {**REFORMER, "window": 1},
    "long window": {**REFORMER, "window": 40},
    "one token": {**REFORMER, "length": 1},
    "two tokens": {**REFORMER, "length": 2},
    "whole chunks": {**REFORMER, "length": 20},
}
APART = {"share_query_key": False, "num_rounds": 3}
CAUSAL_CASES = {
    **CASES,
    "apart": APART,
    "apart, rotation": {**APART, "hash": "rotation", "normalization": "unit_keys"},
    "apart, shifted": {**APART, "key_shift": 1},
    "shifted": {"num_rounds": 2, "hash": "rotation", "key_shift": 1},
}


WAYS = [(case, True) for case in CAUSAL_CASES] + [(case, False) for case in CASES]
FEW = [(case, True) for case in ("signs", "reformer", "normalised", "apart, shifted")]
FEW += [(case, False) for case in ("rotation", "reformer")]


@pytest.mark.parametrize("case, causal", kinds.some(WAYS, FEW))
def test_equals_the_formula(case, causal):
    """Of the last members of all rounds, or of chunks without a causal mask."""
    options = {"max_relative_position": 3, **CAUSAL_CASES[case]}
    length = options.pop("length", LENGTH)
    group = built_group(**options)
    query, key, value = helpers.streams(length)
    key = query if group.share_query_key else key
    real = helpers.mask_with_a_hole(length, length, max(length - 4, 1))
    real[1, 0] = length < 3
    bias = helpers.normal(BATCH, length, seed=4)
    arrays = query, None if group.share_query_key else key, value
    about = {"query_mask": real, "value_mask": real, "token_bias": bias}
    output, _ = golden_cases.run(group, *arrays, **about, use_causal_mask=causal)
    expected = expected_output(group, query, key, value, real, bias, causal)
    golden_cases.assert_close(output, expected, 1e-5)


@pytest.mark.parametrize("name", ["causal", "chunks"])
def test_equals_reformer_pytorch(name):
    golden = golden_cases.load("peers/hashed_heads.npz")
    case, causal = golden.group(name), name == "causal"
    heads, size, num_rounds, half = case["rotations"].shape
    length = case["query"].shape[1]
    # Longer than any bucket.
    window = length if causal else int(golden["attention_window"])
    group = zoo.ReformerHeads(heads, 2 * half, window, **REFORMER)
    query, value = case["query"][None], case["value"][None]
    group.build(query.shape, query.shape, value.shape)
    rotations = case["rotations"].transpose(2, 0, 3, 1)
    group.projections.assign(rotations.reshape(-1, half, size))

    output, _ = golden_cases.run(
        group, query * size**-0.5, None, value, use_causal_mask=causal
    )

    alike = np.ones((heads, length), "bool") if causal else case["alike"]
    assert alike.mean() > 0.5
    golden_cases.assert_close(output[0][alike], case["output"][alike], 1e-5)


def test_hidden_and_shared_tokens():
    """In half precision, too, logarithms of sums weigh no hidden key."""
    group = built_group(dtype="float16", **REFORMER)
    query, _, value = helpers.streams(LENGTH)
    bias = np.zeros((BATCH, LENGTH), "float32")
    bias[:, 3::4] = -np.inf
    results = []
    for noise in (0.0, 50.0):
        noisy = value + noise * (bias < 0)[:, None, :, None]
        output, _ = golden_cases.run(
            group, query, None, noisy, token_bias=bias, use_causal_mask=True
        )
        results.append(output)
    assert np.all(np.isfinite(results[0]))
    # Some tokens see nothing but hidden ones, or themselves.
    shown = np.abs(results[0] - results[1]).max(axis=-1) < 1e-3
    assert shown.mean() > 0.6
