"""From a plan to two modules, forward and backward, and their place in autograd's graph."""
