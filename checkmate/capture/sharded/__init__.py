"""Steps of several ranks: sharded tensors, and exchanges between ranks as ops of a plan."""
