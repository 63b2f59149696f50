"""Do later tokens reach earlier outputs, and through which heads?"""

import dataclasses

import numpy as np

from routing_tf.analysis.probe import Probe
from routing_tf.analysis.windows import rows_of
from routing_tf.files.progress import progress
from routing_tf.layers.support.validation import check_positive_integer


@dataclasses.dataclass(frozen=True)
class Movement:
    """How outputs at earlier positions move when later tokens change.

    Args:
        share: share of the earlier positions whose output changes.
        mean: mean change, relative to the root mean square of these outputs.
        largest: largest change, relative to the same.
    """

    share: float
    mean: float
    largest: float


@dataclasses.dataclass(frozen=True)
class Leak:
    """How much later tokens reach earlier positions through a part of a model.

    Args:
        part: name of the part, see `Probe.part_outputs`.
        itself: `Movement` with a fixed input of the part's layer.
        stack: `Movement` through the stack, in which that input moves too.
    """

    part: str
    itself: Movement
    stack: Movement


def find_leaks(
    lm,
    windows,
    num_perturbations=4,
    routing_scope="full",
    batch_size=1,
    seed=0,
    verbose=True,
):
    """Changes the later tokens of windows and compares the outputs at earlier ones.

    Args:
        lm: a `RoutingTransformerCausalLM` or `RoutingImageTransformer`.
        windows: dict of NumPy arrays, inputs of the model without padding.
        num_perturbations: number of positions of each window from which all tokens are
            replaced by others of the windows. Defaults to 4.
        routing_scope: `"full"` (the default) or `"prefix"`, see `RoutedHeads`.
        batch_size: largest number of windows in one call. Defaults to 1.
        seed: seed of positions and tokens. Defaults to 0.
        verbose: whether to show progress on standard error. Defaults to True.

    Returns:
        List of `Leak`, one for each head group and one for the output of each block.
        All numbers of a strictly causal model are exactly 0.

    Example:

    ```python
    import numpy as np
    from routing_tf import models
    from routing_tf.analysis import find_leaks

    lm = models.RoutingTransformerCausalLM.from_preset("byte_tiny")
    ids = np.random.default_rng(0).integers(2, 258, (1, 64)).astype("int32")
    windows = {"token_ids": ids, "padding_mask": np.ones((1, 64), "bool")}
    leaks = find_leaks(lm, windows, num_perturbations=1)
    assert all(leak.stack.share == 0 for leak in leaks)
    ```
    """
    check_positive_integer("num_perturbations", num_perturbations)
    check_positive_integer("batch_size", batch_size)
    probe = Probe(lm, routing_scope)
    replacer = _Replacer(probe, windows, num_perturbations, seed)
    tallies = {name: (_Tally(), _Tally()) for name in probe.part_names()}
    num_windows = len(windows["padding_mask"])
    batch_size = min(batch_size, num_windows)
    starts = range(0, num_windows, batch_size)
    for start in progress(starts, "batch", verbose=verbose):
        rows = np.arange(start, start + batch_size)
        # The last batch repeats its last window, and counts it once.
        is_counted = rows < num_windows
        _watch(probe, replacer, np.minimum(rows, num_windows - 1), is_counted, tallies)
    return [Leak(name, *(t.result() for t in pair)) for name, pair in tallies.items()]


def _watch(probe, replacer, rows, is_counted, tallies):
    """Adds the effects of all perturbations of some windows to the tallies of parts."""
    windows = rows_of(replacer.windows, rows)
    # In one compiled function with one shape, equal inputs give bit-identical rows.
    states = probe.hidden_states(windows)
    before = probe.part_outputs(states)
    for index in range(replacer.num_perturbations):
        starts = replacer.starts[index, rows]
        is_later = np.arange(states[0].shape[1]) >= starts[:, None]
        is_earlier = ~is_later & is_counted[:, None]
        moved = probe.hidden_states(replacer.replace(rows, index))
        fixed = [
            np.where(is_later[..., None], *pair)
            for pair in zip(moved, states, strict=True)
        ]
        itself = stack = probe.part_outputs(fixed)
        if not all(map(np.array_equal, fixed, moved)):
            stack = probe.part_outputs(moved)
        for name, (own_tally, stack_tally) in tallies.items():
            own_tally.add(before[name], itself[name], is_earlier)
            stack_tally.add(before[name], stack[name], is_earlier)


class _Replacer:
    """Replaces the tokens of windows from some positions on.

    `starts`, `<int>[num_perturbations, windows]`, has the first position whose input
    is replaced.
    """

    def __init__(self, probe, windows, num_perturbations, seed):
        self.windows = windows
        self._name = "images" if "images" in windows else "token_ids"
        tokens = windows[self._name]
        places = probe.places()
        # An image model sees each sub-pixel at the next place.
        self._positions = np.arange(tokens.shape[1]) if places is None else places + 1
        # No text contains its leading id.
        self._ids = np.unique(tokens[:, self._positions > 0])
        length = self._positions.size
        if length < 2 or len(self._ids) < 2:
            raise ValueError(
                "`windows` must have at least two positions and two different tokens. "
                f"Received: {length} positions, {len(self._ids)} different tokens"
            )
        # No more than there are positions after the first.
        self.num_perturbations = num_perturbations = min(num_perturbations, length - 1)
        self._seed = seed
        generator = np.random.default_rng(seed)
        shape = (num_perturbations, len(tokens))
        shares = np.arange(num_perturbations)[:, None] + generator.random(shape)
        self.starts = 1 + (shares / num_perturbations * (length - 1)).astype("int64")

    def replace(self, rows, index):
        """Returns the windows `rows` as the perturbation `index` changes them."""
        tokens = self.windows[self._name][rows]
        shifts = [
            np.random.default_rng([self._seed, index, row]).integers(
                1, len(self._ids), tokens.shape[1:]
            )
            for row in rows
        ]
        others = np.searchsorted(self._ids, tokens) + np.stack(shifts)
        others = self._ids[others % len(self._ids)].astype(tokens.dtype)
        starts = self.starts[index, rows].reshape(-1, *[1] * (tokens.ndim - 1))
        replaced = np.where(self._positions >= starts, others, tokens)
        return {**rows_of(self.windows, rows), self._name: replaced}


class _Tally:
    """Adds up the changes of outputs."""

    def __init__(self):
        self.num_moved = self.num_positions = self.num_outputs = 0
        self.sum = self.largest = self.squares = 0.0

    def add(self, before, after, is_earlier):
        """Adds a batch.

        `before` and `after` are `<float>[B, L, size]`; only positions in `is_earlier`,
        `<bool>[B, L]`, count.
        """
        before = before[is_earlier].astype("float64")
        difference = after[is_earlier].astype("float64") - before
        changes = np.sqrt(np.mean(np.square(difference), axis=-1))
        self.num_moved += int(np.sum(np.any(difference != 0, axis=-1)))
        self.num_positions += len(changes)
        self.sum += float(np.sum(changes))
        self.largest = max(self.largest, float(np.max(changes, initial=0.0)))
        self.squares += float(np.sum(np.square(before)))
        self.num_outputs += before.size

    def result(self):
        """Returns the `Movement`."""
        size = (self.squares / self.num_outputs) ** 0.5 or 1.0
        return Movement(
            share=self.num_moved / self.num_positions,
            mean=self.sum / self.num_positions / size,
            largest=self.largest / size,
        )
