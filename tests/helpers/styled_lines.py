"""Styled lines of the terminal, for tests."""


def plain_text(lines):
    """The lines without their styles."""
    return "\n".join("".join(part.text for part in line) for line in lines)
