"""Attention inside clusters by the splash kernel of JAX, on a TPU.

Tokens stand in the order of their clusters, so that each cluster is a segment, and its
last members are a window of places. The kernel skips blocks of pairs outside the
window, and stores no weights. Each cluster starts at a block of the kernel, so that the
order of its sums does not depend on later tokens. `keras.ops.dot_product_attention`
calls it with a single segment, and the mask of the first sequence for all. Like
`fused_attention.py`, this module imports a backend.
"""

import keras
import numpy as np
from keras import ops

from routing_tf.layers.routing.cluster_order import ClusterOrder
from routing_tf.layers.support import tensors
from routing_tf.layers.support.tensors import is_known

# Queries and keys of a block of the kernel: a multiple of the lanes of a TPU.
LANES, LARGEST_BLOCK = 128, 512
# Whether the kernel is interpreted, which works on any device. For tests.
INTERPRET = False
# The segment of keys that nobody sees.
_NO_KEY = -1
# The logit of an attention sink, which takes the weight of a query without keys.
_SINK = -1e30


def is_there():
    """Returns whether the kernel can run on the device."""
    return keras.backend.backend() == "jax" and (INTERPRET or not lack_of_device())


def obstacle(dot_product, compute_dtype, inputs, training):
    """Returns why the kernel cannot take these inputs; None if it can.

    Args:
        dot_product: the `ScaledDotProduct` of heads whose queries are routed as their
            keys are.
        compute_dtype: in which they compute.
        inputs: their `HeadInputs`.
        training: whether dropout is on.
    """
    if keras.backend.backend() != "jax":
        return f"the backend is {keras.backend.backend()}, and the kernel is JAX's"
    if not INTERPRET and (lack := lack_of_device()) is not None:
        return lack
    if not is_known(*inputs.value.shape):
        return "the kernel needs a known size of the batch"
    if 0 in inputs.value.shape:
        return "there is nothing to compute"
    dtype = keras.backend.standardize_dtype(compute_dtype)
    if dtype not in ("float32", "bfloat16"):
        return f"the kernel computes in float32 and bfloat16, not in {dtype}"
    if inputs.token_bias is not None:
        return "a bias of tokens needs the logits of each pair"
    if inputs.segments is not None:
        return "its segments are the clusters, and packed documents need others"
    return dot_product.needs_logits(False, training)


def lack_of_device():
    """Returns what the device lacks, in words; None if nothing."""
    import jax

    if jax.default_backend() != "tpu":
        return "there is no TPU"
    if keras.distribution.distribution() is not None:
        return "the kernel cannot be divided among devices"
    return None


def attend(
    query,
    key,
    value,
    clusters,
    num_clusters,
    attention_window,
    nearest=0,
    key_mask=None,
):
    """Lets each token attend to the last members of its cluster.

    Letters: B batch, H heads, L length, D dim.

    Args:
        query: `<float>[B, H, L, D]`, scaled.
        key: `<float>[B, H, L, D]`.
        value: `<float>[B, H, L, D]`, with any D.
        clusters: `<int32>[B, H, L]`, less than `num_clusters`.
        num_clusters: number of clusters.
        attention_window: how many members a token sees, itself included; more than
            `nearest`.
        nearest: 1 if the token does not see itself. Defaults to 0.
        key_mask: `<bool>`, broadcastable to `[B, H, L]`, False for keys that nobody
            sees; None (the default) for none.

    Returns:
        `<float>[B, H, L, D]`; zero for a token that sees nothing.
    """
    batch, heads, length = clusters.shape
    # As large as a cluster of equal size, whose last block is then half empty.
    block = max(LANES, min(LARGEST_BLOCK, length // num_clusters // LANES * LANES))
    order = ClusterOrder(clusters, num_clusters, block)
    segments = ops.broadcast_to(
        order.cluster_of_chunk[..., None], ops.shape(order.is_filled)
    )
    is_key = order.is_filled
    if key_mask is not None:
        is_seen = tensors.gather_entries(key_mask, order.tokens, length)
        is_key = ops.logical_and(is_key, is_seen)

    def rows(x, *dim):
        return ops.reshape(x, (batch * heads, order.num_chunks * block, *dim))

    output = _by_kernel(
        *(rows(order.arrange(x), x.shape[-1]) for x in (query, key, value)),
        rows(segments),
        rows(ops.where(is_key, segments, _NO_KEY)),
        _kernel(order.num_chunks * block, block, attention_window, nearest),
    )
    shape = (batch, heads, order.num_chunks, block, value.shape[-1])
    return order.restore(ops.reshape(output, shape))


def _kernel(length, block, attention_window, nearest):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask

    # How far back from the nearest member, and none after it.
    window = (attention_window - 1 - nearest, 0)
    mask = splash_attention_mask.LocalMask((length, length), window, -nearest)
    return splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask]),
        block_sizes=splash_attention_kernel.BlockSizes(*[block] * 8),
        head_shards=1,
        q_seq_shards=1,
        interpret=INTERPRET,
    )


def _by_kernel(query, key, value, segments, of_keys, kernel):
    """Runs the kernel on `[rows, L, D]` and segments `<int32>[rows, L]`."""
    import jax
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    sinks = jax.numpy.asarray(np.array([_SINK], "float32"))

    def attend(query, key, value, segments, of_keys):
        ids = splash_attention_kernel.SegmentIds(segments, of_keys)
        return kernel(query[None], key[None], value[None], ids, sinks)[0]

    return jax.vmap(attend)(query, key, value, segments, of_keys)
