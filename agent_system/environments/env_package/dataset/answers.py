"""Extraction of the answer from a policy's text.

Thoughts are removed first. Then the answer is read from the first of these that exists:

    1   the last mark: <answer>...</answer>, \\boxed{...}, or #### ... in the last line
    2   the last announcement: "the answer is ...", "Answer: ...", or #### ... in any line
    3   the last line, its last sentence, or the whole text if it is short

A mark that is not closed was cut at the token limit. The text after its start is no answer.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_TEXT_LENGTH = 2000  # characters; only the end of a longer text without a mark is read
MAX_LINE_LENGTH = 500  # maximum number of characters that are read of a line
MAX_MARK_DEPTH = 4  # maximum nesting of marks, such as 2 for <answer>\boxed{6}</answer>

_THOUGHT_TAG = re.compile(
    r"<(/?)(?:think|thinking|thought|reasoning)>|\[(/?)THINK\]", re.IGNORECASE
)
_ANSWER_TAG = re.compile(r"<(/?)(?:final_)?answer>", re.IGNORECASE)
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}\\]|[{}]")
_BOXED_WORD = re.compile(r"\\(?:boxed|fbox)\s+([^\s{}$]+)")
_HASH_MARK = re.compile(r"(?<!#)####(?!#)[ \t]*([^\n]*)")
_CODE_FENCE = re.compile(r"^[ \t]*```[\w+-]*[ \t]*$", re.MULTILINE)
_FINAL_REMARK = re.compile(
    r"\n[*_# \t]{0,9}(?:explanation|reasoning|reason|note|justification)\b[*_]*\s*:.*",
    re.IGNORECASE | re.DOTALL,
)
_ANSWER_WORDS = (
    r"answer|result|antwort|ergebnis|r[ée]ponse|respuesta|resultado|resposta|risposta|ответ"
)
_LINKING_VERBS = r"is|are|was|equals|will be|would be|should be|must be|ist|lautet|est|es|è|é"
_ANNOUNCEMENT = re.compile(
    rf"\b(?:{_ANSWER_WORDS})\b[*_`\"']*"
    rf"(?:[ \t]*[:\uff1a=]|[ \t]+-[ \t]|[^.:\uff1a=?\n]{{0,60}}?"
    rf"\b(?:{_LINKING_VERBS})\b(?!')[ \t]*:?)"
    r"|(?:答案|答え|正解|정답|답)(?:应该)?(?:[是为為は]|은|는)?[ \t]*[:\uff1a]?"
    r"|^[ \t]*(?:#+|\*\*)[ \t]*(?:final[ \t]+)?answer[*_]*[ \t]*$",
    re.IGNORECASE | re.MULTILINE,
)
_RETRACTION_WORDS = r"(?:no|wait|actually|hmm|sorry|oops)\b"
# A full stop after an initial, an option letter or an abbreviation does not end a sentence.
_SENTENCE_END = re.compile(
    r"(?:(?<!\b[^\W\d_])(?<!\bDr)(?<!\bMr)(?<!\bSt)(?<!\bMs)(?<!\bMrs)(?<!\bJr)(?<!\bvs)\.|[!?])"
    rf"[.!?]*[*_\"')]*(?=\s|$)|\.(?=\s+{_RETRACTION_WORDS})|\u3002",
    re.IGNORECASE,
)
_RETRACTION = re.compile(rf"(?:{_RETRACTION_WORDS}[\s,]+)+(?=\S)", re.IGNORECASE)
_NEGATED_ALTERNATIVE = re.compile(r"not\b.*\bbut\s+(?:rather\s+)?", re.IGNORECASE | re.DOTALL)
_TRAILING_CLAUSE = re.compile(
    r"(?<=\S)[,;]?\s+(?:because|since|not|rather than|instead of|as opposed to)\b.*"
    r"|,\s+(?:which|who|where|as)\b.*",
    re.IGNORECASE | re.DOTALL,
)
_SENTENCE_LEAD = re.compile(
    r".*(?:\b(?:is|are|was|were|be|equals?|think|believe|guess|say|choose|pick|select|with|i[ts]'s)"
    r"\b|'s\b|[:=\uff1a])(?!\s*$)\s*",
    re.IGNORECASE | re.DOTALL,
)
_NEGATION = re.compile(r"\b(?:not|never|neither|nor|cannot)\b|n['\u2019]t\b", re.IGNORECASE)
_QUOTED_TEXT = re.compile(r'"([^"]*)"[\s,}\]]*')  # a JSON string and the punctuation after it
_CLAUSE_SEPARATOR = re.compile(r"[;,]\s|\b(?:but|so|hence|thus|therefore)\b", re.IGNORECASE)
_INLINE_FORMULA = re.compile(r"\$([^$]+)\$|\\\(([^()]+)\\\)")
_NUMBER_START = re.compile(r"(?:[$€£¥]\s?)?(?<![\w.,^])[-+\u2212]?(?:[$€£¥]\s?)?\d")
_BEFORE_OPERAND = re.compile(
    r"(?:[-+*/^\u00d7\u00b7(\[{\u2212]|\bor|\bto|\bbetween|\d[,;]?(?:\s+and)?)\s*$"
)


@dataclass(frozen=True, slots=True)
class ExtractedAnswer:
    """Answer that was extracted from a text.

    ``readings`` are possible answer texts, usually from long to short: ``is 6``, ``6``.
    The answer is right if one of them is right. ``is_marked`` is True if the answer was in a mark
    (``<answer>``, ``\\boxed``, ``####``). ``numbers`` are further texts that are compared only with
    a ground truth that is a number.
    """

    readings: tuple[str, ...]
    is_marked: bool = False
    numbers: tuple[str, ...] = ()


def extract_answer(text: str) -> ExtractedAnswer | None:
    """Return the answer in ``text``, or None if it contains none, for example only a thought.

    >>> extract_answer("<think>5?</think> It is \\\\boxed{6}.").readings[0]
    '6'
    """
    return _extract_nested_answer(remove_thoughts(text), MAX_MARK_DEPTH)


def remove_thoughts(text: str) -> str:
    """Return ``text`` without its thoughts (``<think>...</think>``).

    A thought without closing tag reaches to the end of the text. A thought without opening tag
    starts at the beginning, because the tag is in the prompt.
    """
    answer_texts: list[str] = []
    thought_depth = text_start = 0
    for tag in _THOUGHT_TAG.finditer(text):
        is_closing_tag = bool(tag[1] or tag[2])
        if is_closing_tag and thought_depth == 0:
            # The opening tag is in the prompt, so all text so far belongs to a thought.
            answer_texts.clear()
        elif not is_closing_tag and thought_depth == 0:
            answer_texts.append(text[text_start : tag.start()])
        thought_depth = 0 if is_closing_tag else 1
        text_start = tag.end()
    if thought_depth == 0:
        answer_texts.append(text[text_start:])
    return "".join(answer_texts)


def _extract_nested_answer(text: str, remaining_depth: int) -> ExtractedAnswer | None:
    mark_content_and_kind = _find_last_mark(text)
    if mark_content_and_kind is not None:
        return _read_mark(*mark_content_and_kind, remaining_depth)
    text = _remove_unclosed_mark(text)
    sentence = _find_last_announcement(text)
    if sentence is not None:
        return _read_sentence(sentence)
    return _read_last_sentence(text)


def _read_mark(mark_content: str, is_box: bool, remaining_depth: int) -> ExtractedAnswer:
    """Return the answer in a mark: the whole content, and readings of an answer inside it.

    A box (``\\boxed``) without other marks in it is only read as a whole. In ``5!`` the "!" is a
    factorial sign and does not end a sentence.
    """
    is_plain_box = is_box and _find_last_mark(mark_content) is None
    inner_answer = None
    if remaining_depth and len(mark_content) <= MAX_TEXT_LENGTH and not is_plain_box:
        inner_answer = _extract_nested_answer(mark_content, remaining_depth - 1)
    if inner_answer is None:
        return ExtractedAnswer((mark_content,), is_marked=True)
    readings = dict.fromkeys((mark_content, *inner_answer.readings))
    return ExtractedAnswer(tuple(readings), is_marked=True, numbers=inner_answer.numbers)


def _find_last_mark(text: str) -> tuple[str, bool] | None:
    """Return the content of the last mark, and True if it is a box. Return None without a mark."""
    marks = [
        (mark_end, text[start : mark_end - 1], True)
        for start, mark_end, is_box in _find_braces(text)
        if is_box and mark_end is not None
    ]
    content_start = None
    for tag in _ANSWER_TAG.finditer(text):
        if not tag[1]:
            content_start = tag.end()
        elif content_start is not None:
            marks.append((tag.end(), text[content_start : tag.start()], False))
            content_start = None
    marks += [(match.end(), match[1], True) for match in _BOXED_WORD.finditer(text)]
    text_end = len(text.rstrip())
    marks += [
        (match.end(), match[1], False)
        for match in _HASH_MARK.finditer(text)
        if match[1].strip() and match.end() >= text_end
    ]
    return max(marks)[1:] if marks else None


def _find_braces(text: str) -> Iterator[tuple[int, int | None, bool]]:
    """Yield (start, end, is_box) of the content of each pair of braces. ``end`` is None if open."""
    open_braces: list[tuple[int, bool]] = []
    for brace in _BRACE.finditer(text):
        token = brace[0]
        if token == "}" and open_braces:
            start, is_box = open_braces.pop()
            yield start, brace.end(), is_box
        elif token[-1] == "{" and token != "\\{":
            open_braces.append((brace.end(), len(token) > 1))
    for start, is_box in open_braces:
        yield start, None, is_box


def _remove_unclosed_mark(text: str) -> str:
    """Return ``text`` up to the first answer tag or ``\\boxed`` that is not closed."""
    cut_positions = [len(text)]
    tags = list(_ANSWER_TAG.finditer(text))
    # The text has no closed mark. If its first tag is a closing one, the answer precedes this tag.
    cut_positions += [tag.start() for tag in tags[:1]]
    for start, end, is_box in _find_braces(text):
        if is_box and end is None:
            cut_positions.append(text.rindex("\\", 0, start))
    return text[: min(cut_positions)]


def _find_last_announcement(text: str) -> str | None:
    last_candidate = None
    for announcement in (*_ANNOUNCEMENT.finditer(text), *_HASH_MARK.finditer(text)):
        line_start = (
            announcement.end() if announcement.re is _ANNOUNCEMENT else announcement.start(1)
        )
        following_text = text[line_start : line_start + MAX_LINE_LENGTH].lstrip(" \t*_`:\uff1a\n")
        line = following_text.split("\n", 1)[0].strip()
        if quoted_match := _QUOTED_TEXT.fullmatch(line):
            line = quoted_match[1]
        if line and (last_candidate is None or line_start > last_candidate[0]):
            last_candidate = (line_start, line)
    return None if last_candidate is None else last_candidate[1]


def _read_sentence(line: str) -> ExtractedAnswer:
    end_match = _SENTENCE_END.search(line)
    sentence = line[: end_match.start()] if end_match else line
    short_sentence = _TRAILING_CLAUSE.sub("", _NEGATED_ALTERNATIVE.sub("", sentence))
    return ExtractedAnswer(tuple(dict.fromkeys((line, sentence, short_sentence))))


def _read_last_sentence(text: str) -> ExtractedAnswer | None:
    text = _FINAL_REMARK.sub("", _CODE_FENCE.sub("", text[-MAX_TEXT_LENGTH:])).strip()
    if not text:
        return None
    line = text.rsplit("\n", 1)[-1].strip()[-MAX_LINE_LENGTH:]
    sentences = [sentence for sentence in _SENTENCE_END.split(line) if sentence.strip()]
    last_sentence = _RETRACTION.sub("", sentences[-1].strip()) if sentences else line
    readings = [text, line, last_sentence]
    numbers: tuple[str, ...] = ()
    last_clause = _CLAUSE_SEPARATOR.split(last_sentence)[-1]
    if not _NEGATION.search(last_clause) and not re.search(r"\bor\b", last_clause):
        readings.append(_SENTENCE_LEAD.sub("", last_sentence))
        readings += [
            next(filter(None, match.groups()))
            for match in [*_INLINE_FORMULA.finditer(last_sentence)][-1:]
        ]
        # Add the text from the last number on, unless it is an operand or an alternative (2 or 3).
        for match in [*_NUMBER_START.finditer(last_sentence)][-1:]:
            if not _BEFORE_OPERAND.search(last_sentence[: match.start()]):
                numbers = (last_sentence[match.start() :],)
    return ExtractedAnswer(tuple(dict.fromkeys(readings)), numbers=numbers)
