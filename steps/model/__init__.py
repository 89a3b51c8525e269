"""The dense part of a model: the unmodified transformers class, its four forwards, and where experts and KV plug in."""
