"""What heads remember of tokens, and how heads with fixed patterns decode step by step.

Letters: B batch, H heads, L length, R tokens that are remembered, E numbers that are
remembered of a token, D dim. What clustered heads remember is in `layers.rules`.
"""
