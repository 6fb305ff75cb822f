"""Whatever a tier's requests win and lose, its switch keeps its promises."""

from hypothesis import given
from hypothesis import strategies as st

from foreword.core.switch import PAUSE_S, WINDOW, Switch

GAINS = st.floats(-10, 10, allow_nan=False)
WINS = st.floats(1e-6, 10)
PROBE_S = 5.0


@given(st.lists(WINS, max_size=200))
def test_a_tier_that_never_loses_is_never_turned_off(gains):
    switch = Switch()
    for at, gain_s in enumerate(gains):
        switch.judge(float(at), gain_s, at)
        assert switch.enabled


@given(st.lists(GAINS, max_size=60), st.lists(st.floats(-10, 0), min_size=20, max_size=20))
def test_it_is_off_within_20_requests_that_win_nothing(before, losses):
    switch = Switch()
    for at, gain_s in enumerate([*before, *losses]):
        switch.judge(float(at), gain_s, at)
    assert not switch.enabled
    assert switch.why


@given(st.lists(GAINS, min_size=WINDOW, max_size=200), WINS, st.floats(0, 1000))
def test_it_is_on_within_a_minute_of_recovery(gains, win_s, gap_s):
    """Whatever it lost, and however often it was on in between, with a read and a try each 5 s."""
    switch, now_s = Switch(), 0.0
    for at, gain_s in enumerate(gains):
        now_s += gap_s / len(gains)
        switch.judge(now_s, gain_s, at)
        switch.retry(now_s, abs(gain_s), at)
    recovered_s, num_reads = now_s, len(gains)
    while not switch.enabled:
        now_s, num_reads = now_s + PROBE_S, num_reads + 4
        switch.retry(now_s, win_s, num_reads)
        assert now_s <= recovered_s + PAUSE_S[1] + PROBE_S < recovered_s + 60
