"""Updates as ops of the backward: what `checkmate.training_step` does with each gradient."""
