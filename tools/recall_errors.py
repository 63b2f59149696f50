"""Trains a model of `benchmarks.recall` and tells what it does not recall.

Usage: PYTHONPATH=. python tools/recall_errors.py --sizes=512x64 --key_shifts=1 ...

Takes the flags of `benchmarks.recall`, and the first of each of its lists. Fillers are
any tokens, so a key may stand among them once more, behind its pair and before the
query. Which of the two places came first is then all that tells the right value.
"""

import numpy as np
import tqdm
from absl import app
from absl import flags

from benchmarks import recall
from benchmarks import recall_data
from benchmarks import recall_model


def main(argv):
    benchmark = recall.Benchmark(flags.FLAGS)
    place, row = benchmark.places[0], benchmark.rows[0]
    settings = benchmark.settings(row, place, benchmark.seeds[0])
    network = recall_model.Network(settings)
    for step in tqdm.trange(settings.steps, desc=settings.name, disable=None):
        examples = settings.examples(settings.batch_size, settings.seed, step)
        network.train_on(examples)
    held_out = settings.examples(recall_model.EVALUATED, recall_data.EVALUATION_SEED)
    right = network.answers(held_out) == held_out.labels
    is_single = stands_once(held_out, settings.synonyms)
    print(f"{settings.name}, {right.size:,} queries")
    for name, asked in (
        ("all", np.ones_like(is_single)),
        ("whose key stood once before", is_single),
        ("whose key stood among the fillers, too", ~is_single),
    ):
        print(f"{name}: {asked.mean():.3f} of them, {right[asked].mean():.3f} right")


def stands_once(examples, synonyms=1):
    """Tells at which labelled positions the key stood once before, `<bool>[B, P]`.

    Args:
        examples: `Examples`.
        synonyms: number of tokens that are one key. Defaults to 1.
    """
    keys = (examples.tokens - 1) // synonyms
    asked = np.take_along_axis(keys, examples.positions, axis=1)
    is_before = np.arange(keys.shape[1]) < examples.positions[..., None]
    is_same = keys[:, None] == asked[..., None]
    return (is_same & is_before).sum(axis=-1) == 1


if __name__ == "__main__":
    recall.define_flags()
    app.run(main)
