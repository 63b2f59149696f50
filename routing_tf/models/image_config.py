"""What makes a model one of images, documented in this one place."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ImageConfig:
    """Settings of models of images, which have an `image_height`.

    `Hyperparameters` has them together with all others.

    Args:
        image_height: number of rows of an image; None for models of text.
        image_width: number of columns of an image; None for models of text.
        num_channels: number of channels of an image.
        num_classes: number of classes that an image model is conditioned on; None for
            no classes.
        channel_vocabulary_size: rows of the embedding table of each channel of an
            image; None for `vocabulary_size` (the release: always 256).
        position_embeddings: whether embeddings of row and column are added to those of
            an image.
    """

    image_height: int | None = None
    image_width: int | None = None
    num_channels: int = 1
    num_classes: int | None = None
    channel_vocabulary_size: int | None = None
    position_embeddings: bool = True
