"""A laboratory for multi-head attention: how many heads, of what size, combined how?

`headcount.attention` needs only jax and jaxtyping; the rest needs `headcount[lab]`.
"""
