"""Hidden states, heads, attention maps and clusters of a language model.

Letters: B batch, H heads, L length, K clusters.
"""

import contextlib
import dataclasses

import keras
import numpy as np
from keras import ops

from routing_tf.layers.heads.clustered import ClusteredHeads
from routing_tf.layers.support.keras_internals import declare_call_argument
from routing_tf.models.compiled import compiled
from routing_tf.models.preprocessing import inputs_of
from routing_tf.models.preprocessing import without_segment_ids


@dataclasses.dataclass(frozen=True, eq=False)
class Clusters:
    """The members of the clusters of a head group.

    Args:
        nearest: NumPy array `<int32>[B, H, L]`, the best cluster of each position.
        members: NumPy array `<bool>[B, H, L, K]`, the clusters of which each position
            is a member. In expert choice, they are chosen from the whole sequence, as
            the last query sees it in the scope `"prefix"`.
    """

    nearest: np.ndarray
    members: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class BlockAttention:
    """The self-attention of a block on some inputs.

    Args:
        block: name of the block.
        maps: dict from the name of each head group to its maps, NumPy arrays
            `<float>[B, H, L, L]`: the weights of all keys (last axis) for each query.
        clusters: dict from the name of each head group with clusters to `Clusters`.
    """

    block: str
    maps: dict
    clusters: dict


class Probe:
    """Looks inside a language model, of texts or images.

    It shares the model's weights and does not change the model. Its functions are
    compiled once for each shape of inputs. Positions are in the order in which the
    model sees them. Each stands for its input token; in an image, this is the sub-pixel
    before the one that is predicted there.

    Args:
        lm: a `RoutingTransformerCausalLM` or `RoutingImageTransformer`.
        routing_scope: `"full"` (the default) or `"prefix"`, see `RoutedHeads`.

    Attributes:
        blocks: the model's `TransformerBlock` layers.

    Example:

    ```python
    import numpy as np
    from routing_tf import models
    from routing_tf.analysis import Probe

    lm = models.RoutingTransformerCausalLM.from_preset("byte_tiny")
    inputs = {
        "token_ids": np.arange(64, dtype="int32")[None],
        "padding_mask": np.ones((1, 64), "bool"),
    }
    first, *_ = Probe(lm).attention(inputs)
    assert first.maps["local_heads"].shape[2:] == (64, 64)
    ```
    """

    def __init__(self, lm, routing_scope="full"):
        self.lm = lm
        self.routing_scope = routing_scope
        backbone = getattr(lm, "backbone", lm)
        self.blocks = backbone.blocks
        # A block is called with its input first, then with the padding mask.
        states = [block.input[0] for block in self.blocks]
        model = keras.Model(lm.input, [*states, self.blocks[-1].output])
        declare_call_argument(model, "routing_scope", "segment_ids")

        def hidden_states(inputs):
            inputs, segment_ids = without_segment_ids(inputs)
            return model(inputs, routing_scope=routing_scope, segment_ids=segment_ids)

        self._hidden_states = _compiled(lm, hidden_states)
        self._part_outputs = _compiled(lm, self._trace_parts)
        self._attention = _compiled(lm, self._trace_attention)
        self._lengths = tuple(states[0].shape[1:-1])

    def hidden_states(self, inputs):
        """Returns the input of each block and the last output, `<float>[B, L, dim]`."""
        inputs = inputs_of(self.lm, inputs)
        return [self._in_sequence(state) for state in self._hidden_states(inputs)]

    def part_outputs(self, hidden_states):
        """Runs each block on a given input, without padding.

        Args:
            hidden_states: list of the inputs of the blocks, and possibly more.

        Returns:
            Dict of NumPy arrays `<float>[B, L, size]`: `"BLOCK GROUP"` for the outputs
            of heads before the projection, and `"BLOCK output"`.
        """
        inputs = [
            self._in_shape(state)
            for state, _ in zip(hidden_states, self.blocks, strict=False)
        ]
        outputs = self._part_outputs(inputs)
        for block in self.blocks:
            name = f"{block.name} output"
            outputs[name] = self._in_sequence(outputs[name])
        return {name: outputs[name] for name in self.part_names()}

    def part_names(self):
        """Returns the names of all parts, from the first block to the last."""
        names = []
        for block in self.blocks:
            groups = [group.name for group in block.attention.head_groups]
            names += [f"{block.name} {name}" for name in (*groups, "output")]
        return names

    def attention(self, inputs):
        """Returns attention maps and clusters.

        The memory of the maps grows with the square of the length, so use short inputs.

        Args:
            inputs: dict of NumPy arrays, as for a call of the model, without padding.

        Returns:
            List with a `BlockAttention` for each block. All weights of a query that
            sees nothing are 0.
        """
        states = [self._in_shape(state) for state in self.hidden_states(inputs)[:-1]]
        segment_ids = inputs.get("segment_ids")
        found = []
        for block, (maps, clusters) in zip(
            self.blocks, self._attention((states, segment_ids)), strict=True
        ):
            groups = block.attention.head_groups
            ends = np.cumsum([group.num_heads for group in groups])[:-1]
            maps = np.split(self._map_in_sequence(maps), ends, axis=1)
            names = [group.name for group in groups]
            clusters = {name: Clusters(*pair) for name, pair in clusters.items()}
            found.append(
                BlockAttention(
                    block.name, dict(zip(names, maps, strict=True)), clusters
                )
            )
        return found

    def _trace_parts(self, states):
        found = {}
        for block, state in zip(self.blocks, states, strict=True):
            groups = block.attention.head_groups
            with recorded(groups, "attend") as calls:
                output = block(state, routing_scope=self.routing_scope)
            for group, (_, heads) in zip(groups, calls, strict=True):
                found[f"{block.name} {group.name}"] = _side_by_side(heads)
            found[f"{block.name} output"] = output
        return found

    def _trace_attention(self, inputs):
        states, segment_ids = inputs
        found = []
        for block, state in zip(self.blocks, states, strict=True):
            groups = clustered_groups(block)
            with recorded(groups, "assign") as calls:
                _, maps = block.attention(
                    block.attention_input(state),
                    use_causal_mask=block.use_causal_mask,
                    return_attention_scores=True,
                    routing_scope=self.routing_scope,
                    segment_ids=segment_ids,
                )
            clusters = {
                group.name: _clusters(group, assigned[-1])
                for group, (_, assigned) in zip(groups, calls, strict=True)
            }
            found.append((maps, clusters))
        return found

    def places(self):
        """Returns the places of an image in its sequence; None for a text."""
        return self.lm.places() if self.lm.hyperparameters.kind == "image" else None

    def _order(self):
        places = self.places()
        return None if places is None else np.argsort(places, axis=None)

    def _in_sequence(self, state):
        """From the shape of states between blocks to `[B, L, dim]`."""
        order = self._order()
        if order is None:
            return state
        return state.reshape(len(state), -1, state.shape[-1])[:, order]

    def _in_shape(self, state):
        """Undoes `_in_sequence`."""
        order = self._order()
        if order is None:
            return state
        state = state[:, np.argsort(order)]
        return state.reshape(len(state), *self._lengths, state.shape[-1])

    def _map_in_sequence(self, maps):
        order = self._order()
        return maps if order is None else maps[:, :, order][..., order]


