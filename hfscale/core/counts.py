"""Numbers of things in messages: `1 process`, `2 processes`."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless there is one.

    Args:
        number (`int`): how many there are.
        noun (`str`): what they are, in the singular: `process`, `GPU`, `micro-batch`.
    """
    return f"{number} {nouns(number, noun)}"


def nouns(number: int, noun: str) -> str:
    """Return a noun in the plural unless there is one of it.

    Args:
        number (`int`): how many there are.
        noun (`str`): what they are, in the singular.
    """
    if number == 1:
        return noun
    ending = "es" if noun.endswith(("s", "ch")) else "s"
    return noun + ending
