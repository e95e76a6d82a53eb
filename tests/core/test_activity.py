"""What threads report that may take long."""

import threading

import pytest

from hfscale.core.activity import activity, activity_of, threads_in


@activity("saving")
def save_to_full_disk():
    assert activity_of(threading.get_ident()) == "saving"
    raise OSError("disk full")


def test_the_innermost_activity_counts_and_ends_with_its_block():
    own = threading.get_ident()
    with activity("exchanging"):
        with pytest.raises(OSError, match="disk full"):
            save_to_full_disk()
        assert activity_of(own) == "exchanging"
    assert activity_of(own) is None


def test_each_thread_has_its_own():
    entered, done = threading.Event(), threading.Event()

    @activity("saving")
    def save():
        entered.set()
        done.wait(60)

    thread = threading.Thread(target=save)
    thread.start()
    assert entered.wait(60)
    assert threads_in("saving") == {thread.ident}
    assert activity_of(threading.get_ident()) is None
    done.set()
    thread.join()
    assert threads_in("saving") == set()
