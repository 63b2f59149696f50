"""Named switches for the places where the original release goes wrong."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Compatibility:
    """Flaws of the original release, each reachable by its own name.

    Every switch is off by default, which is the sound behaviour. The bridge
    `routing_tf.models.release` turns them on to reproduce the release's numbers.

    Args:
        rank_mask: with separate queries and keys a causal mask compares ranks in the
            two sorted member lists, so a query can see later keys. Off (the default):
            it compares positions.
        mixed_head_counts: the moving average of the cluster counts adds up tokens
            across heads (a wrong reshape). Off (the default): each head counts its own
            tokens.
        counts_start_at_zero: the average of the cluster counts starts at 0 beside sums
            that start at the centroids, so that the first updates throw centroids
            far away. Off (the default): it starts at 1 and the centroids move smoothly.
        commitment_counted_twice: with shared queries and keys the commitment loss is
            added once for the queries and once more for the same keys. Off (the
            default): once.
        padding_by_zero_rows: a position whose value vector is exactly zero is padding
            (for the k-means: whose token is zero). Off (the default): masks alone
            decide.
        padding_is_routed: padding competes for places in the clusters with score 0
            and takes part in the mean of the commitment loss. Off (the default): it
            does neither.
        padding_of_first_row: the padding of the first batch row is used for all
            rows (`cache_padding_bias`). Off (the default): every row has its own.
        uniform_when_all_masked: a query that may see nothing attends to all slots
            of its window alike. Off (the default): its output is zero.
        last_block_is_centre: unmasked local heads count relative positions as if the
            query block were the last one of its window. Off (the default): true
            distances.
        strided_padding_is_seen: strided heads mask no padding and know no token bias;
            instead all queries of a block attend to all blocks alike where the block
            starts with padding in the first row. Off (the default): padding is never
            seen.
        cluster_strided_settings_are_fixed: in models, cluster-strided heads project
            queries and keys apart, with a decay of 0.99 and a commitment weight of
            1e-4, whatever the hyperparameters say. Off (the default): they follow them.
        buckets_filled_up: a hashed bucket with fewer tokens than the window is filled
            up with the first tokens of other buckets, and under a causal mask it holds
            the first tokens of the sequence. Off (the default): it has so many
            members, and under a causal mask a query sees the last ones.
        members_of_whole_sequence: under a causal mask cluster-strided and random
            heads choose the members of a cluster from the whole sequence, later tokens
            included. Off (the default): from the tokens up to the query.
        queries_compete: in attention to another sequence each cluster takes as many
            queries as keys, so that later queries can push out earlier ones. Off (the
            default): each query sees the members of its own best cluster.

    Example:

    ```python
    from routing_tf.layers import Compatibility

    flaws = Compatibility(mixed_head_counts=True)
    assert not flaws.rank_mask
    ```

    Reference: `utils.py` of the release; the README lists where each one shows.
    """

    rank_mask: bool = False
    mixed_head_counts: bool = False
    counts_start_at_zero: bool = False
    commitment_counted_twice: bool = False
    padding_by_zero_rows: bool = False
    padding_is_routed: bool = False
    padding_of_first_row: bool = False
    uniform_when_all_masked: bool = False
    last_block_is_centre: bool = False
    strided_padding_is_seen: bool = False
    cluster_strided_settings_are_fixed: bool = False
    buckets_filled_up: bool = False
    members_of_whole_sequence: bool = False
    queries_compete: bool = False

    @classmethod
    def of(cls, value):
        """Returns `value` as a `Compatibility`.

        Args:
            value: None for no flaws, a dict of fields, or a `Compatibility`.

        Returns:
            `Compatibility`.

        Raises:
            ValueError: if `value` is of another kind or names an unknown field.
        """
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if isinstance(value, dict):
            unknown = sorted(set(value) - {f.name for f in dataclasses.fields(cls)})
            if not unknown:
                return cls(**value)
        raise ValueError(
            "`compatibility` must be None, a `Compatibility` or a dict of its fields "
            f"({', '.join(f.name for f in dataclasses.fields(cls))}). "
            f"Received: compatibility={value!r}"
        )

    @classmethod
    def release(cls, padding_of_first_row=False):
        """Returns the settings that reproduce the release's numbers.

        Args:
            padding_of_first_row: whether all rows use the padding of the first one.
                Defaults to False.

        Returns:
            `Compatibility` with all other switches on.
        """
        switches = {f.name: True for f in dataclasses.fields(cls)}
        return cls(**{**switches, "padding_of_first_row": padding_of_first_row})

    @classmethod
    def trained(cls):
        """Returns the flaws that weights trained by the release rely on.

        They show in outputs without any padding. What concerns padding and training is
        sound.

        Returns:
            `Compatibility`.
        """
        return cls(
            rank_mask=True,
            last_block_is_centre=True,
            cluster_strided_settings_are_fixed=True,
            buckets_filled_up=True,
            members_of_whole_sequence=True,
            queries_compete=True,
        )

    @property
    def padding_has_influence(self):
        """Whether padding changes what is computed of real tokens."""
        return (
            self.padding_is_routed
            or self.padding_by_zero_rows
            or self.padding_of_first_row
            or self.strided_padding_is_seen
        )

    def to_dict(self):
        """Returns the fields as a plain dict, for `get_config`."""
        return dataclasses.asdict(self)
