"""Steps of several ranks: sharded tensors, and collectives as ops of a plan."""
