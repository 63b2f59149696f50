"""Refusals of arguments that have no meaning for some patterns."""

import dataclasses

from routing_tf.layers.support.tensors import is_known
from routing_tf.layers.support.tensors import length_of
from routing_tf.layers.support.tensors import of_length


def of_one_length(inputs, reason):
    """Returns `HeadInputs` whose value is as long as the query, as far as is known.

    Raises a `ValueError` if it is not.
    """
    length, memory_length = length_of(inputs.query, 2), length_of(inputs.value, 2)
    if is_known(length, memory_length) and length != memory_length:
        raise ValueError(
            f"`query` and `value` must have the same length: {reason}. Received: "
            f"lengths {length} and {memory_length}. Use `FullHeads` or `RoutedHeads` "
            "for another sequence"
        )
    return dataclasses.replace(inputs, value=of_length(inputs.value, 2, length))


def refuse_comparison(group, name, neutral, value):
    """Raises the `ValueError` of heads whose weights are not a softmax of products."""
    raise ValueError(
        f"`{name}` must be {neutral} for {type(group).__name__}: not all of their "
        "weights are a softmax of products of queries and keys. Received: "
        f"{name}={value!r} for {group.name!r}. Leave it out, or use heads such as "
        "`RoutedHeads` or `LocalHeads`"
    )


def refuse_segments(group, reason):
    """Raises the `ValueError` of heads that cannot have `segment_ids`."""
    raise ValueError(
        f"`segment_ids` cannot be used with `{type(group).__name__}`: {reason}. "
        f"Received: segment_ids for {group.name!r}. Leave them out, with one document "
        "in each row, or use heads such as `RoutedHeads` or `LocalHeads`"
    )
