"""Checks random layers against plain NumPy, for the tests and as a command.

    python -m tests.layers.fuzzing --examples=10000 --seed=1
    python -m tests.layers.fuzzing --case="Case(options={...}, ...)"

The first prints what the cases were made of, and those that failed; the second runs one
of these again.
"""

import collections
import contextlib
import signal
import time
import traceback
import warnings

import hypothesis
import keras
import numpy as np
import tqdm
from absl import app
from absl import flags

from routing_tf import layers
from routing_tf import zoo
from tests import golden_cases
from tests.layers import fuzz_cases
from tests.layers import helpers
from tests.layers import oracle

_EXAMPLES = flags.DEFINE_integer("examples", 10000, "Number of random cases.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the cases.")
_CASE = flags.DEFINE_string("case", None, "One case to run, as printed.")
SECONDS_FOR_A_CASE = 60
SAFETY = 2.0


def check(case, counts=None):
    """Runs a case.

    Args:
        case: a `Case`.
        counts: a `Counter` to add to what was checked, by name; None (the default) for
            none.

    Raises:
        AssertionError: if the answer is wrong.
        TimeoutError: if it takes too long.
        Exception: what else the layer raises.
    """
    counts = collections.Counter() if counts is None else counts
    counts["cases"] += 1
    with _time_limit(SECONDS_FOR_A_CASE), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # softmax over one key
        _check_answer(case, counts)


def _check_answer(case, counts):
    layer, arrays, call = build(case)
    expected = oracle.answer(
        layer, **arrays, use_causal_mask=call.get("use_causal_mask", False)
    )
    kinds = {type(group).__name__ for group in layer.head_groups}
    shifted = {"key_shift=1" for group in layer.head_groups if group.key_shift}
    shifted |= {
        "several clusters for a query"
        for group in layer.head_groups
        if getattr(group, "clusters_per_query", 1) > 1
    }
    counts.update(f"with {kind}" for kind in kinds | shifted)
    with_scores = call.get("return_attention_scores")
    output, losses = run(layer, arrays, call, case.compiled)
    output, scores = output if with_scores else (output, None)
    assert output.shape == expected.output.shape, (output.shape, expected.output.shape)
    for name, array in [("output", output), *(("loss", loss) for loss in losses)]:
        assert np.all(np.isfinite(array.astype("float64"))), f"{name} is not finite"
    for weight in layer.weights:
        finite = np.isfinite(golden_cases.to_numpy(weight))
        assert np.all(finite), f"{weight.path} is not finite"
    counts["rows"] += len(output)
    counts["rows with a near tie"] += int(expected.in_doubt.sum())
    vague = expected.vague & ~expected.in_doubt
    counts["rows with logits too large to compare"] += int(vague.sum())
    known = ~(expected.in_doubt | expected.vague)
    counts["rows compared"] += int(known.sum())
    counts["cases compared"] += bool(known.any())
    places = expected.compared & known.reshape(-1, *[1] * (output.ndim - 2))
    _assert_near(
        "output",
        *(x[places] for x in (output, expected.output)),
        expected.error[places],
    )
    if scores is not None:
        assert scores.shape == expected.scores.shape
        assert np.all(np.isfinite(scores.astype("float64")))
        places = places.reshape(len(places), 1, -1)
        places = np.broadcast_to(places, scores.shape[:3])
        error = np.broadcast_to(expected.scores_error, expected.scores.shape)
        _assert_near(
            "attention scores", scores[places], expected.scores[places], error[places]
        )


def _assert_near(name, actual, expected, error):
    difference = np.abs(actual.astype("float64") - expected)
    excess = difference - SAFETY * error - 1e-30
    if excess.size and excess.max() > 0:
        worst = np.unravel_index(excess.argmax(), excess.shape)
        raise AssertionError(
            f"{name} is {actual[worst]} and should be {expected[worst]} "
            f"+- {error[worst]:.1e}; {np.mean(excess > 0):.0%} of the numbers are wrong"
        )


