"""The handwritten digits of scikit-learn."""

import numpy as np

from routing_tf.problems.image import ImageProblem
from routing_tf.problems.registry import register


@register("digits")
class Digits(ImageProblem):
    """Handwritten digits of 8 x 8 pixels, which come with scikit-learn.

    1,797 images with intensities 0 to 16 and the digit as label, shuffled once: 80
    percent for training, 10 for validation, 10 for testing. Nothing is downloaded.

    Args:
        data_dir: not used.
        sequence_length: integer, 64 or left out.
        **options: `train_split` and `eval_split`, see `Problem`.

    Example:
    ```python
    from routing_tf import problems

    digits = problems.get("digits")
    digits.images("test").shape  # (180, 8, 8, 1)
    ```

    Reference: Alpaydin, Kaynak, "Optical Recognition of Handwritten Digits", UCI
    (1998).
    """

    image_shape = (8, 8, 1)
    vocabulary_size = 17
    num_classes = 10
    default_hparams_set = "digits_small"

    def load(self):
        try:
            from sklearn import datasets
        except ImportError as error:
            raise ValueError(
                "The problem digits needs scikit-learn; install it with "
                f"`pip install 'routing-tf[digits]'`. Received: {error}"
            ) from error
        data = datasets.load_digits()
        images = data.images.astype("uint8")[..., None]
        order = np.random.default_rng(0).permutation(len(images))
        held_out = len(images) // 10 + 1
        parts = {
            "train": order[: -2 * held_out],
            "validation": order[-2 * held_out : -held_out],
            "test": order[-held_out:],
        }
        return {
            split: (images[rows], data.target[rows]) for split, rows in parts.items()
        }
