"""Contenders written in Keras: this package's patterns, and Keras' full attention."""

import keras
import numpy as np
from keras import ops

from routing_tf import layers
from routing_tf.layers.routing.cluster_order import chunk_size_for
from routing_tf.layers.softmax.softmax_attention import in_pieces
from routing_tf.layers.softmax.softmax_attention import num_pieces

# Arguments of `RoutedHeads`.
ROUTINGS = {
    "expert choice": {"routing": "expert_choice"},
    "token choice": {"routing": "token_choice"},
    "token choice of shifted keys": {"routing": "token_choice", "key_shift": 1},
    "token choice of separate keys": {
        "routing": "token_choice",
        "share_query_key": False,
    },
    "token choice of four clusters": {
        "routing": "token_choice",
        "share_query_key": False,
        "clusters_per_query": 4,
    },
}


@keras.saving.register_keras_serializable("benchmarks")
class KerasAttention(keras.layers.Layer):
    """Full attention by `keras.ops.dot_product_attention`, called like a head group.

    Its tensors are `[batch, length, heads, size]`.
    """

    def build(self, query_shape, key_shape, value_shape):
        pass

    def call(self, query, key, value, use_causal_mask=False, training=None):
        return ops.dot_product_attention(query, key, value, is_causal=use_causal_mask)


@keras.saving.register_keras_serializable("benchmarks")
class CudnnAttention(KerasAttention):
    """The same by cuDNN, on JAX."""

    def call(self, query, key, value, use_causal_mask=False, training=None):
        import jax

        return jax.nn.dot_product_attention(
            query, key, value, is_causal=use_causal_mask, implementation="cudnn"
        )


