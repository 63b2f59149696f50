"""Samples of a trained model on held-out data, shown after training."""

import keras_hub
import numpy as np

from routing_tf.generation import display
from routing_tf.generation.display import printable
from routing_tf.models import steps
from routing_tf.problems import image
from routing_tf.training import loading

PROMPT_TOKENS = 64


def model_to_sample_from(trainer):
    """Returns the trained model on one device."""
    if trainer.engine.num_devices == 1:
        return trainer.lm
    lm = loading.load_language_model(trainer.model_dir)
    if trainer.config.hyperparameters.kind != "image":
        sampler = keras_hub.samplers.TopPSampler(p=0.9, seed=trainer.config.seed)
        lm.compile(optimizer=None, sampler=sampler)
    return lm


def show_samples(lm, trainer, num_tokens, num_images):
    """Samples from the trained model: a text on standard output, images as files.

    The model is that of `model_to_sample_from`.
    """
    problem = trainer.problem
    if problem.kind == "image":
        if num_images:
            files = sample_images(lm, problem, num_images, trainer.config.seed)
            for name, content in files.items():
                path = trainer.model_dir / f"{name}.png"
                path.write_bytes(content)
                print(f"{name}: {path}")
    elif num_tokens and problem.tokenizer is not None:
        sample = sample_target if problem.kind == "seq2seq" else sample_continuation
        for name, text in sample(lm, problem, num_tokens).items():
            print(f"--- {name}\n{printable(text)}")
        print("---")


def sample_continuation(lm, problem, num_tokens):
    """Continues a held-out text by `num_tokens`; returns texts by their titles.

    By fewer tokens if the model has no room for all.
    """
    ids = problem.ids(problem.eval_split)
    start = len(ids) // 2
    end = start + min(PROMPT_TOKENS, problem.sequence_length // 2)
    prompt = problem.tokenizer.detokenize(ids[start:end])
    # The model's sequences have one more leading id.
    length = 1 + len(problem.tokenizer.tokenize(prompt)) + num_tokens
    length = min(length, steps.longest_row(lm.hyperparameters) or length)
    text = lm.generate(prompt, max_length=length)
    return {
        "prompt from held-out text": prompt,
        "sampled continuation": text.removeprefix(prompt),
    }


def sample_target(lm, problem, num_tokens):
    """Generates the target of a held-out source; returns texts by their titles."""
    tokenizer = problem.tokenizer
    source, target = (ids[:-1] for ids in problem.pair(problem.eval_split, 0))
    # As long as in training, because the lengths decide which tokens meet.
    sampled = tokenizer.tokenize(lm.generate(tokenizer.detokenize(source)))
    found = {
        "held-out source": source,
        "its target": target,
        "sampled target": np.asarray(sampled),
    }
    return {name: tokenizer.detokenize(ids[:num_tokens]) for name, ids in found.items()}


def sample_images(model, problem, number, seed=0):
    """Samples images, and completes half as many held-out ones, given their upper half.

    Returns PNG files as bytes by their names. In the file of completions, each row of
    completed images is below the row of the true ones; incomplete rows are left out.
    """
    sampler = keras_hub.samplers.RandomSampler(seed=seed)
    labels = None
    if model.hyperparameters.num_classes is not None:
        labels = np.arange(number) % problem.num_classes
    samples = model.generate(number, labels, sampler=sampler)
    true = problem.images(problem.eval_split)[: -(-number // 2)]
    labels = problem.labels(problem.eval_split)[: len(true)]
    num_given_rows = problem.image_shape[0] // 2
    completed = display.complete(model, sampler, true, labels, num_given_rows)
    columns = min(display.COLUMNS, len(true))
    pairs = [
        images[start : start + columns]
        for start in range(0, len(true) // columns * columns, columns)
        for images in (true, completed)
    ]
    levels = problem.vocabulary_size
    return {
        "samples": image.picture(samples, min(display.COLUMNS, number), levels),
        "completions": image.picture(np.concatenate(pairs), columns, levels),
    }
