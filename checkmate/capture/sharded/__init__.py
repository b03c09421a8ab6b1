"""Steps of several ranks: tensors of which each rank has a shard, and what ranks say to each other as ops of a plan."""
