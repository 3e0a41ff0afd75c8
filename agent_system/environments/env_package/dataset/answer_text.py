"""Normalisation of answers and ground truths: Unicode characters, LaTeX and mark-up."""

import re
import unicodedata

# A space is inserted at this position: 1½ is 1 1/2, not 11/2.
_BEFORE_UNICODE_FRACTION = re.compile(r"(?<=\d)(?=[\u00bc-\u00be\u2150-\u215e])")
_SUPERSCRIPT = re.compile(r"[\u00b2\u00b3\u00b9\u2070\u2071\u2074-\u207e]+")
_CHARACTER_REPLACEMENTS = str.maketrans(
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
        "\u2208": r"\in ",
        "\u2205": r"\emptyset ",
    }
)
_LATEX_TEXT_COMMAND = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}"
)
_DIGIT_SEPARATOR = re.compile(r"\{,\}|,?\\!")
_ONE_CHARACTER_POWER = re.compile(r"\^\{(\w)\}")
_BULLET = re.compile(r"^(?:(?:[-\u2022]|>)\s+(?=[^\W\d_]{2})|[=-]>\s*)")
_ANSWER_PREFIX = re.compile(
    r"^(?:the\s+)?(?:final\s+)?answer(?:\s+is\b|\s*:)\s*(?=\S)", re.IGNORECASE
)
_PYTHON_POWER = re.compile(r"(?<=[\w)}])\s*\*\*\s*(?=[\w({-])")
# Bold text inside a sentence. A power, such as 2**3**2, is not bold: it has a digit or a letter in
# front of the asterisks.
BOLD = re.compile(r"(?<![\w)])\*\*(?=\S)([^*]+)(?<=\S)\*\*(?!\w)")
_COLOR_COMMAND = re.compile(r"\\color\s*\{\w+\}|\\(?:textcolor\s*\{\w+\}|underline)\s*\{([^{}]*)\}")
_LATEX_GROUP = re.compile(r"\{([^{},]*)\}")
_EMOJI = r"[\u2190-\u21ff\u2600-\u27bf\u2b00-\u2bff\ufe0f\U0001f000-\U0001faff]"
_EMOJI_AT_THE_ENDS = re.compile(rf"^(?:{_EMOJI}\s*)+(?=[\w(*$])|(?<=[\w)*.$])(?:\s*{_EMOJI})+$")
_ROOT_SIGN = re.compile(r"\u221a\s*(\d+)")
_RATIO_SIGN = re.compile(r"(?<=\d)\s+:\s+(?=\d)")
# Japanese and Korean forms of "is", which follow the answer.
_FINAL_COPULA = re.compile(r"(?:\u3067\u3059|\u3067\u3042\u308b|\uc785\ub2c8\ub2e4|\uc774\ub2e4)$")
_SPACE_VARIANTS = re.compile(r"(?<!\\)\\[,;:! ]|\\q?quad(?![a-zA-Z])|~|\s+")
_LATEX_LAYOUT_COMMAND = re.compile(
    r"\\(?:left|right|displaystyle|bigl?|bigr|Bigl?|Bigr)(?![a-zA-Z])"
)
_LATEX_FRACTION = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
_LATEX_DEGREE_SIGN = re.compile(r"\^\s*\{?\s*\\circ\s*\}?")
_LATEX_ESCAPE = re.compile(r"\\([$%#&_])")
_HTML_TAG = re.compile(
    r"</?(?:b|i|u|em|strong|code|p|br|span|ans|result|solution)\s*/?>", re.IGNORECASE
)
_MATH_DELIMITERS = (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$"))
# Exclamation marks after a word. After a number, as in 5!, they are factorial signs.
_FINAL_EXCLAMATION_MARKS = re.compile(r"(?<=[^\W\d_]{2})!+$")
MAX_MARKUP_LAYERS = 6  # maximum number of nested mark-ups, such as **"x"**, that are removed


def normalize_answer(text: str) -> str:
    r"""Return ``text`` in a uniform spelling, without surrounding mark-up and final full stops.

    Variants of Unicode characters, digits, dashes, quotes and spaces are unified. LaTeX commands
    that only affect the layout are removed. The case of letters is kept.

    >>> normalize_answer("**1\u00a0\u00bd**.")
    '1 1/2'
    >>> normalize_answer("$\\text{Paris}$")
    'Paris'
    """
    text = _BEFORE_UNICODE_FRACTION.sub(" ", text)
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{_to_ascii(match[0])}}}", text)
    text = _ROOT_SIGN.sub(r"\\sqrt{\1}", text)
    text = _to_ascii(text).translate(_CHARACTER_REPLACEMENTS)
    text = BOLD.sub(r"\1", _HTML_TAG.sub(" ", text))
    for _ in range(MAX_MARKUP_LAYERS):
        unwrapped_text = _COLOR_COMMAND.sub(r"\1", _LATEX_TEXT_COMMAND.sub(r" \1 ", text))
        if unwrapped_text == text:
            break
        text = unwrapped_text
    text = _DIGIT_SEPARATOR.sub(lambda match: match[0].strip("{}\\!"), text)
    text = _ONE_CHARACTER_POWER.sub(r"^\1", text)
    text = _LATEX_FRACTION.sub(r"\\frac", _LATEX_LAYOUT_COMMAND.sub("", text))
    text = _SPACE_VARIANTS.sub(" ", _LATEX_DEGREE_SIGN.sub("\u00b0", text))
    text = _RATIO_SIGN.sub(":", text.replace("\\varnothing", "\\emptyset"))
    text = _strip_markup(_BULLET.sub("", _strip_markup(_PYTHON_POWER.sub("^", text))))
    return _LATEX_ESCAPE.sub(r"\1", _ANSWER_PREFIX.sub("", text))


def normalize_words(text: str) -> str:
    """Return ``text`` in a form for comparison of words: lower case, single spaces.

    Hyphens inside words become spaces, and a leading article is removed. ``text`` must be a result
    of ``normalize_answer``, which unifies dashes and removes mark-up but keeps the case.

    >>> normalize_words("The Eiffel-Tower")
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
    # Remove characters of category Cf: zero-width spaces, byte-order marks, text directions.
    return "" if category == "Cf" else character


def _strip_markup(text: str) -> str:
    """Return ``text`` without surrounding mark-up, quotes and punctuation."""
    for _ in range(MAX_MARKUP_LAYERS):
        stripped_text = _EMOJI_AT_THE_ENDS.sub("", text.strip()).strip("*_`")
        stripped_text = stripped_text.rstrip(".,;:?").lstrip(":,;").strip()
        stripped_text = _FINAL_COPULA.sub("", _FINAL_EXCLAMATION_MARKS.sub("", stripped_text))
        if group := _LATEX_GROUP.fullmatch(stripped_text):
            stripped_text = group[1]
        for opener, closer in _MATH_DELIMITERS:
            content = stripped_text[len(opener) : -len(closer)]
            is_delimited = (
                stripped_text.startswith(opener) and stripped_text.endswith(closer) and content
            )
            if (
                is_delimited
                and opener not in content
                and closer not in content
                and content[-1] != "\\"
            ):
                stripped_text = content
        if (
            len(stripped_text) > 1
            and stripped_text[0] == stripped_text[-1]
            and stripped_text[0] in "\"'"
        ):
            stripped_text = stripped_text[1:-1]
        if stripped_text == text:
            return text
        text = stripped_text
    return text
