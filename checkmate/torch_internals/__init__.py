"""The private names of PyTorch that checkmate uses, each in one row: no other room imports ``torch._…``.

`names` finds them in the running version of PyTorch. `capturing` and `running` are tables of the parts that capture and
that run a step. `versions` says which versions of PyTorch have been tried.
"""
