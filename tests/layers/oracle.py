"""What `MixedAttention` must return, in plain NumPy: dense attention under masks.

All is computed in float64 from the weights of a layer, together with a bound on what
rounding may change. Where rounding may decide who is a member of a cluster, a row of
the batch is in doubt, and has no expected answer.
"""

import dataclasses

import numpy as np

from routing_tf import layers
from routing_tf import zoo
from tests import golden_cases
from tests.layers import helpers
from tests.layers import patterns

# Several roundings stand behind each number.
ROUNDINGS = 8
EPSILON = {"float32": 2.0**-24, "bfloat16": 2.0**-9}
# Beyond this a softmax says nothing.
LARGEST_LOGIT_ERROR = 0.25
HIDDEN = -5e8
# The thresholds of entmax are found by bisection.
ENTMAX_ERROR = 1e-4


@dataclasses.dataclass
class Rounded:
    """Numbers as a layer computes them, and how wrong each may be."""

    value: np.ndarray
    error: np.ndarray

    def map(self, function):
        """Returns what a function that moves numbers makes of both."""
        return Rounded(function(self.value), function(self.error))

    def __getitem__(self, index):
        return self.map(lambda x: x[index])


@dataclasses.dataclass
class Answer:
    """What a layer must return.

    Attributes:
        output: `[batch, *lengths, output_dim]`.
        error: how wrong each output may be, of the same shape.
        scores: the attention map `[batch, heads, length, memory length]`.
        scores_error: `[batch, heads, 1, 1]`.
        compared: `<bool>[batch, *lengths]`, where the answer is defined.
        in_doubt: `<bool>[batch]`, rows in which rounding may choose members.
        vague: `<bool>[batch]`, rows whose logits are too large to be precise.
    """

    output: np.ndarray
    error: np.ndarray
    scores: np.ndarray
    scores_error: np.ndarray
    compared: np.ndarray
    in_doubt: np.ndarray
    vague: np.ndarray


