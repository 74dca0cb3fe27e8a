EXAMPLES = ""


def perplexity() -> None: ...
