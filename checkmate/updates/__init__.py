"""What a training step does with each gradient, as ops of its backward: `checkmate.training_step` has them put in."""
