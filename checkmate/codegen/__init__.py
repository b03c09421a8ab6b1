"""Write a plan as two modules, forward and backward, and put them into autograd's graph."""
