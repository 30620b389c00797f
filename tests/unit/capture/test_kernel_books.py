"""Names of kernels share a room: by users, by their containers, by processes; what is launched goes last."""

from __future__ import annotations

import random
import sys
from itertools import count

import pytest

from argus.capture import kernel_books
from argus.capture.kernel_books import Books

ENTRY, UNREAD, TEXT = kernel_books._ENTRY, kernel_books._UNREAD, kernel_books._TEXT


def taken_by(books: Books) -> int:
    """What the names take, counted anew."""
    texts: dict[tuple[int, str], set[str | bytes]] = {}
    total = 0
    for book in books.of_pid.values():
        for name in (*book.learned.values(), *book.launched.values()):
            later = isinstance(name, tuple)
            texts.setdefault(book.owner, set()).add(name[0] if later else name)
            total += ENTRY + UNREAD * later
    return total + sum(sys.getsizeof(text) + TEXT for of_owner in texts.values() for text in of_owner)


def test_what_is_counted_is_what_is_kept() -> None:
    rng = random.Random(8)
    books = Books(lambda pid: (pid // 100, f"c{pid // 10}"))
    plain: dict[tuple[int, int], object] = {}
    for _ in range(4000):
        pid, handle = rng.choice([100, 101, 110, 200]), rng.randrange(40)
        text = f"k{rng.randrange(30)}"
        match rng.randrange(12):
            case 0:
                books.forget(pid)
                plain = {key: name for key, name in plain.items() if key[0] != pid}
            case 1 | 2 | 3:
                name = rng.choice([text.encode(), (text.encode(), rng.randrange(9), None), text])
                books.learn(books.of(pid), handle, name)
                plain[pid, handle] = name
            case 4 | 5:
                books.launch(books.of(pid), handle, text)
                plain[pid, handle] = text
            case _:
                known = plain.get((pid, handle))
                assert books.of(pid).launch(handle) == (known if isinstance(known, str) else None)
        assert {
            (pid, handle): name
            for pid, book in books.of_pid.items()
            for handle, name in (*book.learned.items(), *book.launched.items())
        } == plain
        assert books.total == taken_by(books)
    for pid in list(books.of_pid):
        books.forget(pid)
    assert books.total == 0
    assert not books._of_owner


def test_what_is_kept_is_what_was_launched_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a plain list in order of launches has it."""
    rng = random.Random(9)
    monkeypatch.setattr(kernel_books, "KEPT_HANDLES", 80)
    for _ in range(30):
        books = Books(lambda pid: (1, ""))
        book = books.of(7)
        order: dict[int, bool] = {}  # handle -> whether it was launched
        for handle in count():
            if rng.random() < 0.7:
                books.learn(book, handle, b"k")
                order[handle] = False
            for each in rng.sample(range(handle + 1), min(handle, 2)):
                if book.get(each) is not None and rng.random() < 0.5:
                    books.launch(book, each, f"name {each}")
                    order.pop(each)
                    order[each] = True
            if len(order) > 80:
                break
        books.make_room(7)
        launched = [each for each in order if order[each]]
        learned = [each for each in order if not order[each]]
        newest = min(len(learned), 40 // 8)
        kept = launched[-(40 - newest) :]
        assert list(book.launched) == kept
        assert list(book.learned) == learned[len(learned) - (40 - len(kept)) :]
        assert books.total == taken_by(books)


def test_a_user_s_many_containers_take_no_names_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_books, "OF_ALL", 1_200_000)
    books = Books(lambda pid: (1, "") if pid < 100 else (2, f"c{pid}"))
    for pid in range(8):
        for handle in range(400):
            books.learn(books.of(pid), handle, b"kernel_%d" % handle)
        books.make_room(pid)
    for pid in range(100, 160):
        for handle in range(400):
            books.learn(books.of(pid), handle, b"kernel_%d" % handle)
        books.make_room(pid)
        assert books.total <= 1_200_000
    assert [len(books.of(pid)) for pid in range(8)] == [400] * 8
    assert books.total == taken_by(books)


@pytest.mark.parametrize("owner", ["one", "another"])
def test_names_that_are_launched_stay(monkeypatch: pytest.MonkeyPatch, owner: str) -> None:
    """However many others are learned after them, of the same process or by somebody else."""
    monkeypatch.setattr(kernel_books, "OF_ALL", 3_600_000)
    books = Books(lambda pid: (1, "") if owner == "one" else (pid, ""))
    book = books.of(7)
    for handle in range(1000):
        books.launch(book, handle, f"name {handle}")
    for pid in range(7, 13):
        for handle in range(2000, 6000):
            books.learn(books.of(pid), handle, b"%d" % (handle * pid))
        books.make_room(pid)
    assert len(book.learned) < 4000
    assert list(book.launched) == list(range(1000))


def test_ranks_of_a_job_have_their_texts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 of them have room where texts of their own would take six times as much."""
    monkeypatch.setattr(kernel_books, "OF_ALL", 64 * 500 * 110 + 500 * 600)
    books = Books(lambda pid: (1, ""))
    for pid in range(64):
        for handle in range(500):
            books.learn(books.of(pid), handle, b"%d %s" % (handle, b"x" * 300))
        books.make_room(pid)
    assert {len(book) for book in books.of_pid.values()} == {500}


def test_room_is_made_in_as_many_steps_as_names_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thousands of small processes each is halved a few times, and none is looked for among all of them."""
    monkeypatch.setattr(kernel_books, "OF_ALL", 20_000 * 300)
    books = Books(lambda pid: (pid % 50, f"c{pid % 700}"))
    drops = 0
    drop = books._keep

    def counted(book: kernel_books.Book, learned: int, launched: int) -> None:
        nonlocal drops
        drops += 1
        drop(book, learned, launched)

    monkeypatch.setattr(books, "_keep", counted)
    for pid in range(5000):
        for handle in range(5):
            books.learn(books.of(pid), handle, b"%d" % (pid * 5 + handle))
    books.make_room(1)
    assert books.total <= kernel_books.OF_ALL * 3 // 4
    assert drops <= 3 * 5000
    assert books.total == taken_by(books)
