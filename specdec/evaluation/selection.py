"""Which of many questions are asked: some of all categories, in an order that makes every beginning a fair sample."""

import hashlib
import json
from collections.abc import Sequence
from typing import TypeVar

from specdec.common.checks import check_at_least
from specdec.evaluation.prompts import Question

__all__ = ["evenly", "shuffled", "stratified"]

T = TypeVar("T")


def evenly(questions: Sequence[T], count: int | None) -> list[T]:
    """As many questions, spread evenly over all, as files are sorted by category; all of them for None.

    Raises:
        ValueError: fewer than 1, or more than there are.
    """
    if count is None:
        return list(questions)
    _check_count(count, questions)
    return [questions[place * len(questions) // count] for place in range(count)]


def stratified(questions: Sequence[Question], count: int | None, seed: int) -> list[Question]:
    """As many questions, drawn at random from each category in proportion to its size, in the order of the file.

    A category gets at least one question while the count allows; where it does not, the largest categories do. With the
    same seed a larger count takes the questions of a smaller one again, but for what rounding moves between categories.

    Args:
        questions: all of them; those without a category are one.
        count: how many; None for all.
        seed: another one draws others.

    Raises:
        ValueError: fewer than 1, or more than there are.
    """
    if count is None:
        return list(questions)
    _check_count(count, questions)
    members: dict[str, list[int]] = {}
    for place in _drawn_order(questions, seed, "chosen"):
        members.setdefault(questions[place].category, []).append(place)
    # in the order of the file, which decides between equals
    names = list(dict.fromkeys(question.category for question in questions))
    taken = _shares([len(members[name]) for name in names], count)
    chosen = [place for name, share in zip(names, taken, strict=True) for place in members[name][:share]]
    return [questions[place] for place in sorted(chosen)]


def shuffled(questions: Sequence[Question], seed: int) -> list[Question]:
    """All questions in an order drawn by the seed, so that a run that ends early has asked a fair sample."""
    return [questions[place] for place in _drawn_order(questions, seed, "order")]


def _shares(sizes: Sequence[int], count: int) -> list[int]:
    """How many to take of each category: in proportion, at least one, the rest to whom most is owed."""
    total = sum(sizes)
    largest = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    shares = [0] * len(sizes)
    for index in largest[:count]:
        shares[index] = 1
    while sum(shares) < count:
        # in integers, which do not round
        owed = [count * size - share * total for size, share in zip(sizes, shares, strict=True)]
        shares[owed.index(max(owed))] += 1
    return shares


def _drawn_order(questions: Sequence[Question], seed: int, purpose: str) -> list[int]:
    """Places of the questions, sorted by hashes: the same on every machine and with every version of Python.

    Orders for two purposes are independent: those who are chosen from their category late are not asked late.
    """

    def draw(place: int) -> bytes:
        question = questions[place]
        content = [purpose, seed, question.name, question.system, question.turns]
        return hashlib.sha256(json.dumps(content).encode()).digest()

    return sorted(range(len(questions)), key=draw)


def _check_count(count: int, questions: Sequence[T]) -> None:
    check_at_least(1, {"count": count})
    if count > len(questions):
        raise ValueError(f"count: expected at most {len(questions)}, which the file has, got {count}")
