"""Extraction of the answer from a policy's text.

Thoughts are removed first. Then the first of these that exists is the answer:

    1   <answer>...</answer>, \\boxed{...}, or a last line #### ...: the one that ends last
    2   a sentence or line that announces it: "the answer is ...", "Answer: ...", #### ...: the last
    3   the whole text if it is short, or its last line

The forms in line 1 are called marks. If a mark is not closed, the text was cut at the token limit,
and the text after the opening is no answer.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_WHOLE_TEXT = 2000  # characters; of a longer text without a mark only the end is read
MAX_LINE = 500  # characters of a line that are read
MAX_MARK_DEPTH = 4  # how many marks may be nested, as in <answer>\boxed{6}</answer>

_THOUGHT_TAG = re.compile(
    r"<(/?)(?:think|thinking|thought|reasoning)>|\[(/?)THINK\]", re.IGNORECASE
)
_ANSWER_TAG = re.compile(r"<(/?)(?:final_)?answer>", re.IGNORECASE)
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}\\]|[{}]")
_BOXED_WORD = re.compile(r"\\(?:boxed|fbox)\s+([^\s{}$]+)")
_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*([^\n]*)")
_FENCE = re.compile(r"^[ \t]*```[\w+-]*[ \t]*$", re.MULTILINE)
_REMARK = re.compile(
    r"\n[*_# \t]{0,9}(?:explanation|reasoning|reason|note|justification)\b[*_]*\s*:.*",
    re.IGNORECASE | re.DOTALL,
)
_LATIN = r"answer|result|antwort|ergebnis|r[ée]ponse|respuesta|resultado|resposta|risposta|ответ"
_LINK = r"is|are|was|equals|will be|would be|should be|must be|ist|lautet|est|es|è|é"
_ANNOUNCED = re.compile(
    rf"\b(?:{_LATIN})\b[*_`\"']*"
    rf"(?:[ \t]*[:\uff1a=]|[ \t]+-[ \t]|[^.:\uff1a=?\n]{{0,60}}?\b(?:{_LINK})\b(?!')[ \t]*:?)"
    r"|(?:答案|答え|正解|정답|답)(?:应该)?(?:[是为為は]|은|는)?[ \t]*[:\uff1a]?"
    r"|^[ \t]*(?:#+|\*\*)[ \t]*(?:final[ \t]+)?answer[*_]*[ \t]*$",
    re.IGNORECASE | re.MULTILINE,
)
_RETRACTS = r"(?:no|wait|actually|hmm|sorry|oops)\b"
# A full stop after an initial, an option letter or an abbreviation does not end a sentence.
_SENTENCE_END = re.compile(
    r"(?:(?<!\b[^\W\d_])(?<!\bDr)(?<!\bMr)(?<!\bSt)(?<!\bMs)(?<!\bMrs)(?<!\bJr)(?<!\bvs)\.|[!?])"
    rf"[.!?]*[*_\"')]*(?=\s|$)|\.(?=\s+{_RETRACTS})|\u3002",
    re.IGNORECASE,
)
_RETRACTION = re.compile(rf"(?:{_RETRACTS}[\s,]+)+(?=\S)", re.IGNORECASE)
_CORRECTED = re.compile(r"not\b.*\bbut\s+(?:rather\s+)?", re.IGNORECASE | re.DOTALL)
_CLAUSE = re.compile(
    r"(?<=\S)[,;]?\s+(?:because|since|not|rather than|instead of|as opposed to)\b.*"
    r"|,\s+(?:which|who|where|as)\b.*",
    re.IGNORECASE | re.DOTALL,
)
_LEAD = re.compile(
    r".*(?:\b(?:is|are|was|were|be|equals?|think|believe|guess|say|choose|pick|select|with|i[ts]'s)"
    r"\b|'s\b|[:=\uff1a])(?!\s*$)\s*",
    re.IGNORECASE | re.DOTALL,
)
_DENIED = re.compile(r"\b(?:not|never|neither|nor|cannot)\b|n['\u2019]t\b", re.IGNORECASE)
_QUOTED = re.compile(r'"([^"]*)"[\s,}\]]*')  # a JSON string and the punctuation after it
_TURN = re.compile(r"[;,]\s|\b(?:but|so|hence|thus|therefore)\b", re.IGNORECASE)
_MATH = re.compile(r"\$([^$]+)\$|\\\(([^()]+)\\\)")
_NUMBER = re.compile(r"(?:[$€£¥]\s?)?(?<![\w.,^])[-+\u2212]?(?:[$€£¥]\s?)?\d")
_OPERATOR = re.compile(
    r"(?:[-+*/^\u00d7\u00b7(\[{\u2212]|\bor|\bto|\bbetween|\d[,;]?(?:\s+and)?)\s*$"
)


@dataclass(frozen=True, slots=True)
class ExtractedAnswer:
    """Answer that was extracted from a text.

    ``readings`` are texts that may be the answer, the longest first. The answer is right if one of
    them is. ``is_marked`` is True for an answer in a mark (``<answer>``, ``\\boxed``, ``####``) and
    False for one in a sentence. ``numbers`` are further texts to compare with a numeric truth.
    """

    readings: tuple[str, ...]
    is_marked: bool = False
    numbers: tuple[str, ...] = ()


def extract_answer(text: str) -> ExtractedAnswer | None:
    """Return the answer in ``text``, or None if there is none, as in a thought that was cut.

    >>> extract_answer("<think>5?</think> It is \\\\boxed{6}.").readings[0]
    '6'
    """
    return _extract_from(without_thoughts(text), MAX_MARK_DEPTH)


def without_thoughts(text: str) -> str:
    """Return ``text`` without its thoughts (``<think>...</think>``).

    A thought may be unclosed, or its opening tag may be in the prompt.
    """
    kept_texts: list[str] = []
    depth = text_start = 0
    for tag in _THOUGHT_TAG.finditer(text):
        closes = bool(tag[1] or tag[2])
        if closes and depth == 0:
            kept_texts.clear()  # opening tag in the chat template: all so far is thought
        elif not closes and depth == 0:
            kept_texts.append(text[text_start : tag.start()])
        depth = 0 if closes else 1
        text_start = tag.end()
    if depth == 0:
        kept_texts.append(text[text_start:])
    return "".join(kept_texts)


def _extract_from(text: str, layers: int) -> ExtractedAnswer | None:
    marked = _last_mark(text)
    if marked is not None:
        return _read_mark(*marked, layers)
    text = _before_cut(text)
    sentence = _last_announcement(text)
    if sentence is not None:
        return _read_sentence(sentence)
    return _read_end(text)


def _read_mark(marked: str, is_box: bool, layers: int) -> ExtractedAnswer:
    """Return the content ``marked`` of a mark as answer. An answer that is extracted from the
    content is a further candidate.

    A box (``\\boxed``) without inner marks is not split into sentences: ``5!`` is a factorial.
    """
    is_whole = is_box and _last_mark(marked) is None
    inner_answer = None
    if layers and len(marked) <= MAX_WHOLE_TEXT and not is_whole:
        inner_answer = _extract_from(marked, layers - 1)
    if inner_answer is None:
        return ExtractedAnswer((marked,), is_marked=True)
    readings = dict.fromkeys((marked, *inner_answer.readings))
    return ExtractedAnswer(tuple(readings), is_marked=True, numbers=inner_answer.numbers)


def _last_mark(text: str) -> tuple[str, bool] | None:
    """Return the content of the mark that ends last, and True if it is a box. None: no mark."""
    marks = [
        (end, text[start : end - 1], True)
        for start, end, is_box in _find_braces(text)
        if is_box and end is not None
    ]
    content_start = None
    for tag in _ANSWER_TAG.finditer(text):
        if not tag[1]:
            content_start = tag.end()
        elif content_start is not None:
            marks.append((tag.end(), text[content_start : tag.start()], False))
            content_start = None
    marks += [(match.end(), match[1], True) for match in _BOXED_WORD.finditer(text)]
    end = len(text.rstrip())
    marks += [
        (match.end(), match[1], False)
        for match in _HASHES.finditer(text)
        if match[1].strip() and match.end() >= end
    ]
    return max(marks)[1:] if marks else None


def _find_braces(text: str) -> Iterator[tuple[int, int | None, bool]]:
    """Yield for each brace the start of its content, its end (None if open), and True for a box."""
    opened: list[tuple[int, bool]] = []
    for brace in _BRACE.finditer(text):
        token = brace[0]
        if token == "}" and opened:
            start, is_box = opened.pop()
            yield start, brace.end(), is_box
        elif token[-1] == "{" and token != "\\{":
            opened.append((brace.end(), len(token) > 1))
    for start, is_box in opened:
        yield start, None, is_box


def _before_cut(text: str) -> str:
    """Return the part of ``text`` before the first mark that is not closed."""
    cut_positions = [len(text)]
    tags = list(_ANSWER_TAG.finditer(text))
    # If the first tag is a closing one, the opening tag is in the prompt. The answer precedes it.
    cut_positions += [tag.start() for tag in tags[:1]]
    for start, end, is_box in _find_braces(text):
        if is_box and end is None:
            cut_positions.append(text.rindex("\\", 0, start))
    return text[: min(cut_positions)]


def _last_announcement(text: str) -> str | None:
    last_candidate = None
    for announcement in (*_ANNOUNCED.finditer(text), *_HASHES.finditer(text)):
        line_start = announcement.end() if announcement.re is _ANNOUNCED else announcement.start(1)
        behind = text[line_start : line_start + MAX_LINE].lstrip(" \t*_`:\uff1a\n")
        line = behind.split("\n", 1)[0].strip()
        if quoted := _QUOTED.fullmatch(line):
            line = quoted[1]
        if line and (last_candidate is None or line_start > last_candidate[0]):
            last_candidate = (line_start, line)
    return None if last_candidate is None else last_candidate[1]


def _read_sentence(line: str) -> ExtractedAnswer:
    end_match = _SENTENCE_END.search(line)
    sentence = line[: end_match.start()] if end_match else line
    shorter = _CLAUSE.sub("", _CORRECTED.sub("", sentence))
    return ExtractedAnswer(tuple(dict.fromkeys((line, sentence, shorter))))


def _read_end(text: str) -> ExtractedAnswer | None:
    text = _REMARK.sub("", _FENCE.sub("", text[-MAX_WHOLE_TEXT:])).strip()
    if not text:
        return None
    line = text.rsplit("\n", 1)[-1].strip()[-MAX_LINE:]
    sentences = [sentence for sentence in _SENTENCE_END.split(line) if sentence.strip()]
    last_sentence = _RETRACTION.sub("", sentences[-1].strip()) if sentences else line
    readings = [text, line, last_sentence]
    numbers: tuple[str, ...] = ()
    last_clause = _TURN.split(last_sentence)[-1]
    if not _DENIED.search(last_clause) and not re.search(r"\bor\b", last_clause):
        readings.append(_LEAD.sub("", last_sentence))
        readings += [
            next(filter(None, match.groups())) for match in [*_MATH.finditer(last_sentence)][-1:]
        ]
        # The text from the last number to the end, unless it is part of a formula or of a choice.
        for match in [*_NUMBER.finditer(last_sentence)][-1:]:
            if not _OPERATOR.search(last_sentence[: match.start()]):
                numbers = (last_sentence[match.start() :],)
    return ExtractedAnswer(tuple(dict.fromkeys(readings)), numbers=numbers)
