"""What PyTorch's tracing is changed in while a step of ours is captured, so that it records what eager PyTorch runs."""
