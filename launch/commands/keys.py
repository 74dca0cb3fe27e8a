"""`gearshift keys`: the key file that coordinator, workers and clients of a group share."""

from pathlib import Path
from typing import Annotated

import typer

from ..console import note

EXAMPLES = """\
gearshift keys group.key

gearshift coordinator demo --listen tcp://0.0.0.0:5555 --key-file group.key
"""

KeyPath = Annotated[str, typer.Argument(metavar="FILE", help="A new file; never written over.")]


def keys(file: KeyPath = "gearshift.key") -> None:
    """Make the keys of a group: one file of mode 0600, to be copied to each host by a safe way (scp).

    Whoever holds it may join the group as coordinator, worker or client. It is needed wherever a coordinator listens
    beyond this host.
    """
    from ...proto.channel import generate_keys
    from ...proto.keys import write_keys

    pair = generate_keys()
    write_keys(Path(file), pair)
    note(f"{file} written (mode 0600); its public key is {pair.public}")
