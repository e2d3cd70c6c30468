"""The tiny models of the examples are those of the tests."""

from examples.tiny_model import CHAT_TEMPLATE, FAMILIES, SPECIAL_TOKENS, make_tiny_model, make_tiny_tokenizer

__all__ = ["CHAT_TEMPLATE", "FAMILIES", "SPECIAL_TOKENS", "make_tiny_model", "make_tiny_tokenizer"]
