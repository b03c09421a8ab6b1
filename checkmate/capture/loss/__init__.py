"""The loss of a language model in parts, so that all of its logits never exist at once."""
