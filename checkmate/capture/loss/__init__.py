"""The loss of a language model in parts, so that its logits are never there at once."""
