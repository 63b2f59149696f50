"""Images that tensorflow-datasets prepares."""

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

    `datagen` takes the four original files (`train-images-idx3-ubyte.gz`, ...) or
    downloads them. Of the 60,000 training images, in the order of tensorflow-datasets,
    the last 5,000 are for validation; tensor2tensor holds out as many in
    `image_mnist_tune`.

    Args:
        **options: arguments of `ImageProblem`.

    Raises:
        ValueError: from `prepare`, if the data is not in `data_dir`.

    Example:
    ```python
    from routing_tf import problems

    problem = problems.get("mnist", data_dir="data")
    problem.image_shape  # (28, 28, 1)
    ```

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

    `datagen` takes the original file `cifar-10-binary.tar.gz` or downloads it. Of the
    50,000 training images, in the order of tensorflow-datasets, the last 5,000 are for
    validation.

    Args:
        **options: arguments of `ImageProblem`.

    Raises:
        ValueError: from `prepare`, if the data is not in `data_dir`.

    Example:
    ```python
    from routing_tf import problems

    problem = problems.get("cifar10", data_dir="data")
    problem.sequence_length  # 3072, 32 * 32 * 3
    ```

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

    `datagen` takes the original files `train_64x64.tar` and `valid_64x64.tar`. There
    are no test images: published figures are those of the validation images, which are
    also the split "test". The arrays need 16 GB in `data_dir`.

    Args:
        **options: arguments of `ImageProblem`.

    Raises:
        ValueError: from `prepare`, if the data is not in `data_dir`.

    Example:
    ```python
    from routing_tf import problems

    problem = problems.get("imagenet64", data_dir="data")
    problem.image_shape  # (64, 64, 3)
    ```

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
