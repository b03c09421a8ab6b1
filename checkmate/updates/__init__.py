"""What an optimizer does to one parameter, as an op of the backward: it reads the gradient, which is free after it."""
