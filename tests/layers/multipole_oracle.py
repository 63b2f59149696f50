"""What multipole heads must return: their definition, pair by pair, in plain NumPy.

`docs/how_routing_works.md` has the seven points. All is for one query head and its key
head; loops, and float64.
"""

import numpy as np

from tests.layers import helpers

# Masses that differ by less are equal: the lower number wins.
NEAR_TIE = 1e-5


def attend(group, query, key, value, real=None, bias=None, segments=None, **options):
    """Returns the outputs and weights of a causal call of a built `MultipoleHeads`.

    Args:
        group: the heads.
        query: `[batch, heads, length, key_dim]`, times `key_dim**-0.5`.
        key: `[batch, key heads, length, key_dim]`.
        value: `[batch, key heads, length, value_dim]`.
        real: `<bool>[batch, length]`, False for padding; None for no padding.
        bias: `[batch, length]`, or None.
        segments: `<int>[batch, length]`, ids of documents; None for one.
        **options: `causal` and `cross` as in `of_head`.

    Returns:
        `[batch, heads, length, value_dim]` and `[batch, heads, length, length]`.
    """
    batch, heads = query.shape[:2]
    length = key.shape[2]
    real = np.ones((batch, length), bool) if real is None else real
    bias = np.zeros((batch, length)) if bias is None else np.asarray(bias, "float64")
    segments = np.zeros((batch, length), int) if segments is None else segments
    per_key = heads // key.shape[1]
    centroids = np.asarray(helpers.golden_cases.to_numpy(group.kmeans.centroids))
    found = [
        [
            of_head(
                group,
                query[b, h],
                key[b, h // per_key],
                value[b, h // per_key],
                real[b],
                bias[b],
                segments[b],
                centroids[h // per_key],
                h,
                **options,
            )
            for h in range(heads)
        ]
        for b in range(batch)
    ]
    outputs, weights = zip(*[zip(*row) for row in found])
    return np.stack([np.stack(x) for x in outputs]), np.stack(
        [np.stack(x) for x in weights]
    )


def of_head(
    group,
    query,
    key,
    value,
    real,
    bias,
    segments,
    centroids,
    head,
    causal=True,
    cross=False,
):
    """Returns the outputs and weights of one head; `attend` names the arguments."""
    query, key, value = (np.asarray(x, "float64") for x in (query, key, value))
    if group.normalization == "layer":
        query, key = helpers.normalize(query), helpers.normalize(key)
    if group.qk_norm:
        query, key = scaled(group, query, key)
    scores = helpers.normalize(key) @ centroids.astype("float64").T
    clusters = scores.argmax(-1)
    chosen_by = helpers.normalize(query) @ centroids.astype("float64").T
    far_query, far_key = query, key
    if group.rotary_positions:
        far_query, far_key = (turned(group, x, np.arange(len(x))) for x in (query, key))
    near_query, near_key = far_query, far_key
    if group.far_distance is not None:
        distance = np.full(len(query), group.far_distance)
        far_query, far_key = turned(group, query, distance), key
    shift = group.key_shift
    if shift:
        near_key, far_key = (np.roll(x, 1, axis=0) for x in (near_key, far_key))
        clusters = np.roll(clusters, 1)
    near, far = near_query @ near_key.T, far_query @ far_key.T
    exists = real.copy()
    if shift:
        exists &= np.roll(real, 1) & (np.roll(segments, 1) == segments)
        exists[0] = False
    outputs = np.zeros((len(query), value.shape[-1]))
    weights = np.zeros((len(query), len(key)))
    for t in range(len(query)):
        own = np.ones(len(key), bool) if cross else segments == segments[t]
        if not np.any(own & real):
            continue
        start = np.flatnonzero(own & real)[0]
        pairs = np.flatnonzero(own & exists)
        weights[t] = of_query(
            *(group, pairs, start, t, near[t], far[t], bias, clusters, chosen_by[t]),
            *(head, causal, cross),
        )
        outputs[t] = weights[t] @ value
    return outputs, weights


def of_query(
    group, pairs, start, t, near, far, bias, clusters, scores, head, causal, cross
):
    """Returns the weight of each pair for query `t` `[length]`."""
    weights = np.zeros(len(near))
    place = pairs - start
    sinks = place < group.num_sinks
    if cross:
        is_near = sinks
    elif causal:
        pairs, place, sinks = pairs[pairs <= t], place[pairs <= t], sinks[pairs <= t]
        size, recent = group.flushed_block, group.num_recent
        border = size * (max(0, t - start + 1 - recent) // size)
        is_near = sinks | (place >= border)
    else:
        is_near = sinks | (abs(pairs - t) <= group.num_recent // 2)
    flushed = pairs[~is_near]

    def capped(x):
        cap = group.logit_soft_cap
        return x if cap is None else cap * np.tanh(x / cap)

    entries = []  # logit, pairs that share its weight
    for j in pairs[is_near]:
        is_far = group.far_distance is not None and sinks[pairs == j][0]
        is_far = is_far and t - j > group.far_distance
        logit = far[j] if is_far else near[j]
        entries.append((capped(logit) + bias[j], [j]))
    members = {c: flushed[clusters[flushed] == c] for c in range(group.num_clusters)}

    def summary(js):
        return np.log(len(js)) + capped(np.mean(far[js])) + np.mean(bias[js])

    masses = {c: summary(js) for c, js in members.items() if len(js)}
    if group.choice == "centroid":
        masses = {c: scores[c] for c in masses}
    chosen = []
    while masses and len(chosen) < group.clusters_per_query:
        best = max(masses.values())
        tie = NEAR_TIE * max(1, abs(best))
        chosen.append(min(c for c, mass in masses.items() if mass >= best - tie))
        del masses[chosen[-1]]
    width = group.attention_window // group.clusters_per_query
    width, left = group.members_per_cluster or width, group.attention_window
    numbers = dict.fromkeys(members, 0)
    for c in chosen:
        size = len(members[c])
        numbers[c] = size if group.keeps_all else min(width, left, size)
        left -= numbers[c]
    for c, js in members.items():
        num_read = numbers[c]
        read, rest = js[len(js) - num_read :], js[: len(js) - num_read]
        entries += [(capped(far[j]) + bias[j], [j]) for j in read]
        if len(rest) and group.summaries:
            entries.append((summary(rest), rest))
    if not entries:
        return weights
    logits = np.array([logit for logit, _ in entries])
    largest = logits.max()
    if group.sink_logits:
        sink = float(helpers.golden_cases.to_numpy(group.logits_of_sinks)[head])
        largest = max(largest, sink)
    shares = np.exp(logits - largest)
    total = shares.sum()
    if group.sink_logits:
        total += np.exp(sink - largest)
    for share, (_, js) in zip(shares / total, entries):
        weights[js] += share / len(js)
    return weights


def scaled(group, query, key):
    """Queries and keys with `qk_norm`."""
    scales = helpers.golden_cases.to_numpy([group.query_scale, group.key_scale])
    if group.normalization != "layer":
        size = query.shape[-1] ** 0.5
        query = helpers.mean_square_norm(query * size) / size
        key = helpers.mean_square_norm(key)
    return query * scales[0], key * scales[1]


def turned(group, x, positions):
    """Rotary positions of `[length, dim]`, in float64."""
    first, second = np.split(x, 2, axis=-1)
    half = first.shape[-1]
    angles = positions[:, None] / group.rotary_wavelength ** (np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
