"""The private names of PyTorch that checkmate uses, each in one row: no other room imports ``torch._…``.

`names` finds them in the running version of PyTorch. A table stands in the module of the part of PyTorch that it is of:
`aot`, `descriptions`, `dispatcher`, `dynamo`, `engine`, `inductor`, `kernels`, `steps`, `trees`. `versions` says which
versions of PyTorch have been tried.
"""
