"""Clusters of tokens, and attention inside them: arrangements and rules.

Letters: B batch, H heads, L length, M memory length, K clusters, W members of a
cluster, N chunks, C slots of a chunk, D dim, R tokens that are remembered, E numbers
that are remembered of a token.
"""
