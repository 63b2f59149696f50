"""What a cache of a causal Perceiver has room for."""

from routing_tf.layers.caches import next_token


def first_latent(perceiver, inputs, cache):
    """Checks the inputs after a cache; returns the place of the first latent."""
    length, index = inputs.shape[1], cache.cache_index
    rows = cache.cache["readings"][0]["rows"]
    sequences = rows.shape[0], inputs.shape[0]
    if None not in sequences and sequences[0] != sequences[1]:
        raise ValueError(
            "`cache` must be made for as many sequences as `inputs` has. Received: "
            f"inputs.shape={tuple(inputs.shape)} and a cache for {sequences[0]}. "
            "Pass this number to `make_cache` as `batch_size`"
        )
    max_length = rows.shape[2]
    first = max(max_length - perceiver.num_latents, 0)
    if cache.starts_anew and not first < length <= max_length:
        raise ValueError(
            "The first call with a cache must reach the first latent, and not go "
            f"beyond the last. Received: {length} inputs with latents at places "
            f"{first} to {max_length - 1}. Make a cache with another `max_length`"
        )
    is_known = isinstance(index, int) and not cache.starts_anew
    if is_known and not first < index <= max_length - length:
        raise ValueError(
            "`cache_index` must be the number of inputs that the cache was fed, "
            f"more than {first}, and the cache must have room for `inputs`. "
            f"Received: cache_index={index} with {length} inputs, and a cache for "
            f"{max_length}. Make a cache with a larger `max_length`"
        )
    if is_known:
        next_token.check(cache.cache["next"], index)
    return first
