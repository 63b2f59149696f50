"""Sums over replicas. Like the kernels of JAX, this module may import a backend."""

import keras
from keras import ops


def num_replicas():
    """Returns the number of replicas that run a call side by side; 1 on JAX."""
    context = _replica_context()
    return 1 if context is None else context.num_replicas_in_sync


def sum_over_replicas(tensors):
    """Returns the sums of `tensors` over all replicas of a distribution strategy.

    On TensorFlow under a `tf.distribute` strategy, this is an all-reduce. Without a
    strategy, outside of its replicas, and on JAX, where a layer sees the global batch,
    it returns `tensors` unchanged. Shapes and types must be the same on every replica.
    """
    context = _replica_context()
    if context is None or not tensors:
        return tensors
    import tensorflow as tf

    results = list(tensors)
    # TensorFlow packs what it adds up, so one type at a time.
    for dtype in dict.fromkeys(tensor.dtype for tensor in results):
        own = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        add = tf.distribute.ReduceOp.SUM
        sums = context.all_reduce(add, [results[index] for index in own])
        for index, total in zip(own, sums, strict=True):
            results[index] = total
    return results


def sum_of_earlier_replicas(tensor):
    """Returns the sums of a tensor over the replicas before this one and over all.

    Without replicas these are zeros and `tensor` itself.
    """
    context = _replica_context()
    if context is None:
        return ops.zeros_like(tensor), tensor
    replicas = ops.arange(context.num_replicas_in_sync, dtype="int32")
    replicas = ops.reshape(replicas, (-1, *[1] * len(tensor.shape)))
    own = ops.cast(context.replica_id_in_sync_group, "int32")
    (all_of_them,) = sum_over_replicas(
        [ops.where(replicas == own, tensor[None], ops.zeros_like(tensor)[None])]
    )
    earlier = ops.where(replicas < own, all_of_them, ops.zeros_like(all_of_them))
    return ops.sum(earlier, axis=0), ops.sum(all_of_them, axis=0)


def _replica_context():
    """The context of this replica; None if there are no other replicas."""
    if keras.backend.backend() != "tensorflow":
        return None
    import tensorflow as tf

    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return None
    return context
