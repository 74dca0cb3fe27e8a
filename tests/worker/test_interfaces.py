"""Which interface gloo talks over: one that exists, and never loopback where other hosts are to be reached."""

import pytest

from gearshift.proto.errors import InputError
from gearshift.worker.links.interfaces import LOOPBACK, choose


@pytest.mark.parametrize("asked", ["eth99", "=^lo", "^lo", "lo,eth99"])
def test_f42_an_interface_that_is_not_there_is_named(asked):
    with pytest.raises(InputError, match=r"rank 1: GLOO_SOCKET_IFNAME=.* names no interface.* lo"):
        choose(1, asked, local=False, places=())


def test_what_exists_is_taken_as_asked():
    assert choose(0, LOOPBACK, local=False, places=()) == LOOPBACK


def test_on_one_host_loopback_does():
    assert choose(0, "", local=True, places=("tcp://192.0.2.1:5",)) == LOOPBACK


@pytest.mark.parametrize("place", ["tcp://127.0.0.1:5555", "tcp://127.0.1.1:5555", "tcp://localhost:5555"])
def test_f42_a_coordinator_behind_loopback_leads_to_no_other_host(place):
    with pytest.raises(InputError, match=r"rank 1: .*leads over loopback: set GLOO_SOCKET_IFNAME"):
        choose(1, "", local=False, places=(place, "tcp://no such host:1", ""))
