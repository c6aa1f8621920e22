"""Rust source as text: what is comment, literal or test in it. For tools that count."""

import re

# Comments, and the literals in which `//` and braces are no code.
TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|r(?P<hashes>#*)".*?"(?P=hashes)|b?"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'', re.S)
TEST = re.compile(r'#\[cfg\((?:all\()?test\b[^\]]*\]\s*(?:#\[[^\]]*\]\s*)*')


def blank(match):
    text = match.group(0)
    if text.startswith(('//', '/*')):
        return re.sub(r'[^\n]', ' ', text)
    return '"' + re.sub(r'[^\n]', '_', text[1:-1]) + '"'


def blanked(text):
    """The text with empty comments, and underscores in its literals: each character stays where it is."""
    return TOKEN.sub(blank, text)


def item_end(code, start):
    """Where the item that begins at `start` ends: at its semicolon or its closing brace."""
    depth = 0
    for at in range(start, len(code)):
        if code[at] in '{([':
            depth += 1
        elif code[at] in '})]':
            depth -= 1
            if depth == 0 and code[at] == '}':
                return at + 1
        elif depth == 0 and code[at] == ';':
            return at + 1
    return len(code)


def bracket_end(code, start):
    """Where the bracket that opens at `start` closes."""
    depth = 0
    for at in range(start, len(code)):
        depth += (code[at] in '{([') - (code[at] in '})]')
        if depth == 0:
            return at + 1
    return len(code)


def without_tests(code):
    """Blanked text without the items behind `#[cfg(test)]`."""
    while match := TEST.search(code):
        code = code[:match.start()] + code[item_end(code, match.end()):]
    return code
