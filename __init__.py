"""A laboratory for multi-head attention: how many heads, of what size, combined how?

`headcount.attention` needs jax and jaxtyping alone; the rest needs `headcount[lab]`.
"""
