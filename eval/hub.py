"""Files of datasets on the Hugging Face Hub, with a quick answer where there is no network."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from huggingface_hub import constants

from .errors import UserError

#: Seconds for one address, and for the name look-up and all addresses together.
_CONNECT_SECONDS = 0.4
_PROBE_SECONDS = 0.7
_INSTEAD = "give --data-dir a folder with <task>.jsonl files or the official data.zip"


def download(repositories: Sequence[str], filename: str, revision: str) -> Path:
    """A file of the first of these dataset repositories that has it, from the local cache if it is there.

    Raises:
        UserError: no network, or no repository with that file at that revision.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    for repository in repositories:
        cached = try_to_load_from_cache(repository, filename, revision=revision, repo_type="dataset")
        if isinstance(cached, str):
            return Path(cached)
    require_network(f"{filename} of {repositories[0]}")
    failures = []
    for repository in repositories:
        try:
            return Path(hf_hub_download(repository, filename, revision=revision, repo_type="dataset"))
        except Exception as error:  # the client raises other classes with every version
            failures.append(f"{repository}: {error}")
    raise UserError(f"cannot fetch {filename} at revision {revision}; {way_out()}\n" + "\n".join(failures))


def require_network(wanted: str, instead: str = _INSTEAD) -> None:
    """Return if the Hub can be asked, else raise a UserError within a second (its own client tries for 23 s)."""
    if is_offline():
        raise UserError(f"{wanted} is not in the cache, and HF_HUB_OFFLINE is set; {way_out(instead)}")
    if not reachable(constants.ENDPOINT):
        raise UserError(f"cannot fetch {wanted}: {constants.ENDPOINT} cannot be reached; {way_out(instead)}")


def is_offline() -> bool:
    """Whether the user wants nothing but the cache."""
    return bool(constants.HF_HUB_OFFLINE)


def way_out(instead: str = _INSTEAD) -> str:
    """How to go on without the Hub: what to give instead, or a mirror, or the cache."""
    return (
        f"{instead}, name a mirror in HF_ENDPOINT, or bring the cache ({constants.HF_HUB_CACHE}) from a machine with "
        "network and set HF_HUB_OFFLINE=1"
    )


def reachable(url: str) -> bool:
    """Whether the host of this URL takes connections; True unseen behind a proxy, which alone can tell."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or {"http": 80}.get(parts.scheme, 443)
    if getproxies().keys() & {parts.scheme, "all"} and not proxy_bypass(host):
        return True
    connected: list[bool] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
            connected.append(True)
        except (OSError, UnicodeError):
            pass

    # In a thread: looking up a name cannot be given a time limit.
    thread = Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_PROBE_SECONDS)
    return bool(connected)
