"""Text to token ids and back, as the model file asks."""

from .build import KNOWN_MODELS, build_tokenizer
from .byte_level import KNOWN_PRE_TOKENIZERS
from .tokenizer import Tokenizer, check_token_ids

__all__ = ["KNOWN_MODELS", "KNOWN_PRE_TOKENIZERS", "Tokenizer", "build_tokenizer", "check_token_ids"]
