"""How heads attend step by step, with a cache: one file for each kind of memory.

A cache is a dict of tensors of fixed sizes with the batch on axis 0. Each kind has
`make`, which returns an empty one, `fill`, which remembers a sequence, and `step`,
which attends with one token and remembers it. A token that is fed again at the same
position replaces the one before. With `key_shift=1` the row of a token's key is opened
without a value, and completed with the next token's, which may replace it in the same
way. `memories.py` is for attention to another sequence.

Letters: B batch, H heads, L length, K clusters, W members of a cluster, R tokens that
are remembered, E numbers that are remembered of a token, D dim.
"""
