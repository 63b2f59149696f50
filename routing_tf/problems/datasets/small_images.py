"""Small images: those that tensorflow-datasets prepares, and those of scikit-learn."""

import numpy as np

from routing_tf.problems.image import ImageProblem
from routing_tf.problems.registry import register

LAST_TRAINING_IMAGES_HELD_OUT = {
    "train": "train[:-5000]",
    "validation": "train[-5000:]",
    "test": "test",
}


@register("mnist")
class Mnist(ImageProblem):
    """MNIST, 70,000 handwritten digits of 28 x 28 pixels, with ten classes.

    The last 5,000 of the 60,000 training images, in the order of tensorflow-datasets,
    are for validation; tensor2tensor holds out as many in `image_mnist_tune`.

    Args:
        **options: arguments of `ImageProblem`.

    Reference: `image_mnist_rev` of tensor2tensor; LeCun et al., "Gradient-Based
    Learning Applied to Document Recognition" (1998).
    """

    storage = "mnist"
    builder = "mnist"
    image_shape = (28, 28, 1)
    num_classes = 10
    default_hparams_set = "mnist_cluster_local"
    sources = LAST_TRAINING_IMAGES_HELD_OUT


@register("cifar10")
class Cifar10(ImageProblem):
    """CIFAR-10, 60,000 photographs of 32 x 32 pixels, with ten classes.

    The last 5,000 of the 50,000 training images, in the order of tensorflow-datasets,
    are for validation.

    Args:
        **options: arguments of `ImageProblem`.

    Reference: `image_cifar10_plain_gen_rev` of tensor2tensor; Krizhevsky, "Learning
    Multiple Layers of Features from Tiny Images" (2009).
    """

    storage = "cifar10"
    builder = "cifar10"
    image_shape = (32, 32, 3)
    num_classes = 10
    default_hparams_set = "cifar10_local_cluster"
    sources = LAST_TRAINING_IMAGES_HELD_OUT


@register("imagenet64")
class Imagenet64(ImageProblem):
    """ImageNet at 64 x 64 pixels, 1.28 million photographs without classes.

    There are no test images: the split "test" has the validation images, as in
    published figures. The arrays need 16 GB in `data_dir`.

    Args:
        **options: arguments of `ImageProblem`.

    Reference: `image_imagenet64_gen_rev` of tensor2tensor; van den Oord et al., "Pixel
    Recurrent Neural Networks" (2016).
    """

    storage = "imagenet64"
    builder = "downsampled_imagenet/64x64"
    image_shape = (64, 64, 3)
    num_classes = 1
    default_hparams_set = "imagenet_local_cluster"
    sources = {"train": "train", "validation": "validation", "test": "validation"}

    def folder(self, split):
        return super().folder(self.sources[split])


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
