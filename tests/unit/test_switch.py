"""A tier that loses is turned off, and on again when it would win."""

from foreword.core.switch import PAUSE_S, SOON_S, WINDOW, Switch


def turned_off(now_s=100.0, gain_s=-0.1, num_reads=50):
    switch = Switch()
    for _ in range(WINDOW):
        switch.judge(now_s, gain_s, num_reads)
    assert not switch.enabled
    return switch


def test_after_a_change_for_the_worse_it_is_off_within_a_window():
    switch = Switch()
    for at in range(100):
        switch.judge(float(at), 5.0, at)
    for at in range(WINDOW):
        assert switch.enabled
        switch.judge(100.0 + at, -0.01, 100 + at)
    assert not switch.enabled
    assert switch.why == f"the last {WINDOW} requests lost 0.12 s by it"


def test_a_few_losses_among_wins_turn_nothing_off():
    switch = Switch()
    for at in range(500):
        switch.judge(float(at), -1.0 if at % 4 == 0 else 0.5, at)
    assert switch.enabled


def test_after_a_loss_it_takes_a_pause_and_reads_to_be_on_again():
    switch = turned_off()
    switch.retry(101.0, 1.0, 60)  # too soon
    switch.retry(100.0 + PAUSE_S[0], 1.0, 50)  # nothing was read since
    switch.retry(100.0 + PAUSE_S[0], 0.0, 60)  # nothing to win
    assert not switch.enabled
    switch.retry(100.0 + PAUSE_S[0], 1.0, 60)
    assert switch.enabled
    assert switch.why == "a request would be 1 s quicker with it, as it reads now"


def test_what_only_would_not_have_helped_is_on_at_once_when_it_would():
    switch = turned_off(gain_s=0.0)
    assert switch.why.startswith("none of the last")
    switch.retry(100.0, 0.5, 50)
    assert switch.enabled


def test_what_soon_loses_again_is_off_for_longer():
    switch, now_s, pauses = turned_off(), 100.0, []
    for _ in range(6):
        pause_s = next(p for p in range(1, 100) if tried(switch, now_s + p))
        pauses.append(pause_s)
        now_s += pause_s
        for _ in range(WINDOW):
            switch.judge(now_s, -0.1, 50)
    assert pauses == [4, 8, 16, 32, 32, 32]
    assert tried(switch, now_s + PAUSE_S[1])
    now_s += PAUSE_S[1] + SOON_S + 1
    for _ in range(WINDOW):
        switch.judge(now_s, -0.1, 50)
    assert tried(switch, now_s + PAUSE_S[0])


def tried(switch, now_s):
    switch.retry(now_s, 1.0, 51)
    return switch.enabled


def test_what_was_admitted_before_it_went_off_counts_no_more():
    switch = turned_off()
    why = switch.why
    switch.judge(200.0, 7.0, 60)
    assert (switch.enabled, switch.why) == (False, why)