@contextlib.contextmanager
def recorded(groups, method):
    """Yields a list, to which each call of a method of head groups is added.

    Items are the positional arguments and the result. If a function is compiled inside,
    they are symbolic and only valid in this function.
    """
    calls = []

    def wrap(function):
        def wrapper(*arguments, **options):
            result = function(*arguments, **options)
            calls.append((arguments, result))
            return result

        return wrapper

    try:
        for group in groups:
            # Keras would look for layers and variables in it.
            object.__setattr__(group, method, wrap(getattr(group, method)))
        yield calls
    finally:
        for group in groups:
            vars(group).pop(method, None)


def clustered_groups(block):
    """Returns the head groups of a block's self-attention that have clusters."""
    groups = block.attention.head_groups
    return [group for group in groups if isinstance(group, ClusteredHeads)]


def _compiled(lm, function):
    """Compiles a function of NumPy arrays that calls layers of a model."""
    call = compiled(lm, function)
    return lambda x: keras.tree.map_structure(ops.convert_to_numpy, call(x))


def _side_by_side(heads):
    """From `[B, H, L, D]` to `[B, L, H * D]`."""
    batch, count, length, size = ops.shape(heads)
    return ops.reshape(
        ops.transpose(heads, (0, 2, 1, 3)), (batch, length, count * size)
    )


def _clusters(group, assigned):
    """Returns best clusters and members from the `Assignment` of keys."""
    nearest, rule = assigned.numbers, group.causal_rule()
    if rule.tokens_choose:
        return nearest, rule.members(assigned.scores)
    members, belongs = group.choose(assigned, None)
    length = nearest.shape[2]
    inside = ops.any(
        ops.logical_and(
            members[..., None] == np.arange(length),
            True if belongs is None else belongs[..., None],
        ),
        axis=-2,
    )
    return nearest, ops.swapaxes(inside, 2, 3)
