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
