"""Extraction of the answer from a policy's text.

Thoughts are removed first. Then the answer is read from the first of these that exists:

    1   the last mark: <answer>...</answer>, \\boxed{...}, or #### ... in the last line
    2   the last announcement: "the answer is ...", "Answer: ...", or #### ... in any line
    3   the last line, its last sentence, or the whole text if it is short

A mark that is not closed was cut at the token limit. The text after it is not read as an answer.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from agent_system.environments.env_package.dataset.answer_text import BOLD
from agent_system.environments.env_package.dataset.written_numbers import CURRENCY_SIGNS

MAX_TEXT_LENGTH = 2000  # characters; only the end of a longer text without a mark is read
MAX_LINE_LENGTH = 500  # maximum number of characters that are read of a line
MAX_MARK_DEPTH = 4  # maximum nesting of marks, such as 2 for <answer>\boxed{6}</answer>

_THOUGHT_TAG = re.compile(
    r"<(/?)(?:think|thinking|thought|reasoning)>|\[(/?)THINK\]", re.IGNORECASE
)
_ANSWER_TAG = re.compile(r"<(/?)(?:final[_ ])?answer>", re.IGNORECASE)
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
    r"|الجواب|الإجابة"
)
_LINKING_VERBS = r"is|are|was|equals|will be|would be|should be|must be|ist|lautet|est|es|è|é|هو|هي"
_ANNOUNCEMENT = re.compile(
    rf"\b(?:{_ANSWER_WORDS})\b[*_`\"']*"
    rf"(?:[ \t]*(?:[:\uff1a=\u2192\u27a1]|->)|[ \t]+-[ \t]"
    rf"|(?:(?!\b(?:because|since)\b)[^.:\uff1a=?\n]){{0,60}}?"
    rf"\b(?:{_LINKING_VERBS})\b(?!')[ \t]*:?)"
    r"|(?:答案|答え|正解|정답|답)(?:应该)?(?:[是为為は]|은|는)?[ \t]*[:\uff1a]?"
    r"|^[ \t]*(?:#+|\*\*)[ \t]*(?:final[ \t]+)?answer[*_]*[ \t]*$",
    re.IGNORECASE | re.MULTILINE,
)
# Member of a JSON object, or of a Python dictionary: "answer": 5.
_JSON_ANSWER = re.compile(
    r"""(?<=[{,\s])["'](?:final[_ ])?(?:answer|result)["']\s*:\s*"""
    r"""("(?:[^"\\]|\\.){0,500}"|'(?:[^'\\]|\\.){0,500}'|\[[^\[\]]{0,500}\]|[^\s,{}\[\]"']{1,100})""",
    re.IGNORECASE,
)
# Mark-up between an announcement and its answer.
_MARKUP_BEFORE_ANSWER = re.compile(r"\A(?:[ \t*_`:\uff1a\n]|(?:\$\$|\\\[)[ \t]*\n)+")
_RETRACTION_WORDS = r"(?:no|wait|actually|hmm|sorry|oops)\b"
# A full stop after an initial, an option letter or an abbreviation does not end a sentence.
_SENTENCE_END = re.compile(
    r"(?:(?<!\b[^\W\d_])(?<!\bDr)(?<!\bMr)(?<!\bSt)(?<!\bMs)(?<!\bMrs)(?<!\bJr)(?<!\bvs)\.|[!?])"
    rf"[.!?]*[*_\"')]*(?=\s|$)|\.(?=\s+{_RETRACTION_WORDS})|\u3002",
    re.IGNORECASE,
)
# "No" alone begins a retraction only before a comma: "no solution" is no retraction.
_RETRACTION = re.compile(
    rf"^(?:no(?:,\s*|\s+(?={_RETRACTION_WORDS}))|(?!no\b){_RETRACTION_WORDS}[\s,]+)+(?=\S)",
    re.IGNORECASE,
)
_NEGATED_ALTERNATIVE = re.compile(r"not\b.*\bbut\s+(?:rather\s+)?", re.IGNORECASE | re.DOTALL)
_TRAILING_CLAUSE = re.compile(
    r"(?<=\S)[,;]?\s+(?:because|since|not|rather than|instead of|as opposed to)\b.*"
    r"|,\s+(?:which|who|where|as)\b.*",
    re.IGNORECASE | re.DOTALL,
)
_TEXT_BEFORE_ANSWER = re.compile(
    r".*(?:\b(?:is|are|was|were|be|equals?|think|believe|guess|say|choose|pick|select|with|i[ts]'s"
    r"|probably|likely|option|choice|(?:hence|thus|therefore|so),?)\b,?|'s\b|[=\uff1a]|:(?!\d)"
    r"|\s\u2014\s)(?!\s*$)\s*",
    re.IGNORECASE | re.DOTALL,
)
_NEGATION = re.compile(
    r"\b(?:not|never|neither|nor|cannot|doubt|false\s+that|nicht|keine?|pas|n[ãa]o|non|не|no(?=\s+(?:es|son|is)\b))\b"
    r"|n['\u2019]t\b|[不没非]|아니",
    re.IGNORECASE,
)
_OR_WORD = re.compile(r"\b(?:or|oder|ou|o|u|или)\b|或|または")
_QUOTED_TEXT = re.compile(r'"([^"]*)"[\s,}\]]*')  # a JSON string and the punctuation after it
_CLAUSE_SEPARATOR = re.compile(r"[;,]\s|\b(?:but|so|hence|thus|therefore)\b", re.IGNORECASE)
_INLINE_FORMULA = re.compile(r"\$([^$]+)\$|\\\(([^()]+)\\\)")
# Start of a number. It may directly follow a Chinese, Japanese or Korean letter, which \w also
# matches.
_NUMBER_START = re.compile(
    rf"(?:[{CURRENCY_SIGNS}]\s?)?(?:(?<![\w.,^'])|(?<=[\u3040-\u9fff\uac00-\ud7af]))"
    rf"(?:(?:minus|negative)\s+)?[-+\u2212]?(?:[{CURRENCY_SIGNS}]\s?)?\d",
    re.IGNORECASE,
)
# Text that ends directly before a number and shows that this number is not the answer. The number
# is an operand, an alternative, a bound or a label.
_BEFORE_OPERAND = re.compile(
    r"(?:[-+*/^\u00d7\u00b7(\[{<>\u2264\u2265\u2248\u00b1~\u2010-\u2015\u2212]|\d\s*:"
    r"|\b(?:or|between|than|most|least|over|under|above|below|almost|nearly|until|within|beyond|"
    r"times|twice|half|double|triple|plus|minus|except|without|versus|vs\.?|not|no|and|"
    r"(?:up|close|near|next|added|compared)\s+to|(?:divisible|divided|multiplied)\s+by|"
    r"(?:half|multiples?|divisors?|factors?|out|one|some|any|powers?|roots?|square)\s+of|"
    r"(?:any|every|no)thing\s+but|from|als|que|oder|ou|o|u|или|bis|à|"
    r"step|equation)"
    r"|\d[,;]?(?:\s+(?!is\b|are\b|equals\b|makes\b|gives\b|yields\b)[^\W\d_]+)?|或"
    r"|\d.*\s(?:in|at|on|for|with|after|per|every|when|among|by))\s*$",
    re.IGNORECASE | re.DOTALL,
)
# Rest of a sentence after a number and its unit, such as "in May" in "72 clips in May". It is
# ignored.
_AFTER_NUMBER = re.compile(
    r"\s+(?:in|on|at|to(?!\s+the)|for|per|of|from|by|with|as|every|each|more|left|altogether|total|"
    r"after|before|during|that|which|when|if|because|so|older|younger|"
    r"(?:is|are|was|were)\s+(?:needed|left|required|sold|used))\b.*",
    re.IGNORECASE | re.DOTALL,
)
_MARKUP_TAG = re.compile(r"<[/|]?[a-zA-Z]\w*[/|]?>")
_OPTION_LINE = re.compile(r"^[ \t]*\(?([A-Z])[).:][ \t]", re.MULTILINE)
_IS_THE_ANSWER = re.compile(
    r"(?<=\S)\s+is\s+(?:the\s+)?(?:(?:correct|right|final|best)(?:\s+(?:answer|choice|one))?|answer)\b.*",
    re.DOTALL,
)
_LEADING_ADVERBS = re.compile(
    r"^(?:(?:most\s+)?(?:likely|probably|definitely|certainly|clearly|obviously|therefore|thus|hence|"
    r"then|just|only|simply|actually|indeed|still|equal\s+to|given\s+by|in\s+fact),?\s+)+",
    re.IGNORECASE,
)
_TABLE_ROW = re.compile(r"\|\s.*\s\|\s+(\S.*?)\s*\|")


@dataclass(frozen=True, slots=True)
class ExtractedAnswer:
    """Answer that was extracted from a policy's text, in several possible readings.

    ``candidate_texts`` are the readings, usually from long to short: ``is 6``, ``6``. The answer is
    right if one of them is right. ``has_answer_mark`` is True if the answer was in a mark
    (``<answer>``, ``\\boxed``, ``####``). ``number_texts`` are further readings that begin with the
    last number of a sentence: ``6 apples`` in ``so there are 6 apples``. They are compared only
    with a ground truth that is a number.
    """

    candidate_texts: tuple[str, ...]
    has_answer_mark: bool = False
    number_texts: tuple[str, ...] = ()


def extract_answer(text: str) -> ExtractedAnswer | None:
    """Return the answer in ``text``, or None if it contains none, for example only a thought.

    >>> extract_answer("<think>5?</think> It is \\\\boxed{6}.").candidate_texts[0]
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
            # A closing tag without an opening tag: the prompt contains the opening tag, so all text
            # so far belongs to a thought.
            answer_texts.clear()
        elif not is_closing_tag and thought_depth == 0:
            answer_texts.append(text[text_start : tag.start()])
        thought_depth = 0 if is_closing_tag else 1
        text_start = tag.end()
    if thought_depth == 0:
        answer_texts.append(text[text_start:])
    return "".join(answer_texts)


def _extract_nested_answer(text: str, remaining_depth: int) -> ExtractedAnswer | None:
    mark_content_and_kind = _find_last_answer_mark(text)
    if mark_content_and_kind is not None:
        return _extract_from_mark(*mark_content_and_kind, remaining_depth)
    text = _remove_unclosed_answer_mark(text)
    sentence = _find_announced_answer(text)
    if sentence is not None:
        return _extract_from_sentence(sentence)
    return _extract_from_last_sentence(text)


def _extract_from_mark(mark_content: str, is_box: bool, remaining_depth: int) -> ExtractedAnswer:
    """Return the answer in a mark such as ``<answer>``, ``\\boxed`` or ``####``.

    ``mark_content`` is the text inside the mark. The whole of it is one possible reading. If it is
    a sentence that contains an answer, the readings of this answer are added. A box (``\\boxed``)
    without other marks in it is only read as a whole. In ``5!`` the "!" is a factorial sign and
    does not end a sentence.
    """
    is_plain_box = is_box and _find_last_answer_mark(mark_content) is None
    inner_answer = None
    if remaining_depth and len(mark_content) <= MAX_TEXT_LENGTH and not is_plain_box:
        inner_answer = _extract_nested_answer(mark_content, remaining_depth - 1)
    if inner_answer is None:
        return ExtractedAnswer((mark_content,), has_answer_mark=True)
    candidate_texts = dict.fromkeys((mark_content, *inner_answer.candidate_texts))
    return ExtractedAnswer(
        tuple(candidate_texts), has_answer_mark=True, number_texts=inner_answer.number_texts
    )


def _find_last_answer_mark(text: str) -> tuple[str, bool] | None:
    r"""Return the content of the last answer mark, and True if it is a box; None without a mark.

    Marks are ``<answer>...</answer>``, ``\boxed{...}`` (a box) and ``####``.
    """
    answer_marks = [
        (mark_end, text[start : mark_end - 1], True)
        for start, mark_end, is_box in _find_braces(text)
        if is_box and mark_end is not None
    ]
    content_start = None
    for tag in _ANSWER_TAG.finditer(text):
        if not tag[1]:
            content_start = tag.end()
        elif content_start is not None:
            answer_marks.append((tag.end(), text[content_start : tag.start()], False))
            content_start = None
    answer_marks += [(match.end(), match[1], True) for match in _BOXED_WORD.finditer(text)]
    text_end = len(text.rstrip())
    answer_marks += [
        (match.end(), match[1], False)
        for match in _HASH_MARK.finditer(text)
        if match[1].strip() and match.end() >= text_end
    ]
    return max(answer_marks)[1:] if answer_marks else None


def _find_braces(text: str) -> Iterator[tuple[int, int | None, bool]]:
    """Yield (start, end, is_box) of the content of each pair of braces in ``text``.

    ``end`` is None if the pair is not closed. ``is_box`` is True for the braces of ``\\boxed{``.
    """
    open_braces: list[tuple[int, bool]] = []
    for brace in _BRACE.finditer(text):
        brace_text = brace[0]
        if brace_text == "}" and open_braces:
            content_start, is_box = open_braces.pop()
            yield content_start, brace.end(), is_box
        elif brace_text[-1] == "{" and brace_text != "\\{":
            open_braces.append((brace.end(), len(brace_text) > 1))
    for content_start, is_box in open_braces:
        yield content_start, None, is_box


def _remove_unclosed_answer_mark(text: str) -> str:
    """Return ``text`` up to its first unmatched ``<answer>`` tag or unclosed ``\\boxed``."""
    cut_positions = [len(text)]
    tags = list(_ANSWER_TAG.finditer(text))
    # The text has no closed mark. If its first tag is a closing one, the answer precedes this tag.
    cut_positions += [tag.start() for tag in tags[:1]]
    for content_start, content_end, is_box in _find_braces(text):
        if is_box and content_end is None:
            cut_positions.append(text.rindex("\\", 0, content_start))
    return text[: min(cut_positions)]


def _find_announced_answer(text: str) -> str | None:
    last_start_and_answer = None
    for json_member in _JSON_ANSWER.finditer(text):
        last_start_and_answer = (json_member.start(1), _remove_quotes(json_member[1]))
    if last_start_and_answer and _CODE_FENCE.sub("", text).lstrip().startswith(("{", "[")):
        # The whole text is JSON, so no other text in it is an answer.
        return last_start_and_answer[1]
    for announcement in (*_ANNOUNCEMENT.finditer(text), *_HASH_MARK.finditer(text)):
        line_start = (
            announcement.end() if announcement.re is _ANNOUNCEMENT else announcement.start(1)
        )
        following_text = _CODE_FENCE.sub("", text[line_start : line_start + MAX_LINE_LENGTH])
        line = _MARKUP_BEFORE_ANSWER.sub("", following_text).split("\n", 1)[0].strip()
        if quoted_match := _QUOTED_TEXT.fullmatch(line):
            line = quoted_match[1]
        if _NEGATION.search(announcement[0]) and announcement.re is _ANNOUNCEMENT:
            line = f"not {line}"  # for example after "the answer never is"
        if line and (last_start_and_answer is None or line_start > last_start_and_answer[0]):
            last_start_and_answer = (line_start, line)
    return None if last_start_and_answer is None else last_start_and_answer[1]


def _remove_quotes(value: str) -> str:
    """Return ``value`` without quotes: both ``"Paris"`` and ``'Paris'`` give ``Paris``."""
    with contextlib.suppress(ValueError):
        value = str(json.loads(value)) if value.startswith('"') else value
    return value[1:-1] if value.startswith(("'", '"')) else value


def _extract_from_sentence(line: str) -> ExtractedAnswer:
    end_match = _SENTENCE_END.search(line)
    sentence = line[: end_match.start()] if end_match else line
    return ExtractedAnswer(tuple(dict.fromkeys((line, sentence, _shorten_sentence(sentence)))))


def _shorten_sentence(sentence: str) -> str:
    """Remove negated alternatives, reasons ("because ...") and "is the answer"."""
    sentence = _TRAILING_CLAUSE.sub("", _NEGATED_ALTERNATIVE.sub("", sentence))
    return _IS_THE_ANSWER.sub("", _LEADING_ADVERBS.sub("", sentence))


def _extract_from_last_sentence(text: str) -> ExtractedAnswer | None:
    text = _FINAL_REMARK.sub("", _CODE_FENCE.sub("", text[-MAX_TEXT_LENGTH:])).strip()
    if not text:
        return None
    line = text.rsplit("\n", 1)[-1].strip()[-MAX_LINE_LENGTH:]
    if table_row := _TABLE_ROW.fullmatch(line):
        line = table_row[1]
    option_lines = _OPTION_LINE.findall(text)
    last_option = _OPTION_LINE.match(line)
    if last_option and len(option_lines) > 1 and option_lines.count(last_option[1]) == 1:
        return ExtractedAnswer((text,))  # a list of options, of which none was chosen
    sentences = [sentence for sentence in _SENTENCE_END.split(line) if sentence.strip()]
    last_sentence = _RETRACTION.sub("", sentences[-1].strip()) if sentences else line
    short_sentence = _shorten_sentence(BOLD.sub(r"\1", last_sentence))
    candidate_texts = [text, line, last_sentence, short_sentence]
    number_texts: list[str] = []
    for sentence in (last_sentence, short_sentence):
        last_clause = _CLAUSE_SEPARATOR.split(sentence)[-1]
        if not _NEGATION.search(last_clause) and not _OR_WORD.search(last_clause):
            candidate_texts.append(_TEXT_BEFORE_ANSWER.sub("", sentence))
            formulas = [*_INLINE_FORMULA.finditer(sentence)]
            candidate_texts += [next(filter(None, match.groups())) for match in formulas[-1:]]
            number_texts += _list_last_number_texts(sentence)
    return ExtractedAnswer(
        tuple(dict.fromkeys(candidate_texts)), number_texts=tuple(dict.fromkeys(number_texts))
    )


def _list_last_number_texts(sentence: str) -> list[str]:
    """Return two texts that begin with the last number of ``sentence``.

    The first text ends with the sentence, the second one after the number's unit. Return an empty
    list if the number is an operand, an alternative or a bound ("2 or 3", "at least 3").
    """
    sentence = _MARKUP_TAG.sub(" ", sentence)
    for match in [*_NUMBER_START.finditer(sentence)][-1:]:
        if not _BEFORE_OPERAND.search(sentence[: match.start()]):
            number_text = sentence[match.start() :]
            return [number_text, _AFTER_NUMBER.sub("", number_text)]
    return []
