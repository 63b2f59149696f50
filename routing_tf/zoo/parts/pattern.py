"""The description of a pattern that a model needs for its heads."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A pattern that `Hyperparameters.routing` or `encoder_routing` can name.

    `models.patterns.register` takes your own patterns.

    Args:
        heads: the class of its heads, or a function that returns a list of groups.
        settings: function of `models.patterns.Sizes` that returns further arguments.
        has_relative_positions: whether there may be some. Defaults to True.
        of_images: whether it is only for images. Defaults to False.
        is_bounded: whether memory does not grow with the length. Defaults to False.
        of_decoders: whether it has a causal form. Defaults to True.
        of_encoders: whether it has a form without a causal mask. Defaults to True.
        shares_query_key: whether its queries are its keys. Defaults to False.
        is_clustered: whether its heads are `ClusteredHeads`. Defaults to False.
        has_centroids: whether they also take arguments of `Clustering`; models pass on
            what hyperparameters say of centroids, shared queries and keys, and
            exploring. Defaults to False.
        reads_clusters: whether a query may read several clusters, as
            `Sizes.clusters_per_query` says. Defaults to False.
        refuses: tuple of the arguments that its heads refuse among `dropout`,
            `entmax_alpha`, `key_shift` and `rotary_positions`. Defaults to none.
        min_heads: smallest number of heads. Defaults to 1.
    """

    heads: Callable
    settings: Callable
    has_relative_positions: bool = True
    of_images: bool = False
    is_bounded: bool = False
    of_decoders: bool = True
    of_encoders: bool = True
    shares_query_key: bool = False
    is_clustered: bool = False
    has_centroids: bool = False
    reads_clusters: bool = False
    refuses: tuple = ()
    min_heads: int = 1

    def groups(self, sizes, num_heads, **options):
        """Returns the list of head groups; `options` are those that all heads have."""
        made = self.heads(num_heads, **options, **self.settings(sizes))
        return made if isinstance(made, list) else [made]


def share(sizes, number):
    """Returns the length of each of the blocks of a window."""
    return max(1, sizes.attention_window // number)
