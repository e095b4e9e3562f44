"""Old news is no news."""

from pilotlight.common.newest import MAX_SENDERS, PAST_LIVES, Newest


def test_overtaken_and_repeated_messages_are_no_news() -> None:
    newest = Newest()
    assert [newest.is_news("w", "a", seq) for seq in (1, 3, 2, 3, 4)] == [
        True,
        True,
        False,
        False,
        True,
    ]
    assert newest.is_news("other", "a", 1)


def test_a_new_life_counts_anew_and_the_last_one_is_over() -> None:
    newest = Newest()
    assert newest.is_news("w", "a", 9)
    assert newest.is_news("w", "b", 1)
    assert not newest.is_news("w", "a", 9)
    assert not newest.is_news("w", "a", 8)
    assert not newest.is_news("w", "b", 1)
    assert newest.is_news("w", "b", 2)


def test_a_late_message_of_an_earlier_life_does_not_silence_the_living() -> None:
    newest = Newest()
    said = [("b", 1), ("a", 900), ("b", 2), ("b", 3), ("a", 900), ("a", 899), ("b", 3), ("b", 4)]
    assert [newest.is_news("w", *one) for one in said] == [
        True,
        True,
        True,
        True,
        False,
        False,
        False,
        True,
    ]


def test_lives_of_a_release_that_does_not_count_silence_nobody() -> None:
    newest = Newest()
    assert all(newest.is_news("w", life, 0) for life in ("b", "a", "b", "b"))


def test_a_release_that_does_not_count_is_always_heard() -> None:
    newest = Newest()
    assert all(newest.is_news("w", "a", 0) for _ in range(3))


def test_it_remembers_so_many_senders_and_lives() -> None:
    newest = Newest()
    for number in range(MAX_SENDERS + 10):
        assert newest.is_news(f"w{number}", "a", 5)
    assert len(newest._heard) == MAX_SENDERS
    for life in range(3 * PAST_LIVES):
        newest.is_news("w", str(life), 1)
    assert len(newest._heard["w"].past) == PAST_LIVES
