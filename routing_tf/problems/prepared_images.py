"""Images that are prepared once and kept on disk."""

from routing_tf.choices import SPLITS
from routing_tf.problems.image import ImageProblem
from routing_tf.problems.prepared import PreparedProblem


class PreparedImageProblem(ImageProblem, PreparedProblem):
    """Images of 256 intensities that are prepared once and then read in place.

    A subclass names the `builder` of tensorflow-datasets; its examples have an "image"
    and perhaps a "label". Takes the arguments of `ImageProblem`.

    Attributes:
        sources: dictionary from split to the split of the builder that it is made of,
            in the notation of tensorflow-datasets.
    """

    vocabulary_size = 256
    sources = dict(zip(SPLITS, SPLITS))

    def source_of(self, split):
        return self.sources[split]

    def available_splits(self):
        known = self.tfds_builder.info.splits
        return [split for split in SPLITS if self.sources[split].split("[")[0] in known]

    def dtypes(self):
        return {"images": ("uint8", self.image_shape), "labels": "int32"}

    def parts(self, split, start, state):
        for number, example in enumerate(self.examples(split, start), start):
            image = example["image"]
            if image.shape != self.image_shape:
                raise ValueError(
                    f"Images of {self.name} must have the shape {self.image_shape}. "
                    f"Received: image {number} of the split {split!r}, of shape "
                    f"{image.shape}"
                )
            yield {"images": image, "labels": [example.get("label", 0)]}, None

    def load_image_split(self, split):
        arrays = self.read_split(split)
        return arrays["images"], arrays["labels"]

    def describe_split(self, split):
        return f"{self.num_windows(split):,} images"
