"""Normal form of an answer or a ground truth: one spelling for characters, LaTeX and mark-up."""

import re
import unicodedata

_VULGAR = re.compile(r"(?<=\d)(?=[\u00bc-\u00be\u2150-\u215e])")  # 1½ is 1 1/2, not 11/2
_SUPERSCRIPT = re.compile(r"[\u00b2\u00b3\u00b9\u2070\u2071\u2074-\u207e]+")
_SPELLINGS = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201a\u201b\u2032\u02bc\u00b4", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f\u2033\u00ab\u00bb\u300c\u300d", '"'),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe63", "-"),
        **dict.fromkeys("\u00d7\u22c5\u00b7\u2217", "*"),
        "\u00f7": "/",
        "\u2044": "/",
        "\u2215": "/",
        "\u3002": ".",
        "\u3001": ",",
        "\u03c0": r"\pi ",
        "\u221a": r"\sqrt ",
        "\u221e": r"\infty ",
        "\u222a": r"\cup ",
        "\u2264": r"\le ",
        "\u2265": r"\ge ",
    }
)
_WRITTEN = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}"
)
_SEPARATOR = re.compile(r"\{,\}|,?\\!")
_ONE_RAISED = re.compile(r"\^\{(\w)\}")
_BULLET = re.compile(r"^(?:[-\u2022]\s+(?=[^\W\d_]{2})|>\s+)")
_SPACES = re.compile(r"\\[,;:! ]|\\q?quad(?![a-zA-Z])|~|\s+")
_SILENT = re.compile(r"\\(?:left|right|displaystyle|bigl?|bigr|Bigl?|Bigr)(?![a-zA-Z])")
_FRACTION = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?")
_ESCAPED = re.compile(r"\\([$%#&_])")
_HTML = re.compile(r"</?(?:b|i|u|em|strong|code|p|br|span)\s*/?>", re.IGNORECASE)
_MATHS = (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$"))
_LOUD = re.compile(r"(?<=[^\W\d_]{2})!+$")  # "!" after a word; after a number it is a factorial
MAX_MARKUP_LAYERS = 6  # maximum number of nested mark-ups, such as **"x"**, that are removed


def normalize_answer(text: str) -> str:
    r"""Return ``text`` in one spelling, without surrounding mark-up and final full stops.

    Variants of Unicode characters, digits, dashes, quotes and spaces are unified. LaTeX commands
    that only affect the layout are removed. The case of letters is kept.

    >>> normalize_answer("**1\u00a0\u00bd**.")
    '1 1/2'
    >>> normalize_answer("$\\text{Paris}$")
    'Paris'
    """
    text = _VULGAR.sub(" ", text)
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{_to_ascii(match[0])}}}", text)
    text = _to_ascii(text).translate(_SPELLINGS)
    text = _HTML.sub(" ", text)
    for _ in range(MAX_MARKUP_LAYERS):
        shorter = _WRITTEN.sub(r" \1 ", text)
        if shorter == text:
            break
        text = shorter
    text = _SEPARATOR.sub(lambda match: match[0].strip("{}\\!"), text)
    text = _ONE_RAISED.sub(r"^\1", text)
    text = _FRACTION.sub(r"\\frac", _SILENT.sub("", text))
    text = _SPACES.sub(" ", _DEGREES.sub("\u00b0", text))
    return _ESCAPED.sub(r"\1", _strip_markup(_BULLET.sub("", _strip_markup(text))))


def fold_words(text: str) -> str:
    """Return normalised ``text`` in lower case, without hyphens and a leading article, to compare
    words.

    >>> fold_words("The  Eiffel-Tower")
    'eiffel tower'
    """
    words = re.sub(r"(?<=\w)-(?=\w)", " ", text.casefold()).split()
    if len(words) > 1 and words[0] in ("a", "an", "the"):
        words = words[1:]
    return re.sub(r"\s*,\s*", ", ", " ".join(words))


def _to_ascii(text: str) -> str:
    text = unicodedata.normalize("NFKC", text)
    return "".join(map(_to_ascii_character, text)) if not text.isascii() else text


def _to_ascii_character(character: str) -> str:
    category = unicodedata.category(character)
    if category == "Nd":
        return str(unicodedata.decimal(character))
    # Category Cf: zero-width spaces and joiners, byte-order marks, directions.
    return "" if category == "Cf" else character


def _strip_markup(text: str) -> str:
    """Return ``text`` without surrounding mark-up, quotes and punctuation."""
    for _ in range(MAX_MARKUP_LAYERS):
        shorter = _LOUD.sub("", text.strip().strip("*_`").rstrip(".,;:?").lstrip(":,;").strip())
        for opener, closer in _MATHS:
            content = shorter[len(opener) : -len(closer)]
            wrapped = shorter.startswith(opener) and shorter.endswith(closer) and content
            if wrapped and opener not in content and closer not in content and content[-1] != "\\":
                shorter = content
        if len(shorter) > 1 and shorter[0] == shorter[-1] and shorter[0] in "\"'":
            shorter = shorter[1:-1]
        if shorter == text:
            return text
        text = shorter
    return text
