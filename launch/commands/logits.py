EXAMPLES = ""


def logits() -> None: ...
