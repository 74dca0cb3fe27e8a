"""Whether anybody listens at an address, over real sockets of this host."""

import socket
from contextlib import closing

import pytest

from gearshift.launch.command_line import run_command
from gearshift.proto.channel import reach, split_address, wait_for_listener
from gearshift.proto.errors import InputError, ServerLostError


def free_port() -> int:
    """A port nobody listens at now."""
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        return int(taken.getsockname()[1])


def test_a_listener_is_found_and_nothing_is_told() -> None:
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        wait_for_listener(f"tcp://127.0.0.1:{listener.getsockname()[1]}", 5, told.append)
        wait_for_listener(f"tcp://localhost:{listener.getsockname()[1]}", 5, told.append)
    assert told == []


def test_a_port_that_refuses_is_told_at_once_and_given_up_soon() -> None:
    told: list[str] = []
    address = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(ServerLostError, match=rf"nothing listens at {address} \(Connection refused, for 0\.05 s\)"):
        wait_for_listener(address, 0.05, told.append)
    (line,) = told  # once, though it was tried more often
    assert line.startswith(f"nothing listens at {address} (Connection refused): waiting 0.05 s")
    assert reach.STARTING_SECONDS <= 5  # what it is without a limit of one's own


def test_a_coordinator_that_starts_meanwhile_is_found() -> None:
    port = free_port()
    opened: list[socket.socket] = []

    def starts(line: str) -> None:
        opened.append(socket.create_server(("127.0.0.1", port)))

    wait_for_listener(f"tcp://127.0.0.1:{port}", 5, starts)
    assert len(opened) == 1
    opened[0].close()


def test_a_socket_connected_to_itself_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    connect = socket.socket.connect

    def from_that_port(self: socket.socket, address: tuple[str, int]) -> None:
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.bind(("127.0.0.1", port))  # as the kernel may choose by chance
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", from_that_port)
    monkeypatch.setattr(reach, "STARTING_SECONDS", 0.0)
    with pytest.raises(ServerLostError, match="nothing listens"):
        wait_for_listener(f"tcp://127.0.0.1:{port}", 5)


def test_who_cannot_be_reached_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(error: OSError) -> None:
        def connect(self: socket.socket, address: tuple[str, int]) -> None:
            raise error

        monkeypatch.setattr(socket.socket, "connect", connect)

    fails(socket.gaierror(-2, "Name or service not known"))
    with pytest.raises(ServerLostError, match="cannot reach tcp://far:5: Name or service not known"):
        wait_for_listener("tcp://far:5", 30)
    fails(OSError(113, "No route to host"))
    with pytest.raises(ServerLostError, match="No route to host"):
        wait_for_listener("tcp://10.0.0.1:5", 30)
    fails(TimeoutError())
    with pytest.raises(ServerLostError, match=r"nothing answers at tcp://10\.0\.0\.1:5 within 30 s"):
        wait_for_listener("tcp://10.0.0.1:5", 30)


@pytest.mark.parametrize(
    "address",
    [
        "tcp://127.0.0.1:0", "tcp://127.0.0.1:000", "tcp://127.0.0.1:*", "tcp://*:5998", f"tcp://{64 * chr(228)}:5",
        "127.0.0.1:5", "tcp://[::1:5", "tcp://::1]:5", "tcp://[[::1]]:5998", "tcp://[]:5", "tcp://[host]:5", "tcp://:5",
        "tcp://127.0.0.1:65536", f"tcp://127.0.0.1:{'9' * 5000}",
    ],
)  # fmt: skip
def test_an_address_that_nobody_could_have_is_refused(address: str) -> None:
    with pytest.raises(InputError):
        wait_for_listener(address, 5)


@pytest.mark.parametrize("address", ["tcp://host\x1b[31m:5", "tcp://host:5\n", "\x1b]0;tcp://host:5", "tcp://\udc80:5"])
def test_control_characters_of_an_address_do_not_reach_the_terminal(address: str) -> None:
    with pytest.raises(InputError) as refused:
        split_address(address)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("host", ["[::1]", "[fe80::1%eth0]", "[::]", "localhost", "*", "a-host.example"])
def test_hosts_keep_their_brackets(host: str) -> None:
    assert split_address(f"tcp://{host}:5998") == (host, "5998")


@pytest.mark.parametrize("command", ["run -p a", "chat"])
def test_a_command_that_finds_no_coordinator_says_so_and_ends_by_3(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reach, "STARTING_SECONDS", 0.0)
    assert run_command([*command.split(), "--connect", f"tcp://127.0.0.1:{free_port()}"]) == 3
    assert "gearshift: nothing listens at tcp://127.0.0.1:" in capsys.readouterr().err
