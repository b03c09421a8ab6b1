"""Make of a plan two modules, forward and backward, and put them in autograd's graph."""
