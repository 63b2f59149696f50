"""What a trained model makes of held-out data, to look at after training."""

import keras_hub
import numpy as np

from routing_tf import problems
from routing_tf.generation.display import printable
from routing_tf.problems import image
from routing_tf.training import loading

PROMPT_TOKENS = 64
IMAGE_COLUMNS = 10


def model_to_sample_from(trainer):
    """Returns the trained model on one device.

    Args:
        trainer: the `Trainer`.
    """
    if trainer.engine.num_devices == 1:
        return trainer.lm
    lm = loading.load_language_model(trainer.model_dir)
    if trainer.config.hyperparameters.kind != "image":
        sampler = keras_hub.samplers.TopPSampler(p=0.9, seed=trainer.config.seed)
        lm.compile(optimizer=None, sampler=sampler)
    return lm


def show_samples(lm, trainer, num_tokens, num_images):
    """Samples from the trained model: a text on standard output, images as files.

    Args:
        lm: the model, see `model_to_sample_from`.
        trainer: the `Trainer`.
        num_tokens: number of tokens of a text; 0 for none.
        num_images: number of images; 0 for none.
    """
    problem = trainer.problem
    if isinstance(problem, problems.ImageProblem):
        if num_images:
            pictures = sample_images(lm, problem, num_images, trainer.config.seed)
            for name, content in zip(("samples", "completions"), pictures, strict=True):
                path = trainer.model_dir / f"{name}.png"
                path.write_bytes(content)
                print(f"{name}: {path}")
    elif not num_tokens or problem.tokenizer is None:
        return
    elif problem.kind == "seq2seq":
        texts = sample_target(lm, problem, num_tokens)
        names = ("held-out source", "its target", "sampled target")
        for name, text in zip(names, texts, strict=True):
            print(f"--- {name}\n{printable(text)}")
        print("---")
    else:
        prompt, continuation = sample(lm, problem, num_tokens)
        print(f"--- prompt from held-out text\n{printable(prompt)}")
        print(f"--- sampled continuation\n{printable(continuation)}\n---")


def sample(lm, problem, num_tokens):
    """Continues a held-out text.

    Args:
        lm: the compiled language model.
        problem: the problem, which has a tokenizer.
        num_tokens: number of tokens to sample at most.

    Returns:
        The prompt and its continuation.
    """
    ids = problem.ids(problem.eval_split)
    start = len(ids) // 2
    end = start + min(PROMPT_TOKENS, problem.sequence_length // 2)
    prompt = problem.tokenizer.detokenize(ids[start:end])
    # The model's sequences start behind one more id.
    length = 1 + len(problem.tokenizer.tokenize(prompt)) + num_tokens
    text = lm.generate(prompt, max_length=length)
    return prompt, text.removeprefix(prompt)


def sample_target(lm, problem, num_tokens):
    """Generates the text that belongs to a held-out one.

    Args:
        lm: the compiled language model with an encoder.
        problem: the problem of pairs of texts, which has a tokenizer.
        num_tokens: number of tokens to show of each text at most.

    Returns:
        The source, the true target and the generated one.
    """
    tokenizer = problem.tokenizer
    source, target = (ids[:-1] for ids in problem.pair(problem.eval_split, 0))
    # As long as in training: the lengths decide which tokens meet.
    sampled = tokenizer.tokenize(lm.generate(tokenizer.detokenize(source)))
    texts = (source, target, np.asarray(sampled))
    return tuple(tokenizer.detokenize(ids[:num_tokens]) for ids in texts)


def sample_images(model, problem, number, seed=0):
    """Samples images, and completes held-out ones whose upper half is given.

    Args:
        model: the image model.
        problem: the `ImageProblem`.
        number: number of images to sample; half as many are completed.
        seed: seed of the sampler. Defaults to 0.

    Returns:
        Two PNG files as bytes. In the second each row of completed images stands
        below the row of the true ones; rows that are not full are left out.
    """
    sampler = keras_hub.samplers.RandomSampler(seed=seed)

    def generate(labels, **options):
        if model.hyperparameters.num_classes is not None:
            options["labels"] = labels
        return model.generate(len(labels), sampler=sampler, **options)

    samples = generate(np.arange(number) % problem.num_classes)
    true = problem.images(problem.eval_split)[: -(-number // 2)]
    completed = generate(
        problem.labels(problem.eval_split)[: len(true)],
        images=true,
        num_given_rows=problem.image_shape[0] // 2,
    )
    columns = min(IMAGE_COLUMNS, len(true))
    pairs = [
        images[start : start + columns]
        for start in range(0, len(true) // columns * columns, columns)
        for images in (true, completed)
    ]
    levels = problem.vocabulary_size
    return (
        image.picture(samples, min(IMAGE_COLUMNS, number), levels),
        image.picture(np.concatenate(pairs), columns, levels),
    )