@keras.saving.register_keras_serializable("benchmarks")
class Products(KerasAttention):
    """The products of a pattern alone: of each chunk and the keys that it reads.

    Its tensors are `[1, heads, chunks * keys of a chunk, size]`; queries are weights.
    The numbers stand as the products want them, so that nothing is copied, and come
    in as many pieces as those of the heads.
    """

    def __init__(self, chunk, keys, **kwargs):
        super().__init__(**kwargs)
        self.chunk, self.keys = chunk, keys

    def build(self, query_shape, key_shape, value_shape):
        _, heads, length, self.size = key_shape
        self.batch = heads * (length // self.keys)
        self.query = self.add_weight(
            shape=(self.batch, self.chunk, self.size), initializer="random_normal"
        )

    def call(self, query, key, value, use_causal_mask=False, training=None):
        key = ops.reshape(key, (self.batch, self.size, self.keys))
        value = ops.reshape(value, (self.batch, self.keys, self.size))
        # Keys stand across here; values have their shape.
        number = num_pieces(self.query, value, value, [])
        output = in_pieces(
            lambda query, key, value: ops.matmul(ops.matmul(query, key), value),
            number,
            self.query,
            key,
            value,
        )
        return ops.reshape(output, (1, query.shape[1], -1, self.size))


def products(shape, pattern, window, num_clusters, dtype, passes, xla):
    """Returns a function that computes the products of a pattern alone; see `ours`.

    Those of local heads and expert choice are of half a block or cluster, and of the
    keys that both halves read on average; those of token choice are as many as with
    static shapes.
    """
    batch, heads, length, size = shape
    if pattern in ("local", "expert choice"):
        earlier = window if pattern == "local" else 0
        chunk, keys = max(1, window // 2), earlier + window - window // 4
        chunks = -(-length // chunk)
    else:
        chunk = chunk_size_for(window)
        keys, chunks = window + chunk, -(-length // chunk) + num_clusters
    layer = Products(chunk, keys, dtype=policy(dtype))
    shape = (batch, heads, chunks * keys, size)
    return compiled(layer, shape, dtype, passes, xla, num_outputs=chunks * chunk)


def ours(
    shape,
    pattern,
    window,
    num_clusters,
    relative,
    dtype,
    passes,
    xla,
    implementation="plain",
):
    """Returns a function that runs one of this package's patterns once.

    Args:
        shape: `[1, heads, length, size]`.
        pattern: a key of `ROUTINGS`, `"hashed"`, `"local"`, `"multipole"` or `"full"`.
        window: tokens in a cluster or a block; of multipole heads, near ones and those
            read of clusters, half of each.
        num_clusters: number of clusters of each head.
        relative: whether there are relative positions, as many as the window.
        dtype: `"float32"` or `"bfloat16"`.
        passes: `"forward"` or `"forward+backward"`.
        xla: whether XLA compiles it on TensorFlow.
        implementation: `attention_implementation` of the layer.
    """
    options = {
        "max_relative_position": max(1, window - 1) if relative else None,
        "dtype": policy(dtype),
        "attention_implementation": implementation,
    }
    if pattern == "local":
        group = layers.LocalHeads(shape[1], (window,), **options)
    elif pattern == "hashed":
        group = layers.HashedHeads(shape[1], max(2, num_clusters), window, **options)
    elif pattern == "full":
        group = layers.FullHeads(shape[1], **options)
    elif pattern == "multipole":
        far = window // 2
        near = {"num_recent": window - far}
        group = layers.MultipoleHeads(shape[1], num_clusters, far, **near, **options)
    else:
        group = layers.RoutedHeads(
            shape[1], num_clusters, window, **ROUTINGS[pattern], **options
        )
    return compiled(group, shape, dtype, passes, xla, has_key=group.needs_keys)


def full(shape, dtype, passes, xla):
    """Returns a function that runs the full attention of Keras once; see `ours`."""
    batch, heads, length, size = shape
    layer = KerasAttention(dtype=policy(dtype))
    return compiled(layer, (batch, length, heads, size), dtype, passes, xla)


def flash(shape, dtype, passes):
    """Returns a function that runs the full attention of cuDNN once, on JAX."""
    batch, heads, length, size = shape
    layer = CudnnAttention(dtype=policy(dtype))
    return compiled(layer, (batch, length, heads, size), dtype, passes, xla=True)


def policy(dtype):
    """Returns the dtype policy of Keras that computes in `dtype`."""
    return "float32" if dtype == "float32" else f"mixed_{dtype}"


def compiled(layer, shape, dtype, passes, xla, has_key=True, num_outputs=None):
    """Compiles a layer of shared queries and keys, as the running backend does.

    Args:
        layer: a layer, called with query, key and value.
        shape: of these three.
        dtype: of these three.
        passes: `"forward"`, or `"forward+backward"`: gradients of query, value and
            weights, and the layer's state moves.
        xla: whether XLA compiles it on TensorFlow.
        has_key: whether the layer is given the queries as keys, or knows.
        num_outputs: how many tokens it returns; None (the default) for all.
    """
    layer.build(shape, shape, shape)
    generator = np.random.default_rng(0)
    query, value, weights = (
        ops.cast(generator.normal(size=shape).astype("float32"), dtype)
        for _ in range(3)
    )
    weights = weights[:, :, :num_outputs]

    def call(function, query, value, **options):
        key = query if has_key else None
        return function(query, key, value, use_causal_mask=True, **options)

    make = _on_jax if keras.backend.backend() == "jax" else _on_tensorflow
    return make(layer, call, (query, value, weights), passes, xla)


def objective(output, weights, losses):
    """A sum whose gradient at the output is `weights`, plus the layer's losses."""
    return ops.sum(ops.cast(output * weights, "float32")) + sum(losses)


def _on_tensorflow(layer, call, tensors, passes, xla):
    import tensorflow as tf

    def forward(query, value, weights):
        return call(layer, query, value, training=False)

    def both(query, value, weights):
        with tf.GradientTape() as tape:
            tape.watch([query, value])
            output = call(layer, query, value, training=True)
            loss = objective(output, weights, layer.losses)
        variables = [variable.value for variable in layer.trainable_variables]
        # The output too, or what only it needs would be left out.
        return output, tape.gradient(loss, [query, value, *variables])

    function = tf.function(
        forward if passes == "forward" else both, jit_compile=xla, autograph=False
    )

    def run():
        function(*tensors)
        tf.test.experimental.sync_devices()

    return run


def _on_jax(layer, call, tensors, passes, xla):
    import jax

    trainable = [variable.value for variable in layer.trainable_variables]
    state = [variable.value for variable in layer.non_trainable_variables]

    def evaluate(trainable, state, query, value, training):
        variables = layer.trainable_variables, layer.non_trainable_variables
        values = [*zip(variables[0], trainable), *zip(variables[1], state)]
        # Not by `stateless_call`, which head groups do not have: they are called with
        # other arguments than their `call`.
        with keras.StatelessScope(values, collect_losses=True) as scope:
            output = call(layer, query, value, training=training)
            losses = list(layer.losses)
        state = [scope.get_current_value(variable) for variable in variables[1]]
        return output, state, losses

    def loss(trainable, state, query, value, weights):
        output, state, losses = evaluate(trainable, state, query, value, True)
        # The output too, or what only it needs would be left out.
        return objective(output, weights, losses), (state, output)

    def forward(trainable, state, query, value, weights):
        output, state, _ = evaluate(trainable, state, query, value, False)
        return None, (state, output)

    both = jax.grad(loss, argnums=(0, 2, 3), has_aux=True)
    function = jax.jit(forward if passes == "forward" else both)

    def run():
        nonlocal state
        results = function(trainable, state, *tensors)
        _, (state, _) = jax.block_until_ready(results)

    return run
