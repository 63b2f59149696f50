"""How routed tokens attend, once they have scores: one file for each rule.

Letters: B batch, H heads, L length, M memory length, K clusters, W members of a
cluster, N chunks, C slots of a chunk, D dim.
"""