class Order:
    """The order in which positions become a sequence, and padding that fills it up."""

    def __init__(self, lengths, block_shape):
        self.lengths = lengths
        blocks = (1,) * len(lengths) if block_shape is None else block_shape
        if block_shape is None and len(lengths) > 1:
            blocks = lengths
        self.grid = tuple(-(-n // b) for n, b in zip(lengths, blocks))
        whole = [g * b for g, b in zip(self.grid, blocks)]
        places = np.indices(whole).reshape(len(whole), -1)
        block = [place // b for place, b in zip(places, blocks)]
        slot = [place % b for place, b in zip(places, blocks)]
        order = np.lexsort([*reversed(slot), *reversed(block)])
        if block_shape is None:
            order = np.arange(np.prod(whole))
        self.exists = np.all(places < np.array(lengths)[:, None], axis=0)[order]
        inside = np.minimum(places, np.array(lengths)[:, None] - 1)
        self.position = np.ravel_multi_index(tuple(inside), lengths)[order]

    @property
    def length(self):
        return len(self.position)

    def arrange(self, x, axis):
        """Puts positions into the order, zero (False) in what fills up blocks."""
        shape = [1] * x.ndim
        shape[axis] = self.length
        exists = self.exists.reshape(shape)
        return np.where(
            exists, np.take(x, self.position, axis), np.zeros_like(x[:1]).sum()
        )

    def restore(self, x, axis):
        """Undoes `arrange`."""
        index = np.zeros(np.prod(self.lengths), "int64")
        places = np.flatnonzero(self.exists)
        index[self.position[places]] = places
        return np.take(x, index, axis)


def answer(
    layer,
    query,
    value=None,
    query_mask=None,
    value_mask=None,
    token_bias=None,
    use_causal_mask=False,
):
    """Returns the `Answer` to a call of a built `MixedAttention`."""
    precision = layer.compute_dtype
    is_cross = value is not None
    batch, *lengths, dim = query.shape
    block_shape = _order_blocks(layer)
    order = memory_order = Order(tuple(lengths), block_shape)
    query = _round(query.reshape(batch, -1, dim), precision)
    memory = query
    if is_cross:
        memory_order = Order(value.shape[1:-1], block_shape)
        memory = _round(value.reshape(batch, -1, value.shape[-1]), precision)
    elif value_mask is None:
        value_mask = query_mask
    masks = [
        _expand(mask, batch, each).astype("bool")
        for mask, each in ((query_mask, order), (value_mask, memory_order))
    ]
    bias = None
    if token_bias is not None:
        bias = _expand(token_bias.astype("float64"), batch, memory_order)
        bias = np.maximum(bias, HIDDEN)
    outputs, errors, doubts, vague = [], [], [], []
    for group, own_query, own_key, own_value in _projections(
        layer, query, memory, is_cross
    ):
        length = own_value.value.shape[2]
        eye = np.broadcast_to(np.eye(length), (*own_value.value.shape[:3], length))
        own_value = Rounded(
            np.concatenate([own_value.value, eye], -1),
            np.concatenate([own_value.error, 0 * eye], -1),
        )
        shared = own_key is own_query
        own_query = own_query.map(lambda x: order.arrange(x, 2))
        own_key, own_value = (
            x.map(lambda x: memory_order.arrange(x, 2)) for x in (own_key, own_value)
        )
        if shared:
            own_key = own_query
        call = _Call(
            group,
            own_query,
            own_key,
            own_value,
            *masks,
            _group_bias(group, bias),
            use_causal_mask,
            is_cross,
            order,
        )
        outputs.append(call.attend())
        error, logit_error = call.rounding(precision)
        errors.append(error)
        doubts.append(call.in_doubt)
        vague.append(logit_error > LARGEST_LOGIT_ERROR)
    joined = order.restore(np.concatenate(outputs, axis=1), 2)
    size = layer.value_dim or layer.key_dim
    error = np.concatenate(errors, axis=1)[:, :, None]
    output, output_error = _combine(layer, joined[..., :size], error, precision)
    # A query whose own key is padding has no place among the tokens up to it.
    alone = is_cross and not use_causal_mask
    compared = masks[0] if alone else masks[0] & masks[1]
    return Answer(
        output.reshape(batch, *lengths, -1),
        np.broadcast_to(output_error, output.shape).reshape(batch, *lengths, -1),
        joined[..., size:],
        error[..., size:].max(axis=-1, keepdims=True),
        order.restore(compared, 1).reshape(batch, *lengths),
        np.any(doubts, axis=0),
        np.any(vague, axis=0),
    )


class _Call:
    """A call of one head group; names as in `HeadInputs`."""

    def __init__(
        self, group, query, key, value, query_real, real, bias, causal, is_cross, order
    ):
        self.group = group
        self.query, self.key, self.value = query, key, value
        if not isinstance(group, helpers.CLUSTERED):
            self.query, self.key = _compared(group, query, key)
        self.query_real, self.real, self.bias = query_real, real, bias
        self.causal, self.is_cross = causal, is_cross
        self.order, self.grid = order, order.grid
        self.in_doubt = np.zeros(len(real), "bool")
        self.length, self.memory_length = query.value.shape[2], value.value.shape[2]
        # Heads that share queries and keys have one stream, with the mask of the keys.
        self.shared = query is key
        if isinstance(group, helpers.CLUSTERED) and self.shared:
            self.query_real = real
        # What a key is read with: with shifted keys the value of the next position.
        self.offered = real
        if group.key_shift:
            self._shift()

    def _shift(self):
        """Puts each key beside the value of the position after it.

        Positions are those of the values; in clusters, whose members are keys, those
        of the keys.
        """
        if not isinstance(self.group, helpers.CLUSTERED):
            self.key = self.key.map(lambda x: helpers.one_later(x, 2))
            self.offered = self.real & helpers.one_later(self.real, 1)
            return
        self.value = self.value.map(lambda x: helpers.one_earlier(x, 2))
        self.offered = self.real & helpers.one_earlier(self.real, 1)
        if self.bias is not None:
            self.bias = helpers.one_earlier(self.bias, 1)

    def attend(self):
        """Returns the outputs of the group's pattern."""
        group = self.group
        if isinstance(group, helpers.CLUSTERED):
            return self._attend_in_clusters()
        if isinstance(group, layers.LocalHeads):
            sees, distances = self._local()
        elif isinstance(group, zoo.BlockTopKHeads):
            sees, distances = self._best_blocks()
        elif isinstance(group, zoo.AxialHeads):
            places, width = np.arange(self.length), group.width
            if len(self.order.lengths) > 1:
                places, width = self.order.position, self.order.lengths[1]
            sees, distances = patterns.axial(
                *np.divmod(places, width), group.axis, self.causal
            )
        else:
            rule = next(
                patterns.OF_GROUPS[cls]
                for cls in type(group).__mro__
                if cls in patterns.OF_GROUPS
            )
            lengths = self.length, self.memory_length
            sees, distances = rule(group, *lengths, self.causal)
        return self._dense(sees, distances)

    def _dense(self, sees, distances):
        """Returns dense attention of the pairs of which a query sees a key."""
        group, query, key = self.group, self.query.value, self.key.value
        if isinstance(group, helpers.CLUSTERED):
            query, key = helpers.compared(group, query, key)
        output, _ = helpers.dense_attention(
            query,
            key,
            self.value.value,
            self.offered[:, None, None] & sees,
            0.0 if self.bias is None else self.bias[:, None, None],
            helpers.relative_tables(group),
            distances,
            **helpers.softmax_options(group),
        )
        return output

    def _local(self):
        group = self.group
        flange = group.flange_blocks
        if len(group.block_shape) > 1:
            flange = flange if isinstance(flange, tuple) else (flange, flange)
            return patterns.rectangles(
                self.grid, group.block_shape, flange, self.causal
            )
        flange = flange[0] if isinstance(flange, tuple) else flange
        if group.dilation > 1:
            return patterns.dilated(
                self.length, group.block_shape[0], flange, group.dilation, self.causal
            )
        block = min(group.block_shape[0], self.length)
        lengths = self.length, self.memory_length

        def pattern(memory_block):
            return patterns.local(*lengths, block, memory_block, flange, self.causal)

        if group.memory_block_shape is not None:
            return pattern(min(group.memory_block_shape[0], self.memory_length))
        if self.causal or not self.is_cross:
            return pattern(block)
        # Padding behind the last real token of a row is no part of it.
        num_blocks = -(-self.length // block)
        places = np.arange(1, self.memory_length + 1)
        rows = []
        for count in np.max(self.real * places, axis=1):
            share = max(1, -(-count // num_blocks))
            rows.append(pattern(block if count == self.length else share))
        return tuple(np.stack(each)[:, None] for each in zip(*rows))

    def _best_blocks(self):
        group, query, key = self.group, self.query, self.key
        size = min(group.block_length, self.memory_length)
        has_own = self.causal or not self.is_cross
        products = np.einsum("bhid,bhjd->bhij", query.value, key.value)
        sees = np.zeros(products.shape, "bool")
        norms = [np.linalg.norm(x.value, axis=-1).max(-1) for x in (query, key)]
        errors = [np.linalg.norm(x.error, axis=-1).max(-1) for x in (query, key)]
        rounding = ROUNDINGS * EPSILON["float32"] * norms[0] * norms[1]
        error = errors[0] * norms[1] + errors[1] * norms[0] + rounding
        for b, h in np.ndindex(products.shape[:2]):
            sees[b, h], margins = patterns.blocks_of_query(
                products[b, h],
                self.offered[b],
                size,
                group.num_blocks,
                self.causal,
                has_own,
            )
            self.in_doubt[b] |= np.any((margins <= 2 * error[b, h]) & self._asks(b))
        i, j = np.ogrid[: self.length, : self.memory_length]
        return sees, j - i

    def _asks(self, b):
        """Which queries of a row have an answer."""
        if self.is_cross and not self.causal:
            return self.query_real[b]
        return self.query_real[b] & self.real[b]

    def _attend_in_clusters(self):
        """Returns the mean over the clusters that a query is in."""
        output = count = 0.0
        for asks, sees, distances in self._clusters():
            asks = asks[..., None]
            output = output + asks * self._dense(sees, distances)
            count = count + asks
        return output / np.maximum(count, 1)

    def _clusters(self):
        """Yields who asks in each cluster, who sees whom there, and the distances."""
        if self.causal and self._chooses_for_prefixes():
            self._doubt_order(range(2))
            for asks, seen in zip(*map(self._members_of_prefixes, range(2))):
                ranks = seen.cumsum(axis=-1)
                asks = np.diagonal(asks, axis1=-2, axis2=-1)
                yield asks, seen & self._earlier(), ranks - ranks[..., -1:]
        elif self.causal and isinstance(self.group, zoo.ThresholdHeads):
            yield from self._above_thresholds()
        elif self.causal and self._tokens_choose():
            sees, distances = self._last_members()
            yield np.ones(sees.shape[:-1]), sees, distances
        else:
            for asks, seen in self._asking_and_seen():
                ranks = asks.cumsum(axis=-1), seen.cumsum(axis=-1)
                sees = asks[..., None] & seen[..., None, :] & self._earlier()
                yield asks, sees, ranks[1][..., None, :] - ranks[0][..., None]

    def _earlier(self):
        """Which keys stand before a query; all without a causal mask."""
        lengths = self.length, self.memory_length
        earlier = np.tri(*lengths, k=-self.group.key_shift, dtype="bool")
        return earlier | (not self.causal)

    def _asking_and_seen(self):
        """Yields for each cluster who asks and who is seen, as `_members` does."""
        seen = self._members(1)
        if self.is_cross and not self.causal:
            numbers = np.arange(len(seen)).reshape(-1, 1, 1, 1)
            asking = (self._own_clusters(0) == numbers) & self.query_real[:, None]
        else:
            asking = seen if self.shared else self._members(0)
        return zip(asking, seen)

    def _last_members(self):
        """What `helpers.last_members` returns, of all clusters that a query reads."""
        group = self.group
        number = getattr(group, "clusters_per_query", 1)
        clusters = self._own_clusters(1)
        if number > 1:
            reads = self._best_clusters(0 if self._queries_choose() else 1, number)
        else:
            reads = [self._own_clusters(0) if self._queries_choose() else clusters]
        sees = distances = 0
        for read in reads:
            seen, distance = helpers.last_members(
                clusters,
                self.real,
                group.attention_window // number,
                read,
                group.key_shift,
            )
            sees, distances = sees | seen, distances + np.where(seen, distance, 0)
        return sees.astype("bool"), distances

    def _above_thresholds(self):
        """Yields who asks in each cluster, and its last members."""
        group = self.group
        thresholds = golden_cases.to_numpy(group.thresholds.thresholds)
        thresholds = thresholds.astype("float64")[:, :, None]
        number = len(thresholds) - 1
        chosen = []
        for each in (0, 1) if number else (1,):
            scores, error = self._scores(each)
            is_member, certain = patterns.above_thresholds(
                scores - thresholds[each and number], group.max_clusters_per_token
            )
            # The difference is rounded, too.
            self._doubt(certain, 2 * error, self._stream(each)[1])
            chosen.append(np.moveaxis(is_member, -1, 0))
        for asks, seen in zip(chosen[0], chosen[-1]):
            # Members have the cluster 1, the others -1; all read that of members.
            yield (
                asks,
                *helpers.last_members(
                    np.where(seen, 1, -1),
                    self.real,
                    group.attention_window,
                    np.ones_like(seen, "int64"),
                    group.key_shift,
                ),
            )

    def _chooses_for_prefixes(self):
        group = self.group
        return isinstance(group, layers.ClusterStridedHeads) or (
            isinstance(group, layers.RoutedHeads)
            and group.routing == "expert_choice"
            and group.routing_scope == "prefix"
        )

    def _tokens_choose(self):
        """Whether each token has one cluster, under a causal mask."""
        group = self.group
        if isinstance(group, layers.RoutedHeads):
            return group.routing in (None, "token_choice")
        return True

    def _queries_choose(self):
        """Whether a query reads the cluster of its own, and not that of its key."""
        group = self.group
        if isinstance(group, layers.RandomHeads) or group.share_query_key:
            return False
        return group.query_cluster == "query"

    def _stream(self, number):
        """Tokens and mask of the queries (0) or the keys (1)."""
        pairs = (self.query, self.query_real), (self.key, self.real)
        return pairs[number]

    def _scores(self, number):
        """Scores `[batch, heads, length, clusters]`; errors `[batch, heads]`."""
        tokens, _ = self._stream(number)
        normalized, error = _normalized(tokens)
        vectors = (
            self.group.projections
            if self._is_hashed()
            else (self.group.kmeans.centroids)
        )
        vectors = np.asarray(golden_cases.to_numpy(vectors), "float64")
        scores = np.einsum("bhld,hkd->bhlk", normalized, vectors)
        norms = np.linalg.norm(vectors, axis=-1).max(axis=-1)
        rounding = ROUNDINGS * EPSILON["float32"]
        error = error + rounding * np.linalg.norm(normalized, axis=-1)
        return scores, 2 * error.max(axis=-1) * norms

    def _is_hashed(self):
        return isinstance(self.group, layers.HashedHeads)

    def _own_clusters(self, number):
        """The cluster that each token chooses, `<int>[batch, heads, length]`."""
        tokens, real = self._stream(number)
        batch, heads, length, _ = tokens.value.shape
        if isinstance(self.group, layers.RandomHeads):
            clusters = self.group.random_scores(length).argmax(axis=-1)
            return np.broadcast_to(clusters, (batch, heads, length))
        scores, error = self._scores(number)
        if self._is_hashed():
            self._doubt(np.abs(scores).min(axis=-1), error, real)
            return patterns.bucket_numbers(scores)
        if scores.shape[-1] > 1:
            last, first = np.moveaxis(np.sort(scores, axis=-1)[..., -2:], -1, 0)
            self._doubt(first - last, error, real)
        return scores.argmax(axis=-1)

    def _best_clusters(self, number, size):
        """Some best clusters of each token, a list of `<int>[batch, heads, length]`."""
        scores, error = self._scores(number)
        ordered = np.sort(scores, axis=-1)[..., ::-1]
        if size < scores.shape[-1]:
            real = self._stream(number)[1]
            self._doubt(ordered[..., size - 1] - ordered[..., size], error, real)
        best = np.argsort(-scores, axis=-1, kind="stable")[..., :size]
        return list(np.moveaxis(best, -1, 0))

    def _members(self, number):
        """The members of each cluster, `<bool>[clusters, batch, heads, length]`."""
        group, (tokens, real) = self.group, self._stream(number)
        if self._is_hashed():
            buckets = np.arange(group.num_clusters).reshape(-1, 1, 1, 1)
            members = (self._own_clusters(number) == buckets) & real[:, None]
            return members & (members.cumsum(axis=-1) <= group.attention_window)
        if isinstance(group, layers.RandomHeads):
            scores = group.random_scores(tokens.value.shape[2])
            scores = np.repeat(scores, len(real), axis=0)
        else:
            self._doubt_order([number])
            scores, _ = self._scores(number)
        strided = isinstance(group, layers.ClusterStridedHeads)
        choose = patterns.every_nth if strided else patterns.best
        members = np.zeros(np.moveaxis(scores, -1, 0).shape, "bool")
        for b, h, k in np.ndindex(*scores.shape[:2], scores.shape[-1]):
            chosen = choose(scores[b, h, :, k], real[b], group.attention_window)
            members[k, b, h, chosen] = True
        return members

    def _members_of_prefixes(self, number):
        """Who is a member of a cluster at each moment, if the text ended there.

        Returns whether `j` is a member in the prefix up to `i`, `<bool>[clusters,
        batch, heads, length, length]`.
        """
        window, (scores, _) = self.group.attention_window, self._scores(number)
        real = self._stream(number)[1]
        takes_best = isinstance(self.group, layers.RoutedHeads)
        shape = np.moveaxis(scores, -1, 0).shape
        members = np.zeros((*shape, shape[-1]), "bool")
        for k, b, h, i in np.ndindex(shape):
            tokens = patterns.ranked(scores[b, h, : i + 1, k], real[b, : i + 1])
            if not takes_best:
                tokens = patterns.evenly_spread(tokens, window)
            members[k, b, h, i, tokens[:window]] = True
        return members

    def _doubt_order(self, numbers):
        """Doubts rows in which rounding can change the order of scores that matter."""
        for number in numbers:
            scores, error = self._scores(number)
            _, real = self._stream(number)
            for b in range(len(scores)):
                if real[b].sum() <= self.group.attention_window:
                    continue  # all are members
                ordered = np.sort(scores[b][:, real[b]], axis=1)
                gaps = np.diff(ordered, axis=1).min(axis=(1, 2))
                # Of near ties the layer takes the earlier token, whatever the order.
                self.in_doubt[b] |= np.any(gaps <= error[b] + self.group.near_tie)

    def _doubt(self, margins, error, real):
        close = (margins <= error[..., None]) & real[:, None]
        self.in_doubt |= close.any(axis=(1, 2))

    def rounding(self, precision):
        """Returns how wrong outputs may be, `[batch, heads, value_dim]`, and logits.

        Args:
            precision: `"float32"` or `"bfloat16"`.
        """
        epsilon = ROUNDINGS * EPSILON[precision]
        pairs = []
        for tokens in (self.query, self.key):
            value, error = tokens.value, np.linalg.norm(tokens.error, axis=-1)
            if isinstance(self.group, helpers.CLUSTERED):
                value, error = _normalized(tokens)
            pairs.append((np.linalg.norm(value, axis=-1).max(-1), error.max(-1)))
        if self.group.qk_norm:
            scales = [self.group.query_scale, self.group.key_scale]
            largest = [np.abs(x).max() for x in golden_cases.to_numpy(scales)]
            pairs = [(x * c, error * c) for (x, error), c in zip(pairs, largest)]
        (query, query_error), (key, key_error) = pairs
        tables = helpers.relative_tables(self.group)
        value = np.abs(self.value.value).max(axis=2)
        if tables is not None:
            key = key + np.linalg.norm(tables[0], axis=-1).max()
            size = tables[1].shape[-1]
            value[..., :size] += np.abs(tables[1]).max(axis=0)
        logits = query * key
        if self.bias is not None:
            visible = np.where(self.bias > HIDDEN, np.abs(self.bias), 0.0)
            logits = logits + visible.max(axis=-1)[:, None]
        logit_error = query_error * key + key_error * query + epsilon * logits
        error = value * np.minimum(2 * logit_error, 2.0)[..., None]
        error = error + self.value.error.max(axis=2) + epsilon * value
        if isinstance(self.group, zoo.EntmaxHeads):
            error = error + ENTMAX_ERROR * value
        return error, logit_error.max(axis=-1)


def _compared(group, query, key):
    """Queries and keys as their products are taken, with what rounding adds to them."""
    values = helpers.compared(group, query.value, key.value)
    if values[0] is query.value:
        return query, key
    return [
        Rounded(
            new,
            2
            * np.abs(new).max()
            * (x.error / np.abs(x.value).max() + ROUNDINGS * EPSILON["float32"]),
        )
        for new, x in zip(values, (query, key))
    ]


def _order_blocks(layer):
    """The blocks that order positions: the layer's, or those on two axes."""
    if layer.block_shape is not None:
        return layer.block_shape
    for group in layer.head_groups:
        if len(getattr(group, "block_shape", ())) > 1:
            return group.block_shape
    return None


def _expand(x, batch, order):
    """Puts a mask or bias into the order; None for a mask of all True."""
    if x is None:
        x = np.ones((1, *order.lengths), "bool")
    x = np.broadcast_to(x, (batch, *order.lengths)).reshape(batch, -1)
    return order.arrange(x, 1)


def _group_bias(group, bias):
    if bias is None or group.token_bias_weight is None:
        return bias
    return bias * float(golden_cases.to_numpy(group.bias_weight))


def _round(x, precision):
    x = np.asarray(x).astype("float32")
    if precision == "bfloat16":
        # The upper half of the bits, rounded to the nearest, between two to the even.
        bits = x.view("uint32")
        bits = bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)
        x = (bits & np.uint32(0xFFFF0000)).view("float32")
    return x.astype("float64")


def _product(x, kernel, precision):
    """Returns a `Rounded` product: sums are float32, results of the precision."""
    kernel = _round(golden_cases.to_numpy(kernel), precision)
    exact = x @ kernel
    error = ROUNDINGS * EPSILON["float32"] * (np.abs(x) @ np.abs(kernel)) + 1e-37
    if precision == "float32":
        return Rounded(exact, error)
    # Numbers near the middle between two others may be rounded to either.
    sure = _round(exact - error, precision) == _round(exact + error, precision)
    error = np.where(sure, 0.0, 4 * EPSILON[precision] * np.abs(exact))
    return Rounded(_round(exact, precision), error)


def _scaled(x, scale, precision):
    if precision == "float32":
        extra = ROUNDINGS * EPSILON[precision] * np.abs(x.value) * scale
        return Rounded(x.value * scale, x.error * scale + extra)
    scale = float(_round(scale, precision))
    extra = np.where(x.error > 0, 4 * EPSILON[precision] * np.abs(x.value * scale), 0.0)
    return Rounded(_round(x.value * scale, precision), x.error * scale + extra)


def _projections(layer, query, memory, is_cross):
    """Yields queries, keys and values of each group, `[batch, heads, length, dim]`.

    A group that shares its queries takes them as keys; for a memory of the same depth
    it takes keys of the query projection, for another depth keys of its own.
    """
    precision, scale = layer.compute_dtype, layer.key_dim**-0.5

    def heads(x, size):
        return x.map(lambda x: x.reshape(*x.shape[:2], -1, size).swapaxes(1, 2))

    queries = _product(query, layer.query_kernel, precision)
    queries = heads(_scaled(queries, scale, precision), layer.key_dim)
    values = _product(memory, layer.value_kernel, precision)
    values = heads(values, layer.value_dim or layer.key_dim)
    own_keys = query_keys = None
    if layer.key_kernel is not None:
        own_keys = heads(_product(memory, layer.key_kernel, precision), layer.key_dim)
    same_depth = query.shape[-1] == memory.shape[-1]
    if same_depth and is_cross:
        query_keys = _product(memory, layer.query_kernel, precision)
        query_keys = heads(_scaled(query_keys, scale, precision), layer.key_dim)
    start = own_start = 0
    for group in layer.head_groups:
        own = slice(start, start + group.num_heads)
        shares = not group.needs_keys and same_depth
        group_queries = queries[:, own]
        if not shares:
            keys = own_keys[:, own_start : own_start + group.num_heads]
        else:
            keys = query_keys[:, own] if is_cross else group_queries
        yield group, group_queries, keys, values[:, own]
        start += group.num_heads
        if not shares or layer.project_shared_keys:
            own_start += group.num_heads


def _normalized(tokens):
    """Layer-normalised tokens, and the norm of their error."""
    x, error = tokens.value, tokens.error.max(axis=-1)
    error = error + ROUNDINGS * EPSILON["float32"] * np.abs(x).max(axis=-1)
    deviation = np.sqrt(x.var(axis=-1) + 1e-6)
    normalized = helpers.normalize(x)
    largest = np.abs(normalized).max(axis=-1)
    error = error / deviation * (2 + largest)
    return normalized, error * np.sqrt(x.shape[-1])


def _combine(layer, heads, error, precision):
    """Projects outputs of heads `[batch, heads, length, dim]` and bounds of errors."""
    size = heads.shape[-1]
    error = error[..., :size]
    kernels = [layer.output_kernel]
    if layer.shared_head_projection:
        (kernel,) = golden_cases.to_numpy([layer.head_kernel])
        error = np.abs(error) @ np.abs(kernel)
        largest = np.abs(heads).max(axis=2, keepdims=True) @ np.abs(kernel)
        heads = heads @ kernel
        error = error + ROUNDINGS * EPSILON[precision] * largest
    (kernel,) = golden_cases.to_numpy(kernels)
    kernel = kernel.astype("float64")

    def join(x):
        return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)

    largest = join(np.abs(heads).max(axis=2, keepdims=True)) @ np.abs(kernel)
    error = join(np.broadcast_to(error, (*heads.shape[:2], 1, size))) @ np.abs(kernel)
    error = error + ROUNDINGS * EPSILON[precision] * largest
    return join(heads) @ kernel, error