def build(case):
    """Returns the layer of a case, its tensors by name, and other call arguments."""
    options = dict(case.options)
    own = {"embeddings_initializer": "zeros"}
    own |= {"dtype": options["dtype"]} if "dtype" in options else {}
    if options.get("block_shape", 0) is None:
        del options["block_shape"]
    groups = [
        getattr(zoo if hasattr(zoo, kind) else layers, kind)(**{**own, **given})
        for kind, given in case.groups
    ]
    layer = layers.MixedAttention(groups, **options)
    layer.build(case.query, case.value)
    helpers.randomize(layer, case.seed)
    return layer, _arrays(case), dict(case.call)


def _arrays(case):
    random = np.random.default_rng(case.seed)
    arrays = {"query": _tokens(random, case, case.query)}
    if case.value is not None:
        arrays["value"] = _tokens(random, case, case.value)
    for name, style in case.masks.items():
        own = name == "query_mask" or case.value is None
        shape = (case.query if own else case.value)[:-1]
        draw = _bias if name == "token_bias" else _mask
        arrays[name] = draw(random, style, shape)
    return arrays


def _tokens(random, case, shape):
    x = random.normal(size=shape)
    if case.content == "zeros":
        x = np.zeros(shape)
    elif case.content == "constant":
        x = np.broadcast_to(x[:1, :1], shape)
    elif case.content == "repeated" and x.size:
        few = x.reshape(-1, shape[-1])[:3]
        x = few[random.integers(0, len(few), shape[:-1])]
    elif case.content == "far from zero":
        x = x + 100.0
    return (case.magnitude * x).astype("float32")


def _mask(random, style, shape):
    mask = np.ones(shape, "bool")
    if style == "all padding":
        return np.zeros(shape, "bool")
    if style == "one row of padding":
        mask[0] = False
        return mask
    if style == "tail":
        length = shape[1] if len(shape) > 1 else 1
        ends = random.integers(0, length + 1, shape[0])
        mask.reshape(shape[0], length, -1)[np.arange(length) >= ends[:, None]] = False
        return mask
    mask = random.random(shape) < 0.7
    if style == "one for all":
        return mask[:1]
    return mask.astype("int32") if style == "integers" else mask


def _bias(random, style, shape):
    bias = random.normal(size=shape).astype("float32")
    if style != "normal":
        bias.reshape(shape[0], -1)[:, 0] = -np.inf if style == "one -inf" else -1e9
    return bias


def run(layer, arrays, call, compiled=False):
    """Returns what a layer returns, and its losses."""
    arrays = dict(arrays)
    query, value = arrays.pop("query"), arrays.pop("value", None)
    if keras.backend.backend() == "jax" or not compiled:
        return golden_cases.run(layer, query, value, **arrays, **call)
    if value is not None:
        arrays["value"] = value

    def function(query, arrays):
        return layer(query, **arrays, **call), list(layer.losses)

    return helpers.compiled(function, jit_compile=False)(query, arrays)


@contextlib.contextmanager
def _time_limit(seconds):
    """Raises a `TimeoutError` in what takes longer, as far as it runs Python."""

    def stop(number, frame):
        raise TimeoutError(f"The case took more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def settings(examples, **options):
    """Returns the settings of Hypothesis; `check` has a time limit of its own."""
    return hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        **options,
    )


def run_many(examples, seed):
    """Runs cases; returns what was checked, and those that failed with their errors."""
    counts, failures = collections.Counter(), []
    bar = tqdm.tqdm(total=examples, unit="case", mininterval=1.0)

    @hypothesis.seed(seed)
    @settings(examples, phases=[hypothesis.Phase.generate])
    @hypothesis.given(fuzz_cases.cases())
    def check_one(case):
        try:
            check(case, counts)
        except Exception as error:
            failures.append((case, error))
        bar.update()

    with bar:
        check_one()
    return counts, failures


def main(unused_argv):
    if _CASE.value:
        check(eval(_CASE.value, vars(fuzz_cases)))
        print("passed")
        return
    start = time.monotonic()
    counts, failures = run_many(_EXAMPLES.value, _SEED.value)
    for case, error in failures:
        print("".join(traceback.format_exception(error, limit=-3)))
        print(f'--case="{case}"\n')
    seconds = time.monotonic() - start
    for name, number in sorted(counts.items()):
        print(f"{name}: {number}")
    print(f"{len(failures)} failures in {seconds:.0f} seconds")
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    app.run(main)
